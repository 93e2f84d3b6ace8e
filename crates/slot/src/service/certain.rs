//! Handing out the slot with a certain clone address, which may first have to be built.

use std::{
    sync::MutexGuard,
    time::{Duration, Instant},
};

use sandwire_api::{lease::AcquireLease, slot::DataPath};

use super::{
    Caller, Shared, State,
    acquire::{Asked, Given, Outcome},
};
use crate::{
    error::ServiceError,
    lease::LeaseKey,
    plan::SlotNumber,
    pool::{Claim, Reserved},
};

/// Building takes milliseconds; a host under heavy load may need longer.
const CLAIM_WAIT: Duration = Duration::from_secs(5);

impl Shared {
    /// Hands out the slot with a certain clone address, waiting for its build if need be.
    pub(super) fn acquire_certain<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        asked: &Asked<'_>,
    ) -> (MutexGuard<'a, State>, Outcome) {
        let request = asked.request;
        let deadline = Instant::now() + CLAIM_WAIT;
        let mut reserved = None;
        let outcome = loop {
            match state.try_certain(self, asked, &mut reserved) {
                Ok(Some(outcome)) => break Ok(outcome),
                Ok(None) => {}
                Err(error) => break Err(error),
            }
            let now = Instant::now();
            if now >= deadline {
                break Err(ServiceError::Late {
                    object: format!("building the slot of pool '{}'", request.pool),
                    state: "try again".to_owned(),
                });
            }
            state = self.wait(&self.changed, state, Some(deadline - now));
        };
        // Whoever gave up, or found the lease made by another request, leaves the slot to all.
        if let Some((number, _)) = reserved
            && let Ok(entry) = state.pool_mut(&request.pool)
            && entry.pool.unreserve(number)
        {
            entry.tear_down.push_back(number);
            self.tear_down_work.notify_one();
            // Whoever deletes the pool may wait for just this.
            self.changed.notify_all();
        }
        (state, outcome)
    }
}

impl State {
    /// One try: done, or to be tried again after a change. `reserved` is the number that the
    /// builders work on for this request, and the data path that the pool had then.
    fn try_certain(
        &mut self,
        shared: &Shared,
        asked: &Asked<'_>,
        reserved: &mut Option<(SlotNumber, DataPath)>,
    ) -> Result<Option<Given>, ServiceError> {
        let (caller, request) = (asked.caller, asked.request);
        self.check_acquire(caller, request)?;
        if let Some(found) = self.existing(asked, shared.now())? {
            return Ok(Some(found));
        }
        self.check_share(caller, &request.pool)?;
        self.check_virtual_cid(caller, request)?;
        let number = self.number_of(request)?;
        let mut is_taken = false;
        if let Some((_, data_path)) = *reserved {
            let entry = self.pool_mut(&request.pool)?;
            match entry.pool.take_reserved(number) {
                Reserved::Taken => is_taken = true,
                Reserved::Building => return Ok(None),
                // What was built for this request was of no use after the pool's move.
                Reserved::Failed if entry.plan.spec.data_path != data_path => *reserved = None,
                Reserved::Failed => return Err(entry.none_ready()),
            }
        }
        if !is_taken {
            is_taken = self.claim(shared, caller, request, number, reserved)?;
        }
        if !is_taken {
            return Ok(None);
        }
        *reserved = None;
        self.grant(shared, asked, number).map(Some)
    }

    /// Whether a lease is asked for by more than one request at a time.
    pub(super) fn others_ask_for(&self, key: &LeaseKey) -> bool {
        self.acquiring
            .get(key)
            .is_some_and(|requests| *requests > 1)
    }

    /// Claims the number. Returns whether it was ready.
    fn claim(
        &mut self,
        shared: &Shared,
        caller: Caller,
        request: &AcquireLease,
        number: SlotNumber,
        reserved: &mut Option<(SlotNumber, DataPath)>,
    ) -> Result<bool, ServiceError> {
        let tenant = request
            .name
            .as_ref()
            .map(|name| caller.lease_key(None, name));
        let is_of_ours = tenant.as_ref().is_some_and(|key| self.others_ask_for(key));
        let entry = self.pool_mut(&request.pool)?;
        entry.demand_added()?;
        match entry.pool.claim(number, tenant.as_ref()) {
            Claim::Taken => Ok(true),
            Claim::Wait => Ok(false),
            Claim::Building => {
                // If it rested, its row stays until the lease ends, which wins over it.
                *reserved = Some((number, entry.plan.spec.data_path));
                shared.build_work.notify_one();
                Ok(false)
            }
            // The caller asks again for what it asks for already.
            Claim::OfAnother if is_of_ours => Ok(false),
            Claim::OfAnother | Claim::InUse => Err(ServiceError::Conflict {
                operation: "acquire",
                object: format!("a slot of pool '{}'", request.pool),
                reason: format!(
                    "clone address {} is in use, or rests after its release",
                    request
                        .clone_address
                        .map(|address| address.to_string())
                        .unwrap_or_default()
                ),
            }),
        }
    }

    fn number_of(&self, request: &AcquireLease) -> Result<SlotNumber, ServiceError> {
        let plan = &self.pool(&request.pool)?.plan;
        let invalid = |value: String, reason| ServiceError::Invalid {
            field: "clone_address",
            value,
            reason,
        };
        let Some(address) = request.clone_address else {
            return Err(invalid(String::new(), "none is given".to_owned()));
        };
        let number = plan.slot_of_address(address).ok_or_else(|| {
            let reason = format!("no slot of pool '{}' has it", request.pool);
            invalid(address.to_string(), reason)
        })?;
        let slot = plan.slot(number);
        let of_first = slot.api_nics().first().is_some_and(|nic| {
            let mut addresses = nic.clone_addresses();
            addresses.any(|of_first| of_first == address)
        });
        if !of_first {
            let reason = "it is the address of a further interface; name that of the first";
            return Err(invalid(address.to_string(), reason.to_owned()));
        }
        Ok(number)
    }
}
