//! What a well-behaved guest sends: every transport, and ICMP errors with the packet inside.

use std::net::IpAddr;

use super::{
    Case, Hook, Step,
    frames::{Ip, Transport, octets},
    random::Random,
    scene::{self, GATEWAY_MAC, GUEST_MAC, NETNS_SLOT, NICS, OUTSIDE, POLICIES, PORTS},
};

/// A frame of the guest, twice: the second time the path knows what to do with it.
pub(super) fn twice(frame: Vec<u8>) -> Vec<Step> {
    let step = Step::new(Hook::HostEnd, frame);
    vec![step.clone(), step]
}

/// Any address that packets are sent to: beyond the host, on it, or a sandbox.
pub(super) fn any_destination(random: &mut Random, version: u8) -> IpAddr {
    match random.below(10) {
        0 => scene::clone(version, random.below(NICS + 3)),
        _ => scene::outside(version, random.below(OUTSIDE.len())),
    }
}

/// Payload of a usual length; odd ones too.
pub(super) fn data(random: &mut Random) -> Vec<u8> {
    let length = match random.below(10) {
        0 => 0,
        1 => random.between(1, 3),
        2 => random.between(500, 1400),
        _ => random.between(4, 120),
    };
    random.bytes(length)
}

pub(super) fn version(random: &mut Random) -> u8 {
    random.one_of(&[4, 6])
}

pub(super) fn tcp_segment(random: &mut Random) -> Transport {
    Transport::Tcp {
        ports: (random.word(), random.one_of(&PORTS)),
        flags: random.one_of(&[0x02, 0x12, 0x10, 0x18, 0x11, 0x04]),
        data: data(random),
    }
}

pub(super) fn udp_datagram(random: &mut Random) -> Transport {
    Transport::Udp {
        // Never a DHCP server's; that class is another.
        ports: (random.between(1024, 65535) as u16, random.one_of(&PORTS)),
        data: data(random),
        summed: true,
    }
}

pub(super) fn echo(random: &mut Random) -> Transport {
    Transport::Echo {
        request: random.chance(60),
        identifier: random.word(),
        data: data(random),
    }
}

pub(super) fn any_transport(random: &mut Random) -> Transport {
    match random.below(3) {
        0 => tcp_segment(random),
        1 => udp_datagram(random),
        _ => echo(random),
    }
}

/// From the guest to somewhere.
pub(super) fn outgoing(random: &mut Random, version: u8, transport: Transport) -> Ip {
    let destination = any_destination(random, version);
    let mut ip = Ip::new(scene::guest(version), destination, transport);
    ip.identification = random.word();
    ip.ttl = random.one_of(&[64, 64, 255, 128, 2, 17]);
    ip
}

pub(super) fn from_guest(ip: &Ip) -> Vec<u8> {
    ip.frame(GATEWAY_MAC, GUEST_MAC)
}

/// A case in which the guest sends this, under any policy, most often an open one.
pub(super) fn sent(random: &mut Random, ip: &Ip) -> Case {
    let mut case = Case::new(twice(from_guest(ip)));
    settle(random, &mut case);
    case
}

/// Chooses slot and policy.
pub(super) fn settle(random: &mut Random, case: &mut Case) {
    if random.chance(25) {
        case.variant = NETNS_SLOT;
    }
    if random.chance(40) {
        case.policy = random.below(POLICIES);
    }
}

fn of(random: &mut Random, version: u8, transport: Transport) -> Case {
    let mut ip = outgoing(random, version, transport);
    if version == 4 && random.chance(5) {
        ip.options = options(random);
    }
    let mut case = sent(random, &ip);
    if random.chance(5) {
        spoil_checksum(random, &mut case, &ip);
    }
    case
}

/// A wrong checksum must stay as wrong as it is.
fn spoil_checksum(random: &mut Random, case: &mut Case, ip: &Ip) {
    let length = ip.transport_bytes().1.len();
    let flip = random.byte() | 1;
    for step in &mut case.steps {
        let end = step.frame.len();
        step.frame[end - length + length / 2] ^= flip;
    }
}

pub(super) fn options(random: &mut Random) -> Vec<u8> {
    let words = random.between(1, 10);
    match random.below(5) {
        // Source route, loose or strict, at the start or behind others.
        3 if words > 3 => {
            let mut options = vec![1; random.one_of(&[0, 1, 5])];
            options.extend([random.one_of(&[131, 137]), 7, 4, 192, 0, 2, 7]);
            options.resize(words * 4, 0);
            options
        }
        // The same bytes inside another option, or behind the end.
        4 if words > 3 => {
            let mut options = random.one_of(&[[7, 11, 4], [0, 0, 0]]).to_vec();
            options.extend([random.one_of(&[131, 137]), 7, 4, 192, 0, 2, 7]);
            options.resize(words * 4, 0);
            options
        }
        // Record route.
        0 if words > 1 => {
            let mut options = vec![7, (words * 4 - 1) as u8, 4];
            options.resize(words * 4, 0);
            options
        }
        // No operation.
        1 => vec![1; words * 4],
        _ => random.bytes(words * 4),
    }
}

