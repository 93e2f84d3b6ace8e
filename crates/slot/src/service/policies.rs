//! What sandboxes may reach: policies of pools and leases, in the journal and in the data path.
//!
//! A policy is compiled once, however many sandboxes have it. Its old place is given back a second
//! after its last user left: until then packets under way may look at it.

mod groups;
mod hold;
mod routed;

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use sandwire_api::{
    lease::LeasePolicy,
    name::Name,
    pool::{AccessVerb, PolicySpec, Pool as ApiPool, UplinkPolicy},
    slot::DataPath,
};

use self::groups::{Groups, Membership};
use super::{Caller, PoolEntry, Shared, Slots, State};
use crate::{
    error::ServiceError,
    lease::{LeaseKey, LeaseRecord},
    network::{PolicyIndex, Tenancy},
    plan::Plan,
};

/// How long packets that are under way may still look at a policy.
const GRACE: Duration = Duration::from_secs(1);

/// Policies that the data path knows, each once.
#[derive(Debug, Default)]
pub(super) struct Policies {
    known: HashMap<Arc<str>, Known>,
    /// Policies without users, and when they may go.
    unused: Vec<(Duration, PolicyIndex)>,
    groups: Groups,
    /// Pools have come or gone, of which policies with routes of their own don't know.
    have_pools_changed: bool,
}

#[derive(Debug)]
struct Known {
    index: Place,
    users: u32,
    /// What it is compiled from again, if it has routes of its own.
    routed: Option<PolicySpec>,
    membership: Membership,
}

/// Where the data path has a policy, for all that hold it.
type Place = Arc<AtomicU32>;

/// A hold on a policy that the data path knows. To be given back with [`Policies::give_up`].
#[derive(Clone, Debug)]
pub(super) struct Held {
    key: Arc<str>,
    index: Place,
    group: u32,
}

impl Held {
    pub(super) fn tenancy(&self, is_process: bool) -> Tenancy {
        Tenancy {
            policy: index_of(&self.index),
            group: self.group,
            is_process,
        }
    }
}

impl Policies {
    fn hold(&mut self, key: &Arc<str>) -> Option<Held> {
        let known = self.known.get_mut(key)?;
        known.users += 1;
        Some(Held {
            key: Arc::clone(key),
            index: Arc::clone(&known.index),
            group: known.membership.group,
        })
    }

    pub(super) fn give_up(&mut self, held: &Held, now: Duration) {
        let Some(known) = self.known.get_mut(&held.key) else {
            return;
        };
        known.users -= 1;
        if known.users == 0 {
            self.unused.push((now + GRACE, index_of(&known.index)));
            self.groups.remove(&known.membership);
            self.known.remove(&held.key);
        }
    }

    pub(super) fn in_use(&self) -> BTreeSet<PolicyIndex> {
        let known = self.known.values().map(|known| index_of(&known.index));
        let unused = self.unused.iter().map(|(_, index)| *index);
        known.chain(unused).collect()
    }
}

impl Slots {
    /// What a lease may reach.
    ///
    /// # Errors
    /// There is no such lease for this caller.
    pub fn lease_policy(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
    ) -> Result<LeasePolicy, ServiceError> {
        let key = caller.lease_key(owner_uid, name);
        let state = self.shared.lock();
        let record = &state.lease(caller, &key)?.record;
        let own = record.policy.clone();
        let plan = Arc::clone(&state.pool(&record.pool)?.plan);
        drop(state);
        Ok(LeasePolicy {
            own: own.is_some(),
            policy: own.as_deref().unwrap_or(&plan.spec.policy).clone(),
        })
    }

