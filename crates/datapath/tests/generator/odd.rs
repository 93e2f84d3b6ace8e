//! Link-level talk, spoofs, and frames that are broken.

use std::net::IpAddr;

use super::{
    Case, Hook, Step,
    egress::{
        any_transport, data, echo, from_guest, outgoing, put_source, sent, settle, twice,
        udp_datagram, version,
    },
    frames::{Ip, Transport, ethernet, octets},
    random::Random,
    scene::{
        self, ABSENT, GATEWAY_MAC, GATEWAY4, GUEST_MAC, GUEST4, NETNS_SLOT, ONLY_IPV4, ONLY_IPV6,
        READY, VETH_MAC,
    },
};
use crate::model::{Mac, link::GATEWAY_LINK_LOCAL};

const BROADCAST: Mac = [0xff; 6];

fn arp_packet(operation: u16, sender: (Mac, IpAddr), target: (Mac, IpAddr)) -> Vec<u8> {
    let mut arp = vec![0, 1, 8, 0, 6, 4];
    arp.extend(operation.to_be_bytes());
    for (mac, address) in [sender, target] {
        arp.extend(mac);
        arp.extend(octets(address));
    }
    arp
}

fn any_ipv4(random: &mut Random) -> IpAddr {
    let random_address = IpAddr::from(<[u8; 4]>::try_from(random.bytes(4)).expect("four"));
    random.one_of(&[
        GUEST4,
        GATEWAY4,
        IpAddr::from([0, 0, 0, 0]),
        scene::clone(4, 0),
        scene::clone(4, 2),
        "10.0.0.3".parse().expect("an address"),
        random_address,
    ])
}

/// The guest's own ARP: requests for the gateway, probes, announcements, with and without padding.
pub(super) fn arp(random: &mut Random) -> Case {
    let sender = random.one_of(&[GUEST4, GUEST4, GUEST4, IpAddr::from([0, 0, 0, 0])]);
    let target = match random.below(4) {
        0 => GUEST4,
        1 => any_ipv4(random),
        _ => GATEWAY4,
    };
    let operation = random.one_of(&[1, 1, 1, 2, 3, 0]);
    let target_mac = random.one_of(&[[0; 6], BROADCAST, GATEWAY_MAC]);
    let arp = arp_packet(operation, (GUEST_MAC, sender), (target_mac, target));
    let mut frame = ethernet(
        random.one_of(&[BROADCAST, GATEWAY_MAC]),
        GUEST_MAC,
        0x0806,
        &arp,
    );
    let padding = random.one_of(&[0, 0, 18, 3]);
    frame.resize(frame.len() + padding, 0);
    let mut case = Case::new(twice(frame));
    case.variant = random.one_of(&[0, 0, 0, NETNS_SLOT, ONLY_IPV4, ONLY_IPV6]);
    case
}

/// ARP for somebody else, as somebody else, or not ARP as we know it.
pub(super) fn arp_spoofed(random: &mut Random) -> Case {
    let mac = random.one_of(&[GUEST_MAC, GUEST_MAC, GATEWAY_MAC, [2, 0, 0, 0, 0, 9]]);
    let (sender, target) = (any_ipv4(random), any_ipv4(random));
    let operation = random.one_of(&[1, 1, 2, 2, 8]);
    let mut arp = arp_packet(operation, (mac, sender), ([0; 6], target));
    match random.below(6) {
        0 => arp.truncate(random.below(28)),
        1 => arp[random.below(8)] ^= 1 << random.below(8),
        _ => {}
    }
    Case::new(twice(ethernet(BROADCAST, GUEST_MAC, 0x0806, &arp)))
}

fn any_ipv6(random: &mut Random) -> IpAddr {
    let text = random.one_of(&[
        "fd00:aa::2",
        "fd00:aa::2",
        "fd00:aa::1",
        "fe80::1",
        "::",
        "fe80::400:acff:fe10:12",
        "fd00:aa::3",
        "fd00:64::10",
        "fd00:64::12",
        "febf::77",
        "fec0::77",
        "2001:db8:1::7",
        "ff02::1",
    ]);
    text.parse().expect("an address")
}

fn discovery(random: &mut Random, kind: u8, body: Vec<u8>, source: IpAddr) -> Ip {
    let destination = any_discovery_destination(random);
    let transport = Transport::Icmp {
        kind,
        code: 0,
        rest: [0; 4],
        data: body,
    };
    let mut ip = Ip::new(source, destination, transport);
    ip.ttl = random.one_of(&[255, 255, 255, 255, 255, 255, 64, 254, 1, 0]);
    ip
}

