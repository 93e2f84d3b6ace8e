//! Deadlines of one worker.
//!
//! An entry is only a reminder to look: whoever set it knows whether the deadline still stands. So nothing
//! is ever removed before its time, and a connection has few entries: one more only if it must be sooner.

use std::{cmp::Reverse, collections::BinaryHeap, time::Instant};

/// Reminders, soonest first.
#[derive(Debug, Default)]
pub struct Timers {
    heap: BinaryHeap<Reverse<(Instant, u64)>>,
}

impl Timers {
    /// Reminds of `token` at `when`.
    pub fn set(&mut self, when: Instant, token: u64) {
        self.heap.push(Reverse((when, token)));
    }

    /// When the next one is due.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((when, _))| *when)
    }

    /// Takes one that is due.
    pub fn take_due(&mut self, now: Instant) -> Option<u64> {
        self.next().filter(|when| *when <= now)?;
        self.heap.pop().map(|Reverse((_, token))| token)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn reminders_come_in_order_and_not_before_their_time() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut timers = Timers::default();
        for (seconds, token) in [(3, 30), (1, 10), (2, 20)] {
            timers.set(after(seconds), token);
        }
        assert_eq!(timers.take_due(start), None);
        assert_eq!(timers.next(), Some(after(1)));
        assert_eq!(timers.take_due(after(2)), Some(10));
        assert_eq!(timers.take_due(after(2)), Some(20));
        assert_eq!(timers.take_due(after(2)), None);
        assert_eq!(timers.take_due(after(9)), Some(30));
        assert_eq!(timers.next(), None);
    }
}
