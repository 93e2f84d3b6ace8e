//! The same packets as elsewhere in situations that decide over them: policies, groups, answers,
//! limits, hops, sizes, and what was decided a moment ago.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{
    Case, Change, Hook, Known, MeterAt, Origin, Step,
    egress::{
        any_transport, echo, error_about, from_guest, outgoing, packet_inside, sent, settle,
        tcp_segment, twice, udp_datagram, version,
    },
    frames::{Ip, Transport},
    random::Random,
    scene::{
        self, HOST, METADATA, NETNS_SLOT, NICS, OUTSIDE, POLICIES, POLICIES_BY_HAND, PORTS, SECOND,
    },
};
use crate::model::{
    answers::{Flow, Via},
    packet::{UDP, be16},
    police::GSO_BY_FRAGS,
    route::NEIGHBOURS_MAX,
    world::Credit,
};

fn by_policy(random: &mut Random, destination: fn(&mut Random, u8) -> IpAddr) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    ip.destination = destination(random, version);
    match random.below(12) {
        0 => ip.fragment = Some((random.one_of(&[0, 2, 40]), true)),
        1 => {
            ip.transport = Transport::Raw {
                protocol: random.one_of(&[132, 47, 50]),
                bytes: random.bytes(24),
            };
        }
        _ => {}
    }
    let mut case = sent(random, &ip);
    case.policy = random.between(POLICIES_BY_HAND, POLICIES - 1);
    if random.chance(15) {
        case.policy = random.below(POLICIES_BY_HAND);
    }
    case
}

/// Around the addresses that the policies' prefixes are made from.
pub(super) fn policy(random: &mut Random) -> Case {
    by_policy(random, |random, version| {
        let address = scene::outside(version, random.below(OUTSIDE.len()));
        let IpAddr::V4(address) = address else {
            return address;
        };
        // A neighbour of it, on either side of a prefix's end.
        let flip = random.one_of(&[0, 0, 0, 1, 0x100, 0x8000]);
        IpAddr::V4((u32::from(address) ^ flip).into())
    })
}

pub(super) fn host_service(random: &mut Random) -> Case {
    by_policy(random, |_, version| scene::outside(version, HOST))
}

pub(super) fn metadata(random: &mut Random) -> Case {
    by_policy(random, |_, version| scene::outside(version, METADATA))
}

/// A policy that changes between two packets holds for the second one.
pub(super) fn policy_change(random: &mut Random) -> Case {
    let mut case = policy(random);
    let step = case.steps[0].clone();
    for _ in 0..random.between(1, 3) {
        let mut step = step.clone();
        step.change = Some(match random.below(4) {
            0 => Change::Generation,
            _ => Change::Policy(random.below(POLICIES)),
        });
        case.steps.push(step);
    }
    case
}

pub(super) fn groups(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    ip.destination = scene::clone(version, random.below(NICS + 2));
    if random.chance(10) {
        ip.fragment = Some((random.one_of(&[0, 2]), true));
    }
    if random.chance(10) {
        let inside = packet_inside(random, version, ip.destination, ip.source).bytes();
        ip.transport = error_about(random, version, inside);
    }
    let mut case = sent(random, &ip);
    case.policy = random.below(POLICIES);
    case
}

/// A sandbox that packets go to is gone from one packet to the next.
pub(super) fn released(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    ip.destination = scene::clone(version, scene::NEIGHBOUR);
    let mut case = sent(random, &ip);
    // Of what was refused before, the reason may be the old one for as long as a decision lives.
    case.policy = 0;
    let mut step = case.steps[0].clone();
    step.change = Some(Change::Release);
    case.steps.push(step);
    let mut ingress = Ip::new(scene::outside(version, 2), ip.destination, ip.transport);
    ingress.ttl = 9;
    let frame = ingress.frame([2; 6], scene::ROUTERS[0]);
    let hook = random.one_of(&[Hook::Uplink, Hook::Shared]);
    case.steps.push(Step::new(hook, frame));
    case
}

