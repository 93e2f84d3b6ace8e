//! What a guest costs that does nothing: the service's own memory.

use std::fs;

use anyhow::{Context, Result};
use sandwire_vsock_guest::Settings;

use super::{
    backend::{Backend, Program},
    throughput::precise,
};

/// KiB of the service for one of `vms` idle guests that are all attached.
pub(super) fn measure(vms: usize) -> Result<f64> {
    let none = Backend::start(Program::sandwire(), 0)?;
    let before = own_kibibytes(none.pid())?;
    drop(none);
    let backend = Backend::start(Program::sandwire(), vms)?;
    let settings = Settings {
        memory: vec![(0, 4 << 20)],
        transmit_slots: 16,
        ..Settings::default()
    };
    let guests = backend.boot(&settings)?;
    let after = own_kibibytes(backend.pid())?;
    let vms = u64::try_from(guests.len().max(1))?;
    Ok(precise(after.saturating_sub(before)) / precise(vms))
}

/// Proportional memory of a process without what it shares with guests, which is shared memory.
fn own_kibibytes(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let all = field(&text, "Pss:").with_context(|| format!("{path} has no Pss"))?;
    let shared = field(&text, "Pss_Shmem:").with_context(|| format!("{path} has no Pss_Shmem"))?;
    Ok(all - shared)
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_shared_with_guests_does_not_count() {
        let text = "Rss:  900 kB\nPss:    500 kB\nPss_Anon:  300 kB\nPss_Shmem:    120 kB\n";
        assert_eq!(field(text, "Pss:"), Some(500));
        assert_eq!(field(text, "Pss_Shmem:"), Some(120));
        assert_eq!(field(text, "Pss_File:"), None);
        assert!(own_kibibytes(std::process::id()).unwrap() > 0);
    }
}
