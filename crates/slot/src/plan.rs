//! From a slot number and a pool's settings to every name, address and MAC. Pure: no I/O, no clock.
//!
//! A [`Plan`] is made once per pool by [`Plan::new`], which refuses what can't work (prefixes that
//! overlap, a TAP name that is too long, …); after that [`Plan::slot`] can't fail for a number
//! below [`Plan::slots_max`]. Two numbers never share a name or a clone address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sandwire_api::{
    attach::{DeviceChoice, ParentSpec},
    name::Name,
    pool::{AccessRule, AddressPlan, PolicySpec, PoolSpec},
    slot::{DataPath, MacAddress, Nic, NicIpv4, NicIpv6, SlotKind},
    vsock::{VsockKind, VsockPolicy},
};

use crate::{
    attach::AttachRecord, channel::checks::check_policy as check_vsock_policy, error::PlanError,
};

mod addresses;
mod checks;
pub mod container;
mod guest;
pub mod names;
mod policy;

pub(crate) use policy::check_route_mark;
use policy::check_talks_to;
pub use policy::{check_policy, choose_data_path};

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
    /// The same as a number, by which the data path's maps name the pool.
    pub number: u32,
    /// The host's own address in the IPv4 clone prefix.
    pub host_ipv4: Option<Ipv4Addr>,
    /// The host's own address in the IPv6 clone prefix.
    pub host_ipv6: Option<Ipv6Addr>,
    /// Prefixes that hold all clone addresses of the pool and nothing else.
    pub clone_prefixes: Vec<IpNet>,
}

impl Plan {
    /// Checks a pool's settings.
    ///
    /// # Errors
    /// Names the setting that can't work, and why.
    pub fn new(instance: &Name, spec: &PoolSpec) -> Result<Self, PlanError> {
        check_route_mark(&spec.policy)?;
        check_talks_to(&spec.policy)?;
        if let Some(policy) = &spec.vsock {
            // What depends on the kind of device is checked when a lease has one.
            check_vsock_policy(policy, VsockKind::VhostUser)?;
        }
        Self::kept(instance, spec)
    }

    /// The same for a pool that is there, with a mark, groups or a vsock policy that a former version took perhaps.
    ///
    /// # Errors
    /// Names the setting that can't work, and why.
    pub fn kept(instance: &Name, spec: &PoolSpec) -> Result<Self, PlanError> {
        checks::check(spec)?;
        let slots_max = checks::slots_max(spec)?;
        let ipv4 = addresses::ipv4_prefix(spec);
        let ipv6 = addresses::ipv6_prefix(spec);
        let mut clone_prefixes = Vec::new();
        match (spec.guest.ipv4, ipv4) {
            (_, Some(prefix)) if addresses::has_ipv4(spec) => {
                clone_prefixes.push(IpNet::V4(prefix));
            }
            (Some(guest), None) if spec.kind != SlotKind::Container => {
                clone_prefixes = addresses::firecracker_prefixes(slots_max, guest);
            }
            _ => {}
        }
        clone_prefixes.extend(ipv6.map(IpNet::V6));
        Ok(Self {
            instance: instance.to_string(),
            spec: spec.clone(),
            slots_max,
            tag: names::pool_tag(instance.as_str(), spec.name.as_str()),
            number: names::pool_number(instance.as_str(), spec.name.as_str()),
            host_ipv4: ipv4.map(addresses::ipv4_host),
            host_ipv6: ipv6.map(addresses::ipv6_host),
            clone_prefixes,
        })
    }

    /// Every name and address of one slot.
    ///
    /// # Panics
    /// If the number is not below [`Plan::slots_max`].
    #[must_use]
    pub fn slot(&self, number: SlotNumber) -> SlotPlan {
        assert!(
            number.0 < self.slots_max,
            "slot {number} of pool {} is beyond its {} slots",
            self.spec.name,
            self.slots_max
        );
        let spec = &self.spec;
        let pool = spec.name.as_str();
        let scheme_has_transit = matches!(spec.addresses, AddressPlan::FirecrackerClones { .. });
        let first = SlotNumber(self.first_interface(number));
        SlotPlan {
            number,
            kind: spec.kind,
            data_path: spec.data_path,
            pool_number: self.number,
            netns_name: names::netns(&self.instance, pool, number),
            host_interface: names::host_interface(&self.tag, first),
            host_alias: names::host_alias(&self.instance, pool, number),
            slot_interface: names::SLOT_INTERFACE.to_owned(),
            veth_mac: VETH_MAC,
            transit: scheme_has_transit.then(|| addresses::firecracker_transit(number.0)),
            nics: self.nics(number),
            mtu: spec.tap.mtu,
            connections_max: spec.policy.connections_max,
            tap_owner_uid: spec.tap.owner_uid,
            tap_owner_gid: spec.tap.owner_gid,
            tap_vnet_header: spec.tap.vnet_header,
            tap_multi_queue: spec.tap.multi_queue,
            device: spec.device,
            parent: spec.parent.clone(),
            attach: None,
        }
    }

