//! Moving a pool of netns slots between the nft and the eBPF data path under its leases, and taking
//! over what the data path had before a start.
//!
//! A move is journaled before it begins and forgotten when every leased slot has arrived and what else was built
//! for the data path before is gone. Until then the host serves both data paths, and each slot is moved by itself:
//! whatever interrupts a move, the auditor goes on with it.
//! No slot is moved twice, but after a start, which can't tell: for a moment the host's rules alone judge its packets.
//! Ready slots are simply built anew.

use std::{
    collections::BTreeSet,
    sync::{Arc, PoisonError},
    time::Duration,
};

use sandwire_api::{
    name::Name,
    pool::Pool as ApiPool,
    slot::{DataPath, SlotKind},
};

use super::{
    Caller, LeaseEntry, PoolEntry, Shared, Slots, State, policies::Held, release::IDLE_WAIT,
};
use crate::{
    error::{PlanError, ServiceError},
    lease::LeaseKey,
    network::Tenancy,
    plan::{Plan, SlotNumber, SlotPlan},
    pool::SlotState,
};

/// Slots that the host is prepared for together. It isn't for long, and each takes some 20 ms.
const PREPARED_TOGETHER: usize = 128;

/// A move that has begun.
pub(super) struct Move {
    /// The data path that the pool leaves.
    from: DataPath,
    /// Slots that may still have it. Whatever else is built or torn down meanwhile doesn't hold the move up.
    left: BTreeSet<SlotNumber>,
}

impl Slots {
    /// Moves a pool to another data path. Packets of its leases go on passing. Blocks for some
    /// milliseconds per lease; what can't be done at once is done by and by.
    ///
    /// # Errors
    /// Nothing changed: the settings don't fit to the other data path, or the host refuses.
    pub fn move_pool(&self, name: &Name, data_path: DataPath) -> Result<ApiPool, ServiceError> {
        self.move_pool_by(Caller::DAEMON, name, data_path)
    }

    /// The same by somebody who has to have the right to manage the pool.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn move_pool_by(
        &self,
        caller: Caller,
        name: &Name,
        data_path: DataPath,
    ) -> Result<ApiPool, ServiceError> {
        let shared = &self.shared;
        let _gate = shared
            .pools_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        shared.lock().managed_pool(caller, name)?;
        if shared.begin_move(name, data_path)? {
            shared.tear_down_work.notify_one();
            shared.build_work.notify_all();
            shared.move_slots(name, IDLE_WAIT);
        }
        self.pool(name)
    }
}

impl Shared {
    /// Prepares the host for the other data path and journals that. Returns whether there is
    /// something to move.
    pub(super) fn begin_move(
        &self,
        name: &Name,
        data_path: DataPath,
    ) -> Result<bool, ServiceError> {
        let (before, size) = {
            let state = self.lock();
            let entry = state.pool(name)?;
            if entry.plan.spec.data_path == data_path {
                return Ok(entry.moving.is_some());
            }
            check_move(&state, name, data_path)?;
            (Arc::clone(&entry.plan), entry.pool.size())
        };
        let from = before.spec.data_path;
        let plan = before
            .with_data_path(data_path)
            .map_err(|source| ServiceError::Plan {
                pool: name.clone(),
                source,
            })?;
        let failed = |source| ServiceError::Network {
            operation: "move",
            object: format!("pool '{name}'"),
            source,
        };
        self.network
            .change_pool(&plan, Some(from))
            .map_err(failed)?;
        let held = match data_path {
            DataPath::Nft => Ok(None),
            _ => self.hold_policy(&plan, &plan.spec.policy).map(Some),
        };
        let mut spec = plan.spec.clone();
        spec.size = size;
        let mut state = self.lock();
        // Leases may have come meanwhile.
        let held = held.and_then(|held| check_move(&state, name, data_path).map(|()| held));
        let journaled = held.and_then(|held| match state.journal.begin_move(&spec, from) {
            Ok(()) => Ok(held),
            Err(error) => {
                let unused = held.iter();
                unused.for_each(|held| state.policies.give_up(held, self.now()));
                Err(error.into())
            }
        });
        let held = match journaled {
            Ok(held) => held,
            Err(error) => {
                drop(state);
                if let Err(error) = self.network.change_pool(&before, None) {
                    tracing::error!(pool = %name, %error, "cannot take back the begin of a move");
                }
                return Err(error);
            }
        };
        let entry = state.pool_mut(name)?;
        entry.plan = Arc::new(plan);
        // Slots of leases go on by the policy that they have until they are moved.
        if let Some(held) = held {
            entry.policy = Some(held);
        }
        entry.begin_move(from);
        Ok(true)
    }

