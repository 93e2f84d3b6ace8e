//! Children of the host's interfaces: what guests of other kinds send and receive, with the child's own addresses, and
//! what only children meet: siblings, neighbours, a MAC that is shared, the relay.

use std::net::IpAddr;

use super::{
    Case, Hook, Make, Step, egress,
    egress::{any_transport, outgoing, put_source, settle, version},
    fragments,
    frames::{Transport, octets},
    ingress, odd,
    random::Random,
    scene::{self, CHILD, GUEST_MAC, NICS, POLICIES, SHARED_CHILD, SIBLING, STRANGER},
    situations,
};

/// One of those, turned into a child's.
fn one_of(random: &mut Random, makes: &[Make]) -> Case {
    let make = random.one_of(makes);
    let mut case = make(random);
    case.variant = match case.variant {
        scene::HOST_SLOT | scene::NETNS_SLOT => random.one_of(&[CHILD, CHILD, SHARED_CHILD]),
        other => other,
    };
    case.published = false;
    for step in &mut case.steps {
        step.hook = match step.hook {
            Hook::HostEnd => Hook::FromChild,
            _ => Hook::ToChild,
        };
        own_addresses(&mut step.frame);
        if step.hook == Hook::FromChild && step.frame.len() >= 14 && random.chance(5) {
            let to = random.one_of(&[GUEST_MAC, [0xff; 6], [0x33, 0x33, 0, 0, 0, 1]]);
            step.frame[..6].copy_from_slice(&to);
        }
    }
    case
}

/// A container has its clone address itself.
fn own_addresses(frame: &mut [u8]) {
    for version in [4, 6] {
        let (guest, own) = (
            octets(scene::guest(version)),
            octets(scene::clone(version, 0)),
        );
        let mut at = 0;
        while at + guest.len() <= frame.len() {
            if frame[at..].starts_with(&guest) {
                frame[at..at + own.len()].copy_from_slice(&own);
            }
            at += 1;
        }
    }
}

pub(super) fn link(random: &mut Random) -> Case {
    let makes: [Make; 7] = [
        odd::arp,
        odd::arp_spoofed,
        odd::neighbour_solicitation,
        odd::neighbour_others,
        odd::link_chatter,
        odd::rogue_dhcp,
        odd::rogue_ra,
    ];
    let mut case = one_of(random, &makes);
    if random.chance(30) {
        // Of membership nothing comes from beyond the link.
        for step in case.steps.iter_mut().filter(|step| step.frame.len() > 21) {
            step.frame[21] = 1;
        }
    }
    case
}

pub(super) fn egress(random: &mut Random) -> Case {
    let makes: [Make; 11] = [
        egress::tcp,
        egress::udp,
        egress::udp_without_checksum,
        egress::echo4,
        egress::echo6,
        egress::other_transports,
        egress::icmp_error,
        egress::icmp6_error,
        egress::icmp_error_cut_off,
        odd::reserved,
        odd::gateway,
    ];
    one_of(random, &makes)
}

pub(super) fn parts(random: &mut Random) -> Case {
    let makes: [Make; 8] = [
        fragments::first,
        fragments::later,
        fragments::tiny,
        fragments::offset_one,
        fragments::options,
        fragments::one_extension,
        fragments::extension_chain,
        fragments::bad_extensions,
    ];
    one_of(random, &makes)
}

/// What the sender leaves to be cut.
pub(super) fn super_packet(random: &mut Random) -> Case {
    let makes: [Make; 3] = [
        fragments::super_fragment,
        situations::segments,
        situations::sctp_super_packet,
    ];
    one_of(random, &makes)
}

pub(super) fn broken(random: &mut Random) -> Case {
    let makes: [Make; 7] = [
        odd::vlan,
        odd::ethertype,
        odd::truncated,
        odd::mutated,
        odd::spoofed_mac,
        odd::spoofed_address,
        odd::not_leased,
    ];
    one_of(random, &makes)
}

pub(super) fn policy(random: &mut Random) -> Case {
    let makes: [Make; 6] = [
        situations::policy,
        situations::policy_change,
        situations::host_service,
        situations::metadata,
        situations::groups,
        situations::released,
    ];
    one_of(random, &makes)
}

