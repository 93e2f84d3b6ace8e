//! Leases of which it isn't known what came of a change, or a part of which couldn't be taken back: the service ended before it had
//! answered, or took too long. They get back what they had as soon as it answers again.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sandwire_api::impairment::Impairment;
use sandwire_impair_host::control::{Client, ClientError, Target};
use sandwire_slot::{lease::LeaseKey, service::Slots};

use super::{ImpairError, Impairments, listed, targets_of};

/// An interface, and how it was impaired before the change, if it was.
pub(super) type Before = (Target, Option<Impairment>);

/// All of them. Of one whose only interface was to be changed there is nothing to take back: it has become so, or not.
#[derive(Debug, Default)]
pub(super) struct Pending(Mutex<BTreeMap<LeaseKey, Vec<Before>>>);

impl Pending {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<LeaseKey, Vec<Before>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is to be taken back. Of an interface that is among it already what was before both changes counts.
    pub(super) fn insert(&self, lease: &LeaseKey, before: Vec<Before>) {
        let mut all = self.lock();
        let known = all.entry(lease.clone()).or_default();
        for (target, was) in before {
            if known.iter().all(|(other, _)| *other != target) {
                known.push((target, was));
            }
        }
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

    fn of(&self, lease: &LeaseKey) -> Vec<Before> {
        self.lock().get(lease).cloned().unwrap_or_default()
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
        for (target, was) in self.pending.of(lease) {
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
