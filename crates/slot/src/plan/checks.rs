//! What settings must satisfy before anything is planned from them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sandwire_api::{
    attach::DeviceChoice,
    pool::{AddressPlan, PolicySpec, PoolSpec, TapSpec},
    slot::{DataPath, MacAddress, SlotKind},
};

use super::{addresses, check_policy, container, guest, guest::GuestNic, overlap};
use crate::error::PlanError;

/// Numbers stay below this. A host meets other limits long before.
const SLOTS_MAX: u32 = 65_000;
const NICS_MAX: u8 = 8;
/// IPv6 needs 1280; the kernel's TAP takes 65521.
const MTU: std::ops::RangeInclusive<u32> = 1280..=65_521;

/// Refuses what can't work.
pub(super) fn check(spec: &PoolSpec) -> Result<(), PlanError> {
    check_support(spec)?;
    check_ranges(spec)?;
    check_macs(spec)?;
    if spec.kind == SlotKind::Container {
        container::check(spec)?;
        return check_clone_prefixes(spec);
    }
    if spec.device != DeviceChoice::default() {
        return Err(PlanError::Unsupported {
            setting: "device",
            value: spec.device.name().to_owned(),
            reason: "says what interface a container gets: only with kind = container",
        });
    }
    container::check_parent(spec)?;
    check_families(spec)?;
    for nic in guest::nics(spec)? {
        check_guest(spec, &nic)?;
    }
    check_clone_prefixes(spec)
}

/// How many slots the settings have room for.
pub(super) fn slots_max(spec: &PoolSpec) -> Result<u32, PlanError> {
    let nics = u32::from(spec.nics);
    let ipv4_capacity = match (addresses::ipv4_prefix(spec), spec.guest.ipv4) {
        (Some(prefix), _) => at_least_one(
            "addresses.ipv4",
            IpNet::V4(prefix),
            addresses::ipv4_capacity(prefix) / nics,
        )?,
        (None, Some(guest)) if spec.kind != SlotKind::Container => {
            match addresses::firecracker_capacity(guest) {
                0 => {
                    return Err(PlanError::Overlap {
                        setting: "guest.ipv4",
                        prefix: IpNet::V4(guest),
                        with: IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(192, 168, 0, 0), 24)),
                        what: "the first addresses of plan = firecracker_clones \
                           (192.168.0.3, 10.0.0.1 and 10.0.0.2)",
                    });
                }
                numbers => numbers,
            }
        }
        (None, _) => u32::MAX,
    };
    let ipv6_capacity = match addresses::ipv6_prefix(spec) {
        Some(prefix) => at_least_one(
            "addresses.ipv6",
            IpNet::V6(prefix),
            addresses::ipv6_capacity(prefix) / nics,
        )?,
        None => u32::MAX,
    };
    let slots_max = ipv4_capacity.min(ipv6_capacity).min(SLOTS_MAX);
    check_range("size", spec.size, 0, slots_max)?;
    Ok(slots_max)
}

fn check_support(spec: &PoolSpec) -> Result<(), PlanError> {
    let refuse = |setting, value: &str, reason| {
        Err(PlanError::Unsupported {
            setting,
            value: value.to_owned(),
            reason,
        })
    };
    match (spec.kind, spec.data_path) {
        (_, DataPath::Auto) => refuse(
            "data_path",
            "auto",
            "is for creating a pool: name the data path that it is to have now",
        ),
        (SlotKind::Host, DataPath::Nft) => refuse(
            "kind",
            "host",
            "needs data_path = ebpf or xdp: with the same guest address in every slot of one \
             namespace, the kernel's routing has nothing to go by",
        ),
        (SlotKind::Container, DataPath::Nft | DataPath::Xdp) => refuse(
            "kind",
            "container",
            "needs data_path = ebpf, which alone judges packets at the container's own interface",
        ),
        (SlotKind::Netns, DataPath::Xdp) => refuse(
            "data_path",
            "xdp",
            "needs kind = host: in a namespace the packets have a veth to cross, where ebpf is as fast",
        ),
        _ => Ok(()),
    }?;
    if spec.kind == SlotKind::Host {
        if let AddressPlan::FirecrackerClones { .. } = spec.addresses {
            return refuse(
                "addresses.plan",
                "firecracker_clones",
                "gives addresses to the ends of veths, which host slots don't have: use plan = prefix",
            );
        }
        if spec.tap.name != TapSpec::default().name {
            return refuse(
                "tap.name",
                &spec.tap.name,
                "can't be chosen with kind = host: all its TAPs are in one namespace, so that each \
                 gets a name of its own",
            );
        }
    }
    check_policy_of(spec, &spec.policy)
}

/// Checks a policy for sandboxes of a pool.
pub(super) fn check_policy_of(spec: &PoolSpec, policy: &PolicySpec) -> Result<(), PlanError> {
    check_policy(policy, spec.data_path)?;
    check_policy_of_kind(spec, policy)
}

