//! Bytes that all guests together may have waiting in the service.
//!
//! What counts is the promise: the `buf_alloc` that a guest is told for a connection, whether or not anything
//! is buffered. Where a VMM owns the device nobody is told anything: there bytes count while they are here, before
//! they are taken. So the sum can never be exceeded, whatever the guests do.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Least that a connection is promised, in bytes; a connection that can't have it is refused.
pub const LEAST_PROMISE: u32 = 4096;

/// This part of the total isn't promised: what relays take counts for a moment only, and they stand still without.
const RELAYED: u64 = 16;

/// Once half is promised, a new connection gets at most this part of what is left.
const SHARE: u64 = 64;

/// The bytes of all guests.
#[derive(Debug)]
pub struct Budget {
    total: u64,
    promised: AtomicU64,
}

impl Budget {
    /// A budget of that many bytes.
    #[must_use]
    pub fn new(total_bytes: u64) -> Self {
        Self {
            total: total_bytes,
            promised: AtomicU64::new(0),
        }
    }

    /// Bytes promised now.
    #[must_use]
    pub fn promised(&self) -> u64 {
        self.promised.load(Relaxed)
    }

    /// Promises up to `wanted` bytes, fewer when half is gone. None if not even [`LEAST_PROMISE`] is left.
    pub fn promise(&self, wanted: u32) -> Option<u32> {
        let total = self.promisable();
        let mut given = 0;
        self.promised
            .fetch_update(Relaxed, Relaxed, |promised| {
                given = offer(total, promised, 0, wanted)?;
                Some(promised + u64::from(given))
            })
            .ok()
            .map(|_| given)
    }

    /// Promises so many bytes more for a connection that has some, while no more than half is promised then.
    #[must_use]
    pub fn extend(&self, bytes: u32) -> bool {
        let half = self.promisable() / 2;
        let extended = |promised: u64| Some(promised + u64::from(bytes)).filter(|sum| *sum <= half);
        self.promised
            .fetch_update(Relaxed, Relaxed, extended)
            .is_ok()
    }

    fn promisable(&self) -> u64 {
        (self.total - self.total / RELAYED).max(LEAST_PROMISE.into())
    }

    /// Counts bytes that are about to be taken, `most` or as many as are left.
    pub fn reserve(&self, most: u64) -> u64 {
        let left = |promised| most.min(self.total.saturating_sub(promised));
        let before = self
            .promised
            .fetch_update(Relaxed, Relaxed, |promised| Some(promised + left(promised)));
        // It never says no.
        before.map_or(0, left)
    }

    /// Takes back a promise, or bytes that are gone.
    pub fn release(&self, bytes: u64) {
        self.promised.fetch_sub(bytes, Relaxed);
    }
}

/// What can be offered out of `total` bytes of which `promised` are gone and `reserved` must stay: `wanted`
/// until half is promised, then a share of the rest, at least [`LEAST_PROMISE`] (of what is reserved too).
#[must_use]
pub fn offer(total: u64, promised: u64, reserved: u64, wanted: u32) -> Option<u32> {
    let wanted = wanted.max(LEAST_PROMISE);
    let left = total.saturating_sub(promised);
    if left < u64::from(LEAST_PROMISE) {
        return None;
    }
    if promised.saturating_add(u64::from(wanted)) <= total / 2 {
        return Some(wanted);
    }
    let share = left.saturating_sub(reserved) / SHARE;
    let share = u32::try_from(share).unwrap_or(u32::MAX);
    Some(share.clamp(LEAST_PROMISE, wanted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;

    #[test]
    fn promises_shrink_after_half_and_never_exceed_the_total() {
        let budget = Budget::new(1_200_000);
        let mut given = Vec::new();
        while let Some(bytes) = budget.promise(256 * 1024) {
            given.push(bytes);
        }
        assert_eq!(given[..2], [256 * 1024; 2]);
        assert!(given[2] < 16 * 1024);
        assert!(given.is_sorted_by(|left, right| left >= right));
        assert_eq!(
            budget.promised(),
            given.iter().map(|&bytes| u64::from(bytes)).sum::<u64>()
        );
        let relayed = budget.reserve(u64::MAX);
        assert!(relayed >= 1_200_000 / RELAYED, "{relayed}");
        assert_eq!(budget.promised(), 1_200_000);
        assert_eq!(budget.reserve(1), 0);
        budget.release(relayed);
        for bytes in given {
            budget.release(bytes.into());
        }
        assert_eq!(budget.promised(), 0);
        assert_eq!(budget.promise(8192), Some(8192));
    }

    #[test]
    fn a_promise_grows_until_half_is_promised() {
        let budget = Budget::new(160_000);
        assert!(budget.extend(70_000));
        assert!(!budget.extend(5001), "a sixteenth isn't promised");
        assert_eq!(budget.promised(), 70_000);
        assert!(budget.extend(5000));
        budget.release(10_000);
        assert!(budget.extend(10_000));
        assert_eq!(budget.promised(), 75_000);
    }

    #[test]
    fn thirty_thousand_idle_streams_have_what_a_stream_has_at_first() {
        let budget = Budget::new(Limits::default().total_bytes);
        for number in 0..30_000 {
            assert_eq!(budget.promise(64 * 1024), Some(64 * 1024), "{number}");
        }
    }

    #[test]
    fn every_connection_of_the_limit_gets_at_least_the_least() {
        let (total, connections) = (64 << 20, 4096_u64);
        let mut promised = 0;
        for number in 0..connections {
            let reserved = (connections - number) * u64::from(LEAST_PROMISE);
            let given = offer(total, promised, reserved, 256 * 1024);
            promised +=
                u64::from(given.unwrap_or_else(|| panic!("connection {number} got nothing")));
        }
        assert!(promised <= total);
    }
}
