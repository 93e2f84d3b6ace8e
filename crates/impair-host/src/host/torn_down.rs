//! Targets whose network namespaces are no longer where they were: given up, since a namespace lives as long as it is
//! held here.
//!
//! The file of a namespace says whether it is still wanted: a slot's, and one that a user named, as of `ip netns`. The
//! file of a process (`/proc/PID/ns/net`) says nothing: others may be in the namespace when the process has ended.

use std::path::Path;

use super::{Entry, Host, Key};
use crate::{
    control::{RefusalCode, Target},
    namespace::Namespace,
};

impl Host {
    /// Gives up a target whose namespace has no file any more, or one that leads to another.
    pub(super) fn drop_torn_down(&mut self, key: Key) {
        let Some(entry) = self.entries.get(&key) else {
            return;
        };
        let target = &entry.remembered.target;
        if entry.is_of_lease() {
            tracing::info!(%target, "its slot has been torn down");
        } else {
            tracing::info!(%target, "the file of its network namespace is gone, or leads to another now");
        }
        self.part_later(key, None);
    }

    /// Takes away what was impaired by the target's name, for a lease, before that led to another interface.
    pub(super) fn drop_replaced(&mut self, target: &Target, key: Key) {
        let is_replaced = |(other, entry): &(&Key, &Entry)| {
            let known = &entry.remembered.target;
            let is_same = known.is_same_interface(target);
            entry.is_of_lease() && !entry.is_parting && is_same && **other != key
        };
        let replaced = self.entries.iter().filter(is_replaced);
        let replaced: Vec<Key> = replaced.map(|(key, _)| *key).collect();
        for key in replaced {
            self.drop_torn_down(key);
        }
    }
}

impl Entry {
    /// Whether its namespace has no file any more, or another has it.
    pub(super) fn is_torn_down(&self) -> bool {
        let netns = self.remembered.target.netns.as_deref();
        let Some(netns) = netns.filter(|netns| self.is_of_lease() || !is_of_process(netns)) else {
            return false;
        };
        match Namespace::open(Some(netns)) {
            Ok(namespace) => namespace.inode != self.remembered.inode,
            Err(error) => matches!(error.code(), RefusalCode::NotFound | RefusalCode::Invalid),
        }
    }
}

/// Whether the file goes with a process, and not with its namespace.
fn is_of_process(netns: &Path) -> bool {
    netns.starts_with("/proc")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_process_is_told_from_that_of_a_namespace() {
        assert!(is_of_process(Path::new("/proc/4711/ns/net")));
        assert!(!is_of_process(Path::new("/run/netns/proc")));
        assert!(!is_of_process(Path::new("/process/web")));
    }
}