pub(super) fn answer(random: &mut Random) -> Case {
    one_of(
        random,
        &[situations::answer, situations::answer_after_question],
    )
}

pub(super) fn limit(random: &mut Random) -> Case {
    one_of(
        random,
        &[
            situations::byte_limit,
            situations::packet_limit,
            ingress::limit,
        ],
    )
}

pub(super) fn ingress(random: &mut Random) -> Case {
    let makes: [Make; 9] = [
        ingress::from_uplink,
        ingress::from_host,
        ingress::not_ours,
        ingress::spoofed,
        ingress::fragments,
        ingress::mutated,
        ingress::from_host_mutated,
        ingress::icmp_error,
        ingress::mtu,
    ];
    one_of(random, &makes)
}

/// To and from other sandboxes, most often another child.
pub(super) fn sibling(random: &mut Random) -> Case {
    let version = version(random);
    let transport = any_transport(random);
    let mut ip = outgoing(random, version, transport);
    let any = random.below(NICS + 1);
    let other = random.one_of(&[SIBLING, SIBLING, STRANGER, any]);
    ip.destination = scene::clone(version, other);
    let mut case = one_of_frame(random, egress::from_guest(&ip));
    if random.chance(50) {
        let mut back = ip.clone();
        (back.source, back.destination) = (scene::clone(version, other), scene::clone(version, 0));
        let frame = back.frame(GUEST_MAC, [6, 0, 0, 0, 0, 1]);
        case.steps.push(Step::new(Hook::ToChild, frame));
    }
    case
}

fn one_of_frame(random: &mut Random, frame: Vec<u8>) -> Case {
    let mut case = Case::new(egress::twice(frame));
    settle(random, &mut case);
    case.variant = random.one_of(&[CHILD, SHARED_CHILD]);
    for step in &mut case.steps {
        step.hook = Hook::FromChild;
        own_addresses(&mut step.frame);
    }
    case
}

/// What neighbours say, to it and to others.
pub(super) fn neighbours(random: &mut Random) -> Case {
    let makes: [Make; 5] = [
        odd::arp,
        odd::arp_spoofed,
        odd::neighbour_solicitation,
        odd::neighbour_others,
        odd::rogue_ra,
    ];
    let mut case = one_of(random, &makes);
    for step in &mut case.steps {
        step.hook = Hook::ToChild;
        if random.chance(80) {
            step.frame[6..12].copy_from_slice(&[6, 0, 0, 0, 0, 1]);
        }
        let is_query = step.frame.len() > 54 && step.frame[12..14] == [0x86, 0xdd];
        if is_query && random.chance(30) {
            (step.frame[21], step.frame[54]) = (1, 130);
        }
    }
    case
}

/// To where only the relay leads, and close by.
pub(super) fn redirect(random: &mut Random) -> Case {
    let version = version(random);
    let transport = match random.below(4) {
        0 => Transport::Tcp {
            ports: (random.word(), random.one_of(&[443, 443, 442, 444, 80])),
            flags: random.one_of(&[0x02, 0x10]),
            data: random.bytes(20),
        },
        _ => any_transport(random),
    };
    let mut ip = outgoing(random, version, transport);
    ip.destination = scene::outside(version, random.one_of(&[2, 2, 5, 5, 6]));
    if random.chance(15) {
        ip.fragment = Some((random.one_of(&[0, 2]), true));
    }
    let mut case = one_of_frame(random, egress::from_guest(&ip));
    case.policy = random.below(POLICIES);
    if random.chance(30) {
        // Answers too leave only inside TLS.
        let call: IpAddr = ip.destination;
        let mut back = ip.clone();
        (back.source, back.destination) = (call, scene::clone(version, 0));
        back.fragment = None;
        if let Transport::Tcp { ports, flags, .. } = &mut back.transport {
            (*ports, *flags) = ((ports.1, ports.0), 0x02);
        }
        if let Transport::Udp { ports, .. } = &mut back.transport {
            *ports = (ports.1, ports.0);
        }
        let mut frame = back.frame(GUEST_MAC, [6, 0, 0, 0, 0, 1]);
        put_source(&mut frame, call);
        case.steps.insert(0, Step::new(Hook::ToChild, frame));
    }
    case
}
