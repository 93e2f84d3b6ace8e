//! The Linux kernel's side of pools and slots.
//!
//! A netns slot is built by a thread that moves into a fresh network namespace, makes everything there,
//! joins it to the host last, and only then gives the namespace its name under `/run/netns`. Until
//! that last step everything belongs to the thread, so a crash at any instruction makes the kernel
//! clean up by itself, and a named namespace is by definition a complete slot. Slots without a
//! namespace are in [`host_slot`] and [`container`].
//!
//! The host has one constant nftables table ([`host_table`]) whose sets grow with pools and published
//! ports, never with slots. Per slot it has one interface or one per TAP, and with nft a route and a neighbour
//! entry per clone address. No file descriptor is kept per slot, and none of the machine's other objects is touched.
//!
//! Calls may come from several plain threads at once. Each borrows a [`Worker`], which holds sockets
//! that belong to the host's namespace wherever the thread is.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    os::fd::OwnedFd,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use ipnet::IpNet;
use sandwire_api::{
    lease::TapHolder,
    name::Name,
    pool::PolicySpec,
    published_port::PublishPort,
    slot::{DataPath, Defect, SlotKind},
    traffic::Traffic,
};
use sandwire_datapath::abi::NicFlag;
use sandwire_kernel_net::{
    interface::InterfaceIndex,
    netlink::Socket,
    netns::{self, Home},
    probe::netkit,
    procfs::PrivateProcfs,
};

use crate::{
    attach::ParentRecord,
    error::NetworkError,
    network::{
        Inspection, Inventory, Leftover, Listener, Network, PolicyIndex, Tenancy, TraceSource,
        WantedChild, Withdrawal, not_attachable, untraceable, without_taps,
    },
    plan::{Plan, SlotPlan, names},
};
use build::Build;
use ebpf::Ebpf;
use holders::Holders;
use hosted::{HostState, Served};

mod build;
mod container;
mod ebpf;
mod entry;
mod filters;
mod holders;
mod host;
mod host_slot;
mod host_table;
mod hosted;
mod inspect;
mod interfaces;
mod inventory;
mod learning;
mod moving;
mod opening;
mod own_addresses;
mod pools;
mod published;
mod redirects;
mod settings;
mod slot_table;
mod switch;
mod tap_status;
mod tear_down;
mod trace;
mod traffic;
mod uplinks;
mod versions;
mod withdraw;
mod xdp;

pub use build::{BuildStep, Steps};
pub use settings::Settings;

/// The Linux kernel's side of pools and slots of one instance.
pub struct KernelNetwork {
    settings: Settings,
    home: Home,
    workers: Mutex<Vec<Worker>>,
    /// What the host's table should hold. Locked while the host's side changes.
    host: Mutex<HostState>,
    /// Opened for the first pool that needs it.
    ebpf: OnceLock<Arc<Ebpf>>,
    /// What was there at the start has been adopted.
    has_switched: AtomicBool,
    /// Number of the shared interface, once there is a pool.
    shared: AtomicU32,
    /// Whether the kernel makes netkit pairs, or why not, once that has been tried.
    netkit: OnceLock<Result<(), String>>,
    holders: Holders,
    prepared: Mutex<moving::Prepared>,
    steps: Arc<dyn Steps>,
}

/// What a thread needs while it works. Sockets belong to the host's namespace.
struct Worker {
    route: Socket,
    netfilter: Socket,
    procfs: PrivateProcfs,
    /// The host end that was raised last; its multicast route comes with its carrier, so it is
    /// deleted one slot later.
    raised: Option<InterfaceIndex>,
    /// Whether the kernel has shown no lack of ingress qdiscs.
    has_qdiscs: bool,
}

impl KernelNetwork {
    /// Works in the network namespace that the calling thread is in, as an instance of this name.
    ///
    /// # Errors
    /// `/run/netns` can't be prepared, or the kernel gives no sockets.
    pub fn open(instance: &str) -> Result<Self, NetworkError> {
        Self::open_with(Settings::new(instance))
    }

