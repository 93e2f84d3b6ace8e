//! Taking slots back, and showing who has them.

use std::{
    sync::{Arc, MutexGuard},
    time::{Duration, Instant},
};

use sandwire_api::{
    lease::{Lease, LeaseDetail, LeaseState, ReleaseOutcome, Released, TapHolder},
    name::Name,
};

use super::{Caller, Shared, Slots, State, no_lease};
use crate::{
    error::ServiceError,
    journal::ReleasedSlot,
    lease::{LeaseKey, LeaseRecord},
    network::Withdrawal,
    plan::SlotPlan,
    pool::Rest,
    reclaim::SlotKey,
};

/// A repair or another release of the same lease takes milliseconds.
pub(super) const IDLE_WAIT: Duration = Duration::from_secs(10);

/// How often processes are looked through for who keeps a lease.
const SEARCH_INTERVAL: Duration = Duration::from_secs(1);

impl Slots {
    /// Ends a lease. If a sandbox still has a TAP of the slot open it keeps the slot, and the lease
    /// ends when the sandbox does. Blocks for some milliseconds; longer if the lease is just being acquired.
    ///
    /// # Errors
    /// If the kernel or the journal fails once the release has begun, it is tried again in the
    /// background.
    pub fn release(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
    ) -> Result<Released, ServiceError> {
        let key = caller.lease_key(owner_uid, name);
        if caller.privileged || key.owner_uid == caller.uid {
            self.shared.await_acquired(&key)?;
        }
        self.shared.lock().lease(caller, &key)?;
        self.shared.release(&key, Why::Asked(caller))
    }

    /// The leases that the caller may see, by owner and name.
    #[must_use]
    pub fn leases(&self, caller: Caller) -> Vec<Lease> {
        let state = self.shared.lock();
        let mut seen: Vec<_> = state
            .leases
            .values()
            .filter_map(|lease| {
                let plan = &state.pools.get(&lease.record.pool)?.plan;
                let may_see = caller.may_see(&lease.record.key, &plan.spec);
                may_see.then(|| (lease.record.clone(), Arc::clone(plan)))
            })
            .collect();
        drop(state);
        seen.sort_by(|(left, _), (right, _)| left.key.cmp(&right.key));
        seen.into_iter()
            .map(|(record, plan)| {
                let channel = self.shared.channel_plan(&plan, &record);
                record.to_api(&record.slot_of(&plan), channel.as_ref())
            })
            .collect()
    }

    /// A lease with what the kernel says of it now. Blocks for some milliseconds.
    ///
    /// # Errors
    /// There is no such lease for this caller.
    pub fn lease_detail(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
    ) -> Result<LeaseDetail, ServiceError> {
        let key = caller.lease_key(owner_uid, name);
        let state = self.shared.lock();
        let record = state.lease(caller, &key)?.record.clone();
        let slot = state.slot_plan(&record)?;
        let published_ports = state.ports_of(&key);
        let plan = Arc::clone(&state.pool(&record.pool)?.plan);
        drop(state);
        let policy = record
            .policy
            .as_deref()
            .unwrap_or(&plan.spec.policy)
            .clone();
        let inspection = self.shared.network.inspect(&slot);
        Ok(LeaseDetail {
            vsock_traffic: self.shared.channel_traffic(&record),
            lease: record.to_api(&slot, self.shared.channel_plan(&plan, &record).as_ref()),
            published_ports,
            taps: inspection.taps,
            defects: inspection.defects,
            connections: inspection.connections,
            data_path: plan.spec.data_path,
            data_path_note: inspection.data_path_note,
            policy,
            has_own_policy: record.policy.is_some(),
            traffic: self.shared.network.traffic(&slot),
        })
    }
}

