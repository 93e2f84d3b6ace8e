//! Interfaces, addresses, neighbours and routes of a slot, for building and repairing alike.
//!
//! Inside, packets leave by a default route through the veth; the neighbours on both sides of it, and
//! the guest on its TAP, are permanent entries, so that the first packet in each direction needs no
//! ARP and no neighbour discovery.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::AsFd,
};

use sandwire_kernel_net::{
    Error as KernelError,
    address::Address,
    interface::{self, Change, End, InterfaceIndex, InterfacePair, PairDevice},
    neighbour::Neighbour,
    netlink::{Request, Socket},
    netns::Home,
    procfs::PrivateProcfs,
    route::{self, Route, Target},
    tap,
};

use super::{
    Worker,
    filters::{self, Attachment},
};
use crate::{error::NetworkError, plan::SlotPlan};

/// Number of the veth's end in the slot. Numbers of our own choice save a look-up; these are above
/// those of the tunnel interfaces that some kernels put into every new namespace.
pub(super) const UPLINK: InterfaceIndex = InterfaceIndex(1000);
/// Next hop of slots whose address scheme has none. Link-local, and never seen outside the veth.
const GATEWAY_IPV4: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// Next hop in a slot, and the address by which a guest may call its gateway.
const GATEWAY_IPV6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// Number of a TAP in the slot.
pub(super) fn tap_index(nic: usize) -> InterfaceIndex {
    let nic = u32::try_from(nic).expect("a slot has at most 8 interfaces");
    InterfaceIndex(UPLINK.0 + 1 + nic)
}

/// Lets the slot answer its guest's ARP, and route IPv6. Routing of IPv4 is a setting of each interface, made with the interface.
pub(super) fn write_settings(
    procfs: &mut PrivateProcfs,
    slot: &SlotPlan,
) -> Result<(), NetworkError> {
    // A new namespace has the host's, which may be strict, and of all's and an interface's the greater counts.
    procfs.write("net/ipv4/conf/all/arp_ignore", "0")?;
    if slot.nics.iter().any(|nic| nic.ipv6.is_some()) {
        procfs.write("net/ipv6/conf/all/forwarding", "1")?;
    }
    Ok(())
}

pub(super) fn tap_options(slot: &SlotPlan) -> tap::Options {
    tap::Options {
        vnet_header: slot.tap_vnet_header,
        multi_queue: slot.tap_multi_queue,
        owner: slot.tap_owner_uid,
        group: slot.tap_owner_gid,
    }
}

pub(super) fn create_tap(slot: &SlotPlan, nic: usize) -> Result<(), NetworkError> {
    let name = &slot.nics[nic].tap;
    Ok(tap::create(name, Some(tap_index(nic)), tap_options(slot))?)
}

/// The veth, its slot end in the socket's namespace and its host end at home.
pub(super) fn veth(slot: &SlotPlan, home: &Home) -> Request {
    let mut request = Request::new();
    let pair = InterfacePair {
        device: PairDevice::Veth,
        name: &slot.slot_interface,
        index: UPLINK,
        peer_name: &slot.host_interface,
        peer_namespace: home.as_fd(),
        mac: slot.veth_mac.0,
        peer_mac: slot.veth_mac.0,
        mtu: slot.mtu,
        dormant: Some(End::Peer),
    };
    pair.create(&mut request);
    request
}

/// Raises the slot's end of the veth and the loopback; clone addresses, next hop, default route.
pub(super) fn configure_uplink(request: &mut Request, slot: &SlotPlan) {
    let loopback = Change {
        name: "lo",
        index: Some(InterfaceIndex::LOOPBACK),
        up: Some(true),
        ..Change::default()
    };
    loopback.apply(request);
    let uplink = Change {
        name: &slot.slot_interface,
        index: Some(UPLINK),
        ipv4_forwarding: Some(true),
        no_generated_addresses: true,
        up: Some(true),
        ..Change::default()
    };
    uplink.apply(request);
    // With these, ICMP errors of the slot's router and processes inside have a proper source.
    for address in slot.clone_addresses() {
        Address::new(UPLINK, address.into()).add(request);
    }
    let mut gateway = GATEWAY_IPV4;
    if let Some(transit) = slot.transit {
        let mut address = Address::new(UPLINK, IpAddr::V4(transit.slot).into());
        address.peer = Some(transit.host.into());
        address.add(request);
        gateway = transit.host;
    }
    let first = slot.nics.first();
    let sources = [
        first
            .and_then(|nic| nic.ipv4)
            .map(|ipv4| (gateway.into(), ipv4.clone_address.into())),
        first
            .and_then(|nic| nic.ipv6)
            .map(|ipv6| (GATEWAY_IPV6.into(), ipv6.clone_address.into())),
    ];
    for (gateway, source) in sources.into_iter().flatten() {
        Neighbour {
            interface: UPLINK,
            address: gateway,
            mac: slot.veth_mac.0,
        }
        .add(request);
        Route::default_via(UPLINK, gateway, Some(source)).add(request);
    }
}

