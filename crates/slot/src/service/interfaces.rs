//! Where the packets of a lease can be diverted, for who impairs them.

use std::path::PathBuf;

use sandwire_api::{name::Name, slot::DataPath};

use super::{Caller, Slots, State};
use crate::{
    error::ServiceError,
    lease::{LeaseKey, LeaseRecord},
    plan::SlotPlan,
};

/// The interfaces by which a lease's packets come and go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseInterfaces {
    /// The lease.
    pub lease: LeaseKey,
    /// When it was acquired, in seconds since 1970-01-01 UTC: a later one has the same name.
    pub acquired_at: u64,
    /// Its pool.
    pub pool: Name,
    /// The pool's data path.
    pub data_path: DataPath,
    /// In their order.
    pub interfaces: Vec<LeaseInterface>,
}

/// One of them, a TAP or another host end: it receives what the sandbox sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseInterface {
    /// File of its network namespace; that of the daemon without.
    pub netns: Option<PathBuf>,
    /// Its name.
    pub interface: String,
}

impl Slots {
    /// The interfaces of a lease.
    ///
    /// # Errors
    /// There is no such lease for this caller.
    pub fn interfaces(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
    ) -> Result<LeaseInterfaces, ServiceError> {
        let key = caller.lease_key(owner_uid, name);
        let state = self.shared.lock();
        let record = &state.lease(caller, &key)?.record;
        state.interfaces_of(record)
    }

    /// Does work on the interfaces of a lease, which stay until that is done: no release, repair or tear-down comes
    /// between.
    ///
    /// # Errors
    /// There is no such lease for this caller, or it is being released; the work has not begun.
    pub fn with_interfaces<T>(
        &self,
        caller: Caller,
        owner_uid: Option<u32>,
        name: &Name,
        work: impl FnOnce(&LeaseInterfaces) -> T,
    ) -> Result<T, ServiceError> {
        let key = caller.lease_key(owner_uid, name);
        let (interfaces, _busy) =
            self.shared
                .hold_busy(caller, &key, "impair", State::interfaces_of)?;
        Ok(work(&interfaces))
    }

    /// Has the data path leave a lease's packets to whoever diverts them at its interfaces, or not any more. Costs
    /// some memory accesses; without such a lease, nothing happens.
    ///
    /// # Errors
    /// The slot isn't there.
    pub fn set_impaired(&self, key: &LeaseKey, impaired: bool) -> Result<(), ServiceError> {
        let (slot, at_host_ends) = {
            let state = self.shared.lock();
            let Some(lease) = state.leases.get(key) else {
                return Ok(());
            };
            let plan = &state.pool(&lease.record.pool)?.plan;
            let slot = lease.record.slot_of(plan);
            let at_host_ends = is_diverted_at_host_ends(&lease.record, &slot);
            (slot, at_host_ends)
        };
        // What is diverted inside the slot's namespace comes there by the short way too.
        let network = &self.shared.network;
        let set = network.set_impaired(&slot, impaired && at_host_ends);
        set.map_err(|source| ServiceError::Network {
            operation: "impair",
            object: format!("lease '{}'", key.name),
            source,
        })
    }

    /// All leases, whoever asks.
    #[must_use]
    pub fn present_leases(&self) -> Vec<LeaseKey> {
        self.shared.lock().leases.keys().cloned().collect()
    }

    /// The interfaces of a lease whoever asks; none if there is no such lease.
    #[must_use]
    pub fn present_interfaces(&self, key: &LeaseKey) -> Option<LeaseInterfaces> {
        let state = self.shared.lock();
        let record = &state.leases.get(key)?.record;
        state.interfaces_of(record).ok()
    }
}

impl State {
    fn interfaces_of(&self, record: &LeaseRecord) -> Result<LeaseInterfaces, ServiceError> {
        let plan = &self.pool(&record.pool)?.plan;
        let slot = record.slot_of(plan);
        if slot.is_child() {
            return Err(ServiceError::Conflict {
                operation: "impair",
                object: format!("lease '{}'", record.key.name),
                reason: "its packets leave by its parent's network, past every place where the host could divert \
                         them: use a pool with device = veth"
                    .to_owned(),
            });
        }
        let (netns, names): (_, Vec<&str>) = if is_diverted_at_host_ends(record, &slot) {
            (None, slot.host_ends().collect())
        } else {
            let taps = slot.nics.iter().map(|nic| nic.tap.as_str());
            (Some(PathBuf::from(slot.netns_path())), taps.collect())
        };
        let interface = |name: &str| LeaseInterface {
            netns: netns.clone(),
            interface: name.to_owned(),
        };
        Ok(LeaseInterfaces {
            lease: record.key.clone(),
            acquired_at: record.acquired_at,
            pool: record.pool.clone(),
            data_path: slot.data_path,
            interfaces: names.into_iter().map(interface).collect(),
        })
    }
}

/// Whether a lease's packets pass by its host ends on every data path, and there alone all of them. In the namespace of a
/// process, what it sends leaves by the veth, but with eBPF what a VMM in there sends goes past the veth's inner end.
fn is_diverted_at_host_ends(record: &LeaseRecord, slot: &SlotPlan) -> bool {
    record.is_process || !slot.has_netns()
}
