//! What guests may reach by vsock: of leases and of pools, changed while they run.

use std::sync::{Arc, PoisonError};

use sandwire_api::{
    name::Name,
    pool::{AccessVerb, Pool as ApiPool},
    vsock::{LeaseVsockPolicy, VsockKind, VsockPolicy, VsockRule},
};

use super::{
    super::{Caller, Shared, Slots, State, no_lease},
    no_channel,
};
use crate::{
    channel::{ChannelError, ChannelRecord, checks},
    error::{PlanError, ServiceError},
    lease::{LeaseKey, LeaseRecord},
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
        Ok(LeaseVsockPolicy {
            own: channel.policy.is_some(),
            policy: channel.policy_in(plan.spec.vsock.as_ref()),
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
            shared.demand_rules(caller, record.key.owner_uid, policy, &seen.pool)?;
        }
        shared.change_channel_policy(
            caller,
            &record,
            |before, _| Ok(before.with_policy(policy)),
        )?;
        self.channel_policy(caller, owner_uid, name)
    }

    /// Adds a rule to what a lease's guest may reach, at once; two that are added at the same time are both there. The
    /// policy is the lease's own from then on. Who may name which rules is as above; those of the pool that the caller
    /// may not name stay as long as the pool has them.
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
        shared.demand_rules(caller, record.key.owner_uid, &alone, &seen.pool)?;
        let holder = record.key.owner_uid;
        let may_manage = caller.may(AccessVerb::Manage, &seen.pool.spec);
        let is_lent = |rule: &VsockRule| !may_manage && checks::is_privileged(rule, holder);
        shared.change_channel_policy(caller, &record, |before, of_pool| {
            let after = before.with_rule(rule, of_pool, is_lent);
            checks::check_policy(&after.policy_in(of_pool), seen.channel.kind)?;
            Ok(after)
        })?;
        self.channel_policy(caller, owner_uid, name)
    }

    /// Changes what guests of a pool may reach by vsock: at once for all leases without such a policy of their own.
    /// Others lose the rules that they were lent and that the pool has no more. If the service refuses it for one of
    /// them, nobody gets it; who has it already loses again the connections that only it allowed.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn set_pool_vsock(
        &self,
        caller: Caller,
        name: &Name,
        policy: VsockPolicy,
    ) -> Result<ApiPool, ServiceError> {
        let shared = &self.shared;
        let _pools = shared
            .pools_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (before, followers) = {
            let mut state = shared.lock();
            state.managed_pool(caller, name)?;
            state.check_pools_policy(name, &policy)?;
            shared.demand_host_services(caller, &policy, &state.pool(name)?.plan)?;
            let before = state.pool(name)?.plan.spec.vsock.clone();
            (before, state.note_pools_policy(name, Some(policy))?)
        };
        let refused = followers
            .iter()
            .find_map(|key| Some((key, shared.tell_pools_policy(key).err()?)));
        let Some((key, source)) = refused else {
            return self.pool(name);
        };
        let object = format!("pool '{name}' because of its lease '{}'", key.name);
        // Whoever came meanwhile has the refused one too.
        let followers = shared.lock().note_pools_policy(name, before)?;
        for key in &followers {
            if let Err(error) = shared.tell_pools_policy(key) {
                let service = shared.service_of(key);
                shared.lock().channels.differ(service, &error);
            }
        }
        Err(ServiceError::Channel {
            operation: "change the vsock policy of",
            object,
            source,
        })
    }
}

