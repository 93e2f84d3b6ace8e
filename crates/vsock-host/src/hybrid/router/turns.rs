//! Whose turn it is: guest by guest, so that one with many connections holds up no other.

use std::collections::{HashMap, VecDeque};

use super::Router;
use crate::address::VmKey;

/// Bytes and relays of one guest, until it is the next one's turn. A relay begun is ended, after 1 MiB each way.
const TURN_BYTES: u64 = 1024 * 1024;
const TURN_RELAYS: usize = 64;
/// Connections accepted of one guest, until it is the next one's turn: at all of its ports.
const TURN_ACCEPTS: usize = 64;

/// Connections of a guest that are accepted: each has a listener for each port of its rules.
#[derive(Debug, Default)]
pub(super) struct Accepts {
    round: u64,
    taken: usize,
}

impl Accepts {
    /// Whether there may be one more in this round. Who has to wait is reported again in the next.
    pub(super) fn take(&mut self, round: u64) -> bool {
        if self.round != round {
            *self = Self { round, taken: 0 };
        }
        let may = self.taken < TURN_ACCEPTS;
        self.taken += usize::from(may);
        may
    }
}

/// Relays that have something to do.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Guests that have any, each once, and which.
    guests: VecDeque<VmKey>,
    relays: HashMap<VmKey, VecDeque<u64>>,
}

impl Turns {
    pub(super) fn is_empty(&self) -> bool {
        self.guests.is_empty()
    }

    /// Puts a relay behind its guest's others.
    pub(super) fn push(&mut self, vm: &VmKey, number: u64) {
        match self.relays.get_mut(vm) {
            Some(relays) => relays.push_back(number),
            None => {
                self.relays.insert(vm.clone(), VecDeque::from([number]));
                self.guests.push_back(vm.clone());
            }
        }
    }

    /// Takes the next guest out, with its relays.
    fn take(&mut self) -> Option<(VmKey, VecDeque<u64>)> {
        let vm = self.guests.pop_front()?;
        let relays = self.relays.remove(&vm)?;
        Some((vm, relays))
    }

    /// Puts those back whose turn hasn't come, before what has come meanwhile.
    fn put_back(&mut self, vm: &VmKey, mut relays: VecDeque<u64>) {
        if relays.is_empty() {
            return;
        }
        if let Some(newer) = self.relays.get_mut(vm) {
            relays.append(newer);
            *newer = relays;
        } else {
            self.relays.insert(vm.clone(), relays);
            self.guests.push_back(vm.clone());
        }
    }
}

impl Router {
    /// Gives each guest that has something to do one turn.
    pub(super) fn turns(&mut self) {
        for _ in 0..self.run.guests.len() {
            let Some((vm, mut relays)) = self.run.take() else {
                return;
            };
            let (mut bytes, mut turned) = (0, 0);
            while bytes < TURN_BYTES
                && turned < TURN_RELAYS
                && let Some(number) = relays.pop_front()
            {
                bytes += self.turn(number);
                turned += 1;
            }
            self.run.put_back(&vm, relays);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_with_many_ports_is_let_in_no_more_often_than_one_with_few() {
        let mut accepts = Accepts::default();
        for round in [1, 2, 7] {
            let calls = 256 * TURN_ACCEPTS;
            let taken = (0..calls).filter(|_| accepts.take(round)).count();
            assert_eq!(taken, TURN_ACCEPTS, "round {round}");
        }
    }
}
