//! What a frame says about itself, and rules that ask for it.
//!
//! [`parse`] reads a frame's headers: Ethernet with up to two VLAN tags, IPv4 with options, IPv6 with up to eight
//! extension headers, and the ports of TCP, UDP, UDP-Lite, DCCP and SCTP. It accepts any bytes and takes bounded time:
//! what is cut short, contradicts itself or goes on for too long is left out, never guessed. Checksums are not looked
//! at. A [`Match`] is a rule over headers; [`flow_hash`] is one number per flow.
//!
//! Only the first fragment of a datagram has ports. Nothing here remembers datagrams, so a later fragment matches only
//! rules that don't ask for ports, and a flow's fragments, the first among them, have a hash of their own.

#![forbid(unsafe_code)]

mod rule;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use rule::{Match, MatchError};

/// The headers of one frame, as far as it has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Headers {
    /// Missing if the frame is shorter than 14 bytes.
    pub ethernet: Option<Ethernet>,
    /// Identifier of the outermost VLAN tag, 0 to 4095.
    pub vlan: Option<u16>,
    /// Identifier of the tag inside that one.
    pub inner_vlan: Option<u16>,
    /// Missing if the frame carries something else than IP, or no whole IP header.
    pub ip: Option<IpHeaders>,
}

/// The Ethernet header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ethernet {
    /// To whom.
    pub destination: [u8; 6],
    /// From whom.
    pub source: [u8; 6],
    /// What is inside the VLAN tags: an EtherType, or a length if it is below 1536.
    pub ether_type: u16,
    /// Where that begins, in bytes from the frame's start.
    pub payload_offset: usize,
}

/// The IP header, and what comes right after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpHeaders {
    /// 4 or 6.
    pub version: IpVersion,
    /// From whom.
    pub source: IpAddr,
    /// To whom.
    pub destination: IpAddr,
    /// What the packet carries, by IANA's number: after IPv6's extension headers if all of them can be followed,
    /// else the number of the first that can't.
    pub protocol: u8,
    /// Which part of a datagram it is.
    pub fragment: Fragment,
    /// Source and destination port. Missing where the protocol has none, and in later fragments.
    pub ports: Option<(u16, u16)>,
    /// Type and code of an ICMP or ICMPv6 message. Missing in later fragments.
    pub icmp: Option<(u8, u8)>,
    /// Where the IP header begins, in bytes from the frame's start.
    pub offset: usize,
    /// Where what `protocol` says begins; in a later fragment, its part of the data.
    pub payload_offset: usize,
    /// Where the packet ends: what the frame has after that is padding. Never past the frame's end.
    pub end: usize,
}

/// Which Internet Protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// Which part of a datagram a packet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fragment {
    /// All of it.
    Whole,
    /// The first, with the transport header.
    First,
    /// A later one, without ports.
    Later,
}

/// IANA's number of ICMP.
pub const ICMP: u8 = 1;
/// IANA's number of TCP.
pub const TCP: u8 = 6;
/// IANA's number of UDP.
pub const UDP: u8 = 17;
/// IANA's number of ICMPv6.
pub const ICMPV6: u8 = 58;
/// IANA's number of SCTP.
pub const SCTP: u8 = 132;
const DCCP: u8 = 33;
const UDP_LITE: u8 = 136;

/// Reads a frame's headers.
#[must_use]
pub fn parse(frame: &[u8]) -> Headers {
    let mut headers = Headers::default();
    let (Some(destination), Some(source)) = (array(frame, 0), array(frame, 6)) else {
        return headers;
    };
    let Some(mut ether_type) = be16(frame, 12) else {
        return headers;
    };
    let mut payload_offset = ETHERNET_BYTES;
    for vlan in [&mut headers.vlan, &mut headers.inner_vlan] {
        if !is_vlan_tag(ether_type) {
            break;
        }
        let (Some(tag), Some(inside)) =
            (be16(frame, payload_offset), be16(frame, payload_offset + 2))
        else {
            break;
        };
        *vlan = Some(tag & VLAN_ID_MASK);
        ether_type = inside;
        payload_offset += VLAN_TAG_BYTES;
    }
    headers.ethernet = Some(Ethernet {
        destination,
        source,
        ether_type,
        payload_offset,
    });
    headers.ip = match ether_type {
        ETHER_TYPE_IPV4 => parse_ipv4(frame, payload_offset),
        ETHER_TYPE_IPV6 => parse_ipv6(frame, payload_offset),
        _ => None,
    };
    headers
}

