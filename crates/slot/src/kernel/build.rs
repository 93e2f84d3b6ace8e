//! Builds a slot.
//!
//! The order matters. Settings come before the interfaces that inherit them, TAPs before the rules
//! that name them, and the host's end of the veth after the slot's end is up. Each event of an
//! interface makes the kernel walk the host's whole IPv6 routing table (`rt6_sync_up`). The host's end
//! is created dormant and changed once, so that only the event of its carrier is left; the kernel
//! handles that one by itself while the nftables table is written.

use std::io;

use sandwire_kernel_net::{
    interface::{self, InterfaceIndex},
    netlink::{Request, Socket},
    netns::{Home, Inside},
    nft::Batch,
};

use super::{
    Worker, container,
    ebpf::Ebpf,
    filters::{self, Attachment},
    host_slot, interfaces, slot_table,
};
use crate::{error::NetworkError, plan::SlotPlan};

/// A step of building a slot, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuildStep {
    /// A namespace for the thread, and sockets in it.
    Namespace,
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
    /// The slot's entries in the eBPF data path.
    Entry,
    /// The programs inside the namespace.
    Filters,
    /// TAPs of the host's namespace stay.
    Persist,
    /// Settings of the namespace, or of an interface in somebody's.
    Settings,
    /// Programs with new maps on the host ends of a slot that was built before.
    Exchange,
}

impl BuildStep {
    /// The steps of a slot with the nft data path, in order.
    pub const ALL: [Self; 8] = [
        Self::Namespace,
        Self::Settings,
        Self::Tap,
        Self::Veth,
        Self::Addresses,
        Self::HostEnd,
        Self::NftTable,
        Self::Mount,
    ];

    /// The steps of a netns slot with the eBPF data path, in order.
    pub const EBPF: [Self; 9] = [
        Self::Namespace,
        Self::Settings,
        Self::Tap,
        Self::Veth,
        Self::Filters,
        Self::Addresses,
        Self::Entry,
        Self::HostEnd,
        Self::Mount,
    ];

    /// The steps of a host slot, in order.
    pub const HOST: [Self; 4] = [Self::Tap, Self::Entry, Self::HostEnd, Self::Persist];

    /// The steps of putting a container slot's interface into its namespace, in order.
    pub const ATTACH: [Self; 5] = [
        Self::Veth,
        Self::Entry,
        Self::HostEnd,
        Self::Settings,
        Self::Addresses,
    ];

    /// What follows for a TAP beside it, in order.
    pub const BESIDE: [Self; 3] = [Self::Tap, Self::Filters, Self::Persist];