    /// Like [`KernelNetwork::open`], with other settings.
    ///
    /// # Errors
    /// As [`KernelNetwork::open`].
    pub fn open_with(settings: Settings) -> Result<Self, NetworkError> {
        Self::with_steps(settings, Arc::new(build::Unhindered))
    }

    /// Like [`KernelNetwork::open_with`], asking `steps` before each step of a build. For tests that
    /// make steps fail.
    ///
    /// # Errors
    /// As [`KernelNetwork::open`].
    pub fn with_steps(settings: Settings, steps: Arc<dyn Steps>) -> Result<Self, NetworkError> {
        netns::prepare_folder()?;
        let network = Self {
            settings,
            home: Home::here()?,
            workers: Mutex::default(),
            host: Mutex::default(),
            ebpf: OnceLock::new(),
            has_switched: AtomicBool::new(false),
            shared: AtomicU32::new(0),
            netkit: OnceLock::new(),
            holders: Holders::default(),
            prepared: Mutex::default(),
            steps,
        };
        let first = Worker::new()?;
        network.put_back(first);
        Ok(network)
    }

    fn instance(&self) -> &str {
        &self.settings.instance
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
            has_qdiscs: true,
        };
        worker.route.grow_buffers();
        worker.netfilter.grow_buffers();
        Ok(worker)
    }
}

impl Network for KernelNetwork {
    fn add_pool(&self, plan: &Plan) -> Result<(), NetworkError> {
        self.prepare_pool(plan, None, true)
    }

    fn expect_pools(&self, plans: &[&Plan]) {
        lock(&self.host).expect(plans);
    }

    fn take_up_pool(&self, plan: &Plan, from: Option<DataPath>) -> Result<(), NetworkError> {
        self.prepare_pool(plan, from, false)
    }

    fn settle_pools(&self) -> Result<(), NetworkError> {
        let state = lock(&self.host);
        self.with_worker(|worker| host_table::settle(self.instance(), worker, &state.served()))
    }

    fn remove_pool(&self, plan: &Plan) -> Result<(), NetworkError> {
        self.take_back_pool(plan)
    }

    fn change_pool(&self, plan: &Plan, from: Option<DataPath>) -> Result<(), NetworkError> {
        self.bring_pool_to(plan, from)
    }

    fn check_ebpf(&self) -> Result<(), NetworkError> {
        let _opens_once = lock(&self.host);
        self.open_ebpf().map(drop)
    }

    fn build(&self, slot: &SlotPlan) -> Result<(), NetworkError> {
        let build = Build {
            steps: &*self.steps,
            slot,
            ebpf: self.ebpf_of(slot)?,
        };
        self.with_worker(|worker| build::build(&build, &self.home, worker))
    }

    fn withdraw_taps(&self, slot: &SlotPlan) -> Result<Withdrawal, NetworkError> {
        match slot.kind {
            SlotKind::Netns => withdraw::withdraw_taps(&self.home, slot),
            SlotKind::Host => self.with_worker(|worker| host_slot::withdraw_taps(worker, slot)),
            SlotKind::Container => {
                self.with_worker(|worker| container::release(&self.home, worker, slot))?;
                Ok(Withdrawal::Free)
            }
        }
    }

    fn tap_holders(&self, slot: &SlotPlan) -> Vec<TapHolder> {
        match slot.kind {
            SlotKind::Netns => self.holders.inside(slot),
            SlotKind::Host => self.holders.of_host_slot(slot),
            SlotKind::Container => Vec::new(),
        }
    }

    fn tear_down(&self, slots: &[SlotPlan]) -> Vec<Result<(), NetworkError>> {
        let ebpf = self.ebpf.get().map(|ebpf| &**ebpf);
        self.with_worker(|worker| Ok(tear_down::tear_down(self.instance(), worker, ebpf, slots)))
            .unwrap_or_else(|error| tear_down::all_failed(slots, &error))
    }

    fn inspect(&self, slot: &SlotPlan) -> Inspection {
        self.with_worker(|worker| {
            let ebpf = self.ebpf_of(slot)?;
            Ok(inspect::inspect(&self.home, worker, ebpf, slot))
        })
        .unwrap_or_else(|error| inspect::unseen(slot, &error))
    }

