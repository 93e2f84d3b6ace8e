//! Leases whose impairment somebody has end, which takes as long as packets are under way.
//!
//! A lease with several interfaces loses its impairment one interface after the other. A change that came meanwhile would be taken
//! back on those whose turn is still to come.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sandwire_slot::lease::LeaseKey;

/// All of them, with how many wait for each.
#[derive(Debug, Default)]
pub(super) struct Endings(Mutex<BTreeMap<LeaseKey, usize>>);

/// Somebody who waits for an end.
#[derive(Debug)]
pub(super) struct Ending<'a> {
    endings: &'a Endings,
    lease: LeaseKey,
}

impl Endings {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<LeaseKey, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more waits for the end of a lease's impairment, until this is dropped.
    pub(super) fn begin(&self, lease: &LeaseKey) -> Ending<'_> {
        *self.lock().entry(lease.clone()).or_default() += 1;
        Ending {
            endings: self,
            lease: lease.clone(),
        }
    }

    /// Whether somebody waits for it.
    pub(super) fn has(&self, lease: &LeaseKey) -> bool {
        self.lock().contains_key(lease)
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let mut waiting = self.endings.lock();
        if let Some(count) = waiting.get_mut(&self.lease) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.lease);
            }
        }
    }
}
