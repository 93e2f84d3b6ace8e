//! Looks whether engines, namespaces, interfaces and programs are still there.
//!
//! Of a namespace that goes, or a program that somebody takes off, nobody tells a process, so it has to look. At a time it looks at
//! some targets only: what that takes doesn't grow with their number, and nobody waits long for the lock.

use std::{
    collections::BTreeMap,
    ops::Bound,
    sync::{MutexGuard, PoisonError},
};

use sandwire_kernel_net::{
    interface::{self, InterfaceIndex},
    netlink::Socket,
};

use super::{Entry, Host, Key};
use crate::error::Error;

/// Targets that are looked at at a time.
const AT_A_TIME: usize = 64;

impl Host {
    /// Starts engines anew that have ended, and has the next targets end whose interfaces or namespaces are gone.
    pub(crate) fn look(&mut self) {
        self.revive();
        let next = next_of(&self.entries, self.looked);
        self.looked = next.get(AT_A_TIME - 1).copied();
        for key in next {
            self.look_at(key);
        }
    }

    fn look_at(&mut self, key: Key) {
        let Some(entry) = self.entries.get(&key).filter(|entry| !entry.is_parting) else {
            return;
        };
        let target = &entry.remembered.target;
        if entry.is_torn_down() {
            self.drop_torn_down(key);
        } else if entry.is_impaired() {
            match entry.is_whole() {
                Ok(true) => {}
                Ok(false) => self.end(key),
                Err(error) => tracing::warn!(%target, %error, "can't be looked at"),
            }
        }
    }

    fn end(&mut self, key: Key) {
        let Some(entry) = self.entries.get(&key) else {
            return;
        };
        let reason = if !entry.has_interface() {
            "the interface is gone"
        } else if !entry.has_taps() {
            "somebody has deleted a TAP of ours"
        } else {
            "somebody has detached our programs"
        };
        tracing::warn!(target = %entry.remembered.target, reason, "the diversion has ended");
        self.part_later(key, Some(reason.to_owned()));
    }
}

/// Those behind that one, or the first ones.
fn next_of<T>(all: &BTreeMap<Key, T>, looked: Option<Key>) -> Vec<Key> {
    let after = looked.map_or(Bound::Unbounded, Bound::Excluded);
    let next = all.range((after, Bound::Unbounded));
    next.take(AT_A_TIME).map(|(key, _)| *key).collect()
}

impl Entry {
    /// What asks about interfaces of its namespace. An answer that nobody has waited for is not taken for another.
    pub(super) fn lock_route(&self) -> MutexGuard<'_, Socket> {
        self.route.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the interface is still in its namespace, with our programs on it, and both TAPs are. Links go along with an interface
    /// that moves to another namespace, where the TAPs' numbers are nobody's, or somebody else's.
    fn is_whole(&self) -> Result<bool, Error> {
        let mut socket = self.lock_route();
        let own = InterfaceIndex(self.remembered.ifindex);
        let taps = self.taps.iter().map(|(_, index)| *index);
        for index in taps.chain([own]) {
            if interface::find_by_index(&mut socket, index)?.is_none() {
                return Ok(false);
            }
        }
        Ok(self.diversion.is_attached(&mut socket)?)
    }

    /// Whether the interface is there, whatever it is called now.
    fn has_interface(&self) -> bool {
        let index = InterfaceIndex(self.remembered.ifindex);
        let found = interface::find_by_index(&mut self.lock_route(), index);
        found.is_ok_and(|found| found.is_some())
    }

    /// Whether both TAPs are there.
    fn has_taps(&self) -> bool {
        let is_there = |(name, index): &(String, InterfaceIndex)| {
            let found = interface::find(&mut self.lock_route(), name);
            found.is_ok_and(|found| found.is_some_and(|found| found.index == *index))
        };
        self.taps.iter().all(is_there)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_looked_at_by_and_by_also_those_that_come_meanwhile() {
        let mut all: BTreeMap<Key, ()> = (0..150).map(|number| ((7, number), ())).collect();
        let mut looked = None;
        let mut counts = Vec::new();
        let mut seen = BTreeMap::new();
        for _ in 0..6 {
            let next = next_of(&all, looked);
            looked = next.get(AT_A_TIME - 1).copied();
            counts.push(next.len());
            for key in next {
                *seen.entry(key).or_insert(0) += 1;
            }
            all.insert((1, 0), ());
            all.insert((9, 0), ());
            // The one that was looked at last may be gone.
            all.remove(&(7, 63));
        }
        assert_eq!(counts, [64, 64, 23, 64, 64, 23]);
        assert!(all.keys().all(|key| seen.contains_key(key)));
        assert!(next_of(&BTreeMap::<Key, ()>::new(), None).is_empty());
    }
}
