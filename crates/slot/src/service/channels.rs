//! vsock channels of leases: opening, closing, policies, and keeping the service's list as the journal says.
//!
//! A lease is journaled with its channel first, and is busy until the service has it, so that nobody
//! releases it meanwhile; if the service refuses, the lease is taken back. Whatever a crash or a service
//! that is away leaves differing is made good by [`Shared::compare_channels`], which the auditor calls: the
//! journal is right. Neither lock is held for both: the state's never while the service is asked.

use std::{
    collections::{BTreeSet, HashSet},
    path::Path,
    sync::{Arc, MutexGuard, PoisonError, RwLockReadGuard},
    time::{Duration, Instant},
};

use sandwire_api::{
    lease::AcquireLease,
    name::Name,
    vsock::{LeaseVsock, VsockConnection, VsockRequest, VsockTraffic},
};

mod compare;
mod policy;

pub(super) use compare::Comparisons;

use super::{Caller, Shared, Slots, State, acquire::Outcome};
use crate::{
    channel::{
        Capture, ChannelError, ChannelPlan, ChannelRecord, Whose, checks, excess_path_bytes,
    },
    error::{PlanError, ServiceError},
    lease::{LeaseKey, LeaseRecord},
    plan::Plan,
};

/// How long whoever asks again for a lease waits until its channel is there.
const OPENING_WAIT: Duration = Duration::from_secs(10);
/// As many leases are asked about one by one: what a service says of all takes time from all its guests, whoever asks.
const ASKED_ALONE_MAX: usize = 8;

/// Why a lease that is there isn't what is asked for, as far as its channel goes.
pub(super) fn difference(
    asked: Option<&VsockRequest>,
    held: Option<&ChannelRecord>,
) -> Option<String> {
    let asked = asked?;
    let Some(held) = held else {
        return Some("you have one by that name without a vsock channel".to_owned());
    };
    let wanted = ChannelRecord::from(asked);
    let same =
        (wanted.kind, wanted.cid, wanted.virtual_cid) == (held.kind, held.cid, held.virtual_cid);
    (!same)
        .then(|| "you have one by that name with another kind of vsock channel or CID".to_owned())
}

impl Slots {
    /// Channels of all leases that the caller may see, by owner and name, with their counters. Asks
    /// each of their services once, or about each channel where they are few.
    #[must_use]
    pub fn channels(&self, caller: Caller) -> Vec<LeaseVsock> {
        let shared = &self.shared;
        let mut seen = shared.seen_channels(caller);
        seen.sort_by(|(left, _), (right, _)| left.key.cmp(&right.key));
        if seen.is_empty() {
            return Vec::new();
        }
        let is_told_of_all = seen.len() > ASKED_ALONE_MAX;
        let of_all = is_told_of_all.then(|| {
            let counted = shared.channels.traffic(Whose::Owners(&owners(&seen)));
            counted.unwrap_or_default()
        });
        let of = |record: &LeaseRecord| match &of_all {
            Some(of_all) => of_all.get(&record.key).cloned(),
            None => shared.channel_traffic(record),
        };
        seen.iter()
            .map(|(record, seen)| row(record, seen, of(record)))
            .collect()
    }

    /// A lease's channel with its counters.
    ///
    /// # Errors
    /// There is no such lease for this caller, or it has no channel.
    pub fn channel(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
    ) -> Result<LeaseVsock, ServiceError> {
        let (record, seen) = self.shared.channel_of(caller, owner_uid, name)?;
        let traffic = self.shared.channel_traffic(&record);
        Ok(row(&record, &seen, traffic))
    }

