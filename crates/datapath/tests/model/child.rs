//! A container's interface that is a child of one of the host's: what it sends and what it receives, judged on itself.
//!
//! Nothing is translated or sent elsewhere: a frame goes on as it is, or not at all. What the network says to others
//! isn't counted.

use std::net::{IpAddr, Ipv6Addr};

use sandwire_api::drop_reason::DropReason;

use super::{
    Dropped, Fragment, Input, Macs, Outcome, Packet, Stage, Verdict, World, answers,
    antispoof::{self, Sender},
    from_guest, link,
    packet::{
        ETHERNET, TYPE_ARP, TYPE_IPV4, TYPE_IPV6, TYPES_VLAN, UDP, be16, destination_of, ipv4,
        ipv6, mac,
    },
    police::{self, Size},
    policy, route,
    world::{Nic, Policy, State, Uplink},
};

const MULTICAST_QUERY: u8 = 130;
const ROUTER_SOLICITATION: u8 = 133;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;

/// Judges what the child sends.
pub(crate) fn send(world: &mut World, input: &Input) -> Outcome {
    match judge_sent(world, input) {
        Ok(verdict) => passes(input, verdict, false),
        Err(dropped) => Outcome::dropped(world, input, dropped),
    }
}

/// Judges what the child receives.
pub(crate) fn receive(world: &mut World, input: &Input) -> Outcome {
    match judge_received(world, input) {
        Ok(true) => passes(input, Verdict::Guest, true),
        Ok(false) => Outcome {
            verdict: Verdict::Drop,
            nic: None,
            stage: Stage::Parse,
            ..passes(input, Verdict::Drop, true)
        },
        Err(dropped) => Outcome::dropped(world, input, dropped),
    }
}

fn passes(input: &Input, verdict: Verdict, ingress: bool) -> Outcome {
    Outcome {
        verdict,
        reason: None,
        stage: Stage::Redirect,
        nic: Some(input.class),
        ingress,
        target: 0,
        receiver: None,
        frame: input.frame.clone(),
        macs: Macs::Path,
        mark: None,
        departure: None,
    }
}

fn judge_sent(world: &mut World, input: &Input) -> Result<Verdict, Dropped> {
    let number = input.class;
    let by_sender = |reason| Dropped::egress(number, reason);
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
    if mac(frame, 6) != nic.guest_mac {
        return Err(by_sender(DropReason::SourceMac));
    }
    let version = match ethertype {
        TYPE_ARP => {
            link::arp_sender(nic, frame).map_err(on_link)?;
            return leave(world, input, whole(frame), Verdict::Uplink);
        }
        TYPE_IPV4 => 4,
        TYPE_IPV6 => 6,
        _ => return Err(by_sender(DropReason::Ethertype)),
    };
    if nic.addresses(version).is_none() {
        return Err(by_sender(DropReason::NoAddress));
    }
    let packet = Packet::parse(frame).map_err(by_sender)?;
    if from_guest::is_cut_badly(input, &packet) {
        return Err(by_sender(DropReason::Malformed));
    }
    let size = police::size(input, &packet);
    antispoof::source(nic, frame, &packet, Sender::Guest).map_err(on_link)?;
    if link::is_discovery(&packet, frame) {
        own_discovery(nic, frame, &packet).map_err(on_link)?;
        return leave(world, input, size, Verdict::Uplink);
    }
    if frame[0] & 1 != 0 {
        return Err(by_sender(DropReason::Multicast));
    }
    policy::destination(packet.destination).map_err(by_sender)?;
    // Nothing is routed here.
    let verdict = destination(world, input, &packet).map_err(|reason| Dropped {
        stage: Stage::Policy,
        ..Dropped::egress(number, reason)
    })?;
    leave(world, input, size, verdict)
}

/// What is judged by more than the packet alone: siblings, the policy, answers, redirects.
fn destination(world: &mut World, input: &Input, packet: &Packet) -> Result<Verdict, DropReason> {
    let nic = &world.nics[input.class];
    let own = &world.policies[nic.policy];
    if let Some(receiver) = world.clones.get(&packet.destination) {
        sibling(world, nic, *receiver)?;
        return Ok(Verdict::Sandbox);
    }
    // The kernel gives the host what no child of the shared MAC has.
    if nic.has_parents_mac && mac(&input.frame, 0) == nic.guest_mac {
        return Err(DropReason::HostService);
    }
    let unasked = by_policy(own, &input.frame, packet);
    if let Err(reason) = unasked {
        let answers = own.answers && route::may_be_an_answer(own, reason);
        if !answers
            || answers::find(world, input.class, &input.frame, packet, input.now, true).is_none()
        {
            return Err(reason);
        }
    }
    // Also answers.
    redirect(world, &input.frame, packet)?;
    Ok(Verdict::Uplink)
}

