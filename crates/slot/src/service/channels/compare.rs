//! Has each service for vsock have the channels that the journal says, and no folder be there that belongs to none of them.
//!
//! Each service is compared for itself, so that one that hangs or refuses holds up no other's channels. What it says of its
//! own is compared, and nothing is done by it: it may have been taken over by a guest. All close first what isn't theirs, and only then any
//! opens: of an owner who has come to another group, the former service has the sockets that are to be the new one's.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLockWriteGuard, TryLockError},
    time::Duration,
};

use super::super::{Shared, State};
use crate::{
    channel::{self, ChannelError, ChannelPlan, ChannelRecord},
    lease::LeaseKey,
    plan::{Plan, SlotNumber},
};

/// How often a comparison that failed is tried again.
const COMPARE_RETRY: Duration = Duration::from_secs(1);
/// How long each half of one may take. The auditor has others to see to, and goes on with what is left in the next one.
const COMPARE_MAX: Duration = Duration::from_secs(5);

/// How the services' channels compare with the journal's.
#[derive(Debug, Default)]
pub(in super::super) struct Comparisons {
    /// By service.
    services: BTreeMap<usize, Comparison>,
    /// Why none of the channels that there should be is carried.
    unserved: Option<String>,
    /// Something was compared since folders were looked at.
    sweep_is_due: bool,
}

/// How one service's compare.
#[derive(Debug, Default)]
struct Comparison {
    /// What the service may differ in, until a comparison finds nothing.
    difference: Option<String>,
    /// Comparisons in a row in which it refused something.
    refusals: u32,
    /// Generation of the service at the last comparison that came to its end.
    generation: Option<u64>,
    /// When the next one is due, in time since boot.
    due: Duration,
}

impl Comparisons {
    pub(in super::super) fn difference(&self) -> Option<&str> {
        let mut differences = self.services.values();
        let of_services = differences.find_map(|of| of.difference.as_deref());
        self.unserved.as_deref().or(of_services)
    }

    /// Whether the first one of each of so many services is over, with the look at folders after it.
    #[cfg(test)]
    pub(in super::super) fn were_made(&self, services: usize) -> bool {
        let made = self.services.values().filter(|of| of.generation.is_some());
        made.count() == services && !self.sweep_is_due
    }

    /// A service may differ in what couldn't be asked of it.
    pub(super) fn differ(&mut self, service: usize, error: &ChannelError) {
        self.of(service).difference = Some(error.to_string());
        self.are_due(service);
    }

    /// A service may differ in what it was asked for, and hasn't answered in time.
    pub(super) fn are_due(&mut self, service: usize) {
        self.of(service).due = Duration::ZERO;
    }

    fn of(&mut self, service: usize) -> &mut Comparison {
        self.services.entry(service).or_default()
    }

    /// Whether it is time to compare a service; then one has begun.
    fn begin(&mut self, service: usize, generation: u64, now: Duration) -> bool {
        let seen = self.of(service);
        let is_time = now >= seen.due || seen.generation != Some(generation);
        if is_time {
            // Who says from now on that it is due may say so of what this one has passed already.
            seen.due = Duration::MAX;
        }
        is_time
    }

    /// Takes note of what came of one that has begun. Whether the service has all that it should.
    fn end(
        &mut self,
        (service, generation): (usize, u64),
        compared: Result<bool, ChannelError>,
        now: Duration,
        interval: Duration,
    ) -> bool {
        let is_away = matches!(compared, Err(ChannelError::Down { .. }));
        self.sweep_is_due |= !is_away;
        let seen = self.of(service);
        let is_due_again = seen.due == Duration::ZERO;
        let mut has_all = false;
        match compared {
            Ok(true) => {
                has_all = true;
                seen.difference = seen.difference.take().filter(|_| is_due_again);
                seen.refusals = 0;
                seen.generation = Some(generation);
                seen.due = now + interval;
            }
            // Whoever watches the service tells of its being away.
            Ok(false) | Err(ChannelError::Down { .. }) => seen.due = now + COMPARE_RETRY,
            Err(error) => {
                tracing::warn!(%error, "vsock channels differ from the journal");
                seen.difference = Some(error.to_string());
                seen.generation = Some(generation);
                seen.due = now + pause(seen.refusals, interval);
                seen.refusals = seen.refusals.saturating_add(1);
            }
        }
        if is_due_again {
            seen.due = Duration::ZERO;
        }
        has_all
    }
}

/// A comparison of a service under way.
struct Due {
    service: usize,
    /// Of the service, at the beginning.
    generation: u64,
    /// What was refused first.
    refused: Option<ChannelError>,
    /// Whether it has come to its end so far.
    compared: Result<bool, ChannelError>,
}

