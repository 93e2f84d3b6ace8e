//! What a guest says to its link: ARP, neighbour discovery, echo to the gateway. Some of it is
//! answered by the path itself.

use std::net::{IpAddr, Ipv6Addr};

use sandwire_api::drop_reason::DropReason;

use super::{
    Fragment, Mac, Packet, checksum,
    packet::{ETHERNET, ICMPV6, be16, ipv4, ipv6, mac},
    world::{Addresses, Nic},
};

/// The gateway's link-local address, the same for everybody.
pub(crate) const GATEWAY_LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

const ROUTER_SOLICITATION: u8 = 133;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
const MULTICAST_LISTENERS: [u8; 4] = [130, 131, 132, 143];

/// Judges an ARP packet: the answer to it, or why it is dropped.
pub(crate) fn arp(nic: &Nic, frame: &[u8]) -> Result<Vec<u8>, DropReason> {
    let own = arp_sender(nic, frame)?;
    let arp = &frame[ETHERNET..];
    let operation = be16(arp, 6);
    let target: IpAddr = ipv4(arp, 24).into();
    if target == own.guest {
        return Err(DropReason::LinkChatter);
    }
    match operation {
        1 if target == own.gateway => Ok(arp_reply(nic, frame)),
        2 => Err(DropReason::LinkChatter),
        _ => Err(DropReason::Arp),
    }
}

/// Judges whether an ARP packet speaks for the guest alone, whose addresses it returns.
pub(crate) fn arp_sender(nic: &Nic, frame: &[u8]) -> Result<Addresses, DropReason> {
    let arp = &frame[ETHERNET..];
    let ethernet_and_ipv4 = [0, 1, 8, 0, 6, 4];
    if arp.len() < 28 || arp[..6] != ethernet_and_ipv4 {
        return Err(DropReason::Malformed);
    }
    let own = nic.v4.ok_or(DropReason::NoAddress)?;
    let sender: IpAddr = ipv4(arp, 14).into();
    let speaks_for_itself =
        mac(arp, 8) == mac(frame, 6) && (sender == own.guest || sender.is_unspecified());
    if !speaks_for_itself {
        return Err(DropReason::Arp);
    }
    Ok(own)
}

fn arp_reply(nic: &Nic, frame: &[u8]) -> Vec<u8> {
    let mut reply = frame.to_vec();
    reply[..6].copy_from_slice(&frame[6..12]);
    reply[6..12].copy_from_slice(&nic.gateway_mac);
    reply[21] = 2;
    // Sender: the gateway. Target: who asked.
    reply[22..28].copy_from_slice(&nic.gateway_mac);
    reply[28..32].copy_from_slice(&frame[38..42]);
    reply[32..42].copy_from_slice(&frame[22..32]);
    reply
}

/// Whether it is neighbour discovery or multicast listener discovery.
pub(crate) fn is_discovery(packet: &Packet, frame: &[u8]) -> bool {
    packet.icmp_type(frame).is_some_and(|kind| {
        packet.version == 6
            && (matches!(
                kind,
                ROUTER_SOLICITATION | NEIGHBOUR_SOLICITATION | NEIGHBOUR_ADVERTISEMENT
            ) || MULTICAST_LISTENERS.contains(&kind))
    })
}

pub(crate) fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.segments()[0] & 0xffc0 == 0xfe80)
}

/// Judges a packet for which [`is_discovery`] holds and whose source may say such things.
pub(crate) fn discovery(nic: &Nic, frame: &[u8], packet: &Packet) -> Result<Vec<u8>, DropReason> {
    let message = packet.transport_bytes(frame);
    let kind = message[0];
    if MULTICAST_LISTENERS.contains(&kind) {
        return Err(DropReason::LinkChatter);
    }
    // From beyond a router, or in fragments, which RFC 6980 forbids.
    if packet.ttl != 255 || packet.fragment != Fragment::Whole {
        return Err(DropReason::Neighbour);
    }
    if kind == ROUTER_SOLICITATION {
        return Err(DropReason::LinkChatter);
    }
    if message.len() < 24 {
        return Err(DropReason::Malformed);
    }
    let target: IpAddr = ipv6(message, 8).into();
    let own = nic.v6.expect("looked at before");
    let own_or_link_local = target == own.guest || is_link_local(target);
    if kind == NEIGHBOUR_ADVERTISEMENT {
        return Err(if own_or_link_local {
            DropReason::LinkChatter
        } else {
            DropReason::Neighbour
        });
    }
    if !names_only(&message[24..], 1, mac(frame, 6)) {
        return Err(DropReason::Neighbour);
    }
    if target == own.gateway || target == IpAddr::from(GATEWAY_LINK_LOCAL) {
        if packet.source.is_unspecified() {
            return Err(DropReason::LinkChatter);
        }
        // Extension headers have no place here.
        if packet.transport != ETHERNET + 40 {
            return Err(DropReason::Neighbour);
        }
        return Ok(advertisement(nic, frame, packet, target));
    }
    // Duplicate address detection.
    if own_or_link_local && packet.source.is_unspecified() {
        return Err(DropReason::LinkChatter);
    }
    Err(DropReason::Neighbour)
}