/// Why a lease ends. Whoever found it due some time ago must not end the next lease of that name.
#[derive(Clone, Copy, Debug)]
pub(super) enum Why {
    /// Somebody says so who may see it.
    Asked(Caller),
    /// Its time is over, at this time since boot.
    Expired(Duration),
    /// Its release has begun, and had to wait for its sandbox.
    Begun,
}

impl Why {
    /// How long to wait for who works on the lease's slot. The auditor has others to see to, and comes again.
    fn patience(self) -> Duration {
        match self {
            Self::Asked(_) => IDLE_WAIT,
            Self::Expired(_) | Self::Begun => Duration::ZERO,
        }
    }

    fn applies_to(self, record: &LeaseRecord) -> bool {
        match self {
            Self::Asked(_) => true,
            Self::Expired(now) => record.is_over(now),
            Self::Begun => record.state == LeaseState::Releasing,
        }
    }
}

impl Shared {
    /// Ends a lease, or goes on ending one.
    ///
    /// # Errors
    /// Not found, if the lease is gone or is another one, to which the reason does not apply.
    pub(super) fn release(&self, key: &LeaseKey, why: Why) -> Result<Released, ServiceError> {
        let (record, slot) = self.begin_release(key, why)?;
        let withdrawal = self.network.withdraw_taps(&slot);
        if matches!(withdrawal, Ok(Withdrawal::Free))
            && let Err(error) = self.network.deactivate(&slot)
        {
            // Its tear-down does the same.
            tracing::warn!(lease = %key, %error, "a released slot can't be deactivated");
        }
        if let (Ok(Withdrawal::Free), Some(channel)) = (&withdrawal, &record.channel) {
            self.close_channel(&record, channel);
        }

        let earlier = self.earlier_stays();
        let counted = self.network.traffic(&slot);
        let mut state = self.lock();
        state.set_busy(key, false);
        let outcome = match withdrawal {
            Ok(Withdrawal::Free) => state
                .end_lease(&record, self.now())
                .inspect(|_| state.keep_traffic(&record.pool, counted.as_ref()))
                .map(|had_ports| (ReleaseOutcome::Released, had_ports)),
            Ok(Withdrawal::Held) => {
                // Those that go on each second were counted when they began.
                if !matches!(why, Why::Begun) {
                    state.counters.releases_held += 1;
                }
                Ok((ReleaseOutcome::Held, false))
            }
            Err(source) => Err(ServiceError::Network {
                operation: "withdraw the TAPs of",
                object: format!("slot {} of pool '{}'", record.slot, record.pool),
                source,
            }),
        };
        drop((state, earlier));
        self.changed.notify_all();
        let (outcome, had_ports) = outcome?;
        if outcome == ReleaseOutcome::Released {
            self.end_traces(&slot);
            if had_ports {
                self.sync_ports();
            } else {
                self.queue_tear_down(&(record.pool.clone(), record.slot));
            }
        }
        // Each second for each of these leases, a search through all processes would be the auditor's whole work.
        let held_by = match (outcome, why) {
            (ReleaseOutcome::Held, Why::Asked(_)) => self.tap_holders(key, &slot),
            _ => Vec::new(),
        };
        Ok(answer(record, outcome, held_by))
    }

    /// Who has a TAP of a held lease open. All processes are looked through for that, so not more often than once in a while
    /// for each lease, however often its owner asks; meanwhile the answer is the last one.
    fn tap_holders(&self, key: &LeaseKey, slot: &SlotPlan) -> Vec<TapHolder> {
        let now = self.now();
        let mut state = self.lock();
        let Some(lease) = state.leases.get_mut(key) else {
            return Vec::new();
        };
        if let Some((at, found)) = &lease.held_by
            && now < *at + SEARCH_INTERVAL
        {
            return found.clone();
        }
        // Those who ask while the search runs get what was found before.
        lease.held_by.get_or_insert_default().0 = now;
        drop(state);
        let found = self.network.tap_holders(slot);
        if let Some(lease) = self.lock().leases.get_mut(key) {
            lease.held_by = Some((now, found.clone()));
        }
        found
    }