/// Refuses what pools of this kind alone can't have. Takes no time, however long the policy's lists are.
pub(super) fn check_policy_of_kind(spec: &PoolSpec, policy: &PolicySpec) -> Result<(), PlanError> {
    match spec.device.is_child() {
        true => container::check_policy_of_child(policy),
        false => Ok(()),
    }
}

fn check_ranges(spec: &PoolSpec) -> Result<(), PlanError> {
    let nics_max = match spec.addresses {
        AddressPlan::Prefix { .. } => NICS_MAX,
        AddressPlan::FirecrackerClones { .. } => 1,
    };
    check_range("nics", spec.nics, 1, nics_max)?;
    check_range("tap.mtu", spec.tap.mtu, *MTU.start(), *MTU.end())?;
    check_range(
        "policy.connections_max",
        spec.policy.connections_max,
        1,
        u32::MAX,
    )
}

pub(super) fn check_range<T: Into<u64>>(
    setting: &'static str,
    value: T,
    min: T,
    max: T,
) -> Result<(), PlanError> {
    let (value, min, max) = (value.into(), min.into(), max.into());
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(PlanError::Range {
        setting,
        value,
        min,
        max,
    })
}

fn check_macs(spec: &PoolSpec) -> Result<(), PlanError> {
    let guest = &spec.guest;
    for (setting, address) in [
        ("guest.mac", guest.mac),
        ("guest.gateway_mac", guest.gateway_mac),
    ] {
        let MacAddress([first, ..]) = address;
        let is_group = first & 1 != 0;
        if is_group || address == MacAddress([0; 6]) {
            return Err(PlanError::NotUnicast { setting, address });
        }
    }
    let counts_on = |from: MacAddress| from.0[..5] == super::VETH_MAC.0[..5];
    if spec.data_path != DataPath::Nft && counts_on(guest.mac) {
        return Err(PlanError::Unsupported {
            setting: "guest.mac",
            value: guest.mac.to_string(),
            reason: "is among the addresses that the ebpf data path keeps for the ends of veths",
        });
    }
    if guest.mac == guest.gateway_mac {
        return Err(PlanError::SameMac { address: guest.mac });
    }
    Ok(())
}

fn check_families(spec: &PoolSpec) -> Result<(), PlanError> {
    let (has_ipv4, ipv4_setting) = match spec.addresses {
        AddressPlan::Prefix { ipv4, .. } => (ipv4.is_some(), "addresses.ipv4"),
        AddressPlan::FirecrackerClones { .. } => (true, "addresses.plan = firecracker_clones"),
    };
    let has_ipv6 = addresses::ipv6_prefix(spec).is_some();
    for (clone, guest, clone_setting, guest_setting) in [
        (
            has_ipv4,
            spec.guest.ipv4.is_some(),
            ipv4_setting,
            "guest.ipv4",
        ),
        (
            has_ipv6,
            spec.guest.ipv6.is_some(),
            "addresses.ipv6",
            "guest.ipv6",
        ),
    ] {
        match (clone, guest) {
            (true, false) => {
                return Err(PlanError::OneSided {
                    present: clone_setting,
                    absent: guest_setting,
                });
            }
            (false, true) => {
                return Err(PlanError::NoPrefix {
                    guest: guest_setting,
                    prefix: clone_setting,
                });
            }
            _ => {}
        }
    }
    let gateways = [
        (
            spec.guest.ipv4_gateway.is_some(),
            spec.guest.ipv4.is_some(),
            "guest.ipv4_gateway",
            "guest.ipv4",
        ),
        (
            spec.guest.ipv6_gateway.is_some(),
            spec.guest.ipv6.is_some(),
            "guest.ipv6_gateway",
            "guest.ipv6",
        ),
    ];
    for (gateway, guest, present, absent) in gateways {
        if gateway && !guest {
            return Err(PlanError::OneSided { present, absent });
        }
    }
    if spec.guest.ipv4.is_none() && spec.guest.ipv6.is_none() {
        return Err(PlanError::NoAddresses);
    }
    Ok(())
}