    /// What the step does, for errors: "cannot {this} slot …".
    fn operation(self) -> &'static str {
        match self {
            Self::Namespace => "create the namespace of",
            Self::Tap => "create the TAPs of",
            Self::Veth => "create the veth of",
            Self::Addresses => "set the addresses of",
            Self::NftTable => "write the nft table of",
            Self::HostEnd => "raise the host end of",
            Self::Mount => "publish the namespace of",
            Self::Entry => "write the eBPF entries of",
            Self::Filters => "attach the programs inside",
            Self::Persist => "make persistent the TAPs of",
            Self::Settings => "write the settings of",
            Self::Exchange => "exchange the programs of",
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

/// Who builds, and what.
pub(super) struct Build<'a> {
    pub(super) steps: &'a dyn Steps,
    pub(super) slot: &'a SlotPlan,
    /// The data path, if the slot needs it, and the shared interface.
    pub(super) ebpf: Option<(&'a Ebpf, InterfaceIndex)>,
}

pub(super) fn build(
    build: &Build<'_>,
    home: &Home,
    worker: &mut Worker,
) -> Result<(), NetworkError> {
    if let (Some((ebpf, shared)), true) = (build.ebpf, build.slot.is_container()) {
        return container::build(build, worker, ebpf, shared);
    }
    if let (Some((ebpf, shared)), false) = (build.ebpf, build.slot.has_netns()) {
        return host_slot::build(build, worker, ebpf, shared);
    }
    let mut has_veth = false;
    let inside = build.step(BuildStep::Namespace, || Ok(home.unshare()?))?;
    let result = build.inside(home, worker, &inside, &mut has_veth);
    // Leaving the namespace gives up the last hold on it, unless it was published.
    drop(inside);
    if result.is_err() && has_veth {
        let mut request = Request::new();
        interface::delete(&mut request, &build.slot.host_interface);
        // The kernel removes the veth with the namespace in any case, but some time later.
        drop(worker.route.execute(request));
    }
    // Before that nothing was reserved: an entry is that of a sandbox which has the host end.
    if let (Err(_), Some((ebpf, _)), true) = (&result, build.ebpf, has_veth) {
        ebpf.free(build.slot);
    }
    result
}

impl Build<'_> {
    /// `has_veth` becomes true when the host end is ours to remove.
    fn inside(
        &self,
        home: &Home,
        worker: &mut Worker,
        inside: &Inside,
        has_veth: &mut bool,
    ) -> Result<(), NetworkError> {
        let slot = self.slot;
        let mut route = self.step(BuildStep::Namespace, || Ok(Socket::route()?))?;
        self.step(BuildStep::Settings, || {
            interfaces::write_settings(&mut worker.procfs, slot)
        })?;
        self.step(BuildStep::Tap, || {
            (0..slot.nics.len()).try_for_each(|nic| interfaces::create_tap(slot, nic))
        })?;
        self.step(BuildStep::Veth, || {
            Ok(route.execute(interfaces::veth(slot, home))?)
        })?;
        *has_veth = true;
        let mut request = Request::new();
        if let Some((ebpf, _)) = self.ebpf {
            self.step(BuildStep::Filters, || {
                for attachment in interfaces::attachments_inside(slot) {
                    attachment.add(&mut request, &ebpf.datapath);
                }
                filters::spare_queues(&mut request, interfaces::tap_indexes(slot));
                Ok(())
            })?;
        }
        let qdiscs = match self.ebpf.is_none() && worker.has_qdiscs {
            true => {
                filters::prepare(&mut request, [interfaces::UPLINK])
                    + filters::prepare_taps(&mut request, interfaces::tap_indexes(slot))
            }
            false => 0,
        };
        self.step(BuildStep::Addresses, || {
            interfaces::configure_uplink(&mut request, slot);
            for nic in 0..slot.nics.len() {
                interfaces::configure_tap(&mut request, slot, nic);
            }
            worker.has_qdiscs &= filters::execute_prepared(&mut route, request, qdiscs)?;
            Ok(())
        })?;
        let previous = worker.raised.take();
        worker.raised = Some(self.host_end(worker)?);
        if self.ebpf.is_none() {
            self.step(BuildStep::NftTable, || {
                let mut netfilter = Socket::netfilter()?;
                let mut batch = Batch::new(slot_table::NAME);
                batch.add_table();
                slot_table::write(&mut batch, slot);
                Ok(batch.commit(&mut netfilter)?)
            })?;
        }
        if let Some(previous) = previous {
            interfaces::drop_multicast_route(&mut worker.route, previous);
        }
        self.step(BuildStep::Mount, || Ok(inside.publish(&slot.netns_name)?))
    }

    /// Raises the host's end, with routes to it or with the program on it.
    fn host_end(&self, worker: &mut Worker) -> Result<InterfaceIndex, NetworkError> {
        let slot = self.slot;
        let Some((ebpf, shared)) = self.ebpf else {
            return self.step(BuildStep::HostEnd, || {
                interfaces::configure_host_end(worker, slot, true)
            });
        };
        let (index, first) = self.step(BuildStep::Entry, || {
            let index = interfaces::host_end_index(&mut worker.route, slot)?;
            let first = ebpf.reserve(slot)?;
            ebpf.write(slot, &[index], shared)?;
            Ok((index, first))
        })?;
        self.step(BuildStep::HostEnd, || {
            let mut request = Request::new();
            Attachment::host_end(index, first).add(&mut request, &ebpf.datapath);
            interfaces::raise_host_end(&mut request, slot, index);
            Ok(worker.route.execute(request)?)
        })?;
        Ok(index)
    }

    pub(super) fn step<T>(
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
        work().map_err(|error| match error {
            // What the caller can mend is told as what it is.
            conflict @ NetworkError::Conflict { .. } => conflict,
            other => named(other.into()),
        })
    }
}
