//! Descriptors that guests leave to the service itself.
//!
//! Each guest's connections are bounded, but not those of all of them. With no descriptor left nobody could ask the service for anything:
//! the daemon would take it for gone, and no channel of anybody's could be opened. The kernel gives the lowest number that is free, so
//! the number of a descriptor says how many there are.

use std::{
    os::fd::{AsFd, AsRawFd},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

/// Descriptors that aren't for guests' connections: of control connections, listeners, what VMMs hand over.
const RESERVED: u64 = 1024;
/// As a part of all, where there are few.
const RESERVED_PART: u64 = 8;

/// What the process may have. It is one limit for all its threads.
static LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);

/// Says how many descriptors the process may have.
pub fn set_limit(limit: u64) {
    LIMIT.store(limit, Relaxed);
}

/// Whether a descriptor that a guest's connection has just got is one of those that are reserved.
#[must_use]
pub fn is_reserved(new: impl AsFd) -> bool {
    let number = new.as_fd().as_raw_fd();
    is_beyond(u64::from(number.unsigned_abs()), LIMIT.load(Relaxed))
}

fn is_beyond(number: u64, limit: u64) -> bool {
    number >= limit - RESERVED.min(limit / RESERVED_PART)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_reserved() {
        assert!(!is_beyond(u64::from(u32::MAX), u64::MAX));
        for (limit, first) in [(1_048_576, 1_047_552), (1024, 896), (256, 224), (0, 0)] {
            assert!(is_beyond(first, limit), "{limit}");
            assert!(first == 0 || !is_beyond(first - 1, limit), "{limit}");
        }
    }
}
