//! Leases whose interface goes into a namespace that somebody else made.
//!
//! The lease is journaled first, as one whose interface isn't made, and is busy until it is; then the kernel makes it,
//! without the lock; then the journal is told, and the caller. What a crash leaves of a lease that nobody was told of
//! is torn down at the start. If the kernel refuses, the lease is taken back.

use std::sync::{Arc, MutexGuard};

use sandwire_api::{
    attach::{Attach, AttachedDevice, AttachedState, DeviceChoice},
    lease::AcquireLease,
    name::Name,
    pool::PoolSpec,
    slot::SlotKind,
};

use super::{Caller, Shared, Slots, State, acquire::Outcome};
use crate::{
    attach::{self, AttachRecord, ParentRecord},
    error::{NetworkError, ServiceError},
    lease::LeaseRecord,
    network::WantedChild,
    plan::{Plan, SlotNumber},
};

impl Slots {
    /// Compares a lease's interface in somebody's namespace with how it was made. Blocks for a millisecond.
    ///
    /// # Errors
    /// There is no such lease for this caller, or it has no such interface.
    pub fn attached(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
    ) -> Result<AttachedState, ServiceError> {
        let key = caller.lease_key(owner_uid, name);
        let state = self.shared.lock();
        let record = state.lease(caller, &key)?.record.clone();
        let slot = state.slot_plan(&record)?;
        drop(state);
        let attached = record.attach.and_then(|attach| attach.attached(&slot));
        let Some(attached) = attached else {
            return Err(ServiceError::NotFound {
                object: format!("interface of lease '{name}' in somebody's namespace"),
            });
        };
        let network = &self.shared.network;
        let mut defects = network.inspect(&slot).defects;
        defects.extend(network.inspect_attached(&slot));
        Ok(AttachedState { attached, defects })
    }
}

impl Shared {
    /// Refuses what can't be before anything is done, and asks the kernel about the namespace.
    pub(super) fn check_attach(
        &self,
        caller: Caller,
        request: &AcquireLease,
    ) -> Result<Option<AttachRecord>, ServiceError> {
        let plan = Arc::clone(&self.lock().pool(&request.pool)?.plan);
        let is_container = plan.spec.kind == SlotKind::Container;
        let invalid = |value: String, reason: String| ServiceError::Invalid {
            field: "attach.netns",
            value,
            reason,
        };
        let Some(wanted) = &request.attach else {
            if !is_container {
                return Ok(None);
            }
            let reason = "the pool's slots are interfaces for namespaces: name one";
            return Err(invalid("none".to_owned(), reason.to_owned()));
        };
        let path = wanted.netns.display().to_string();
        if !is_container {
            let reason = "the pool's slots are no interfaces for others' namespaces: use one of kind = container";
            return Err(invalid(path, reason.to_owned()));
        }
        demand_operator(caller, wanted)?;
        let slot = plan.slot(SlotNumber(0));
        if let Some(nic) = slot.nics.first() {
            attach::check(wanted, &plan, nic)?;
        }
        let found = self.network.find_namespace(&wanted.netns);
        let netns_cookie = found.map_err(|error| invalid(path, error.to_string()))?;
        let (device, device_reason) = self.choose_device(plan.spec.device)?;
        let parent = self.find_parent(&plan, wanted)?;
        Ok(Some(AttachRecord {
            request: wanted.clone(),
            netns_cookie,
            device,
            device_reason,
            parent,
            has_mac_of_all: true,
            is_done: false,
        }))
    }

    /// Whose child a container's interface is to be, if it is to be one.
    fn find_parent(
        &self,
        plan: &Plan,
        wanted: &Attach,
    ) -> Result<Option<ParentRecord>, ServiceError> {
        let Some(parent) = &plan.spec.parent else {
            return Ok(None);
        };
        let child = WantedChild {
            device: plan.spec.device,
            parent,
            mtu: wanted.mtu.unwrap_or(plan.spec.tap.mtu),
        };
        let found = self.network.find_parent(&child, &wanted.netns);
        let found = found.map_err(|source| ServiceError::Network {
            operation: "attach",
            object: format!("interface of pool '{}'", plan.spec.name),
            source,
        })?;
        attach::check_gateways(wanted, &found)?;
        Ok(Some(found))
    }

    /// What a container gets, and why if the pool leaves that open.
    fn choose_device(
        &self,
        choice: DeviceChoice,
    ) -> Result<(AttachedDevice, Option<String>), ServiceError> {
        match choice {
            DeviceChoice::Veth => Ok((AttachedDevice::Veth, None)),
            DeviceChoice::Macvlan => Ok((AttachedDevice::Macvlan, None)),
            DeviceChoice::Ipvlan => Ok((AttachedDevice::Ipvlan, None)),
            DeviceChoice::Netkit => {
                self.check_netkit()?;
                Ok((AttachedDevice::Netkit, None))
            }
            DeviceChoice::Auto => Ok(match self.network.check_netkit() {
                Ok(()) => {
                    let reason = "this kernel makes netkit pairs";
                    (AttachedDevice::Netkit, Some(reason.to_owned()))
                }
                Err(error) => (AttachedDevice::Veth, Some(error.to_string())),
            }),
        }
    }

