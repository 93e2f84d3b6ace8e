//! The two clocks of a host, as values that tests can set.
//!
//! What must happen after a time goes by [`Clock::since_boot`], which nobody can set and which
//! counts on while the host sleeps; a journal never outlives a boot, so that its readings stay
//! comparable. The wall clock is only shown to people.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Tells the time.
pub trait Clock: Send + Sync {
    /// Time since the host booted.
    fn since_boot(&self) -> Duration;

    /// Time since 1970-01-01 UTC.
    fn since_epoch(&self) -> Duration;
}

/// The kernel's clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn since_boot(&self) -> Duration {
        read(ClockId::Boottime)
    }

    fn since_epoch(&self) -> Duration {
        read(ClockId::Realtime)
    }
}

fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    // Only a wall clock set to before 1970 is negative.
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    let nanoseconds = u32::try_from(time.tv_nsec).unwrap_or_default();
    Duration::new(seconds, nanoseconds)
}
