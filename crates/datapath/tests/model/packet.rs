//! From bytes to an IP packet, or the reason why they are none.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use sandwire_api::drop_reason::DropReason;

use super::Mac;

pub(crate) const ETHERNET: usize = 14;
pub(crate) const TYPE_IPV4: u16 = 0x0800;
pub(crate) const TYPE_ARP: u16 = 0x0806;
pub(crate) const TYPE_IPV6: u16 = 0x86dd;
pub(crate) const TYPES_VLAN: [u16; 2] = [0x8100, 0x88a8];

pub(crate) const ICMP: u8 = 1;
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const DCCP: u8 = 33;
pub(crate) const ICMPV6: u8 = 58;
pub(crate) const NONE: u8 = 59;
pub(crate) const UDP_LITE: u8 = 136;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION: u8 = 60;
/// Extension headers that a packet may have.
const EXTENSION_HEADERS_MAX: usize = 8;

/// Which part of a packet this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fragment {
    /// All of it.
    Whole,
    /// The first fragment: it has the ports.
    First { identification: u32 },
    /// A later one.
    Later { identification: u32 },
}

/// An IP packet in a frame. Offsets count from the start of the frame.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(crate) version: u8,
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    /// TTL or hop limit.
    pub(crate) ttl: u8,
    pub(crate) protocol: u8,
    pub(crate) fragment: Fragment,
    /// Where the transport header starts.
    pub(crate) transport: usize,
    /// Where the IP packet ends; padding may follow.
    pub(crate) end: usize,
}

/// Big-endian number at an offset.
pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Ethernet address at an offset.
pub(crate) fn mac(bytes: &[u8], at: usize) -> Mac {
    bytes[at..at + 6].try_into().expect("six bytes")
}

pub(crate) fn ipv4(bytes: &[u8], at: usize) -> Ipv4Addr {
    let octets: [u8; 4] = bytes[at..at + 4].try_into().expect("four bytes");
    octets.into()
}

pub(crate) fn ipv6(bytes: &[u8], at: usize) -> Ipv6Addr {
    let octets: [u8; 16] = bytes[at..at + 16].try_into().expect("sixteen bytes");
    octets.into()
}

/// Where an IP header says that a frame goes; IPv6 that stands for IPv4 goes nowhere.
pub(crate) fn destination_of(frame: &[u8]) -> Option<IpAddr> {
    let ip = &frame[ETHERNET..];
    match be16(frame, 12) {
        TYPE_IPV4 if ip.len() >= 20 => Some(ipv4(ip, 16).into()),
        TYPE_IPV6 if ip.len() >= 40 => {
            let address = ipv6(ip, 24);
            address.to_ipv4_mapped().is_none().then_some(address.into())
        }
        _ => None,
    }
}

impl Packet {
    /// Reads the IP packet of a frame.
    pub(crate) fn parse(frame: &[u8]) -> Result<Self, DropReason> {
        let packet = match be16(frame, 12) {
            TYPE_IPV4 => parse_ipv4(frame)?,
            TYPE_IPV6 => parse_ipv6(frame)?,
            _ => return Err(DropReason::Ethertype),
        };
        let needed = match (packet.protocol, packet.version) {
            (TCP, _) => 20,
            (UDP, _) | (ICMP, 4) | (ICMPV6, 6) => 8,
            _ => 0,
        };
        if !packet.is_later_fragment() && packet.transport + needed > packet.end {
            return Err(DropReason::Malformed);
        }
        Ok(packet)
    }

    pub(crate) fn is_fragment(&self) -> bool {
        !matches!(self.fragment, Fragment::Whole)
    }

    pub(crate) fn is_later_fragment(&self) -> bool {
        matches!(self.fragment, Fragment::Later { .. })
    }

    /// Bytes of transport header and payload that are there; none in later fragments.
    pub(crate) fn transport_bytes<'a>(&self, frame: &'a [u8]) -> &'a [u8] {
        if self.is_later_fragment() {
            return &[];
        }
        &frame[self.transport..self.end]
    }

    /// Type of an ICMP or ICMPv6 message, each in its own IP version.
    pub(crate) fn icmp_type(&self, frame: &[u8]) -> Option<u8> {
        let icmp = if self.version == 4 { ICMP } else { ICMPV6 };
        (self.protocol == icmp)
            .then(|| self.transport_bytes(frame).first().copied())
            .flatten()
    }

    pub(crate) fn is_echo_request(&self, frame: &[u8]) -> bool {
        self.icmp_type(frame) == Some(if self.version == 4 { 8 } else { 128 })
    }

    pub(crate) fn is_echo_reply(&self, frame: &[u8]) -> bool {
        self.icmp_type(frame) == Some(if self.version == 4 { 0 } else { 129 })
    }

    /// Whether it is a message with the packet inside that it is about.
    pub(crate) fn is_icmp_error(&self, frame: &[u8]) -> bool {
        match self.icmp_type(frame) {
            Some(kind) if self.version == 4 => matches!(kind, 3 | 4 | 5 | 11 | 12),
            Some(kind) => matches!(kind, 1..=4),
            None => false,
        }
    }

    /// Source and destination port of TCP and UDP.
    pub(crate) fn ports(&self, frame: &[u8]) -> Option<(u16, u16)> {
        let bytes = self.transport_bytes(frame);
        (matches!(self.protocol, TCP | UDP) && bytes.len() >= 4)
            .then(|| (be16(bytes, 0), be16(bytes, 2)))
    }
}

