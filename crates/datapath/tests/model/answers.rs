//! Answers to what came in pass where the same packet unasked would not.

use std::net::IpAddr;

use super::{
    Fragment, Packet,
    nat::Inside,
    packet::{ICMP, ICMPV6, TCP, UDP, be16, ipv4, ipv6},
    policy,
    world::{Uplink, World},
};

/// How long an answer may come after the question, in nanoseconds.
const TCP_LIFE: u64 = 300_000_000_000;
const OTHER_LIFE: u64 = 60_000_000_000;
/// An entry is renewed when it is older than this.
const RENEWAL: u64 = 5_000_000_000;
/// Fragmented answers to one peer that are known at a time.
const FRAGMENTS: u32 = 8;

fn life_of(protocol: u8) -> u64 {
    if protocol == TCP {
        TCP_LIFE
    } else {
        OTHER_LIFE
    }
}

/// A conversation that somebody began with a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Flow {
    pub(crate) nic: usize,
    pub(crate) peer: IpAddr,
    /// Of IP, where ICMP and ICMPv6 are two.
    pub(crate) protocol: u8,
    pub(crate) peer_port: u16,
    /// Or the identifier of an echo.
    pub(crate) guest_port: u16,
    /// Place of a fragmented answer, by its identification; then there are no ports.
    pub(crate) fragment: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) seen: u64,
    pub(crate) via: Via,
    /// The sandbox might send there by itself then, and so may have begun.
    pub(crate) own: bool,
    /// What a fragmented answer's place doesn't say of its identification.
    pub(crate) fragment: u16,
    /// Of the sandbox's interface, when it came.
    pub(crate) lease: u32,
}

/// The way that the question came, which the answer takes as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    Uplink = 1,
    Stack = 2,
}

impl Answer {
    /// Whether it is of late, and not of another lease's.
    fn counts(&self, flow: &Flow, lease: u32, now: u64) -> bool {
        self.lease == lease && now.saturating_sub(self.seen) <= life_of(flow.protocol)
    }
}

/// Whether a packet of a guest is an answer, and by which way it leaves then. The first fragment
/// opens the way to the others. `denied`: it would be dropped else.
pub(crate) fn find(
    world: &mut World,
    nic: usize,
    frame: &[u8],
    packet: &Packet,
    now: u64,
    denied: bool,
) -> Option<Via> {
    let lease = world.nics[nic].lease;
    let flow = flow_of_answer(nic, frame, packet)?;
    let answer = world.answers.get(&flow)?;
    if !answer.counts(&flow, lease, now) || (denied && answer.own) {
        return None;
    }
    if let Fragment::Later { identification } = packet.fragment
        && answer.fragment != rest_of(identification)
    {
        return None;
    }
    let via = answer.via;
    if let Fragment::First { identification } = packet.fragment {
        let later = later_fragments(nic, packet, identification);
        let answer = Answer {
            seen: now,
            via,
            own: false,
            fragment: rest_of(identification),
            lease,
        };
        world.answers.insert(later, answer);
    }
    Some(via)
}

fn later_fragments(nic: usize, packet: &Packet, identification: u32) -> Flow {
    Flow {
        nic,
        peer: packet.destination,
        protocol: packet.protocol,
        peer_port: 0,
        guest_port: 0,
        fragment: Some(identification % FRAGMENTS + 1),
    }
}

fn rest_of(identification: u32) -> u16 {
    ((identification / FRAGMENTS) & 0xffff) as u16
}

/// The conversation that a packet of a guest would belong to.
fn flow_of_answer(nic: usize, frame: &[u8], packet: &Packet) -> Option<Flow> {
    if let Fragment::Later { identification } = packet.fragment {
        return Some(later_fragments(nic, packet, identification));
    }
    let bytes = packet.transport_bytes(frame);
    if packet.is_icmp_error(frame) {
        return flow_inside(nic, packet.version, &bytes[8..]);
    }
    let (guest_port, peer_port) = if packet.is_echo_reply(frame) {
        (be16(bytes, 4), 0)
    } else {
        packet.ports(frame)?
    };
    Some(Flow {
        nic,
        peer: packet.destination,
        protocol: packet.protocol,
        peer_port,
        guest_port,
        fragment: None,
    })
}