    /// Refuses a device that this host can't make.
    pub(super) fn check_device(&self, spec: &PoolSpec) -> Result<(), ServiceError> {
        if let Some(parent) = &spec.parent {
            let checked = self.network.check_parent(&WantedChild {
                device: spec.device,
                parent,
                mtu: spec.tap.mtu,
            });
            return checked.map_err(|error| ServiceError::Invalid {
                field: "parent.interface",
                value: parent.interface.to_string(),
                reason: error.to_string(),
            });
        }
        if spec.device != DeviceChoice::Netkit {
            return Ok(());
        }
        self.check_netkit()
    }

    fn check_netkit(&self) -> Result<(), ServiceError> {
        let invalid = |error: NetworkError| ServiceError::Invalid {
            field: "device",
            value: "netkit".to_owned(),
            reason: format!("{error}: use veth, or auto"),
        };
        self.network.check_netkit().map_err(invalid)
    }

    /// Has the interface of a lease that has just been granted made; of one that was there, waits for it. If that
    /// fails there is no such lease.
    pub(super) fn settle_attach<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        outcome: Outcome,
    ) -> (MutexGuard<'a, State>, Outcome) {
        let Ok((plan, mut record, is_new)) = outcome else {
            return (state, outcome);
        };
        if !is_new {
            let (state, opened) = self.await_opened(state, &record.key);
            return (state, opened.map(|()| (plan, record, false)));
        }
        drop(state);
        let made = self.network.attach(&record.slot_of(&plan));
        let mut state = self.lock();
        let stored = made
            .map_err(|source| ServiceError::Network {
                operation: "attach",
                object: format!("lease '{}'", record.key.name),
                source,
            })
            .and_then(|()| state.store_attached(&mut record));
        if let Err(error) = stored {
            drop(state);
            return (self.undo(&plan, &record), Err(error));
        }
        let has_channel = record.channel.is_some();
        if let Some(lease) = state.leases.get_mut(&record.key) {
            lease.record.attach.clone_from(&record.attach);
            lease.is_busy = has_channel;
            lease.is_opening = has_channel;
        }
        self.changed.notify_all();
        (state, Ok((plan, record, true)))
    }

    /// Takes a new lease back whose caller has gone: nobody would know of it. Not if another request for it waits, which
    /// is told of it next.
    pub(super) fn take_back_unwanted<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        outcome: Outcome,
    ) -> (MutexGuard<'a, State>, Outcome) {
        let Ok((plan, record, _)) = &outcome else {
            return (state, outcome);
        };
        if state.others_ask_for(&record.key) {
            return (state, outcome);
        }
        if record.channel.is_none() && record.attach.is_none() {
            // Without letting go of the lock, so that nobody finds it.
            state.take_back(self, record);
            return (state, Err(ServiceError::CallerGone));
        }
        // A start that finds it goes on from here.
        if let Err(error) = state.journal.mark_releasing(&record.key) {
            state.journal_failed();
            tracing::error!(lease = %record.key, %error, "a lease that is taken back is not marked so");
        }
        // Who finds it waits for it as while it was made.
        if let Some(lease) = state.leases.get_mut(&record.key) {
            (lease.is_busy, lease.is_opening) = (true, true);
        }
        drop(state);
        if let Some(channel) = &record.channel {
            self.close_channel(record, channel);
        }
        let state = self.undo(plan, record);
        (state, Err(ServiceError::CallerGone))
    }

    /// Takes a lease back that nobody has been told of, and before that what its namespace has of it: a tear-down
    /// looks at the host alone.
    pub(super) fn undo(&self, plan: &Plan, record: &LeaseRecord) -> MutexGuard<'_, State> {
        let is_made = record.attach.as_ref().is_some_and(|attach| attach.is_done);
        if is_made && let Err(error) = self.network.withdraw_taps(&record.slot_of(plan)) {
            tracing::error!(lease = %record.key, %error, "the interface of a lease that was not given stays");
        }
        let mut state = self.lock();
        state.take_back(self, record);
        self.changed.notify_all();
        state
    }
}

impl State {
    fn store_attached(&mut self, record: &mut LeaseRecord) -> Result<(), ServiceError> {
        let Some(attach) = &mut record.attach else {
            return Ok(());
        };
        attach.is_done = true;
        let stored = self.journal.set_lease_attach(&record.key, attach);
        stored.map_err(|error| {
            self.journal_failed();
            error.into()
        })
    }
}

/// A path leads into anybody's namespace, with the daemon's rights.
fn demand_operator(caller: Caller, wanted: &Attach) -> Result<(), ServiceError> {
    if caller.privileged {
        return Ok(());
    }
    Err(ServiceError::Forbidden {
        uid: caller.uid,
        operation: "attach an interface to",
        object: format!("network namespace {}", wanted.netns.display()),
    })
}