    /// The number in the name of a slot's first interface on the host.
    fn first_interface(&self, number: SlotNumber) -> u32 {
        match self.spec.kind {
            SlotKind::Netns | SlotKind::Container => number.0,
            SlotKind::Host => number.0 * u32::from(self.spec.nics),
        }
    }

    /// The slot, if any, of an interface on the host whose name has the pool's tag and this number.
    #[must_use]
    pub fn slot_of_interface(&self, number: SlotNumber) -> Option<SlotNumber> {
        let slot = match self.spec.kind {
            SlotKind::Netns | SlotKind::Container => number.0,
            SlotKind::Host => number.0 / u32::from(self.spec.nics),
        };
        (slot < self.slots_max).then_some(SlotNumber(slot))
    }

    /// Checks a policy for sandboxes of the pool.
    ///
    /// # Errors
    /// Names the field that can't work, and why.
    pub fn check_policy(&self, policy: &PolicySpec) -> Result<(), PlanError> {
        check_route_mark(policy)?;
        check_talks_to(policy)?;
        checks::check_policy_of(&self.spec, policy)
    }

    /// Refuses, of a policy that has been checked for a pool, what this one can't have for what kind it is. Takes no time,
    /// however long its lists are.
    ///
    /// # Errors
    /// Names the field that can't work, and why.
    pub fn check_policy_of_kind(&self, policy: &PolicySpec) -> Result<(), PlanError> {
        checks::check_policy_of_kind(&self.spec, policy)
    }

    /// The same pool with another policy.
    ///
    /// # Errors
    /// Names the field that can't work, and why.
    pub fn with_policy(&self, policy: PolicySpec) -> Result<Self, PlanError> {
        self.check_policy(&policy)?;
        let mut changed = self.clone();
        changed.spec.policy = policy;
        Ok(changed)
    }

    /// The same pool with another default of what guests may reach by vsock, which has been checked.
    #[must_use]
    pub fn with_vsock(&self, policy: Option<VsockPolicy>) -> Self {
        let mut changed = self.clone();
        changed.spec.vsock = policy;
        changed
    }

    /// The same pool with others who may use it, and another rest of its addresses.
    #[must_use]
    pub fn with_use(&self, access: Vec<AccessRule>, quarantine_seconds: u32) -> Self {
        let mut changed = self.clone();
        changed.spec.access = access;
        changed.spec.quarantine_seconds = quarantine_seconds;
        changed
    }

    /// The same pool with another data path.
    ///
    /// # Errors
    /// Names the setting that the other data path lacks, and why.
    pub fn with_data_path(&self, data_path: DataPath) -> Result<Self, PlanError> {
        let mut changed = self.clone();
        changed.spec.data_path = data_path;
        checks::check(&changed.spec)?;
        Ok(changed)
    }

    /// Name of the group that sandboxes with a policy are in.
    #[must_use]
    pub fn group_of<'a>(&'a self, policy: &'a PolicySpec) -> &'a Name {
        policy.group.as_ref().unwrap_or(&self.spec.name)
    }

    /// The slot, if any, that has this clone address on one of its interfaces.
    #[must_use]
    pub fn slot_of_address(&self, address: IpAddr) -> Option<SlotNumber> {
        let in_family = match address {
            IpAddr::V4(_) => addresses::has_ipv4(&self.spec),
            IpAddr::V6(_) => addresses::has_ipv6(&self.spec),
        };
        in_family.then_some(())?;
        let number = addresses::index_of(&self.spec, address)? / u32::from(self.spec.nics);
        (number < self.slots_max).then_some(SlotNumber(number))
    }

    /// The clone prefixes without the host's own addresses in them.
    #[must_use]
    pub fn slot_prefixes(&self) -> Vec<IpNet> {
        let without_host = |prefix: &IpNet| match (*prefix, self.host_ipv4, self.host_ipv6) {
            (IpNet::V4(prefix), Some(host), _) => addresses::around_ipv4(prefix, host),
            (IpNet::V6(prefix), _, Some(host)) => addresses::around_ipv6(prefix, host),
            (prefix, ..) => vec![prefix],
        };
        self.clone_prefixes.iter().flat_map(without_host).collect()
    }

