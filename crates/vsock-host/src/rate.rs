//! How often something may happen: so many times a second, as many again at once.

use std::time::Instant;

/// A bucket that fills at a steady rate.
#[derive(Clone, Debug)]
pub struct Rate {
    per_second: f64,
    tokens: f64,
    filled: Instant,
}

impl Rate {
    /// A full one.
    #[must_use]
    pub fn new(per_second: u32, now: Instant) -> Self {
        let per_second = f64::from(per_second);
        Self {
            per_second,
            tokens: per_second,
            filled: now,
        }
    }

    /// Whether it may happen once more now.
    pub fn allow(&mut self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.filled).as_secs_f64();
        self.tokens = (self.tokens + since * self.per_second).min(self.per_second);
        self.filled = now;
        let allowed = self.tokens >= 1.0;
        if allowed {
            self.tokens -= 1.0;
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_second_s_worth_at_once_and_then_the_rate() {
        let start = Instant::now();
        let mut rate = Rate::new(10, start);
        let at_once = (0..100).filter(|_| rate.allow(start)).count();
        assert_eq!(at_once, 10);
        let over_two_seconds = (0..2000)
            .filter(|millisecond| rate.allow(start + Duration::from_millis(*millisecond)))
            .count();
        assert!((19..=20).contains(&over_two_seconds), "{over_two_seconds}");
    }
}
