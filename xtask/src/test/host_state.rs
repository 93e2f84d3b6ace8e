//! What of the machine's own network and mounts tests could have changed.
//!
//! Read before and after a privileged tier: tests work in namespaces of their own, so any difference
//! is a leak.

use std::{collections::BTreeSet, fs};

use anyhow::{Context, Result};

/// Names of kernel objects in the namespaces that we were started in.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HostState {
    objects: BTreeSet<String>,
}

impl HostState {
    /// Reads the state as it is now.
    pub(crate) fn read() -> Result<Self> {
        let mut objects = BTreeSet::new();
        let devices = fs::read_to_string("/proc/net/dev").context("listing interfaces")?;
        for line in devices.lines().skip(2) {
            let name = line.split(':').next().unwrap_or_default().trim();
            objects.insert(format!("interface {name}"));
        }
        if let Ok(entries) = fs::read_dir("/run/netns") {
            for entry in entries.flatten() {
                objects.insert(format!("namespace {}", entry.file_name().to_string_lossy()));
            }
        }
        if let Ok(entries) = fs::read_dir("/sys/fs/bpf") {
            for entry in entries.flatten() {
                let name = entry.file_name();
                objects.insert(format!("pinned BPF object {}", name.to_string_lossy()));
            }
        }
        let mounts = fs::read_to_string("/proc/self/mounts").context("listing mounts")?;
        for line in mounts.lines() {
            let target = line.split(' ').nth(1).unwrap_or_default();
            objects.insert(format!("mount {target}"));
        }
        Ok(Self { objects })
    }

    /// What is there now and was not before, and the other way round.
    pub(crate) fn differences(&self, now: &Self) -> Vec<String> {
        let left = now.objects.difference(&self.objects);
        let lost = self.objects.difference(&now.objects);
        left.map(|object| format!("{object} is left over"))
            .chain(lost.map(|object| format!("{object} is gone")))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(objects: &[&str]) -> HostState {
        HostState {
            objects: objects.iter().map(|&object| object.to_owned()).collect(),
        }
    }

    #[test]
    fn the_same_state_has_no_differences() {
        let now = HostState::read().unwrap();
        assert!(now.objects.contains("interface lo"));
        assert_eq!(
            now.differences(&HostState::read().unwrap()),
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_leftover_and_a_loss_are_both_told() {
        let before = state(&["interface lo", "mount /run"]);
        let now = state(&["interface lo", "interface veth1"]);
        assert_eq!(
            before.differences(&now),
            ["interface veth1 is left over", "mount /run is gone"]
        );
    }
}