fn by_policy(own: &Policy, frame: &[u8], packet: &Packet) -> Result<(), DropReason> {
    policy::egress(own, frame, packet)?;
    match own.uplink {
        Uplink::Deny => Err(DropReason::UplinkDenied),
        _ => Ok(()),
    }
}

/// Another sandbox must be a child as well.
fn sibling(world: &World, nic: &Nic, receiver: usize) -> Result<(), DropReason> {
    let other = &world.nics[receiver];
    if other.state != State::Active {
        return Err(DropReason::NoSuchSandbox);
    }
    if !route::may_reach(world, nic, other) {
        return Err(DropReason::OtherSandbox);
    }
    if !other.child {
        return Err(DropReason::NoRoute);
    }
    Ok(())
}

/// What may leave only by the relay doesn't leave.
fn redirect(world: &World, frame: &[u8], packet: &Packet) -> Result<(), DropReason> {
    let of_source = world
        .redirects
        .iter()
        .filter(|redirect| redirect.from.contains(&packet.source));
    let denied = Policy {
        allow: true,
        prefixes: of_source.map(|redirect| redirect.to.clone()).collect(),
        ..Policy::default()
    };
    policy::strictly(&denied, frame, packet).map_err(|_| DropReason::NotRelayed)
}

fn leave(
    world: &mut World,
    input: &Input,
    size: Size,
    verdict: Verdict,
) -> Result<Verdict, Dropped> {
    let shift = world.pays_ahead.then_some(world.credit_shift);
    let nic = &mut world.nics[input.class];
    let limit = world.policies[nic.policy].egress;
    police::police(&limit, &mut nic.egress, size, input.now, false, shift)
        .map_err(|reason| Dropped::egress(input.class, reason))?;
    nic.counters.egress.add(input.frame.len(), size.segments);
    Ok(verdict)
}

/// A frame without an IP packet.
fn whole(frame: &[u8]) -> Size {
    Size {
        segments: 1,
        wire_bytes: frame.len() as u64,
        ip: frame.len() - ETHERNET,
    }
}

fn asks_for_address(frame: &[u8], packet: &Packet) -> bool {
    packet.version == 4
        && packet.source.is_unspecified()
        && packet.protocol == UDP
        && packet.ports(frame) == Some((68, 67))
}

/// The address of its own link that a MAC gives; with its parent's it has none.
fn own_link_local(nic: &Nic) -> Option<IpAddr> {
    let [a, b, c, d, e, f] = nic.guest_mac;
    let words = [
        0xfe80,
        0,
        0,
        0,
        u16::from_be_bytes([a ^ 2, b]),
        u16::from_be_bytes([c, 0xff]),
        u16::from_be_bytes([0xfe, d]),
        u16::from_be_bytes([e, f]),
    ];
    (!nic.has_parents_mac).then(|| Ipv6Addr::from(words).into())
}

fn is_own(nic: &Nic, address: IpAddr) -> bool {
    let own = nic.v6.map(|own| own.guest);
    nic.v6.is_some() && (Some(address) == own || Some(address) == own_link_local(nic))
}

/// Judges what a child says to its neighbours: of itself alone.
fn own_discovery(nic: &Nic, frame: &[u8], packet: &Packet) -> Result<(), DropReason> {
    let message = packet.transport_bytes(frame);
    let kind = message[0];
    if [MULTICAST_QUERY, ROUTER_SOLICITATION].contains(&kind) {
        return Err(DropReason::LinkChatter);
    }
    if !packet.source.is_unspecified() && !is_own(nic, packet.source) {
        return Err(DropReason::SourceAddress);
    }
    if packet.fragment != Fragment::Whole {
        return Err(DropReason::Neighbour);
    }
    let asks = kind == NEIGHBOUR_SOLICITATION;
    if !asks && kind != NEIGHBOUR_ADVERTISEMENT {
        // Membership stays on the link.
        return match packet.ttl {
            1 => Ok(()),
            _ => Err(DropReason::Neighbour),
        };
    }
    if packet.ttl != 255 || packet.transport != ETHERNET + 40 {
        return Err(DropReason::Neighbour);
    }
    if message.len() < 24 {
        return Err(DropReason::Malformed);
    }
    let option = if asks { 1 } else { 2 };
    if !link::names_only(&message[24..], option, nic.guest_mac) {
        return Err(DropReason::Neighbour);
    }
    let target: IpAddr = ipv6(message, 8).into();
    let must_be_own = !asks || packet.source.is_unspecified();
    if must_be_own && !is_own(nic, target) {
        return Err(DropReason::Neighbour);
    }
    Ok(())
}

