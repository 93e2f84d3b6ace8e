//! What befalls the relay again and again is written to the log once in a while, with how often it was not. Pure.
//!
//! Lines that are somebody's doing (a sender's, a caller's) are bounded where they are written instead, for each of them.

use std::time::{Duration, Instant};

/// How often it is said.
const EACH: Duration = Duration::from_secs(10);

/// One thing that is to be said seldom.
#[derive(Debug, Default)]
pub(crate) struct Seldom {
    said: Option<Instant>,
    left_out: u64,
}

impl Seldom {
    /// How often it wasn't said since it last was, if it is to be said now; then it counts as said.
    pub(crate) fn is_due(&mut self, now: Instant) -> Option<u64> {
        let is_due = self
            .said
            .is_none_or(|said| now.saturating_duration_since(said) >= EACH);
        if !is_due {
            self.left_out += 1;
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_once_in_a_while_with_how_often_it_was_not() {
        let mut seldom = Seldom::default();
        let start = Instant::now();
        let said = [0, 1, 9, 10, 11, 25, 35].map(|seconds| {
            let now = start + Duration::from_secs(seconds);
            seldom.is_due(now)
        });
        assert_eq!(said, [Some(0), None, None, Some(2), None, Some(1), Some(0)]);
    }
}
