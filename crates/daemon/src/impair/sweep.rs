//! Takes leases that have ended off the service's list, and has a dead service take up the others again.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use sandwire_impair_host::control::{Client, ClientError, State, Status, control_socket};
use sandwire_slot::{lease::LeaseKey, service::Slots};
use tokio::time::timeout;

use super::{ImpairError, Impairments, targets_of};

/// How often it is looked while a lease may be impaired.
const INTERVAL: Duration = Duration::from_secs(2);

/// Looks from time to time, and at once when a lease has ended, for ever.
pub(crate) async fn sweep(impairments: Arc<Impairments>, slots: Arc<Slots>) {
    let mut said = String::new();
    loop {
        if impairments.may_be.load(Ordering::Relaxed) {
            let (ours, theirs) = (Arc::clone(&impairments), Arc::clone(&slots));
            let look = move || ours.look(&theirs);
            match tokio::task::spawn_blocking(look).await {
                Ok(Ok(())) => said.clear(),
                Ok(Err(error)) => {
                    // What stays so is said once.
                    let text = error.to_string();
                    if text != said {
                        tracing::warn!(%error, "impaired leases can't be looked after");
                    }
                    said = text;
                }
                Err(error) => tracing::error!(%error, "a look at impaired leases ended early"),
            }
        }
        // Either way it is time to look again.
        let _ = timeout(INTERVAL, impairments.ended.notified()).await;
    }
}

impl Impairments {
    /// Looks once.
    pub(super) fn look(&self, slots: &Slots) -> Result<(), ImpairError> {
        let _gate = self.lock_gate();
        let connected = Client::connect(&control_socket(&self.folder));
        if connected.as_ref().is_err_and(|error| !error.is_late()) {
            // It is gone, and another may be started.
            self.is_late.store(false, Ordering::Relaxed);
        }
        let looked = self.look_by(connected, slots);
        self.note_looked(&looked);
        looked
    }

    /// Takes note of whether the service answers in time.
    pub(super) fn note_looked(&self, looked: &Result<(), ImpairError>) {
        let is_late = matches!(looked, Err(ImpairError::Service(error)) if error.is_late());
        self.is_late.store(is_late, Ordering::Relaxed);
    }

    fn look_by(
        &self,
        connected: Result<Client, ClientError>,
        slots: &Slots,
    ) -> Result<(), ImpairError> {
        // Also of slots that were repaired meanwhile.
        let before = match self.is_led.load(Ordering::Relaxed) {
            true => [self.known.leases(), self.pending.leases()].concat(),
            // An earlier daemon may have ended before their packets had other ways, or after.
            false => slots.present_leases(),
        };
        // Also while the service doesn't answer: the next one of the name may be there before it does.
        self.pending
            .forget_ended(|lease| slots.present_interfaces(lease));
        let mut client = match connected {
            Ok(client) => client,
            Err(error) if error.is_late() => return Err(ImpairError::Service(error)),
            Err(_) => {
                let left = self.left();
                let is_any_left = !left.is_empty();
                self.known.replace(false, left);
                if !is_any_left {
                    return self.note_ended(slots, &before);
                }
                // It takes up again what it remembers.
                self.connect_or_start()?
            }
        };
        let mut present = Vec::new();
        let mut is_any_left = false;
        let mut failure = self.settle(&mut client, slots).err();
        let mut is_taken_up = self.is_taken_up.load(Ordering::Relaxed);
        if !is_taken_up {
            match self.level(&mut client, slots) {
                Ok(is_done) => is_taken_up = is_done,
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        let listed = match client.list() {
            Ok(listed) => listed,
            Err(error) => return Err(failure.unwrap_or(ImpairError::Service(error))),
        };
        for status in listed {
            // Others may be other daemons'.
            let Some(lease) = self.lease_of(&status.owner) else {
                continue;
            };
            if is_as_it_should(slots, &lease, &status) {
                is_any_left = true;
                present.push((lease, status.impairment));
                continue;
            }
            tracing::info!(target = %status.target, owner = %status.owner, "the impairment of a lease has ended");
            if let Err(error) = client.clear(&status.target, true) {
                is_any_left = true;
                failure = failure.or(Some(ImpairError::Service(error)));
            }
        }
        self.known.replace(true, present);
        self.is_taken_up.store(is_taken_up, Ordering::Relaxed);
        let led = self.lead(slots, &before);
        is_any_left |= !is_taken_up || led.is_err() || !self.pending.leases().is_empty();
        failure = failure.or(led.err());
        self.may_be.store(is_any_left, Ordering::Relaxed);
        failure.map_or(Ok(()), Err)
    }

    /// Takes note that the service has ended as it should, with all impairments.
    fn note_ended(&self, slots: &Slots, before: &[LeaseKey]) -> Result<(), ImpairError> {
        self.pending.clear();
        // Nothing is left of it that could be half done.
        self.is_taken_up.store(true, Ordering::Relaxed);
        let led = self.lead(slots, before);
        self.may_be.store(led.is_err(), Ordering::Relaxed);
        led
    }

    /// Has packets of leases that are impaired, or may be, pass where they are diverted, and those of leases that were as they would
    /// otherwise. Goes on after a failure, as of a pool that the host refused at the start; the first counts, and has all leases looked at
    /// again.
    fn lead(&self, slots: &Slots, before: &[LeaseKey]) -> Result<(), ImpairError> {
        let mut outcome = Ok(());
        for lease in self.known.leases().iter().chain(before) {
            let is_impaired = self.known.has(lease) || self.pending.has(lease);
            outcome = outcome.and(slots.set_impaired(lease, is_impaired));
        }
        self.is_led.store(outcome.is_ok(), Ordering::Relaxed);
        Ok(outcome?)
    }
}

/// Whether a target's lease is there, and still has that interface.
fn is_as_it_should(slots: &Slots, lease: &LeaseKey, status: &Status) -> bool {
    if matches!(status.state, State::Ended { .. }) {
        return false;
    }
    let present = slots.present_interfaces(lease);
    present.is_some_and(|found| targets_of(&found).contains(&status.target))
}