/// One number for a flow: all frames of the same source, destination, protocol and ports have it, and those of the way
/// back have another. Fragments count without ports, so all of a datagram have the same; frames without IP by their
/// Ethernet addresses and type. VLANs count.
///
/// It is the same on every machine and in every version, and has no key: whoever chooses addresses and ports can make
/// flows that share a number.
#[must_use]
pub fn flow_hash(headers: &Headers) -> u64 {
    let tags = u64::from(headers.vlan.map_or(0, |vlan| vlan + 1)) << 16
        | u64::from(headers.inner_vlan.map_or(0, |vlan| vlan + 1));
    if let Some(ip) = &headers.ip {
        let ports = match (ip.fragment, ip.ports) {
            (Fragment::Whole, Some((source, destination))) => {
                1 << 32 | u64::from(source) << 16 | u64::from(destination)
            }
            _ => 0,
        };
        let mut hash = mix(mix(0, tags << 8 | u64::from(ip.protocol)), ports);
        for address in [ip.source, ip.destination] {
            let (high, low) = match address {
                IpAddr::V4(address) => (0, u64::from(address.to_bits())),
                IpAddr::V6(address) => halves(address.to_bits()),
            };
            hash = mix(mix(hash, high), low);
        }
        return hash;
    }
    headers.ethernet.map_or(0, |ethernet| {
        let kind = mix(0, tags << 16 | u64::from(ethernet.ether_type));
        mix(
            mix(kind, number(ethernet.source)),
            number(ethernet.destination),
        )
    })
}

fn parse_ipv4(frame: &[u8], offset: usize) -> Option<IpHeaders> {
    let packet = frame.get(offset..)?;
    let first = *packet.first()?;
    let header_bytes = usize::from(first & 0x0f) * 4;
    let total = usize::from(be16(packet, 2)?);
    if first >> 4 != 4
        || header_bytes < IPV4_BYTES_MIN
        || total < header_bytes
        || packet.len() < header_bytes
    {
        return None;
    }
    let place = be16(packet, 6)?;
    let (more, place) = (place & IPV4_MORE_FRAGMENTS != 0, place & IPV4_PLACE_MASK);
    let source = Ipv4Addr::from_octets(array(packet, 12)?);
    let destination = Ipv4Addr::from_octets(array(packet, 16)?);
    let mut ip = IpHeaders {
        version: IpVersion::V4,
        source: source.into(),
        destination: destination.into(),
        protocol: *packet.get(9)?,
        fragment: Fragment::of(more, place),
        ports: None,
        icmp: None,
        offset,
        payload_offset: offset + header_bytes,
        end: offset + total.min(packet.len()),
    };
    ip.read_payload(frame);
    Some(ip)
}

fn parse_ipv6(frame: &[u8], offset: usize) -> Option<IpHeaders> {
    let packet = frame.get(offset..)?;
    if packet.len() < IPV6_BYTES || *packet.first()? >> 4 != 6 {
        return None;
    }
    // A jumbogram says 0 here and its length in an option; it ends with the frame.
    let end = match usize::from(be16(packet, 4)?) {
        0 => packet.len(),
        payload => packet.len().min(IPV6_BYTES + payload),
    };
    let source = Ipv6Addr::from_octets(array(packet, 8)?);
    let destination = Ipv6Addr::from_octets(array(packet, 24)?);
    let mut ip = IpHeaders {
        version: IpVersion::V6,
        source: source.into(),
        destination: destination.into(),
        protocol: *packet.get(6)?,
        fragment: Fragment::Whole,
        ports: None,
        icmp: None,
        offset,
        payload_offset: offset + IPV6_BYTES,
        end: offset + end,
    };
    if ip.skip_extensions(frame) {
        ip.read_payload(frame);
    }
    Some(ip)
}

