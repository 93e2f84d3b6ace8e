//! Policies with routes of their own, when pools come or go.
//!
//! They have to know all clone prefixes ([`crate::network::Network::add_policy`]), so they are compiled again, and take
//! the places of those before.

use std::{
    collections::BTreeSet,
    sync::{Arc, PoisonError, atomic::Ordering},
};

use super::{GRACE, Policies, PolicyIndex, Shared};

impl Policies {
    /// Says that pools have come or gone.
    pub(in crate::service) fn pools_have_changed(&mut self) {
        self.have_pools_changed = true;
    }

    /// Puts a policy that was compiled again into the place of the one before, if anybody holds it still. Returns which of
    /// the two has no user then.
    fn renew(&mut self, key: &Arc<str>, index: PolicyIndex) -> PolicyIndex {
        let known = self.known.get(key);
        let before = known.map(|known| known.index.swap(index.0, Ordering::Relaxed));
        before.map_or(index, PolicyIndex)
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
        let mut renewed = Vec::new();
        for (key, policy) in routed {
            match self.network.add_policy(&policy) {
                Ok(index) => renewed.push((key, index)),
                Err(error) => {
                    tracing::error!(%error, "cannot tell a policy with routes of its own of all pools; trying again");
                    self.lock().policies.pools_have_changed();
                }
            }
        }
        self.exchange_policies(&renewed);
    }

    /// Gives all leases that have these policies their new places. The leases are gone through once for all of them.
    fn exchange_policies(&self, renewed: &[(Arc<str>, PolicyIndex)]) {
        if renewed.is_empty() {
            return;
        }
        let mut state = self.lock();
        let policies = &mut state.policies;
        let unused = renewed
            .iter()
            .map(|(key, index)| policies.renew(key, *index));
        let unused: Vec<_> = unused.collect();
        let places: BTreeSet<PolicyIndex> = renewed.iter().map(|(_, index)| *index).collect();
        let holders = state.leases.values().filter_map(|lease| {
            let record = &lease.record;
            let tenancy = state.tenancy(&record.key)?;
            places.contains(&tenancy.policy).then_some(())?;
            Some((&record.key, (state.slot_plan(record).ok()?, tenancy)))
        });
        let (leases, changes): (Vec<_>, Vec<_>) = holders.unzip();
        for (lease, set) in leases.iter().zip(self.network.set_policies(&changes)) {
            if let Err(error) = set {
                // The auditor finds the slot with a policy that it should not have.
                tracing::error!(%lease, %error, "cannot set the policy of a lease");
            }
        }
        // From now on: the last of them had the one before until just now.
        let until = self.now() + GRACE;
        let unused = unused.into_iter().map(|index| (until, index));
        state.policies.unused.extend(unused);
    }
}
