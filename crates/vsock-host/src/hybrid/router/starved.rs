//! Relays that wait for what others have, and when they try again.
//!
//! What a relay lacks, memory of its guest's or of everybody's or descriptors, its guest's other relays lack too. So after a
//! pause one of them tries again. Once it has what it wanted two do at once, then four, and so on: however many relays of a guest
//! wait, few try in vain. They come in turn, and none is left out: as long as one waits, there is a time of the next try, or some
//! are trying. One whose sockets have something to tell meanwhile goes on without being told.

use std::{
    collections::{BTreeSet, HashMap},
    ops::Bound,
    time::{Duration, Instant},
};

use super::{Entry, Router, connection::Stage};
use crate::address::VmKey;

/// Between tries in vain.
const PAUSE: Duration = Duration::from_millis(50);

/// Relays that wait, guest by guest.
#[derive(Debug, Default)]
pub(super) struct Starved {
    guests: HashMap<VmKey, Guest>,
}

#[derive(Debug, Default)]
struct Guest {
    waiting: BTreeSet<u64>,
    /// Those that have been told and haven't had their turn.
    trying: BTreeSet<u64>,
    /// Who was told last.
    last: u64,
    /// How many are told next. More than one is only after tries that weren't in vain.
    together: usize,
    /// When; not while some are trying.
    at: Option<Instant>,
    /// Whether one has starved since some were told last.
    in_vain: bool,
}

impl Starved {
    /// When the next ones try again.
    pub(super) fn next(&self) -> Option<Instant> {
        self.guests.values().filter_map(|guest| guest.at).min()
    }

    /// A relay has had a turn, and starved or didn't.
    pub(super) fn turned(&mut self, vm: &VmKey, number: u64, is_starved: bool, now: Instant) {
        if is_starved && !self.guests.contains_key(vm) {
            self.guests.insert(vm.clone(), Guest::default());
        }
        let Some(guest) = self.guests.get_mut(vm) else {
            return;
        };
        guest.trying.remove(&number);
        if is_starved {
            guest.waiting.insert(number);
            guest.in_vain = true;
        } else {
            guest.waiting.remove(&number);
        }
        if !guest.goes_on(now) {
            self.guests.remove(vm);
        }
    }

    /// A relay is no more.
    pub(super) fn forget(&mut self, vm: &VmKey, number: u64, now: Instant) {
        self.turned(vm, number, false, now);
    }

    /// Those that are to have a turn now; each has to be reported by [`Self::turned`] or [`Self::forget`].
    fn due(&mut self, now: Instant) -> Vec<(VmKey, u64)> {
        let mut found = Vec::new();
        for (vm, guest) in &mut self.guests {
            if guest.at.is_some_and(|at| at <= now) {
                guest.at = None;
                for _ in 0..guest.together {
                    let Some(number) = guest.take() else { break };
                    found.push((vm.clone(), number));
                }
            }
        }
        found
    }
}

impl Guest {
    /// Says when the next ones try, once all that were told have had their turn. Whether there are any still.
    fn goes_on(&mut self, now: Instant) -> bool {
        if self.trying.is_empty() {
            if std::mem::take(&mut self.in_vain) {
                // A pause that has begun isn't put off.
                if self.at.is_none() || self.together > 1 {
                    self.at = Some(now + PAUSE);
                }
                self.together = 1;
            } else if self.at.is_none() {
                self.together = self.together.saturating_mul(2);
                self.at = Some(now);
            }
        }
        !(self.waiting.is_empty() && self.trying.is_empty())
    }

    /// The one whose turn it is after the last one.
    fn take(&mut self) -> Option<u64> {
        let after = (Bound::Excluded(self.last), Bound::Unbounded);
        let mut next = self.waiting.range(after).chain(&self.waiting);
        self.last = *next.next()?;
        self.waiting.remove(&self.last);
        self.trying.insert(self.last);
        Some(self.last)
    }
}

