//! What the eBPF data path is told of a slot's interface before anybody leases it.
//!
//! All of it follows from the slot's plan and two numbers of the kernel's; what a tenant adds is not here.

use sandwire_api::attach::DeviceChoice;
use sandwire_datapath::abi::{self, NicFlag, NicState, network_order};
use sandwire_kernel_net::interface::InterfaceIndex;

use super::host::SHARED_MAC;
use crate::plan::{NicPlan, SlotPlan};

/// Flags that the kind of slot decides.
pub(super) const BY_KIND: u32 = NicFlag::Netns.number()
    | NicFlag::Peer.number()
    | NicFlag::Child.number()
    | NicFlag::SharedMac.number();

/// The entry of one interface of a slot that nobody leases.
pub(super) fn entry_of(
    slot: &SlotPlan,
    nic: usize,
    host_end: InterfaceIndex,
    shared: InterfaceIndex,
) -> abi::Nic {
    let plan: &NicPlan = &slot.nics[nic];
    let narrow = |number: usize| u8::try_from(number).expect("a slot has at most 8 interfaces");
    let mut entry = abi::Nic {
        state: NicState::Ready.number(),
        ifindex: host_end.0,
        shared_ifindex: shared.0,
        mtu: slot.mtu,
        guest_mac: plan.guest_mac.0,
        gateway_mac: plan.gateway_mac.0,
        shared_mac: SHARED_MAC,
        slot: slot.number.0,
        pool: slot.pool_number,
        position: narrow(nic),
        count: narrow(slot.nics.len()),
        ..abi::Nic::default()
    };
    if slot.has_netns() {
        entry.flags = NicFlag::Netns.number();
        entry.veth_mac = slot.veth_mac.0;
    }
    if slot.is_child() {
        entry.flags = NicFlag::Child.number();
        if slot.device == DeviceChoice::Ipvlan {
            entry.flags |= NicFlag::SharedMac.number();
        }
    } else if slot.is_container() {
        entry.flags = NicFlag::Peer.number();
    }
    if let Some(ipv4) = plan.ipv4 {
        entry.guest4 = network_order(ipv4.guest.addr());
        entry.clone4 = network_order(ipv4.clone_address);
        entry.gateway4 = network_order(ipv4.gateway);
    }
    if let Some(ipv6) = plan.ipv6 {
        entry.has_ipv6 = 1;
        entry.guest6 = ipv6.guest.addr().into();
        entry.clone6 = ipv6.clone_address.into();
        entry.gateway6 = ipv6.gateway.into();
    }
    entry
}
