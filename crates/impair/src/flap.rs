//! A line that goes up and down by the clock.

use crate::Nanoseconds;

/// When a line is up. From `start` on it is up for `up`, then down for `down`, and so on; before, it is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlapModel {
    /// How long it is up, in nanoseconds.
    pub up: Nanoseconds,
    /// How long it is down, in nanoseconds.
    pub down: Nanoseconds,
    /// The moment when it is up for the first time.
    pub start: Nanoseconds,
}

impl FlapModel {
    /// Whether a packet that comes now finds the line down.
    #[must_use]
    pub fn is_down(&self, now: Nanoseconds) -> bool {
        let Some(since_start) = now.checked_sub(self.start) else {
            return false;
        };
        let period = self.up.saturating_add(self.down);
        period > 0 && since_start % period >= self.up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn up_and_down_take_turns_from_the_start() {
        let flap = FlapModel {
            up: 30,
            down: 10,
            start: 100,
        };
        let down: Vec<u64> = (0..200).filter(|&now| flap.is_down(now)).collect();
        let expected: Vec<u64> = (130..140).chain(170..180).collect();
        assert_eq!(down, expected);
    }

    #[test]
    fn a_time_of_nothing_is_never() {
        let flap = |up, down| FlapModel { up, down, start: 5 };
        assert!((0..50).all(|now| !flap(10, 0).is_down(now)));
        assert!((0..50).all(|now| flap(0, 10).is_down(now) == (now >= 5)));
        assert!(!flap(0, 0).is_down(7));
        assert!(!flap(u64::MAX, u64::MAX).is_down(7));
    }
}
