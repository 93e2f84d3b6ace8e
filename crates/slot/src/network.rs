//! What pools ask of the kernel.
//!
//! One implementation does it ([`crate::kernel::KernelNetwork`]); tests of the pool's logic use a
//! model that fails where the test says. Every call may take milliseconds: pools make them from
//! background threads only, never on the way of a hand-out. Every call is idempotent, so that what
//! a crash interrupted can simply be done again.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    os::fd::OwnedFd,
    path::Path,
    time::Duration,
};

use sandwire_api::{
    attach::{DeviceChoice, ParentSpec},
    lease::{TapHolder, TapStatus},
    name::Name,
    pool::PolicySpec,
    published_port::PublishPort,
    slot::{DataPath, Defect},
    trace::TracePacket,
    traffic::Traffic,
};
pub use sandwire_datapath::PolicyIndex;
pub use sandwire_kernel_net::listener::Listener;

use crate::{
    attach::ParentRecord,
    error::NetworkError,
    plan::{Plan, SlotPlan},
};

/// The kernel's side of pools and slots.
pub trait Network: Send + Sync {
    /// Prepares the host for a pool: forwarding, the host's table and its sets, the shared
    /// interface with the host's own address in each clone prefix, `unreachable` routes for
    /// clone addresses that nobody has.
    ///
    /// # Errors
    /// Refuses prefixes that the host already routes elsewhere; nothing is left behind.
    fn add_pool(&self, plan: &Plan) -> Result<(), NetworkError>;

    /// Tells which pools of an earlier daemon are to be taken up, before the first is: what their sandboxes have in
    /// common stays until the last has been.
    fn expect_pools(&self, plans: &[&Plan]) {
        let _ = plans;
    }

    /// The same as [`Network::add_pool`] for a pool of an earlier daemon, whose sandboxes may be running, some of them
    /// `from` the data path that the pool is leaving.
    ///
    /// # Errors
    /// As of [`Network::add_pool`]; but what there is stays, as they need it, and is looked after as far as it keeps them
    /// apart.
    fn take_up_pool(&self, plan: &Plan, from: Option<DataPath>) -> Result<(), NetworkError>;

    /// Takes away what pools have on the host by no plan, once all were taken up: it is of a change that an earlier daemon didn't
    /// end.
    ///
    /// # Errors
    /// The kernel refuses; nothing has changed then.
    fn settle_pools(&self) -> Result<(), NetworkError>;

    /// Undoes [`Network::add_pool`]. All slots of the pool have been torn down before.
    ///
    /// # Errors
    /// Goes on after an error and returns them all.
    fn remove_pool(&self, plan: &Plan) -> Result<(), NetworkError>;

    /// Builds one slot. On return it is complete and visible; on error nothing is left of it.
    /// Blocks for some milliseconds; may be called from several threads at once.
    ///
    /// # Errors
    /// Names the step, the object and the kernel's reason.
    fn build(&self, slot: &SlotPlan) -> Result<(), NetworkError>;

    /// Takes every TAP of a slot away from future users, or finds that somebody has one open, and
    /// then changes nothing. After `Released::Free` a VMM that starts in the namespace finds no TAP.
    ///
    /// # Errors
    /// The namespace can't be entered.
    fn withdraw_taps(&self, slot: &SlotPlan) -> Result<Withdrawal, NetworkError>;

    /// Processes that have a TAP of the slot open, as far as they can be seen from here. Looks at every open file of
    /// the host's processes, so that it is for people who ask.
    fn tap_holders(&self, slot: &SlotPlan) -> Vec<TapHolder>;

    /// Tears slots down, many at once because the kernel's waits are shared: host ends, namespaces,
    /// published ports and connections that the host tracks for their clone addresses. Missing
    /// pieces are fine.
    /// Returns one result per slot, in order.
    fn tear_down(&self, slots: &[SlotPlan]) -> Vec<Result<(), NetworkError>>;

    /// Looks at every object of a slot.
    fn inspect(&self, slot: &SlotPlan) -> Inspection;

    /// Repairs what [`Network::inspect`] found, as far as that is possible under a running sandbox.
    fn repair(&self, slot: &SlotPlan) -> Vec<Defect>;

    /// Looks whether the data path knows of a slot's tenant what it should. [`Network::adopt`] puts it
    /// right.
    fn inspect_tenancy(&self, slot: &SlotPlan, tenancy: Option<&Tenancy>) -> Vec<Defect> {
        let _ = (slot, tenancy);
        Vec::new()
    }

    /// What the kernel has by the name of this instance.
    ///
    /// # Errors
    /// The kernel can't be asked.
    fn inventory(&self) -> Result<Inventory, NetworkError>;

    /// Removes objects of this instance that no pool owns, going on after errors.
    fn reclaim(&self, leftovers: &[Leftover]) -> Vec<Result<(), NetworkError>>;

