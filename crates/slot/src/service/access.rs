//! Who may do what, by the credentials of the caller's socket.

use std::{
    num::NonZeroU32,
    sync::{Arc, PoisonError},
};

use sandwire_api::{
    name::Name,
    pool::{AccessRule, AccessVerb, Pool as ApiPool, PoolSpec},
};

use super::{PoolEntry, Slots, State};
use crate::{error::ServiceError, lease::LeaseKey};

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Numeric user.
    pub uid: u32,
    /// Numeric primary group.
    pub gid: u32,
    /// Root, or the daemon's own user: may do everything.
    pub privileged: bool,
}

impl Caller {
    /// The daemon itself, which does what its configuration says.
    pub(super) const DAEMON: Self = Self {
        uid: 0,
        gid: 0,
        privileged: true,
    };

    /// Whether the pool's settings grant a verb to this caller.
    #[must_use]
    pub fn may(self, verb: AccessVerb, spec: &PoolSpec) -> bool {
        self.privileged || self.rules(verb, spec).next().is_some()
    }

    /// Rules that grant a verb to this caller.
    fn rules(self, verb: AccessVerb, spec: &PoolSpec) -> impl Iterator<Item = &AccessRule> {
        spec.access.iter().filter(move |rule| {
            rule.verbs.contains(&verb)
                && (rule.uids.contains(&self.uid) || rule.gids.contains(&self.gid))
        })
    }

    /// How many leases of the pool this caller may hold; none where its room alone says.
    pub(super) fn leases_max(self, spec: &PoolSpec) -> Option<u32> {
        let rules = self.rules(AccessVerb::Acquire, spec);
        // One without a bound is more than any.
        let bounds = rules.map(|rule| rule.leases_max.map_or(u32::MAX, NonZeroU32::get));
        let most = bounds.max().filter(|most| *most < u32::MAX);
        most.filter(|_| !self.privileged)
    }

    /// The lease that this caller means by a name: its own, unless it names another owner.
    #[must_use]
    pub fn lease_key(self, owner_uid: Option<u32>, name: &Name) -> LeaseKey {
        LeaseKey {
            owner_uid: owner_uid.unwrap_or(self.uid),
            name: name.clone(),
        }
    }

    /// Whether this caller may see and release a lease of the pool.
    pub(super) fn may_see(self, lease: &LeaseKey, spec: &PoolSpec) -> bool {
        self.uid == lease.owner_uid || self.may(AccessVerb::Manage, spec)
    }

    pub(super) fn demand(
        self,
        verb: AccessVerb,
        operation: &'static str,
        spec: &PoolSpec,
    ) -> Result<(), ServiceError> {
        if self.may(verb, spec) {
            return Ok(());
        }
        Err(ServiceError::Forbidden {
            uid: self.uid,
            operation,
            object: format!("pool '{}'", spec.name),
        })
    }
}

impl Slots {
    /// Changes who may use a pool, which is root's to say, and how long its released addresses rest; what is absent stays.
    /// Both count from now on: leases, published ports and rests that are there stay as they are.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn set_pool_use(
        &self,
        caller: Caller,
        name: &Name,
        access: Option<Vec<AccessRule>>,
        quarantine_seconds: Option<u32>,
    ) -> Result<ApiPool, ServiceError> {
        let shared = &self.shared;
        let _gate = shared
            .pools_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut state = shared.lock();
        let entry = state.managed_pool(caller, name)?;
        if access.is_some() && !caller.privileged {
            return Err(ServiceError::Forbidden {
                uid: caller.uid,
                operation: "change who may use",
                object: format!("pool '{name}'"),
            });
        }
        let mut spec = entry.current_spec();
        spec.access = access.unwrap_or(spec.access);
        spec.quarantine_seconds = quarantine_seconds.unwrap_or(spec.quarantine_seconds);
        let plan = entry
            .plan
            .with_use(spec.access.clone(), spec.quarantine_seconds);
        if let Err(error) = state.journal.put_pool(&spec) {
            state.journal_failed();
            return Err(error.into());
        }
        let entry = state.pool_mut(name)?;
        entry.plan = Arc::new(plan);
        let view = entry.view();
        drop(state);
        Ok(view.to_api())
    }
}

impl State {
    /// A pool, for who manages it. To be asked under the gate for pools: who waited for it may find a pool of that name whose
    /// rules are others.
    pub(super) fn managed_pool(
        &self,
        caller: Caller,
        name: &Name,
    ) -> Result<&PoolEntry, ServiceError> {
        let entry = self.pool(name)?;
        caller.demand(AccessVerb::Manage, "change", &entry.plan.spec)?;
        Ok(entry)
    }

    /// Refuses a caller who holds as many leases of the pool as one user may. Those whose VMM still runs after their release
    /// count: they have their slots.
    pub(super) fn check_share(&self, caller: Caller, pool: &Name) -> Result<(), ServiceError> {
        let Some(most) = caller.leases_max(&self.pool(pool)?.plan.spec) else {
            return Ok(());
        };
        let count = self.leases.share(caller.uid, pool);
        if count < most {
            return Ok(());
        }
        Err(ServiceError::Conflict {
            operation: "acquire from",
            object: format!("pool '{pool}'"),
            reason: format!(
                "user {} holds {count} of its leases, and may hold {most} (leases_max): release one",
                caller.uid
            ),
        })
    }
}