/// Denied but for a question that came a while ago, or nearly.
pub(super) fn answer(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    ip.destination = scene::outside(version, random.below(OUTSIDE.len()));
    let mut flow = flow_of(&ip);
    if random.chance(20) {
        // About a packet of that flow, instead of in it.
        let mut question = Ip::new(ip.destination, ip.source, turned(&ip.transport));
        question.ttl = 3;
        if random.chance(25) {
            // Or about somebody else's.
            question.source = scene::outside(version, random.below(OUTSIDE.len()));
        }
        ip.transport = error_about(random, version, question.bytes());
    } else if random.chance(30) {
        ip.fragment = Some((0, true));
    }
    match random.below(12) {
        0 => flow.peer_port ^= 1,
        1 => flow.guest_port ^= 1,
        2 => flow.protocol ^= 1,
        3 => flow.peer = scene::outside(version, 0),
        4 => flow.nic = 1,
        _ => {}
    }
    let mut case = sent(random, &ip);
    if matches!(ip.fragment, Some((0, true))) {
        follow(random, &mut case, &ip);
    }
    let age = random.one_of(&[0, 1, 30, 55, 65, 290, 310, 4000]) * SECOND;
    case.answers.push(known(random, flow, age));
    case.policy = random.one_of(&[1, 2, 3, 5, 6]);
    if random.chance(40) {
        case.policy = random.between(POLICIES_BY_HAND, POLICIES - 1);
    }
    case
}

fn known(random: &mut Random, flow: Flow, age: u64) -> Known {
    Known {
        flow,
        age,
        via: random.one_of(&[Via::Uplink, Via::Stack]),
        // Who opens a connection is plain, and who sends an echo request.
        own: flow.protocol == UDP && random.chance(30),
        by_last_lease: random.chance(10),
    }
}

/// Later fragments: of the same packet, and of another one.
fn follow(random: &mut Random, case: &mut Case, ip: &Ip) {
    let mut later = ip.clone();
    later.fragment = Some((random.one_of(&[2, 3]), false));
    case.steps
        .push(Step::new(Hook::HostEnd, from_guest(&later)));
    // Of another place, or of the same.
    later.identification ^= random.one_of(&[0x101, 0x108]);
    case.steps
        .push(Step::new(Hook::HostEnd, from_guest(&later)));
}

/// The flow that a packet of the guest would answer in.
fn flow_of(ip: &Ip) -> Flow {
    let (protocol, bytes) = ip.transport_bytes();
    let (guest_port, peer_port) = match ip.transport {
        Transport::Echo { identifier, .. } => (identifier, 0),
        _ => (be16(&bytes, 0), be16(&bytes, 2)),
    };
    Flow {
        nic: 0,
        peer: ip.destination,
        protocol,
        peer_port,
        guest_port,
        fragment: None,
    }
}

/// The packet that this one answers.
fn turned(transport: &Transport) -> Transport {
    match transport.clone() {
        Transport::Tcp { ports, data, .. } => Transport::Tcp {
            ports: (ports.1, ports.0),
            flags: 0x02,
            data,
        },
        Transport::Udp {
            ports,
            data,
            summed,
        } => Transport::Udp {
            ports: (ports.1, ports.0),
            data,
            summed,
        },
        Transport::Echo {
            identifier, data, ..
        } => Transport::Echo {
            request: true,
            identifier,
            data,
        },
        other => other,
    }
}

/// Denied; then somebody asks; then allowed.
pub(super) fn answer_after_question(random: &mut Random) -> Case {
    let version = version(random);
    let mut transport = any_transport(random);
    if let Transport::Echo { request, .. } = &mut transport {
        *request = false;
    }
    let mut ip = outgoing(random, version, transport);
    ip.destination = scene::outside(version, random.below(OUTSIDE.len()));
    let mut question = Ip::new(
        ip.destination,
        scene::clone(version, 0),
        turned(&ip.transport),
    );
    if let Transport::Tcp { flags, .. } = &mut question.transport {
        // Only the first packet of a connection opens the way back.
        *flags = random.one_of(&[0x02, 0x02, 0xc2, 0x12, 0x10, 0x18, 0x03]);
    }
    let mut case = Case::new(twice(from_guest(&ip)));
    if random.chance(40) {
        // Asked before, some so long ago that only a new question counts.
        let age = random.one_of(&[1, 30, 65, 290, 310]) * SECOND;
        case.answers.push(known(random, flow_of(&ip), age));
    }
    let hook = random.one_of(&[Hook::Uplink, Hook::Shared]);
    let asked = question.frame([2; 6], scene::ROUTERS[0]);
    let mut asked = Step::new(hook, asked);
    if hook == Hook::Shared && random.chance(50) {
        asked.origin = Origin::Uplink;
    }
    case.steps.insert(1, asked);
    case.policy = random.one_of(&[1, 2, 3, 6]);
    if random.chance(30) {
        // Nobody knows who has asked of two who both may, when one no longer may.
        case.policy = random.below(POLICIES);
        case.steps[2].change = Some(Change::Policy(random.below(POLICIES)));
    }
    case.learn = random.chance(20);
    if random.chance(25) {
        case.variant = NETNS_SLOT;
    }
    if random.chance(20)
        && let Transport::Tcp { flags, .. } = &mut question.transport
    {
        // Something of a connection that isn't known comes before the one that begins with the same ports.
        *flags = 0x10;
        let stray = question.frame([2; 6], scene::ROUTERS[0]);
        let mut stray = Step::new(hook, stray);
        stray.origin = case.steps[1].origin;
        case.steps.insert(1, stray);
    }
    case
}