/// Options that a solicitation may have.
const OPTIONS_MAX: usize = 7;

/// Whether the options are well formed, and each link-layer address of this kind among them is this one.
pub(crate) fn names_only(mut options: &[u8], kind: u8, own: Mac) -> bool {
    for _ in 0..OPTIONS_MAX {
        if options.is_empty() {
            return true;
        }
        let length = usize::from(options.get(1).copied().unwrap_or(0)) * 8;
        if length == 0 || options.len() < 8 {
            return false;
        }
        if options[0] == kind && (length != 8 || mac(options, 2) != own) {
            return false;
        }
        match options.get(length..) {
            Some(rest) => options = rest,
            None => return false,
        }
    }
    options.is_empty()
}

/// The gateway's answer: a solicited advertisement that carries its MAC address.
fn advertisement(nic: &Nic, frame: &[u8], packet: &Packet, target: IpAddr) -> Vec<u8> {
    let (IpAddr::V6(target), IpAddr::V6(asker)) = (target, packet.source) else {
        unreachable!("neighbour discovery is IPv6");
    };
    // Router, solicited, override.
    let mut message = vec![NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, 0xe0, 0, 0, 0];
    message.extend(target.octets());
    message.extend([2, 1]);
    message.extend(nic.gateway_mac);
    let pseudo = checksum::pseudo_header(target.into(), asker.into(), ICMPV6, message.len());
    let sum = checksum::of(&[pseudo, message.clone()].concat());
    message[2..4].copy_from_slice(&sum.to_be_bytes());

    let mut answer = frame[6..12].to_vec();
    answer.extend(nic.gateway_mac);
    answer.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 32, ICMPV6, 255]);
    answer.extend(target.octets());
    answer.extend(asker.octets());
    answer.extend(message);
    answer
}

/// Whether this is an address of the gateway.
pub(crate) fn is_gateway(nic: &Nic, address: IpAddr) -> bool {
    let gateways = [nic.v4, nic.v6].map(|own| own.map(|own| own.gateway));
    gateways.contains(&Some(address)) || address == IpAddr::from(GATEWAY_LINK_LOCAL)
}

/// Judges a packet to the gateway: the echo reply, or why it is dropped.
pub(crate) fn gateway(frame: &[u8], packet: &Packet) -> Result<Vec<u8>, DropReason> {
    if !packet.is_echo_request(frame) || packet.fragment != Fragment::Whole {
        return Err(DropReason::GatewayService);
    }
    let mut reply = frame.to_vec();
    reply[..6].copy_from_slice(&frame[6..12]);
    reply[6..12].copy_from_slice(&frame[..6]);
    let (source, size, ttl) = if packet.version == 4 {
        (ETHERNET + 12, 4, ETHERNET + 8)
    } else {
        (ETHERNET + 8, 16, ETHERNET + 7)
    };
    let destination = source + size;
    reply[source..destination].copy_from_slice(&frame[destination..destination + size]);
    reply[destination..destination + size].copy_from_slice(&frame[source..destination]);
    reply[ttl] = 64;
    if packet.version == 4 {
        let header = ETHERNET..packet.transport;
        let sum = checksum::carried_over(&frame[header.clone()], &reply[header], 10);
        reply[ETHERNET + 10..ETHERNET + 12].copy_from_slice(&sum.to_be_bytes());
    }
    let message = packet.transport..packet.end;
    reply[message.start] = if packet.version == 4 { 0 } else { 129 };
    // Swapped addresses add up to the same, so the pseudo-header of ICMPv6 doesn't matter here.
    let sum = checksum::carried_over(&frame[message.clone()], &reply[message.clone()], 2);
    reply[message.start + 2..message.start + 4].copy_from_slice(&sum.to_be_bytes());
    Ok(reply)
}