    /// Prefixes that hold the addresses of the veths' ends; empty if the scheme has none.
    #[must_use]
    pub fn transit_prefixes(&self) -> Vec<IpNet> {
        match self.spec.addresses {
            AddressPlan::Prefix { .. } => Vec::new(),
            AddressPlan::FirecrackerClones { .. } => {
                addresses::firecracker_transit_prefixes(self.slots_max)
            }
        }
    }

    /// Subnets that the guests believe to be in, one per interface and family. Containers are in none.
    #[must_use]
    pub fn guest_subnets(&self) -> Vec<IpNet> {
        if self.spec.kind == SlotKind::Container {
            return Vec::new();
        }
        guest::subnets(&self.spec).expect("checked when the plan was made")
    }

    /// A prefix of this pool and one of the other that can't both be on one host: each pool's
    /// clone and transit addresses must be apart from the other's, and from what the other's
    /// guests take for their own subnet.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> Option<(IpNet, IpNet)> {
        let host_side =
            |plan: &Self| [plan.clone_prefixes.clone(), plan.transit_prefixes()].concat();
        let (ours, theirs) = (host_side(self), host_side(other));
        first_overlap(&ours, &theirs)
            .or_else(|| first_overlap(&ours, &other.guest_subnets()))
            .or_else(|| first_overlap(&self.guest_subnets(), &theirs))
    }

    /// The clone addresses of a slot, without the rest of its plan.
    #[must_use]
    pub fn clone_addresses(&self, number: SlotNumber) -> Vec<IpAddr> {
        let nics = self.nics(number);
        nics.iter().flat_map(NicPlan::clone_addresses).collect()
    }

    fn nics(&self, number: SlotNumber) -> Vec<NicPlan> {
        let spec = &self.spec;
        if spec.kind == SlotKind::Container {
            return vec![container::nic(spec, &self.tag, number)];
        }
        let guests = guest::nics(spec).expect("checked when the plan was made");
        let first = number.0 * u32::from(spec.nics);
        (first..)
            .zip(guests)
            .map(|(index, guest)| NicPlan {
                tap: match spec.kind {
                    SlotKind::Netns | SlotKind::Container => guest.tap,
                    SlotKind::Host => names::host_interface(&self.tag, SlotNumber(index)),
                },
                guest_mac: guest.mac,
                gateway_mac: guest.gateway_mac,
                ipv4: guest.ipv4.map(|(guest, gateway)| NicIpv4Plan {
                    guest,
                    gateway,
                    clone_address: addresses::ipv4_clone(spec, index),
                }),
                ipv6: guest.ipv6.zip(addresses::ipv6_prefix(spec)).map(
                    |((guest, gateway), prefix)| NicIpv6Plan {
                        guest,
                        gateway,
                        clone_address: addresses::ipv6_clone(prefix, index),
                    },
                ),
            })
            .collect()
    }
}

/// Everything about one slot that the kernel is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotPlan {
    /// Number in the pool.
    pub number: SlotNumber,
    /// Whether it has a namespace.
    pub kind: SlotKind,
    /// How its packets travel.
    pub data_path: DataPath,
    /// Number that stands for the pool in the data path's maps.
    pub pool_number: u32,
    /// The slot's name, `sandwire.INSTANCE.POOL.NUMBER`; in netns slots that of the network
    /// namespace, the file under `/run/netns`.
    pub netns_name: String,
    /// Name of the host end: the veth's, `sw` + pool tag + `-` + number (that of a container slot's parked end
    /// too); in host slots the first
    /// TAP's, where the numbers count interfaces. At most 15 bytes.
    pub host_interface: String,
    /// Alias of the host ends: `sandwire:INSTANCE:POOL:NUMBER`, from which their owner can be told.
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
    /// What kind of interface a container slot gets.
    pub device: DeviceChoice,
    /// The interface of the host whose child a container slot gets, if that is what it gets.
    pub parent: Option<ParentSpec>,
    /// Where a leased container slot's interface is put.
    pub attach: Option<AttachRecord>,
}

impl SlotPlan {
    /// Path of the network namespace.
    #[must_use]
    pub fn netns_path(&self) -> String {
        format!("{}/{}", names::NETNS_FOLDER, self.netns_name)
    }

