//! What pools ask of the kernel.
//!
//! One implementation does it ([`crate::kernel::KernelNetwork`]); tests of the pool's logic use a
//! model that fails where the test says. Every call may take milliseconds: pools make them from
//! background threads only, never on the way of a hand-out. Every call is idempotent, so that what
//! a crash interrupted can simply be done again.

use std::net::IpAddr;

use sandwire_api::{
    lease::{TapHolder, TapStatus},
    pool::PoolSpec,
    published_port::PublishPort,
    slot::Defect,
};

use crate::{
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

    /// Tears slots down, many at once because the kernel's waits are shared: host ends, namespaces,
    /// published ports and connections that the host tracks for their clone addresses. Missing
    /// pieces are fine.
    /// Returns one result per slot, in order.
    fn tear_down(&self, slots: &[SlotPlan]) -> Vec<Result<(), NetworkError>>;

    /// Looks at every object of a slot.
    fn inspect(&self, slot: &SlotPlan) -> Inspection;

    /// Repairs what [`Network::inspect`] found, as far as that is possible under a running sandbox.
    fn repair(&self, slot: &SlotPlan) -> Vec<Defect>;

    /// What the kernel has by the name of this instance.
    ///
    /// # Errors
    /// The kernel can't be asked.
    fn inventory(&self) -> Result<Inventory, NetworkError>;

    /// Removes objects of this instance that no pool owns, going on after errors.
    fn reclaim(&self, leftovers: &[Leftover]) -> Vec<Result<(), NetworkError>>;

    /// Makes the host's published ports exactly these.
    ///
    /// # Errors
    /// Nothing changed.
    fn set_published_ports(&self, ports: &[(PublishPort, Vec<IpAddr>)])
    -> Result<(), NetworkError>;

    /// Checks the host's side (table, shared interface, routes, forwarding) and repairs it.
    fn inspect_host(&self, pools: &[PoolSpec]) -> Vec<Defect>;
}

/// Outcome of [`Network::withdraw_taps`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Withdrawal {
    /// Nobody had a TAP open, and nobody finds one any more.
    Free,
    /// These processes have one open. Empty if they can't be seen from here.
    Held(Vec<TapHolder>),
}

/// What [`Network::inspect`] saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inspection {
    /// One per TAP, in order.
    pub taps: Vec<TapStatus>,
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
}
