//! Holds on policies: who is to have one has the data path know it first, as a whole and with its groups, or not at all.

use std::sync::{Arc, PoisonError, atomic::AtomicU32};

use sandwire_api::{name::Name, pool::PolicySpec};

use super::{Held, Known, Shared};
use crate::{
    error::{NetworkError, ServiceError},
    plan::Plan,
};

impl Shared {
    /// Has the data path know a policy, and which groups may talk by it.
    ///
    /// # Errors
    /// Nothing changed.
    pub(in crate::service) fn hold_policy(
        &self,
        plan: &Plan,
        policy: &PolicySpec,
    ) -> Result<Held, ServiceError> {
        let group = plan.group_of(policy);
        let key = key_of(group, policy);
        let _gate = self
            .policies_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = self.hold_known(&key, group, policy)? {
            return Ok(held);
        }
        let have_more_to_talk = self.check_group_pairs(group, &policy.talks_to)?;
        let held = self.add_policy(&key, plan, policy)?;
        // Where nobody has been told since the start, there may be pairs of before, whose groups agree no more.
        let is_to_be_told = have_more_to_talk || !self.lock().policies.groups.are_told;
        if is_to_be_told
            && let Err(source) = self.tell_group_pairs()
            && have_more_to_talk
        {
            let now = self.now();
            self.lock().policies.give_up(&held, now);
            return Err(not_added(plan, source));
        }
        Ok(held)
    }

    /// Has the data path know a policy of before a start, whatever has been given to others meanwhile.
    /// [`Self::sync_group_pairs`] is to follow when it knows all of them: of those that it doesn't, groups that talk would stop.
    pub(in crate::service) fn hold_former_policy(
        &self,
        plan: &Plan,
        policy: &PolicySpec,
    ) -> Result<Held, ServiceError> {
        let group = plan.group_of(policy);
        let key = key_of(group, policy);
        let _gate = self
            .policies_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match self.hold_known(&key, group, policy)? {
            Some(held) => Ok(held),
            None => self.add_policy(&key, plan, policy),
        }
    }

    /// Holds a policy that the data path knows. Refuses one whose groups can't be told from others.
    fn hold_known(
        &self,
        key: &Arc<str>,
        group: &Name,
        policy: &PolicySpec,
    ) -> Result<Option<Held>, ServiceError> {
        let policies = &mut self.lock().policies;
        policies.groups.check(group, &policy.talks_to)?;
        Ok(policies.hold(key))
    }

    /// Has the data path know a policy that it doesn't know. Who calls this holds the gate.
    fn add_policy(
        &self,
        key: &Arc<str>,
        plan: &Plan,
        policy: &PolicySpec,
    ) -> Result<Held, ServiceError> {
        let index = self
            .network
            .add_policy(policy)
            .map_err(|source| not_added(plan, source))?;
        let group = plan.group_of(policy);
        let policies = &mut self.lock().policies;
        let known = Known {
            index: Arc::new(AtomicU32::new(index.0)),
            users: 0,
            routed: policy.has_own_routes().then(|| policy.clone()),
            membership: policies.groups.add(group, &policy.talks_to),
        };
        policies.known.insert(Arc::clone(key), known);
        let held = policies.hold(key);
        Ok(held.expect("it was added under the gate"))
    }
}

fn not_added(plan: &Plan, source: NetworkError) -> ServiceError {
    ServiceError::Network {
        operation: "add the policy of",
        object: format!("pool '{}'", plan.spec.name),
        source,
    }
}

fn key_of(group: &Name, policy: &PolicySpec) -> Arc<str> {
    // Numbers and texts only: it can be written.
    let text = serde_json::to_string(policy).unwrap_or_default();
    format!("{group} {text}").into()
}