    /// Whether it has a network namespace of its own.
    #[must_use]
    pub fn has_netns(&self) -> bool {
        self.kind == SlotKind::Netns
    }

    /// Whether it is an interface for somebody else's namespace.
    #[must_use]
    pub fn is_container(&self) -> bool {
        self.kind == SlotKind::Container
    }

    /// Whether its interface is a child of one of the host's: then it has none on the host.
    #[must_use]
    pub fn is_child(&self) -> bool {
        self.device.is_child()
    }

    /// The same slot with its interface put where a lease says.
    #[must_use]
    pub fn attached_by(mut self, attach: Option<&AttachRecord>) -> Self {
        let Some(attach) = attach else { return self };
        if let Some(nic) = self.nics.first_mut()
            && let (None, Some(ipv6), true) = (nic.ipv4, nic.ipv6, attach.has_mac_of_all)
        {
            nic.guest_mac = container::mac_of_all(ipv6.clone_address);
        }
        if let (Some(mac), Some(nic)) = (attach.request.mac, self.nics.first_mut()) {
            nic.guest_mac = mac;
        }
        let shared_mac = attach.parent.as_ref().and_then(|parent| parent.mac);
        if let (Some(mac), Some(nic)) = (shared_mac, self.nics.first_mut()) {
            nic.guest_mac = mac;
        }
        self.mtu = attach.request.mtu.unwrap_or(self.mtu);
        self.attach = Some(attach.clone());
        self
    }

    /// Whether its packets travel by eBPF programs.
    #[must_use]
    pub fn is_ebpf(&self) -> bool {
        self.data_path != DataPath::Nft
    }

    /// Names of its interfaces on the host.
    pub fn host_ends(&self) -> impl Iterator<Item = &str> {
        let veth = self.has_netns().then_some(self.host_interface.as_str());
        let taps = self.nics.iter().filter(|_| !self.has_netns());
        veth.into_iter().chain(taps.map(|nic| nic.tap.as_str()))
    }

    /// The addresses by which the world knows the sandbox, of all its interfaces.
    pub fn clone_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.nics.iter().flat_map(NicPlan::clone_addresses)
    }

    /// The addresses that the guest believes it has, of all its interfaces.
    pub fn guest_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.nics.iter().flat_map(|nic| {
            let ipv4 = nic.ipv4.map(|ipv4| IpAddr::V4(ipv4.guest.addr()));
            let ipv6 = nic.ipv6.map(|ipv6| IpAddr::V6(ipv6.guest.addr()));
            ipv4.into_iter().chain(ipv6)
        })
    }

    /// The sandbox's interfaces as the API shows them.
    #[must_use]
    pub fn api_nics(&self) -> Vec<Nic> {
        self.nics.iter().map(|nic| nic.to_api(self.mtu)).collect()
    }
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
    /// Name of the TAP: the same in every netns slot, another in each host slot. In container slots the host
    /// end of the veth.
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

impl NicPlan {
    fn clone_addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let ipv4 = self.ipv4.map(|ipv4| IpAddr::V4(ipv4.clone_address));
        let ipv6 = self.ipv6.map(|ipv6| IpAddr::V6(ipv6.clone_address));
        ipv4.into_iter().chain(ipv6)
    }

    fn to_api(&self, mtu: u32) -> Nic {
        Nic {
            tap: self.tap.clone(),
            mtu,
            guest_mac: self.guest_mac,
            gateway_mac: self.gateway_mac,
            ipv4: self.ipv4.map(|ipv4| NicIpv4 {
                guest: ipv4.guest,
                gateway: ipv4.gateway,
                clone_address: ipv4.clone_address,
            }),
            ipv6: self.ipv6.map(|ipv6| NicIpv6 {
                guest: ipv6.guest,
                gateway: ipv6.gateway,
                clone_address: ipv6.clone_address,
            }),
        }
    }
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

/// Locally administered; the bytes read `sw` and `veth`'s first.
const VETH_MAC: MacAddress = MacAddress([0x02, 0x73, 0x77, 0x76, 0x00, 0x01]);

/// Whether two prefixes share an address; never across families.
fn overlap(left: IpNet, right: IpNet) -> bool {
    left.contains(&right.network()) || right.contains(&left.network())
}

fn first_overlap(left: &[IpNet], right: &[IpNet]) -> Option<(IpNet, IpNet)> {
    left.iter().find_map(|&ours| {
        let theirs = right.iter().find(|&&theirs| overlap(ours, theirs))?;
        Some((ours, *theirs))
    })
}

#[cfg(test)]
mod tests;
