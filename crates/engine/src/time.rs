//! The engine's time: nanoseconds since some start that only the caller knows.
//!
//! The core never reads a clock. A runner passes the time into every breath, so a test passes any time it likes
//! and gets the same packets each time.

#![forbid(unsafe_code)]

use std::ops::Add;
use std::time::Duration;

/// A point in time, in nanoseconds since the start that whoever runs the engine has chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(u64);

impl Time {
    /// The start itself.
    pub const START: Self = Self(0);

    /// The point this many nanoseconds after the start.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the start.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// How long after `earlier` this is; zero if it is before.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    /// The later point; what is more than 584 years away ends there.
    fn add(self, delay: Duration) -> Self {
        let nanos = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_neither_wraps_nor_goes_below_the_start() {
        let late = Time::from_nanos(u64::MAX);
        assert_eq!(late + Duration::from_secs(1), late);
        assert_eq!(Time::START + Duration::MAX, late);
        assert_eq!(Time::START.since(late), Duration::ZERO);
        assert_eq!(
            (Time::from_nanos(5) + Duration::from_nanos(7)).as_nanos(),
            12
        );
    }
}