    /// Moves what is left to be moved of a pool, and ends the move if that is all. Waits so long for who works on a
    /// lease's slot.
    pub(super) fn move_slots(&self, name: &Name, patience: Duration) {
        let keys = {
            let state = self.lock();
            let mut keys = state.leases_of(name);
            keys.retain(|key| state.is_to_move(key));
            keys
        };
        for together in keys.chunks(PREPARED_TOGETHER) {
            self.prepare_moves(together);
            for key in together {
                let Ok(state) = self.wait_idle_for(key, patience) else {
                    // Ended in the meantime, or somebody works on it: to be seen by the next try.
                    continue;
                };
                self.move_lease(state, key);
            }
        }
        if let Err(error) = self.end_move(name) {
            tracing::warn!(pool = %name, %error, "cannot end the move of a pool; trying again");
        }
    }

    /// Has the host be prepared for the moves of those that nobody works on.
    fn prepare_moves(&self, keys: &[LeaseKey]) {
        let state = self.lock();
        let movable = keys.iter().filter(|key| {
            let lease = state.leases.get(*key);
            lease.is_some_and(|lease| !lease.is_busy) && state.is_to_move(key)
        });
        let slots: Vec<SlotPlan> = movable
            .filter_map(|key| state.slot_and_tenancy(key))
            .map(|(slot, _)| slot)
            .collect();
        drop(state);
        if slots.len() > 1
            && let Err(error) = self.network.prepare_moves(&slots)
        {
            tracing::warn!(%error, "cannot prepare the host for moves of many slots; each takes longer");
        }
    }

    fn move_lease(&self, mut state: std::sync::MutexGuard<'_, State>, key: &LeaseKey) {
        // Another lease by the same name has a slot of its pool's data path.
        if !state.is_to_move(key) {
            return;
        }
        let Some((slot, tenancy)) = state.slot_and_tenancy(key) else {
            return;
        };
        let Some(pool) = state.leases.get(key).map(|lease| lease.record.pool.clone()) else {
            return;
        };
        state.set_busy(key, true);
        drop(state);
        let moved = self.network.move_slot(&slot, tenancy.as_ref());
        let mut state = self.lock();
        if let Ok(counted) = &moved {
            // The slot begins to count anew when it comes back.
            state.keep_traffic(&pool, counted.as_ref());
            if let Some(entry) = state.pools.get_mut(&pool) {
                entry.leaves_former_path(slot.number);
            }
        }
        state.set_busy(key, false);
        drop(state);
        self.changed.notify_all();
        if let Err(error) = moved {
            tracing::error!(lease = %key, %error, "cannot move a slot to its pool's data path; trying again");
        }
    }

    fn end_move(&self, name: &Name) -> Result<(), ServiceError> {
        let plan = {
            let state = self.lock();
            let entry = state.pool(name)?;
            let moving = entry.moving.as_ref();
            if moving.is_some_and(|moving| !moving.left.is_empty()) {
                // The auditor comes again.
                return Ok(());
            }
            Arc::clone(&entry.plan)
        };
        self.network
            .change_pool(&plan, None)
            .map_err(|source| ServiceError::Network {
                operation: "end the move of",
                object: format!("pool '{name}'"),
                source,
            })?;
        let now = self.now();
        let mut state = self.lock();
        state.journal.end_move(name)?;
        let entry = state.pool_mut(name)?;
        entry.moving = None;
        if entry.plan.spec.data_path == DataPath::Nft
            && let Some(held) = entry.take_policy()
        {
            state.policies.give_up(&held, now);
        }
        Ok(())
    }

    /// Goes on with moves that could not be ended, unless a pool just comes or goes.
    pub(super) fn retry_moves(&self) {
        let Some(_gate) = self.try_pools_gate() else {
            return;
        };
        let moving: Vec<Name> = {
            let state = self.lock();
            let pools = state.pools.iter();
            let moving =
                pools.filter(|(_, entry)| entry.moving.is_some() && entry.not_added.is_none());
            moving.map(|(name, _)| name.clone()).collect()
        };
        for name in moving {
            // The auditor comes again.
            self.move_slots(&name, Duration::ZERO);
        }
    }

    /// Brings the data path to what the journal says of a pool, after a start or when the host could
    /// be prepared for it at last.
    pub(super) fn adopt_pool(&self, name: &Name) -> Result<(), ServiceError> {
        let Some(plan) = self
            .lock()
            .pools
            .get(name)
            .map(|entry| Arc::clone(&entry.plan))
        else {
            return Ok(());
        };
        let is_moving = self.lock().pool(name)?.moving.is_some();
        if plan.spec.data_path == DataPath::Nft && !is_moving {
            return Ok(());
        }
        let held = self.hold_former_policy(&plan, &plan.spec.policy)?;
        let mut state = self.lock();
        // Of an earlier try.
        if let Some(before) = state.pool_mut(name)?.policy.replace(held) {
            state.policies.give_up(&before, self.now());
        }
        drop(state);
        let keys = self.lock().leases_of(name);
        for key in keys {
            let policy = self
                .lock()
                .leases
                .get(&key)
                .and_then(|lease| lease.record.policy.clone());
            if let Some(policy) = policy {
                let held = self.hold_former_policy(&plan, &policy)?;
                self.lock().adopt_policy(&key, held, self.now());
            }
        }
        let slots = self.lock().slots_to_adopt(name);
        for (slot, tenancy) in slots {
            self.network
                .adopt(&slot, tenancy.as_ref())
                .map_err(|source| ServiceError::Network {
                    operation: "adopt",
                    object: format!("slot {}", slot.netns_name),
                    source,
                })?;
        }
        Ok(())
    }
}

