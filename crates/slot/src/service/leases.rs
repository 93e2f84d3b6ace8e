//! All leases, with what is asked of them at each hand-out counted: looking at all of them would keep everybody waiting for the
//! state's lock.

use std::{collections::HashMap, ops::Deref};

use sandwire_api::name::Name;

use super::LeaseEntry;
use crate::lease::{LeaseKey, LeaseRecord};

/// Leases by their key. To be read as a map.
#[derive(Default)]
pub(super) struct Leases {
    entries: HashMap<LeaseKey, LeaseEntry>,
    /// How many leases of a pool a user has; those who have none aren't there.
    shares: HashMap<(u32, Name), u32>,
    /// Which lease of a user has a virtual CID. It is the lease's for as long as there is one.
    virtual_cids: HashMap<(u32, u32), LeaseKey>,
}

impl Deref for Leases {
    type Target = HashMap<LeaseKey, LeaseEntry>;

    fn deref(&self) -> &Self::Target {
        &self.entries
    }
}

impl Leases {
    /// A lease to be changed, but in neither key, pool nor virtual CID.
    pub(super) fn get_mut(&mut self, key: &LeaseKey) -> Option<&mut LeaseEntry> {
        self.entries.get_mut(key)
    }

    /// Adds a lease, or puts another in the place of one with the same key.
    pub(super) fn insert(&mut self, key: LeaseKey, entry: LeaseEntry) {
        self.remove(&key);
        *self.shares.entry(share_of(&entry.record)).or_default() += 1;
        if let Some(cid) = virtual_cid_of(&entry.record) {
            self.virtual_cids.insert(cid, key.clone());
        }
        self.entries.insert(key, entry);
    }

    /// Takes a lease out.
    pub(super) fn remove(&mut self, key: &LeaseKey) -> Option<LeaseEntry> {
        let entry = self.entries.remove(key)?;
        let share = share_of(&entry.record);
        if let Some(count) = self.shares.get_mut(&share) {
            *count -= 1;
            if *count == 0 {
                self.shares.remove(&share);
            }
        }
        if let Some(cid) = virtual_cid_of(&entry.record)
            && self.virtual_cids.get(&cid) == Some(key)
        {
            self.virtual_cids.remove(&cid);
        }
        Some(entry)
    }

    /// How many leases of a pool a user has, also of those that are being released.
    pub(super) fn share(&self, owner_uid: u32, pool: &Name) -> u32 {
        let share = self.shares.get(&(owner_uid, pool.clone()));
        share.copied().unwrap_or(0)
    }

    /// The lease of a user that has a virtual CID.
    pub(super) fn of_virtual_cid(&self, owner_uid: u32, cid: u32) -> Option<&LeaseKey> {
        self.virtual_cids.get(&(owner_uid, cid))
    }
}

fn share_of(record: &LeaseRecord) -> (u32, Name) {
    (record.key.owner_uid, record.pool.clone())
}

fn virtual_cid_of(record: &LeaseRecord) -> Option<(u32, u32)> {
    let channel = record.channel.as_ref()?;
    Some((record.key.owner_uid, channel.virtual_cid?))
}
