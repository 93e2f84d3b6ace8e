//! Creating, resizing and deleting pools.

use std::{
    collections::VecDeque,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use sandwire_api::{
    name::Name,
    pool::{Pool as ApiPool, PoolSpec, SlotCounts},
    slot::{DataPath, SlotKind},
};

use super::{Caller, PoolEntry, Shared, Slots, State, audit::HOST_INTERVAL_MAX, policies::Held};
use crate::{
    error::ServiceError,
    plan::{Plan, choose_data_path},
    pool::{Pool, SlotState},
};

/// Tearing a pool of thousands of slots down takes seconds.
const DELETE_WAIT: Duration = Duration::from_secs(120);
/// How often it is looked meanwhile what there is to do besides.
const DELETE_LOOK: Duration = Duration::from_secs(1);

/// A pool as it is at one moment. It shares the settings, of which copies are not made under the lock: they may have
/// a hundred thousand prefixes.
#[derive(Clone, Debug)]
pub struct PoolView {
    plan: Arc<Plan>,
    /// Tells the pool from others of its name that there were before: it begins to be counted anew.
    pub incarnation: u64,
    /// How many slots are kept ready.
    pub size: u32,
    /// Slots by their state.
    pub slots: SlotCounts,
    /// Why the pool can't be filled, if so.
    pub last_error: Option<String>,
}

impl PoolView {
    /// Its settings. Only their size may be another one than it has now.
    #[must_use]
    pub fn spec(&self) -> &PoolSpec {
        &self.plan.spec
    }

    /// How many slots its address plan has room for.
    #[must_use]
    pub fn slots_max(&self) -> u32 {
        self.plan.slots_max
    }

    /// The pool as the API shows it.
    #[must_use]
    pub fn to_api(&self) -> ApiPool {
        ApiPool {
            spec: PoolSpec {
                size: self.size,
                ..self.plan.spec.clone()
            },
            slots_max: self.plan.slots_max,
            slots: self.slots,
            last_error: self.last_error.clone(),
        }
    }
}

impl Slots {
    /// Creates a pool. One that exists with the same settings is left as it is.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn create_pool(&self, spec: &PoolSpec) -> Result<ApiPool, ServiceError> {
        let shared = &self.shared;
        let _gate = shared
            .pools_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let spec = &self.choose_data_path(spec);
        let plan = shared.plan(spec)?;
        shared.check_device(spec)?;
        shared.check_channel_paths(&plan)?;
        let state = shared.lock();
        if let Some(entry) = state.pools.get(&spec.name) {
            if entry.current_spec() == *spec {
                let view = entry.view();
                drop(state);
                return Ok(view.to_api());
            }
            return Err(conflict(
                "create",
                spec,
                "a pool by that name exists".to_owned(),
            ));
        }
        shared.create(state.check_apart("create", &plan).map(|()| state)?, plan)
    }

    /// Makes sure that a pool of the configuration exists: creates it, or adapts the size of one
    /// that exists. One with other settings is made anew if nobody has a lease of it.
    ///
    /// # Errors
    /// The settings can't work, or differ from those of a pool with leases, which goes on with the settings that it has;
    /// or the service is stopping.
    pub fn ensure_pool(&self, spec: &PoolSpec) -> Result<ApiPool, ServiceError> {
        if self.shared.lock().stopping {
            return Err(ServiceError::Stopping);
        }
        let spec = &self.choose_data_path(spec);
        let current = self
            .shared
            .lock()
            .pools
            .get(&spec.name)
            .map(PoolEntry::current_spec);
        let Some(current) = current else {
            return self.create_pool(spec);
        };
        if differs_in_size_at_most(&current, spec) {
            return self.resize_pool(&spec.name, spec.size);
        }
        // Nothing may be lost to a mistake in the new settings.
        self.shared.check_changed(spec)?;
        if can_change_live(&current, spec) {
            return self.change_live(&current, spec);
        }
        self.delete_pool(&spec.name).map_err(|error| match error {
            ServiceError::Conflict { reason, .. } => {
                let reason = format!(
                    "it exists with other settings, and {reason}; until then only its size, policy, data path, vsock, \
                     access and quarantine_seconds can change"
                );
                conflict("change", spec, reason)
            }
            other => other,
        })?;
        self.create_pool(spec)
            .inspect_err(|_| self.bring_back(&current))
    }

    /// Creates a pool again that was deleted for the sake of settings that the host refuses.
    fn bring_back(&self, spec: &PoolSpec) {
        match self.create_pool(spec) {
            Ok(_) => tracing::warn!(pool = %spec.name, "the pool goes on with its old settings"),
            Err(error) => {
                tracing::error!(pool = %spec.name, %error, "the pool can't go on with its old settings either");
            }
        }
    }

    /// Settings with `auto` replaced by the data path that this host can have.
    fn choose_data_path(&self, spec: &PoolSpec) -> PoolSpec {
        choose_data_path(spec, || match self.shared.network.check_ebpf() {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(pool = %spec.name, %error, "no eBPF data path here: the pool uses nft");
                false
            }
        })
    }

    /// Changes policy, data path, size, and who may use it, under leases. Only eBPF has policies that change live, so that
    /// a pool is there when its policy does.
    fn change_live(&self, current: &PoolSpec, spec: &PoolSpec) -> Result<ApiPool, ServiceError> {
        let name = &spec.name;
        // First: a right that is taken away waits for nothing that may fail.
        let (access, quarantine) = (&spec.access, spec.quarantine_seconds);
        if (&current.access, current.quarantine_seconds) != (access, quarantine) {
            self.set_pool_use(Caller::DAEMON, name, Some(access.clone()), Some(quarantine))?;
        }
        if spec.data_path == DataPath::Nft {
            self.set_pool_policy(Caller::DAEMON, name, spec.policy.clone())?;
            self.move_pool(name, spec.data_path)?;
        } else {
            if current.data_path != spec.data_path {
                self.move_pool(name, spec.data_path)?;
            }
            self.set_pool_policy(Caller::DAEMON, name, spec.policy.clone())?;
        }
        if current.vsock != spec.vsock {
            self.set_pool_vsock(Caller::DAEMON, name, spec.vsock.clone().unwrap_or_default())?;
        }
        self.resize_pool(name, spec.size)
    }

    /// All pools, by name, without copies of their settings.
    #[must_use]
    pub fn pool_views(&self) -> Vec<PoolView> {
        let state = self.shared.lock();
        state.pools.values().map(PoolEntry::view).collect()
    }

    /// A pool with its figures, without a copy of its settings.
    ///
    /// # Errors
    /// There is no such pool.
    pub fn pool_view(&self, name: &Name) -> Result<PoolView, ServiceError> {
        self.shared.lock().pool(name).map(PoolEntry::view)
    }

    /// All pools, by name.
    #[must_use]
    pub fn pools(&self) -> Vec<ApiPool> {
        let views = self.pool_views();
        views.iter().map(PoolView::to_api).collect()
    }

    /// A pool with its figures.
    ///
    /// # Errors
    /// There is no such pool.
    pub fn pool(&self, name: &Name) -> Result<ApiPool, ServiceError> {
        Ok(self.pool_view(name)?.to_api())
    }

    /// A pool's settings, with its current size.
    ///
    /// # Errors
    /// There is no such pool.
    pub fn pool_spec(&self, name: &Name) -> Result<PoolSpec, ServiceError> {
        Ok(self.pool(name)?.spec)
    }

    /// Changes how many slots are kept ready. Slots are built and torn down in the background.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn resize_pool(&self, name: &Name, size: u32) -> Result<ApiPool, ServiceError> {
        self.resize_pool_by(Caller::DAEMON, name, size)
    }

    /// The same by somebody who has to have the right to manage the pool.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn resize_pool_by(
        &self,
        caller: Caller,
        name: &Name,
        size: u32,
    ) -> Result<ApiPool, ServiceError> {
        let shared = &self.shared;
        let _gate = shared
            .pools_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut state = shared.lock();
        let entry = state.managed_pool(caller, name)?;
        let mut spec = entry.current_spec();
        if spec.size == size {
            let view = entry.view();
            drop(state);
            return Ok(view.to_api());
        }
        spec.size = size;
        // The rest stays, such as it is.
        shared.kept_plan(&spec)?;
        if let Err(error) = state.journal.put_pool(&spec) {
            state.journal_failed();
            return Err(error.into());
        }
        let entry = state.pool_mut(name)?;
        entry.resize(size);
        let view = entry.view();
        drop(state);
        shared.build_work.notify_all();
        shared.tear_down_work.notify_one();
        Ok(view.to_api())
    }

    /// Deletes a pool without leases: tears its slots down, which may take seconds, and then what
    /// the host has for it.
    ///
    /// # Errors
    /// It has leases, or its tear-down fails; then it stays.
    pub fn delete_pool(&self, name: &Name) -> Result<(), ServiceError> {
        self.delete_pool_by(Caller::DAEMON, name)
    }

    /// The same by somebody who has to have the right to manage the pool.
    ///
    /// # Errors
    /// It has leases, or its tear-down fails; then it stays.
    pub fn delete_pool_by(&self, caller: Caller, name: &Name) -> Result<(), ServiceError> {
        let shared = &self.shared;
        let _gate = shared
            .pools_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        shared.lock().managed_pool(caller, name)?;
        let plan = shared.begin_delete(name)?;
        let deleted = shared.await_empty(name).and_then(|()| {
            shared
                .network
                .remove_pool(&plan)
                .map_err(|source| ServiceError::Network {
                    operation: "delete",
                    object: format!("pool '{name}'"),
                    source,
                })
        });
        let mut state = shared.lock();
        let deleted = deleted.and_then(|()| {
            let removed = state.journal.remove_pool(name);
            removed.map_err(|error| {
                state.journal_failed();
                error.into()
            })
        });
        if deleted.is_ok() {
            if let Some(mut entry) = state.pools.remove(name) {
                state.former_rests.keep(&entry, shared.now());
                if let Some(held) = entry.take_policy() {
                    state.policies.give_up(&held, shared.now());
                }
            }
            state.policies.pools_have_changed();
            state.forget_counts(name);
        } else if let Some(entry) = state.pools.get_mut(name) {
            // It stays: filled again, and what of the host's side is gone is made again.
            entry.is_deleting = false;
            entry.resize(plan.spec.size);
            entry.not_added = Some("its deletion failed half-way; preparing it again".to_owned());
        }
        drop(state);
        if deleted.is_ok() {
            shared.forget_earlier(name);
        }
        shared.renew_routed_policies();
        shared.audit_work.notify_one();
        deleted
    }
}

