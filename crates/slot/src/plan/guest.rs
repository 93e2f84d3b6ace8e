//! What the guest believes, per interface: the settings moved up by one subnet each.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sandwire_api::{pool::PoolSpec, slot::MacAddress};

use super::names;
use crate::error::PlanError;

/// One interface of the guest, the same in every slot of the pool.
pub(super) struct GuestNic {
    pub(super) tap: String,
    pub(super) mac: MacAddress,
    pub(super) gateway_mac: MacAddress,
    pub(super) ipv4: Option<(Ipv4Net, Ipv4Addr)>,
    pub(super) ipv6: Option<(Ipv6Net, Ipv6Addr)>,
}

/// The guest's interfaces, in order.
pub(super) fn nics(spec: &PoolSpec) -> Result<Vec<GuestNic>, PlanError> {
    let guest = &spec.guest;
    (0u8..)
        .zip(names::taps(spec)?)
        .map(|(nic, tap)| {
            Ok(GuestNic {
                tap,
                mac: count_on("guest.mac", guest.mac, nic)?,
                gateway_mac: count_on("guest.gateway_mac", guest.gateway_mac, nic)?,
                ipv4: ipv4(spec, nic)?,
                ipv6: ipv6(spec, nic)?,
            })
        })
        .collect()
}

/// The guest's subnets, one per interface and family.
pub(super) fn subnets(spec: &PoolSpec) -> Result<Vec<IpNet>, PlanError> {
    let mut subnets = Vec::new();
    for nic in 0..spec.nics {
        subnets.extend(ipv4(spec, nic)?.map(|(guest, _)| IpNet::V4(guest.trunc())));
        subnets.extend(ipv6(spec, nic)?.map(|(guest, _)| IpNet::V6(guest.trunc())));
    }
    Ok(subnets)
}

/// Guest address and gateway of one interface.
fn ipv4(spec: &PoolSpec, nic: u8) -> Result<Option<(Ipv4Net, Ipv4Addr)>, PlanError> {
    let Some(first) = spec.guest.ipv4 else {
        return Ok(None);
    };
    let gateway = spec.guest.ipv4_gateway;
    let gateway = gateway.unwrap_or(Ipv4Addr::from_bits(first.network().to_bits() | 1));
    let move_up = |address: Ipv4Addr| {
        let step = 1u64 << (32 - first.prefix_len());
        let moved = u64::from(address.to_bits()) + u64::from(nic) * step;
        u32::try_from(moved).map(Ipv4Addr::from_bits).map_err(|_| {
            let address = address.to_string();
            no_room_above("guest.ipv4", address)
        })
    };
    let guest = Ipv4Net::new_assert(move_up(first.addr())?, first.prefix_len());
    Ok(Some((guest, move_up(gateway)?)))
}

/// Guest address and gateway of one interface.
fn ipv6(spec: &PoolSpec, nic: u8) -> Result<Option<(Ipv6Net, Ipv6Addr)>, PlanError> {
    let Some(first) = spec.guest.ipv6 else {
        return Ok(None);
    };
    let gateway = spec.guest.ipv6_gateway;
    let gateway = gateway.unwrap_or(Ipv6Addr::from_bits(first.network().to_bits() | 1));
    let move_up = |address: Ipv6Addr| {
        let steps = u128::from(nic);
        let up = steps.checked_mul(1u128.checked_shl(128 - u32::from(first.prefix_len()))?)?;
        address.to_bits().checked_add(up).map(Ipv6Addr::from_bits)
    };
    // A prefix of length 0 has no subnet above it, but its first interface needs none.
    let move_up = |address: Ipv6Addr| match nic {
        0 => Ok(address),
        _ => move_up(address).ok_or_else(|| no_room_above("guest.ipv6", address.to_string())),
    };
    let guest = Ipv6Net::new_assert(move_up(first.addr())?, first.prefix_len());
    Ok(Some((guest, move_up(gateway)?)))
}

fn count_on(setting: &'static str, first: MacAddress, nic: u8) -> Result<MacAddress, PlanError> {
    let MacAddress([a, b, c, d, e, last]) = first;
    let last = last.checked_add(nic).ok_or(PlanError::GuestAddress {
        setting,
        address: first.to_string(),
        reason: "has too large a last byte to count on from for the further interfaces",
    })?;
    Ok(MacAddress([a, b, c, d, e, last]))
}

fn no_room_above(setting: &'static str, address: String) -> PlanError {
    PlanError::GuestAddress {
        setting,
        address,
        reason: "leaves no room above it for the subnets of the further interfaces",
    }
}
