//! Container slots: an interface whose own address is the clone address, behind a gateway that only the data
//! path plays.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use sandwire_api::{
    pool::{AddressPlan, GuestSpec, PolicySpec, PoolSpec, TapSpec, UplinkPolicy},
    slot::MacAddress,
};

use super::{NicIpv4Plan, NicIpv6Plan, NicPlan, SlotNumber, addresses, names};
use crate::error::PlanError;

/// The gateway of every container. Link-local, and never seen outside its interface.
pub const GATEWAY_IPV4: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// The same for IPv6.
pub const GATEWAY_IPV6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// Refuses settings that are about guests, and what needs a veth with addresses at its ends.
pub(super) fn check(spec: &PoolSpec) -> Result<(), PlanError> {
    let refuse = |setting, value: String, reason| {
        Err(PlanError::Unsupported {
            setting,
            value,
            reason,
        })
    };
    let AddressPlan::Prefix { ipv4, ipv6 } = spec.addresses else {
        let reason =
            "gives addresses to guests behind TAPs, which containers aren't: use plan = prefix";
        return refuse("addresses.plan", "firecracker_clones".to_owned(), reason);
    };
    if ipv4.is_none() && ipv6.is_none() {
        return Err(PlanError::NoPrefixes);
    }
    check_parent(spec)?;
    if spec.nics != 1 {
        let reason = "can't be with kind = container: attach several leases to one namespace";
        return refuse("nics", spec.nics.to_string(), reason);
    }
    let only_mtu = TapSpec {
        mtu: spec.tap.mtu,
        ..TapSpec::default()
    };
    if spec.tap != only_mtu {
        let reason =
            "is about a TAP, which kind = container doesn't have: set nothing there but mtu";
        return refuse("tap", spec.tap.name.clone(), reason);
    }
    let unset = GuestSpec::default();
    let only_gateway = GuestSpec {
        gateway_mac: spec.guest.gateway_mac,
        // A family that the pool lacks may be said to be lacking.
        ipv4: spec.guest.ipv4.and(unset.ipv4),
        ipv6: spec.guest.ipv6.and(unset.ipv6),
        ..unset
    };
    if spec.guest != only_gateway {
        let reason = "is about guests with an address of their own: with kind = container set nothing there \
                      but gateway_mac, the addresses are those of [pool.addresses]";
        return refuse("guest", spec.guest.mac.to_string(), reason);
    }
    Ok(())
}

/// Children have a parent, and nobody else has; its network is one that they can be on.
pub(super) fn check_parent(spec: &PoolSpec) -> Result<(), PlanError> {
    let (parent, device) = ("parent", "device = macvlan or ipvlan");
    let Some(wanted) = &spec.parent else {
        return match spec.device.is_child() {
            true => Err(PlanError::OneSided {
                present: device,
                absent: parent,
            }),
            false => Ok(()),
        };
    };
    if !spec.device.is_child() {
        return Err(PlanError::OneSided {
            present: parent,
            absent: device,
        });
    }
    let refuse = |setting, value: String, reason| {
        Err(PlanError::Unsupported {
            setting,
            value,
            reason,
        })
    };
    for (place, gateway) in wanted.gateways.iter().enumerate() {
        let has_family = match gateway {
            IpAddr::V4(_) => addresses::ipv4_prefix(spec).is_some(),
            IpAddr::V6(_) => addresses::ipv6_prefix(spec).is_some(),
        };
        let reason = if !has_family {
            "is of a family that the pool has no addresses of"
        } else if gateway.is_unspecified() || gateway.is_multicast() || gateway.is_loopback() {
            "can't be a neighbour's address"
        } else if wanted.gateways[..place]
            .iter()
            .any(|before| before.is_ipv4() == gateway.is_ipv4())
        {
            "is the second of its family: name one of each"
        } else {
            continue;
        };
        return refuse("parent.gateways", gateway.to_string(), reason);
    }
    for subnet in &wanted.subnets {
        if subnet.trunc() != *subnet || subnet.prefix_len() == 0 {
            let reason =
                "is not a prefix: its bits behind the length must be zero, and the length not";
            return refuse("parent.subnets", subnet.to_string(), reason);
        }
    }
    Ok(())
}