impl Shared {
    fn plan(&self, spec: &PoolSpec) -> Result<Plan, ServiceError> {
        Plan::new(&self.settings.instance, spec).map_err(|source| ServiceError::Plan {
            pool: spec.name.clone(),
            source,
        })
    }

    /// The same of a pool that is there, with what a former version took perhaps.
    fn kept_plan(&self, spec: &PoolSpec) -> Result<Plan, ServiceError> {
        Plan::kept(&self.settings.instance, spec).map_err(|source| ServiceError::Plan {
            pool: spec.name.clone(),
            source,
        })
    }

    /// Refuses settings that a pool which exists can't have.
    fn check_changed(&self, spec: &PoolSpec) -> Result<(), ServiceError> {
        let plan = self.plan(spec)?;
        self.check_device(spec)?;
        self.check_channel_paths(&plan)?;
        self.lock().check_apart("change", &plan)
    }

    /// Journals a pool that passed all checks, prepares the host, and has it filled.
    fn create(
        &self,
        mut state: std::sync::MutexGuard<'_, State>,
        plan: Plan,
    ) -> Result<ApiPool, ServiceError> {
        let name = plan.spec.name.clone();
        let rests = state.former_rests.of(&plan, self.now());
        if let Err(error) = state.journal.create_pool(&plan.spec, &rests) {
            state.journal_failed();
            return Err(error.into());
        }
        drop(state);
        let added = self.add_with_policy(&plan);

        let mut state = self.lock();
        let policy = match added {
            Ok(policy) => policy,
            Err(error) => {
                if state.journal.remove_pool(&name).is_err() {
                    state.journal_failed();
                }
                return Err(error);
            }
        };
        let mut entry = PoolEntry::new(plan);
        entry.policy = policy;
        let auditor_has_rests_to_end = !rests.is_empty();
        for released in rests {
            let state = SlotState::Resting(released.rest);
            entry.pool.adopt(released.slot, state);
        }
        let view = entry.view();
        state.pools.insert(name, entry);
        state.policies.pools_have_changed();
        drop(state);
        self.renew_routed_policies();
        self.build_work.notify_all();
        if auditor_has_rests_to_end {
            self.audit_work.notify_one();
        }
        Ok(view.to_api())
    }

