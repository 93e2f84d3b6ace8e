//! Takes leases that have ended off the service's list, and has a dead service take up the others again.

use std::{
    sync::{Arc, PoisonError, atomic::Ordering},
    time::Duration,
};

use sandwire_api::slot::DataPath;
use sandwire_impair_host::{
    control::{State, Status},
    launch,
};
use sandwire_slot::service::Slots;
use tokio::time::timeout;

use super::{ImpairError, Impairments, lease_of, targets_of};

/// How often it is looked while a lease may be impaired.
const INTERVAL: Duration = Duration::from_secs(2);

/// Looks from time to time, and at once when a lease has ended, for ever.
pub(crate) async fn sweep(impairments: Arc<Impairments>, slots: Arc<Slots>) {
    loop {
        if impairments.may_be.load(Ordering::Relaxed) {
            let (ours, theirs) = (Arc::clone(&impairments), Arc::clone(&slots));
            let look = move || ours.look(&theirs);
            match tokio::task::spawn_blocking(look).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::warn!(%error, "impaired leases can't be looked after");
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
    fn look(&self, slots: &Slots) -> Result<(), ImpairError> {
        let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        let mut client = match self.connect() {
            Ok(client) => client,
            Err(_) if launch::left(&self.folder).of_leases == 0 => {
                self.may_be.store(false, Ordering::Relaxed);
                return Ok(());
            }
            // It takes up again what it remembers.
            Err(_) => self.connect_or_start()?,
        };
        let mut is_any_left = false;
        let mut failure = None;
        for status in client.list().map_err(ImpairError::Service)? {
            let Some(is_valid) = is_as_it_should(slots, &status) else {
                continue;
            };
            if is_valid {
                is_any_left = true;
                continue;
            }
            tracing::info!(target = %status.target, owner = %status.owner, "the impairment of a lease has ended");
            if let Err(error) = client.clear(&status.target, true) {
                is_any_left = true;
                failure = failure.or(Some(ImpairError::Service(error)));
            }
        }
        self.may_be.store(is_any_left, Ordering::Relaxed);
        failure.map_or(Ok(()), Err)
    }
}

/// Whether a target's lease is there, and still has that interface; none if it isn't a lease's.
fn is_as_it_should(slots: &Slots, status: &Status) -> Option<bool> {
    let lease = lease_of(status)?;
    if matches!(status.state, State::Ended { .. }) {
        return Some(false);
    }
    let present = slots.present_interfaces(&lease);
    Some(present.is_some_and(|found| {
        found.data_path != DataPath::Xdp && targets_of(&found).contains(&status.target)
    }))
}
