//! What is done by the clock: ending leases and rests, looking for damage, trying again.
//!
//! One thread does it all, one small step at a time. Slots are inspected one by one, spread over
//! the audit interval; only the first round, which follows an adoption, goes without a pause.

use std::{
    collections::VecDeque,
    sync::{Arc, MutexGuard, PoisonError, TryLockError},
    time::Duration,
};

use sandwire_api::{
    lease::ReleaseOutcome,
    name::Name,
    slot::{DataPath, Defect},
};

use super::{Damage, Shared, State, health, release::Why};
use crate::{
    error::ServiceError,
    lease::LeaseKey,
    network::Tenancy,
    plan::{Plan, SlotPlan},
    pool::SlotState,
    reclaim::SlotKey,
};

/// How often held slots are tried, leases that could not be ended, pools that the host refused, and ports.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Held leases that are tried in one such turn: each takes a good part of a millisecond.
const HELD_AT_ONCE: usize = 200;
/// A pool comes within milliseconds, and nothing is ready before the host has been looked at.
const GATE_RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// The host's side is shared by all slots, so that damage to it matters most.
pub(super) const HOST_INTERVAL_MAX: Duration = Duration::from_secs(10);

/// When which work is due next, in time since boot.
#[derive(Default)]
struct Schedule {
    retry_at: Duration,
    /// Leases that are due are ended from then on: after a failure not at once.
    expire_at: Duration,
    host_at: Duration,
    had_round: bool,
    /// Up to which of many held leases the last turn came.
    held_after: Option<LeaseKey>,
    /// Slots still to be inspected in this round.
    round: VecDeque<SlotKey>,
    /// Begin of the next inspection, and the time between two in this round.
    inspect_at: Duration,
    inspect_every: Duration,
}

impl Shared {
    /// Audits until the service stops.
    pub(super) fn audit_until_stopped(&self) {
        super::workers::lower_priority();
        let mut schedule = Schedule::default();
        while !self.lock().stopping {
            self.audit(&mut schedule);
            let state = self.lock();
            if state.stopping {
                return;
            }
            let timeout = state.next_audit(&schedule).saturating_sub(self.now());
            if !timeout.is_zero() {
                drop(self.wait(&self.audit_work, state, Some(timeout)));
            }
        }
    }

    /// Does what is due, at most one inspection.
    fn audit(&self, schedule: &mut Schedule) {
        let now = self.now();
        self.end_rests(now);
        if now >= schedule.expire_at {
            for lease in self.expired(now) {
                if !self.expire(&lease, now) {
                    schedule.expire_at = now + RETRY_INTERVAL;
                }
            }
        }
        let host_is_due = std::mem::take(&mut self.lock().host_is_due);
        if host_is_due || now >= schedule.host_at {
            schedule.host_at = now
                + match self.inspect_host() {
                    true => self.settings.audit_interval.min(HOST_INTERVAL_MAX),
                    false => GATE_RETRY_INTERVAL,
                };
        }
        self.repair_queued();
        if now >= schedule.retry_at {
            self.retry_journal();
            self.retry_pools();
            self.retry_settling();
            self.retry_moves();
            self.retry_held(schedule);
            self.sync_group_pairs();
            self.renew_routed_policies();
            self.remove_unused_policies(now);
            self.end_adoption(now);
            if self.lock().ports_dirty.is_some() {
                self.sync_ports();
            }
            self.compare_channels(now);
            schedule.retry_at = now + RETRY_INTERVAL;
        }
        if now >= schedule.inspect_at {
            match schedule.round.pop_front() {
                Some(slot) => self.inspect(&slot),
                None => self.begin_round(schedule),
            }
            schedule.inspect_at = now + schedule.inspect_every;
        }
    }

    fn begin_round(&self, schedule: &mut Schedule) {
        // The first round has to catch up with what happened before the start.
        let is_first = !std::mem::replace(&mut schedule.had_round, true);
        schedule.round = self.lock().inspectable();
        let slots = u32::try_from(schedule.round.len()).unwrap_or(u32::MAX);
        schedule.inspect_every = if is_first && slots > 0 {
            Duration::ZERO
        } else {
            self.settings.audit_interval / slots.saturating_add(1)
        };
    }