fn any_discovery_destination(random: &mut Random) -> IpAddr {
    let text = random.one_of(&[
        "ff02::1:ff00:1",
        "ff02::1",
        "ff02::2",
        "fd00:aa::1",
        "fe80::1",
    ]);
    text.parse().expect("an address")
}

fn link_option(random: &mut Random, kind: u8) -> Vec<u8> {
    let mac = random.one_of(&[
        GUEST_MAC,
        GUEST_MAC,
        GUEST_MAC,
        GATEWAY_MAC,
        [2, 0, 0, 0, 0, 9],
    ]);
    [&[kind, 1], &mac[..]].concat()
}

pub(super) fn neighbour_solicitation(random: &mut Random) -> Case {
    let target = match random.below(3) {
        0 => any_ipv6(random),
        1 => "fd00:aa::1".parse().expect("an address"),
        _ => GATEWAY_LINK_LOCAL.into(),
    };
    let mut body = octets(target);
    match random.below(6) {
        0 => {}
        // A nonce, as duplicate address detection sends it.
        1 => body.extend([14, 1, 1, 2, 3, 4, 5, 6]),
        _ => body.extend(link_option(random, 1)),
    }
    if random.chance(5) {
        body.truncate(random.below(body.len() + 1));
    }
    let source = if random.chance(60) {
        scene::guest(6)
    } else {
        any_ipv6(random)
    };
    let ip = discovery(random, 135, body, source);
    let mut case = Case::new(twice(from_guest(&ip)));
    case.variant = random.one_of(&[0, 0, 0, NETNS_SLOT, ONLY_IPV4]);
    case
}

/// Advertisements, router solicitations, multicast membership.
pub(super) fn neighbour_others(random: &mut Random) -> Case {
    let kind = random.one_of(&[136, 136, 136, 133, 133, 130, 131, 132, 143, 137, 138, 134]);
    let mut body = match kind {
        136 => [octets(any_ipv6(random)), link_option(random, 2)].concat(),
        133 if random.chance(70) => link_option(random, 1),
        133 => Vec::new(),
        _ => octets(any_ipv6(random)),
    };
    if random.chance(5) {
        body.truncate(random.below(body.len() + 1));
    }
    let source = any_ipv6(random);
    let ip = discovery(random, kind, body, source);
    Case::new(twice(from_guest(&ip)))
}

pub(super) fn vlan(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let ip = outgoing(random, version, transport);
    let mut tagged = random.bytes(2);
    tagged.extend(if version == 4 { [8, 0] } else { [0x86, 0xdd] });
    tagged.extend(ip.bytes());
    let from = random.one_of(&[GUEST_MAC, GUEST_MAC, GATEWAY_MAC]);
    let kind = random.one_of(&[0x8100, 0x88a8]);
    Case::new(twice(ethernet(GATEWAY_MAC, from, kind, &tagged)))
}

/// Ethertypes and IP versions that don't belong together, and those that nobody here speaks.
pub(super) fn ethertype(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let bytes = outgoing(random, version, transport).bytes();
    let any = random.word();
    let kind = random.one_of(&[0x8863, 0x88cc, 0x9000, 0x0026, 0x0806, 0x0800, 0x86dd, any]);
    let from = random.one_of(&[GUEST_MAC, GUEST_MAC, GUEST_MAC, GATEWAY_MAC]);
    Case::new(twice(ethernet(GATEWAY_MAC, from, kind, &bytes)))
}

/// Frames cut at every header's boundary and around it, with lengths that fit or don't.
pub(super) fn truncated(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    if version == 4 && random.chance(30) {
        ip.options = vec![1; 8];
    }
    if version == 6 && random.chance(30) {
        ip.extensions.push((0, vec![0; 8]));
    }
    let mut frame = from_guest(&ip);
    let transport = frame.len() - ip.transport_bytes().1.len();
    let ip_header = if version == 4 { 34 } else { 54 };
    let boundary = random.one_of(&[
        15,
        ip_header,
        transport,
        transport + 8,
        transport + 20,
        frame.len(),
    ]);
    let end = (boundary + random.below(5))
        .saturating_sub(2)
        .clamp(15, frame.len());
    frame.truncate(end);
    if random.chance(60) {
        adjust_length(&mut frame);
    }
    Case::new(twice(frame))
}

