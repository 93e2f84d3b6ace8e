//! A serialiser: when the last bit of each packet has left a line of so many bits per second.
//!
//! Times are absolute and exact: what doesn't come to a whole nanosecond is carried on as a fraction, so
//! a busy line keeps its rate for ever. A moment handed out is rounded up, never down. Queues are not
//! our job; we say when the line is free.

use crate::Nanoseconds;

/// Bits per second that a line may have: 10 kbit/s.
pub const BITS_PER_SECOND_MIN: u64 = 10_000;
/// Bits per second that a line may have: 10 Gbit/s.
pub const BITS_PER_SECOND_MAX: u64 = 10_000_000_000;

const SECOND: u128 = 1_000_000_000;

/// What a frame of the sandbox occupies on the line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overhead {
    /// Bytes that the line adds to each frame; negative if it carries less than the Ethernet header.
    pub bytes: i32,
    /// Whether what results is cut into ATM cells of 53 bytes that carry 48 each, as ADSL does.
    pub cells: bool,
}

/// A line and how long it is busy.
#[derive(Clone, Debug)]
pub struct Serialiser {
    bits_per_second: u64,
    overhead: Overhead,
    free_at: Nanoseconds,
    /// What `free_at` lacks, in parts of a nanosecond: less than `bits_per_second` of that many.
    fraction: u64,
}

impl Overhead {
    /// Bytes that a frame of this length occupies; at least one.
    #[must_use]
    pub fn line_bytes(&self, frame_bytes: u32) -> u64 {
        let bytes = (i64::from(frame_bytes) + i64::from(self.bytes))
            .max(1)
            .unsigned_abs();
        if self.cells {
            bytes.div_ceil(48) * 53
        } else {
            bytes
        }
    }
}

impl Serialiser {
    /// A free line. A rate of 0 counts as 1; [`BITS_PER_SECOND_MIN`] and its like are for those who check users' input.
    #[must_use]
    pub fn new(bits_per_second: u64, overhead: Overhead) -> Self {
        Self {
            bits_per_second: bits_per_second.max(1),
            overhead,
            free_at: 0,
            fraction: 0,
        }
    }

    /// From when on a packet can be sent.
    #[must_use]
    pub fn free_at(&self) -> Nanoseconds {
        self.free_at.saturating_add(u64::from(self.fraction > 0))
    }

    /// Sends a frame from `now` on, or from when the line is free; says when its last bit has left.
    pub fn send(&mut self, now: Nanoseconds, frame_bytes: u32) -> Nanoseconds {
        // In the very nanosecond in which the line becomes free the packet follows the one before without a
        // gap; else a busy line would lose the fraction each time.
        if now > self.free_at() {
            self.free_at = now;
            self.fraction = 0;
        }
        let bits = u128::from(self.overhead.line_bytes(frame_bytes)) * 8;
        let rate = u128::from(self.bits_per_second);
        let parts = bits * SECOND + u128::from(self.fraction);
        let whole = u64::try_from(parts / rate).unwrap_or(u64::MAX);
        self.free_at = self.free_at.saturating_add(whole);
        self.fraction = u64::try_from(parts % rate).unwrap_or(0);
        self.free_at()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The last of many packets leaves at the time that one division gives, whatever the rate.
        #[test]
        fn a_busy_line_does_not_drift(
            rate in BITS_PER_SECOND_MIN..=BITS_PER_SECOND_MAX,
            sizes in prop::collection::vec(60u32..9000, 1..500),
            start in 0u64..1_000_000_000_000,
        ) {
            let mut line = Serialiser::new(rate, Overhead::default());
            let mut sent = 0u128;
            for size in sizes {
                let departure = line.send(start, size);
                sent += u128::from(size) * 8;
                let exact = (sent * SECOND).div_ceil(u128::from(rate));
                // An idle line starts a packet at a whole nanosecond, so each is late by less than one at most.
                prop_assert_eq!(u128::from(departure - start), exact);
            }
        }
    }

    #[test]
    fn a_free_line_starts_when_the_packet_comes() {
        let mut line = Serialiser::new(1_000_000, Overhead::default());
        assert_eq!(line.send(0, 125), 1_000_000);
        assert_eq!(line.send(500_000, 125), 2_000_000);
        assert_eq!(line.send(5_000_000, 125), 6_000_000);
    }

    #[test]
    fn the_slowest_and_the_fastest_line_keep_their_rate() {
        for (rate, seconds) in [(BITS_PER_SECOND_MIN, 1212), (BITS_PER_SECOND_MAX, 1)] {
            let mut line = Serialiser::new(rate, Overhead::default());
            let packets = rate * seconds / (1515 * 8);
            let last = (0..packets).map(|_| line.send(0, 1515)).last().unwrap();
            let exact = u128::from(packets * 1515 * 8) * SECOND;
            assert_eq!(u128::from(last), exact.div_ceil(u128::from(rate)));
        }
    }

    #[test]
    fn overhead_counts_for_each_packet() {
        let ethernet = Overhead {
            bytes: 24,
            cells: false,
        };
        assert_eq!(ethernet.line_bytes(60), 84);
        let atm = Overhead {
            bytes: 18,
            cells: true,
        };
        assert_eq!(atm.line_bytes(60), 106);
        assert_eq!(atm.line_bytes(78), 106);
        assert_eq!(atm.line_bytes(79), 159);
        let less = Overhead {
            bytes: -100,
            cells: false,
        };
        assert_eq!(less.line_bytes(60), 1);
    }
}