/// Raises a TAP: the gateway's addresses, and the guest as a neighbour.
pub(super) fn configure_tap(request: &mut Request, slot: &SlotPlan, nic: usize) {
    let (index, nic) = (tap_index(nic), &slot.nics[nic]);
    let change = Change {
        name: &nic.tap,
        index: Some(index),
        mac: Some(nic.gateway_mac.0),
        mtu: Some(slot.mtu),
        ipv4_forwarding: Some(true),
        arp_filter: true,
        no_generated_addresses: true,
        up: Some(true),
        ..Change::default()
    };
    change.apply(request);
    // Nobody but the guest is here, whatever it says: a neighbour for each address that it makes up would fill a
    // table that all namespaces share.
    let mut add = |gateway: IpAddr, guest: IpAddr| {
        let mut address = Address::new(index, gateway.into());
        address.peer = Some(guest);
        address.add(request);
        Neighbour {
            interface: index,
            address: guest,
            mac: nic.guest_mac.0,
        }
        .add(request);
    };
    if let Some(ipv4) = nic.ipv4 {
        add(ipv4.gateway.into(), ipv4.guest.addr().into());
    }
    if let Some(ipv6) = nic.ipv6 {
        add(ipv6.gateway.into(), ipv6.guest.addr().into());
        Address::new(index, IpAddr::V6(GATEWAY_IPV6).into()).add(request);
    }
}

/// Raises the host's end: alias, neighbours and routes for the clone addresses; and a qdisc for filters
/// to come, if it is new. Returns its number.
pub(super) fn configure_host_end(
    worker: &mut Worker,
    slot: &SlotPlan,
    is_new: bool,
) -> Result<InterfaceIndex, NetworkError> {
    let index = host_end_index(&mut worker.route, slot)?;
    let mut request = Request::new();
    let qdiscs = match is_new && worker.has_qdiscs {
        true => filters::prepare(&mut request, [index]),
        false => 0,
    };
    // Before the interface is raised: the kernel handles that event while holding the lock that
    // every further message has to wait for.
    let neighbours = slot
        .clone_addresses()
        .chain(slot.transit.map(|transit| transit.slot.into()));
    for address in neighbours {
        Neighbour {
            interface: index,
            address,
            mac: slot.veth_mac.0,
        }
        .add(&mut request);
    }
    raise_host_end(&mut request, slot, index);
    if let Some(transit) = slot.transit {
        let mut address = Address::new(index, IpAddr::V4(transit.host).into());
        address.peer = Some(transit.slot.into());
        address.add(&mut request);
    }
    for address in slot.clone_addresses() {
        Route::new(address.into(), Target::Interface(index)).add(&mut request);
    }
    worker.has_qdiscs &= filters::execute_prepared(&mut worker.route, request, qdiscs)?;
    Ok(index)
}

/// Number of the host's end.
pub(super) fn host_end_index(
    route: &mut Socket,
    slot: &SlotPlan,
) -> Result<InterfaceIndex, NetworkError> {
    let name = &slot.host_interface;
    let found = interface::find(route, name)?;
    found
        .map(|interface| interface.index)
        .ok_or_else(|| KernelError::missing_interface(name).into())
}

/// Takes away what leads to the host's end but isn't part of it: neighbours and routes. What is
/// missing is fine.
pub(super) fn remove_host_routes(
    route: &mut Socket,
    slot: &SlotPlan,
    index: InterfaceIndex,
) -> Result<(), NetworkError> {
    let mut request = Request::new();
    for address in slot.clone_addresses() {
        Route::new(address.into(), Target::Interface(index)).delete(&mut request);
    }
    if let Some(transit) = slot.transit {
        let mut address = Address::new(index, IpAddr::V4(transit.host).into());
        address.peer = Some(transit.slot.into());
        address.delete(&mut request);
    }
    let failures = route.execute_all(request);
    let failed = failures.into_iter().find(|(_, error)| !error.is_missing());
    failed.map_or(Ok(()), |(_, error)| Err(error.into()))
}

/// Numbers of the TAPs inside a slot's namespace.
pub(super) fn tap_indexes(slot: &SlotPlan) -> impl Iterator<Item = InterfaceIndex> + use<> {
    (0..slot.nics.len()).map(tap_index)
}

/// The programs inside a slot's namespace: on the TAPs, and on the veth's end.
pub(super) fn attachments_inside(slot: &SlotPlan) -> Vec<Attachment> {
    let taps = tap_indexes(slot).map(Attachment::tap);
    [Attachment::uplink(UPLINK, slot)]
        .into_iter()
        .chain(taps)
        .collect()
}

/// Gives the veth's host end its alias and settings, and raises it.
pub(super) fn raise_host_end(request: &mut Request, slot: &SlotPlan, index: InterfaceIndex) {
    raise(request, slot, &slot.host_interface, index);
}

/// Gives an interface of the host its alias and settings, and raises it.
pub(super) fn raise(request: &mut Request, slot: &SlotPlan, name: &str, index: InterfaceIndex) {
    // Two changes, not one: told about anything else along with raising an interface, the kernel
    // reports a second event for it.
    let named = Change {
        name,
        index: Some(index),
        ..Change::default()
    };
    let settings = Change {
        alias: Some(&slot.host_alias),
        ipv4_forwarding: Some(true),
        no_generated_addresses: true,
        ..named
    };
    settings.apply(request);
    let raised = Change {
        up: Some(true),
        ..named
    };
    raised.apply(request);
}

/// Deletes the multicast route of a host end that was raised a while ago.
pub(super) fn drop_multicast_route(route: &mut Socket, host_end: InterfaceIndex) {
    let mut request = Request::new();
    route::delete_multicast(&mut request, host_end);
    // Missing is as good; the slot may be gone, or its carrier not be reported yet.
    drop(route.execute(request));
}