    /// The first port that a user who isn't root may have on the host.
    fn unprivileged_port_start(&self) -> u16 {
        1024
    }

    /// Who on the host itself takes what comes to a port. None where the kernel can't tell.
    fn listeners(&self, port: &PublishPort) -> Vec<Listener> {
        let _ = port;
        Vec::new()
    }

    /// Makes the host's published ports exactly these, also for who goes on calling one of UDP from before.
    ///
    /// # Errors
    /// Nothing changed.
    fn set_published_ports(&self, ports: &[(PublishPort, Vec<IpAddr>)])
    -> Result<(), NetworkError>;

    /// Has published ports leave what is for these addresses on the host to who has them for himself: for exactly these.
    ///
    /// # Errors
    /// Nothing changed.
    fn spare_addresses(&self, addresses: &BTreeSet<IpAddr>) -> Result<(), NetworkError> {
        let _ = addresses;
        Ok(())
    }

    /// Checks the host's side (table, shared interface, routes, forwarding, uplinks) as these pools need it, and repairs it.
    fn inspect_host(&self, pools: &[Name]) -> Vec<Defect>;

    /// Tells at once that the host's table was deleted, as by `nft flush ruleset`; [`Network::inspect_host`] finds whatever
    /// isn't told. `tell` is called every few seconds, with whether something is to be told, until it says that nobody
    /// listens any more.
    ///
    /// # Errors
    /// Nothing is told.
    fn watch_host(&self, _tell: Box<dyn Fn(bool) -> bool + Send>) -> Result<(), NetworkError> {
        Ok(())
    }

    /// Whether the eBPF data path can be had here. The first call takes a fraction of a second.
    ///
    /// # Errors
    /// Why not.
    fn check_ebpf(&self) -> Result<(), NetworkError> {
        Ok(())
    }

    /// Brings the host's side of an added pool to another policy or data path. While slots of the pool
    /// are still on the data path `from`, the host serves both.
    ///
    /// # Errors
    /// What was there before still holds.
    fn change_pool(&self, plan: &Plan, from: Option<DataPath>) -> Result<(), NetworkError> {
        let _ = (plan, from);
        Ok(())
    }

    /// Makes a policy known to the eBPF data path, as a whole or not at all. May take a second if it
    /// has 100,000 prefixes. One with routes of its own knows the clone prefixes of the pools that there are then.
    ///
    /// # Errors
    /// The policy is more than the data path holds, or there is no room for it.
    fn add_policy(&self, policy: &PolicySpec) -> Result<PolicyIndex, NetworkError> {
        let _ = policy;
        Ok(PolicyIndex(0))
    }

    /// Removes a policy that no sandbox has had for a second.
    fn remove_policy(&self, policy: PolicyIndex) {
        let _ = policy;
    }

    /// Removes all policies but these, and of slots that are neither adopted, nor built since, nor `present` (by
    /// [`SlotPlan::pool_number`] and number) what the data path knows. Called once after a start, when every slot has been
    /// adopted.
    fn finish_adoption(&self, policies: &BTreeSet<PolicyIndex>, present: &BTreeSet<(u32, u32)>) {
        let _ = (policies, present);
    }

    /// Lets go of what an older layout of the data path left, once no packet goes by it. Called again and again after
    /// [`Network::finish_adoption`], since a layout may also be found when the first pool needs it. Returns what was counted
    /// there, by [`SlotPlan::pool_number`]: [`Network::traffic`] of slots that were taken over has it from now on.
    fn finish_migration(&self) -> BTreeMap<u32, Traffic> {
        BTreeMap::new()
    }

    /// How many pairs [`Network::set_group_pairs`] takes.
    fn group_pairs_max(&self) -> usize {
        sandwire_datapath::GROUP_PAIRS_MAX as usize
    }

    /// Says which groups of sandboxes may talk to which others: exactly these pairs of numbers. Returns whether there is a data
    /// path that was told: what one has that is opened later is another's word.
    ///
    /// # Errors
    /// There is no room for all of them, or the kernel refuses; some may have been added.
    fn set_group_pairs(&self, pairs: &BTreeSet<(u32, u32)>) -> Result<bool, NetworkError> {
        let _ = pairs;
        Ok(false)
    }

    /// Lets a leased slot's packets pass. A few writes to memory, on the way of a hand-out; slots of
    /// the nft data path need none.
    ///
    /// # Errors
    /// The slot is as before.
    fn activate(&self, slot: &SlotPlan, tenancy: &Tenancy) -> Result<(), NetworkError> {
        let _ = (slot, tenancy);
        Ok(())
    }

    /// Ends what [`Network::activate`] began. Fine if it never did.
    ///
    /// # Errors
    /// The kernel refuses.
    fn deactivate(&self, slot: &SlotPlan) -> Result<(), NetworkError> {
        let _ = slot;
        Ok(())
    }

