//! Fragments, IPv4 options and IPv6 extension headers.

use super::{
    Case,
    egress::{
        any_transport, from_guest, options as any_options, outgoing, sent, tcp_segment, twice,
        version,
    },
    frames::{Ip, Transport},
    random::Random,
    scene,
    situations::as_super_packet,
};

fn fragmented(random: &mut Random, offset: u16, more: bool) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    ip.fragment = Some((offset, more));
    if version == 6 && random.chance(20) {
        ip.extensions.push(extension(random, 60));
    }
    sent(random, &ip)
}

pub(super) fn first(random: &mut Random) -> Case {
    fragmented(random, 0, true)
}

pub(super) fn later(random: &mut Random) -> Case {
    let offset = random.one_of(&[2, 3, 5, 100, 185, 8191]);
    let more = random.chance(50);
    fragmented(random, offset, more)
}

/// To be cut by the kernel, once more.
pub(super) fn super_fragment(random: &mut Random) -> Case {
    let mut case = match random.below(3) {
        0 => first(random),
        1 => later(random),
        _ => options(random),
    };
    as_super_packet(random, &mut case);
    case
}

/// A first fragment that ends before, in or after the transport header.
pub(super) fn tiny(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    let (protocol, bytes) = ip.transport_bytes();
    let length = random.below(bytes.len().min(32) + 1);
    ip.transport = Transport::Raw {
        protocol,
        bytes: bytes[..length].to_vec(),
    };
    // Not cut to eight bytes again: what a guest claims needs not be sensible.
    ip.fragment = Some((0, false));
    let mut frame = from_guest(&ip);
    let at = if version == 4 { 14 + 6 } else { 14 + 40 + 3 };
    frame[at] |= if version == 4 { 0x20 } else { 1 };
    if version == 4 {
        repair_ipv4(&mut frame);
    }
    Case::new(twice(frame))
}

fn repair_ipv4(frame: &mut [u8]) {
    let header = usize::from(frame[14] & 15) * 4;
    frame[24..26].fill(0);
    let sum = crate::model::checksum::of(&frame[14..14 + header]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
}

pub(super) fn offset_one(random: &mut Random) -> Case {
    let version = version(random);
    let transport = if random.chance(60) {
        tcp_segment(random)
    } else {
        any_transport(random)
    };
    let mut ip = outgoing(random, version, transport);
    ip.fragment = Some((1, random.chance(50)));
    sent(random, &ip)
}

pub(super) fn options(random: &mut Random) -> Case {
    let transport = any_transport(random);
    let mut ip = outgoing(random, 4, transport);
    ip.options = any_options(random);
    if random.chance(20) {
        ip.fragment = Some((random.one_of(&[0, 4]), true));
    }
    sent(random, &ip)
}

/// An extension header that is right, with the next header left open.
fn extension(random: &mut Random, number: u8) -> (u8, Vec<u8>) {
    let mut header = match number {
        44 => vec![0, 0, 0, 0, 9, 9, 9, 9],
        51 => {
            let words = random.between(1, 5);
            let mut header = vec![0, words as u8];
            header.resize((words + 2) * 4, 0x55);
            header
        }
        _ => {
            let units = random.one_of(&[0, 0, 0, 1, 2]);
            let mut header = vec![0, units as u8];
            header.resize((units + 1) * 8, 0);
            header
        }
    };
    if number == 43 {
        // Nothing left to visit.
        header[2] = random.one_of(&[0, 2, 4]);
        header[3] = 0;
    }
    (number, header)
}

const EXTENSIONS: [u8; 5] = [0, 43, 44, 51, 60];

fn with_extensions(random: &mut Random, numbers: &[u8]) -> Ip {
    let transport = match random.below(4) {
        // Protocols of which nothing must be there.
        0 => Transport::Raw {
            protocol: 59,
            bytes: Vec::new(),
        },
        1 => Transport::Raw {
            protocol: 132,
            bytes: random.bytes(12),
        },
        _ => any_transport(random),
    };
    let mut ip = outgoing(random, 6, transport);
    for number in numbers {
        let header = extension(random, *number);
        ip.extensions.push(header);
    }
    ip
}

pub(super) fn one_extension(random: &mut Random) -> Case {
    let number = random.one_of(&EXTENSIONS);
    let ip = with_extensions(random, &[number]);
    sent(random, &ip)
}

/// Up to twelve headers, where eight are the most.
pub(super) fn extension_chain(random: &mut Random) -> Case {
    let length = random.between(2, 12);
    let mut numbers: Vec<u8> = (0..length)
        .map(|_| random.one_of(&[0, 43, 51, 60]))
        .collect();
    if random.chance(30) {
        // At most one: reassembly takes the first fragment header, and so must we.
        let at = random.below(length);
        numbers[at] = 44;
    }
    let ip = with_extensions(random, &numbers);
    sent(random, &ip)
}

/// Segments left in a routing header, headers cut off, lengths that lead beyond the packet.
pub(super) fn bad_extensions(random: &mut Random) -> Case {
    let number = random.one_of(&EXTENSIONS);
    let before = random.one_of(&EXTENSIONS);
    let numbers = if random.chance(50) {
        vec![before, number]
    } else {
        vec![number]
    };
    let mut ip = with_extensions(random, &numbers);
    let last = ip.extensions.len() - 1;
    let cut = match random.below(4) {
        0 => {
            // A routing header with hops left.
            ip.extensions[last] = (43, vec![0, 0, 0, random.between(1, 255) as u8, 0, 0, 0, 0]);
            0
        }
        1 => {
            // A length that leads anywhere.
            ip.extensions[last].1[1] = random.byte();
            0
        }
        2 => random.between(1, 30),
        _ => usize::MAX,
    };
    let mut frame = from_guest(&ip);
    let headers: usize = ip.extensions.iter().map(|(_, header)| header.len()).sum();
    let end = match cut {
        0 => frame.len(),
        // Cut anywhere in the headers.
        usize::MAX => 54 + random.below(headers + 1),
        bytes => (54 + headers).saturating_sub(bytes).max(54),
    };
    frame.truncate(end);
    if random.chance(80) {
        let payload = (frame.len() - 54) as u16;
        frame[18..20].copy_from_slice(&payload.to_be_bytes());
    }
    let mut case = Case::new(twice(frame));
    case.policy = random.below(scene::POLICIES);
    case
}
