//! Figures of the service's own work, for `/metrics`.

use std::{collections::HashMap, time::Duration};

use sandwire_api::error::ErrorCode;

use crate::error::ServiceError;

/// Everything counted since the daemon's start.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Leases handed out; asking again for the same one doesn't count.
    pub acquires: u64,
    /// Requests for leases that were refused or failed, by the word that was answered.
    pub acquires_refused: HashMap<ErrorCode, u64>,
    /// Time to hand out a lease, journal included.
    pub acquire_seconds: Histogram,
    /// Leases ended, also by their time to live.
    pub releases: u64,
    /// Releases that found a sandbox still running, also by the time to live.
    pub releases_held: u64,
    /// Leases whose time to live was over, also where a sandbox still runs.
    pub expiries: u64,
    /// Slots built.
    pub builds: u64,
    /// Builds that failed.
    pub builds_failed: u64,
    /// Time to build a slot.
    pub build_seconds: Histogram,
    /// Slots torn down.
    pub tear_downs: u64,
    /// Tear-downs that failed and were tried again.
    pub tear_downs_failed: u64,
    /// Time to tear down a batch of slots.
    pub tear_down_batch_seconds: Histogram,
    /// Slots looked at by the audit.
    pub inspections: u64,
    /// Defects found in slots and on the host.
    pub defects_found: u64,
    /// Of these, repaired.
    pub defects_repaired: u64,
    /// Writes of the journal that failed.
    pub journal_failures: u64,
}

/// Counts of durations up to given bounds.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    /// Counts per bound of [`Histogram::BOUNDS_SECONDS`], not cumulative; the last is for the rest.
    pub counts: [u64; Histogram::BOUNDS_SECONDS.len() + 1],
    /// Sum of all durations in seconds.
    pub sum_seconds: f64,
    /// Number of durations.
    pub count: u64,
}

impl Histogram {
    /// Upper bounds, included.
    pub const BOUNDS_SECONDS: [f64; 14] = [
        0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05,
        0.1, 0.5, 2.5,
    ];

    pub(super) fn observe(&mut self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let place = Self::BOUNDS_SECONDS.partition_point(|bound| *bound < seconds);
        self.counts[place] += 1;
        self.sum_seconds += seconds;
        self.count += 1;
    }
}

impl Counters {
    pub(super) fn acquired(&mut self, error: Option<&ServiceError>, duration: Duration) {
        match error {
            None => {
                self.acquires += 1;
                self.acquire_seconds.observe(duration);
            }
            Some(error) => *self.acquires_refused.entry(error.code()).or_default() += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_counted_under_the_first_bound_that_holds_it() {
        let mut histogram = Histogram::default();
        for micros in [1, 25, 26, 10_000_000] {
            histogram.observe(Duration::from_micros(micros));
        }
        assert_eq!(histogram.counts[..2], [2, 1]);
        assert_eq!(histogram.counts[Histogram::BOUNDS_SECONDS.len()], 1);
        assert_eq!(histogram.count, 4);
    }
}