/// Refuses a move that makes no sense, or that leases stand against.
fn check_move(state: &State, name: &Name, data_path: DataPath) -> Result<(), ServiceError> {
    let entry = state.pool(name)?;
    let refuse = |reason: String| {
        Err(ServiceError::Conflict {
            operation: "move",
            object: format!("pool '{name}'"),
            reason,
        })
    };
    if entry.plan.spec.kind != SlotKind::Netns || data_path == DataPath::Xdp {
        return Err(ServiceError::Plan {
            pool: name.clone(),
            source: PlanError::Unsupported {
                setting: "data_path",
                value: format!("{data_path:?}").to_lowercase(),
                reason: "can't be changed under this pool: only netns slots move, between nft and ebpf",
            },
        });
    }
    if entry.moving.is_some() {
        return refuse("it is just being moved: try again".to_owned());
    }
    if let Some(error) = &entry.not_added {
        return refuse(format!("the host is not prepared for it: {error}"));
    }
    let mut leases = state.leases.values();
    let own = leases.find(|lease| lease.record.pool == *name && lease.record.policy.is_some());
    match own {
        Some(lease) if data_path == DataPath::Nft => refuse(format!(
            "lease '{}' has a policy of its own, which nft has not: reset it first",
            lease.record.key.name
        )),
        _ => Ok(()),
    }
}

impl PoolEntry {
    /// The data path that some of its slots may still have.
    pub(super) fn moving_from(&self) -> Option<DataPath> {
        self.moving.as_ref().map(|moving| moving.from)
    }

    /// Notes which slots may have the data path that the pool leaves. Those that no lease has are built anew.
    pub(super) fn begin_move(&mut self, from: DataPath) {
        self.discard_built();
        let left = self.pool.states().filter(|(_, state)| state.is_present());
        let left = left.map(|(number, _)| number).collect();
        self.moving = Some(Move { from, left });
    }

    /// Nothing of a slot has the data path any more that the pool leaves.
    pub(super) fn leaves_former_path(&mut self, number: SlotNumber) {
        if let Some(moving) = &mut self.moving {
            moving.left.remove(&number);
        }
    }
}

impl State {
    fn leases_of(&self, pool: &Name) -> Vec<LeaseKey> {
        let leases = self.leases.values();
        leases
            .filter(|lease| lease.record.pool == *pool)
            .map(|lease| lease.record.key.clone())
            .collect()
    }

    fn is_to_move(&self, lease: &LeaseKey) -> bool {
        let Some(LeaseEntry { record, .. }) = self.leases.get(lease) else {
            return false;
        };
        let moving = self.pools.get(&record.pool);
        let moving = moving.and_then(|entry| entry.moving.as_ref());
        moving.is_some_and(|moving| moving.left.contains(&record.slot))
    }

    /// Has a lease hold a policy of its own, instead of one from an earlier try.
    fn adopt_policy(&mut self, key: &LeaseKey, held: Held, now: Duration) {
        let unused = match self.leases.get_mut(key) {
            Some(lease) => lease.policy.replace(held),
            None => Some(held),
        };
        if let Some(unused) = unused {
            self.policies.give_up(&unused, now);
        }
    }

    pub(super) fn slot_and_tenancy(&self, key: &LeaseKey) -> Option<(SlotPlan, Option<Tenancy>)> {
        let lease = self.leases.get(key)?;
        let slot = self.slot_plan(&lease.record).ok()?;
        Some((slot, self.tenancy(key)))
    }

    /// Slots that are there, with what the data path is to know of their tenants.
    fn slots_to_adopt(&self, pool: &Name) -> Vec<(SlotPlan, Option<Tenancy>)> {
        let Some(entry) = self.pools.get(pool) else {
            return Vec::new();
        };
        let plan: &Plan = &entry.plan;
        let present = entry.pool.states().filter(|(_, state)| {
            matches!(
                state,
                SlotState::Ready | SlotState::Leased | SlotState::Held
            )
        });
        present
            .map(|(number, _)| {
                let key = self.tenants.get(&(pool.clone(), number));
                let lease = key.and_then(|key| self.leases.get(key));
                let slot =
                    lease.map_or_else(|| plan.slot(number), |lease| lease.record.slot_of(plan));
                (slot, key.and_then(|key| self.tenancy(key)))
            })
            .collect()
    }
}