    /// Gives a lease a policy of its own, or its pool's again: at once, as a whole, and for
    /// connections that exist as well. Needs the right to manage the pool; to join another group takes root.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn set_policy(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
        policy: Option<PolicySpec>,
    ) -> Result<LeasePolicy, ServiceError> {
        let policy = policy.map(Arc::new);
        let key = caller.lease_key(owner_uid, name);
        let shared = &self.shared;
        let plan = {
            let state = shared.lock();
            let record = &state.lease(caller, &key)?.record;
            let plan = Arc::clone(&state.pool(&record.pool)?.plan);
            state.check_change(caller, &key, &plan.spec.name, None)?;
            plan
        };
        let pool = &plan.spec.name;
        let held = match &policy {
            Some(policy) => {
                check_own(&plan, policy)?;
                shared
                    .lock()
                    .check_change(caller, &key, pool, Some(policy))?;
                Some(shared.hold_policy(&plan, policy)?)
            }
            None => None,
        };
        let done = shared.replace_policy(caller, &key, pool, policy.as_ref(), held.clone());
        if let (Err(_), Some(held)) = (&done, &held) {
            let now = shared.now();
            shared.lock().policies.give_up(held, now);
        }
        done?;
        shared.sync_group_pairs();
        self.lease_policy(caller, owner_uid, name)
    }

    /// Changes what the sandboxes of a pool may reach: at once for all leases without a policy of
    /// their own. Needs an eBPF data path, and the right to manage the pool; to join another group takes root.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn set_pool_policy(
        &self,
        caller: Caller,
        name: &Name,
        policy: PolicySpec,
    ) -> Result<ApiPool, ServiceError> {
        let shared = &self.shared;
        let _gate = shared
            .pools_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (plan, spec) = {
            let state = shared.lock();
            let entry = state.managed_pool(caller, name)?;
            if entry.plan.spec.policy == policy {
                drop(state);
                return self.pool(name);
            }
            state.check_uplinks(name, policy.uplink)?;
            (Arc::clone(&entry.plan), entry.current_spec())
        };
        if plan.spec.data_path == DataPath::Nft {
            return Err(unsupported_in_nft(&plan));
        }
        demand_group(caller, &plan, &plan.spec.policy, &policy)?;
        let changed = plan
            .with_policy(policy)
            .map_err(|source| plan_error(&plan, source))?;
        let held = shared.hold_policy(&changed, &changed.spec.policy)?;
        let done = shared.change_pool_policy(&changed, spec.size, &held);
        if done.is_err() {
            let now = shared.now();
            shared.lock().policies.give_up(&held, now);
        }
        done?;
        shared.sync_group_pairs();
        self.pool(name)
    }
}

impl Shared {
    /// Gives back the places of policies that nobody has had for a while.
    pub(super) fn remove_unused_policies(&self, now: Duration) {
        let due: Vec<PolicyIndex> = {
            let unused = &mut self.lock().policies.unused;
            let due = unused.extract_if(.., |(at, _)| *at <= now);
            due.map(|(_, index)| index).collect()
        };
        for index in due {
            self.network.remove_policy(index);
        }
    }

    /// Gives a lease of that pool the policy. All that was judged before the data path was told of it is judged once more:
    /// that takes as long as the policy is large, and the owner may have got another lease of that name meanwhile.
    pub(super) fn replace_policy(
        &self,
        caller: Caller,
        key: &LeaseKey,
        pool: &Name,
        policy: Option<&Arc<PolicySpec>>,
        held: Option<Held>,
    ) -> Result<(), ServiceError> {
        let mut state = self.wait_idle(key)?;
        let lease = state.leases.get(key).ok_or_else(|| super::no_lease(key))?;
        if lease.is_releasing() {
            return Err(ServiceError::Conflict {
                operation: "set the policy of",
                object: format!("lease '{}'", key.name),
                reason: "it is being released".to_owned(),
            });
        }
        let record = lease.record.clone();
        state.check_change(caller, key, pool, policy.map(|policy| &**policy))?;
        let slot = state.slot_plan(&record)?;
        let entry = state.pool(&record.pool)?;
        // It has moved there since the policy was looked at.
        if held.is_some() && entry.plan.spec.data_path == DataPath::Nft {
            return Err(unsupported_in_nft(&entry.plan));
        }
        let Some(tenancy) = held
            .as_ref()
            .or(entry.policy.as_ref())
            .map(|held| held.tenancy(record.is_process))
        else {
            return Err(unsupported_in_nft(&entry.plan));
        };
        if let Err(error) = state
            .journal
            .set_lease_policy(key, policy.map(|policy| &**policy))
        {
            state.journal_failed();
            return Err(error.into());
        }
        if let Err(source) = self.network.set_policy(&slot, &tenancy) {
            // The journal goes back to what the data path has.
            if state
                .journal
                .set_lease_policy(key, record.policy.as_deref())
                .is_err()
            {
                state.journal_failed();
            }
            return Err(ServiceError::Network {
                operation: "set the policy of",
                object: format!("lease '{}'", key.name),
                source,
            });
        }
        let now = self.now();
        if let Some(lease) = state.leases.get_mut(key) {
            lease.record.policy = policy.cloned();
            if let Some(before) = std::mem::replace(&mut lease.policy, held) {
                state.policies.give_up(&before, now);
            }
        }
        Ok(())
    }

