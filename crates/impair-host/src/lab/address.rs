//! Addresses: which a host may have, and those that a lab's file leaves to us, Ethernet's too.
//!
//! The latter follow from the numbers of links and hosts in the file alone, so the same file gives the same lab.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;

/// What IPv6 needs at least (RFC 8200, section 5).
pub(super) const IPV6_MTU_MIN: u32 = 1280;

/// Addresses for a link that gives none: a network of its own between hosts, one of the switch on a switch.
pub(super) fn assigned(
    number: usize,
    switches: [bool; 2],
    hosts: [usize; 2],
    joined: &[usize],
    mtu: u32,
) -> [Vec<IpNet>; 2] {
    let narrow = |value: usize| u16::try_from(value).expect("hosts and links are fewer");
    let both = |v4: [u8; 4], v4_length: u8, v6: [u16; 3]| {
        let v4 = IpNet::new(IpAddr::from(v4), v4_length).expect("it is at most 32");
        let v6 = Ipv6Addr::new(0xfd77, 0x7377, v6[0], v6[1], 0, 0, 0, v6[2]);
        let v6 = IpNet::new(v6.into(), 64).expect("it is at most 128");
        let v6 = Some(v6).filter(|_| mtu >= IPV6_MTU_MIN);
        std::iter::once(v4).chain(v6).collect::<Vec<IpNet>>()
    };
    let of_link = |end: usize| {
        let [high, low] = narrow(number * 4 + end + 1).to_be_bytes();
        both(
            [10, 77, high, low],
            30,
            [0x77, narrow(number), narrow(end + 1)],
        )
    };
    let on_switch = |switch: usize, host: usize| {
        let [network, host] = [joined[switch], host + 1].map(narrow);
        let [[_, third], [_, fourth]] = [network, host].map(u16::to_be_bytes);
        both([10, 78, third, fourth], 24, [0x78, network, host])
    };
    match switches {
        [false, false] => [of_link(0), of_link(1)],
        [true, false] => [Vec::new(), on_switch(hosts[0], hosts[1])],
        [false, true] => [on_switch(hosts[1], hosts[0]), Vec::new()],
        [true, true] => [Vec::new(), Vec::new()],
    }
}

/// A locally administered address, different for every end of a lab.
pub(super) fn mac_of(link: usize, end: usize) -> [u8; 6] {
    let [high, low] = u16::try_from(link).expect("links are fewer").to_be_bytes();
    [0x02, 0x73, 0x77, high, low, [1, 2][end]]
}

/// Whether a host may have it: neither a network nor its broadcast address, nor that of many or none.
pub(super) fn is_of_a_host(address: IpNet) -> bool {
    let ip = address.addr();
    let inside = match address {
        IpNet::V4(net) if net.prefix_len() < 31 => {
            net.addr() != net.network() && net.addr() != net.broadcast()
        }
        IpNet::V4(_) => true,
        IpNet::V6(net) => net.prefix_len() >= 127 || net.addr() != net.network(),
    };
    inside
        && address.prefix_len() > 0
        && !ip.is_multicast()
        && !ip.is_unspecified()
        && !ip.is_loopback()
}