    /// Marks a lease as being released and as busy, and journals that.
    fn begin_release(
        &self,
        key: &LeaseKey,
        why: Why,
    ) -> Result<(LeaseRecord, SlotPlan), ServiceError> {
        let mut state = self.wait_idle_for(key, why.patience())?;
        let record = state.record(key)?;
        if let Why::Asked(caller) = why {
            // It may be another one by now, of a pool that the caller doesn't manage.
            state.lease(caller, key)?;
        }
        if !why.applies_to(&record) {
            return Err(no_lease(key));
        }
        let slot = state.slot_plan(&record)?;
        if record.state == LeaseState::Active {
            if let Err(error) = state.journal.mark_releasing(key) {
                state.journal_failed();
                return Err(error.into());
            }
            state.pool_mut(&record.pool)?.pool.hold(record.slot);
            if let Some(expiry) = record.expiry {
                state.expiries.remove(&(expiry.since_boot, key.clone()));
            }
        }
        if let Some(lease) = state.leases.get_mut(key) {
            lease.record.state = LeaseState::Releasing;
            lease.is_busy = true;
        }
        Ok((record, slot))
    }

    /// Waits until a lease is there, or nobody is just acquiring it.
    fn await_acquired(&self, key: &LeaseKey) -> Result<(), ServiceError> {
        let deadline = Instant::now() + IDLE_WAIT;
        let mut state = self.lock();
        while state.acquiring.contains_key(key) && !state.leases.contains_key(key) {
            let now = Instant::now();
            if now >= deadline {
                return Err(ServiceError::Late {
                    object: format!("acquiring lease '{}'", key.name),
                    state: "try again".to_owned(),
                });
            }
            state = self.wait(&self.changed, state, Some(deadline - now));
        }
        Ok(())
    }

    /// Waits until nobody works on the lease's slot, to do so oneself. Nobody may any more once the lease's time is
    /// over: its end would have to wait for one after the other.
    pub(super) fn wait_idle(&self, key: &LeaseKey) -> Result<MutexGuard<'_, State>, ServiceError> {
        let state = self.wait_idle_for(key, IDLE_WAIT)?;
        let lease = state.leases.get(key).ok_or_else(|| no_lease(key))?;
        if !lease.is_releasing() && lease.record.is_over(self.now()) {
            return Err(ServiceError::Conflict {
                operation: "use",
                object: format!("lease '{}'", key.name),
                reason: "its time is over".to_owned(),
            });
        }
        Ok(state)
    }

    /// Waits so long until nobody works on the lease's slot.
    pub(super) fn wait_idle_for(
        &self,
        key: &LeaseKey,
        patience: Duration,
    ) -> Result<MutexGuard<'_, State>, ServiceError> {
        let deadline = Instant::now() + patience;
        let mut state = self.lock();
        loop {
            let Some(lease) = state.leases.get(key) else {
                return Err(no_lease(key));
            };
            if !lease.is_busy {
                return Ok(state);
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(ServiceError::Late {
                    object: format!("another operation on lease '{}'", key.name),
                    state: "try again".to_owned(),
                });
            }
            state = self.wait(&self.changed, state, Some(deadline - now));
        }
    }

    /// Makes a caller's lease busy, as [`Self::make_busy`] does.
    ///
    /// # Errors
    /// There is no such lease for this caller, or it is being released.
    pub(super) fn hold_busy<'a, T>(
        &'a self,
        caller: Caller,
        key: &'a LeaseKey,
        operation: &'static str,
        read: impl FnOnce(&State, &LeaseRecord) -> Result<T, ServiceError>,
    ) -> Result<(T, Busy<'a>), ServiceError> {
        self.lock().lease(caller, key)?;
        self.make_busy(key, operation, |state, record| {
            state.lease(caller, key)?;
            read(state, record)
        })
    }

    /// Makes a lease busy once nobody else works on its slot, so that no release, repair or tear-down comes between,
    /// and reads what the work needs.
    ///
    /// # Errors
    /// There is no such lease, or it is being released.
    pub(super) fn make_busy<'a, T>(
        &'a self,
        key: &'a LeaseKey,
        operation: &'static str,
        read: impl FnOnce(&State, &LeaseRecord) -> Result<T, ServiceError>,
    ) -> Result<(T, Busy<'a>), ServiceError> {
        let mut state = self.wait_idle(key)?;
        let lease = state.leases.get(key).ok_or_else(|| no_lease(key))?;
        if lease.is_releasing() {
            return Err(ServiceError::Conflict {
                operation,
                object: format!("lease '{}'", key.name),
                reason: "it is being released".to_owned(),
            });
        }
        let found = read(&state, &lease.record)?;
        state.set_busy(key, true);
        drop(state);
        Ok((found, Busy { shared: self, key }))
    }

    /// Gives a slot in state `TearingDown` to the worker.
    pub(super) fn queue_tear_down(&self, (pool, number): &SlotKey) {
        let mut state = self.lock();
        if let Some(entry) = state.pools.get_mut(pool) {
            entry.tear_down.push_back(*number);
        }
        drop(state);
        self.tear_down_work.notify_one();
    }
}