    /// Prepares the host for a pool, and has the data path know its policy.
    fn add_with_policy(&self, plan: &Plan) -> Result<Option<Held>, ServiceError> {
        self.network
            .add_pool(plan)
            .map_err(|source| ServiceError::Network {
                operation: "create",
                object: format!("pool '{}'", plan.spec.name),
                source,
            })?;
        if plan.spec.data_path == DataPath::Nft {
            return Ok(None);
        }
        self.hold_policy(plan, &plan.spec.policy)
            .map(Some)
            .inspect_err(|_| {
                if let Err(error) = self.network.remove_pool(plan) {
                    let pool = &plan.spec.name;
                    tracing::error!(%pool, %error, "cannot take back what the host was prepared with");
                }
            })
    }

    /// Stops a pool from handing out and filling, and has its slots torn down.
    fn begin_delete(&self, name: &Name) -> Result<Arc<Plan>, ServiceError> {
        let mut state = self.lock();
        let entry = state.pool_mut(name)?;
        let counts = entry.pool.counts();
        let leases = counts.leased + counts.held;
        if leases > 0 {
            let reason = format!("{leases} leases of it exist: release them first");
            return Err(conflict("delete", &entry.plan.spec, reason));
        }
        let plan = Arc::new(Plan {
            spec: entry.current_spec(),
            ..(*entry.plan).clone()
        });
        entry.is_deleting = true;
        entry.resize(0);
        drop(state);
        self.tear_down_work.notify_one();
        self.changed.notify_all();
        Ok(plan)
    }