impl IpHeaders {
    /// Goes past IPv6's extension headers; false if what comes then can't be told.
    fn skip_extensions(&mut self, frame: &[u8]) -> bool {
        for _ in 0..EXTENSIONS_MAX {
            if !is_extension(self.protocol) {
                return true;
            }
            let Some(extension) = frame.get(self.payload_offset..self.end) else {
                return false;
            };
            let (Some(&next), Some(&length)) = (extension.first(), extension.get(1)) else {
                return false;
            };
            let bytes = match self.protocol {
                EXTENSION_FRAGMENT => 8,
                EXTENSION_AUTHENTICATION => (usize::from(length) + 2) * 4,
                _ => (usize::from(length) + 1) * 8,
            };
            if extension.len() < bytes {
                return false;
            }
            if self.protocol == EXTENSION_FRAGMENT {
                let Some(place) = be16(extension, 2) else {
                    return false;
                };
                self.fragment = Fragment::of(place & 1 != 0, place >> 3);
            }
            self.protocol = next;
            self.payload_offset += bytes;
            if self.fragment == Fragment::Later {
                return true;
            }
        }
        !is_extension(self.protocol)
    }

    /// Reads ports, or type and code.
    fn read_payload(&mut self, frame: &[u8]) {
        if self.fragment == Fragment::Later {
            return;
        }
        let payload = frame.get(self.payload_offset..self.end).unwrap_or_default();
        match (self.protocol, self.version) {
            (protocol, _) if has_ports(protocol) => {
                self.ports = be16(payload, 0).zip(be16(payload, 2));
            }
            (ICMP, IpVersion::V4) | (ICMPV6, IpVersion::V6) => {
                self.icmp = payload.first().copied().zip(payload.get(1).copied());
            }
            _ => {}
        }
    }
}

impl Fragment {
    fn of(more: bool, place: u16) -> Self {
        match (place, more) {
            (0, false) => Self::Whole,
            (0, true) => Self::First,
            _ => Self::Later,
        }
    }
}

/// Whether the number is that of an IPv6 extension header whose length is known: hop-by-hop, routing, fragment,
/// authentication, destination options, mobility, HIP, Shim6. (IANA, "IPv6 Extension Header Types"; what ESP hides
/// can't be read.)
fn is_extension(protocol: u8) -> bool {
    matches!(protocol, 0 | 43 | 44 | 51 | 60 | 135 | 139 | 140)
}

/// Whether the protocol's header begins with a source and a destination port.
fn has_ports(protocol: u8) -> bool {
    matches!(protocol, TCP | UDP | DCCP | SCTP | UDP_LITE)
}

/// 802.1Q, 802.1ad, and what was in use before 802.1ad.
fn is_vlan_tag(ether_type: u16) -> bool {
    matches!(ether_type, 0x8100 | 0x88a8 | 0x9100)
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    array(bytes, at).map(u16::from_be_bytes)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

fn halves(number: u128) -> (u64, u64) {
    #[expect(clippy::cast_possible_truncation, reason = "that half is the other")]
    let halves = ((number >> 64) as u64, number as u64);
    halves
}

fn number(address: [u8; 6]) -> u64 {
    address
        .iter()
        .fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Takes a word into a hash: the finalizer of `SplitMix64`, which changes half of the bits for each bit changed.
fn mix(hash: u64, word: u64) -> u64 {
    let mut mixed = (hash ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

const ETHERNET_BYTES: usize = 14;
const VLAN_TAG_BYTES: usize = 4;
const VLAN_ID_MASK: u16 = 0x0fff;
const ETHER_TYPE_IPV4: u16 = 0x0800;
const ETHER_TYPE_IPV6: u16 = 0x86dd;
const IPV4_BYTES_MIN: usize = 20;
const IPV4_MORE_FRAGMENTS: u16 = 0x2000;
const IPV4_PLACE_MASK: u16 = 0x1fff;
const IPV6_BYTES: usize = 40;
const EXTENSION_FRAGMENT: u8 = 44;
const EXTENSION_AUTHENTICATION: u8 = 51;

/// Extension headers that are followed; a host sends each at most once, destination options twice (RFC 8200, 4.1).
const EXTENSIONS_MAX: usize = 8;

#[cfg(test)]
mod tests;