/// Makes the length in the IP header fit the frame.
fn adjust_length(frame: &mut [u8]) {
    let length = frame.len();
    match frame[12] {
        0x08 if length >= 34 => {
            frame[16..18].copy_from_slice(&((length - 14) as u16).to_be_bytes())
        }
        0x86 if length >= 54 => {
            frame[18..20].copy_from_slice(&((length - 54) as u16).to_be_bytes())
        }
        _ => {}
    }
}

/// A right frame with some bytes changed, most of them in the headers.
pub(super) fn mutated(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    if random.chance(20) {
        ip.fragment = Some((random.one_of(&[0, 1, 2]), random.chance(50)));
    }
    let mut frame = from_guest(&ip);
    mutate(random, &mut frame);
    let mut case = Case::new(twice(frame));
    settle(random, &mut case);
    case
}

pub(super) fn mutate(random: &mut Random, frame: &mut Vec<u8>) {
    let headers = frame.len().min(80);
    for _ in 0..random.between(1, 4) {
        let at = match random.below(10) {
            0 => random.below(14),
            1 => random.below(frame.len()),
            _ => random.between(14, headers - 1),
        };
        match random.below(3) {
            0 => frame[at] = random.byte(),
            1 => frame[at] ^= 1 << random.below(8),
            _ => frame[at] = random.one_of(&[0, 1, 0x7f, 0x80, 0xff]),
        }
    }
    match random.below(10) {
        0 => frame.truncate(random.between(15, frame.len())),
        1 => {
            let padding = random.between(1, 40);
            frame.extend(random.bytes(padding));
        }
        _ => {}
    }
}

pub(super) fn spoofed_mac(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let ip = outgoing(random, version, transport);
    let mut mac = GUEST_MAC;
    match random.below(4) {
        0 => mac = GATEWAY_MAC,
        1 => mac = VETH_MAC,
        2 => mac[random.below(6)] ^= 1 << random.below(8),
        _ => mac[5] = mac[5].wrapping_add(random.below(4) as u8),
    }
    let mut case = Case::new(twice(ip.frame(GATEWAY_MAC, mac)));
    case.variant = random.one_of(&[0, 0, NETNS_SLOT, READY]);
    case
}

pub(super) fn spoofed_address(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let ip = outgoing(random, version, transport);
    let mut frame = from_guest(&ip);
    let own = random.one_of(&[0, 2]);
    let near = match scene::guest(version) {
        IpAddr::V4(_) => "10.0.0.3".parse().expect("an address"),
        IpAddr::V6(address) => {
            let mut segments = address.segments();
            segments[random.below(8)] ^= 1 << random.below(16);
            IpAddr::from(segments)
        }
    };
    let unspecified = if version == 4 { "0.0.0.0" } else { "::" };
    let source = match random.below(6) {
        0 => scene::clone(version, own),
        1 => scene::gateway(version),
        2 => scene::outside(version, 0),
        3 => unspecified.parse().expect("an address"),
        4 if version == 6 => any_ipv6(random),
        _ => near,
    };
    put_source(&mut frame, source);
    let mut case = Case::new(twice(frame));
    case.variant = random.one_of(&[0, NETNS_SLOT]);
    case
}

pub(super) fn rogue_dhcp(random: &mut Random) -> Case {
    let version = version(random);
    let (server, client) = if version == 4 { (67, 68) } else { (547, 546) };
    let ports = match random.below(4) {
        0 => (client, server),
        1 => (server, random.word()),
        // A server's port of the other version is a port like others.
        2 => (if version == 4 { 547 } else { 67 }, client),
        _ => (server, client),
    };
    let transport = Transport::Udp {
        ports,
        data: data(random),
        summed: true,
    };
    let mut ip = outgoing(random, version, transport);
    if random.chance(40) {
        ip.source = if version == 4 {
            IpAddr::from([0, 0, 0, 0])
        } else {
            any_ipv6(random)
        };
        ip.destination = if version == 4 {
            IpAddr::from([255; 4])
        } else {
            "ff02::1:2".parse().expect("an address")
        };
    }
    if random.chance(10) {
        ip.fragment = Some((random.one_of(&[0, 2]), true));
    }
    sent(random, &ip)
}

pub(super) fn rogue_ra(random: &mut Random) -> Case {
    let kind = random.one_of(&[134, 134, 134, 133, 135]);
    let source = any_ipv6(random);
    let body = data(random);
    let mut ip = discovery(random, kind, body, source);
    if random.chance(30) {
        ip.extensions.push((0, vec![0, 0, 5, 2, 0, 0, 1, 0]));
    }
    if random.chance(20) {
        ip.destination = any_ipv6(random);
    }
    Case::new(twice(from_guest(&ip)))
}

