//! Slot numbers to clone addresses, and back.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv4Subnets, Ipv6Net, Ipv6Subnets};
use sandwire_api::{
    pool::{AddressPlan, PoolSpec},
    slot::SlotKind,
};

use super::Transit;

/// Addresses at the start of a clone prefix that no slot gets: the network's own (in IPv6 the
/// subnet-router anycast address) and the host's.
const KEPT_FOR_HOST: u32 = 2;
/// The third byte of the scheme's addresses takes 30 steps of eight, the second 256.
const FIRECRACKER_STEPS: u32 = 30;
const FIRECRACKER_NUMBERS_MAX: u32 = FIRECRACKER_STEPS * 256;

/// Prefix that the pool's IPv4 clone addresses are counted up in.
pub(super) fn ipv4_prefix(spec: &PoolSpec) -> Option<Ipv4Net> {
    match spec.addresses {
        AddressPlan::Prefix { ipv4, .. } => ipv4,
        AddressPlan::FirecrackerClones { .. } => None,
    }
}

/// Prefix that the pool's IPv6 clone addresses are counted up in.
pub(super) fn ipv6_prefix(spec: &PoolSpec) -> Option<Ipv6Net> {
    match spec.addresses {
        AddressPlan::Prefix { ipv6, .. } | AddressPlan::FirecrackerClones { ipv6 } => ipv6,
    }
}

/// Whether sandboxes have IPv4: guests by what they believe, containers by what there is for them.
pub(super) fn has_ipv4(spec: &PoolSpec) -> bool {
    match spec.kind {
        SlotKind::Container => ipv4_prefix(spec).is_some(),
        SlotKind::Netns | SlotKind::Host => spec.guest.ipv4.is_some(),
    }
}

/// Whether sandboxes have IPv6.
pub(super) fn has_ipv6(spec: &PoolSpec) -> bool {
    match spec.kind {
        SlotKind::Container => ipv6_prefix(spec).is_some(),
        SlotKind::Netns | SlotKind::Host => spec.guest.ipv6.is_some(),
    }
}

/// How many clone addresses fit.
pub(super) fn ipv4_capacity(prefix: Ipv4Net) -> u32 {
    let addresses = 1u64 << (32 - prefix.prefix_len());
    let broadcast = 1;
    let usable = addresses.saturating_sub(u64::from(KEPT_FOR_HOST) + broadcast);
    u32::try_from(usable).unwrap_or(u32::MAX)
}

/// How many clone addresses fit, up to `u32::MAX`.
pub(super) fn ipv6_capacity(prefix: Ipv6Net) -> u32 {
    1u32.checked_shl(128 - u32::from(prefix.prefix_len()))
        .map_or(u32::MAX, |addresses| {
            addresses.saturating_sub(KEPT_FOR_HOST)
        })
}

/// The host's own address in a prefix.
pub(super) fn ipv4_host(prefix: Ipv4Net) -> Ipv4Addr {
    Ipv4Addr::from_bits(prefix.network().to_bits() + 1)
}

/// The host's own address in a prefix.
pub(super) fn ipv6_host(prefix: Ipv6Net) -> Ipv6Addr {
    Ipv6Addr::from_bits(prefix.network().to_bits() + 1)
}

/// The IPv4 clone address at an index below the capacity.
pub(super) fn ipv4_clone(spec: &PoolSpec, index: u32) -> Ipv4Addr {
    match ipv4_prefix(spec) {
        Some(prefix) => Ipv4Addr::from_bits(prefix.network().to_bits() + KEPT_FOR_HOST + index),
        None => firecracker_clone(index),
    }
}

/// The IPv6 clone address at an index below the capacity.
pub(super) fn ipv6_clone(prefix: Ipv6Net, index: u32) -> Ipv6Addr {
    Ipv6Addr::from_bits(prefix.network().to_bits() + u128::from(KEPT_FOR_HOST) + u128::from(index))
}

/// Inverse of [`ipv4_clone`] and [`ipv6_clone`]; the index may lie beyond the pool's slots.
pub(super) fn index_of(spec: &PoolSpec, address: IpAddr) -> Option<u32> {
    let index = match address {
        IpAddr::V4(address) => match ipv4_prefix(spec) {
            Some(prefix) => address
                .to_bits()
                .checked_sub(prefix.network().to_bits())?
                .checked_sub(KEPT_FOR_HOST)?,
            None => firecracker_index(spec, address)?,
        },
        IpAddr::V6(address) => {
            let offset = address
                .to_bits()
                .checked_sub(ipv6_prefix(spec)?.network().to_bits())?;
            let index = offset.checked_sub(u128::from(KEPT_FOR_HOST))?;
            u32::try_from(index).ok()?
        }
    };
    Some(index)
}

