//! From an identity's number to its loopback addresses. Pure.
//!
//! Numbers begin at 256, so that none has 127.0.0.0/16, which hosts use for themselves.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use sandwire_api::identity::LOOPBACK6;

/// The first number.
pub(crate) const FIRST: u32 = 256;
/// The last number. The next one has 127.255.255.255, the broadcast address of what hosts use for themselves: a socket that is bound
/// to it sends by whatever source the kernel chooses.
pub(crate) const LAST: u32 = 65_534;

/// The next number that is free after the one that was given out last: sockets of an identity that was removed keep its
/// number for as long as they are open.
pub(crate) fn next(used: &BTreeSet<u32>, last: u32) -> Option<u32> {
    let mut after = (last.max(FIRST - 1) + 1..=LAST).chain(FIRST..=LAST);
    after.find(|number| !used.contains(number))
}

/// The first of the 256 addresses that stand for 127.0.0.0/24.
pub(crate) fn loopback4(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(127 << 24 | (number & 0xffff) << 8)
}

/// The address that stands for `::1`.
pub(crate) fn loopback6(number: u32) -> Ipv6Addr {
    Ipv6Addr::from_bits(LOOPBACK6.network().to_bits() | u128::from(number))
}

/// Why an address can't be an identity's; `None` if it can.
pub(crate) fn objection(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(address) if address.is_loopback() => {
            Some("every identity has loopback addresses of its own")
        }
        IpAddr::V6(address) if address.is_loopback() => {
            Some("every identity has loopback addresses of its own")
        }
        IpAddr::V6(address) if address.to_ipv4_mapped().is_some() => Some("write it as IPv4"),
        IpAddr::V6(address) if address.is_unicast_link_local() => {
            Some("a link-local address needs an interface")
        }
        IpAddr::V6(address) if LOOPBACK6.contains(&address) => {
            Some("its prefix is that of the identities' loopback addresses")
        }
        IpAddr::V4(Ipv4Addr::BROADCAST) => Some("it is the broadcast address"),
        _ if address.is_unspecified() => Some("it is the wildcard"),
        _ if address.is_multicast() => Some("it is a multicast address"),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_loopback_addresses_of_its_own_outside_the_hosts() {
        let mut seen = BTreeSet::new();
        for number in FIRST..=LAST {
            let first = loopback4(number);
            assert!(first.is_loopback() && first.octets()[3] == 0, "{first}");
            assert_ne!(first.octets()[1], 0, "{first}");
            assert!(first.octets()[..3] != [127, 255, 255], "{first}");
            assert!(seen.insert(IpAddr::V4(first)));
            assert!(seen.insert(IpAddr::V6(loopback6(number))));
        }
        assert_eq!(loopback4(258).to_string(), "127.1.2.0");
        assert_eq!(loopback6(258).to_string(), "fd53:7764:6c6f:6f70::102");
    }

    #[test]
    fn numbers_are_given_out_in_turn() {
        let mut used = BTreeSet::new();
        assert_eq!(next(&used, 0), Some(256));
        used.extend([256, 257, 259]);
        assert_eq!(next(&used, 257), Some(258));
        assert_eq!(next(&used, 258), Some(260));
        assert_eq!(next(&used, LAST), Some(258));
        used.extend(FIRST..=LAST);
        assert_eq!(next(&used, 300), None);
    }

    #[test]
    fn addresses_that_mean_something_else_are_refused() {
        for address in [
            "127.0.0.1",
            "127.9.9.9",
            "::1",
            "0.0.0.0",
            "::",
            "224.0.0.1",
            "ff02::1",
            "fe80::1",
            "::ffff:192.0.2.1",
            "255.255.255.255",
            "fd53:7764:6c6f:6f70::1",
        ] {
            assert!(objection(address.parse().unwrap()).is_some(), "{address}");
        }
        for address in ["192.0.2.1", "10.0.0.0", "2001:db8::1", "fd00::1"] {
            assert_eq!(objection(address.parse().unwrap()), None, "{address}");
        }
    }
}
