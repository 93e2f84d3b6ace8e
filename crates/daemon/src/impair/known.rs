//! Which leases are impaired and how, as of the last look: for lists of leases, which ask no other process.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sandwire_api::impairment::{Impairment, ImpairmentSummary};
use sandwire_slot::lease::LeaseKey;

/// What was seen.
#[derive(Debug, Default)]
pub(super) struct Known(Mutex<Seen>);

type Seen = BTreeMap<LeaseKey, ImpairmentSummary>;

impl Known {
    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that there are; and whether the service is.
    pub(super) fn replace(
        &self,
        service_alive: bool,
        leases: impl IntoIterator<Item = (LeaseKey, Impairment)>,
    ) {
        let summary = |(lease, impairment)| {
            let summary = ImpairmentSummary::new(&impairment, service_alive);
            (lease, summary)
        };
        *self.lock() = leases.into_iter().map(summary).collect();
    }

    /// One that the service has just impaired.
    pub(super) fn insert(&self, lease: LeaseKey, impairment: &Impairment) {
        let summary = ImpairmentSummary::new(impairment, true);
        self.lock().insert(lease, summary);
    }

    /// One that isn't impaired any more; whether it was.
    pub(super) fn remove(&self, lease: &LeaseKey) -> bool {
        self.lock().remove(lease).is_some()
    }

    /// Whether a lease is impaired.
    pub(super) fn has(&self, lease: &LeaseKey) -> bool {
        self.lock().contains_key(lease)
    }

    /// Leases that are impaired.
    pub(super) fn leases(&self) -> Vec<LeaseKey> {
        self.lock().keys().cloned().collect()
    }

    /// How a lease is impaired, if it is.
    pub(super) fn summary(&self, lease: &LeaseKey) -> Option<ImpairmentSummary> {
        self.lock().get(lease).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_is_replaced_as_a_whole() {
        let key = |name: &str| LeaseKey {
            owner_uid: 1000,
            name: name.parse().unwrap(),
        };
        let delay: Impairment = "delay 50ms".parse().unwrap();
        let known = Known::default();
        assert_eq!(known.summary(&key("a")), None);
        known.insert(key("a"), &delay);
        known.insert(key("b"), &delay);
        known.remove(&key("b"));
        let summary = known.summary(&key("a")).unwrap();
        assert_eq!(summary.summary, "delay 50ms");
        assert!(summary.service_alive);
        assert_eq!(known.summary(&key("b")), None);
        known.replace(false, [(key("b"), delay)]);
        assert_eq!(known.summary(&key("a")), None);
        assert!(!known.summary(&key("b")).unwrap().service_alive);
    }
}
