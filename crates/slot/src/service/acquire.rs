//! Handing out slots.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use sandwire_api::{
    lease::{AcquireLease, Lease, LeaseState},
    name::Name,
    pool::{AccessVerb, PolicySpec},
    slot::{DataPath, SlotKind},
};

use super::{
    Caller, LeaseEntry, PoolEntry, Shared, Slots, State, channels,
    policies::{Held, check_own, check_still, demand_group},
};
use crate::{
    attach::{self, AttachRecord},
    error::{NetworkError, ServiceError},
    lease::{Expiry, LeaseKey, LeaseRecord},
    plan::{Plan, SlotNumber},
};

/// Answer to a request for a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acquired {
    /// The lease.
    pub lease: Lease,
    /// Whether it is a new one; otherwise the caller had it already.
    pub new: bool,
}

/// How many names of leases the journal sets aside in one write.
const LEASE_NUMBERS_AT_ONCE: u32 = 1000;

impl Slots {
    /// Hands out a slot. Without a certain clone address this makes no call of the kernel; with one
    /// it may wait some seconds for the slot to be built.
    ///
    /// Asking again for a name and pool gives the same lease, unchanged.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn acquire(
        &self,
        caller: Caller,
        request: &AcquireLease,
    ) -> Result<Acquired, ServiceError> {
        self.acquire_while(caller, request, &|| true)
    }

    /// The same for a caller that may go away before it is told: then there is no such lease.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn acquire_while(
        &self,
        caller: Caller,
        request: &AcquireLease,
        is_there: &dyn Fn() -> bool,
    ) -> Result<Acquired, ServiceError> {
        let acquired = self.acquire_if(caller, request, is_there, true)?;
        Ok(acquired.expect("whoever may wait gets an answer"))
    }

    /// The same without waiting for anybody: neither for a slot to be built, nor for a service, nor for another request that is
    /// still making the same lease. None if it would have to; nothing was done then.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn acquire_now(
        &self,
        caller: Caller,
        request: &AcquireLease,
        is_there: &dyn Fn() -> bool,
    ) -> Result<Option<Acquired>, ServiceError> {
        if waits_for_others(request) {
            return Ok(None);
        }
        self.acquire_if(caller, request, is_there, false)
    }

    fn acquire_if(
        &self,
        caller: Caller,
        request: &AcquireLease,
        is_there: &dyn Fn() -> bool,
        may_wait: bool,
    ) -> Result<Option<Acquired>, ServiceError> {
        let (shared, begun) = (&self.shared, Instant::now());
        let _acquiring = shared.begin_acquire(caller, request);
        let (incarnation, attach, held) = shared.prepare(caller, request).inspect_err(|error| {
            let counters = &mut shared.lock().counters;
            counters.acquired(Some(error), begun.elapsed());
        })?;
        let asked = Asked {
            caller,
            request,
            incarnation,
            policy: held.as_ref(),
            own: request.policy.clone().map(Arc::new),
            attach: attach.as_ref(),
        };
        let mut state = shared.lock();
        let mut outcome = match request.clone_address {
            None => state.acquire_any(shared, &asked),
            Some(_) => {
                let (after, outcome) = shared.acquire_certain(state, &asked);
                state = after;
                outcome
            }
        };
        if !may_wait && matches!(&outcome, Ok((_, record, false)) if state.is_opening(&record.key))
        {
            return Ok(None);
        }
        // Only for leases that have one or the other, and without the lock.
        if matches!(&outcome, Ok((_, record, _)) if record.attach.is_some()) {
            let (after, attached) = shared.settle_attach(state, outcome);
            state = after;
            outcome = attached;
        }
        if matches!(&outcome, Ok((_, record, _)) if record.channel.is_some()) {
            let (after, opened) = shared.settle_channel(state, outcome);
            state = after;
            outcome = opened;
        }
        if matches!(outcome, Ok((_, _, true))) && !is_there() {
            let (after, taken_back) = shared.take_back_unwanted(state, outcome);
            state = after;
            outcome = taken_back;
        }
        if let (Some(held), false) = (&held, matches!(outcome, Ok((_, _, true)))) {
            state.policies.give_up(held, shared.now());
        }
        if !matches!(outcome, Ok((_, _, false))) {
            state
                .counters
                .acquired(outcome.as_ref().err(), begun.elapsed());
        }
        drop(state);
        let (plan, record, new) = outcome?;
        if new {
            shared.build_work.notify_one();
            if record.expiry.is_some() {
                shared.audit_work.notify_one();
            }
        }
        let channel = shared.channel_plan(&plan, &record);
        let lease = record.to_api(&record.slot_of(&plan), channel.as_ref());
        Ok(Some(Acquired { lease, new }))
    }
}

