//! Time that goes on when it is told to.

use std::{sync::Mutex, time::Duration};

use crate::clock::Clock;

/// A clock that goes on when it is told to.
#[derive(Debug)]
pub(crate) struct ManualClock(Mutex<Duration>);

impl ManualClock {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Duration::from_secs(1000)))
    }

    pub(crate) fn advance(&self, by: Duration) {
        *self.0.lock().unwrap() += by;
    }
}

impl Clock for ManualClock {
    fn since_boot(&self) -> Duration {
        *self.0.lock().unwrap()
    }

    fn since_epoch(&self) -> Duration {
        Duration::from_secs(1_700_000_000) + *self.0.lock().unwrap()
    }
}