/// The conversation that a packet inside an ICMP error, which a guest received, belongs to.
fn flow_inside(nic: usize, version: u8, inside: &[u8]) -> Option<Flow> {
    let found = Inside::parse(inside, version)?;
    let peer: IpAddr = if version == 4 {
        ipv4(inside, 12).into()
    } else {
        ipv6(inside, 8).into()
    };
    let protocol = found.protocol;
    let rest = found.transport_bytes(inside)?;
    let (peer_port, guest_port) = match protocol {
        TCP | UDP => (be16(rest, 0), be16(rest, 2)),
        ICMP if version == 4 && rest[0] == 8 => (0, be16(rest, 4)),
        ICMPV6 if version == 6 && rest[0] == 128 => (0, be16(rest, 4)),
        _ => return None,
    };
    Some(Flow {
        nic,
        peer,
        protocol,
        peer_port,
        guest_port,
        fragment: None,
    })
}

/// Remembers a packet towards a sandbox, if it is one that may be answered.
pub(crate) fn learn(
    world: &mut World,
    nic: usize,
    frame: &[u8],
    packet: &Packet,
    via: Via,
    from_host: bool,
    now: u64,
) {
    let receiver = &world.nics[nic];
    if !receiver.remembers(&world.policies) {
        return;
    }
    let bytes = packet.transport_bytes(frame);
    let opens_tcp = receiver.learn || bytes.get(13).is_some_and(|flags| flags & 0x12 == 0x02);
    let (peer_port, guest_port, opens) = match packet.ports(frame) {
        Some((source, destination)) => (source, destination, packet.protocol == UDP || opens_tcp),
        None if packet.is_echo_request(frame) => (0, be16(bytes, 4), true),
        None => return,
    };
    let flow = Flow {
        nic,
        peer: packet.source,
        protocol: packet.protocol,
        peer_port,
        guest_port,
        fragment: None,
    };
    let lease = receiver.lease;
    let may_go_back = packet.protocol == UDP && may_send_back(world, nic, frame, packet, from_host);
    // What has expired was never there.
    let known = world.answers.get(&flow).copied();
    let known = known.filter(|answer| answer.counts(&flow, lease, now));
    let own = match known {
        // A new question by another way is answered by that one.
        Some(answer) => {
            let is_stale =
                now.saturating_sub(answer.seen) > RENEWAL || (opens && answer.via != via);
            // What the sandbox may have begun, and is denied since, runs out.
            (is_stale && (!answer.own || may_go_back)).then_some(answer.own)
        }
        // Sandboxes answer each other where their groups may talk.
        None => (opens && !world.clones.contains_key(&packet.source)).then_some(may_go_back),
    };
    if let Some(own) = own {
        let answer = Answer {
            seen: now,
            via,
            own,
            fragment: 0,
            lease,
        };
        world.answers.insert(flow, answer);
    }
}

/// Whether the policy lets a sandbox send by itself to where a datagram comes from.
fn may_send_back(
    world: &World,
    nic: usize,
    frame: &[u8],
    packet: &Packet,
    from_host: bool,
) -> bool {
    let policy = &world.policies[world.nics[nic].policy];
    let at = packet.transport;
    let mut back = frame.to_vec();
    back[at..at + 2].copy_from_slice(&frame[at + 2..at + 4]);
    back[at + 2..at + 4].copy_from_slice(&frame[at..at + 2]);
    let returning = Packet {
        source: packet.destination,
        destination: packet.source,
        ..packet.clone()
    };
    let may_leave = if from_host {
        policy::host_service(policy, &back, &returning).is_ok()
    } else {
        policy.uplink != Uplink::Deny
    };
    may_leave && policy::egress(policy, &back, &returning).is_ok()
}