/// A lease that is busy until this is dropped, also by a panic.
pub(super) struct Busy<'a> {
    shared: &'a Shared,
    key: &'a LeaseKey,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.shared.lock().set_busy(self.key, false);
        self.shared.changed.notify_all();
    }
}

impl State {
    pub(super) fn set_busy(&mut self, key: &LeaseKey, is_busy: bool) {
        if let Some(lease) = self.leases.get_mut(key) {
            lease.is_busy = is_busy;
        }
    }

    pub(super) fn slot_plan(&self, record: &LeaseRecord) -> Result<SlotPlan, ServiceError> {
        Ok(record.slot_of(&self.pool(&record.pool)?.plan))
    }

    fn record(&self, key: &LeaseKey) -> Result<LeaseRecord, ServiceError> {
        let lease = self.leases.get(key).ok_or_else(|| no_lease(key))?;
        Ok(lease.record.clone())
    }

    /// Turns a lease whose TAPs are withdrawn into a slot to tear down. Returns whether it had
    /// published ports: the kernel is still to be told, and the slot waits for that.
    fn end_lease(&mut self, record: &LeaseRecord, now: Duration) -> Result<bool, ServiceError> {
        let key = &record.key;
        let entry = self.pool_mut(&record.pool)?;
        let quarantine = Duration::from_secs(u64::from(entry.plan.spec.quarantine_seconds));
        let rest = Rest {
            tenant: key.clone(),
            until: now + quarantine,
        };
        let released = ReleasedSlot {
            pool: record.pool.clone(),
            slot: record.slot,
            rest,
            is_torn_down: false,
        };
        if let Err(error) = self.journal.end_lease(&released) {
            self.journal_failed();
            return Err(error.into());
        }
        let had_ports = self.end_ports(key, &self.slot_plan(record)?);
        let slot = (record.pool.clone(), record.slot);
        if had_ports {
            self.unpublishing.push(slot.clone());
        }
        self.pool_mut(&record.pool)?
            .pool
            .release(record.slot, released.rest);
        if let Some(own) = self.leases.remove(key).and_then(|lease| lease.policy) {
            self.policies.give_up(&own, now);
        }
        self.tenants.remove(&slot);
        self.defects.forget(&slot);
        self.counters.releases += 1;
        Ok(had_ports)
    }
}

fn answer(record: LeaseRecord, outcome: ReleaseOutcome, held_by: Vec<TapHolder>) -> Released {
    Released {
        name: record.key.name,
        pool: record.pool,
        slot: record.slot.0,
        outcome,
        held_by,
    }
}
