//! Clone addresses that rest although their pool is gone: a pool that is made in its place, by the same or another name,
//! lets them rest on. Pure, and known to this process alone: what a daemon ends with between the two begins anew.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use super::PoolEntry;
use crate::{
    journal::ReleasedSlot,
    plan::{Plan, SlotNumber},
    pool::Rest,
};

/// Addresses of deleted pools, with how long they rest.
#[derive(Debug, Default)]
pub(super) struct FormerRests(BTreeMap<IpAddr, Rest>);

impl FormerRests {
    /// Keeps the rests of a pool that is deleted.
    pub(super) fn keep(&mut self, entry: &PoolEntry, now: Duration) {
        self.0.retain(|_, rest| rest.until > now);
        for (number, rest) in entry.pool.rests() {
            for address in entry.plan.clone_addresses(number) {
                self.0.insert(address, rest.clone());
            }
        }
    }

    /// Slots of a new pool whose addresses rest on, no longer than it lets its own.
    pub(super) fn of(&self, plan: &Plan, now: Duration) -> Vec<ReleasedSlot> {
        let longest = now + Duration::from_secs(u64::from(plan.spec.quarantine_seconds));
        let mut rests: BTreeMap<SlotNumber, Rest> = BTreeMap::new();
        for (address, rest) in &self.0 {
            let until = rest.until.min(longest);
            let Some(number) = plan.slot_of_address(*address).filter(|_| until > now) else {
                continue;
            };
            if rests.get(&number).is_none_or(|other| other.until < until) {
                let tenant = rest.tenant.clone();
                rests.insert(number, Rest { tenant, until });
            }
        }
        let released = rests.into_iter().map(|(slot, rest)| ReleasedSlot {
            pool: plan.spec.name.clone(),
            slot,
            rest,
            is_torn_down: true,
        });
        released.collect()
    }
}
