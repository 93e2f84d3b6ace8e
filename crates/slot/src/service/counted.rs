//! What leases and their channels have counted, and what of that is of before the daemon's start.
//!
//! Counters of the data path and of the vsock service outlive the daemon. Whoever sums them since its start needs to know
//! what they had then: of all leases that there were, also of those that have ended since. The data path is read before
//! any lease can end, and what an older layout of it has counted is added when it is taken over; the vsock service may
//! not answer before it is first asked by anybody.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::{PoisonError, RwLockReadGuard, TryLockError},
};

use sandwire_api::{
    name::Name,
    traffic::{LeaseTraffic, Traffic},
    vsock::{LeaseVsock, VsockTraffic},
};

use super::{Caller, Shared, Slots, State};
use crate::{channel::Whose, lease::LeaseKey};

/// What was counted of all leases.
#[derive(Clone, Debug)]
pub struct Counted<Lease, Sum> {
    /// Each lease that there is.
    pub leases: Vec<Lease>,
    /// Leases that have ended since the daemon's start, by pool.
    pub ended: BTreeMap<Name, Sum>,
    /// What of all these was counted before that, by pool.
    pub earlier: BTreeMap<Name, Sum>,
}

/// What channels had counted before the start.
#[derive(Debug, Default)]
pub(super) struct EarlierChannels {
    counted: BTreeMap<Name, VsockTraffic>,
    /// Leases of before of whose channels that isn't known yet.
    unknown: HashSet<LeaseKey>,
}

impl EarlierChannels {
    /// A lease of before has a channel.
    pub(super) fn expect(&mut self, lease: LeaseKey) {
        self.unknown.insert(lease);
    }

    /// What a lease's channel says for the first time was counted before, as near as can be told.
    fn learn(&mut self, pool: &Name, lease: &LeaseKey, counted: &VsockTraffic) {
        if self.unknown.remove(lease) {
            self.counted.entry(pool.clone()).or_default().add(counted);
        }
    }
}

impl Slots {
    /// What the data path has counted of all leases.
    #[must_use]
    pub fn counted_traffic(&self) -> Counted<LeaseTraffic, Traffic> {
        let earlier = self.shared.earlier_stays();
        // In this order: a lease that ends now is missing once, instead of counted twice.
        let ended = self.shared.lock().ended.clone();
        Counted {
            leases: self.traffic(Caller::DAEMON),
            ended,
            earlier: earlier.clone(),
        }
    }

    /// What the vsock service has counted of all leases' channels.
    #[must_use]
    pub fn counted_channels(&self) -> Counted<LeaseVsock, VsockTraffic> {
        // In this order: a channel that ends now is missing once, instead of counted twice.
        let ended = self.shared.lock().ended_channels.clone();
        let leases = self.channels(Caller::DAEMON);
        let mut state = self.shared.lock();
        for row in &leases {
            let lease = LeaseKey {
                owner_uid: row.owner_uid,
                name: row.lease.clone(),
            };
            if let Some(counted) = &row.traffic {
                state.earlier_channels.learn(&row.pool, &lease, counted);
            }
        }
        let earlier = state.earlier_channels.counted.clone();
        drop(state);
        Counted {
            leases,
            ended,
            earlier,
        }
    }
}

impl Shared {
    /// Asks what channels of before have counted, if that isn't known of all.
    pub(super) fn learn_earlier_channels(&self) {
        let owners: BTreeSet<u32> = {
            let state = self.lock();
            let unknown = state.earlier_channels.unknown.iter();
            unknown.map(|lease| lease.owner_uid).collect()
        };
        if owners.is_empty() {
            return;
        }
        // Who doesn't answer is asked again by who wants to know.
        let found = self.channels.traffic(Whose::Owners(&owners));
        let found = found.unwrap_or_default();
        let mut guard = self.lock();
        let state = &mut *guard;
        for (key, counted) in &found {
            if let Some(lease) = state.leases.get(key) {
                let pool = &lease.record.pool;
                state.earlier_channels.learn(pool, key, counted);
            }
        }
    }

    /// Notes what leases of before have counted. To be called before any of them can end.
    pub(super) fn note_earlier(&self) {
        let state = self.lock();
        let leases = state.leases.values();
        let slots = leases.filter_map(|lease| {
            let slot = state.slot_plan(&lease.record).ok()?;
            Some((lease.record.pool.clone(), slot))
        });
        let slots: Vec<_> = slots.collect();
        drop(state);
        let mut earlier = self.earlier.write().unwrap_or_else(PoisonError::into_inner);
        for (pool, slot) in slots {
            if let Some(counted) = self.network.traffic(&slot) {
                earlier.entry(pool).or_default().add(&counted);
            }
        }
    }

    /// Has slots go on with what an older layout of the data path has counted of them, once that can be.
    pub(super) fn take_over_counts(&self) {
        // Nobody may sum it before it is known to be of before. Who sums now isn't waited for, and keeps nobody waiting:
        // there is nearly never anything to take over, and it can be later.
        let mut earlier = match self.earlier.try_write() {
            Ok(earlier) => earlier,
            Err(TryLockError::Poisoned(broken)) => broken.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let found = self.network.finish_migration();
        let state = self.lock();
        for (name, entry) in &state.pools {
            if let Some(counted) = found.get(&entry.plan.number) {
                earlier.entry(name.clone()).or_default().add(counted);
            }
        }
    }

    /// Keeps counts of before from being taken over meanwhile: who reads counters and sums them has these in both, or in
    /// neither.
    pub(super) fn earlier_stays(&self) -> RwLockReadGuard<'_, BTreeMap<Name, Traffic>> {
        self.earlier.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Forgets what leases of a pool that is deleted had counted before the start.
    pub(super) fn forget_earlier(&self, pool: &Name) {
        let mut earlier = self.earlier.write().unwrap_or_else(PoisonError::into_inner);
        earlier.remove(pool);
    }
}

impl State {
    /// Forgets the sums of a pool that is deleted: there may be any number of pools in the life of a daemon.
    pub(super) fn forget_counts(&mut self, pool: &Name) {
        self.ended.remove(pool);
        self.ended_channels.remove(pool);
        self.earlier_channels.counted.remove(pool);
    }

    /// Adds to a pool's sums what nothing will count any more.
    pub(super) fn keep_traffic(&mut self, pool: &Name, counted: Option<&Traffic>) {
        if let Some(counted) = counted {
            self.ended.entry(pool.clone()).or_default().add(counted);
        }
    }

    /// The same of a channel that is closed.
    pub(super) fn keep_channel(
        &mut self,
        pool: &Name,
        lease: &LeaseKey,
        counted: Option<&VsockTraffic>,
    ) {
        if let Some(counted) = counted {
            self.earlier_channels.learn(pool, lease, counted);
            let ended = self.ended_channels.entry(pool.clone()).or_default();
            ended.add(counted);
        }
        // The next lease by this name is another one.
        self.earlier_channels.unknown.remove(lease);
    }
}