    /// Gives an active slot another policy, at once and as a whole.
    ///
    /// # Errors
    /// The slot isn't known to the data path.
    fn set_policy(&self, slot: &SlotPlan, tenancy: &Tenancy) -> Result<(), NetworkError> {
        let _ = (slot, tenancy);
        Ok(())
    }

    /// The same for many slots, as when their pool's policy changes: a few writes to memory for each. Returns one result per
    /// slot, in order.
    fn set_policies(&self, changes: &[(SlotPlan, Tenancy)]) -> Vec<Result<(), NetworkError>> {
        let changes = changes.iter();
        changes
            .map(|(slot, tenancy)| self.set_policy(slot, tenancy))
            .collect()
    }

    /// Takes over a slot that was there before the start: active if it has a tenant, else not. No
    /// packet of one that is active is lost.
    ///
    /// # Errors
    /// The data path has no room for it.
    fn adopt(&self, slot: &SlotPlan, tenancy: Option<&Tenancy>) -> Result<(), NetworkError> {
        let _ = (slot, tenancy);
        Ok(())
    }

    /// Has packets go by what was adopted, if they have gone by an older layout of the data path until now.
    /// Called once after a start, when every slot has been adopted; going on after errors.
    ///
    /// # Errors
    /// All that the kernel refused: those packets go by the older layout until an inspection has found and mended that.
    fn switch_over(&self) -> Result<(), NetworkError> {
        Ok(())
    }

    /// Does for many slots at once what takes as long as for one, shortly before they are moved. Nobody needs to.
    ///
    /// # Errors
    /// Each move does it for its slot.
    fn prepare_moves(&self, slots: &[SlotPlan]) -> Result<(), NetworkError> {
        let _ = slots;
        Ok(())
    }

    /// Brings a slot that was built for another data path to that of its plan, under traffic. May be
    /// repeated, and stopped half-way. Returns what the data path had counted that has left it, and counts no more.
    ///
    /// # Errors
    /// The slot may be half-way; its packets pass, and what was counted stays.
    fn move_slot(
        &self,
        slot: &SlotPlan,
        tenancy: Option<&Tenancy>,
    ) -> Result<Option<Traffic>, NetworkError> {
        let _ = (slot, tenancy);
        Ok(None)
    }

    /// What the data path counted of a slot since it was handed out, all interfaces together. None in
    /// the nft data path, whose interfaces count.
    fn traffic(&self, slot: &SlotPlan) -> Option<Traffic> {
        let _ = slot;
        None
    }

    /// Opens the slot's TAPs as a VMM would, in order. Whoever gets them closes them.
    ///
    /// # Errors
    /// One is gone, or somebody has it open.
    fn open_taps(&self, slot: &SlotPlan) -> Result<Vec<OwnedFd>, NetworkError> {
        Err(without_taps(slot))
    }

    /// Looks at a namespace that a container slot's interface is to be put into. Returns the number by which the
    /// kernel knows it and that is never used again, if it tells.
    ///
    /// # Errors
    /// The path leads to none, or to the host's own.
    fn find_namespace(&self, path: &Path) -> Result<Option<u64>, NetworkError> {
        let _ = path;
        Ok(None)
    }

    /// Whether the kernel makes netkit pairs. The first call takes some milliseconds.
    ///
    /// # Errors
    /// Why not.
    fn check_netkit(&self) -> Result<(), NetworkError> {
        Err(NetworkError::NoNetkit {
            reason: "nobody has looked".to_owned(),
        })
    }

    /// Looks at the interface whose children a pool's containers are to get.
    ///
    /// # Errors
    /// It can't be their parent, or the kernel makes no such children.
    fn check_parent(&self, wanted: &WantedChild<'_>) -> Result<(), NetworkError> {
        let _ = wanted;
        Ok(())
    }

    /// Looks at the same for a container in the namespace of a file, and at its network.
    ///
    /// # Errors
    /// It can't be the parent of an interface there.
    fn find_parent(
        &self,
        wanted: &WantedChild<'_>,
        netns: &Path,
    ) -> Result<ParentRecord, NetworkError> {
        let _ = netns;
        let parent = wanted.parent;
        Ok(ParentRecord {
            interface: parent.interface.clone(),
            mac: None,
            gateways: parent.gateways.clone(),
            subnets: parent.subnets.clone(),
            namespace: 0,
        })
    }

    /// Puts a leased container slot's interface into the namespace that its plan names. Takes a millisecond or two.
    ///
    /// # Errors
    /// Nothing of it is left.
    fn attach(&self, slot: &SlotPlan) -> Result<(), NetworkError> {
        Err(not_attachable(slot))
    }