    fn repair(&self, slot: &SlotPlan) -> Vec<Defect> {
        self.with_worker(|worker| {
            let ebpf = self.ebpf_of(slot)?;
            Ok(inspect::repair(&self.home, worker, ebpf, slot))
        })
        .unwrap_or_else(|error| inspect::unseen(slot, &error).defects)
    }

    fn inspect_tenancy(&self, slot: &SlotPlan, tenancy: Option<&Tenancy>) -> Vec<Defect> {
        let problem = match self.ebpf_of(slot) {
            Ok(Some((ebpf, _))) => ebpf.tenancy_problem(slot, tenancy),
            _ => None,
        };
        let object = || format!("eBPF entry of slot {}", slot.netns_name);
        let defect = problem.map(|problem| inspect::reported(object(), problem));
        defect.into_iter().collect()
    }

    fn inventory(&self) -> Result<Inventory, NetworkError> {
        let ebpf = self.ebpf.get().map(|ebpf| &**ebpf);
        let may_have_children = lock(&self.host).may_have_children();
        self.with_worker(|worker| {
            inventory::inventory(self.instance(), worker, ebpf, may_have_children)
        })
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

    fn unprivileged_port_start(&self) -> u16 {
        published::unprivileged_port_start()
    }

    fn listeners(&self, port: &PublishPort) -> Vec<Listener> {
        published::listeners(port)
    }

    fn set_published_ports(
        &self,
        ports: &[(PublishPort, Vec<IpAddr>)],
    ) -> Result<(), NetworkError> {
        let mut state = lock(&self.host);
        let served = Served {
            published: ports,
            ..state.served()
        };
        self.with_worker(|worker| host_table::publish(self.instance(), worker, &served))?;
        let before = std::mem::replace(&mut state.published, ports.to_vec());
        self.tell_published(ports);
        drop(state);
        self.redirect_datagrams(&before, ports);
        Ok(())
    }

    fn spare_addresses(&self, addresses: &BTreeSet<IpAddr>) -> Result<(), NetworkError> {
        let mut state = lock(&self.host);
        self.with_worker(|worker| host_table::spare(self.instance(), worker, addresses))?;
        state.spared.clone_from(addresses);
        Ok(())
    }

    fn inspect_host(&self, pools: &[Name]) -> Vec<Defect> {
        let state = lock(&self.host);
        let is_meant = |name: &str| pools.iter().any(|pool| pool.as_str() == name);
        let (hosted, others): (Vec<_>, Vec<_>) =
            state.pools.iter().partition(|(name, _)| is_meant(name));
        let others = others.into_iter().chain(&state.refused);
        let served = Served {
            pools: hosted.into_iter().map(|(_, pool)| pool).collect(),
            refused: others.map(|(_, pool)| pool).collect(),
            published: &state.published,
            spared: &state.spared,
        };
        let instance = self.instance();
        self.with_worker(|worker| {
            let mut defects = host::inspect(instance, worker, &served)?;
            if let Some(ebpf) = self.ebpf.get()
                && served.need_shared()
            {
                let wanted = self.settings.uplinks.as_deref();
                let wants_xdp = state.uses_xdp();
                if wants_xdp {
                    xdp::watch(ebpf)?;
                }
                let shared =
                    host::inspect_ebpf(instance, worker, ebpf, wanted, wants_xdp, &mut defects)?;
                self.shared.store(shared.0, Ordering::Relaxed);
            }
            if let Some(ebpf) = self.ebpf.get() {
                self.follow_redirects(ebpf, worker)?;
            }
            Ok(defects)
        })
        .unwrap_or_else(|error| {
            let object = format!("interface {}", names::shared_interface(instance));
            vec![inspect::reported(object, error.to_string())]
        })
    }

    fn watch_host(&self, tell: Box<dyn Fn(bool) -> bool + Send>) -> Result<(), NetworkError> {
        host_table::watch(self.instance(), tell)
    }

    fn add_policy(&self, policy: &PolicySpec) -> Result<PolicyIndex, NetworkError> {
        // By the host's main table every clone address leads to the shared interface, which the data path
        // knows; by a policy's own routes it might lead anywhere. Of rules by source the recipe says the same.
        let prefixes: Vec<IpNet> = match policy.has_own_routes() {
            true => {
                let state = lock(&self.host);
                let pools = state.pools.values();
                pools.flat_map(|pool| pool.plan.slot_prefixes()).collect()
            }
            false => Vec::new(),
        };
        let compiled = sandwire_datapath::policy::compile(policy, &prefixes)?;
        let ebpf = self.ebpf.get().ok_or_else(|| NetworkError::Conflict {
            object: "policy".to_owned(),
            with: "the eBPF data path, which is not open".to_owned(),
            advice: "see what is said of the pool".to_owned(),
        })?;
        Ok(ebpf.datapath.add_policy(&compiled)?)
    }

    fn remove_policy(&self, policy: PolicyIndex) {
        if let Some(ebpf) = self.ebpf.get() {
            ebpf.datapath.remove_policy(policy);
        }
    }

    fn finish_adoption(&self, policies: &BTreeSet<PolicyIndex>, present: &BTreeSet<(u32, u32)>) {
        if let Some(ebpf) = self.ebpf.get() {
            ebpf.finish_adoption(policies, present);
        }
    }

    fn finish_migration(&self) -> BTreeMap<u32, Traffic> {
        let ebpf = self.ebpf.get();
        ebpf.map(|ebpf| ebpf.finish_migration()).unwrap_or_default()
    }

    fn set_group_pairs(&self, pairs: &BTreeSet<(u32, u32)>) -> Result<bool, NetworkError> {
        let Some(ebpf) = self.ebpf.get() else {
            return Ok(false);
        };
        ebpf.datapath.set_group_pairs(pairs)?;
        Ok(true)
    }

    fn activate(&self, slot: &SlotPlan, tenancy: &Tenancy) -> Result<(), NetworkError> {
        match self.ebpf_of(slot)? {
            Some((ebpf, _)) => ebpf.activate(slot, tenancy),
            None => Ok(()),
        }
    }

    fn deactivate(&self, slot: &SlotPlan) -> Result<(), NetworkError> {
        self.ebpf.get().map_or(Ok(()), |ebpf| ebpf.deactivate(slot))
    }

    fn set_policy(&self, slot: &SlotPlan, tenancy: &Tenancy) -> Result<(), NetworkError> {
        match self.ebpf_of(slot)? {
            Some((ebpf, _)) => ebpf.set_policy(slot, tenancy),
            None => Ok(()),
        }
    }

    fn set_policies(&self, changes: &[(SlotPlan, Tenancy)]) -> Vec<Result<(), NetworkError>> {
        let mut have_joined = false;
        let mut change = |slot: &SlotPlan, tenancy: &Tenancy| {
            if let Some((ebpf, _)) = self.ebpf_of(slot)? {
                have_joined |= ebpf.change_policy(slot, tenancy)?;
            }
            Ok(())
        };
        let changed = changes.iter();
        let changed = changed.map(|(slot, tenancy)| change(slot, tenancy));
        let changed = changed.collect();
        // Once for all of them: each sandbox of the host decides anew then.
        if let Some(ebpf) = self.ebpf.get().filter(|_| have_joined) {
            ebpf.datapath.forget_all_decisions();
        }
        changed
    }

    fn adopt(&self, slot: &SlotPlan, tenancy: Option<&Tenancy>) -> Result<(), NetworkError> {
        let Some(path) = self.ebpf_of(slot)?.or_else(|| self.opened()) else {
            return Ok(());
        };
        let build = Build {
            steps: &*self.steps,
            slot,
            ebpf: Some(path),
        };
        self.with_worker(|worker| switch::adopt(&build, &self.home, worker, path, tenancy))
    }

    fn switch_over(&self) -> Result<(), NetworkError> {
        self.has_switched.store(true, Ordering::Relaxed);
        let Some(path) = self.opened() else {
            return Ok(());
        };
        let steps = &*self.steps;
        self.with_worker(|worker| switch::switch_over(steps, &self.home, worker, path))
    }

    fn prepare_moves(&self, slots: &[SlotPlan]) -> Result<(), NetworkError> {
        self.tolerate_gaps_of(slots)
    }

    fn move_slot(
        &self,
        slot: &SlotPlan,
        tenancy: Option<&Tenancy>,
    ) -> Result<Option<Traffic>, NetworkError> {
        self.move_between_paths(slot, tenancy)
    }

    fn traffic(&self, slot: &SlotPlan) -> Option<Traffic> {
        // Also of one that is still to leave for nft.
        self.ebpf.get()?.traffic(slot)
    }

    fn find_namespace(&self, path: &Path) -> Result<Option<u64>, NetworkError> {
        container::find_namespace(&self.home, path)
    }

    fn check_netkit(&self) -> Result<(), NetworkError> {
        let found = self.netkit.get_or_init(|| {
            let tried = netkit::check(&self.home);
            tried.map_err(|error| error.into_cause().to_string())
        });
        let refused = |reason| NetworkError::NoNetkit { reason };
        found.clone().map_err(refused)
    }

    fn check_parent(&self, wanted: &WantedChild<'_>) -> Result<(), NetworkError> {
        self.with_worker(|worker| container::check_parent(&self.home, worker, wanted).map(drop))
    }

    fn find_parent(
        &self,
        wanted: &WantedChild<'_>,
        netns: &Path,
    ) -> Result<ParentRecord, NetworkError> {
        self.with_worker(|worker| container::find_parent(&self.home, worker, wanted, netns))
    }

    fn attach(&self, slot: &SlotPlan) -> Result<(), NetworkError> {
        let Some((ebpf, shared)) = self.ebpf_of(slot)? else {
            return Err(not_attachable(slot));
        };
        let build = Build {
            steps: &*self.steps,
            slot,
            ebpf: Some((ebpf, shared)),
        };
        self.with_worker(|worker| container::attach(&build, &self.home, worker, ebpf, shared))
    }

    fn inspect_attached(&self, slot: &SlotPlan) -> Vec<Defect> {
        self.with_worker(|worker| Ok(container::inspect(&self.home, worker, slot)))
            .unwrap_or_else(|error| inspect::unseen(slot, &error).defects)
    }

    fn open_taps(&self, slot: &SlotPlan) -> Result<Vec<OwnedFd>, NetworkError> {
        if slot.is_container() {
            return Err(without_taps(slot));
        }
        withdraw::open_taps(&self.home, slot)
    }

    fn set_trace(&self, slot: &SlotPlan, traced: bool) -> Result<(), NetworkError> {
        match self.ebpf_of(slot)? {
            Some((ebpf, _)) => ebpf.set_flag(slot, NicFlag::Trace, traced),
            None => Err(untraceable(slot)),
        }
    }

    fn trace_lost(&self, slot: &SlotPlan) -> u64 {
        let found = self.ebpf_of(slot).ok().flatten();
        found.map_or(0, |(ebpf, _)| ebpf.trace_lost(slot))
    }

    /// XDP comes before tc, and packets by a short way don't come by their host end's egress.
    fn set_impaired(&self, slot: &SlotPlan, impaired: bool) -> Result<(), NetworkError> {
        match self.ebpf_of(slot)? {
            Some((ebpf, _)) => ebpf.set_impaired(slot, impaired),
            None => Ok(()),
        }
    }

    fn trace_events(&self) -> Result<Box<dyn TraceSource>, NetworkError> {
        match self.ebpf.get() {
            Some(ebpf) => Ok(Box::new(trace::Events::open(Arc::clone(ebpf))?)),
            None => Err(NetworkError::Conflict {
                object: "trace".to_owned(),
                with: "an instance without eBPF pools".to_owned(),
                advice: "only the eBPF data paths tell of single packets".to_owned(),
            }),
        }
    }
}

/// Nothing that holds one of these locks can leave the state half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
