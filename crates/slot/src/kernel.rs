//! The Linux kernel's side of pools and slots.
//!
//! A slot is built by a thread that moves into a fresh network namespace, makes everything there,
//! joins it to the host last, and only then gives the namespace its name under `/run/netns`. Until
//! that last step everything belongs to the thread, so a crash at any instruction makes the kernel
//! clean up by itself, and a named namespace is by definition a complete slot.
//!
//! The host has one constant nftables table ([`host_table`]) whose sets grow with pools and published
//! ports, never with slots. Per slot it has one interface, one route and one neighbour entry per clone
//! address. No file descriptor is kept per slot, and none of the machine's other objects is touched.
//!
//! Calls may come from several plain threads at once. Each borrows a [`Worker`], which holds sockets
//! that belong to the host's namespace wherever the thread is.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sandwire_api::{pool::PoolSpec, published_port::PublishPort, slot::Defect};
use sandwire_kernel_net::{
    Error as KernelError,
    interface::InterfaceIndex,
    netlink::Socket,
    netns::{self, Home},
    procfs::PrivateProcfs,
};

use crate::{
    error::NetworkError,
    network::{Inspection, Inventory, Leftover, Network, Withdrawal},
    plan::{Plan, SlotPlan, names},
};

mod build;
mod host;
mod host_table;
mod inspect;
mod interfaces;
mod inventory;
mod slot_table;
mod tear_down;
mod withdraw;

pub use build::{BuildStep, Steps};

/// Ports that the host publishes: what was asked for, and the clone addresses it leads to.
type PublishedPorts = Vec<(PublishPort, Vec<IpAddr>)>;

/// The Linux kernel's side of pools and slots of one instance.
pub struct KernelNetwork {
    instance: String,
    home: Home,
    workers: Mutex<Vec<Worker>>,
    /// What the host's table should hold. Locked while the host's side changes.
    host: Mutex<HostState>,
    steps: Arc<dyn Steps>,
}

/// What the host's side should look like.
#[derive(Default)]
struct HostState {
    pools: BTreeMap<String, Plan>,
    published: PublishedPorts,
}

/// What a thread needs while it works. Sockets belong to the host's namespace.
struct Worker {
    route: Socket,
    netfilter: Socket,
    procfs: PrivateProcfs,
    /// The host end that was raised last; its multicast route comes with its carrier, so it is
    /// deleted one slot later.
    raised: Option<InterfaceIndex>,
}

impl KernelNetwork {
    /// Works in the network namespace that the calling thread is in, as an instance of this name.
    ///
    /// # Errors
    /// `/run/netns` can't be prepared, or the kernel gives no sockets.
    pub fn open(instance: &str) -> Result<Self, NetworkError> {
        Self::with_steps(instance, Arc::new(build::Unhindered))
    }

    /// Like [`KernelNetwork::open`], asking `steps` before each step of a build. For tests that make
    /// steps fail.
    ///
    /// # Errors
    /// As [`KernelNetwork::open`].
    pub fn with_steps(instance: &str, steps: Arc<dyn Steps>) -> Result<Self, NetworkError> {
        netns::prepare_folder()?;
        let network = Self {
            instance: instance.to_owned(),
            home: Home::here()?,
            workers: Mutex::default(),
            host: Mutex::default(),
            steps,
        };
        let first = Worker::new()?;
        network.put_back(first);
        Ok(network)
    }

    fn with_worker<T>(
        &self,
        work: impl FnOnce(&mut Worker) -> Result<T, NetworkError>,
    ) -> Result<T, NetworkError> {
        let idle = lock(&self.workers).pop();
        let mut worker = match idle {
            Some(worker) => worker,
            None => Worker::new()?,
        };
        let result = work(&mut worker);
        self.put_back(worker);
        result
    }

    fn put_back(&self, worker: Worker) {
        lock(&self.workers).push(worker);
    }
}

