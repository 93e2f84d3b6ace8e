//! What leases have sent and received, and their open TAPs.

use std::{os::fd::OwnedFd, sync::Arc};

use sandwire_api::{name::Name, traffic::LeaseTraffic};

use super::{Caller, Slots, State};
use crate::{error::ServiceError, plan::Plan};

impl Slots {
    /// Traffic of every lease that the caller may see, by owner and name.
    #[must_use]
    pub fn traffic(&self, caller: Caller) -> Vec<LeaseTraffic> {
        let state = self.shared.lock();
        let mut seen: Vec<_> = state
            .leases
            .values()
            .filter_map(|lease| {
                let record = &lease.record;
                let plan = &state.pools.get(&record.pool)?.plan;
                caller.may_see(&record.key, &plan.spec).then_some(())?;
                Some((record.clone(), Arc::clone(plan)))
            })
            .collect();
        drop(state);
        seen.sort_by(|(left, _), (right, _)| left.key.cmp(&right.key));
        let row = |(record, plan): (crate::lease::LeaseRecord, Arc<Plan>)| {
            let policy = record.policy.as_deref().unwrap_or(&plan.spec.policy);
            LeaseTraffic {
                pool: record.pool.clone(),
                owner_uid: record.key.owner_uid,
                slot: record.slot.0,
                kind: plan.spec.kind,
                data_path: plan.spec.data_path,
                limits: policy.limits,
                traffic: self.shared.network.traffic(&record.slot_of(&plan)),
                name: record.key.name.clone(),
                impairment: None,
            }
        };
        seen.into_iter().map(row).collect()
    }

    /// Opens the TAPs of a lease as a VMM would, in order, to be handed to one. Blocks for a
    /// millisecond.
    ///
    /// # Errors
    /// There is no such lease for this caller, it is being released, or somebody has a TAP open.
    pub fn open_taps(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
    ) -> Result<Vec<OwnedFd>, ServiceError> {
        let key = caller.lease_key(owner_uid, name);
        let operation = "open the TAPs of";
        let (slot, busy) = self
            .shared
            .hold_busy(caller, &key, operation, State::slot_plan)?;
        let opened = self.shared.network.open_taps(&slot);
        drop(busy);
        opened.map_err(|source| ServiceError::Network {
            operation,
            object: format!("lease '{name}'"),
            source,
        })
    }
}
