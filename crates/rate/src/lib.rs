//! How often something may happen, and of whom how often it was left out. Pure: time is an argument.

mod accounts;

use std::time::{Duration, Instant};

pub use self::accounts::Accounts;

/// So many at once, and then one each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// How many at once, after long enough a rest; none is nothing ever.
    pub at_once: u32,
    /// How long it takes until one more may happen.
    pub each: Duration,
}

impl Share {
    /// A second's worth at once, and then so many a second; at least one.
    #[must_use]
    pub fn per_second(count: u32) -> Self {
        let at_once = count.max(1);
        Self {
            at_once,
            each: Duration::from_secs(1) / at_once,
        }
    }
}

/// What is left of a share.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    share: Share,
    /// When it will be the whole share again.
    whole: Instant,
}

impl Allowance {
    /// A whole one.
    #[must_use]
    pub fn new(share: Share, now: Instant) -> Self {
        Self { share, whole: now }
    }

    /// Whether it may happen once more now.
    #[must_use]
    pub fn has_one(&self, now: Instant) -> bool {
        self.after_one(now).is_some()
    }

    /// Takes one, if there is one.
    pub fn take(&mut self, now: Instant) -> bool {
        let after = self.after_one(now);
        self.whole = after.unwrap_or(self.whole);
        after.is_some()
    }

    /// How long it has been the whole share; none while it isn't.
    #[must_use]
    pub fn whole_for(&self, now: Instant) -> Option<Duration> {
        now.checked_duration_since(self.whole)
    }

    /// When it would be the whole share again with one more taken now, if there is one.
    fn after_one(&self, now: Instant) -> Option<Instant> {
        let after = self.whole.max(now) + self.share.each;
        let most = self.share.each * self.share.at_once;
        (after.saturating_duration_since(now) <= most).then_some(after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_s_worth_at_once_and_then_the_rate() {
        let start = Instant::now();
        let mut allowance = Allowance::new(Share::per_second(10), start);
        let at_once = (0..100).filter(|_| allowance.take(start)).count();
        assert_eq!(at_once, 10);
        let over_two_seconds = (0..2000)
            .filter(|millisecond| allowance.take(start + Duration::from_millis(*millisecond)))
            .count();
        assert_eq!(over_two_seconds, 19);
    }

    #[test]
    fn it_is_whole_again_after_a_rest_and_no_more_than_whole() {
        let start = Instant::now();
        let each = Duration::from_secs(4);
        let mut allowance = Allowance::new(Share { at_once: 2, each }, start);
        assert!(allowance.take(start) && allowance.take(start));
        assert!(!allowance.has_one(start) && !allowance.take(start));
        assert_eq!(allowance.whole_for(start), None);
        let rested = start + 100 * each;
        assert_eq!(allowance.whole_for(rested), Some(98 * each));
        let again = (0..5).filter(|_| allowance.take(rested)).count();
        assert_eq!(again, 2);
    }

    #[test]
    fn nothing_at_once_is_nothing_ever_and_no_rate_is_one_a_second() {
        let start = Instant::now();
        let each = Duration::from_secs(1);
        let mut none = Allowance::new(Share { at_once: 0, each }, start);
        assert!(!none.take(start + 9 * each));
        assert_eq!(Share::per_second(0), Share { at_once: 1, each });
    }
}