    /// Compares an attached interface with how it was made. What the sandbox may change by itself is no damage
    /// otherwise, and is never repaired.
    fn inspect_attached(&self, slot: &SlotPlan) -> Vec<Defect> {
        let _ = slot;
        Vec::new()
    }

    /// Has the data path tell of each packet of a slot, or no longer.
    ///
    /// # Errors
    /// The slot's data path can't.
    fn set_trace(&self, slot: &SlotPlan, traced: bool) -> Result<(), NetworkError> {
        let _ = traced;
        Err(untraceable(slot))
    }

    /// How many packets of a slot the stream of [`Network::trace_events`] had no room for, since some moment.
    fn trace_lost(&self, slot: &SlotPlan) -> u64 {
        let _ = slot;
        0
    }

    /// Leaves a slot's packets to whoever diverts them at its host ends, or takes them past that again where the
    /// data path can.
    ///
    /// # Errors
    /// The slot isn't there.
    fn set_impaired(&self, slot: &SlotPlan, impaired: bool) -> Result<(), NetworkError> {
        let _ = (slot, impaired);
        Ok(())
    }

    /// The stream of what [`Network::set_trace`] asked for. There is one for all slots, to be read by
    /// one thread.
    ///
    /// # Errors
    /// There is no data path that can.
    fn trace_events(&self) -> Result<Box<dyn TraceSource>, NetworkError> {
        Err(NetworkError::Conflict {
            object: "trace".to_owned(),
            with: "the nft data path".to_owned(),
            advice: "only the eBPF data paths tell of single packets".to_owned(),
        })
    }
}

/// A child of an interface of the host.
#[derive(Clone, Copy, Debug)]
pub struct WantedChild<'a> {
    /// What it is.
    pub device: DeviceChoice,
    /// Whose it is.
    pub parent: &'a ParentSpec,
    /// Its MTU.
    pub mtu: u32,
}

/// Events of all traced slots.
pub trait TraceSource: Send {
    /// The next packet; `None` if there is none within the time.
    ///
    /// # Errors
    /// The kernel refuses; there will be no more.
    fn next_event(&mut self, at_most: Duration) -> Result<Option<TracedPacket>, NetworkError>;
}

/// One packet of a traced slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedPacket {
    /// Number of the pool, see [`SlotPlan::pool_number`].
    pub pool: u32,
    /// Number of the slot.
    pub slot: u32,
    /// What became of it.
    pub packet: TracePacket,
}

pub(crate) fn without_taps(slot: &SlotPlan) -> NetworkError {
    NetworkError::Conflict {
        object: format!("opening TAPs of slot {}", slot.netns_name),
        with: "its kind, which has none".to_owned(),
        advice: "use a pool of kind netns or host".to_owned(),
    }
}

pub(crate) fn not_attachable(slot: &SlotPlan) -> NetworkError {
    NetworkError::Conflict {
        object: format!("attaching slot {}", slot.netns_name),
        with: "its kind".to_owned(),
        advice: "use a pool of kind container".to_owned(),
    }
}

pub(crate) fn untraceable(slot: &SlotPlan) -> NetworkError {
    NetworkError::Conflict {
        object: format!("trace of slot {}", slot.netns_name),
        with: "its data path nft".to_owned(),
        advice: "only the eBPF data paths tell of single packets; use tcpdump on its interfaces"
            .to_owned(),
    }
}

/// What the data path is told of the sandbox in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenancy {
    /// Its policy.
    pub policy: PolicyIndex,
    /// Number of its group.
    pub group: u32,
    /// Whether it is a process in the slot's namespace.
    pub is_process: bool,
}

/// Outcome of [`Network::withdraw_taps`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Withdrawal {
    /// Nobody had a TAP open, and nobody finds one any more.
    Free,
    /// Somebody has one open.
    Held,
}

/// What [`Network::inspect`] saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inspection {
    /// One per TAP, in order.
    pub taps: Vec<TapStatus>,
    /// Why packets take another data path than the plan asks for, if so.
    pub data_path_note: Option<String>,
    /// What is wrong; empty if the slot is sound.
    pub defects: Vec<Defect>,
    /// Connections tracked in the slot's namespace, if it can be told.
    pub connections: Option<u32>,
}

/// Kernel objects that bear the name of this instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Slots whose namespace is mounted and whose host interface is there: pool name and number.
    pub slots: Vec<(String, u32)>,
    /// Pieces: a namespace without interface, an interface without namespace, an empty file.
    pub leftovers: Vec<Leftover>,
}

/// One kernel object of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leftover {
    /// A namespace or its empty mount point, by name.
    Namespace(String),
    /// An interface of the host, by name.
    Interface(String),
    /// All interfaces of the host that bear the alias of a slot.
    Alias(String),
    /// The same of children of the host's interfaces, in whatever namespaces they are.
    Child(String),
}