    fn end_rests(&self, now: Duration) {
        let mut state = self.lock();
        let mut ended = Vec::new();
        for (name, entry) in &mut state.pools {
            let numbers = entry.pool.end_rests(now);
            ended.extend(numbers.into_iter().map(|number| (name.clone(), number)));
        }
        if ended.is_empty() {
            return;
        }
        if let Err(error) = state.journal.end_rests(&ended) {
            // The rows stay, which is harmless: a lease of the number wins over them.
            state.journal_failed();
            tracing::warn!(%error, "the end of addresses' rests is not journaled");
        }
        drop(state);
        self.build_work.notify_all();
        self.changed.notify_all();
    }

    fn expired(&self, now: Duration) -> Vec<LeaseKey> {
        let state = self.lock();
        let due = state.expiries.iter().take_while(|(at, _)| *at <= now);
        due.map(|(_, lease)| lease.clone()).collect()
    }

    /// Returns false if it failed and is to be tried again.
    fn expire(&self, lease: &LeaseKey, now: Duration) -> bool {
        match self.release(lease, Why::Expired(now)) {
            Ok(released) => {
                self.lock().counters.expiries += 1;
                let outcome = released.outcome;
                tracing::info!(%lease, ?outcome, uid = user_of(lease), "a lease ended by its time to live");
            }
            // Its owner was faster.
            Err(ServiceError::NotFound { .. }) => {}
            // Somebody works on its slot.
            Err(ServiceError::Late { .. }) => return false,
            Err(error) => {
                tracing::error!(%lease, %error, "cannot end a lease; trying again");
                return false;
            }
        }
        true
    }

    /// Looks whether a journal that could not be written can be again: nobody may ask for anything while it can't.
    fn retry_journal(&self) {
        let mut state = self.lock();
        if state.journal.failure().is_some() && state.journal.try_again().is_ok() {
            tracing::info!("the journal can be written again");
        }
    }

    /// Ends leases whose sandbox was still running when they were released.
    fn retry_held(&self, schedule: &mut Schedule) {
        let held: Vec<LeaseKey> = {
            let state = self.lock();
            let leases = state.leases.values();
            leases
                .filter(|lease| lease.is_releasing() && !lease.is_busy)
                .map(|lease| lease.record.key.clone())
                .collect()
        };
        for lease in next_turn(held, &mut schedule.held_after) {
            match self.release(&lease, Why::Begun) {
                Ok(released) if released.outcome == ReleaseOutcome::Held => {}
                Ok(_) => {
                    tracing::info!(%lease, uid = user_of(&lease), "a released lease's sandbox has ended");
                }
                Err(ServiceError::NotFound { .. } | ServiceError::Late { .. }) => {}
                Err(error) => tracing::warn!(%lease, %error, "cannot release a held slot"),
            }
        }
    }

