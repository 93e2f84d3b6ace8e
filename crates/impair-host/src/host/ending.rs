//! The service ends, and with it all diversions: an interface whose diversion stayed would be without network.

use std::{mem, thread};

use super::{Entry, Host, Key, Leaving};
use crate::error::Error;

/// Diversions that are taken away at a time: the kernel has each wait for other processors.
const TOGETHER: usize = 16;

impl Host {
    /// Begins to end all; with those that can't, goes on. What somebody else asks for from then on would be left behind.
    pub(crate) fn begin_clear_all(&mut self) -> Vec<Leaving> {
        self.is_ending = true;
        self.revive();
        let keys: Vec<Key> = self.entries.keys().copied().collect();
        keys.into_iter()
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

    /// Takes away what is still there, with its packets. An end is waited for a while, so all begin before the first is.
    pub(crate) fn flush_all(&mut self) {
        let keys: Vec<Key> = self.entries.keys().copied().collect();
        let mut leaving = Vec::new();
        for key in keys {
            match self.begin_leaving(key, true) {
                Ok(begun) => leaving.extend(begun),
                Err(error) => tracing::error!(%error, "an engine can't flush its packets"),
            }
        }
        for one in leaving {
            let _ = one.wait();
        }
        // Also where the engine is gone: without its TAPs the diversion would leave the interface without network.
        let entries: Vec<Entry> = mem::take(&mut self.entries).into_values().collect();
        let take_away = |entries: &[Entry]| {
            for entry in entries {
                if let Err(error) = self.take_away(entry) {
                    tracing::error!(%error, "a diversion can't be taken away");
                }
            }
        };
        thread::scope(|scope| {
            for part in entries.chunks(entries.len().div_ceil(TOGETHER).max(1)) {
                scope.spawn(move || take_away(part));
            }
        });
    }
}
