//! Leases of which it isn't known what came of a change, or a part of which couldn't be taken back: the service ended before it had
//! answered, or took too long. They get back what they had as soon as it answers again.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sandwire_api::impairment::Impairment;
use sandwire_impair_host::control::{Client, ClientError, Target};
use sandwire_slot::{
    lease::LeaseKey,
    service::{LeaseInterfaces, Slots},
};

use super::{ImpairError, Impairments, listed, targets_of};

/// An interface, and how it was impaired before the change, if it was.
pub(super) type Before = (Target, Option<Impairment>);

/// All of them. Of one whose only interface was to be changed there is nothing to take back: it has become so, or not.
#[derive(Debug, Default)]
pub(super) struct Pending(Mutex<BTreeMap<LeaseKey, Waiting>>);

/// What is to be taken back of one.
#[derive(Clone, Debug)]
struct Waiting {
    /// When the lease was acquired: a later one of that name is none of it.
    acquired_at: u64,
    before: Vec<Before>,
}

impl Pending {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<LeaseKey, Waiting>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is to be taken back. Of an interface that is among it already what was before both changes counts.
    pub(super) fn insert(&self, found: &LeaseInterfaces, before: Vec<Before>) {
        let mut all = self.lock();
        let new = Waiting {
            acquired_at: found.acquired_at,
            before: Vec::new(),
        };
        let known = all
            .entry(found.lease.clone())
            .or_insert_with(|| new.clone());
        if !known.is_of(found) {
            *known = new;
        }
        for (target, was) in before {
            if known.before.iter().all(|(other, _)| *other != target) {
                known.before.push((target, was));
            }
        }
    }

    /// Forgets leases that have ended by themselves, of which nobody tells.
    pub(super) fn forget_ended(&self, present: impl Fn(&LeaseKey) -> Option<LeaseInterfaces>) {
        let is_there = |lease: &LeaseKey, waiting: &Waiting| {
            present(lease).is_some_and(|found| waiting.is_of(&found))
        };
        self.lock()
            .retain(|lease, waiting| is_there(lease, waiting));
    }

    /// One of which it is known now, or that has ended. Whether it was among them.
    pub(super) fn remove(&self, lease: &LeaseKey) -> bool {
        self.lock().remove(lease).is_some()
    }

    /// There is nothing that could be taken back.
    pub(super) fn clear(&self) {
        self.lock().clear();
    }

    pub(super) fn has(&self, lease: &LeaseKey) -> bool {
        self.lock().contains_key(lease)
    }

    pub(super) fn leases(&self) -> Vec<LeaseKey> {
        self.lock().keys().cloned().collect()
    }

    fn of(&self, found: &LeaseInterfaces) -> Vec<Before> {
        let all = self.lock();
        let waiting = all.get(&found.lease).filter(|waiting| waiting.is_of(found));
        waiting.map_or_else(Vec::new, |waiting| waiting.before.clone())
    }
}

impl Waiting {
    /// Whether that is the lease.
    fn is_of(&self, found: &LeaseInterfaces) -> bool {
        self.acquired_at == found.acquired_at
    }
}

impl Impairments {
    /// Takes back what was left half done. Goes on after a failure; the first counts.
    pub(super) fn settle(&self, client: &mut Client, slots: &Slots) -> Result<(), ImpairError> {
        let mut outcome = Ok(());
        for lease in self.pending.leases() {
            // Somebody has all of it end. If that fails, there is still this.
            if self.endings.has(&lease) {
                continue;
            }
            let settled = self.settle_one(client, slots, &lease);
            if settled.is_ok() {
                self.pending.remove(&lease);
            }
            outcome = outcome.and(settled);
        }
        outcome
    }

    fn settle_one(
        &self,
        client: &mut Client,
        slots: &Slots,
        lease: &LeaseKey,
    ) -> Result<(), ImpairError> {
        let Some(found) = slots.present_interfaces(lease) else {
            return Ok(());
        };
        let (targets, owner) = (targets_of(&found), self.owner_of(lease));
        let present = listed(client, &owner)?;
        for (target, was) in self.pending.of(&found) {
            let is_impaired = present.iter().any(|status| status.target == target);
            let undone = match was {
                _ if !targets.contains(&target) => Ok(()),
                Some(impairment) => client.set(&target, &owner, &impairment),
                // Else it may be somebody else's.
                None if is_impaired => client.clear(&target, true).map(drop),
                None => Ok(()),
            };
            match undone {
                Err(error @ ClientError::Refused { .. }) => {
                    tracing::error!(%target, %error, "an impairment that can't be taken back");
                }
                undone => undone.map_err(ImpairError::Service)?,
            }
        }
        Ok(())
    }
}
