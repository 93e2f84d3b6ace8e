//! Pools, leases and published ports as one thread-safe service.
//!
//! All that is known is in one [`State`] behind one lock, beside the journal that it is written to
//! first. The lock is held for a few microseconds at a time and never during a call of the kernel:
//!
//! - a hand-out takes the lock once: pop a ready slot, insert a row, answer ([`acquire`]);
//! - builders, the tear-down worker and the auditor take it to learn what to do, let go of it while
//!   the kernel works, and take it again to note the outcome ([`workers`], [`audit`]);
//! - who waits for an outcome waits on a condition variable.
//!
//! A number's state in its [`Pool`] says who may work on a slot: builders on `Building`, the
//! tear-down worker on `TearingDown`; on a leased slot only who has set the lease's `is_busy`.
//!
//! Nothing is done at the end that a crash would miss: stopping is just stopping, and
//! [`Slots::open`] finds everything as SIGKILL would have left it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    net::IpAddr,
    ops::Range,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock},
    thread::JoinHandle,
    time::Duration,
};

use sandwire_api::{
    lease::{LeaseState, TapHolder},
    name::Name,
    traffic::Traffic,
    vsock::VsockTraffic,
};

use crate::{
    channel::Channels,
    clock::Clock,
    error::ServiceError,
    journal::Journal,
    lease::{LeaseKey, LeaseRecord},
    network::Network,
    plan::{Plan, SlotNumber},
    pool::Pool,
    published::Publication,
    reclaim::SlotKey,
};

mod access;
mod acquire;
mod attach;
mod audit;
mod certain;
mod channels;
mod counted;
mod counters;
mod health;
mod interfaces;
mod leases;
mod moves;
mod open;
mod policies;
mod pools;
mod ports;
mod release;
mod rests;
mod take_back;
mod trace;
mod traffic;
mod workers;

pub use access::Caller;
pub use acquire::Acquired;
pub use counted::Counted;
pub use counters::{Counters, Histogram};
pub use interfaces::{LeaseInterface, LeaseInterfaces};
pub use pools::PoolView;
pub use trace::{Trace, Traced};

/// What the service is told at its start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of the daemon's instance, part of the names of its kernel objects.
    pub instance: Name,
    /// Folder of the journal.
    pub state_dir: PathBuf,
    /// Builds at a time.
    pub builders: usize,
    /// Every slot is looked at once in this time.
    pub audit_interval: Duration,
}

/// The service. Dropping it stops its threads; slots and leases stay.
pub struct Slots {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What the callers' threads and the service's own share.
struct Shared {
    settings: Settings,
    network: Arc<dyn Network>,
    channels: Arc<dyn Channels>,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    /// Builders wait here.
    build_work: Condvar,
    /// The tear-down worker waits here.
    tear_down_work: Condvar,
    /// The auditor waits here.
    audit_work: Condvar,
    /// Who waits for the outcome of a build, tear-down or release waits here.
    changed: Condvar,
    /// Held while a pool is created, resized or deleted, which takes calls of the kernel.
    pools_gate: Mutex<()>,
    /// Held while the kernel is told the published ports, so that the newest list wins. Locked before `state`, if both are.
    ports_gate: Mutex<()>,
    /// Held while the data path is told a policy, so that it is told each once.
    policies_gate: Mutex<()>,
    /// By service for vsock: held to read while a channel of its is opened, closed or changed, and to write while all are
    /// compared with the journal; all of them, while folders are looked at that belong to none.
    channels_gates: Vec<RwLock<()>>,
    /// What leases had sent and received before the start, by pool. Locked before `state`, if both are.
    earlier: RwLock<BTreeMap<Name, Traffic>>,
    /// Who watches packets. Locked before `state`, if both are.
    traces: Mutex<trace::Traces>,
}

/// All that the service knows.
struct State {
    journal: Journal,
    pools: BTreeMap<Name, PoolEntry>,
    leases: leases::Leases,
    /// Lease of each leased or held slot.
    tenants: HashMap<SlotKey, LeaseKey>,
    /// Leases that callers ask for who may have to wait, and how many do.
    acquiring: HashMap<LeaseKey, u32>,
    /// Leases with a time to live, by its end.
    expiries: BTreeSet<(Duration, LeaseKey)>,
    policies: policies::Policies,
    /// When what the data path had before the start and nobody has any more is removed.
    adoption_ends: Option<Duration>,
    ports: Vec<Publication>,
    port_changes: ports::Changes,
    /// The kernel may have other ports than `ports`: to be told again.
    ports_dirty: Option<String>,
    /// Addresses on the host that published ports leave alone, once the kernel has been told.
    spared: Option<BTreeSet<IpAddr>>,
    /// Clone addresses to which published ports may lead in the kernel.
    published_to: HashSet<IpAddr>,
    /// Slots in state `TearingDown` that nobody may take up before the kernel knows that no port leads to them.
    unpublishing: Vec<SlotKey>,
    /// Numbers for names of leases that the journal has set aside.
    lease_numbers: Range<u64>,
    /// Leased slots that lack pieces, for the auditor.
    repairs: VecDeque<(SlotKey, Damage)>,
    /// What leases' channels may differ in from the journal: why, and as of which generation of their services
    /// they were compared last.
    channels: channels::Comparisons,
    defects: health::Defects,
    counters: Counters,
    /// What leases that have ended had sent and received, by pool.
    ended: BTreeMap<Name, Traffic>,
    /// The same of their channels.
    ended_channels: BTreeMap<Name, VsockTraffic>,
    /// What channels had counted before the start.
    earlier_channels: counted::EarlierChannels,
    /// Clone addresses that rest although their pools are gone.
    former_rests: rests::FormerRests,
    stopping: bool,
    /// The host's side is to be inspected at once.
    host_is_due: bool,
    /// Whether what a former change has left of pools on the host is still there.
    is_unsettled: bool,
    /// The last build was of what somebody waited for.
    has_built_wanted: bool,
}

struct PoolEntry {
    plan: Arc<Plan>,
    /// Tells it from others of that name, before and after.
    incarnation: u64,
    pool: Pool,
    /// Why the host isn't prepared for the pool, if so.
    not_added: Option<String>,
    is_deleting: bool,
    /// The pool's policy in the eBPF data path.
    policy: Option<policies::Held>,
    /// The move to its data path, until it is ended.
    moving: Option<moves::Move>,
    /// Numbers in state `TearingDown` that the worker has not taken up.
    tear_down: VecDeque<SlotNumber>,
    /// The same after a failure, to be tried again at a time since boot.
    tear_down_again: VecDeque<(Duration, SlotNumber)>,
    /// Why the last tear-down failed, until one succeeds.
    tear_down_error: Option<String>,
}

struct LeaseEntry {
    record: LeaseRecord,
    /// Its own policy in the eBPF data path.
    policy: Option<policies::Held>,
    /// Somebody works on the slot's kernel objects without holding the lock.
    is_busy: bool,
    /// Its channel is being opened or its interface attached: nobody has been told of the lease yet.
    is_opening: bool,
    /// When somebody last asked who keeps it though it is released, in time since boot, and what was found.
    held_by: Option<(Duration, Vec<TapHolder>)>,
}

/// How much of a leased slot is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    Pieces,
    Everything,
}

