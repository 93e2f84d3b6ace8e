//! Leases whose impairment somebody has end, which takes as long as packets are under way.
//!
//! A lease with several interfaces loses its impairment one interface after the other. A change that came meanwhile would be taken
//! back on those whose turn is still to come.

use std::{
    collections::BTreeMap,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandwire_slot::lease::LeaseKey;

/// All of them, with who waits for each.
#[derive(Debug, Default)]
pub(super) struct Endings {
    all: Mutex<BTreeMap<LeaseKey, Waiting>>,
    fewer: Condvar,
    /// How many have let others go first, or are about to.
    #[cfg(test)]
    pub(super) followers: std::sync::atomic::AtomicUsize,
}

/// Those who wait for one.
#[derive(Debug, Default)]
struct Waiting {
    count: usize,
    /// Somebody has had its packets dropped, so that nobody waits for long any more.
    is_flushed: bool,
}

/// Somebody who waits for an end.
#[derive(Debug)]
pub(super) struct Ending<'a> {
    endings: &'a Endings,
    lease: LeaseKey,
}

impl Endings {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<LeaseKey, Waiting>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more waits for the end of a lease's impairment, until this is dropped.
    pub(super) fn begin(&self, lease: &LeaseKey, flush: bool) -> Ending<'_> {
        let mut all = self.lock();
        let waiting = all.entry(lease.clone()).or_default();
        waiting.count += 1;
        waiting.is_flushed |= flush;
        Ending {
            endings: self,
            lease: lease.clone(),
        }
    }

    /// Lets those go first, for so long, who wait for packets that somebody has had dropped.
    pub(super) fn await_flushed(&self, lease: &LeaseKey, patience: Duration) {
        let is_flushed = |all: &mut BTreeMap<LeaseKey, Waiting>| {
            all.get(lease).is_some_and(|waiting| waiting.is_flushed)
        };
        let all = self.lock();
        // With the lock: those go only once this one waits.
        #[cfg(test)]
        self.followers
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let waited = self.fewer.wait_timeout_while(all, patience, is_flushed);
        // Whether they have gone is asked for by who has the gate.
        drop(waited);
    }

    /// Whether somebody waits for it.
    pub(super) fn has(&self, lease: &LeaseKey) -> bool {
        self.lock().contains_key(lease)
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let mut all = self.endings.lock();
        if let Some(waiting) = all.get_mut(&self.lease) {
            waiting.count -= 1;
            if waiting.count == 0 {
                all.remove(&self.lease);
                self.endings.fewer.notify_all();
            }
        }
    }
}
