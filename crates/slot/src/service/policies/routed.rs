//! Policies with routes of their own, when pools come or go.
//!
//! They have to know all clone prefixes ([`crate::network::Network::add_policy`]), so they are compiled again, and take
//! the places of those before.

use std::{
    sync::{Arc, PoisonError, atomic::Ordering},
    time::Duration,
};

use super::{GRACE, Policies, PolicyIndex, Shared};

impl Policies {
    /// Says that pools have come or gone.
    pub(in crate::service) fn pools_have_changed(&mut self) {
        self.have_pools_changed = true;
    }

    /// Puts a policy that was compiled again into the place of the one before, if anybody holds it still. Returns whether
    /// somebody does.
    fn renew(&mut self, key: &Arc<str>, index: PolicyIndex, now: Duration) -> bool {
        let known = self.known.get(key);
        let unused = known.map(|known| known.index.swap(index.0, Ordering::Relaxed));
        let unused = unused.map_or(index, PolicyIndex);
        self.unused.push((now + GRACE, unused));
        unused != index
    }
}

impl Shared {
    /// Has policies with routes of their own know the pools that there are now.
    pub(in crate::service) fn renew_routed_policies(&self) {
        let _gate = self
            .policies_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        if !std::mem::take(&mut state.policies.have_pools_changed) {
            return;
        }
        let known = state.policies.known.iter();
        let routed: Vec<_> = known
            .filter_map(|(key, known)| Some((Arc::clone(key), known.routed.clone()?)))
            .collect();
        drop(state);
        for (key, policy) in routed {
            match self.network.add_policy(&policy) {
                Ok(index) => self.exchange_policy(&key, index),
                Err(error) => {
                    tracing::error!(%error, "cannot tell a policy with routes of its own of all pools; trying again");
                    self.lock().policies.pools_have_changed();
                }
            }
        }
    }

    /// Gives all leases that have a policy its new place.
    fn exchange_policy(&self, key: &Arc<str>, index: PolicyIndex) {
        let now = self.now();
        let mut state = self.lock();
        if !state.policies.renew(key, index, now) {
            return;
        }
        let leases = state.leases.values().map(|lease| &lease.record);
        let holders = leases.filter(|record| state.policy_key(&record.key) == Some(key));
        for record in holders {
            let Ok(slot) = state.slot_plan(record) else {
                continue;
            };
            let Some(tenancy) = state.tenancy(&record.key) else {
                continue;
            };
            if let Err(error) = self.network.set_policy(&slot, &tenancy) {
                // The auditor finds the slot with a policy that it should not have.
                tracing::error!(lease = %record.key, %error, "cannot set the policy of a lease");
            }
        }
    }
}
