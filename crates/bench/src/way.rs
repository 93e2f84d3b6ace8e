//! The ways of connecting guests that are compared, each built in a played host of its own.

mod baseline;
mod ours;
mod xdp;

use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::Result;
use sandwire_api::pool::PolicySpec;

use crate::{
    daemon_process::DaemonProcess,
    packet::{Flow, Mac},
    world::World,
};

pub(crate) use baseline::text as mac_text;
pub(crate) use ours::{Limit, Switches, policy};

/// A way of connecting guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Way {
    /// The kernel forwards between TAP and uplink; each guest has an address of its own.
    Kernel,
    /// The same, and nftables translates the source by conntrack.
    KernelNat,
    /// Firecracker's document on clones, command for command.
    Recipe,
    /// The recipe, and the host translates the clone address to its own, as a guest needs that is to
    /// reach further than the host's neighbours.
    RecipeTwice,
    /// Our netns slot by nftables.
    Nft,
    /// Our netns slot by eBPF.
    EbpfNetns,
    /// Our host slot.
    EbpfHost,
    /// Our XDP program in generic mode on a host slot: what seed 004's authors did.
    XdpGeneric,
    /// Our profile `xdp` on a host slot.
    Xdp,
}

impl Way {
    /// The name of its rows.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::KernelNat => "kernel_nat",
            Self::Recipe => "recipe",
            Self::RecipeTwice => "recipe_and_host_snat",
            Self::Nft => "nft",
            Self::EbpfNetns => "ebpf_netns",
            Self::EbpfHost => "ebpf_host",
            Self::XdpGeneric => "xdp_generic",
            Self::Xdp => "xdp",
        }
    }

    /// Whether each lease has a policy of its own, with deny list and limits.
    pub(crate) fn has_policies(self) -> bool {
        matches!(
            self,
            Self::EbpfNetns | Self::EbpfHost | Self::XdpGeneric | Self::Xdp
        )
    }

    /// Whether guests keep checksum and segmentation offload. XDP loses such packets.
    pub(crate) fn has_offloads(self) -> bool {
        !matches!(self, Self::XdpGeneric | Self::Xdp)
    }
}

/// How a guest is connected, and who it is.
#[derive(Clone, Debug)]
pub(crate) struct Sandbox {
    /// Namespace that its TAP is in.
    pub(crate) namespace: String,
    /// Its TAP.
    pub(crate) tap: String,
    /// Whether frames have virtio headers, and offloads are on.
    pub(crate) has_offloads: bool,
    /// Its Ethernet address.
    pub(crate) mac: Mac,
    /// Ethernet address of its gateway.
    pub(crate) gateway_mac: Mac,
    /// The address that it believes it has.
    pub(crate) guest: Ipv4Addr,
    /// Its gateway.
    pub(crate) gateway: Ipv4Addr,
    /// Length of its prefix.
    pub(crate) prefix_length: u8,
    /// The address by which the world knows it.
    pub(crate) clone: Ipv4Addr,
}

impl Sandbox {
    /// What it sends to `target`.
    pub(crate) fn flow(&self, source_port: u16, target: SocketAddrV4) -> Flow {
        Flow {
            source_mac: self.mac,
            target_mac: self.gateway_mac,
            source: SocketAddrV4::new(self.guest, source_port),
            target,
        }
    }
}

/// A played host with its guests' networks.
pub(crate) struct Place {
    /// The guests' networks, in order.
    pub(crate) sandboxes: Vec<Sandbox>,
    /// The daemon whose slots they are, if they are ours. It ends before its host does.
    daemon: Option<(DaemonProcess, tempfile::TempDir)>,
    /// What must be known about its rows.
    pub(crate) note: Option<&'static str>,
    /// Where all that is.
    pub(crate) world: World,
}

/// What to build.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// How many slots.
    pub(crate) slots: u32,
    /// How many of ours are leased, and which policy each lease gets; the last goes on for the rest.
    pub(crate) leases: u32,
    /// See `leases`.
    pub(crate) policies: Vec<PolicySpec>,
}

impl Place {
    /// Builds a way's slots. `progress` is told how many there are.
    pub(crate) fn build(way: Way, plan: &Plan, progress: impl Fn(u32)) -> Result<Self> {
        match way {
            Way::Kernel | Way::KernelNat => baseline::kernel(way, plan.slots),
            Way::Recipe | Way::RecipeTwice => baseline::recipe(way, plan.slots, progress),
            Way::Nft | Way::EbpfNetns | Way::EbpfHost | Way::XdpGeneric | Way::Xdp => {
                ours::build(way, plan)
            }
        }
    }

    /// Ends it and says so if the daemon did not end well.
    pub(crate) fn end(mut self) -> Result<()> {
        match self.daemon.take() {
            Some((daemon, _folder)) => daemon.stop(),
            None => Ok(()),
        }
    }
}
