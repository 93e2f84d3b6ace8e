//! How long a worker looks for more of a stream in full flow before it sleeps.
//!
//! Falling asleep and being woken takes a processor some ten microseconds, in a virtual machine more than copying
//! 100 KiB; and who wakes us pays too. So after a turn that has moved much, the worker looks for the next events
//! without sleeping, for a while. If it sleeps in the end and is woken soon, a longer look would have been worth it;
//! if it sleeps for long, it was in vain, and the next one is shorter, down to none: so a stream that trickles
//! costs no more than without. (KVM's `halt_poll_ns` does the same for processors of guests.)

use std::time::{Duration, Instant};

/// Shorter looks aren't worth a system call.
const SHORTEST: Duration = Duration::from_micros(4);

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    longest: Duration,
    /// The next look.
    next: Duration,
    /// Until when to look, from the last turn that moved much to the next sleep.
    until: Option<Instant>,
}

impl Patience {
    /// One that looks at most so long.
    #[must_use]
    pub(super) fn new(longest: Duration) -> Self {
        Self {
            longest,
            next: longest,
            until: None,
        }
    }

    /// Much has been moved in the turn that ends now.
    pub(super) fn moved(&mut self, now: Instant) {
        self.until = Some(now + self.next);
    }

    /// Whether to look once more instead of sleeping.
    #[must_use]
    pub(super) fn is_waiting(&self, now: Instant) -> bool {
        !self.next.is_zero() && self.until.is_some_and(|until| now < until)
    }

    /// The worker slept, and has been woken now.
    pub(super) fn slept(&mut self, now: Instant) {
        let Some(until) = self.until.take() else {
            return;
        };
        if now.saturating_duration_since(until) <= self.longest {
            self.next = self.longest;
        } else {
            let shorter = self.next / 4;
            self.next = if shorter < SHORTEST {
                Duration::ZERO
            } else {
                shorter
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_micros(50);

    #[test]
    fn looks_in_vain_become_shorter_and_end_and_one_that_would_have_paid_brings_them_back() {
        let mut patience = Patience::new(LONGEST);
        let mut now = Instant::now();
        assert!(!patience.is_waiting(now), "nothing has moved");
        let mut looked = Vec::new();
        for _ in 0..5 {
            patience.moved(now);
            let start = now;
            while patience.is_waiting(now) {
                now += Duration::from_micros(1);
            }
            looked.push((now - start).as_micros());
            now += Duration::from_millis(5);
            patience.slept(now);
        }
        assert_eq!(looked, [50, 13, 0, 0, 0]);
        patience.moved(now);
        now += Duration::from_micros(30);
        patience.slept(now);
        patience.moved(now);
        assert!(patience.is_waiting(now + Duration::from_micros(49)));
        assert!(!patience.is_waiting(now + LONGEST));
    }

    #[test]
    fn a_sleep_without_a_flow_before_it_tells_nothing() {
        let mut patience = Patience::new(LONGEST);
        let now = Instant::now();
        for _ in 0..9 {
            patience.slept(now + Duration::from_secs(1));
        }
        patience.moved(now);
        assert!(patience.is_waiting(now));
    }
}