/// Somebody asks a published port, or the clone address itself, of a sandbox that may send anyway: the
/// answer must leave by where it is translated back, what is none goes the short way.
pub(super) fn published(random: &mut Random) -> Case {
    let mut case = if random.chance(50) {
        answer(random)
    } else {
        answer_after_question(random)
    };
    case.published = true;
    case.policy = random.one_of(&[0, 0, 0, 4, 5, 7, case.policy]);
    case
}

/// Fills a meter to well below or well above the burst, or hours above.
pub(super) fn meter(random: &mut Random, nic: usize, ingress: bool) -> MeterAt {
    let mut fill = |burst: u64| match random.below(6) {
        0 => 0,
        1 => 1000 * SECOND + burst,
        2 => burst + 10 * SECOND,
        // An uplink's queue takes this, nobody else.
        3 => burst + SECOND,
        4 => burst - SECOND,
        _ => burst / 2,
    };
    MeterAt {
        nic,
        ingress,
        bytes: fill(100 * SECOND),
        packets: fill(200 * SECOND),
        credit: Credit {
            bytes: paid_ahead(random),
            packets: paid_ahead(random),
        },
    }
}

/// Nothing, enough for some packets, or more than anybody pays ahead.
fn paid_ahead(random: &mut Random) -> u64 {
    random.one_of(&[0, 0, SECOND, 2 * SECOND, 3 * SECOND, 4 * SECOND])
}

fn limited(random: &mut Random, policy: usize) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    ip.ttl = 64;
    let mut case = sent(random, &ip);
    case.policy = policy;
    for _ in 0..random.below(3) {
        case.steps.push(case.steps[0].clone());
    }
    if random.chance(20) {
        as_super_packet(random, &mut case);
    }
    case.meters.push(meter(random, 0, false));
    case
}

pub(super) fn byte_limit(random: &mut Random) -> Case {
    let policy = random.one_of(&[9, 9, 11]);
    limited(random, policy)
}

pub(super) fn packet_limit(random: &mut Random) -> Case {
    let policy = random.one_of(&[10, 10, 11]);
    limited(random, policy)
}

/// Makes every step a packet of several segments.
pub(super) fn as_super_packet(random: &mut Random, case: &mut Case) {
    let size = random.one_of(&[16, 100, 536, 1400, 1448, 1460, 1461]);
    let known = random.chance(50);
    for step in &mut case.steps {
        step.gso_size = size;
        if known {
            step.gso_segs = (step.frame.len() as u32).div_ceil(size).max(1);
        }
    }
}

/// SCTP that a stack of this kernel sends, of chunks that fit all together: those of more only the kernel can judge.
pub(super) fn sctp_super_packet(random: &mut Random) -> Case {
    let version = version(random);
    let transport = sctp(random);
    let mut ip = outgoing(random, version, transport);
    ip.ttl = 64;
    let mut case = sent(random, &ip);
    case.policy = random.one_of(&[0, 9, 10, 11]);
    by_fragments(random, &mut case);
    case.meters.push(meter(random, 0, false));
    case
}

/// Twelve bytes of header, then chunks.
pub(super) fn sctp(random: &mut Random) -> Transport {
    let length = random.between(12, 1200);
    Transport::Raw {
        protocol: 132,
        bytes: random.bytes(length),
    }
}

/// Makes every step a packet of segments that the kernel keeps apart.
pub(super) fn by_fragments(random: &mut Random, case: &mut Case) {
    let segments = random.one_of(&[0, 1, 2, 3, 17, 45]);
    for step in &mut case.steps {
        step.gso_size = GSO_BY_FRAGS;
        step.gso_segs = segments;
    }
}

/// To addresses on links that nobody has asked for yet, when some were asked for already.
pub(super) fn neighbour_limit(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    let links = if version == 4 {
        ["192.0.2.100", "192.0.5.100"]
    } else {
        ["2001:db8:1::100", "2001:db8:4::100"]
    };
    let link: IpAddr = random.one_of(&links).parse().expect("an address");
    let steps = (0..random.between(2, 5)).map(|_| {
        let place = random.below(3) as u32;
        ip.destination = match link {
            IpAddr::V4(address) => Ipv4Addr::from(u32::from(address) + place).into(),
            IpAddr::V6(address) => Ipv6Addr::from(u128::from(address) + u128::from(place)).into(),
        };
        Step::new(Hook::HostEnd, from_guest(&ip))
    });
    let mut case = Case::new(steps.collect());
    settle(random, &mut case);
    case.asked = NEIGHBOURS_MAX - random.below(4);
    case
}