/// Whether it takes others to carry it out. A certain clone address may first have to be built, a policy of its own be told to
/// the data path, a vsock channel be opened by its service, and an interface be made in somebody's namespace.
fn waits_for_others(request: &AcquireLease) -> bool {
    request.clone_address.is_some()
        || request.policy.is_some()
        || request.vsock.is_some()
        || request.attach.is_some()
}

/// A lease that may come to be before this is dropped. Whoever asked for it may have been killed meanwhile, and a
/// release that found nothing would leave it to nobody.
struct Acquiring<'a> {
    shared: &'a Shared,
    key: LeaseKey,
}

impl Drop for Acquiring<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if let Some(count) = state.acquiring.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                state.acquiring.remove(&self.key);
            }
        }
        drop(state);
        self.shared.changed.notify_all();
    }
}

/// A request with what was prepared for it.
pub(super) struct Asked<'a> {
    pub(super) caller: Caller,
    pub(super) request: &'a AcquireLease,
    /// Which pool of that name it was looked at for.
    incarnation: u64,
    /// The policy that the lease is to have for itself.
    policy: Option<&'a Held>,
    /// The same as it was asked for.
    own: Option<Arc<PolicySpec>>,
    /// Where its interface is to go.
    attach: Option<&'a AttachRecord>,
}

/// The pool's plan, the lease, and whether it is a new one.
pub(super) type Given = (Arc<Plan>, LeaseRecord, bool);
pub(super) type Outcome = Result<Given, ServiceError>;

impl State {
    fn acquire_any(&mut self, shared: &Shared, asked: &Asked<'_>) -> Outcome {
        let (caller, request) = (asked.caller, asked.request);
        self.check_acquire(caller, request)?;
        if let Some(found) = self.existing(asked, shared.now())? {
            return Ok(found);
        }
        self.check_share(caller, &request.pool)?;
        self.check_virtual_cid(caller, request)?;
        let entry = self.pool_mut(&request.pool)?;
        entry.demand_added()?;
        let number = entry.pool.take_ready().ok_or_else(|| entry.none_ready())?;
        self.grant(shared, asked, number)
    }

    pub(super) fn check_acquire(
        &self,
        caller: Caller,
        request: &AcquireLease,
    ) -> Result<(), ServiceError> {
        if self.stopping {
            return Err(ServiceError::Stopping);
        }
        let entry = self.pool(&request.pool)?;
        let spec = &entry.plan.spec;
        caller.demand(AccessVerb::Acquire, "acquire from", spec)?;
        if request.ttl_seconds == Some(0) {
            return Err(ServiceError::Invalid {
                field: "ttl_seconds",
                value: "0".to_owned(),
                reason: "the lease would end at once; leave it out for one without end".to_owned(),
            });
        }
        if entry.is_deleting {
            return Err(ServiceError::Conflict {
                operation: "acquire from",
                object: format!("pool '{}'", request.pool),
                reason: "it is being deleted".to_owned(),
            });
        }
        Ok(())
    }

    /// Refuses early what would fail for want of a slot: whoever waits for one asks again and again, and its policy would
    /// be compiled each time.
    fn check_ready(&self, caller: Caller, request: &AcquireLease) -> Result<(), ServiceError> {
        self.check_acquire(caller, request)?;
        let key = request
            .name
            .as_ref()
            .map(|name| caller.lease_key(None, name));
        let has_one = key.is_some_and(|key| self.leases.contains_key(&key));
        if has_one || request.clone_address.is_some() {
            return Ok(());
        }
        let entry = self.pool(&request.pool)?;
        entry.demand_added()?;
        match entry.pool.counts().ready {
            0 => Err(entry.none_ready()),
            _ => Ok(()),
        }
    }

    /// Whether somebody is still making that lease.
    fn is_opening(&self, key: &LeaseKey) -> bool {
        self.leases.get(key).is_some_and(|lease| lease.is_opening)
    }