    fn change_pool_policy(
        &self,
        changed: &Plan,
        size: u32,
        held: &Held,
    ) -> Result<(), ServiceError> {
        let name = &changed.spec.name;
        let failed = |source| ServiceError::Network {
            operation: "change the policy of",
            object: format!("pool '{name}'"),
            source,
        };
        let (before, from) = {
            let state = self.lock();
            let entry = state.pool(name)?;
            (Arc::clone(&entry.plan), entry.moving_from())
        };
        self.network.change_pool(changed, from).map_err(failed)?;
        let mut spec = changed.spec.clone();
        spec.size = size;
        let mut state = self.lock();
        if let Err(error) = state.journal.put_pool(&spec) {
            state.journal_failed();
            drop(state);
            if let Err(error) = self.network.change_pool(&before, from) {
                tracing::error!(pool = %name, %error, "cannot take back a change of policy");
            }
            return Err(error.into());
        }
        let entry = state.pool_mut(name)?;
        entry.plan = Arc::new(changed.clone());
        let old = entry.policy.replace(held.clone());
        let now = self.now();
        let records = state.leases_with_pool_policy(name);
        let changes = records.iter().map(|record| {
            let tenancy = held.tenancy(record.is_process);
            (record.slot_of(changed), tenancy)
        });
        let changes: Vec<_> = changes.collect();
        for (record, set) in records.iter().zip(self.network.set_policies(&changes)) {
            if let Err(error) = set {
                // The auditor finds the slot with a policy that it should not have.
                tracing::error!(lease = %record.key, %error, "cannot set the policy of a lease");
            }
        }
        if let Some(old) = old {
            state.policies.give_up(&old, now);
        }
        Ok(())
    }
}

impl State {
    /// What the data path is to know of a lease; none in the nft data path.
    pub(super) fn tenancy(&self, key: &LeaseKey) -> Option<Tenancy> {
        let is_process = self.leases.get(key)?.record.is_process;
        Some(self.held_by(key)?.tenancy(is_process))
    }

    /// The policy of a lease, its own or its pool's.
    fn held_by(&self, key: &LeaseKey) -> Option<&Held> {
        let lease = self.leases.get(key)?;
        let pool = self.pools.get(&lease.record.pool)?;
        lease.policy.as_ref().or(pool.policy.as_ref())
    }

    fn leases_with_pool_policy(&self, pool: &Name) -> Vec<LeaseRecord> {
        let leases = self.leases.values();
        leases
            .filter(|lease| lease.record.pool == *pool && lease.policy.is_none())
            .map(|lease| lease.record.clone())
            .collect()
    }

    /// Refuses what a caller may not do to the policy of a lease of that pool.
    fn check_change(
        &self,
        caller: Caller,
        key: &LeaseKey,
        pool: &Name,
        policy: Option<&PolicySpec>,
    ) -> Result<(), ServiceError> {
        let record = &self.lease(caller, key)?.record;
        if record.pool != *pool {
            return Err(super::no_lease(key));
        }
        let plan = &self.pool(pool)?.plan;
        caller.demand(AccessVerb::Manage, "set policies of", &plan.spec)?;
        let Some(policy) = policy else {
            return Ok(());
        };
        check_of_pool(plan, policy)?;
        let before = record.policy.as_deref().unwrap_or(&plan.spec.policy);
        demand_group(caller, plan, before, policy)
    }