pub(super) fn ttl(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    ip.ttl = random.one_of(&[0, 1, 1, 2, 3, 255]);
    sent(random, &ip)
}

/// About as many segments as a guest may leave to the host, or as many bytes in fewer.
pub(super) fn segments(random: &mut Random) -> Case {
    let version = version(random);
    let mut ip = if random.chance(50) {
        let transport = tcp_segment(random);
        outgoing(random, version, transport)
    } else {
        let transport = udp_datagram(random);
        outgoing(random, version, transport)
    };
    let length = 2046 + random.below(5);
    payload(&mut ip.transport).resize(length, 0x5a);
    let mut case = sent(random, &ip);
    for step in &mut case.steps {
        step.gso_size = random.one_of(&[1, 1, 1, 2]);
    }
    case
}

/// Sizes around the MTU of each way out.
pub(super) fn mtu(random: &mut Random) -> Case {
    let version = version(random);
    let transport = if random.chance(50) {
        tcp_segment(random)
    } else {
        udp_datagram(random)
    };
    let mut ip = outgoing(random, version, transport);
    let mtu = random.one_of(&[1280, 1400, 1500]);
    let length = mtu - 2 + random.below(5);
    let headers = ip.bytes().len() - payload(&mut ip.transport).len();
    payload(&mut ip.transport).resize(length - headers, 0x5a);
    let mut case = sent(random, &ip);
    if random.chance(30) {
        // As large as it is, but to be cut into segments of such a size.
        let segment = (mtu - headers - 1 + random.below(3)) as u32;
        for step in &mut case.steps {
            step.gso_size = segment;
        }
    }
    if random.chance(20) {
        ip.destination = scene::clone(version, 8);
        for step in &mut case.steps {
            step.frame = from_guest(&ip);
        }
    }
    if case.steps[0].gso_size == 0 && random.chance(20) {
        let behind = random.between(1, 40);
        for step in &mut case.steps {
            step.frame.extend(random.bytes(behind));
        }
    }
    case
}

fn payload(transport: &mut Transport) -> &mut Vec<u8> {
    match transport {
        Transport::Tcp { data, .. }
        | Transport::Udp { data, .. }
        | Transport::Echo { data, .. }
        | Transport::Icmp { data, .. } => data,
        Transport::Summed { bytes, .. } | Transport::Raw { bytes, .. } => bytes,
    }
}

/// Packets of one destination and port that differ in what a decision must not remember: size, TTL,
/// fragments, ICMP type, payload.
pub(super) fn same_flow(random: &mut Random) -> Case {
    let version = version(random);
    let mut transport = any_transport(random);
    if random.chance(30) {
        // What later fragments have for a port.
        match &mut transport {
            Transport::Tcp { ports, .. } | Transport::Udp { ports, .. } => ports.1 = 0,
            Transport::Echo { request, .. } => *request = false,
            _ => {}
        }
    }
    let mut ip = outgoing(random, version, transport);
    ip.destination = match random.below(3) {
        0 => scene::clone(version, random.below(NICS + 1)),
        1 => scene::outside(version, HOST),
        _ => scene::outside(version, random.below(OUTSIDE.len())),
    };
    let steps = (0..random.between(3, 6))
        .map(|_| varied(random, &ip))
        .collect();
    let mut case = Case::new(steps);
    settle(random, &mut case);
    if random.chance(50) {
        case.policy = random.between(POLICIES_BY_HAND, POLICIES - 1);
    }
    case
}

fn varied(random: &mut Random, ip: &Ip) -> Step {
    let mut ip = ip.clone();
    match random.below(9) {
        0 => payload(&mut ip.transport).resize(1600, 7),
        1 => ip.ttl = random.one_of(&[0, 1, 2]),
        2 => ip.fragment = Some((random.one_of(&[0, 2]), true)),
        3 => ip.transport = echo(random),
        4 if !ip.is_ipv4() => ip.extensions.push((60, vec![0; 8])),
        5 => payload(&mut ip.transport).resize(1395, 7),
        // What is decided for all ports must not be taken where a policy's rules name some.
        6 | 7 => match &mut ip.transport {
            Transport::Tcp { ports, .. } | Transport::Udp { ports, .. } => {
                ports.1 = random.one_of(&PORTS);
            }
            _ => {}
        },
        _ => {}
    }
    let mut step = Step::new(Hook::HostEnd, from_guest(&ip));
    if random.chance(20) {
        step.gso_size = 1300;
    }
    step
}
