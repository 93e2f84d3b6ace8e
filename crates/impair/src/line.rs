//! The line of a bottleneck: bits per second, or the opportunities of a trace.

use crate::{
    Nanoseconds,
    rate::{Overhead, Serialiser},
    trace::{Trace, TraceLine},
};

/// How fast a line is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// Always the same.
    Rate {
        /// Of the line; see [`crate::rate::BITS_PER_SECOND_MIN`] and its like.
        bits_per_second: u64,
        /// What a frame occupies beyond its length.
        overhead: Overhead,
    },
    /// As a recorded one. Of each frame the IP packet and 4 bytes count, as in Mahimahi.
    Trace {
        /// The opportunities.
        trace: Trace,
        /// The moment when it begins; before, nothing is sent.
        start: Nanoseconds,
    },
}

/// A line in use.
#[derive(Clone, Debug)]
pub(crate) enum Line {
    Rate(Serialiser),
    Trace(TraceLine),
}

/// Bytes of a frame that a trace doesn't count, less the 4 that it counts beyond the IP packet.
const TRACE_LESS_BYTES: u32 = 14 - 4;

impl Line {
    pub(crate) fn new(capacity: Capacity) -> Self {
        match capacity {
            Capacity::Rate {
                bits_per_second,
                overhead,
            } => Self::Rate(Serialiser::new(bits_per_second, overhead)),
            Capacity::Trace { trace, start } => Self::Trace(TraceLine::new(trace, start)),
        }
    }

    /// When a packet that is ready at `ready` begins to be sent.
    pub(crate) fn starts_at(&self, ready: Nanoseconds) -> Nanoseconds {
        match self {
            Self::Rate(line) => line.free_at().max(ready),
            Self::Trace(line) => line.starts_at(ready),
        }
    }

    /// When the last packet has been sent.
    pub(crate) fn busy_until(&self) -> Nanoseconds {
        match self {
            Self::Rate(line) => line.free_at(),
            Self::Trace(line) => line.busy_until(),
        }
    }

    /// Sends a packet that begins at `start`; says when its last bit has left.
    pub(crate) fn send(&mut self, start: Nanoseconds, frame_bytes: u32) -> Nanoseconds {
        match self {
            Self::Rate(line) => line.send(start, frame_bytes),
            Self::Trace(line) => line.send(start, frame_bytes.saturating_sub(TRACE_LESS_BYTES)),
        }
    }
}