    /// The lease that the caller has by this name already.
    pub(super) fn existing(
        &self,
        asked: &Asked<'_>,
        now: Duration,
    ) -> Result<Option<Given>, ServiceError> {
        let (caller, request) = (asked.caller, asked.request);
        let Some(name) = &request.name else {
            return Ok(None);
        };
        let Some(lease) = self.leases.get(&caller.lease_key(None, name)) else {
            return Ok(None);
        };
        let record = &lease.record;
        let conflict = |reason| {
            Err(ServiceError::Conflict {
                operation: "acquire",
                object: format!("lease '{name}'"),
                reason,
            })
        };
        if record.pool != request.pool {
            return conflict(format!(
                "you have one by that name in pool '{}'",
                record.pool
            ));
        }
        if lease.is_releasing() {
            return conflict(
                "the one that you had by that name is being released, \
                 which waits for its sandbox to end"
                    .to_owned(),
            );
        }
        if record.is_over(now) {
            // The auditor ends it before it does anything else.
            return conflict(
                "the time of the one that you had by that name is over, and it ends now: try again"
                    .to_owned(),
            );
        }
        if request.policy.is_some() && request.policy.as_ref() != record.policy.as_deref() {
            return conflict(
                "you have one by that name with another policy: set that of the lease, or release it first"
                    .to_owned(),
            );
        }
        if request.process && !record.is_process {
            return conflict("you have one by that name whose sandbox is no process".to_owned());
        }
        if let Some(reason) =
            channels::difference(request.vsock.as_ref(), record.channel.as_deref())
        {
            return conflict(reason);
        }
        if let Some(reason) = attach::difference(asked.attach, record.attach.as_ref()) {
            return conflict(reason);
        }
        let plan = &self.pool(&record.pool)?.plan;
        if let Some(address) = request.clone_address
            && plan.slot_of_address(address) != Some(record.slot)
        {
            return conflict(format!("you have one by that name, but not at {address}"));
        }
        Ok(Some((Arc::clone(plan), record.clone(), false)))
    }

    /// Journals the lease of a number that has just been taken; on failure the slot is ready again.
    pub(super) fn grant(
        &mut self,
        shared: &Shared,
        asked: &Asked<'_>,
        number: SlotNumber,
    ) -> Outcome {
        let request = asked.request;
        let entry = self.pool_mut(&request.pool)?;
        if let Err(error) = entry.check_still(asked) {
            entry.put_back(shared, number);
            return Err(error);
        }
        let journaled = self.new_record(shared, asked, number).and_then(|record| {
            self.journal.insert_lease(&record)?;
            Ok(record)
        });
        let entry = self.pool_mut(&request.pool)?;
        let record = match journaled {
            Ok(record) => record,
            Err(error) => {
                entry.put_back(shared, number);
                self.journal_failed();
                return Err(error);
            }
        };
        let plan = Arc::clone(&entry.plan);
        if plan.spec.data_path != DataPath::Nft {
            self.activate(shared, &plan, &record, asked.policy)?;
        }
        if let Some(expiry) = record.expiry {
            self.expiries
                .insert((expiry.since_boot, record.key.clone()));
        }
        self.tenants
            .insert((record.pool.clone(), number), record.key.clone());
        let lease = LeaseEntry {
            record: record.clone(),
            policy: asked.policy.cloned(),
            // Until its channel and its interface are there.
            is_busy: record.channel.is_some() || record.attach.is_some(),
            is_opening: record.channel.is_some() || record.attach.is_some(),
            held_by: None,
        };
        self.leases.insert(record.key.clone(), lease);
        Ok((plan, record, true))
    }

    /// Lets the packets of a slot that is being handed out pass. If that fails nobody has the lease,
    /// and the slot is torn down.
    fn activate(
        &mut self,
        shared: &Shared,
        plan: &Plan,
        record: &LeaseRecord,
        own: Option<&Held>,
    ) -> Result<(), ServiceError> {
        let entry = self.pool(&record.pool)?;
        let held = own.or(entry.policy.as_ref());
        let activated = match held.map(|held| held.tenancy(record.is_process)) {
            Some(tenancy) => shared.network.activate(&record.slot_of(plan), &tenancy),
            None => Err(NetworkError::Conflict {
                object: format!("pool {}", record.pool),
                with: "the data path, which doesn't know its policy yet".to_owned(),
                advice: "try again".to_owned(),
            }),
        };
        let Err(source) = activated else {
            return Ok(());
        };
        self.take_back(shared, record);
        Err(ServiceError::Network {
            operation: "activate",
            object: format!("slot {} of pool '{}'", record.slot, record.pool),
            source,
        })
    }

    fn new_record(
        &mut self,
        shared: &Shared,
        asked: &Asked<'_>,
        number: SlotNumber,
    ) -> Result<LeaseRecord, ServiceError> {
        let (caller, request) = (asked.caller, asked.request);
        let name = match &request.name {
            Some(name) => name.clone(),
            None => self.new_lease_name(caller)?,
        };
        let acquired_at = shared.clock.since_epoch().as_secs();
        let expiry = request.ttl_seconds.map(|seconds| Expiry {
            since_boot: shared.now().saturating_add(Duration::from_secs(seconds)),
            since_epoch_seconds: acquired_at.saturating_add(seconds),
        });
        Ok(LeaseRecord {
            key: caller.lease_key(None, &name),
            pool: request.pool.clone(),
            slot: number,
            state: LeaseState::Active,
            acquired_at,
            expiry,
            policy: asked.own.clone(),
            is_process: request.process,
            channel: request.vsock.as_ref().map(|vsock| Arc::new(vsock.into())),
            attach: asked.attach.cloned(),
        })
    }