/// DHCP clients, and the rest of what booting guests say.
pub(super) fn link_chatter(random: &mut Random) -> Case {
    if random.chance(50) {
        return neighbour_others(random);
    }
    let unspecified = IpAddr::from([0, 0, 0, 0]);
    let ports = random.one_of(&[(68, 67), (68, 67), (68, 68), (5353, 5353)]);
    let transport = Transport::Udp {
        ports,
        data: data(random),
        summed: true,
    };
    let source = random.one_of(&[unspecified, unspecified, GUEST4]);
    let destination = random.one_of(&[
        IpAddr::from([255; 4]),
        GATEWAY4,
        IpAddr::from([224, 0, 0, 251]),
    ]);
    let ip = Ip::new(source, destination, transport);
    Case::new(twice(from_guest(&ip)))
}

/// Echo to the gateway, and what else one may want of it.
pub(super) fn gateway(random: &mut Random) -> Case {
    let version = version(random);
    let transport = match random.below(4) {
        0 => any_transport(random),
        1 => udp_datagram(random),
        _ => echo(random),
    };
    let mut ip = outgoing(random, version, transport);
    ip.destination = scene::gateway(version);
    if version == 6 && random.chance(40) {
        ip.destination = GATEWAY_LINK_LOCAL.into();
        if random.chance(60) {
            ip.source = any_ipv6(random);
        }
    }
    match random.below(10) {
        0 => ip.fragment = Some((random.one_of(&[0, 2]), random.chance(70))),
        1 if version == 4 => ip.options = vec![1; 4],
        2 if version == 6 => ip.extensions.push((60, vec![0, 0, 1, 4, 0, 0, 0, 0])),
        3 => ip.ttl = 1,
        _ => {}
    }
    let mut case = sent(random, &ip);
    case.policy = random.below(scene::POLICIES);
    case
}

pub(super) fn reserved(random: &mut Random) -> Case {
    let version = version(random);
    let text = if version == 4 {
        random.one_of(&[
            "224.0.0.1",
            "239.255.255.250",
            "255.255.255.255",
            "0.0.0.0",
            "0.1.2.3",
            "127.0.0.1",
            "127.255.0.1",
            "240.0.0.1",
            "254.1.2.3",
            "255.255.255.254",
            "192.0.2.255",
            "169.254.1.1",
        ])
    } else {
        random.one_of(&[
            "ff02::1",
            "ff0e::5",
            "::",
            "::1",
            "fe80::2",
            "febf::2",
            "::ffff:1.2.3.4",
            "::1.2.3.4",
            "fec0::1",
            "fd00::1",
            "64:ff9b::1.2.3.4",
        ])
    };
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    ip.destination = text.parse().expect("an address");
    sent(random, &ip)
}

pub(super) fn not_leased(random: &mut Random) -> Case {
    let mut case = match random.below(3) {
        0 => arp(random),
        1 => mutated(random),
        _ => {
            let version = version(random);
            let transport = any_transport(random);
            let ip = outgoing(random, version, transport);
            sent(random, &ip)
        }
    };
    case.variant = random.one_of(&[READY, ABSENT, ONLY_IPV4, ONLY_IPV6]);
    case
}

/// A process in the slot's namespace uses the clone address; frames of the second interface come by
/// the same veth.
pub(super) fn process(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    let mut second = GUEST_MAC;
    second[5] += 1;
    let from = match random.below(4) {
        0 => second,
        1 => GUEST_MAC,
        _ => {
            ip.source = scene::clone(version, random.one_of(&[0, 0, 0, 1]));
            // The namespace's own stack, which reports its groups by the same MAC, is no process.
            if version == 6 && random.chance(25) {
                ip.source = "fe80::1".parse().expect("an address");
                ip.destination = "ff02::16".parse().expect("an address");
            }
            VETH_MAC
        }
    };
    let mut frame = ip.frame(GATEWAY_MAC, from);
    if random.chance(10) {
        let arp = arp_packet(1, (from, scene::clone(4, 0)), ([0; 6], GATEWAY4));
        frame = ethernet(BROADCAST, from, 0x0806, &arp);
    }
    let mut case = Case::new(twice(frame));
    // Between them, the guest behind the TAP.
    let other = ip.frame(GATEWAY_MAC, GUEST_MAC);
    case.steps.insert(1, Step::new(Hook::HostEnd, other));
    case.variant = NETNS_SLOT;
    case.policy = random.below(scene::POLICIES);
    case
}