impl Worker {
    /// To be made while the thread is in the host's namespace.
    fn new() -> Result<Self, NetworkError> {
        let worker = Self {
            route: Socket::route()?,
            netfilter: Socket::netfilter()?,
            procfs: PrivateProcfs::new()?,
            raised: None,
        };
        worker.route.grow_buffers();
        worker.netfilter.grow_buffers();
        Ok(worker)
    }
}

impl Network for KernelNetwork {
    fn add_pool(&self, plan: &Plan) -> Result<(), NetworkError> {
        let mut state = lock(&self.host);
        self.with_worker(|worker| host::add_pool(&self.instance, worker, plan))?;
        state.pools.insert(plan.spec.name.to_string(), plan.clone());
        Ok(())
    }

    fn remove_pool(&self, plan: &Plan) -> Result<(), NetworkError> {
        let mut state = lock(&self.host);
        state.pools.remove(plan.spec.name.as_str());
        self.with_worker(|worker| host::remove_pool(&self.instance, worker, plan))
    }

    fn build(&self, slot: &SlotPlan) -> Result<(), NetworkError> {
        self.with_worker(|worker| build::build(&self.home, worker, &*self.steps, slot))
    }

    fn withdraw_taps(&self, slot: &SlotPlan) -> Result<Withdrawal, NetworkError> {
        withdraw::withdraw_taps(&self.home, slot)
    }

    fn tear_down(&self, slots: &[SlotPlan]) -> Vec<Result<(), NetworkError>> {
        self.with_worker(|worker| Ok(tear_down::tear_down(worker, slots)))
            .unwrap_or_else(|error| tear_down::all_failed(slots, &error))
    }

    fn inspect(&self, slot: &SlotPlan) -> Inspection {
        self.with_worker(|worker| Ok(inspect::inspect(&self.home, worker, slot)))
            .unwrap_or_else(|error| inspect::unseen(slot, &error))
    }

    fn repair(&self, slot: &SlotPlan) -> Vec<Defect> {
        self.with_worker(|worker| Ok(inspect::repair(&self.home, worker, slot)))
            .unwrap_or_else(|error| inspect::unseen(slot, &error).defects)
    }

    fn inventory(&self) -> Result<Inventory, NetworkError> {
        self.with_worker(|worker| inventory::inventory(&self.instance, worker))
    }

    fn reclaim(&self, leftovers: &[Leftover]) -> Vec<Result<(), NetworkError>> {
        self.with_worker(|worker| Ok(inventory::reclaim(worker, leftovers)))
            .unwrap_or_else(|error| {
                let text = error.to_string();
                leftovers
                    .iter()
                    .map(|_| Err(NetworkError::reason("reclaim", "leftovers", &text)))
                    .collect()
            })
    }

    fn set_published_ports(
        &self,
        ports: &[(PublishPort, Vec<IpAddr>)],
    ) -> Result<(), NetworkError> {
        let mut state = lock(&self.host);
        self.with_worker(|worker| host_table::publish(&self.instance, worker, ports))?;
        state.published = ports.to_vec();
        Ok(())
    }

    fn inspect_host(&self, pools: &[PoolSpec]) -> Vec<Defect> {
        let state = lock(&self.host);
        let plans: Vec<_> = pools
            .iter()
            .filter_map(|pool| state.pools.get(pool.name.as_str()))
            .collect();
        let published = &state.published;
        self.with_worker(|worker| host::inspect(&self.instance, worker, &plans, published))
            .unwrap_or_else(|error| {
                let object = format!("interface {}", names::shared_interface(&self.instance));
                vec![inspect::reported(object, error.to_string())]
            })
    }
}

/// Nothing that holds one of these locks can leave the state half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl From<KernelError> for NetworkError {
    fn from(error: KernelError) -> Self {
        let (operation, object) = error.subject();
        Self::Kernel {
            operation,
            object: object.to_owned(),
            source: Box::new(error.into_cause()),
        }
    }
}

impl NetworkError {
    /// A failure of which only the text is left, because several objects share it.
    fn reason(operation: &'static str, object: impl Into<String>, text: &str) -> Self {
        Self::Kernel {
            operation,
            object: object.into(),
            source: text.into(),
        }
    }
}