impl Shared {
    /// Makes of the channel of a lease that was seen what `change` does, which is told the pool's policy as well.
    fn change_channel_policy(
        &self,
        caller: Caller,
        seen: &LeaseRecord,
        change: impl FnOnce(&ChannelRecord, Option<&VsockPolicy>) -> Result<ChannelRecord, ServiceError>,
    ) -> Result<(), ServiceError> {
        const OPERATION: &str = "change the vsock policy of";
        let key = &seen.key;
        let (before, _busy) = self.hold_busy(caller, key, OPERATION, |_, record| {
            // Its owner may have got another of that name meanwhile, and what is asked for was judged by the former's pool.
            let channel = record.channel.clone().ok_or_else(|| no_channel(key))?;
            let was_such = |seen: &ChannelRecord| seen.kind == channel.kind;
            if record.pool != seen.pool || !seen.channel.as_deref().is_some_and(was_such) {
                return Err(no_lease(key));
            }
            Ok(channel)
        })?;
        let wanted = self.note_channel_policy(key, &before, change)?;
        let told = self.tell_policy(key, &wanted);
        if let Err(error) = &told {
            let mut state = self.lock();
            if state.journal.set_lease_channel(key, Some(&before)).is_err() {
                state.journal_failed();
            }
            state.set_channel(key, before);
            state.channels.differ(self.service_of(key), error);
        }
        told.map_err(|source| ServiceError::Channel {
            operation: OPERATION,
            object: format!("lease '{}'", key.name),
            source,
        })
    }

    /// Writes down a lease's changed policy. Returns the one that holds for it now; the pool's is read under the same
    /// lock, so that a change of that either comes before or finds a lease that it has to tell.
    fn note_channel_policy(
        &self,
        key: &LeaseKey,
        before: &ChannelRecord,
        change: impl FnOnce(&ChannelRecord, Option<&VsockPolicy>) -> Result<ChannelRecord, ServiceError>,
    ) -> Result<VsockPolicy, ServiceError> {
        let mut state = self.lock();
        let of_pool = state.policy_of_pool(key)?;
        let after = change(before, of_pool.as_ref())?;
        let wanted = after.policy_in(of_pool.as_ref());
        if let Err(error) = state.journal.set_lease_channel(key, Some(&after)) {
            state.journal_failed();
            return Err(error.into());
        }
        state.set_channel(key, Arc::new(after));
        Ok(wanted)
    }

    /// Tells the service the pool's policy for a lease, or what it leaves of the lease's own, unless that has ended or
    /// doesn't follow the pool any more. A service that is away is no error: the next comparison tells it.
    ///
    /// # Errors
    /// The service refuses.
    fn tell_pools_policy(&self, key: &LeaseKey) -> Result<(), ChannelError> {
        let follows = |state: &State, record: &LeaseRecord| {
            let channel = record.channel.as_ref().ok_or_else(|| no_channel(key))?;
            let of_pool = state.policy_of_pool(key)?;
            let policy = || channel.policy_in(of_pool.as_ref());
            Ok(channel.follows_pool().then(policy))
        };
        match self.make_busy(key, "change the vsock policy of", follows) {
            Ok((None, _)) => Ok(()),
            Ok((Some(policy), _busy)) => match self.tell_policy(key, &policy) {
                Err(error) if !matches!(error, ChannelError::Refused(_)) => {
                    let service = self.service_of(key);
                    self.lock().channels.differ(service, &error);
                    Ok(())
                }
                told => told,
            },
            // It ends, or somebody works on it for long: the next comparison sees to it.
            Err(_) => {
                let service = self.service_of(key);
                self.lock().channels.are_due(service);
                Ok(())
            }
        }
    }

    /// Of a lease that is busy. Only then the gate: whoever opens or closes a channel takes them in this order too,
    /// and with a comparison waiting for the gate the two would else wait for each other.
    fn tell_policy(&self, key: &LeaseKey, policy: &VsockPolicy) -> Result<(), ChannelError> {
        let _gate = self.channels_gate_read(key);
        self.channels.set_policy(key, policy)
    }
}

impl State {
    /// Whether all that have a pool's policy can have this one.
    fn check_pools_policy(&self, name: &Name, policy: &VsockPolicy) -> Result<(), ServiceError> {
        let followers = self.followers(name);
        let kinds = followers
            .filter(|(_, channel)| channel.policy.is_none())
            .map(|(_, channel)| channel.kind);
        for kind in kinds.chain([VsockKind::VhostUser]) {
            checks::check_policy(policy, kind).map_err(|error| ServiceError::Plan {
                pool: name.clone(),
                source: PlanError::Vsock(error),
            })?;
        }
        Ok(())
    }

