//! A guest speaks for itself only.

use std::net::IpAddr;

use sandwire_api::drop_reason::DropReason;

use super::{
    Packet, link, nat,
    packet::{UDP, ipv4, ipv6, mac},
    world::Nic,
};

/// Who sent a frame: told by the source MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sender {
    /// The guest behind the TAP.
    Guest,
    /// A process in the slot's namespace: it uses the clone address.
    Process,
}

/// Judges the source MAC address.
pub(crate) fn source_mac(nic: &Nic, frame: &[u8]) -> Result<Sender, DropReason> {
    let source = mac(frame, 6);
    if source == nic.guest_mac {
        return Ok(Sender::Guest);
    }
    if nic.netns && source == nic.veth_mac {
        return Ok(Sender::Process);
    }
    Err(DropReason::SourceMac)
}

/// What an ICMP error is about came from whom it goes to, and to whom sends it.
fn about_own(frame: &[u8], packet: &Packet) -> Result<(), DropReason> {
    if !packet.is_icmp_error(frame) {
        return Ok(());
    }
    let inside = &packet.transport_bytes(frame)[8..];
    let is_there = nat::Inside::parse(inside, packet.version).is_some();
    let (source, destination) = match packet.version {
        _ if !is_there => return Err(DropReason::SourceAddress),
        4 => (ipv4(inside, 12).into(), ipv4(inside, 16).into()),
        _ => (ipv6(inside, 8).into(), ipv6(inside, 24).into()),
    };
    match (packet.destination, packet.source) == (source, destination) {
        true => Ok(()),
        false => Err(DropReason::SourceAddress),
    }
}

/// Judges what a packet claims to be and from whom. Neighbour discovery passes with more sources
/// than others; [`link::discovery`] judges it afterwards.
pub(crate) fn source(
    nic: &Nic,
    frame: &[u8],
    packet: &Packet,
    sender: Sender,
) -> Result<(), DropReason> {
    let ports = (packet.protocol == UDP)
        .then(|| packet.ports(frame))
        .flatten();
    let dhcp_server = if packet.version == 4 { 67 } else { 547 };
    if ports.is_some_and(|(source, _)| source == dhcp_server) {
        return Err(DropReason::RogueDhcp);
    }
    if packet.version == 6 && packet.icmp_type(frame) == Some(134) {
        return Err(DropReason::RogueRa);
    }
    let addresses = nic.addresses(packet.version).expect("looked at before");
    let own = match sender {
        Sender::Guest => addresses.guest,
        Sender::Process => addresses.clone,
    };
    if packet.source == own {
        return about_own(frame, packet);
    }
    if packet.version == 4 && packet.source.is_unspecified() && ports == Some((68, 67)) {
        return Err(DropReason::LinkChatter);
    }
    let local = link::is_link_local(packet.source);
    let discovers = link::is_discovery(packet, frame) && (local || packet.source.is_unspecified());
    let gateway = IpAddr::from(link::GATEWAY_LINK_LOCAL);
    let greets_gateway = local && packet.destination == gateway && packet.is_echo_request(frame);
    if discovers || greets_gateway {
        return Ok(());
    }
    if packet.version == 6 && local && packet.destination.is_multicast() {
        return Err(DropReason::Multicast);
    }
    Err(DropReason::SourceAddress)
}
