//! Time to adopt all slots after the daemon was killed.

use anyhow::{Result, ensure};
use sandwire_api::lease::AcquireLease;

use super::{Round, with_daemon};
use crate::{
    daemon_process::{DaemonProcess, Families, pool},
    record::Record,
};

/// One of so many slots is leased when the daemon is killed.
const LEASED_SHARE: u32 = 10;

/// Fills a large pool, leases some of it, kills the daemon, and waits until a new one is ready.
pub(super) fn run(round: &Round, record: &mut Record) -> Result<()> {
    let slots = round.sizes.large_slots;
    let leased = slots / LEASED_SHARE;
    let step = round.step(&format!("adopt {slots} slots"), slots);
    let seconds = with_daemon(|daemon| {
        let spec = pool(slots - leased, Families::Dual)?;
        daemon.fill(&spec, &step)?;
        let request = AcquireLease {
            pool: spec.name.clone(),
            name: None,
            clone_address: None,
            ttl_seconds: None,
            policy: None,
            process: false,
            vsock: None,
            attach: None,
        };
        let mut leases = Vec::new();
        for _ in 0..leased {
            leases.push(daemon.client().acquire(&request)?.lease);
        }
        daemon.wait_full(&spec.name, spec.size)?;
        daemon.kill()?;
        let took = daemon.restart()?;
        let now = daemon.slots(&spec.name)?;
        ensure!(
            now.ready == spec.size && now.leased == leased && now.building == 0,
            "not every slot was adopted: {now:?}"
        );
        release_all(daemon, leases.iter().map(|lease| &lease.name))?;
        daemon.delete(&spec.name)?;
        Ok(took.as_secs_f64())
    })?;
    record.add("adopt", "adopt_ready", "s", &[seconds]);
    Ok(())
}

fn release_all<'a>(
    daemon: &DaemonProcess,
    names: impl Iterator<Item = &'a sandwire_api::name::Name>,
) -> Result<()> {
    for name in names {
        daemon.client().release(name, None)?;
    }
    Ok(())
}