    /// Waits until the kernel has nothing of any slot of the pool. The auditor can't look at the host meanwhile.
    fn await_empty(&self, name: &Name) -> Result<(), ServiceError> {
        let deadline = Instant::now() + DELETE_WAIT;
        let mut inspect_at = self.now() + HOST_INTERVAL_MAX;
        let mut state = self.lock();
        loop {
            let entry = state.pool_mut(name)?;
            // A slot that was just being built is ready now.
            let has_more = entry.trim();
            let counts = entry.pool.counts();
            let left = counts.ready + counts.building + counts.tearing_down;
            if left == 0 {
                return Ok(());
            }
            if state.stopping {
                return Err(ServiceError::Stopping);
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(ServiceError::Late {
                    object: format!("deleting pool '{name}'"),
                    state: format!("{left} slots are left; the pool stays: try again"),
                });
            }
            if has_more {
                self.tear_down_work.notify_one();
            }
            if self.now() >= inspect_at {
                drop(state);
                self.inspect_host_gated();
                inspect_at = self.now() + HOST_INTERVAL_MAX;
                state = self.lock();
                continue;
            }
            let timeout = (deadline - now).min(DELETE_LOOK);
            state = self.wait(&self.changed, state, Some(timeout));
        }
    }
}

impl State {
    /// Refuses a pool that would meet another one on the host.
    fn check_apart(&self, operation: &'static str, plan: &Plan) -> Result<(), ServiceError> {
        let name = &plan.spec.name;
        for (other_name, other) in self.pools.iter().filter(|(other, _)| *other != name) {
            if let Some((ours, theirs)) = plan.overlaps(&other.plan) {
                let reason = format!("{ours} overlaps {theirs} of pool '{other_name}'");
                return Err(conflict(operation, &plan.spec, reason));
            }
            if plan.tag == other.plan.tag {
                let reason = format!(
                    "its name gives interfaces the same names as pool '{other_name}': choose another"
                );
                return Err(conflict(operation, &plan.spec, reason));
            }
        }
        Ok(())
    }
}