    /// Refuses an uplink policy of a pool that doesn't fit to those of its leases.
    fn check_uplinks(&self, pool: &Name, uplink: UplinkPolicy) -> Result<(), ServiceError> {
        let misfit = self.leases.values().find(|lease| {
            let own = lease.record.policy.as_ref();
            lease.record.pool == *pool && own.is_some_and(|own| !uplinks_fit(own.uplink, uplink))
        });
        match misfit {
            None => Ok(()),
            Some(lease) => Err(ServiceError::Conflict {
                operation: "change the policy of",
                object: format!("pool '{pool}'"),
                reason: format!(
                    "lease '{}' has a policy of its own with another uplink: change that first",
                    lease.record.key.name
                ),
            }),
        }
    }
}

impl PoolEntry {
    /// Lets go of the pool's policy.
    pub(super) fn take_policy(&mut self) -> Option<Held> {
        self.policy.take()
    }
}

/// Checks a policy that a lease of the pool is to have.
pub(super) fn check_own(plan: &Plan, policy: &PolicySpec) -> Result<(), ServiceError> {
    if plan.spec.data_path == DataPath::Nft {
        return Err(unsupported_in_nft(plan));
    }
    plan.check_policy(policy)
        .map_err(|source| plan_error(plan, source))?;
    check_uplink(plan, policy)
}

/// Checks once more, of a policy that a lease of the pool was allowed to have, what may have changed since then.
pub(super) fn check_still(
    caller: Caller,
    plan: &Plan,
    policy: &PolicySpec,
) -> Result<(), ServiceError> {
    caller.demand(AccessVerb::Manage, "set policies of", &plan.spec)?;
    if plan.spec.data_path == DataPath::Nft {
        return Err(unsupported_in_nft(plan));
    }
    check_of_pool(plan, policy)?;
    demand_group(caller, plan, &plan.spec.policy, policy)
}

/// Checks of a policy what depends on the pool, which may be another by now.
fn check_of_pool(plan: &Plan, policy: &PolicySpec) -> Result<(), ServiceError> {
    plan.check_policy_of_kind(policy)
        .map_err(|source| plan_error(plan, source))?;
    check_uplink(plan, policy)
}

/// Refuses an uplink of a lease's own that the pool's doesn't leave room for.
fn check_uplink(plan: &Plan, policy: &PolicySpec) -> Result<(), ServiceError> {
    if !uplinks_fit(policy.uplink, plan.spec.policy.uplink) {
        return Err(ServiceError::Invalid {
            field: "policy.uplink",
            value: format!("{:?}", policy.uplink).to_lowercase(),
            reason: format!(
                "the host masquerades for pool '{}' as a whole: use the pool's own, or deny",
                plan.spec.name
            ),
        });
    }
    Ok(())
}

/// Refuses to have sandboxes join a group that neither they nor their pool are in: whether a packet may go to another
/// sandbox of its group is decided by the sender's policy alone, so that those who are there would have to agree.
pub(super) fn demand_group(
    caller: Caller,
    plan: &Plan,
    before: &PolicySpec,
    policy: &PolicySpec,
) -> Result<(), ServiceError> {
    let group = plan.group_of(policy);
    let own = plan.group_of(&plan.spec.policy);
    if caller.privileged || [own, plan.group_of(before)].contains(&group) {
        return Ok(());
    }
    Err(ServiceError::ForbiddenGroup {
        uid: caller.uid,
        pool: plan.spec.name.clone(),
        group: group.clone(),
        own: own.clone(),
    })
}

/// The host's masquerading goes by the pool's prefixes: a lease can do without, but not otherwise.
fn uplinks_fit(own: UplinkPolicy, pools: UplinkPolicy) -> bool {
    own == pools || own == UplinkPolicy::Deny
}

pub(super) fn unsupported_in_nft(plan: &Plan) -> ServiceError {
    ServiceError::Plan {
        pool: plan.spec.name.clone(),
        source: crate::error::PlanError::Unsupported {
            setting: "data_path",
            value: "nft".to_owned(),
            reason: "has one policy for all of the pool, which doesn't change under leases: move it first, by `sandwire pool \
                     set POOL --data-path ebpf`",
        },
    }
}

fn plan_error(plan: &Plan, source: crate::error::PlanError) -> ServiceError {
    ServiceError::Plan {
        pool: plan.spec.name.clone(),
        source,
    }
}

fn index_of(place: &Place) -> PolicyIndex {
    PolicyIndex(place.load(Ordering::Relaxed))
}
