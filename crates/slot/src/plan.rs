//! From a slot number and a pool's settings to every name, address and MAC. Pure: no I/O, no clock.
//!
//! A [`Plan`] is made once per pool by [`Plan::new`], which refuses what can't work (prefixes that
//! overlap, a TAP name that is too long, …); after that [`Plan::slot`] can't fail for a number
//! below [`Plan::slots_max`]. Two numbers never share a name or a clone address.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sandwire_api::{pool::PoolSpec, slot::MacAddress};

/// Number of a slot in its pool, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotNumber(pub u32);

impl std::fmt::Display for SlotNumber {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

/// A pool's settings, checked, with what they determine for the pool as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Name of the daemon's instance.
    pub instance: String,
    /// The pool's settings.
    pub spec: PoolSpec,
    /// Slot numbers are below this.
    pub slots_max: u32,
    /// Six characters that stand for instance and pool in interface names.
    pub tag: String,
    /// The host's own address in the IPv4 clone prefix.
    pub host_ipv4: Option<Ipv4Addr>,
    /// The host's own address in the IPv6 clone prefix.
    pub host_ipv6: Option<Ipv6Addr>,
    /// Prefixes that hold all clone addresses of the pool and nothing else.
    pub clone_prefixes: Vec<IpNet>,
}

/// Everything about one slot that the kernel is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotPlan {
    /// Number in the pool.
    pub number: SlotNumber,
    /// Name of the network namespace, `sandwire.INSTANCE.POOL.NUMBER`: the file under `/run/netns`.
    pub netns_name: String,
    /// Name of the veth's host end, `sw` + pool tag + `-` + number; at most 15 bytes.
    pub host_interface: String,
    /// Alias of the host end: `sandwire:INSTANCE:POOL:NUMBER`, from which its owner can be told.
    pub host_alias: String,
    /// Name of the veth's end inside the namespace, the same in every slot.
    pub slot_interface: String,
    /// Ethernet address of both veth ends, the same in every slot: the pair carries nobody else's
    /// frames, and permanent neighbour entries point at it.
    pub veth_mac: MacAddress,
    /// IPv4 addresses of the veth's ends, only in plans whose scheme has them.
    pub transit: Option<Transit>,
    /// The sandbox's interfaces.
    pub nics: Vec<NicPlan>,
    /// MTU of TAPs and veth.
    pub mtu: u32,
    /// Most connections that the slot's namespace may track.
    pub connections_max: u32,
    /// Owner of the TAPs.
    pub tap_owner_uid: Option<u32>,
    /// Group of the TAPs.
    pub tap_owner_gid: Option<u32>,
    /// Whether the TAPs carry virtio-net headers.
    pub tap_vnet_header: bool,
    /// Whether the TAPs have several queues.
    pub tap_multi_queue: bool,
}

/// IPv4 addresses of the two ends of a slot's veth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transit {
    /// On the host.
    pub host: Ipv4Addr,
    /// In the slot's namespace.
    pub slot: Ipv4Addr,
}

/// One interface of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicPlan {
    /// Name of the TAP.
    pub tap: String,
    /// Ethernet address that the guest uses.
    pub guest_mac: MacAddress,
    /// Ethernet address of the TAP's host side.
    pub gateway_mac: MacAddress,
    /// IPv4 addresses.
    pub ipv4: Option<NicIpv4Plan>,
    /// IPv6 addresses.
    pub ipv6: Option<NicIpv6Plan>,
}

/// IPv4 side of a [`NicPlan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicIpv4Plan {
    /// The guest's address and prefix length.
    pub guest: Ipv4Net,
    /// The TAP's address.
    pub gateway: Ipv4Addr,
    /// Address by which the world knows the clone.
    pub clone_address: Ipv4Addr,
}

/// IPv6 side of a [`NicPlan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicIpv6Plan {
    /// The guest's address and prefix length.
    pub guest: Ipv6Net,
    /// The TAP's address, beside `fe80::1`.
    pub gateway: Ipv6Addr,
    /// Address by which the world knows the clone.
    pub clone_address: Ipv6Addr,
}