    /// Writes down a pool's changed policy. Returns the leases for which it holds.
    fn note_pools_policy(
        &mut self,
        name: &Name,
        policy: Option<VsockPolicy>,
    ) -> Result<Vec<LeaseKey>, ServiceError> {
        let entry = self.pool(name)?;
        let mut spec = entry.current_spec();
        spec.vsock.clone_from(&policy);
        let plan = entry.plan.with_vsock(policy);
        let followers = self.followers(name).map(|(key, _)| key.clone()).collect();
        if let Err(error) = self.journal.put_pool(&spec) {
            self.journal_failed();
            return Err(error.into());
        }
        self.pool_mut(name)?.plan = Arc::new(plan);
        Ok(followers)
    }

    /// Leases with a channel for which the pool's policy holds, or some rules of it.
    fn followers(&self, name: &Name) -> impl Iterator<Item = (&LeaseKey, &ChannelRecord)> {
        let records = self.leases.values().map(|lease| &lease.record);
        records.filter_map(move |record| {
            let channel = record.channel.as_deref()?;
            (record.pool == *name && channel.follows_pool()).then_some((&record.key, channel))
        })
    }

    /// What the pool of a lease lets guests without a policy of their own reach.
    fn policy_of_pool(&self, key: &LeaseKey) -> Result<Option<VsockPolicy>, ServiceError> {
        let lease = self.leases.get(key).ok_or_else(|| no_lease(key))?;
        let plan = &self.pool(&lease.record.pool)?.plan;
        Ok(plan.spec.vsock.clone())
    }
}

impl Shared {
    /// Rules that lead to services of the host or to other owners' sandboxes take the right to manage.
    pub(super) fn demand_rules(
        &self,
        caller: Caller,
        owner_uid: u32,
        policy: &VsockPolicy,
        plan: &Plan,
    ) -> Result<(), ServiceError> {
        match checks::privileged_rule(policy, owner_uid) {
            Some(rule) if !caller.may(AccessVerb::Manage, &plan.spec) => {
                Err(ServiceError::Forbidden {
                    uid: caller.uid,
                    operation: "use",
                    object: format!(
                        "the vsock rule for port {}: one that leads to services of the host or to another owner's \
                         sandbox takes the right to manage pool '{}'",
                        rule.port, plan.spec.name
                    ),
                })
            }
            _ => self.demand_host_services(caller, policy, plan),
        }
    }

    /// The process for vsock calls services of the host by its own rights, with which who manages a pool could do as root does.
    /// So root says which.
    fn demand_host_services(
        &self,
        caller: Caller,
        policy: &VsockPolicy,
        plan: &Plan,
    ) -> Result<(), ServiceError> {
        let of_pool = plan.spec.vsock.as_ref();
        // A service that is told who calls must go on being told: else the guest itself could say so.
        let covers = |known: &VsockRule, rule: &VsockRule| {
            known.to == rule.to && (rule.identity || !known.identity)
        };
        let has = |rule: &VsockRule| {
            of_pool.is_some_and(|pool| pool.rules.iter().any(|known| covers(known, rule)))
        };
        let is_roots = |rule: &&VsockRule| {
            checks::is_host_service(&rule.to) && !has(rule) && !self.channels.may_lead_to(&rule.to)
        };
        match policy.rules.iter().find(is_roots) {
            Some(rule) if !caller.privileged => Err(ServiceError::Forbidden {
                uid: caller.uid,
                operation: "use",
                object: format!(
                    "the vsock rule for port {}: it leads to a service of the host that neither the pool's policy \
                     nor `host_services` in [vsock] names: have root add it to one of them",
                    rule.port
                ),
            }),
            _ => Ok(()),
        }
    }
}