    /// Connections of all channels that the caller may see, or of one lease's.
    ///
    /// # Errors
    /// There is no such lease for this caller, or it has no channel; or the service doesn't answer.
    pub fn channel_connections(
        &self,
        caller: Caller,
        of: Option<(Option<u32>, &Name)>,
    ) -> Result<Vec<VsockConnection>, ServiceError> {
        let shared = &self.shared;
        let seen = match of {
            Some((owner_uid, name)) => vec![shared.channel_of(caller, owner_uid, name)?],
            None => shared.seen_channels(caller),
        };
        let failed = |source| ServiceError::Channel {
            operation: "list",
            object: "vsock connections".to_owned(),
            source,
        };
        let is_told_of_all = seen.len() > ASKED_ALONE_MAX;
        match (of, seen.first()) {
            (_, None) => Ok(Vec::new()),
            (Some(_), Some((record, _))) => {
                let whose = Whose::Lease(&record.key);
                shared.channels.connections(whose).map_err(failed)
            }
            (None, _) if is_told_of_all => shared.connections_of_all(&seen).map_err(failed),
            (None, _) => shared.connections_of_each(&seen).map_err(failed),
        }
    }

    /// Begins to capture the packets of a lease's channel.
    ///
    /// # Errors
    /// There is no such lease for this caller, it has no channel, or the service refuses.
    pub fn capture_channel(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
        snap_bytes: u32,
    ) -> Result<Capture, ServiceError> {
        let (record, _) = self.shared.channel_of(caller, owner_uid, name)?;
        let capture = self.shared.channels.capture(&record.key, snap_bytes);
        let capture = capture.map_err(|source| ServiceError::Channel {
            operation: "capture the vsock channel of",
            object: format!("lease '{name}'"),
            source,
        })?;
        // It is of whichever lease had the name by then.
        self.shared.lock().lease(caller, &record.key)?;
        Ok(capture)
    }
}

