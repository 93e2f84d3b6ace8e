//! Engines whose threads have panicked, started anew.
//!
//! With its thread an engine's TAPs are gone: packets of its targets are dropped or pass, as was said of each. The
//! packets that were under way are lost.

use std::sync::Arc;

use super::{Host, Key};
use crate::{control::State, worker::Worker};

impl Host {
    /// Starts engines anew that have ended, and has them take up their targets again.
    pub(super) fn revive(&mut self) {
        for number in 0..self.workers.len() {
            if !self.workers[number].has_ended() {
                continue;
            }
            match Worker::start(number, self.settings.limits) {
                Ok(worker) => self.workers[number] = Arc::new(worker),
                Err(error) => {
                    tracing::error!(engine = number, %error, "an engine has ended, and can't be started anew; trying again");
                    continue;
                }
            }
            tracing::error!(engine = number, "an engine had ended, and was started anew");
            let lost = self
                .entries
                .iter()
                .filter(|(_, entry)| entry.worker == number);
            let lost: Vec<Key> = lost.map(|(key, _)| *key).collect();
            for key in lost {
                self.take_up_lost(key);
            }
        }
    }

    /// Takes up a target again whose engine had ended; one that was about to end ends.
    fn take_up_lost(&mut self, key: Key) {
        let state = self.entries.get(&key).map(|entry| entry.state.clone());
        match state {
            Some(State::Impaired) => {}
            Some(State::Draining) => return self.part_later(key, None),
            Some(State::Ended { .. }) | None => return,
        }
        let Some(mut entry) = self.entries.remove(&key) else {
            return;
        };
        let target = entry.remembered.target.clone();
        match self.take_up(&entry.remembered) {
            Ok(()) => tracing::info!(%target, "impaired again"),
            Err(error) => {
                tracing::error!(%target, %error, "not impaired any more");
                self.give_up(&entry.remembered, &error);
                entry.state = State::Ended {
                    reason: format!("its engine failed, and it can't be taken up again: {error}"),
                };
                self.entries.insert(key, entry);
            }
        }
    }
}
