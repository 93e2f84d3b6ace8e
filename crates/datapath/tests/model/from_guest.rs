//! Egress: what a sandbox sends.

use sandwire_api::drop_reason::DropReason;

use super::{
    Dropped, Input, Macs, Outcome, Packet, Stage, Verdict, World, antispoof,
    antispoof::Sender,
    link,
    nat::{self, Changes, Replacement},
    packet::{TYPE_ARP, TYPE_IPV4, TYPE_IPV6, TYPES_VLAN, be16, mac},
    police::{self, Size},
    policy,
    route::{self, Decision},
    world::State,
};

/// A guest may leave it to the host to cut a packet into so many.
const SEGMENTS_MAX: u64 = 2048;

/// Judges a frame on the ingress of a host end.
pub(crate) fn run(world: &mut World, input: &Input) -> Outcome {
    let nic = select(world, input);
    match judge(world, nic, input) {
        Ok(outcome) => outcome,
        Err(dropped) => Outcome::dropped(world, input, dropped),
    }
}

/// One veth serves all interfaces of a slot; the last byte of the source MAC tells them apart.
fn select(world: &World, input: &Input) -> usize {
    let first = &world.nics[input.class];
    let source = mac(&input.frame, 6);
    let distance = source[5].wrapping_sub(first.guest_mac[5]);
    if first.netns && source != first.veth_mac && distance < first.count {
        return input.class + usize::from(distance);
    }
    input.class
}

fn judge(world: &mut World, number: usize, input: &Input) -> Result<Outcome, Dropped> {
    let by_sender = |reason| Dropped::egress(number, reason);
    // What only its link hears is judged in one stage.
    let on_link = |reason| Dropped {
        stage: Stage::Antispoof,
        ..Dropped::egress(number, reason)
    };
    let nic = &world.nics[number];
    let frame = &input.frame;
    if nic.state != State::Active {
        return Err(by_sender(DropReason::NotLeased));
    }
    let ethertype = be16(frame, 12);
    if TYPES_VLAN.contains(&ethertype) {
        return Err(by_sender(DropReason::VlanTag));
    }
    let sender = antispoof::source_mac(nic, frame).map_err(by_sender)?;
    // Whoever was seen last is whom packets to the sandbox are for. A process must send something that
    // goes somewhere for that: the namespace speaks on its link in any case.
    if sender == Sender::Guest {
        world.nics[number].process = false;
    }
    let nic = &world.nics[number];
    let version = match ethertype {
        TYPE_ARP if sender == Sender::Process => return Err(by_sender(DropReason::LinkChatter)),
        TYPE_ARP => {
            let reply = link::arp(nic, frame).map_err(on_link)?;
            return Ok(answered(world, number, input, reply));
        }
        TYPE_IPV4 => 4,
        TYPE_IPV6 => 6,
        _ => return Err(by_sender(DropReason::Ethertype)),
    };
    if nic.addresses(version).is_none() {
        return Err(by_sender(DropReason::NoAddress));
    }
    let packet = Packet::parse(frame).map_err(by_sender)?;
    if sender == Sender::Process
        && let Some(other) = process_of(world, input, &packet)
        && other != number
    {
        return judge_packet(world, other, input, &packet, sender);
    }
    judge_packet(world, number, input, &packet, sender)
}

/// A process in the namespace has the clone addresses of all its interfaces on one veth: which one
/// sends is told by the address.
fn process_of(world: &World, input: &Input, packet: &Packet) -> Option<usize> {
    let other = *world.clones.get(&packet.source)?;
    let first = input.class;
    let count = usize::from(world.nics[first].count);
    let own = first..first + count;
    (own.contains(&other) && world.nics[other].state == State::Active).then_some(other)
}

/// Judges an IP packet by what it claims and where it goes.
fn judge_packet(
    world: &mut World,
    number: usize,
    input: &Input,
    packet: &Packet,
    sender: Sender,
) -> Result<Outcome, Dropped> {
    let by_sender = |reason| Dropped::egress(number, reason);
    let on_link = |reason| Dropped {
        stage: Stage::Antispoof,
        ..Dropped::egress(number, reason)
    };
    let nic = &world.nics[number];
    let frame = &input.frame;
    if is_cut_badly(input, packet) {
        return Err(by_sender(DropReason::Malformed));
    }
    antispoof::source(nic, frame, packet, sender).map_err(on_link)?;
    if link::is_discovery(packet, frame) {
        if sender == Sender::Process {
            return Err(by_sender(DropReason::LinkChatter));
        }
        let answer = link::discovery(nic, frame, packet).map_err(on_link)?;
        return Ok(answered(world, number, input, answer));
    }
    if link::is_gateway(nic, packet.destination) {
        let reply = link::gateway(frame, packet).map_err(by_sender)?;
        return Ok(answered(world, number, input, reply));
    }
    policy::destination(packet.destination).map_err(by_sender)?;
    if sender == Sender::Process {
        world.nics[number].process = true;
    }
    let decision = route::decide(world, number, frame, packet, input.now).map_err(by_sender)?;
    deliver(world, number, input, packet, decision)
}

/// Whether a super-packet is one that the kernel mustn't cut.
pub(super) fn is_cut_badly(input: &Input, packet: &Packet) -> bool {
    // What is a fragment already can't be cut into others, nor into segments.
    let is_cut_twice = input.gso_size != 0 && packet.is_fragment();
    // Nothing is kept apart of what comes from a TAP or a packet socket.
    let is_cut_nowhere = input.gso_size == police::GSO_BY_FRAGS && input.gso_segs == 0;
    is_cut_twice || is_cut_nowhere || police::size(input, packet).segments > SEGMENTS_MAX
}

