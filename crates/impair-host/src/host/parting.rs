//! The end of a target: taken note of, carried out without the lock, and taken note of again.
//!
//! The kernel waits for its readers before a program is off an interface and before a TAP is gone, some 20 ms each, which other targets have
//! nothing to do with. Until it is done the target is there, as draining; who wants to impair it anew, or to end it too,
//! waits ([`super::SharedHost`]).

use std::{mem, sync::Arc};

use sandwire_datapath::divert::Diversion;

use super::{Host, Key, Leaving};
use crate::{
    control::{State, Target},
    error::Error,
    namespace::Namespace,
    state::Memory,
    worker::{Id, Worker},
};

/// A target whose end is to be carried out.
#[derive(Debug)]
pub(crate) struct Parting {
    key: Key,
    id: Id,
    target: Target,
    namespace: Arc<Namespace>,
    diversion: Arc<Diversion>,
    worker: Arc<Worker>,
    memory: Memory,
    /// Why it has ended by itself: that is told until somebody clears it.
    reason: Option<String>,
}

impl Parting {
    /// Takes the programs off the interface, then the TAPs away, and forgets the target: whoever is killed before has the next start take
    /// it up again. Goes on after a failure; the first counts.
    pub(crate) fn carry_out(&self) -> Result<(), Error> {
        let (inode, ifindex) = self.key;
        let detached = self.namespace.inside(|| Ok(self.diversion.detach()?));
        let removed = self.worker.remove(self.id).map(drop);
        let forgotten = self.memory.remove(inode, ifindex);
        tracing::info!(target = %self.target, "impaired no more");
        detached.and(removed).and(forgotten)
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
    }
}

impl Host {
    /// Takes note that a target ends, unless somebody has done so already.
    pub(super) fn part(&mut self, key: Key, reason: Option<String>) -> Option<Parting> {
        let entry = self.entries.get_mut(&key)?;
        if mem::replace(&mut entry.is_parting, true) {
            return None;
        }
        entry.state = State::Draining;
        Some(Parting {
            key,
            id: entry.id,
            target: entry.remembered.target.clone(),
            namespace: entry.namespace.clone(),
            diversion: entry.diversion.clone(),
            worker: self.workers[entry.worker].clone(),
            memory: self.memory.clone(),
            reason,
        })
    }

    /// The same, and leaves it to whoever has the lock.
    pub(super) fn part_later(&mut self, key: Key, reason: Option<String>) {
        let parting = self.part(key, reason);
        self.partings.extend(parting);
    }

    /// What is to be carried out by whoever has the lock.
    pub(crate) fn take_partings(&mut self) -> Vec<Parting> {
        mem::take(&mut self.partings)
    }

    /// Takes note that nothing of it is left.
    pub(crate) fn parted(&mut self, parting: &Parting) {
        let found = self.entries.get_mut(&parting.key);
        let Some(entry) = found.filter(|entry| entry.id == parting.id) else {
            return;
        };
        if let Some(reason) = parting.reason.clone() {
            entry.state = State::Ended { reason };
            entry.is_parting = false;
        } else {
            self.entries.remove(&parting.key);
        }
    }

    /// Whether somebody carries the end of that target out, whose key that was just now.
    pub(super) fn is_parting(&self, target: &Target, key: Option<Key>) -> bool {
        self.entries.iter().any(|(found, entry)| {
            entry.is_parting
                && (Some(*found) == key || entry.remembered.target.is_same_interface(target))
        })
    }

    /// Whether somebody carries the end of that one out.
    pub(super) fn is_parting_with(&self, leaving: &Leaving) -> bool {
        self.has(leaving) && self.entries[&leaving.key].is_parting
    }

    pub(super) fn is_any_parting(&self) -> bool {
        self.entries.values().any(|entry| entry.is_parting)
    }
}