/// `192.168.<n/30>.<(n%30)*8+3>`
fn firecracker_clone(number: u32) -> Ipv4Addr {
    let (third, fourth) = firecracker_bytes(number);
    Ipv4Addr::new(192, 168, third, fourth + 3)
}

fn firecracker_index(spec: &PoolSpec, address: Ipv4Addr) -> Option<u32> {
    matches!(spec.addresses, AddressPlan::FirecrackerClones { .. }).then_some(())?;
    let [_, _, third, fourth] = address.octets();
    let step = u32::from(fourth.checked_sub(3)? / 8);
    let number = u32::from(third) * FIRECRACKER_STEPS + step;
    (step < FIRECRACKER_STEPS && firecracker_clone(number) == address).then_some(number)
}

/// `10.<n/30>.<(n%30)*8>.1` on the host and `.2` in the slot.
pub(super) fn firecracker_transit(number: u32) -> Transit {
    let (second, third) = firecracker_bytes(number);
    Transit {
        host: Ipv4Addr::new(10, second, third, 1),
        slot: Ipv4Addr::new(10, second, third, 2),
    }
}

/// How many numbers the scheme has before it overflows or meets the guest's subnet.
pub(super) fn firecracker_capacity(guest: Ipv4Net) -> u32 {
    let guest = IpNet::V4(guest.trunc());
    (0..FIRECRACKER_NUMBERS_MAX)
        .find(|&number| {
            let transit = Ipv4Net::new_assert(firecracker_transit(number).host, 24);
            guest.contains(&IpAddr::V4(firecracker_clone(number)))
                || super::overlap(guest, IpNet::V4(transit))
        })
        .unwrap_or(FIRECRACKER_NUMBERS_MAX)
}

/// The fewest prefixes that hold the first `count` clone addresses and nothing of the guest's subnet.
pub(super) fn firecracker_prefixes(count: u32, guest: Ipv4Net) -> Vec<IpNet> {
    let first = Ipv4Addr::new(192, 168, 0, 0).to_bits();
    let last = firecracker_clone(count.saturating_sub(1)).to_bits() | 7;
    let guest = guest.network().to_bits()..=guest.broadcast().to_bits();
    let mut ranges = vec![(first, last)];
    if (first..=last).contains(guest.start()) {
        // The subnet lies between clone addresses: the scheme leaves five of each eight unused.
        ranges = vec![(first, guest.start() - 1), (guest.end() + 1, last)];
    }
    ranges
        .into_iter()
        .filter(|(start, end)| start <= end)
        .flat_map(|(start, end)| prefixes(start, end))
        .collect()
}

/// The fewest prefixes that hold the transit addresses of the first `count` numbers.
pub(super) fn firecracker_transit_prefixes(count: u32) -> Vec<IpNet> {
    let first = Ipv4Addr::new(10, 0, 0, 0).to_bits();
    let last = firecracker_transit(count.saturating_sub(1)).host.to_bits() | 255;
    prefixes(first, last).collect()
}

/// The fewest prefixes that hold a prefix but for one address, which is neither its first nor its last.
pub(super) fn around_ipv4(prefix: Ipv4Net, hole: Ipv4Addr) -> Vec<IpNet> {
    let hole = hole.to_bits();
    let below = prefixes(prefix.network().to_bits(), hole - 1);
    below
        .chain(prefixes(hole + 1, prefix.broadcast().to_bits()))
        .collect()
}

/// As [`around_ipv4`].
pub(super) fn around_ipv6(prefix: Ipv6Net, hole: Ipv6Addr) -> Vec<IpNet> {
    let address = |bits: u128| Ipv6Addr::from_bits(bits);
    let below = Ipv6Subnets::new(prefix.network(), address(hole.to_bits() - 1), 0);
    let above = Ipv6Subnets::new(address(hole.to_bits() + 1), prefix.broadcast(), 0);
    below.chain(above).map(IpNet::V6).collect()
}

fn prefixes(start: u32, end: u32) -> impl Iterator<Item = IpNet> {
    Ipv4Subnets::new(Ipv4Addr::from_bits(start), Ipv4Addr::from_bits(end), 0).map(IpNet::V4)
}

/// `n/30` and `(n%30)*8`.
fn firecracker_bytes(number: u32) -> (u8, u8) {
    let byte = |value: u32| u8::try_from(value).expect("numbers stay below 7680");
    (
        byte(number / FIRECRACKER_STEPS),
        byte(number % FIRECRACKER_STEPS * 8),
    )
}
