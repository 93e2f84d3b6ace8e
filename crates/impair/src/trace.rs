//! Mahimahi's packet delivery traces, unchanged, in virtual time.
//!
//! A trace is a text file with one number per line: the millisecond, from the start, of an opportunity to
//! deliver 1504 bytes; several lines may name the same. At its end it starts again, its last number
//! being its length. An opportunity may deliver several small packets or a part of a large one;
//! what nobody uses is lost. See the manual of `mm-link` at <http://mahimahi.mit.edu>, and
//! `link_queue.cc` in its source.

use std::sync::Arc;

use crate::Nanoseconds;

/// Bytes of an opportunity: an IP packet of 1500 bytes and the 4 bytes of a TUN device's header.
pub const OPPORTUNITY_BYTES: u32 = 1504;
/// Opportunities that a trace may have; the longest published ones have a few million.
pub const OPPORTUNITIES_MAX: usize = 1 << 24;
/// The latest millisecond that a trace may name: a week.
pub const MILLISECOND_MAX: u64 = 7 * 24 * 3600 * 1000;

const MILLISECOND: u64 = 1_000_000;

/// A trace that was read. Copies share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Milliseconds, in ascending order, the last above zero.
    milliseconds: Arc<[u64]>,
}

/// Why a text isn't a trace. Lines count from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// There is nothing in it.
    #[error("the trace has no line: write one millisecond per line")]
    Empty,
    /// A line that isn't a number.
    #[error(
        "line {line} of the trace is '{text}': write a whole number of milliseconds, at most {MILLISECOND_MAX}"
    )]
    NotMilliseconds {
        /// Which.
        line: usize,
        /// The first 40 characters of it.
        text: String,
    },
    /// Time goes backwards.
    #[error(
        "line {line} of the trace is {milliseconds}, which is before {previous} in the line above: sort the file"
    )]
    Backwards {
        /// Which line.
        line: usize,
        /// What it says.
        milliseconds: u64,
        /// What the line above says.
        previous: u64,
    },
    /// All opportunities are at 0, so it would repeat at once.
    #[error("the trace ends at millisecond 0: its last line is its length, and must be above 0")]
    NoLength,
    /// It is too long.
    #[error("line {line} of the trace is one too many: at most {OPPORTUNITIES_MAX} are read")]
    TooLong {
        /// The first that is too many.
        line: usize,
    },
}

/// A line whose opportunities a trace gives.
#[derive(Clone, Debug)]
pub struct TraceLine {
    trace: Trace,
    start: Nanoseconds,
    /// The opportunity in use or, if nothing is left of it, used last: its number from the start.
    current: u64,
    /// Bytes left of it.
    left: u32,
}

impl Trace {
    /// Reads a trace.
    ///
    /// # Errors
    /// Says which line is wrong, and how.
    pub fn parse(text: &str) -> Result<Self, TraceError> {
        let mut milliseconds = Vec::new();
        for (line, text) in (1..).zip(text.lines()) {
            if milliseconds.len() == OPPORTUNITIES_MAX {
                return Err(TraceError::TooLong { line });
            }
            let number = parse_line(text).ok_or_else(|| TraceError::NotMilliseconds {
                line,
                text: text.chars().take(40).collect(),
            })?;
            let previous = milliseconds.last().copied().unwrap_or(0);
            if number < previous {
                return Err(TraceError::Backwards {
                    line,
                    milliseconds: number,
                    previous,
                });
            }
            milliseconds.push(number);
        }
        match milliseconds.last() {
            None => Err(TraceError::Empty),
            Some(0) => Err(TraceError::NoLength),
            Some(_) => Ok(Self {
                milliseconds: milliseconds.into(),
            }),
        }
    }

    /// Whether both are copies of one.
    #[cfg(test)]
    pub(crate) fn shares(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.milliseconds, &other.milliseconds)
    }

    /// When the opportunity of this number is, from the start of the trace, over all its repetitions.
    #[must_use]
    pub fn opportunity(&self, number: u64) -> Nanoseconds {
        let count = self.milliseconds.len() as u64;
        let index = usize::try_from(number % count).unwrap_or(0);
        (number / count)
            .saturating_mul(self.length())
            .saturating_add(self.milliseconds[index])
            .saturating_mul(MILLISECOND)
    }

    /// The number of the first opportunity at or after a time since the start.
    #[must_use]
    pub fn first_at(&self, since_start: Nanoseconds) -> u64 {
        let count = self.milliseconds.len() as u64;
        let wanted = since_start.div_ceil(MILLISECOND);
        // A repetition begins where the one before has its last opportunity, so look there first.
        let repetition = (wanted / self.length()).saturating_sub(1);
        let rest = wanted - repetition * self.length();
        let before = |limit: u64| self.milliseconds.partition_point(|&at| at < limit) as u64;
        let number = if rest <= self.length() {
            before(rest)
        } else {
            count + before(rest - self.length())
        };
        repetition.saturating_mul(count).saturating_add(number)
    }

    /// Milliseconds until it repeats.
    fn length(&self) -> u64 {
        self.milliseconds.last().copied().unwrap_or(1)
    }
}

