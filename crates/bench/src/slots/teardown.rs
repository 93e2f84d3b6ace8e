//! Time to tear slots down until their devices are gone, amortised.

use anyhow::Result;

use super::{Round, with_daemon};
use crate::{
    daemon_process::{Families, pool},
    record::Record,
};

/// Fills a pool, deletes it, and waits until the last device is gone.
pub(super) fn run(round: &Round, record: &mut Record) -> Result<()> {
    let slots = round.sizes.teardown_slots;
    let step = round.step(&format!("tear down {slots} slots"), slots);
    let took = with_daemon(|daemon| {
        let spec = pool(slots, Families::Dual)?;
        daemon.fill(&spec, &step)?;
        daemon.delete(&spec.name)
    })?;
    let milliseconds = took.as_secs_f64() * 1000.0 / f64::from(slots);
    record.add("teardown", "teardown_per_slot", "ms", &[milliseconds]);
    Ok(())
}
