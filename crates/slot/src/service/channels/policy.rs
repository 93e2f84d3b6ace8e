//! What guests may reach by vsock: of leases and of pools, changed while they run.

use std::sync::{Arc, PoisonError};

use sandwire_api::{
    name::Name,
    pool::{AccessVerb, Pool as ApiPool},
    vsock::{LeaseVsockPolicy, VsockPolicy, VsockRule},
};

use super::{
    super::{Caller, Shared, Slots, no_lease},
    no_channel,
};
use crate::{
    channel::{ChannelRecord, checks},
    error::{PlanError, ServiceError},
    lease::LeaseKey,
    plan::Plan,
};

impl Slots {
    /// What a lease's guest may reach by vsock.
    ///
    /// # Errors
    /// There is no such lease for this caller, or it has no channel.
    pub fn channel_policy(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
    ) -> Result<LeaseVsockPolicy, ServiceError> {
        let key = caller.lease_key(owner_uid, name);
        let state = self.shared.lock();
        let record = &state.lease(caller, &key)?.record;
        let channel = record.channel.as_ref().ok_or_else(|| no_channel(&key))?;
        let plan = &state.pool(&record.pool)?.plan;
        let of_pool = || plan.spec.vsock.clone().unwrap_or_default();
        Ok(LeaseVsockPolicy {
            own: channel.policy.is_some(),
            policy: channel.policy.clone().unwrap_or_else(of_pool),
        })
    }

    /// Gives a lease's channel a policy of its own, or its pool's again: at once, and connections that are
    /// no longer allowed are reset. Who holds the lease may name its own sockets and sandboxes; the rest
    /// takes the right to manage the pool.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn set_channel_policy(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
        policy: Option<VsockPolicy>,
    ) -> Result<LeaseVsockPolicy, ServiceError> {
        let shared = &self.shared;
        let (record, seen) = shared.channel_of(caller, owner_uid, name)?;
        if let Some(policy) = &policy {
            checks::check_policy(policy, seen.channel.kind)?;
            demand_rules(caller, record.key.owner_uid, policy, &seen.pool)?;
        }
        let _gate = shared.channels_gate_read();
        shared.change_channel_policy(&record.key, |_| Ok(policy))?;
        self.channel_policy(caller, owner_uid, name)
    }

    /// Adds a rule to what a lease's guest may reach, at once; two that are added at the same time are both there. The
    /// policy is the lease's own from then on. Who may name which rules is as above.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn add_channel_rule(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
        rule: VsockRule,
    ) -> Result<LeaseVsockPolicy, ServiceError> {
        let shared = &self.shared;
        let (record, seen) = shared.channel_of(caller, owner_uid, name)?;
        let alone = VsockPolicy {
            rules: vec![rule.clone()],
        };
        demand_rules(caller, record.key.owner_uid, &alone, &seen.pool)?;
        let _gate = shared.channels_gate_read();
        shared.change_channel_policy(&record.key, |mut policy| {
            policy.rules.push(rule);
            checks::check_policy(&policy, seen.channel.kind)?;
            Ok(Some(policy))
        })?;
        self.channel_policy(caller, owner_uid, name)
    }

    /// Changes what guests of a pool may reach by vsock: at once for all leases without such a policy of
    /// their own.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn set_pool_vsock(
        &self,
        name: &Name,
        policy: VsockPolicy,
    ) -> Result<ApiPool, ServiceError> {
        let shared = &self.shared;
        let _pools = shared
            .pools_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let _gate = shared.channels_gate_read();
        let mut state = shared.lock();
        let entry = state.pool(name)?;
        let plan_error = |source| ServiceError::Plan {
            pool: name.clone(),
            source,
        };
        let plan = entry.plan.with_vsock(policy.clone()).map_err(plan_error)?;
        let mut spec = entry.current_spec();
        spec.vsock = Some(policy.clone());
        let mut affected = Vec::new();
        for lease in state.leases.values() {
            let record = &lease.record;
            if let Some(channel) = &record.channel
                && record.pool == *name
                && channel.policy.is_none()
            {
                checks::check_policy(&policy, channel.kind)
                    .map_err(|error| plan_error(PlanError::Vsock(error)))?;
                affected.push(record.key.clone());
            }
        }
        if let Err(error) = state.journal.put_pool(&spec) {
            state.journal_failed();
            return Err(error.into());
        }
        state.pool_mut(name)?.plan = Arc::new(plan);
        drop(state);
        for key in affected {
            if let Err(error) = shared.channels.set_policy(&key, &policy) {
                shared.lock().channels_differ(&error);
            }
        }
        self.pool(name)
    }
}

impl Shared {
    /// Gives a lease's channel what `change` makes of the policy that holds for it; none: its pool's.
    fn change_channel_policy(
        &self,
        key: &LeaseKey,
        change: impl FnOnce(VsockPolicy) -> Result<Option<VsockPolicy>, ServiceError>,
    ) -> Result<(), ServiceError> {
        let mut state = self.wait_idle(key)?;
        let lease = state.leases.get(key).ok_or_else(|| no_lease(key))?;
        let before = lease
            .record
            .channel
            .clone()
            .ok_or_else(|| no_channel(key))?;
        let of_pool = state.pool(&lease.record.pool)?.plan.spec.vsock.clone();
        let of_pool = of_pool.unwrap_or_default();
        let policy = change(before.policy.clone().unwrap_or_else(|| of_pool.clone()))?;
        let after = ChannelRecord {
            policy: policy.clone(),
            ..before.clone()
        };
        if let Err(error) = state.journal.set_lease_channel(key, Some(&after)) {
            state.journal_failed();
            return Err(error.into());
        }
        state.set_channel(key, after);
        state.set_busy(key, true);
        drop(state);
        let wanted = policy.unwrap_or(of_pool);
        let told = self.channels.set_policy(key, &wanted);
        let mut state = self.lock();
        state.set_busy(key, false);
        if told.is_err() {
            if state.journal.set_lease_channel(key, Some(&before)).is_err() {
                state.journal_failed();
            }
            state.set_channel(key, before);
        }
        drop(state);
        self.changed.notify_all();
        told.map_err(|source| ServiceError::Channel {
            operation: "change the vsock policy of",
            object: format!("lease '{}'", key.name),
            source,
        })
    }
}

/// Rules that lead to services of the host or to other owners' sandboxes take the right to manage.
pub(super) fn demand_rules(
    caller: Caller,
    owner_uid: u32,
    policy: &VsockPolicy,
    plan: &Plan,
) -> Result<(), ServiceError> {
    match checks::privileged_rule(policy, owner_uid) {
        Some(rule) if !caller.may(AccessVerb::Manage, &plan.spec) => Err(ServiceError::Forbidden {
            uid: caller.uid,
            operation: "use",
            object: format!(
                "the vsock rule for port {}: one that leads to services of the host or to another owner's \
                 sandbox takes the right to manage pool '{}'",
                rule.port, plan.spec.name
            ),
        }),
        _ => Ok(()),
    }
}
