//! What comes towards sandboxes: from beyond an uplink, and from the host's own stack.

use std::net::IpAddr;

use super::{
    Case, Hook, Origin, Step,
    egress::{
        any_transport, error_about, options, packet_inside, put_source, tcp_segment, version,
    },
    frames::{Ip, Transport, ethernet},
    odd::mutate,
    random::Random,
    scene::{self, NETNS_SLOT, NICS, OUTSIDE, ROUTERS},
    situations::{as_super_packet, by_fragments, meter, sctp},
};

/// From outside to a sandbox, or to a clone address that nobody has.
fn incoming(random: &mut Random, version: u8, transport: Transport) -> Ip {
    let mut source = scene::outside(version, random.below(OUTSIDE.len()));
    if version == 6 && random.chance(3) {
        // Stands for one of IPv4.
        if let IpAddr::V4(v4) = scene::outside(4, random.below(OUTSIDE.len())) {
            source = v4.to_ipv6_mapped().into();
        }
    }
    let nic = if random.chance(50) {
        0
    } else {
        random.below(NICS + 1)
    };
    let mut ip = Ip::new(source, scene::clone(version, nic), transport);
    ip.identification = random.word();
    ip.ttl = random.one_of(&[64, 64, 64, 255, 2, 1, 0]);
    if version == 4 && random.chance(5) {
        ip.options = options(random);
    }
    if version == 6 && random.chance(5) {
        ip.extensions.push((60, vec![0, 0, 1, 4, 0, 0, 0, 0]));
    }
    ip
}

fn case(random: &mut Random, hook: Hook, frame: Vec<u8>) -> Case {
    let mut step = Step::new(hook, frame);
    if hook == Hook::Shared {
        let host_end = scene::HOST_ENDS + random.below(4) as u32;
        step.origin = random.one_of(&[
            Origin::Host,
            Origin::Shared,
            Origin::HostEnd(host_end),
            Origin::Uplink,
        ]);
    }
    let mut case = Case::new(vec![step.clone(), step]);
    case.variant = random.one_of(&[0, 0, 0, NETNS_SLOT, scene::READY, scene::ONLY_IPV4]);
    // With and without answers to be remembered.
    case.policy = random.one_of(&[0, 1, 3, 8]);
    case.learn = random.chance(10);
    case
}

fn frame(ip: &Ip) -> Vec<u8> {
    ip.frame([2, 0, 0, 0, 0, 1], ROUTERS[0])
}

fn of_transports(random: &mut Random, hook: Hook) -> Case {
    let version = version(random);
    let transport = match random.below(8) {
        0 => Transport::Udp {
            ports: (random.word(), random.word()),
            data: random.bytes(32),
            summed: version == 6,
        },
        1 => {
            let mut bytes = random.bytes(40);
            bytes[6..8].fill(0);
            Transport::Summed {
                protocol: random.one_of(&[33, 136]),
                at: 6,
                bytes,
            }
        }
        2 => Transport::Raw {
            protocol: random.one_of(&[132, 47, 50]),
            bytes: random.bytes(40),
        },
        _ => any_transport(random),
    };
    let ip = incoming(random, version, transport);
    let mut case = case(random, hook, frame(&ip));
    if random.chance(10) {
        as_super_packet(random, &mut case);
    }
    case
}

pub(super) fn from_uplink(random: &mut Random) -> Case {
    of_transports(random, Hook::Uplink)
}

pub(super) fn from_host(random: &mut Random) -> Case {
    if random.chance(15) {
        return from_sandbox(random);
    }
    if random.chance(5) {
        return with_many_extensions(random);
    }
    of_transports(random, Hook::Shared)
}

/// About as many extension headers as a packet may have.
fn with_many_extensions(random: &mut Random) -> Case {
    let transport = any_transport(random);
    let mut ip = incoming(random, 6, transport);
    for _ in 0..random.between(7, 10) {
        ip.extensions.push((60, vec![0, 0, 1, 4, 0, 0, 0, 0]));
    }
    case(random, Hook::Shared, frame(&ip))
}

/// From a sandbox to another or itself, of what the stack has cut or was to answer, or from who claims to be one.
fn from_sandbox(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = incoming(random, version, transport);
    let any = random.below(NICS);
    let sender = random.one_of(&[0, 1, 2, any]);
    ip.source = scene::clone(version, sender);
    case(random, Hook::Shared, frame(&ip))
}

/// To other hosts, other addresses, with tags, or not IP.
pub(super) fn not_ours(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = incoming(random, version, transport);
    let kind = random.below(5);
    if kind == 0 {
        ip.destination = scene::outside(version, random.below(OUTSIDE.len()));
    }
    let bytes = ip.bytes();
    let own = if version == 4 { 0x0800 } else { 0x86dd };
    let (ethertype, bytes) = match kind {
        1 => (0x8100, [&[0, 5, 8, 0], &bytes[..]].concat()),
        2 => (random.one_of(&[0x0806, 0x88cc, 0x0800, 0x86dd]), bytes),
        _ => (own, bytes),
    };
    let hook = random.one_of(&[Hook::Uplink, Hook::Uplink, Hook::Shared]);
    let mut case = case(
        random,
        hook,
        ethernet([2, 0, 0, 0, 0, 1], ROUTERS[0], ethertype, &bytes),
    );
    if kind == 3 && hook == Hook::Uplink {
        for step in &mut case.steps {
            step.to_this_host = false;
        }
    }
    case
}