impl Router {
    /// Has starved relays try again whose time has come.
    pub(super) fn feed(&mut self, now: Instant) {
        for (vm, number) in self.starved.due(now) {
            if let Some(Entry::Connection(connection)) = self.entries.get_mut(&number)
                && let Stage::Relaying { queued, .. } = &mut connection.stage
                && !std::mem::replace(queued, true)
            {
                self.run.push(&vm, number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(name: &str) -> VmKey {
        VmKey {
            tenant: 0,
            lease: name.parse().expect("a name"),
        }
    }

    fn told(starved: &mut Starved, now: Instant) -> Vec<u64> {
        let due = starved.due(now).into_iter();
        due.map(|(_, number)| number).collect()
    }

    #[test]
    fn in_vain_one_of_a_guest_tries_after_each_pause_and_each_comes_in_turn() {
        let (mut starved, web, mut now) = (Starved::default(), guest("web"), Instant::now());
        for number in 1..=1000 {
            starved.turned(&web, number, true, now);
        }
        let mut order = Vec::new();
        for _ in 0..2000 {
            assert_eq!(starved.next(), Some(now + PAUSE));
            assert!(told(&mut starved, now).is_empty());
            now += PAUSE;
            let due = told(&mut starved, now);
            assert_eq!(starved.next(), None, "it hasn't had its turn");
            starved.turned(&web, due[0], true, now);
            order.extend(due);
        }
        let twice: Vec<u64> = (1..=1000).chain(1..=1000).collect();
        assert_eq!(order, twice);
    }

    #[test]
    fn all_go_on_at_once_where_there_is_enough() {
        let (mut starved, web, now) = (Starved::default(), guest("web"), Instant::now());
        for number in 1..=100 {
            starved.turned(&web, number, true, now);
        }
        let now = now + PAUSE;
        let mut counts = Vec::new();
        while starved.next().is_some_and(|at| at <= now) {
            let due = told(&mut starved, now);
            counts.push(due.len());
            for number in due {
                starved.turned(&web, number, false, now);
            }
        }
        assert_eq!(counts, [1, 2, 4, 8, 16, 32, 37]);
        assert!(starved.guests.is_empty());
    }

    #[test]
    fn what_is_enough_for_some_ends_with_the_first_in_vain() {
        let (mut starved, web, now) = (Starved::default(), guest("web"), Instant::now());
        for number in 1..=100 {
            starved.turned(&web, number, true, now);
        }
        let now = now + PAUSE;
        let due = told(&mut starved, now);
        starved.turned(&web, due[0], false, now);
        let due = told(&mut starved, now);
        starved.turned(&web, due[0], true, now);
        assert_eq!(starved.next(), None, "the other one is trying");
        starved.turned(&web, due[1], false, now);
        assert_eq!(starved.next(), Some(now + PAUSE));
        // Others that starve don't put the try off.
        starved.turned(&web, 200, true, now + PAUSE);
        assert_eq!(told(&mut starved, now + PAUSE), [4]);
    }

    #[test]
    fn who_starves_while_others_go_on_makes_them_pause() {
        let (mut starved, web, now) = (Starved::default(), guest("web"), Instant::now());
        for number in 1..=3 {
            starved.turned(&web, number, true, now);
        }
        let now = now + PAUSE;
        assert_eq!(told(&mut starved, now), [1]);
        starved.turned(&web, 1, false, now);
        assert_eq!(starved.next(), Some(now));
        starved.turned(&web, 1, true, now);
        assert_eq!(starved.next(), Some(now + PAUSE));
        assert_eq!(told(&mut starved, now + PAUSE), [2]);
    }

    #[test]
    fn one_that_is_closed_holds_up_no_other_and_guests_are_apart() {
        let (mut starved, now) = (Starved::default(), Instant::now());
        let [web, batch] = ["web", "batch"].map(guest);
        for (vm, number) in [(&web, 1), (&web, 2), (&batch, 3)] {
            starved.turned(vm, number, true, now);
        }
        let now = now + PAUSE;
        let mut due = told(&mut starved, now);
        due.sort_unstable();
        assert_eq!(due, [1, 3]);
        starved.turned(&batch, 3, true, now);
        starved.forget(&web, 1, now);
        assert_eq!(told(&mut starved, now), [2]);
        starved.forget(&web, 2, now);
        starved.forget(&batch, 3, now);
        assert!(starved.guests.is_empty() && starved.next().is_none());
    }
}
