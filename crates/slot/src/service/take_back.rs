//! Undoing a lease that nobody has been told of: its channel or its interface could not be had, or who asked for it has gone.

use sandwire_api::lease::LeaseState;

use super::{LeaseEntry, Shared, State};
use crate::lease::LeaseRecord;

impl State {
    /// Undoes a lease that nobody has been told of. Its slot is torn down: its packets may have passed.
    pub(super) fn take_back(&mut self, shared: &Shared, record: &LeaseRecord) {
        let key = &record.key;
        if let Some(expiry) = record.expiry {
            self.expiries.remove(&(expiry.since_boot, key.clone()));
        }
        if let Err(error) = self.journal.remove_lease(key) {
            self.journal_failed();
            tracing::error!(lease = %key, %error, "a lease that was not given stays in the journal; trying again");
            self.end_later(shared, record);
            return;
        }
        self.leases.remove(key);
        let slot = (record.pool.clone(), record.slot);
        self.tenants.remove(&slot);
        self.defects.forget(&slot);
        if let Some(entry) = self.pools.get_mut(&record.pool) {
            entry.pool.take_back(record.slot);
            entry.tear_down.push_back(record.slot);
        }
        shared.tear_down_work.notify_one();
        shared.build_work.notify_one();
    }

    /// Leaves it to the auditor to end a lease that is still in the journal: nobody else can have its slot before.
    fn end_later(&mut self, shared: &Shared, record: &LeaseRecord) {
        let key = &record.key;
        if let Ok(slot) = self.slot_plan(record)
            && let Err(error) = shared.network.deactivate(&slot)
        {
            // Its tear-down does the same.
            tracing::warn!(lease = %key, %error, "the slot of a lease that was not given can't be deactivated");
        }
        let lease = LeaseEntry {
            record: LeaseRecord {
                state: LeaseState::Releasing,
                ..record.clone()
            },
            // Who asked for the lease gives it up.
            policy: None,
            is_busy: false,
            is_opening: false,
            held_by: None,
        };
        self.leases.insert(key.clone(), lease);
        let slot = (record.pool.clone(), record.slot);
        self.tenants.insert(slot, key.clone());
        if let Some(entry) = self.pools.get_mut(&record.pool) {
            entry.pool.hold(record.slot);
        }
    }
}
