//! Translation between guest and clone addresses, also of the packet inside an ICMP error.

use std::net::IpAddr;

use super::{
    Fragment, Packet, checksum,
    packet::{
        DCCP, ETHERNET, ICMP, ICMPV6, TCP, UDP, UDP_LITE, be16, ipv4, ipv6, walk_extension_headers,
    },
};

/// What is to change in a packet.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Changes {
    /// New source address, and the one that it replaces inside an ICMP error's packet, where it is
    /// the destination.
    pub(crate) source: Option<Replacement>,
    /// New destination address; inside an ICMP error's packet it is the source.
    pub(crate) destination: Option<Replacement>,
    /// Takes one from TTL or hop limit.
    pub(crate) hop: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Replacement {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
}

/// The frame with the changes made and every checksum as wrong or right as it was.
pub(crate) fn translate(frame: &[u8], packet: &Packet, changes: &Changes) -> Vec<u8> {
    let mut new = frame.to_vec();
    if packet.is_icmp_error(frame) {
        let inside = packet.transport + 8..packet.end;
        let translated = translate_inside(&frame[inside.clone()], packet.version, changes);
        new[inside].copy_from_slice(&translated);
    }
    let header = ETHERNET..packet.transport;
    if let Some(replacement) = changes.source {
        put_address(&mut new[header.clone()], Side::Source, replacement.to);
    }
    if let Some(replacement) = changes.destination {
        put_address(&mut new[header.clone()], Side::Destination, replacement.to);
    }
    if changes.hop {
        new[ETHERNET + if packet.version == 4 { 8 } else { 7 }] -= 1;
    }
    if packet.version == 4 {
        fix(&frame[header.clone()], &mut new[header], 10);
    }
    if !packet.is_later_fragment() {
        let (old, new) = (&frame[..packet.end], &mut new[..packet.end]);
        fix_transport(old, new, ETHERNET, packet.transport, packet.protocol);
    }
    new
}

/// The packet inside an ICMP error went the other way: its destination is what the outer packet's
/// source is. It may be cut off anywhere.
fn translate_inside(old: &[u8], version: u8, changes: &Changes) -> Vec<u8> {
    let mut new = old.to_vec();
    let Some(inside) = Inside::parse(old, version) else {
        return new;
    };
    for (side, replacement) in [
        (Side::Destination, changes.source),
        (Side::Source, changes.destination),
    ] {
        if let Some(Replacement { from, to }) = replacement
            && address(old, side, version) == from
        {
            put_address(&mut new, side, to);
        }
    }
    if version == 4 {
        let header = ..inside.transport.min(old.len());
        fix(&old[header], &mut new[header], 10);
    }
    if inside.transport_bytes(old).is_some() {
        fix_transport(old, &mut new, 0, inside.transport, inside.protocol);
    }
    new
}

/// What can be told of a packet that may be cut off.
pub(crate) struct Inside {
    pub(crate) protocol: u8,
    transport: usize,
    /// False in later fragments, and where the way to the transport header can't be followed.
    transport_is_known: bool,
}

impl Inside {
    /// Reads it, if at least its addresses are there.
    pub(crate) fn parse(bytes: &[u8], version: u8) -> Option<Self> {
        if version == 4 {
            let transport = usize::from(bytes.first()? & 15) * 4;
            let fits = bytes.len() >= 20 && bytes[0] >> 4 == 4 && transport >= 20;
            return fits.then(|| Self {
                protocol: bytes[9],
                transport,
                transport_is_known: be16(bytes, 6) & 0x1fff == 0,
            });
        }
        if bytes.len() < 40 || bytes[0] >> 4 != 6 {
            return None;
        }
        // Extension headers as in a packet that is all there, except that nothing is an offence.
        let mut frame = vec![0; ETHERNET];
        frame.extend(bytes);
        let mut packet = Packet {
            version,
            source: ipv6(bytes, 8).into(),
            destination: ipv6(bytes, 24).into(),
            ttl: bytes[7],
            protocol: bytes[6],
            fragment: Fragment::Whole,
            transport: ETHERNET + 40,
            end: frame.len(),
        };
        let walked = walk_extension_headers(&frame, &mut packet);
        Some(Self {
            protocol: packet.protocol,
            transport: packet.transport - ETHERNET,
            transport_is_known: walked.is_ok() && !packet.is_later_fragment(),
        })
    }

    /// The transport header and what follows. Errors carry at least eight bytes of it; what has fewer is
    /// cut off.
    pub(crate) fn transport_bytes<'a>(&self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let rest = bytes.get(self.transport..)?;
        (self.transport_is_known && rest.len() >= 8).then_some(rest)
    }
}

#[derive(Clone, Copy)]
enum Side {
    Source,
    Destination,
}

fn address(ip: &[u8], side: Side, version: u8) -> IpAddr {
    match (version, side) {
        (4, Side::Source) => ipv4(ip, 12).into(),
        (4, Side::Destination) => ipv4(ip, 16).into(),
        (_, Side::Source) => ipv6(ip, 8).into(),
        (_, Side::Destination) => ipv6(ip, 24).into(),
    }
}

fn put_address(ip: &mut [u8], side: Side, address: IpAddr) {
    match (address, side) {
        (IpAddr::V4(address), Side::Source) => ip[12..16].copy_from_slice(&address.octets()),
        (IpAddr::V4(address), Side::Destination) => ip[16..20].copy_from_slice(&address.octets()),
        (IpAddr::V6(address), Side::Source) => ip[8..24].copy_from_slice(&address.octets()),
        (IpAddr::V6(address), Side::Destination) => ip[24..40].copy_from_slice(&address.octets()),
    }
}

/// Sets the checksum at `at` of `new` so that it is as right or wrong as it was in `old`.
fn fix(old: &[u8], new: &mut [u8], at: usize) {
    if old == new {
        return;
    }
    let fixed = checksum::carried_over(old, new, at);
    new[at..at + 2].copy_from_slice(&fixed.to_be_bytes());
}

/// Where a protocol's checksum is, and whether it covers the addresses.
fn checksum_of(version: u8, protocol: u8) -> Option<(usize, bool)> {
    match protocol {
        TCP => Some((16, true)),
        UDP | UDP_LITE | DCCP => Some((6, true)),
        ICMPV6 if version == 6 => Some((2, true)),
        ICMP if version == 4 => Some((2, false)),
        _ => None,
    }
}

/// Does the same for the transport's checksum, if it has one and if that is there.
fn fix_transport(old: &[u8], new: &mut [u8], ip: usize, transport: usize, protocol: u8) {
    let version = old[ip] >> 4;
    let Some((at, covers_addresses)) = checksum_of(version, protocol) else {
        return;
    };
    if transport + at + 2 > old.len() {
        return;
    }
    // Zero says that there is none.
    if protocol == UDP && be16(old, transport + at) == 0 {
        return;
    }
    let covered = |bytes: &[u8]| {
        let mut covered = Vec::new();
        if covers_addresses {
            covered = checksum::pseudo_header(
                address(&bytes[ip..], Side::Source, version),
                address(&bytes[ip..], Side::Destination, version),
                protocol,
                bytes.len() - transport,
            );
        }
        let before = covered.len();
        covered.extend(&bytes[transport..]);
        (covered, before)
    };
    let (old, _) = covered(old);
    let (now, before) = covered(new);
    if old == now {
        return;
    }
    let mut fixed = checksum::carried_over(&old, &now, before + at);
    if matches!(protocol, UDP | UDP_LITE) && fixed == 0 {
        fixed = 0xffff;
    }
    new[transport + at..transport + at + 2].copy_from_slice(&fixed.to_be_bytes());
}
