//! An engine's packet as the models see it, and bits that flip in it.

use sandwire_engine::{
    Packet,
    classify::{self, Headers, IpHeaders, IpVersion},
};

use crate::{Nanoseconds, checksum};

/// A packet with what the models ask of it.
#[derive(Debug)]
pub(super) struct Framed {
    packet: Packet,
    flow: u64,
    came: Nanoseconds,
}

impl Framed {
    pub(super) fn new(packet: Packet, headers: &Headers, came: Nanoseconds) -> Self {
        Self {
            packet,
            flow: classify::flow_hash(headers),
            came,
        }
    }

    pub(super) fn came(&self) -> Nanoseconds {
        self.came
    }

    pub(super) fn frame(&self) -> &[u8] {
        self.packet.bytes()
    }

    pub(super) fn frame_mut(&mut self) -> &mut [u8] {
        self.packet.bytes_mut()
    }

    pub(super) fn into_packet(self) -> Packet {
        self.packet
    }
}

impl crate::Packet for Framed {
    fn frame_bytes(&self) -> u32 {
        // A frame is at most 65,000 bytes.
        u32::try_from(self.packet.length()).unwrap_or(u32::MAX)
    }

    fn flow_hash(&self) -> u64 {
        self.flow
    }

    fn bytes(&self) -> &[u8] {
        self.packet.bytes()
    }

    fn copy(&self) -> Option<Self> {
        Some(Self {
            packet: self.packet.copy()?,
            flow: self.flow,
            came: self.came,
        })
    }

    fn with_bytes(&self, frame: &[u8]) -> Option<Self> {
        let mut packet = self.packet.copy()?;
        packet.set_bytes(frame).then_some(Self {
            packet,
            flow: self.flow,
            came: self.came,
        })
    }
}

/// Flips these bits; bit 0 is the highest of the first byte.
pub(super) fn flip(frame: &mut [u8], bits: &[u64]) {
    for bit in bits {
        let byte = usize::try_from(bit / 8).unwrap_or(usize::MAX);
        if let Some(byte) = frame.get_mut(byte) {
            *byte ^= 0x80 >> (bit % 8);
        }
    }
}

/// Makes the checksums of a frame right: IPv4's own and, of what isn't a fragment, those of TCP, UDP, ICMP and ICMPv6. A frame
/// whose headers make no sense any more stays as it is.
pub(super) fn repair_checksums(frame: &mut [u8]) {
    let Some(ip) = classify::parse(frame).ip else {
        return;
    };
    if ip.version == IpVersion::V4 {
        let header = usize::from(frame[ip.offset] & 0x0f) * 4;
        if let Some(header) = frame.get_mut(ip.offset..ip.offset + header) {
            header[10..12].fill(0);
            let sum = checksum::finish(checksum::sum(0, header));
            header[10..12].copy_from_slice(&sum.to_be_bytes());
        }
    }
    if ip.fragment != classify::Fragment::Whole {
        return;
    }
    let place = match ip.protocol {
        classify::TCP => 16,
        classify::UDP => 6,
        classify::ICMP | classify::ICMPV6 => 2,
        _ => return,
    };
    let pseudo = if ip.protocol == classify::ICMP {
        0
    } else {
        pseudo_header(&ip)
    };
    let Some(segment) = frame.get_mut(ip.payload_offset..ip.end) else {
        return;
    };
    let is_unused = ip.protocol == classify::UDP
        && ip.version == IpVersion::V4
        && segment.get(place..place + 2) == Some(&[0, 0]);
    if segment.len() < place + 2 || is_unused {
        return;
    }
    segment[place..place + 2].fill(0);
    let sum = match checksum::finish(checksum::sum(pseudo, segment)) {
        // For UDP 0 means that there is none.
        0 if ip.protocol == classify::UDP => 0xffff,
        sum => sum,
    };
    segment[place..place + 2].copy_from_slice(&sum.to_be_bytes());
}

/// The sum of the pseudo header (RFC 9293 §3.1, RFC 8200 §8.1).
fn pseudo_header(ip: &IpHeaders) -> u32 {
    let mut bytes = Vec::with_capacity(40);
    for address in [ip.source, ip.destination] {
        match address {
            std::net::IpAddr::V4(address) => bytes.extend(address.octets()),
            std::net::IpAddr::V6(address) => bytes.extend(address.octets()),
        }
    }
    let length = u32::try_from(ip.end - ip.payload_offset).unwrap_or(0);
    bytes.extend(length.to_be_bytes());
    bytes.extend([0, 0, 0, ip.protocol]);
    checksum::sum(0, &bytes)
}