impl Shared {
    fn connections_of_all(
        &self,
        seen: &[(LeaseRecord, Seen<'_>)],
    ) -> Result<Vec<VsockConnection>, ChannelError> {
        let mut connections = self.channels.connections(Whose::Owners(&owners(seen)))?;
        let keys = seen.iter().map(|(record, _)| record.key.clone());
        let seen: HashSet<LeaseKey> = keys.collect();
        connections.retain(|connection| {
            seen.contains(&LeaseKey {
                owner_uid: connection.owner_uid,
                name: connection.lease.clone(),
            })
        });
        Ok(connections)
    }

    /// Those of services that answer; an error if none does.
    fn connections_of_each(
        &self,
        seen: &[(LeaseRecord, Seen<'_>)],
    ) -> Result<Vec<VsockConnection>, ChannelError> {
        let (mut connections, mut has_answer, mut failed) = (Vec::new(), false, None);
        for (record, _) in seen {
            match self.channels.connections(Whose::Lease(&record.key)) {
                Ok(found) => {
                    connections.extend(found);
                    has_answer = true;
                }
                // It is being opened, or closed.
                Err(ChannelError::Refused(_)) => has_answer = true,
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            Some(error) if !has_answer => Err(error),
            _ => Ok(connections),
        }
    }

    /// Refuses what can't be before anything is done. A lease without a channel passes at once.
    pub(super) fn check_channel(
        &self,
        caller: Caller,
        request: &AcquireLease,
    ) -> Result<(), ServiceError> {
        let Some(vsock) = &request.vsock else {
            return Ok(());
        };
        checks::check_request(vsock)?;
        let plan = Arc::clone(&self.lock().pool(&request.pool)?.plan);
        if let Some(policy) = &vsock.policy {
            self.demand_rules(caller, caller.uid, policy, &plan)?;
        } else if let Some(policy) = &plan.spec.vsock {
            checks::check_policy(policy, vsock.kind)?;
        }
        self.check_channel_paths(&plan)?;
        self.channels
            .check(caller.uid)
            .map_err(|source| ServiceError::Channel {
                operation: "acquire a lease with a vsock channel from",
                object: format!("pool '{}'", request.pool),
                source,
            })
    }

    /// Refuses a pool whose channels' sockets would have too long paths.
    pub(super) fn check_channel_paths(&self, plan: &Plan) -> Result<(), ServiceError> {
        let base = self.channels.folder();
        let pool = &plan.spec.name;
        match base.and_then(|base| excess_path_bytes(base, pool, plan.slots_max)) {
            None => Ok(()),
            Some(excess) => Err(ServiceError::Plan {
                pool: pool.clone(),
                source: PlanError::ChannelPath { excess },
            }),
        }
    }

    /// The channel of a lease, if it has one and vsock is enabled.
    pub(super) fn channel_plan(&self, pool: &Plan, record: &LeaseRecord) -> Option<ChannelPlan> {
        let channel = record.channel.as_ref()?;
        let base = self.channels.folder()?;
        Some(ChannelPlan::new(
            base,
            pool,
            record.slot,
            &record.key,
            channel,
        ))
    }

    /// Counters of a lease's channel.
    pub(super) fn channel_traffic(&self, record: &LeaseRecord) -> Option<VsockTraffic> {
        record.channel.as_ref()?;
        let mut counted = self.channels.traffic(Whose::Lease(&record.key)).ok()?;
        counted.remove(&record.key)
    }

    /// Opens the channel of a lease that has just been granted; of one that was there, waits until it is
    /// open. If that fails there is no such lease.
    pub(super) fn settle_channel<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        outcome: Outcome,
    ) -> (MutexGuard<'a, State>, Outcome) {
        let Ok((plan, record, is_new)) = outcome else {
            return (state, outcome);
        };
        if !is_new {
            let (state, opened) = self.await_opened(state, &record.key);
            return (state, opened.map(|()| (plan, record, false)));
        }
        drop(state);
        let opened = match self.channel_plan(&plan, &record) {
            Some(channel) => {
                let _gate = self.channels_gate_read(&record.key);
                self.channels.open(&channel)
            }
            None => Err(ChannelError::Disabled),
        };
        match opened {
            Ok(()) => {
                let mut state = self.lock();
                if let Some(lease) = state.leases.get_mut(&record.key) {
                    lease.is_busy = false;
                    lease.is_opening = false;
                }
                self.changed.notify_all();
                (state, Ok((plan, record, true)))
            }
            Err(source) => {
                let error = ServiceError::Channel {
                    operation: "open the vsock channel of",
                    object: format!("lease '{}'", record.key.name),
                    source,
                };
                let mut state = self.undo(&plan, &record);
                // One that doesn't answer may do it yet.
                state.channels.are_due(self.service_of(&record.key));
                (state, Err(error))
            }
        }
    }

    pub(super) fn await_opened<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        key: &LeaseKey,
    ) -> (MutexGuard<'a, State>, Result<(), ServiceError>) {
        let deadline = Instant::now() + OPENING_WAIT;
        loop {
            let lease = state.leases.get(key);
            let lease = lease.filter(|lease| !lease.is_releasing());
            match lease.map(|lease| lease.is_opening) {
                Some(false) => return (state, Ok(())),
                None => {
                    let reason =
                        "its vsock channel or its interface could not be had: try again".to_owned();
                    let error = ServiceError::Conflict {
                        operation: "acquire",
                        object: format!("lease '{}'", key.name),
                        reason,
                    };
                    return (state, Err(error));
                }
                Some(true) => {}
            }
            let now = Instant::now();
            if now >= deadline {
                let error = ServiceError::Late {
                    object: format!("the making of lease '{}'", key.name),
                    state: "try again".to_owned(),
                };
                return (state, Err(error));
            }
            state = self.wait(&self.changed, state, Some(deadline - now));
        }
    }

    /// Closes the channel of a lease that ends. If the service is away it goes when that is back.
    pub(super) fn close_channel(&self, record: &LeaseRecord, channel: &ChannelRecord) {
        let Some(plan) = self
            .lock()
            .pools
            .get(&record.pool)
            .map(|pool| Arc::clone(&pool.plan))
        else {
            return;
        };
        let Some(base) = self.channels.folder() else {
            return;
        };
        let plan = ChannelPlan::new(base, &plan, record.slot, &record.key, channel);
        let counted = self.channel_traffic(record);
        let service = self.service_of(&record.key);
        let closed = {
            let _gate = self.channels_gate_read(&record.key);
            let closed = self.channels.close(service, &plan.lease);
            // Both, whatever becomes of the other.
            let removed = self.channels.remove_folder(&plan.folder);
            closed.and(removed)
        };
        let mut state = self.lock();
        state.keep_channel(&record.pool, &record.key, counted.as_ref());
        if let Err(error) = closed {
            tracing::warn!(lease = %record.key, %error, "a released lease's vsock channel is closed later");
            state.channels.differ(service, &error);
        }
    }

    fn channel_of(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
    ) -> Result<(LeaseRecord, Seen<'_>), ServiceError> {
        let key = caller.lease_key(owner_uid, name);
        let state = self.lock();
        let record = state.lease(caller, &key)?.record.clone();
        let pool = Arc::clone(&state.pool(&record.pool)?.plan);
        drop(state);
        if record.channel.is_none() {
            return Err(no_channel(&key));
        }
        match self.seen(&pool, &record) {
            Some(seen) => Ok((record, seen)),
            None => Err(ServiceError::Channel {
                operation: "use the vsock channel of",
                object: format!("lease '{name}'"),
                source: ChannelError::Disabled,
            }),
        }
    }

    /// The channel of a lease with its pool, if it has one and vsock is enabled.
    fn seen(&self, pool: &Arc<Plan>, record: &LeaseRecord) -> Option<Seen<'_>> {
        Some(Seen {
            base: self.channels.folder()?,
            pool: Arc::clone(pool),
            channel: Arc::clone(record.channel.as_ref()?),
        })
    }

    /// Leases with a channel that the caller may see.
    fn seen_channels(&self, caller: Caller) -> Vec<(LeaseRecord, Seen<'_>)> {
        let state = self.lock();
        let leases = state.leases.values().filter_map(|lease| {
            let record = &lease.record;
            record.channel.as_ref()?;
            let pool = &state.pools.get(&record.pool)?.plan;
            caller.may_see(&record.key, &pool.spec).then_some(())?;
            let seen = self.seen(pool, record)?;
            Some((record.clone(), seen))
        });
        leases.collect()
    }

    /// Which service carries a lease's channel.
    fn service_of(&self, key: &LeaseKey) -> usize {
        self.channels.service_of(key.owner_uid)
    }

    /// Keeps a lease's channel from being compared. None where vsock isn't enabled.
    fn channels_gate_read(&self, key: &LeaseKey) -> Option<RwLockReadGuard<'_, ()>> {
        let gate = self.channels_gates.get(self.service_of(key))?;
        Some(gate.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A lease's pool and channel, as both were when the state was looked at.
struct Seen<'a> {
    base: &'a Path,
    pool: Arc<Plan>,
    channel: Arc<ChannelRecord>,
}

impl State {
    /// Refuses a virtual CID that another lease of the same owner has.
    pub(super) fn check_virtual_cid(
        &self,
        caller: Caller,
        request: &AcquireLease,
    ) -> Result<(), ServiceError> {
        let Some(cid) = request.vsock.as_ref().and_then(|vsock| vsock.virtual_cid) else {
            return Ok(());
        };
        match self.leases.of_virtual_cid(caller.uid, cid) {
            None => Ok(()),
            Some(holder) => Err(ServiceError::Conflict {
                operation: "acquire from",
                object: format!("pool '{}'", request.pool),
                reason: format!(
                    "virtual CID {cid} is that of your lease '{}': choose another",
                    holder.name
                ),
            }),
        }
    }

    fn set_channel(&mut self, key: &LeaseKey, channel: Arc<ChannelRecord>) {
        if let Some(lease) = self.leases.get_mut(key) {
            lease.record.channel = Some(channel);
        }
    }
}

fn owners(seen: &[(LeaseRecord, Seen<'_>)]) -> BTreeSet<u32> {
    let owners = seen.iter().map(|(record, _)| record.key.owner_uid);
    owners.collect()
}

fn row(record: &LeaseRecord, seen: &Seen<'_>, traffic: Option<VsockTraffic>) -> LeaseVsock {
    let (pool, channel) = (&seen.pool, &seen.channel);
    let plan = ChannelPlan::new(seen.base, pool, record.slot, &record.key, channel);
    LeaseVsock {
        lease: record.key.name.clone(),
        owner_uid: record.key.owner_uid,
        pool: record.pool.clone(),
        channel: plan.to_api(),
        traffic,
    }
}

fn no_channel(key: &LeaseKey) -> ServiceError {
    ServiceError::NotFound {
        object: format!(
            "vsock channel of lease '{}': acquire one with `sandwire acquire --vsock`",
            key.name
        ),
    }
}