/// Whether it passes; what is others' affair doesn't, and isn't counted.
fn judge_received(world: &mut World, input: &Input) -> Result<bool, Dropped> {
    let number = input.class;
    let nic = &world.nics[number];
    let frame = &input.frame;
    let ethertype = be16(frame, 12);
    if nic.state != State::Active || TYPES_VLAN.contains(&ethertype) {
        return Ok(false);
    }
    if ethertype == TYPE_ARP {
        if !concerns_arp(nic, &frame[ETHERNET..]) {
            return Ok(false);
        }
        return Ok(arrives(world, input, whole(frame)));
    }
    let Some(destination) = destination_of(frame) else {
        return Ok(false);
    };
    let version = if destination.is_ipv4() { 4 } else { 6 };
    let is_own = nic
        .addresses(version)
        .is_some_and(|own| own.guest == destination);
    let packet = match Packet::parse(frame) {
        Ok(packet) => packet,
        Err(reason) if is_own => return Err(Dropped::ingress(number, reason)),
        Err(_) => return Ok(false),
    };
    let size = police::size(input, &packet);
    let is_on_link = link::is_discovery(&packet, frame) || asks_for_address(frame, &packet);
    if is_own && !is_on_link {
        admit(world, input, &packet, size)?;
        return Ok(arrives(world, input, size));
    }
    if is_own || concerns_discovery(nic, frame, &packet) {
        return Ok(arrives(world, input, size));
    }
    Ok(false)
}

fn arrives(world: &mut World, input: &Input, size: Size) -> bool {
    let ingress = &mut world.nics[input.class].counters.ingress;
    ingress.add(input.frame.len(), size.segments);
    true
}

/// From a sibling that may, or from the world, whose call opens the way back; within the limit.
fn admit(world: &mut World, input: &Input, packet: &Packet, size: Size) -> Result<(), Dropped> {
    let number = input.class;
    let by_receiver = |reason| Dropped::ingress(number, reason);
    if let Some(sender) = world.clones.get(&packet.source) {
        let sender = &world.nics[*sender];
        if sender.state != State::Active || !sender.child {
            return Err(by_receiver(DropReason::SourceAddress));
        }
        if !route::may_reach(world, sender, &world.nics[number]) {
            return Err(by_receiver(DropReason::OtherSandbox));
        }
    } else {
        let via = answers::Via::Uplink;
        answers::learn(world, number, &input.frame, packet, via, false, input.now);
    }
    let shift = world.pays_ahead.then_some(world.credit_shift);
    let nic = &mut world.nics[number];
    let limit = world.policies[nic.policy].ingress;
    police::police(&limit, &mut nic.ingress, size, input.now, false, shift).map_err(by_receiver)?;
    Ok(())
}

/// About its address, or somebody's word about himself.
fn concerns_arp(nic: &Nic, arp: &[u8]) -> bool {
    let Some(own) = nic.v4.filter(|_| arp.len() >= 28) else {
        return false;
    };
    let (sender, target): (IpAddr, IpAddr) = (ipv4(arp, 14).into(), ipv4(arp, 24).into());
    target == own.guest || target == sender
}

/// What neighbour discovery and multicast membership need to hear.
fn concerns_discovery(nic: &Nic, frame: &[u8], packet: &Packet) -> bool {
    if packet.version != 6 || nic.v6.is_none() || packet.is_fragment() {
        return false;
    }
    match packet.icmp_type(frame) {
        Some(MULTICAST_QUERY) => packet.ttl == 1,
        Some(NEIGHBOUR_ADVERTISEMENT) => packet.ttl == 255,
        Some(NEIGHBOUR_SOLICITATION) => {
            let message = packet.transport_bytes(frame);
            packet.ttl == 255 && message.len() >= 24 && is_own(nic, ipv6(message, 8).into())
        }
        _ => false,
    }
}