/// Refuses what a policy can ask of the host alone, by whose network stack no packet of a child comes.
pub(super) fn check_policy_of_child(policy: &PolicySpec) -> Result<(), PlanError> {
    let unset = PolicySpec::default();
    let number = |value: Option<u32>| value.map(|value| value.to_string()).unwrap_or_default();
    let (setting, value) = if policy.uplink == UplinkPolicy::Masquerade {
        ("policy.uplink", "masquerade".to_owned())
    } else if policy.host_services != unset.host_services {
        ("policy.host_services", "a list".to_owned())
    } else if policy.route_mark.is_some() {
        ("policy.route_mark", number(policy.route_mark))
    } else if policy.route_table.is_some() {
        ("policy.route_table", number(policy.route_table))
    } else {
        return Ok(());
    };
    Err(PlanError::Unsupported {
        setting,
        value,
        reason: "is about the host's network stack, by which packets of a child don't come: \
                 its parent's network knows it by its own address; use uplink = route or deny, and nothing of the host",
    })
}

/// The container's interface.
pub(super) fn nic(spec: &PoolSpec, tag: &str, number: SlotNumber) -> NicPlan {
    let ipv4 = addresses::ipv4_prefix(spec).map(|_| {
        let address = addresses::ipv4_clone(spec, number.0);
        NicIpv4Plan {
            guest: Ipv4Net::from(address),
            gateway: GATEWAY_IPV4,
            clone_address: address,
        }
    });
    let ipv6 = addresses::ipv6_prefix(spec).map(|prefix| {
        let address = addresses::ipv6_clone(prefix, number.0);
        NicIpv6Plan {
            guest: Ipv6Net::from(address),
            gateway: GATEWAY_IPV6,
            clone_address: address,
        }
    });
    NicPlan {
        tap: names::host_interface(tag, number),
        guest_mac: mac_of(ipv4, ipv6),
        gateway_mac: spec.guest.gateway_mac,
        ipv4,
        ipv6,
    }
}

/// Nobody else is on a pair's link, but software takes an Ethernet address for something unique: so it is made of
/// the address. Of leases that lack IPv4, those of former versions keep this one; see
/// [`mac_of_all`].
fn mac_of(ipv4: Option<NicIpv4Plan>, ipv6: Option<NicIpv6Plan>) -> MacAddress {
    let last = match (ipv4, ipv6) {
        (Some(ipv4), _) => ipv4.clone_address.octets(),
        (None, Some(ipv6)) => {
            let [.., a, b, c, d] = ipv6.clone_address.octets();
            [a, b, c, d]
        }
        (None, None) => [0; 4],
    };
    let [a, b, c, d] = last;
    MacAddress([0x06, 0x73, a, b, c, d])
}

/// The Ethernet address of an interface that has IPv6 alone, made of its whole address: the last four bytes are the same
/// in two pools' prefixes, whose macvlan children may be on one network. No two slots of a pool have the same, and none
/// has one that is made of an IPv4 address.
pub(super) fn mac_of_all(address: Ipv6Addr) -> MacAddress {
    let [network @ .., a, b, c, d] = address.octets();
    // FNV-1a: https://datatracker.ietf.org/doc/draft-eastlake-fnv/
    let hash = network
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
    let [.., e, f, g, h, i] = (hash >> 40 ^ hash).to_be_bytes();
    MacAddress([0x0a, e, f ^ a, g ^ b, h ^ c, i ^ d])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_end_alike_have_macs_of_their_own() {
        let mac = |text: &str| mac_of_all(text.parse().unwrap());
        let all = [
            "fd00:1::2",
            "fd00:2::2",
            "fd00:1:0:1::2",
            "fd00:1::1:0:2",
            "fd00:1::3",
        ];
        let macs: std::collections::BTreeSet<_> = all.iter().map(|text| mac(text).0).collect();
        assert_eq!(macs.len(), all.len());
        // Kept with leases by what they are made of: never change it.
        assert_eq!(mac("fd00:1::2").to_string(), "0a:57:2f:ba:f9:66");
        let MacAddress([first, ..]) = mac("fd00:1::2");
        assert_eq!(first & 3, 2, "it is one station's, and of nobody's making");
    }
}