fn parse_ipv4(frame: &[u8]) -> Result<Packet, DropReason> {
    let ip = &frame[ETHERNET..];
    if ip.len() < 20 || ip[0] >> 4 != 4 {
        return Err(DropReason::Malformed);
    }
    let header = usize::from(ip[0] & 15) * 4;
    let total = usize::from(be16(ip, 2));
    if header < 20 || header > ip.len() || total < header || total > ip.len() {
        return Err(DropReason::Malformed);
    }
    let protocol = ip[9];
    let identification = u32::from(be16(ip, 4));
    let offset = be16(ip, 6) & 0x1fff;
    let more = be16(ip, 6) & 0x2000 != 0;
    // Offset 1 would overwrite the flags of a TCP header that has been judged.
    if offset == 1 && protocol == TCP {
        return Err(DropReason::Malformed);
    }
    if has_source_route(&ip[20..header]) {
        return Err(DropReason::RoutingHeader);
    }
    Ok(Packet {
        version: 4,
        source: ipv4(ip, 12).into(),
        destination: ipv4(ip, 16).into(),
        ttl: ip[8],
        protocol,
        fragment: fragment(offset, more, identification),
        transport: ETHERNET + header,
        end: ETHERNET + total,
    })
}

/// Whether one of the options says by where the packet goes.
fn has_source_route(mut options: &[u8]) -> bool {
    while let [kind, rest @ ..] = options {
        options = match (kind, rest.first()) {
            (0, _) => return false,
            (1, _) => rest,
            (131 | 137, _) => return true,
            // Without a length that makes sense nothing can follow.
            (_, Some(length @ 2..)) => options.get(usize::from(*length)..).unwrap_or_default(),
            _ => return false,
        };
    }
    false
}

fn fragment(offset: u16, more: bool, identification: u32) -> Fragment {
    match (offset, more) {
        (0, false) => Fragment::Whole,
        (0, true) => Fragment::First { identification },
        _ => Fragment::Later { identification },
    }
}

fn parse_ipv6(frame: &[u8]) -> Result<Packet, DropReason> {
    let ip = &frame[ETHERNET..];
    if ip.len() < 40 || ip[0] >> 4 != 6 {
        return Err(DropReason::Malformed);
    }
    let payload = usize::from(be16(ip, 4));
    // Zero stands for a length in a jumbo option, or for nothing at all.
    if 40 + payload > ip.len() || (payload == 0 && ip[6] != NONE) {
        return Err(DropReason::Malformed);
    }
    if ipv6(ip, 8).to_ipv4_mapped().is_some() {
        return Err(DropReason::Malformed);
    }
    let mut packet = Packet {
        version: 6,
        source: ipv6(ip, 8).into(),
        destination: ipv6(ip, 24).into(),
        ttl: ip[7],
        protocol: ip[6],
        fragment: Fragment::Whole,
        transport: ETHERNET + 40,
        end: ETHERNET + 40 + payload,
    };
    walk_extension_headers(frame, &mut packet)?;
    Ok(packet)
}

/// Moves `transport` and `protocol` past the extension headers.
pub(crate) fn walk_extension_headers(frame: &[u8], packet: &mut Packet) -> Result<(), DropReason> {
    let mut headers = 0;
    while matches!(
        packet.protocol,
        HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION
    ) && !packet.is_later_fragment()
    {
        headers += 1;
        if headers > EXTENSION_HEADERS_MAX {
            return Err(DropReason::ExtensionHeaders);
        }
        let header = &frame[packet.transport..packet.end];
        if header.len() < 8 {
            return Err(DropReason::Malformed);
        }
        let length = match packet.protocol {
            FRAGMENT => 8,
            AUTHENTICATION => (usize::from(header[1]) + 2) * 4,
            _ => (usize::from(header[1]) + 1) * 8,
        };
        if length > header.len() {
            return Err(DropReason::Malformed);
        }
        if packet.protocol == ROUTING && header[3] > 0 {
            return Err(DropReason::RoutingHeader);
        }
        if packet.protocol == FRAGMENT {
            let offset = be16(header, 2) >> 3;
            let more = header[3] & 1 != 0;
            let bytes: [u8; 4] = header[4..8].try_into().expect("four bytes");
            let this = fragment(offset, more, u32::from_be_bytes(bytes));
            // An atomic fragment inside a first one doesn't make it whole.
            if this != Fragment::Whole {
                packet.fragment = this;
            }
        }
        packet.protocol = header[0];
        packet.transport += length;
    }
    Ok(())
}