pub(super) fn tcp(random: &mut Random) -> Case {
    let (version, transport) = (version(random), tcp_segment(random));
    of(random, version, transport)
}

pub(super) fn udp(random: &mut Random) -> Case {
    let (version, transport) = (version(random), udp_datagram(random));
    of(random, version, transport)
}

pub(super) fn udp_without_checksum(random: &mut Random) -> Case {
    let mut transport = udp_datagram(random);
    if let Transport::Udp { summed, .. } = &mut transport {
        *summed = false;
    }
    of(random, 4, transport)
}

pub(super) fn echo4(random: &mut Random) -> Case {
    let transport = echo(random);
    of(random, 4, transport)
}

pub(super) fn echo6(random: &mut Random) -> Case {
    let transport = echo(random);
    of(random, 6, transport)
}

/// SCTP, GRE, UDP-Lite, DCCP and numbers that nobody has.
pub(super) fn other_transports(random: &mut Random) -> Case {
    let version = version(random);
    let length = random.between(16, 80);
    let mut bytes = random.bytes(length);
    let transport = match random.below(5) {
        0 => Transport::Raw {
            protocol: 132,
            bytes,
        },
        1 => Transport::Raw {
            protocol: 47,
            bytes,
        },
        2 => {
            // UDP-Lite that covers all of itself.
            bytes[4..8].fill(0);
            Transport::Summed {
                protocol: 136,
                at: 6,
                bytes,
            }
        }
        3 => {
            bytes[6..8].fill(0);
            Transport::Summed {
                protocol: 33,
                at: 6,
                bytes,
            }
        }
        _ => Transport::Raw {
            protocol: random.one_of(&[2, 4, 41, 50, 89, 103, 253]),
            bytes,
        },
    };
    of(random, version, transport)
}

/// The packet that an error from the guest is about: somebody sent it to the guest.
pub(super) fn packet_inside(random: &mut Random, version: u8, from: IpAddr, to: IpAddr) -> Ip {
    let transport = match random.below(8) {
        0 | 1 => tcp_segment(random),
        2 | 3 => udp_datagram(random),
        4 => Transport::Udp {
            ports: (random.word(), random.word()),
            data: data(random),
            summed: false,
        },
        5 | 6 => echo(random),
        _ => Transport::Raw {
            protocol: random.one_of(&[132, 47, 136, 33]),
            bytes: random.bytes(40),
        },
    };
    let mut ip = Ip::new(from, to, transport);
    ip.identification = random.word();
    ip.ttl = random.byte();
    if version == 4 && random.chance(15) {
        ip.options = options(random);
    }
    if version == 6 && random.chance(15) {
        ip.extensions.push((60, vec![0, 0, 1, 4, 0, 0, 0, 0]));
    }
    if random.chance(10) {
        ip.fragment = Some((random.one_of(&[0, 0, 1, 2, 100]), random.chance(60)));
    }
    ip
}

/// An ICMP or ICMPv6 error of a kind that carries a packet.
pub(super) fn error_about(random: &mut Random, version: u8, mut inside: Vec<u8>) -> Transport {
    let kind = if version == 4 {
        random.one_of(&[3, 3, 3, 11, 11, 12, 4, 5])
    } else {
        random.one_of(&[1, 1, 2, 3, 4])
    };
    inside.truncate(if version == 4 { 548 } else { 1232 });
    Transport::Icmp {
        kind,
        code: random.one_of(&[0, 1, 3, 4]),
        rest: [0, 0, 5, 0x78],
        data: inside,
    }
}

fn error(random: &mut Random, version: u8, cut: bool) -> Case {
    let peer = any_destination(random, version);
    // Now and then about a packet that has nothing to do with this guest.
    let about = match random.below(10) {
        0 => scene::clone(version, 3),
        1 => scene::outside(version, 0),
        _ => scene::guest(version),
    };
    let from = match random.below(10) {
        0 => any_destination(random, version),
        _ => peer,
    };
    let mut inside = packet_inside(random, version, from, about).bytes();
    if cut {
        inside.truncate(random.below(inside.len() + 1));
    }
    let transport = error_about(random, version, inside);
    let mut ip = Ip::new(scene::guest(version), peer, transport);
    ip.identification = random.word();
    sent(random, &ip)
}

pub(super) fn icmp_error(random: &mut Random) -> Case {
    error(random, 4, false)
}

pub(super) fn icmp6_error(random: &mut Random) -> Case {
    error(random, 6, false)
}

pub(super) fn icmp_error_cut_off(random: &mut Random) -> Case {
    let version = version(random);
    error(random, version, true)
}

/// Replaces addresses wherever they stand; used to turn frames around.
pub(super) fn put_source(frame: &mut [u8], source: IpAddr) {
    let at = if source.is_ipv4() { 14 + 12 } else { 14 + 8 };
    let bytes = octets(source);
    frame[at..at + bytes.len()].copy_from_slice(&bytes);
}
