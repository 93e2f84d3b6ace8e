//! What an earlier daemon has left half done that was killed meanwhile.
//!
//! Nobody was told what came of it, so it may be carried out or taken back: who asked for it asks again. A lease is impaired on all its
//! interfaces, and in the same way, or on none; and the data path leaves packets to nobody who doesn't divert them.

use std::collections::BTreeMap;

use sandwire_impair_host::control::{Client, ClientError, State, Status, Target};
use sandwire_slot::{lease::LeaseKey, service::Slots};

use super::{ImpairError, Impairments, listed_whole, targets_of};

impl Impairments {
    /// Has leases that are impaired on some of their interfaces, or in several ways, be so on all as on the first. Goes on after a failure;
    /// the first counts. Whether none has to be looked at again.
    pub(super) fn level(&self, client: &mut Client, slots: &Slots) -> Result<bool, ImpairError> {
        let mut by_lease: BTreeMap<LeaseKey, Vec<Status>> = BTreeMap::new();
        for status in client.list().map_err(ImpairError::Service)? {
            if let Some(lease) = self.lease_of(&status.owner) {
                by_lease.entry(lease).or_default().push(status);
            }
        }
        let (mut is_done, mut outcome) = (true, Ok(()));
        for (lease, statuses) in by_lease {
            // An end that the earlier daemon has begun goes on without it.
            let is_ending = statuses.iter().any(|it| it.state == State::Draining);
            if is_ending || self.endings.has(&lease) {
                is_done = false;
            } else {
                outcome = outcome.and(self.level_one(client, slots, &lease, &statuses));
            }
        }
        outcome.map(|()| is_done)
    }

    fn level_one(
        &self,
        client: &mut Client,
        slots: &Slots,
        lease: &LeaseKey,
        statuses: &[Status],
    ) -> Result<(), ImpairError> {
        let Some(found) = slots.present_interfaces(lease) else {
            return Ok(());
        };
        let targets = targets_of(&found);
        let before = impaired(&targets, statuses);
        let Some(first) = before.iter().flatten().next() else {
            return Ok(());
        };
        let is_as_first =
            |it: &Option<&Status>| it.is_some_and(|it| it.impairment == first.impairment);
        if before.iter().all(is_as_first) {
            return Ok(());
        }
        let owner = self.owner_of(lease);
        let whole = listed_whole(client, &owner)?;
        let Some(first) = impaired(&targets, &whole).into_iter().flatten().next() else {
            return Ok(());
        };
        tracing::warn!(%lease, "impaired on some of its interfaces only, or in several ways: all get what the first has");
        for target in targets.iter().filter(|target| **target != first.target) {
            match client.set(target, &owner, &first.impairment) {
                Err(error @ ClientError::Refused { .. }) => {
                    tracing::error!(%target, %error, "an impairment that can't be made whole");
                }
                set => set.map_err(ImpairError::Service)?,
            }
        }
        Ok(())
    }
}

/// What is impaired of these, in their order.
fn impaired<'a>(targets: &[Target], statuses: &'a [Status]) -> Vec<Option<&'a Status>> {
    let of = |target: &Target| {
        let mut all = statuses.iter();
        all.find(|it| it.target == *target && it.state == State::Impaired)
    };
    targets.iter().map(of).collect()
}