fn check_guest(spec: &PoolSpec, nic: &GuestNic) -> Result<(), PlanError> {
    if let Some((guest, gateway)) = nic.ipv4 {
        check_guest_subnet("guest.ipv4", IpNet::V4(guest), 30)?;
        let edges = [guest.network(), guest.broadcast()];
        check_in_subnet(
            "guest.ipv4",
            guest.into(),
            guest.addr().into(),
            edges.map(IpAddr::V4),
        )?;
        check_in_subnet(
            "guest.ipv4_gateway",
            guest.into(),
            gateway.into(),
            edges.map(IpAddr::V4),
        )?;
        check_apart("guest.ipv4_gateway", gateway.into(), guest.addr().into())?;
    }
    if let Some((guest, gateway)) = nic.ipv6 {
        check_guest_subnet("guest.ipv6", IpNet::V6(guest), 126)?;
        let edges = [IpAddr::V6(guest.network())];
        check_in_subnet("guest.ipv6", guest.into(), guest.addr().into(), edges)?;
        check_in_subnet("guest.ipv6_gateway", guest.into(), gateway.into(), edges)?;
        check_apart("guest.ipv6_gateway", gateway.into(), guest.addr().into())?;
    }
    for (clone, guest, setting) in [
        (
            addresses::ipv4_prefix(spec).map(IpNet::V4),
            nic.ipv4.map(|(guest, _)| IpNet::V4(guest)),
            "guest.ipv4",
        ),
        (
            addresses::ipv6_prefix(spec).map(IpNet::V6),
            nic.ipv6.map(|(guest, _)| IpNet::V6(guest)),
            "guest.ipv6",
        ),
    ] {
        if let (Some(with), Some(prefix)) = (clone, guest)
            && overlap(with, prefix)
        {
            let what = "the clone prefix: guests would look for their siblings on their own wire";
            return Err(PlanError::Overlap {
                setting,
                prefix,
                with,
                what,
            });
        }
    }
    Ok(())
}

fn check_guest_subnet(
    setting: &'static str,
    guest: IpNet,
    length_max: u8,
) -> Result<(), PlanError> {
    if guest.prefix_len() > length_max {
        return Err(PlanError::TooSmall {
            setting,
            prefix: guest,
            reason: "the guest's subnet must hold the guest and its gateway",
        });
    }
    check_reserved(setting, guest)
}

fn check_in_subnet<const N: usize>(
    setting: &'static str,
    subnet: IpNet,
    address: IpAddr,
    edges: [IpAddr; N],
) -> Result<(), PlanError> {
    let reason = if !subnet.contains(&address) {
        "is not in the guest's subnet"
    } else if edges.contains(&address) {
        "is the guest's subnet itself or its broadcast address"
    } else {
        return Ok(());
    };
    Err(PlanError::GuestAddress {
        setting,
        address: address.to_string(),
        reason,
    })
}

fn check_apart(setting: &'static str, gateway: IpAddr, guest: IpAddr) -> Result<(), PlanError> {
    if gateway != guest {
        return Ok(());
    }
    Err(PlanError::GuestAddress {
        setting,
        address: gateway.to_string(),
        reason: "is the guest's own address",
    })
}

fn check_clone_prefixes(spec: &PoolSpec) -> Result<(), PlanError> {
    let ipv4 = addresses::ipv4_prefix(spec).map(|prefix| ("addresses.ipv4", IpNet::V4(prefix)));
    let ipv6 = addresses::ipv6_prefix(spec).map(|prefix| ("addresses.ipv6", IpNet::V6(prefix)));
    for (setting, prefix) in ipv4.into_iter().chain(ipv6) {
        let truncated = prefix.trunc();
        if truncated != prefix {
            return Err(PlanError::HostBits {
                setting,
                prefix,
                truncated,
            });
        }
        check_reserved(setting, prefix)?;
    }
    Ok(())
}

fn at_least_one(setting: &'static str, prefix: IpNet, capacity: u32) -> Result<u32, PlanError> {
    match capacity {
        0 => Err(PlanError::TooSmall {
            setting,
            prefix,
            reason: "it must hold the host's address and those of at least one slot",
        }),
        capacity => Ok(capacity),
    }
}

/// Refuses what already means something else on every host.
fn check_reserved(setting: &'static str, prefix: IpNet) -> Result<(), PlanError> {
    match reserved()
        .into_iter()
        .find(|(with, _)| overlap(prefix, *with))
    {
        Some((with, what)) => Err(PlanError::Overlap {
            setting,
            prefix,
            with,
            what,
        }),
        None => Ok(()),
    }
}

fn reserved() -> [(IpNet, &'static str); 10] {
    let ipv4 = |a, b, length| IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, 0, 0), length));
    let ipv6 = |bytes, length| IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::from(bytes), length));
    let cloud_metadata = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
    [
        (ipv4(0, 0, 8), "which means this network"),
        (ipv4(127, 0, 8), "the loopback addresses"),
        (
            ipv4(169, 254, 16),
            "the link-local addresses, with the cloud's metadata service",
        ),
        (ipv4(224, 0, 4), "the multicast addresses"),
        (ipv4(240, 0, 4), "which is reserved"),
        (
            ipv6([0, 0, 0, 0, 0, 0, 0, 0], 96),
            "the unspecified and loopback addresses",
        ),
        (
            ipv6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96),
            "the IPv4-mapped addresses",
        ),
        (
            ipv6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),
            "the link-local addresses",
        ),
        (
            ipv6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8),
            "the multicast addresses",
        ),
        (
            IpNet::V6(Ipv6Net::new_assert(cloud_metadata, 128)),
            "the cloud's metadata service",
        ),
    ]
}
