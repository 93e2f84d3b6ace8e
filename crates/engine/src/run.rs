//! The loop that has a clock: breathe, and sleep when there is nothing to do. The only file that reads the time.
//!
//! While packets move it never sleeps. After a breath that moved none it sleeps until an app's deadline, however far
//! that is; if an app must look outside for packets, never for longer than a pause which begins at 1 µs, grows by
//! 1 µs with every idle breath up to 100 µs, and is halved by every busy one.

#![forbid(unsafe_code)]

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::app::Wake;
use crate::engine::Engine;
use crate::report::Load;
use crate::time::Time;

/// The machine's monotonic clock, and where on it [`Time::START`] is. Copies agree, also in other threads.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    start: Instant,
    calendar_start: SystemTime,
}

impl Clock {
    /// A clock whose time starts now.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "this file is where the clock is")]
    pub fn new() -> Self {
        Self {
            start: Instant::now(),
            calendar_start: SystemTime::now(),
        }
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Time {
        Time::START + self.start.elapsed()
    }

    /// What the calendar said at [`Time::START`]; the clock doesn't follow when the calendar is set.
    #[must_use]
    pub fn calendar_start(&self) -> SystemTime {
        self.calendar_start
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

/// Runs one engine, by the machine's monotonic clock.
#[derive(Debug)]
pub struct Runner {
    clock: Clock,
    pause: Duration,
    slept: Duration,
}

impl Runner {
    /// A runner whose time starts now. An engine must stay with one runner, since its time may not go backwards.
    #[must_use]
    pub fn new() -> Self {
        Self::with_clock(Clock::new())
    }

    /// The same in the time of this clock, so that several engines have one time.
    #[must_use]
    pub fn with_clock(clock: Clock) -> Self {
        Self {
            clock,
            pause: Duration::ZERO,
            slept: Duration::ZERO,
        }
    }

    /// Runs for that long, and reports the load since the last report.
    pub fn run_for(&mut self, engine: &mut Engine, duration: Duration) -> Load {
        let end = self.clock.now() + duration;
        self.run(engine, Some(end), |_| false)
    }

    /// Runs until `done` says so, which is asked after every breath, or until nothing can ever happen any more;
    /// reports the load since the last report.
    pub fn run_until(&mut self, engine: &mut Engine, done: impl FnMut(&Engine) -> bool) -> Load {
        self.run(engine, None, done)
    }

    fn run(
        &mut self,
        engine: &mut Engine,
        end: Option<Time>,
        mut done: impl FnMut(&Engine) -> bool,
    ) -> Load {
        loop {
            let breath = engine.breathe_by(|| self.clock.now());
            if end.is_some_and(|end| engine.now() >= end) || done(engine) {
                break;
            }
            if breath.moved > 0 {
                self.be_busy();
            } else if !self.rest(breath.wake, end) {
                break;
            }
        }
        Load {
            sleep: self.slept,
            ..engine.report_load()
        }
    }

    fn be_busy(&mut self) {
        self.pause /= 2;
        self.slept = Duration::ZERO;
    }

    /// Sleeps as long as nothing can be missed; false if nothing will ever be.
    fn rest(&mut self, wake: Wake, end: Option<Time>) -> bool {
        let now = self.clock.now();
        let Some(until) = self.next_look(now, wake, end) else {
            return false;
        };
        self.slept = until.since(now);
        if !self.slept.is_zero() {
            sleep(self.slept);
        }
        true
    }

    /// When to look again after a breath that moved nothing; none if that's never.
    fn next_look(&mut self, now: Time, wake: Wake, end: Option<Time>) -> Option<Time> {
        let look = wake.polls.then(|| {
            self.pause = (self.pause + PAUSE_STEP).min(PAUSE_MAX);
            now + self.pause
        });
        [wake.at, look, end].into_iter().flatten().min()
    }
}

impl Default for Runner {
    fn default() -> Self {
        Self::new()
    }
}

#[expect(clippy::disallowed_methods, reason = "this file is where one sleeps")]
fn sleep(duration: Duration) {
    thread::sleep(duration);
}

/// How much longer each pause is than the one before.
pub(crate) const PAUSE_STEP: Duration = Duration::from_micros(1);
/// The longest pause.
pub(crate) const PAUSE_MAX: Duration = Duration::from_micros(100);

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time::from_nanos(1_000_000_000);

    fn micros(runner: &mut Runner, wake: Wake, end: Option<Time>) -> Option<u128> {
        let look = runner.next_look(NOW, wake, end)?;
        Some(look.since(NOW).as_micros())
    }

    #[test]
    fn a_deadline_is_waited_for_however_far_it_is() {
        let mut runner = Runner::new();
        let hour = NOW + Duration::from_secs(3600);
        assert_eq!(runner.next_look(NOW, Wake::at(hour), None), Some(hour));
        let second = NOW + Duration::from_secs(1);
        let look = runner.next_look(NOW, Wake::at(hour), Some(second));
        assert_eq!(look, Some(second), "the end of the run comes first");
    }

    #[test]
    fn where_nothing_can_happen_nobody_waits() {
        let mut runner = Runner::new();
        assert_eq!(runner.next_look(NOW, Wake::default(), None), None);
    }

    #[test]
    fn pauses_grow_by_a_microsecond_to_a_hundred_and_are_halved_by_a_busy_breath() {
        let mut runner = Runner::new();
        for pause in (1..=100).chain([100, 100]) {
            assert_eq!(micros(&mut runner, Wake::polling(), None), Some(pause));
        }
        runner.be_busy();
        assert_eq!(micros(&mut runner, Wake::polling(), None), Some(51));
        for _ in 0..10 {
            runner.be_busy();
        }
        assert_eq!(micros(&mut runner, Wake::polling(), None), Some(1));
    }

    #[test]
    fn who_looks_outside_still_meets_deadlines() {
        let mut runner = Runner::new();
        for _ in 0..50 {
            runner.next_look(NOW, Wake::polling(), None);
        }
        let soon = NOW + Duration::from_micros(3);
        let wake = Wake::at(soon).or(Wake::polling());
        assert_eq!(micros(&mut runner, wake, None), Some(3));
        assert_eq!(micros(&mut runner, Wake::polling(), Some(NOW)), Some(0));
    }
}