/// A channel that there should be. Its plan, which has all rules of its policy, is made when the state's lock is free again.
struct Wanted {
    lease: LeaseKey,
    pool: Arc<Plan>,
    slot: SlotNumber,
    channel: Arc<ChannelRecord>,
    /// Its lease is just being released: whoever does that has closed it, or will.
    is_ending: bool,
}

impl Wanted {
    fn plan(&self, base: &Path) -> ChannelPlan {
        ChannelPlan::new(base, &self.pool, self.slot, &self.lease, &self.channel)
    }

    fn folder(&self, base: &Path) -> PathBuf {
        channel::folder(base, &self.pool.spec.name, self.slot)
    }
}

impl Shared {
    /// Has services have what the journal says, where they may differ: after a start, when one came
    /// back, when a call of it failed, and now and then.
    pub(in super::super) fn compare_channels(&self, now: Duration) {
        let Some(base) = self.channels.folder() else {
            self.note_unserved();
            return;
        };
        let services = 0..self.channels.services();
        let mut due: Vec<Due> = services
            .filter_map(|service| self.due_of(service, now))
            .collect();
        for one in &mut due {
            one.compared = self.close_others(one.service, &mut one.refused);
        }
        let mut has_compared = false;
        for mut one in due {
            if matches!(one.compared, Ok(true)) {
                one.compared = self.open_wanted(base, one.service, &mut one.refused);
            }
            has_compared |= self.note_compared(one, now);
        }
        if has_compared {
            self.learn_earlier_channels();
        }
        self.sweep_channels(base);
    }

    /// Leases of a time when vsock was enabled.
    fn note_unserved(&self) {
        let mut state = self.lock();
        let has_any = state
            .leases
            .values()
            .any(|lease| lease.record.channel.is_some());
        state.channels.unserved = has_any.then(|| ChannelError::Disabled.to_string());
    }

    /// The comparison of a service, if it is time.
    fn due_of(&self, service: usize, now: Duration) -> Option<Due> {
        let generation = self.channels.generation(service);
        if !self.lock().channels.begin(service, generation, now) {
            return None;
        }
        Some(Due {
            service,
            generation,
            refused: None,
            compared: Ok(true),
        })
    }

    /// Takes note of what came of it. Whether the service has all that it should.
    fn note_compared(&self, due: Due, now: Duration) -> bool {
        let Due {
            service,
            generation,
            refused,
            compared,
        } = due;
        let compared = match (compared, refused) {
            (Ok(true), Some(refused)) => Err(refused),
            (compared, _) => compared,
        };
        let interval = self.settings.audit_interval;
        let mut state = self.lock();
        let of = (service, generation);
        state.channels.end(of, compared, now, interval)
    }

    /// Has a service close what isn't its own. Whether it came to the end.
    fn close_others(
        &self,
        service: usize,
        refused: &mut Option<ChannelError>,
    ) -> Result<bool, ChannelError> {
        let _gate = self.channels_gate_write(service);
        let until = self.now() + COMPARE_MAX;
        let found = self.channels.list(service)?;
        let wanted = self.wanted_of(service).into_iter();
        let wanted: HashSet<LeaseKey> = wanted.map(|wanted| wanted.lease).collect();
        for channel in &found {
            if wanted.contains(&channel.lease) {
                continue;
            }
            if self.now() > until {
                return Ok(false);
            }
            tracing::info!(lease = %channel.lease, "closes a vsock channel of no lease");
            go_on(self.channels.close(service, &channel.lease), refused)?;
        }
        Ok(true)
    }

    /// Has a service have its own. Whether it came to the end.
    fn open_wanted(
        &self,
        base: &Path,
        service: usize,
        refused: &mut Option<ChannelError>,
    ) -> Result<bool, ChannelError> {
        let _gate = self.channels_gate_write(service);
        let until = self.now() + COMPARE_MAX;
        let found = self.channels.list(service)?;
        let found: BTreeMap<&LeaseKey, &ChannelPlan> = found
            .iter()
            .map(|channel| (&channel.lease, channel))
            .collect();
        for wanted in self.wanted_of(service) {
            if wanted.is_ending {
                continue;
            }
            let plan = &wanted.plan(base);
            let current = found.get(&plan.lease).copied();
            let has_folder = self.channels.has_folder(plan);
            let is_as_wanted = current == Some(plan) && has_folder;
            if is_as_wanted {
                continue;
            }
            if self.now() > until {
                return Ok(false);
            }
            tracing::info!(lease = %plan.lease, "brings a vsock channel to what the journal says");
            // Where only the policy differs, connections that are still allowed go on.
            let done = match current {
                Some(current) if has_folder && current.differs_in_policy_alone(plan) => {
                    self.channels.set_policy(&plan.lease, &plan.policy)
                }
                _ => self.channels.open(plan),
            };
            go_on(done, refused)?;
        }
        Ok(true)
    }