    /// Keeps pools from coming and going, unless one is just doing so.
    pub(super) fn try_pools_gate(&self) -> Option<MutexGuard<'_, ()>> {
        match self.pools_gate.try_lock() {
            Ok(gate) => Some(gate),
            Err(TryLockError::Poisoned(gate)) => Some(gate.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Prepares the host for pools that it refused before.
    fn retry_pools(&self) {
        let Some(_gate) = self.try_pools_gate() else {
            return;
        };
        let waiting: Vec<(Arc<Plan>, Option<DataPath>)> = {
            let state = self.lock();
            let entries = state.pools.values();
            entries
                .filter(|entry| entry.not_added.is_some() && !entry.is_deleting)
                .map(|entry| (Arc::clone(&entry.plan), entry.moving_from()))
                .collect()
        };
        for (plan, from) in waiting {
            let name = &plan.spec.name;
            let added = match self.network.take_up_pool(&plan, from) {
                Ok(()) => self.adopt_pool(name).map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            let mut state = self.lock();
            if added.is_ok() {
                state.policies.pools_have_changed();
            }
            if let Some(entry) = state.pools.get_mut(name) {
                entry.not_added = added.err();
            }
            drop(state);
            self.build_work.notify_all();
        }
    }

    /// Takes away what a former change has left of pools on the host, if that failed at the start.
    fn retry_settling(&self) {
        if !self.lock().is_unsettled {
            return;
        }
        match self.network.settle_pools() {
            Ok(()) => self.lock().is_unsettled = false,
            Err(error) => tracing::debug!(%error, "what is left of pools on the host still stays"),
        }
    }

    /// Removes what the data path had before the start and no slot has taken over, once no packet
    /// under way can need it.
    pub(super) fn end_adoption(&self, now: Duration) {
        // What comes meanwhile is known to the data path a moment before it is known here, and would be taken for
        // what was left: a pool's slots, and a policy, without which its lease could reach everything.
        let Some(_pools) = self.try_pools_gate() else {
            return;
        };
        let _policies = self
            .policies_gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        let is_pending = state.pools.values().any(|entry| entry.not_added.is_some());
        if is_pending || state.adoption_ends.is_some_and(|at| at > now) {
            return;
        }
        if state.adoption_ends.take().is_some() {
            let policies = state.policies.in_use();
            let present = state.present_slots();
            drop(state);
            self.network.finish_adoption(&policies, &present);
        } else {
            drop(state);
        }
        self.take_over_counts();
    }

    /// Looks at the host's side. Returns whether it could: not while a pool comes or goes, whose
    /// pieces would be taken for damage.
    fn inspect_host(&self) -> bool {
        let gate = self.try_pools_gate();
        gate.map(|_gate| self.inspect_host_gated()).is_some()
    }

    /// The same by who keeps pools from coming and going.
    pub(super) fn inspect_host_gated(&self) {
        let added: Vec<Name> = {
            let state = self.lock();
            let pools = state.pools.iter();
            let added = pools.filter(|(_, entry)| entry.not_added.is_none());
            added.map(|(name, _)| name.clone()).collect()
        };
        let found = self.network.inspect_host(&added);
        let now = self.now();
        let mut state = self.lock();
        state.count_defects(&found);
        for defect in found.iter().filter(|defect| is_repaired(defect)) {
            state
                .defects
                .repaired(now, health::Subject::Host, defect.clone());
        }
        let unrepaired: Vec<Defect> = found
            .iter()
            .filter(|defect| !is_repaired(defect))
            .cloned()
            .collect();
        let is_news = state.defects.of_host(unrepaired) || found.iter().any(is_repaired);
        drop(state);
        if is_news {
            log_defects("host", &found);
        }
    }

    /// Looks at one slot. A damaged ready slot is retired, a leased one repaired.
    fn inspect(&self, slot: &SlotKey) {
        let Some((plan, tenancy)) = self.lock().slot_to_inspect(slot) else {
            return;
        };
        let mut found = self.network.inspect(&plan).defects;
        found.extend(self.network.inspect_tenancy(&plan, tenancy.as_ref()));
        let mut state = self.lock();
        state.counters.inspections += 1;
        if found.is_empty() {
            state.defects.forget(slot);
            return;
        }
        let (pool, number) = slot;
        let retired = state.retire(slot);
        if !retired {
            if state.tenants.contains_key(slot) {
                state.repairs.push_back((slot.clone(), Damage::Pieces));
            }
            return;
        }
        for defect in &mut found {
            health::RETIRED.clone_into(&mut defect.action);
        }
        state.count_defects(&found);
        let subject = format!("slot {number} of pool {pool}");
        for defect in found.iter().cloned() {
            let of = health::Subject::Slot(slot.clone(), None);
            state.defects.repaired(self.now(), of, defect);
        }
        drop(state);
        log_defects(&subject, &found);
        self.tear_down_work.notify_one();
        self.build_work.notify_one();
    }

    fn repair_queued(&self) {
        // Taken at once: a repair that can't be begun now is found again by a later inspection.
        let queued = std::mem::take(&mut self.lock().repairs);
        for (slot, damage) in queued {
            self.repair(&slot, damage);
        }
    }

    /// Repairs a leased slot.
    fn repair(&self, slot: &SlotKey, damage: Damage) {
        let mut state = self.lock();
        let Some((lease, plan)) = state.lease_to_repair(slot) else {
            return;
        };
        state.set_busy(&lease, true);
        let tenancy = state.tenancy(&lease);
        drop(state);
        let found = match damage {
            Damage::Pieces => self.repair_pieces(&plan, tenancy.as_ref()),
            Damage::Everything => vec![self.rebuild(&plan, tenancy.as_ref())],
        };

        let now = self.now();
        let mut state = self.lock();
        state.set_busy(&lease, false);
        self.set_policy_since(&state, &lease, (&plan, tenancy));
        state.count_defects(&found);
        let (repaired, unrepaired): (Vec<Defect>, Vec<Defect>) =
            found.into_iter().partition(is_repaired);
        let subject = format!("lease {lease}");
        for defect in &repaired {
            let of = health::Subject::Slot(slot.clone(), Some(lease.clone()));
            state.defects.repaired(now, of, defect.clone());
        }
        let is_news = state.defects.of_slot(slot, &unrepaired);
        drop(state);
        self.changed.notify_all();
        log_defects(&subject, &repaired);
        if is_news {
            log_defects(&subject, &unrepaired);
        }
    }

    /// Gives a slot that was repaired for a tenancy the policy that its lease has got meanwhile.
    fn set_policy_since(
        &self,
        state: &State,
        lease: &LeaseKey,
        (plan, before): (&SlotPlan, Option<Tenancy>),
    ) {
        let Some(tenancy) = state.tenancy(lease).filter(|now| Some(*now) != before) else {
            return;
        };
        if let Err(error) = self.network.set_policy(plan, &tenancy) {
            tracing::error!(%lease, %error, "cannot set the policy of a lease that was repaired");
        }
    }

    /// Repairs a slot's objects, and then what the data path knows of its tenant.
    fn repair_pieces(&self, plan: &SlotPlan, tenancy: Option<&Tenancy>) -> Vec<Defect> {
        let mut found = self.network.repair(plan);
        let mut of_tenancy = self.network.inspect_tenancy(plan, tenancy);
        if !of_tenancy.is_empty() {
            let adopted = self.network.adopt(plan, tenancy);
            for defect in &mut of_tenancy {
                match &adopted {
                    Ok(()) => health::REPAIRED.clone_into(&mut defect.action),
                    Err(error) => defect.problem.push_str(&format!("; {error}")),
                }
            }
        }
        found.append(&mut of_tenancy);
        found
    }

    /// Builds a leased slot again of which nothing was left.
    fn rebuild(&self, plan: &SlotPlan, tenancy: Option<&Tenancy>) -> Defect {
        let activate = || tenancy.map_or(Ok(()), |tenancy| self.network.activate(plan, tenancy));
        let attach = || match plan.attach {
            Some(_) => self.network.attach(plan),
            None => Ok(()),
        };
        let built = self.network.build(plan).and_then(|()| activate());
        let (outcome, action) = match built.and_then(|()| attach()) {
            Ok(()) => (String::new(), health::REPAIRED),
            Err(error) => (
                format!(", and building it again failed: {error}"),
                health::REPORTED,
            ),
        };
        Defect {
            object: match plan.has_netns() {
                true => format!("namespace {}", plan.netns_name),
                false => format!("interface {}", plan.host_interface),
            },
            problem: format!("nothing of the slot was left in the kernel{outcome}"),
            action: action.to_owned(),
        }
    }
}

impl State {
    /// Takes a slot out of use if it is ready.
    fn retire(&mut self, (pool, number): &SlotKey) -> bool {
        let Some(entry) = self.pools.get_mut(pool) else {
            return false;
        };
        let retired = entry.pool.retire(*number);
        if retired {
            entry.tear_down.push_back(*number);
        }
        retired
    }

    /// When the auditor has something to do next, in time since boot.
    fn next_audit(&self, schedule: &Schedule) -> Duration {
        let rests = self
            .pools
            .values()
            .filter_map(|entry| entry.pool.next_rest_end());
        let expiry = self.expiries.first();
        let expiry = expiry.map(|(at, _)| schedule.expire_at.max(*at));
        let has_work = self.host_is_due || !self.repairs.is_empty();
        let repair = has_work.then_some(Duration::ZERO);
        let scheduled = [schedule.retry_at, schedule.host_at, schedule.inspect_at];
        rests
            .chain(expiry)
            .chain(repair)
            .chain(scheduled)
            .min()
            .unwrap_or_default()
    }

    /// Ready and leased slots. Ready ones come first, so that damage is found before a hand-out.
    fn inspectable(&self) -> VecDeque<SlotKey> {
        let of_state = |wanted: SlotState| {
            self.pools.iter().flat_map(move |(name, entry)| {
                let wanted = wanted.clone();
                let states = entry.pool.states();
                states
                    .filter(move |(_, state)| **state == wanted)
                    .map(|(number, _)| (name.clone(), number))
            })
        };
        of_state(SlotState::Ready)
            .chain(of_state(SlotState::Leased))
            .collect()
    }

    /// None while its pool is being moved: half of what it has would look like damage.
    fn slot_to_inspect(&self, slot: &SlotKey) -> Option<(SlotPlan, Option<Tenancy>)> {
        let (pool, number) = slot;
        let entry = self.pools.get(pool)?;
        let state = entry.pool.state(*number)?;
        let is_wanted = matches!(state, SlotState::Ready | SlotState::Leased);
        (is_wanted && entry.moving.is_none()).then_some(())?;
        let key = self.tenants.get(slot);
        let lease = key.and_then(|key| self.leases.get(key));
        let plan = match lease {
            Some(lease) => lease.record.slot_of(&entry.plan),
            None => entry.plan.slot(*number),
        };
        Some((plan, key.and_then(|key| self.tenancy(key))))
    }

    /// The lease of a slot and its plan, if nobody works on it.
    fn lease_to_repair(&self, slot: &SlotKey) -> Option<(LeaseKey, SlotPlan)> {
        let key = self.tenants.get(slot)?;
        let lease = self.leases.get(key)?;
        let is_idle = !lease.is_busy && !lease.is_releasing();
        is_idle.then_some(())?;
        Some((key.clone(), self.slot_plan(&lease.record).ok()?))
    }

    fn count_defects(&mut self, found: &[Defect]) {
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        let repaired = found.iter().filter(|defect| is_repaired(defect)).count();
        self.counters.defects_found += count(found.len());
        self.counters.defects_repaired += count(repaired);
    }
}

/// Those of the held leases that are tried now: all, or the next so many. A user who lets any number of sandboxes run after their
/// release would otherwise keep the auditor from all else.
fn next_turn(mut held: Vec<LeaseKey>, after: &mut Option<LeaseKey>) -> Vec<LeaseKey> {
    if held.len() > HELD_AT_ONCE {
        held.sort_unstable();
        let begin = held.partition_point(|lease| after.as_ref().is_some_and(|last| lease <= last));
        let count = held.len();
        held.rotate_left(begin % count);
        held.truncate(HELD_AT_ONCE);
        *after = held.last().cloned();
    }
    held
}

/// The user whose share of the log a line about a lease takes. What root's leases do is always told.
fn user_of(lease: &LeaseKey) -> Option<u32> {
    (lease.owner_uid != 0).then_some(lease.owner_uid)
}

fn is_repaired(defect: &Defect) -> bool {
    defect.action == health::REPAIRED
}

fn log_defects(subject: &str, found: &[Defect]) {
    for Defect {
        object,
        problem,
        action,
    } in found
    {
        tracing::warn!(subject, object, problem, action, "something is damaged");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_many_held_leases_has_its_turn() {
        let lease = |number: usize| LeaseKey {
            owner_uid: 1000,
            name: format!("lease-{number:04}").parse().unwrap(),
        };
        let all: Vec<LeaseKey> = (0..HELD_AT_ONCE + 50).map(lease).rev().collect();
        let mut after = None;
        let first = next_turn(all.clone(), &mut after);
        let second = next_turn(all.clone(), &mut after);
        assert_eq!((first.len(), second.len()), (HELD_AT_ONCE, HELD_AT_ONCE));
        let seen: std::collections::BTreeSet<_> = first.iter().chain(&second).collect();
        assert_eq!(seen.len(), all.len());
        let few = vec![lease(2), lease(1)];
        assert_eq!(next_turn(few.clone(), &mut after), few);
    }
}
