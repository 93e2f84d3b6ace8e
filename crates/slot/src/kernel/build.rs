//! Builds a slot.
//!
//! The order matters. Settings come before the interfaces that inherit them, TAPs before the rules
//! that name them, and the host's end of the veth after the slot's end is up. Each event of an
//! interface makes the kernel walk the host's whole IPv6 routing table (`rt6_sync_up`). The host's end
//! is created dormant and changed once, so that only the event of its carrier is left; the kernel
//! handles that one by itself while the nftables table is written.

use std::io;

use sandwire_kernel_net::{
    interface,
    netlink::{Request, Socket},
    netns::{Home, Inside},
    nft::Batch,
};

use super::{Worker, interfaces, slot_table};
use crate::{error::NetworkError, plan::SlotPlan};

/// A step of building a slot, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuildStep {
    /// A namespace for the thread, and sockets in it.
    Namespace,
    /// Forwarding of IPv6 in the namespace.
    Forwarding,
    /// TAPs.
    Tap,
    /// The veth, its host end still down.
    Veth,
    /// Settings, addresses, neighbours and routes inside.
    Addresses,
    /// The host's end: raised, with its neighbours and routes.
    HostEnd,
    /// The slot's nftables table.
    NftTable,
    /// The namespace's name.
    Mount,
}

impl BuildStep {
    /// All steps, in order.
    pub const ALL: [Self; 8] = [
        Self::Namespace,
        Self::Forwarding,
        Self::Tap,
        Self::Veth,
        Self::Addresses,
        Self::HostEnd,
        Self::NftTable,
        Self::Mount,
    ];

    /// What the step does, for errors: "cannot {this} slot …".
    fn operation(self) -> &'static str {
        match self {
            Self::Namespace => "create the namespace of",
            Self::Forwarding => "enable forwarding in",
            Self::Tap => "create the TAPs of",
            Self::Veth => "create the veth of",
            Self::Addresses => "set the addresses of",
            Self::NftTable => "write the nft table of",
            Self::HostEnd => "raise the host end of",
            Self::Mount => "publish the namespace of",
        }
    }
}

/// Asked before each step of a build.
pub trait Steps: Send + Sync {
    /// Lets the step happen, or fails it.
    ///
    /// # Errors
    /// The failure that the step should have.
    fn before(&self, step: BuildStep) -> io::Result<()>;
}

/// Lets every step happen.
pub(super) struct Unhindered;

impl Steps for Unhindered {
    fn before(&self, _step: BuildStep) -> io::Result<()> {
        Ok(())
    }
}

pub(super) fn build(
    home: &Home,
    worker: &mut Worker,
    steps: &dyn Steps,
    slot: &SlotPlan,
) -> Result<(), NetworkError> {
    let mut build = Build {
        steps,
        slot,
        has_veth: false,
    };
    let inside = build.step(BuildStep::Namespace, || Ok(home.unshare()?))?;
    let result = build.inside(home, worker, &inside);
    // Leaving the namespace gives up the last hold on it, unless it was published.
    drop(inside);
    if result.is_err() && build.has_veth {
        let mut request = Request::new();
        interface::delete(&mut request, &slot.host_interface);
        // The kernel removes the veth with the namespace in any case, but some time later.
        drop(worker.route.execute(request));
    }
    result
}

struct Build<'a> {
    steps: &'a dyn Steps,
    slot: &'a SlotPlan,
    /// Whether the host end is ours to remove.
    has_veth: bool,
}

impl Build<'_> {
    fn inside(
        &mut self,
        home: &Home,
        worker: &mut Worker,
        inside: &Inside,
    ) -> Result<(), NetworkError> {
        let slot = self.slot;
        let mut route = self.step(BuildStep::Namespace, || Ok(Socket::route()?))?;
        self.step(BuildStep::Forwarding, || {
            interfaces::enable_forwarding(&mut worker.procfs, slot)
        })?;
        self.step(BuildStep::Tap, || {
            (0..slot.nics.len()).try_for_each(|nic| interfaces::create_tap(slot, nic))
        })?;
        self.step(BuildStep::Veth, || {
            Ok(route.execute(interfaces::veth(slot, home))?)
        })?;
        self.has_veth = true;
        self.step(BuildStep::Addresses, || {
            let mut request = Request::new();
            interfaces::configure_uplink(&mut request, slot);
            for nic in 0..slot.nics.len() {
                interfaces::configure_tap(&mut request, slot, nic);
            }
            Ok(route.execute(request)?)
        })?;
        let previous = worker.raised.take();
        let host_end = self.step(BuildStep::HostEnd, || {
            interfaces::configure_host_end(&mut worker.route, slot)
        })?;
        worker.raised = Some(host_end);
        self.step(BuildStep::NftTable, || {
            let mut netfilter = Socket::netfilter()?;
            let mut batch = Batch::new(slot_table::NAME);
            batch.add_table();
            slot_table::write(&mut batch, slot);
            Ok(batch.commit(&mut netfilter)?)
        })?;
        if let Some(previous) = previous {
            interfaces::drop_multicast_route(&mut worker.route, previous);
        }
        self.step(BuildStep::Mount, || Ok(inside.publish(&slot.netns_name)?))
    }

    fn step<T>(
        &self,
        step: BuildStep,
        work: impl FnOnce() -> Result<T, NetworkError>,
    ) -> Result<T, NetworkError> {
        let named = |source| NetworkError::Kernel {
            operation: step.operation(),
            object: format!("slot {}", self.slot.netns_name),
            source,
        };
        self.steps
            .before(step)
            .map_err(|error| named(error.into()))?;
        work().map_err(|error| named(error.into()))
    }
}