    /// The channels that a service should have, by owner and name.
    fn wanted_of(&self, service: usize) -> Vec<Wanted> {
        // By owner: the groups' lists of users are gone through once for each, not for each lease.
        let mut services = HashMap::new();
        let is_its = |key: &LeaseKey| {
            let of = services.entry(key.owner_uid);
            *of.or_insert_with(|| self.service_of(key)) == service
        };
        let mut wanted = self.lock().wanted_channels(is_its);
        wanted.sort_by(|left, right| left.lease.cmp(&right.lease));
        wanted
    }

    /// Keeps a service's channels from being opened and closed for leases.
    fn channels_gate_write(&self, service: usize) -> RwLockWriteGuard<'_, ()> {
        let gate = self.channels_gates[service].write();
        gate.unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes folders of no channel, if there may be some and nobody is just making or removing one.
    fn sweep_channels(&self, base: &Path) {
        if !self.lock().channels.sweep_is_due {
            return;
        }
        let mut held = Vec::new();
        for gate in &self.channels_gates {
            match gate.try_write() {
                Ok(gate) => held.push(gate),
                Err(TryLockError::Poisoned(broken)) => held.push(broken.into_inner()),
                // Its service may hang: the others' callers don't wait for it.
                Err(TryLockError::WouldBlock) => return,
            }
        }
        let wanted = self.lock().wanted_channels(|_| true);
        let folders = wanted.iter().map(|wanted| wanted.folder(base)).collect();
        self.channels.sweep(&folders);
        drop(held);
        // Only this thread says that one is due.
        self.lock().channels.sweep_is_due = false;
    }
}

/// How long after so many others in a row a comparison with refusals is made again: a lease's owner can have its channel refused for as
/// long as it likes, and each takes time from others.
fn pause(refusals: u32, longest: Duration) -> Duration {
    COMPARE_RETRY
        .saturating_mul(1 << refusals.min(16))
        .min(longest.max(COMPARE_RETRY))
}

/// Notes what was refused first, and goes on unless the service is away.
fn go_on(
    done: Result<(), ChannelError>,
    refused: &mut Option<ChannelError>,
) -> Result<(), ChannelError> {
    match done {
        Err(error @ ChannelError::Down { .. }) => return Err(error),
        Err(error) if refused.is_none() => *refused = Some(error),
        _ => {}
    }
    Ok(())
}

impl State {
    /// The channels of these leases that there should be.
    fn wanted_channels(&self, mut is_meant: impl FnMut(&LeaseKey) -> bool) -> Vec<Wanted> {
        let leases = self.leases.values().filter_map(|lease| {
            let record = &lease.record;
            let channel = record.channel.as_ref()?;
            is_meant(&record.key).then_some(())?;
            Some(Wanted {
                lease: record.key.clone(),
                pool: Arc::clone(&self.pools.get(&record.pool)?.plan),
                slot: record.slot,
                channel: Arc::clone(channel),
                is_ending: lease.is_busy && lease.is_releasing(),
            })
        });
        leases.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As of a service that hasn't answered who wanted a channel open, and opens it after it was asked for all that it has.
    #[test]
    fn what_becomes_due_while_a_service_is_compared_is_compared_next() {
        let (now, interval) = (Duration::from_secs(100), Duration::from_secs(30));
        let refusal = || Err(ChannelError::Refused("as told".to_owned()));
        for compared in [Ok(true), Ok(false), refusal()] {
            let mut all = Comparisons::default();
            assert!(all.begin(0, 1, now));
            all.end((0, 1), Ok(true), now, interval);
            assert!(!all.begin(0, 1, now) && all.difference().is_none());
            let later = now + interval;
            assert!(all.begin(0, 1, later));
            all.differ(0, &ChannelError::Refused("meanwhile".to_owned()));
            all.end((0, 1), compared, later, interval);
            assert!(all.difference().is_some());
            assert!(all.begin(0, 1, later));
            all.end((0, 1), Ok(true), later, interval);
            assert!(!all.begin(0, 1, later) && all.difference().is_none());
        }
    }

    #[test]
    fn what_is_refused_again_and_again_is_tried_less_and_less_often() {
        let longest = Duration::from_secs(30);
        let pauses = [0, 1, 2, 4, 5, u32::MAX].map(|refusals| pause(refusals, longest).as_secs());
        assert_eq!(pauses, [1, 2, 4, 16, 30, 30]);
    }
}