impl TraceLine {
    /// A line whose trace starts at this moment.
    #[must_use]
    pub fn new(trace: Trace, start: Nanoseconds) -> Self {
        Self {
            trace,
            start,
            current: 0,
            left: OPPORTUNITY_BYTES,
        }
    }

    /// When a packet that is ready at this moment begins to be sent: at the next opportunity of which
    /// something is left.
    #[must_use]
    pub fn starts_at(&self, ready: Nanoseconds) -> Nanoseconds {
        let first = self.trace.first_at(ready.saturating_sub(self.start));
        let usable = self.current.saturating_add(u64::from(self.left == 0));
        self.moment(first.max(usable))
    }

    /// When the last packet has been sent; the start, if there was none.
    #[must_use]
    pub fn busy_until(&self) -> Nanoseconds {
        if self.left == OPPORTUNITY_BYTES {
            return self.start;
        }
        self.moment(self.current)
    }

    fn moment(&self, opportunity: u64) -> Nanoseconds {
        self.start
            .saturating_add(self.trace.opportunity(opportunity))
    }

    /// Sends a packet that is ready at `now`, with this many bytes of what Mahimahi counts: the IP packet and 4.
    /// Says when the opportunity is that carries its last byte.
    pub fn send(&mut self, now: Nanoseconds, bytes: u32) -> Nanoseconds {
        let first = self.trace.first_at(now.saturating_sub(self.start));
        if first > self.current {
            self.current = first;
            self.left = OPPORTUNITY_BYTES;
        }
        let mut bytes = bytes.max(1);
        while bytes > self.left {
            bytes -= self.left;
            self.current = self.current.saturating_add(1);
            self.left = OPPORTUNITY_BYTES;
        }
        self.left -= bytes;
        self.moment(self.current)
    }
}

fn parse_line(text: &str) -> Option<u64> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| is_number)?;
    (number <= MILLISECOND_MAX).then_some(number)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = MILLISECOND;

    #[test]
    fn small_packets_share_an_opportunity_and_large_ones_use_several() {
        let mut line = TraceLine::new(Trace::parse("1\n1\n5\n10\n").unwrap(), 100 * MS);
        let mut send = |now, bytes| line.send(now, bytes) / MS;
        assert_eq!(
            [send(0, 1000), send(0, 504), send(0, 1504)],
            [101, 101, 101]
        );
        assert_eq!(send(0, 2000), 110);
        // What is left of the one at 10, unused, is lost.
        assert_eq!(send(111 * MS, 100), 111);
        assert_eq!(send(112 * MS, 1504), 115);
    }

    #[test]
    fn a_trace_repeats_after_its_last_line() {
        let trace = Trace::parse("0\n3\n10").unwrap();
        let times: Vec<u64> = (0..7)
            .map(|number| trace.opportunity(number) / MS)
            .collect();
        assert_eq!(times, [0, 3, 10, 10, 13, 20, 20]);
    }

    #[test]
    fn what_is_not_a_trace_is_refused_with_its_line() {
        let refusal = |text: &str| Trace::parse(text).unwrap_err().to_string();
        assert!(refusal("").contains("no line"));
        assert!(refusal("0\n0\n").contains("above 0"));
        assert!(refusal("1\n5\n4\n").contains("line 3"));
        for wrong in [
            "1\nx\n",
            "1\n\n2",
            "1\n-2",
            "1\n+2",
            "1\n2.5",
            "1\n99999999999999999999",
            "1\n604800001",
        ] {
            assert!(refusal(wrong).contains("line 2"), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn the_first_opportunity_is_found_in_every_repetition(
            mut lines in prop::collection::vec(0u64..20, 1..12),
            time in 0u64..200 * MS,
        ) {
            lines.sort_unstable();
            lines.push(20);
            let text: Vec<String> = lines.iter().map(u64::to_string).collect();
            let trace = Trace::parse(&text.join("\n")).unwrap();
            let searched = (0..).find(|&number| trace.opportunity(number) >= time).unwrap();
            prop_assert_eq!(trace.first_at(time), searched);
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[0-9\\n a-c-]{0,60}") {
            if let Ok(trace) = Trace::parse(&text) {
                prop_assert!(trace.opportunity(1000) >= trace.opportunity(1));
            }
        }
    }
}
