//! What the kernel says of a slot's TAP: whether it is ours, whether a VMM sits on it, and what went through.

use sandwire_api::{
    lease::{TapStatus, TrafficCount},
    slot::TapUse,
};
use sandwire_kernel_net::interface::Interface;

use crate::plan::{NicPlan, SlotPlan};

/// In a namespace of the slot's own a TAP is told from others' by its MAC, in the host's by its alias: there udevd may have
/// exchanged the MAC.
pub(super) fn tap_use(slot: &SlotPlan, nic: &NicPlan, found: Option<&Interface>) -> TapUse {
    let Some(found) = found else {
        return TapUse::Missing;
    };
    let is_marked = match slot.has_netns() {
        true => found.mac == Some(nic.gateway_mac.0),
        false => found.alias.as_deref() == Some(&*slot.host_alias),
    };
    let is_tap = found.tun.is_some_and(|tun| tun.is_tap && tun.is_persistent);
    match (is_tap && is_marked, found.has_carrier) {
        (false, _) => TapUse::Foreign,
        (true, true) => TapUse::Attached,
        (true, false) => TapUse::Unused,
    }
}

/// Whether any user of its namespace may open it: it has neither owner nor group, as host slots of former versions.
pub(super) fn is_for_anybody(found: &Interface) -> bool {
    found
        .tun
        .is_some_and(|tun| tun.owner.is_none() && tun.group.is_none())
}

/// What a TAP receives is what the sandbox sends.
pub(super) fn tap_status(nic: &NicPlan, used: TapUse, found: Option<&Interface>) -> TapStatus {
    let traffic = found.map(|found| found.traffic).unwrap_or_default();
    TapStatus {
        tap: nic.tap.clone(),
        used,
        egress: TrafficCount {
            packets: traffic.received_packets,
            bytes: traffic.received_bytes,
            dropped: traffic.received_dropped,
        },
        ingress: TrafficCount {
            packets: traffic.sent_packets,
            bytes: traffic.sent_bytes,
            dropped: traffic.sent_dropped,
        },
    }
}