impl Slots {
    /// Figures of the service's work so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.shared.lock().counters.clone()
    }

    /// Has requests that wait for slots to be built or torn down end with [`ServiceError::Stopping`], and hands no
    /// more slots out.
    pub fn begin_shutdown(&self) {
        self.shared.stop();
    }

    /// Stops building, tearing down and auditing, and waits until that has stopped. Slots and
    /// leases stay, for the next daemon to adopt.
    pub fn shutdown(&self) {
        self.shared.stop();
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        for thread in threads.drain(..) {
            // A panic of the thread has been reported on standard error already.
            let _ = thread.join();
        }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Shared {
    /// Takes the lock. A panic elsewhere must not take hand-outs down with it: each change is made
    /// in the journal first, in one step.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        condition: &Condvar,
        state: MutexGuard<'a, State>,
        timeout: Option<Duration>,
    ) -> MutexGuard<'a, State> {
        match timeout {
            None => condition
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner),
            Some(timeout) => {
                let (state, _) = condition
                    .wait_timeout(state, timeout)
                    .unwrap_or_else(PoisonError::into_inner);
                state
            }
        }
    }

    fn now(&self) -> Duration {
        self.clock.since_boot()
    }

    fn stop(&self) {
        self.lock().stopping = true;
        self.wake_all();
    }

    fn wake_all(&self) {
        for condition in [
            &self.build_work,
            &self.tear_down_work,
            &self.audit_work,
            &self.changed,
        ] {
            condition.notify_all();
        }
    }
}

impl State {
    fn pool(&self, name: &Name) -> Result<&PoolEntry, ServiceError> {
        self.pools.get(name).ok_or_else(|| no_pool(name))
    }

    fn pool_mut(&mut self, name: &Name) -> Result<&mut PoolEntry, ServiceError> {
        self.pools.get_mut(name).ok_or_else(|| no_pool(name))
    }

    /// A lease that the caller may see. Another's lease looks like none.
    fn lease(&self, caller: Caller, key: &LeaseKey) -> Result<&LeaseEntry, ServiceError> {
        self.leases
            .get(key)
            .filter(|entry| {
                let pool = self.pools.get(&entry.record.pool);
                pool.is_some_and(|pool| caller.may_see(key, &pool.plan.spec))
            })
            .ok_or_else(|| no_lease(key))
    }

    /// Notes a failed write. The error itself goes to the caller, or to the log.
    fn journal_failed(&mut self) {
        self.counters.journal_failures += 1;
    }
}

impl LeaseEntry {
    fn is_releasing(&self) -> bool {
        self.record.state == LeaseState::Releasing
    }
}

fn no_pool(name: &Name) -> ServiceError {
    ServiceError::NotFound {
        object: format!("pool '{name}'"),
    }
}

fn no_lease(key: &LeaseKey) -> ServiceError {
    ServiceError::NotFound {
        object: format!("lease '{}' of uid {}", key.name, key.owner_uid),
    }
}

#[cfg(test)]
mod tests;
