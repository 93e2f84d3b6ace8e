//! What tells a sender that its packet was too large.

use std::net::IpAddr;

use sandwire_engine::classify::{Fragment, ICMP, ICMPV6, IpHeaders};

use crate::checksum;

/// RFC 1812 §4.3.2.3: an ICMP message is at most this long, from its IP header on.
const ICMP_BYTES_MAX: usize = 576;
/// RFC 4443 §3.2: as much as fits into IPv6's smallest MTU.
const ICMPV6_BYTES_MAX: usize = 1280;
/// RFC 1812 §4.3.2.5: precedence "internetwork control".
const CONTROL: u8 = 0xc0;
const HOPS: u8 = 64;
const ETHERNET_ADDRESS_BYTES: usize = 6;

/// The frame that says so; none if the packet mustn't be answered.
pub(super) fn too_big(frame: &[u8], ip: &IpHeaders, mtu: u32) -> Option<Vec<u8>> {
    if !may_be_answered(frame, ip) {
        return None;
    }
    let packet = &frame[ip.offset..ip.end];
    let (to, from) = frame.split_at(ETHERNET_ADDRESS_BYTES);
    let (from, rest) = from.split_at(ETHERNET_ADDRESS_BYTES);
    let type_and_tags = &rest[..ip.offset - 2 * ETHERNET_ADDRESS_BYTES];
    let message = match (ip.source, ip.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            icmp(packet, source.octets(), destination.octets(), mtu)?
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            icmpv6(packet, source.octets(), destination.octets(), mtu)?
        }
        _ => return None,
    };
    Some([from, to, type_and_tags, &message].concat())
}

fn may_be_answered(frame: &[u8], ip: &IpHeaders) -> bool {
    let is_error = match (ip.protocol, ip.icmp) {
        (ICMP, Some((kind, _))) => matches!(kind, 3 | 4 | 5 | 11 | 12),
        (ICMPV6, Some((kind, _))) => kind < 128 || kind == 137,
        _ => false,
    };
    let is_group_frame = frame.first().is_some_and(|first| first & 1 != 0);
    !is_error
        && !is_group_frame
        && ip.fragment != Fragment::Later
        && is_one_host(ip.source)
        && is_one_host(ip.destination)
}

fn is_one_host(address: IpAddr) -> bool {
    let is_broadcast = matches!(address, IpAddr::V4(address) if address.is_broadcast());
    !(address.is_unspecified() || address.is_multicast() || is_broadcast)
}

/// From the packet's destination to its source.
fn icmp(packet: &[u8], source: [u8; 4], destination: [u8; 4], mtu: u32) -> Option<Vec<u8>> {
    let quote = &packet[..packet.len().min(ICMP_BYTES_MAX - 28)];
    let total = u16::try_from(28 + quote.len()).ok()?.to_be_bytes();
    let mtu = u16::try_from(mtu).ok()?.to_be_bytes();
    let mut header = vec![0x45, CONTROL, total[0], total[1], 0, 0, 0x40, 0, HOPS, ICMP];
    header.extend([0, 0]);
    header.extend(destination);
    header.extend(source);
    let checksum = checksum::finish(checksum::sum(0, &header));
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    let mut message = [&[3, 4, 0, 0, 0, 0, mtu[0], mtu[1]], quote].concat();
    let checksum = checksum::finish(checksum::sum(0, &message));
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    header.extend(message);
    Some(header)
}

fn icmpv6(packet: &[u8], source: [u8; 16], destination: [u8; 16], mtu: u32) -> Option<Vec<u8>> {
    let quote = &packet[..packet.len().min(ICMPV6_BYTES_MAX - 48)];
    let length = u16::try_from(8 + quote.len()).ok()?.to_be_bytes();
    let mut header = vec![0x60, 0, 0, 0, length[0], length[1], ICMPV6, HOPS];
    header.extend(destination);
    header.extend(source);
    let mut message = [&[2, 0, 0, 0], &mtu.to_be_bytes()[..], quote].concat();
    // RFC 8200 §8.1: the checksum counts addresses, length and protocol too.
    let pseudo = checksum::sum(u32::from(ICMPV6), &header[8..]);
    let pseudo = checksum::sum(pseudo, &length);
    let checksum = checksum::finish(checksum::sum(pseudo, &message));
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    header.extend(message);
    Some(header)
}