impl PoolEntry {
    pub(super) fn new(plan: Plan) -> Self {
        static INCARNATIONS: AtomicU64 = AtomicU64::new(0);
        Self {
            pool: Pool::new(plan.spec.size, plan.slots_max),
            plan: Arc::new(plan),
            incarnation: INCARNATIONS.fetch_add(1, Ordering::Relaxed),
            not_added: None,
            is_deleting: false,
            policy: None,
            moving: None,
            tear_down: VecDeque::new(),
            tear_down_again: VecDeque::new(),
            tear_down_error: None,
        }
    }

    /// The pool's settings with the size that it has now.
    pub(super) fn current_spec(&self) -> PoolSpec {
        PoolSpec {
            size: self.pool.size(),
            ..self.plan.spec.clone()
        }
    }

    /// Queues ready slots beyond the size to be torn down. Returns whether there were any.
    pub(super) fn trim(&mut self) -> bool {
        let trimmed = self.pool.trim();
        self.tear_down.extend(&trimmed);
        !trimmed.is_empty()
    }

    /// Queues all slots that no lease has to be torn down: they are built anew.
    pub(super) fn discard_built(&mut self) {
        let discarded = self.pool.discard_all();
        self.tear_down.extend(discarded);
    }

    fn resize(&mut self, size: u32) {
        self.pool.resize(size);
        self.trim();
    }

    pub(super) fn view(&self) -> PoolView {
        let error = self.not_added.as_deref().or(self.pool.last_error());
        PoolView {
            plan: Arc::clone(&self.plan),
            incarnation: self.incarnation,
            size: self.pool.size(),
            slots: self.pool.counts(),
            last_error: error.map(ToOwned::to_owned),
        }
    }
}

fn differs_in_size_at_most(current: &PoolSpec, spec: &PoolSpec) -> bool {
    let resized = PoolSpec {
        size: spec.size,
        ..current.clone()
    };
    resized == *spec
}

/// Whether settings differ in nothing that slots are built by: policies, data path, size, who may use it, rests.
fn can_change_live(current: &PoolSpec, spec: &PoolSpec) -> bool {
    let with_those = PoolSpec {
        size: spec.size,
        policy: spec.policy.clone(),
        data_path: spec.data_path,
        vsock: spec.vsock.clone(),
        access: spec.access.clone(),
        quarantine_seconds: spec.quarantine_seconds,
        ..current.clone()
    };
    let is_on_nft = |spec: &PoolSpec| spec.data_path == DataPath::Nft;
    let moves = current.data_path != spec.data_path;
    let can_move = spec.kind == SlotKind::Netns && spec.data_path != DataPath::Xdp;
    let stays_on_nft = is_on_nft(current) && is_on_nft(spec);
    with_those == *spec && (!moves || can_move) && (!stays_on_nft || current.policy == spec.policy)
}

fn conflict(operation: &'static str, spec: &PoolSpec, reason: String) -> ServiceError {
    ServiceError::Conflict {
        operation,
        object: format!("pool '{}'", spec.name),
        reason,
    }
}
