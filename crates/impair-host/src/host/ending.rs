//! The service ends, and with it all diversions: an interface whose diversion stayed would be without network.

use super::{Host, Key, Leaving, parting::Parting};
use crate::error::Error;

impl Host {
    /// Begins to end all; with those that can't, goes on. What somebody else asks for from then on would be left behind.
    pub(super) fn begin_clear_all(&mut self) -> Vec<Leaving> {
        self.is_ending = true;
        self.revive();
        self.keys()
            .into_iter()
            .filter_map(|key| match self.begin_leaving(key, false) {
                Err(Error::Draining { .. }) => self.join(key),
                begun => begun.ok().flatten(),
            })
            .collect()
    }

    /// Waits with whoever has begun to end the impairment of a target.
    fn join(&self, key: Key) -> Option<Leaving> {
        let entry = self.entries.get(&key)?;
        let done = self.workers[entry.worker].drain(entry.id, false).ok()?;
        let id = entry.id;
        Some(Leaving { key, id, done })
    }

    /// Drops the packets of all that are still there. An end is waited for a while, so all begin before the first is.
    pub(super) fn begin_flush_all(&mut self) -> Vec<Leaving> {
        let mut leaving = Vec::new();
        for key in self.keys() {
            match self.begin_leaving(key, true) {
                Ok(begun) => leaving.extend(begun),
                Err(error) => tracing::error!(%error, "an engine can't flush its packets"),
            }
        }
        leaving
    }

    /// Has all end that are still there.
    pub(super) fn part_all(&mut self) -> Vec<Parting> {
        let keys = self.keys();
        keys.into_iter()
            .filter_map(|key| self.part(key, None))
            .collect()
    }

    fn keys(&self) -> Vec<Key> {
        self.entries.keys().copied().collect()
    }
}