/// Somebody outside who claims to be a sandbox here.
pub(super) fn spoofed(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = incoming(random, version, transport);
    ip.source = scene::clone(version, random.below(NICS + 2));
    let hook = random.one_of(&[Hook::Uplink, Hook::Uplink, Hook::Shared]);
    case(random, hook, frame(&ip))
}

pub(super) fn fragments(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = incoming(random, version, transport);
    ip.fragment = Some((random.one_of(&[0, 0, 1, 2, 50]), random.chance(60)));
    let mut bytes = frame(&ip);
    if random.chance(20) {
        bytes.truncate(random.between(15, bytes.len()));
    }
    let hook = random.one_of(&[Hook::Uplink, Hook::Shared]);
    case(random, hook, bytes)
}

fn mutated_on(random: &mut Random, hook: Hook) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let ip = incoming(random, version, transport);
    let mut bytes = frame(&ip);
    mutate(random, &mut bytes);
    // Whose it is by its MAC address is another class's matter.
    bytes[..6].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
    case(random, hook, bytes)
}

pub(super) fn mutated(random: &mut Random) -> Case {
    mutated_on(random, Hook::Uplink)
}

pub(super) fn from_host_mutated(random: &mut Random) -> Case {
    mutated_on(random, Hook::Shared)
}

/// An error about something that a sandbox has sent, as its clone address.
pub(super) fn icmp_error(random: &mut Random) -> Case {
    let version = version(random);
    let peer = scene::outside(version, random.below(OUTSIDE.len()));
    let nic = if random.chance(60) {
        0
    } else {
        random.below(NICS)
    };
    let clone = scene::clone(version, nic);
    let about: IpAddr = match random.below(10) {
        0 => scene::clone(version, 3),
        1 => scene::guest(version),
        _ => clone,
    };
    let mut inside = packet_inside(random, version, about, peer).bytes();
    if random.chance(30) {
        inside.truncate(random.below(inside.len() + 1));
    }
    let transport = error_about(random, version, inside);
    let mut ip = Ip::new(peer, clone, transport);
    if random.chance(10) {
        ip.fragment = Some((0, true));
    }
    let hook = random.one_of(&[Hook::Uplink, Hook::Shared]);
    let bytes = frame(&ip);
    case(random, hook, bytes)
}

pub(super) fn limit(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = incoming(random, version, transport);
    let nic = random.one_of(&[0, 9, 10, 11]);
    ip.destination = scene::clone(version, nic);
    ip.ttl = 64;
    let hook = random.one_of(&[Hook::Uplink, Hook::Shared, Hook::HostEnd]);
    let mut bytes = frame(&ip);
    if hook == Hook::HostEnd {
        // From a sandbox of the same group: the receiver's limit counts as well.
        bytes[..6].copy_from_slice(&scene::GATEWAY_MAC);
        bytes[6..12].copy_from_slice(&scene::GUEST_MAC);
        ip.source = scene::guest(version);
        bytes = ip.frame(scene::GATEWAY_MAC, scene::GUEST_MAC);
        put_source(&mut bytes, ip.source);
    }
    let mut case = case(random, hook, bytes);
    case.variant = random.one_of(&[0, NETNS_SLOT]);
    case.policy = random.one_of(&[9, 10, 11]);
    for _ in 0..random.below(3) {
        case.steps.push(case.steps[0].clone());
    }
    if random.chance(20) {
        as_super_packet(random, &mut case);
    }
    if hook == Hook::HostEnd {
        case.policy = 0;
    }
    case.meters.push(meter(random, nic, true));
    case
}

pub(super) fn mtu(random: &mut Random) -> Case {
    let version = version(random);
    let mut transport = tcp_segment(random);
    let headers = if version == 4 { 40 } else { 60 };
    let mtu = random.one_of(&[1280, 1500, 1500]);
    if let Transport::Tcp { data, .. } = &mut transport {
        data.resize(mtu - headers - 2 + random.below(5), 0x33);
    }
    let mut ip = incoming(random, version, transport);
    if mtu == 1280 {
        ip.destination = scene::clone(version, 8);
    }
    let hook = random.one_of(&[Hook::Uplink, Hook::Shared]);
    let mut case = case(random, hook, frame(&ip));
    if random.chance(40) {
        let size = (mtu - headers - 1 + random.below(3)) as u32;
        for step in &mut case.steps {
            step.gso_size = size;
        }
    }
    case
}

/// What another stack of this kernel sends by SCTP.
pub(super) fn sctp_super_packet(random: &mut Random) -> Case {
    let version = version(random);
    let transport = sctp(random);
    let ip = incoming(random, version, transport);
    let hook = random.one_of(&[Hook::Uplink, Hook::Shared]);
    let mut case = case(random, hook, frame(&ip));
    case.policy = random.one_of(&[0, 9, 10, 11]);
    by_fragments(random, &mut case);
    case
}