fn answered(world: &mut World, number: usize, input: &Input, frame: Vec<u8>) -> Outcome {
    let nic = &mut world.nics[number];
    nic.counters.egress.add(input.frame.len(), 1);
    Outcome {
        verdict: Verdict::Answered,
        reason: None,
        stage: Stage::Redirect,
        nic: Some(number),
        ingress: false,
        target: nic.ifindex,
        receiver: None,
        frame,
        macs: Macs::Path,
        mark: None,
        departure: None,
    }
}

/// Limits, translation and the way out.
fn deliver(
    world: &mut World,
    number: usize,
    input: &Input,
    packet: &Packet,
    decision: Decision,
) -> Result<Outcome, Dropped> {
    let frame = &input.frame;
    let size = police::size(input, packet);
    let decision = what_the_stack_must_refuse(world, number, frame, packet, size, decision)
        .map_err(|reason| Dropped::egress(number, reason))?;
    let may_wait = match decision {
        Decision::Uplink { ifindex, .. } => world.uplinks[&ifindex],
        _ => false,
    };
    let shift = world.pays_ahead.then_some(world.credit_shift);
    let limit = world.policies[world.nics[number].policy].egress;
    let departure = police::police(
        &limit,
        &mut world.nics[number].egress,
        size,
        input.now,
        may_wait,
        shift,
    )
    .map_err(|reason| Dropped::egress(number, reason))?;
    if let Decision::Sandbox(receiver) = decision {
        let limit = world.policies[world.nics[receiver].policy].ingress;
        let meter = &mut world.nics[receiver].ingress;
        police::police(&limit, meter, size, input.now, false, shift).map_err(|reason| Dropped {
            receiver: Some(receiver),
            ..Dropped::egress(number, reason)
        })?;
        let ingress = &mut world.nics[receiver].counters.ingress;
        ingress.add(frame.len(), size.segments);
    }
    let egress = &mut world.nics[number].counters.egress;
    egress.add(frame.len(), size.segments);
    let mut outcome = send(world, number, input, packet, decision);
    outcome.departure = departure;
    Ok(outcome)
}

/// Packets that nobody may forward go to the host's stack, whose ICMP tells the guest.
fn what_the_stack_must_refuse(
    world: &World,
    number: usize,
    frame: &[u8],
    packet: &Packet,
    size: Size,
    decision: Decision,
) -> Result<Decision, DropReason> {
    let nic = &world.nics[number];
    let mtu = match decision {
        Decision::Uplink { ifindex, .. } => world.interfaces[&ifindex].mtu,
        Decision::Sandbox(receiver) => world.nics[receiver].mtu,
        Decision::Stack => return Ok(Decision::Stack),
    };
    // The stack puts fragments together before it cuts them anew: it gets all of a datagram or none.
    let all_or_none = packet.is_fragment() && nic.mtu > mtu;
    if packet.ttl <= 1 || size.ip > mtu as usize || all_or_none {
        if matches!(decision, Decision::Uplink { .. }) {
            route::stack_may_have(world, nic, frame, packet)?;
        }
        return Ok(Decision::Stack);
    }
    Ok(decision)
}

fn send(
    world: &World,
    number: usize,
    input: &Input,
    packet: &Packet,
    decision: Decision,
) -> Outcome {
    let nic = &world.nics[number];
    let own = nic.addresses(packet.version).expect("looked at before");
    let mut changes = Changes {
        source: (!nic.process).then_some(Replacement {
            from: own.guest,
            to: own.clone,
        }),
        ..Changes::default()
    };
    let mut macs = Macs::Path;
    let mut mark = None;
    let (verdict, target, addresses) = match decision {
        Decision::Uplink { ifindex, neighbour } => {
            changes.hop = true;
            macs = neighbour.map_or(Macs::Kernel, |_| Macs::PathOrKernel);
            let addresses = neighbour.map(|to| (to, world.interfaces[&ifindex].mac));
            (Verdict::Uplink, ifindex, addresses)
        }
        Decision::Sandbox(receiver) => {
            changes.hop = true;
            let other = &world.nics[receiver];
            let theirs = other
                .addresses(packet.version)
                .expect("it has a clone address");
            changes.destination = (!other.process).then_some(Replacement {
                from: theirs.clone,
                to: theirs.guest,
            });
            let to = if other.process {
                other.veth_mac
            } else {
                other.guest_mac
            };
            (
                Verdict::Sandbox,
                other.ifindex,
                Some((to, other.gateway_mac)),
            )
        }
        Decision::Stack => {
            let policy = &world.policies[nic.policy];
            mark = (policy.mark != 0).then_some(policy.mark);
            (
                Verdict::Stack,
                nic.shared_ifindex,
                Some((nic.shared_mac, nic.guest_mac)),
            )
        }
    };
    let mut frame = nat::translate(&input.frame, packet, &changes);
    if let Some((to, from)) = addresses {
        frame[..6].copy_from_slice(&to);
        frame[6..12].copy_from_slice(&from);
    }
    Outcome {
        verdict,
        reason: None,
        stage: Stage::Redirect,
        nic: Some(number),
        ingress: false,
        target,
        receiver: match decision {
            Decision::Sandbox(receiver) => Some(receiver),
            _ => None,
        },
        frame,
        macs,
        mark,
        departure: None,
    }
}
