//! Container slots: an interface whose own address is the clone address, behind a gateway that only the data
//! path plays.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use sandwire_api::{
    pool::{AddressPlan, GuestSpec, PoolSpec, TapSpec},
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

/// Nobody else is on its link, but software takes an Ethernet address for something unique: so it is made of
/// the address.
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