    fn new_lease_name(&mut self, caller: Caller) -> Result<Name, ServiceError> {
        loop {
            if self.lease_numbers.is_empty() {
                let first = self.journal.reserve_lease_numbers(LEASE_NUMBERS_AT_ONCE)?;
                self.lease_numbers = first..first + u64::from(LEASE_NUMBERS_AT_ONCE);
            }
            let number = self.lease_numbers.next().unwrap_or_default();
            let name: Name = format!("lease-{number:04x}")
                .parse()
                .expect("hexadecimal digits are in the alphabet of names");
            // A user may have thought of the same name.
            if !self.leases.contains_key(&caller.lease_key(None, &name)) {
                return Ok(name);
            }
        }
    }
}

impl Shared {
    /// Notes a request that may take longer than a moment.
    fn begin_acquire(&self, caller: Caller, request: &AcquireLease) -> Option<Acquiring<'_>> {
        let name = request
            .name
            .as_ref()
            .filter(|_| waits_for_others(request))?;
        let key = caller.lease_key(None, name);
        *self.lock().acquiring.entry(key.clone()).or_default() += 1;
        Some(Acquiring { shared: self, key })
    }

    /// Looks at what is asked for beside a slot, and has the data path know the policy. Says first which pool it is of that
    /// name.
    fn prepare(
        &self,
        caller: Caller,
        request: &AcquireLease,
    ) -> Result<(u64, Option<AttachRecord>, Option<Held>), ServiceError> {
        let incarnation = self.lock().pool(&request.pool)?.incarnation;
        self.check_channel(caller, request)?;
        let attach = self.check_attach(caller, request)?;
        let held = self.hold_own_policy(caller, request)?;
        Ok((incarnation, attach, held))
    }

    /// Has the data path know the policy that a lease is to have for itself. Whoever may acquire could
    /// otherwise allow itself anything, so that it takes the right to manage the pool.
    fn hold_own_policy(
        &self,
        caller: Caller,
        request: &AcquireLease,
    ) -> Result<Option<Held>, ServiceError> {
        let plan = Arc::clone(&self.lock().pool(&request.pool)?.plan);
        if request.process && plan.spec.kind != SlotKind::Netns {
            return Err(ServiceError::Invalid {
                field: "process",
                value: "true".to_owned(),
                reason: "only netns slots have a namespace for a process: use kind = netns"
                    .to_owned(),
            });
        }
        let Some(policy) = &request.policy else {
            return Ok(None);
        };
        caller.demand(AccessVerb::Manage, "set policies of", &plan.spec)?;
        check_own(&plan, policy)?;
        demand_group(caller, &plan, &plan.spec.policy, policy)?;
        self.lock().check_ready(caller, request)?;
        self.hold_policy(&plan, policy).map(Some)
    }
}

impl PoolEntry {
    /// Checks once more what may have changed since a request was looked at. Kind, device and parent stay as they are for as
    /// long as it is the same pool.
    fn check_still(&self, asked: &Asked<'_>) -> Result<(), ServiceError> {
        if self.incarnation != asked.incarnation {
            return Err(ServiceError::Conflict {
                operation: "acquire from",
                object: format!("pool '{}'", self.plan.spec.name),
                reason: "it was deleted and created anew meanwhile: try again".to_owned(),
            });
        }
        let own = asked.own.as_deref();
        own.map_or(Ok(()), |own| check_still(asked.caller, &self.plan, own))
    }

    /// Undoes a hand-out that nobody knows of.
    fn put_back(&mut self, shared: &Shared, number: SlotNumber) {
        if self.pool.put_back(number) {
            self.tear_down.push_back(number);
            shared.tear_down_work.notify_one();
        }
    }

    /// Why a pool has no slot to give.
    pub(super) fn none_ready(&self) -> ServiceError {
        if self.pool.is_exhausted() {
            return ServiceError::PoolExhausted {
                pool: self.plan.spec.name.clone(),
                slots_max: self.plan.slots_max,
            };
        }
        let error = self.not_added.as_deref().or(self.pool.last_error());
        match error {
            Some(error) => self.empty(format!(": {error}")),
            None if self.pool.size() == 0 => {
                self.empty(": its size is 0; resize it, or ask for a certain address".to_owned())
            }
            None => self.empty(": try again".to_owned()),
        }
    }

    /// What a slot needs of the host isn't there otherwise: handed out, it would be of no use, or not kept apart.
    pub(super) fn demand_added(&self) -> Result<(), ServiceError> {
        match &self.not_added {
            Some(error) => Err(self.empty(format!(": {error}"))),
            None => Ok(()),
        }
    }

    fn empty(&self, hint: String) -> ServiceError {
        ServiceError::PoolEmpty {
            pool: self.plan.spec.name.clone(),
            building: self.pool.counts().building,
            hint,
        }
    }
}
