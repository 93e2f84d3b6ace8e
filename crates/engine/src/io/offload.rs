//! What a network card would have done: complete a checksum, and cut a super-packet into frames of wire size.
//!
//! A kernel puts both off until a device needs them, and says in a [`VnetHeader`] what it owes. These functions take
//! that header and the frame, do the work, and know neither sockets nor packets. Header and frame may come from a
//! guest that lies: every offset is checked, and what doesn't fit together is refused and never guessed at.
//!
//! A super-packet is TCP over IPv4 or IPv6, or a run of UDP datagrams of one flow (`UDP_SEGMENT`, or GRO of UDP). One of TCP
//! may be longer than its IP header can say ("BIG TCP"): none of the lengths in a super-packet's headers is asked for.
//! In front may be up to two VLAN tags. Super-packets inside a tunnel are refused; a checksum inside one is
//! completed, since the header says where it is.

use thiserror::Error;

use super::checksum;

/// What a kernel or a guest says beside a frame: the first ten bytes of virtio's `virtio_net_hdr`, in the machine's
/// byte order, as AF_PACKET sockets (`PACKET_VNET_HDR`) and TAPs (`IFF_VNET_HDR`) have them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VnetHeader {
    /// [`NEEDS_CHECKSUM`] and others.
    pub flags: u8,
    /// [`GSO_NONE`] or what kind of super-packet follows, perhaps with [`GSO_ECN`].
    pub gso_type: u8,
    /// Bytes of all headers of a super-packet; a hint, not relied on.
    pub header_bytes: u16,
    /// Bytes of payload in each frame that a super-packet is cut into.
    pub segment_bytes: u16,
    /// Where what is summed begins, in bytes from the frame's first.
    pub checksum_start: u16,
    /// Where the checksum field is, in bytes from `checksum_start`.
    pub checksum_offset: u16,
}

/// In `flags`: the checksum field holds the pseudo header's sum only.
pub const NEEDS_CHECKSUM: u8 = 1;
/// In `gso_type`: not a super-packet.
pub const GSO_NONE: u8 = 0;
/// In `gso_type`: TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// In `gso_type`: TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// In `gso_type`: datagrams of one UDP flow.
pub const GSO_UDP_L4: u8 = 5;
/// Bit in `gso_type`: congestion was signalled, so CWR belongs to the first segment only.
pub const GSO_ECN: u8 = 0x80;

impl VnetHeader {
    /// Bytes that it takes in front of a frame.
    pub const BYTES: usize = 10;

    /// The header in these bytes.
    #[must_use]
    pub fn read(bytes: [u8; Self::BYTES]) -> Self {
        let word = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: bytes[1],
            header_bytes: word(2),
            segment_bytes: word(4),
            checksum_start: word(6),
            checksum_offset: word(8),
        }
    }

    /// Its bytes.
    #[must_use]
    pub fn write(&self) -> [u8; Self::BYTES] {
        let mut bytes = [self.flags, self.gso_type, 0, 0, 0, 0, 0, 0, 0, 0];
        bytes[2..4].copy_from_slice(&self.header_bytes.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.segment_bytes.to_ne_bytes());
        bytes[6..8].copy_from_slice(&self.checksum_start.to_ne_bytes());
        bytes[8..10].copy_from_slice(&self.checksum_offset.to_ne_bytes());
        bytes
    }

    /// Whether the frame must be cut.
    #[inline]
    #[must_use]
    pub fn is_super_packet(&self) -> bool {
        self.gso_type != GSO_NONE
    }

    /// Whether the frame's checksum must be completed.
    #[inline]
    #[must_use]
    pub fn needs_checksum(&self) -> bool {
        self.flags & NEEDS_CHECKSUM != 0
    }
}

/// Why a frame can't become one for the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum OffloadError {
    /// The checksum would lie outside the frame.
    #[error("the checksum field lies outside the frame")]
    ChecksumPlace,
    /// A kind of super-packet that isn't cut here.
    #[error("super-packets of type {0:#x} are not cut")]
    Type(u8),
    /// The frame's own headers are not those of the super-packet that it is said to be.
    #[error("the frame's headers are not those of a super-packet of its type")]
    Headers,
    /// Segments without payload, or longer than an IP packet can be.
    #[error("a super-packet with segments of an impossible size")]
    SegmentSize,
}

/// Completes the checksum that `header` says is owed, and says whether there was one. As the kernel does, it sums to
/// the end of the frame.
///
/// # Errors
/// If the checksum field isn't in the frame, which then is as it was.
#[inline]
pub fn complete_checksum(header: &VnetHeader, frame: &mut [u8]) -> Result<bool, OffloadError> {
    if !header.needs_checksum() {
        return Ok(false);
    }
    let start = usize::from(header.checksum_start);
    let offset = usize::from(header.checksum_offset);
    let is_sctp = offset == SCTP_CHECKSUM && is_sctp(frame);
    let summed = frame.get_mut(start..).ok_or(OffloadError::ChecksumPlace)?;
    if offset + if is_sctp { 4 } else { 2 } > summed.len() {
        return Err(OffloadError::ChecksumPlace);
    }
    if is_sctp {
        summed[offset..offset + 4].fill(0);
        let field = checksum::crc32c(summed);
        summed[offset..offset + 4].copy_from_slice(&field);
        return Ok(true);
    }
    let field = checksum::field(checksum::add(0, summed));
    summed[offset..offset + 2].copy_from_slice(&field);
    Ok(true)
}

/// Place of the checksum in SCTP's header. Of no other protocol that leaves its checksum to others it is there.
const SCTP_CHECKSUM: usize = 8;

/// Whether it is SCTP, whose checksum is another one (`csum_not_inet` in Linux), which the vnet header doesn't say.
fn is_sctp(frame: &[u8]) -> bool {
    const SCTP: u8 = 132;
    let at = |place: usize| frame.get(place).copied();
    match frame.get(12..14) {
        Some([0x08, 0x00]) => at(14 + 9) == Some(SCTP),
        Some([0x86, 0xdd]) => at(14 + 6) == Some(SCTP),
        _ => false,
    }
}

/// A super-packet, looked through and ready to be cut.
#[derive(Debug, Clone, Copy)]
pub struct SuperPacket<'a> {
    frame: &'a [u8],
    transport: Transport,
    version: Version,
    /// Where the IP header begins.
    network_at: usize,
    /// Where the TCP or UDP header begins in its segments.
    transport_at: usize,
    /// Where the payload begins in its segments.
    payload_at: usize,
    /// Bytes behind its IPv6 header that its segments don't have.
    left_out: usize,
    segment_bytes: usize,
    /// Sum of the pseudo header without the length.
    pseudo_sum: u64,
    /// The checksum field says that there is none.
    without_checksum: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transport {
    Tcp,
    Udp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    Four,
    Six,
}

impl<'a> SuperPacket<'a> {
    /// Looks through the headers of a super-packet.
    ///
    /// # Errors
    /// If it isn't one that can be cut.
    pub fn new(header: &VnetHeader, frame: &'a [u8]) -> Result<Self, OffloadError> {
        let (transport, version) = match header.gso_type & !GSO_ECN {
            GSO_TCPV4 => (Transport::Tcp, Some(Version::Four)),
            GSO_TCPV6 => (Transport::Tcp, Some(Version::Six)),
            GSO_UDP_L4 => (Transport::Udp, None),
            _ => return Err(OffloadError::Type(header.gso_type)),
        };
        if header.segment_bytes == 0 {
            return Err(OffloadError::SegmentSize);
        }
        let places = Places::of(frame, transport).ok_or(OffloadError::Headers)?;
        let says_otherwise =
            header.needs_checksum() && usize::from(header.checksum_start) != places.transport_at;
        let left_out = places.left_out;
        let (transport_at, payload_at) =
            (places.transport_at - left_out, places.payload_at - left_out);
        if says_otherwise || version.is_some_and(|version| version != places.version) {
            return Err(OffloadError::Headers);
        }
        let segment_bytes = usize::from(header.segment_bytes);
        let longest = (frame.len() - left_out).min(payload_at + segment_bytes);
        if longest - places.network_at > usize::from(u16::MAX) {
            return Err(OffloadError::SegmentSize);
        }
        let field_at = places.transport_at + transport.checksum_offset();
        let without_checksum = transport == Transport::Udp
            && !header.needs_checksum()
            && frame[field_at..field_at + 2] == [0, 0];
        Ok(Self {
            frame,
            transport,
            version: places.version,
            network_at: places.network_at,
            transport_at,
            payload_at,
            left_out,
            segment_bytes,
            pseudo_sum: places.pseudo_sum(frame, transport),
            without_checksum,
        })
    }

    /// How many frames it becomes, at least one.
    #[must_use]
    pub fn count(&self) -> usize {
        self.payload().len().div_ceil(self.segment_bytes).max(1)
    }

    /// Bytes of the longest of its frames.
    #[must_use]
    pub fn longest(&self) -> usize {
        let all = self.payload_at + self.payload().len();
        all.min(self.payload_at + self.segment_bytes)
    }

    fn payload(&self) -> &'a [u8] {
        &self.frame[self.payload_at + self.left_out..]
    }

    /// Writes one of its frames, complete, to the start of `room`; its length. `None` if there is no such frame or
    /// it is longer than the room.
    #[must_use]
    pub fn write(&self, index: usize, room: &mut [u8]) -> Option<usize> {
        let skipped = index.checked_mul(self.segment_bytes)?;
        if index >= self.count() {
            return None;
        }
        let payload = &self.payload()[skipped..];
        let payload = &payload[..payload.len().min(self.segment_bytes)];
        let length = self.payload_at + payload.len();
        let segment = room.get_mut(..length)?;
        self.write_headers(&mut segment[..self.payload_at]);
        segment[self.payload_at..].copy_from_slice(payload);
        self.write_network(index, segment);
        match self.transport {
            Transport::Tcp => self.write_tcp(index, skipped, segment),
            Transport::Udp => self.write_udp(segment),
        }
        self.write_checksum(segment);
        Some(length)
    }

    /// Those of the whole, but for what is left out between the IPv6 header and TCP's.
    fn write_headers(&self, headers: &mut [u8]) {
        if self.left_out == 0 {
            headers.copy_from_slice(&self.frame[..self.payload_at]);
            return;
        }
        let (before, rest) = headers.split_at_mut(self.transport_at);
        before.copy_from_slice(&self.frame[..self.transport_at]);
        before[self.network_at + IPV6_NEXT_HEADER] = self.transport.protocol();
        let rest_at = self.transport_at + self.left_out;
        rest.copy_from_slice(&self.frame[rest_at..self.payload_at + self.left_out]);
    }

    /// Length, and in IPv4 identification and checksum. The kernel too counts identifications up by one.
    fn write_network(&self, index: usize, segment: &mut [u8]) {
        let network = &mut segment[self.network_at..];
        let length = network.len();
        match self.version {
            Version::Four => {
                let header_bytes = self.transport_at - self.network_at;
                let identification = u16_at(network, 4).wrapping_add(low_u16(index));
                network[2..4].copy_from_slice(&low_u16(length).to_be_bytes());
                network[4..6].copy_from_slice(&identification.to_be_bytes());
                network[10..12].fill(0);
                let field = checksum::ipv4_header(&network[..header_bytes]);
                network[10..12].copy_from_slice(&field);
            }
            Version::Six => {
                let length = low_u16(length - IPV6_HEADER_BYTES);
                network[4..6].copy_from_slice(&length.to_be_bytes());
            }
        }
    }

    /// Sequence number and flags.
    fn write_tcp(&self, index: usize, skipped: usize, segment: &mut [u8]) {
        let tcp = &mut segment[self.transport_at..];
        let mut sequence = [0; 4];
        sequence.copy_from_slice(&tcp[4..8]);
        #[expect(clippy::cast_possible_truncation, reason = "sequence numbers wrap")]
        let sequence = u32::from_be_bytes(sequence).wrapping_add(skipped as u32);
        tcp[4..8].copy_from_slice(&sequence.to_be_bytes());
        if index > 0 {
            tcp[13] &= !TCP_CWR;
        }
        if index + 1 < self.count() {
            tcp[13] &= !(TCP_FIN | TCP_PSH);
        }
    }

    /// Length.
    fn write_udp(&self, segment: &mut [u8]) {
        let udp = &mut segment[self.transport_at..];
        let length = low_u16(udp.len());
        udp[4..6].copy_from_slice(&length.to_be_bytes());
    }

    fn write_checksum(&self, segment: &mut [u8]) {
        if self.without_checksum {
            return;
        }
        let transport = &mut segment[self.transport_at..];
        let field_at = self.transport.checksum_offset();
        transport[field_at..field_at + 2].fill(0);
        let length = low_u16(transport.len()).to_be_bytes();
        let sum = checksum::add(checksum::add(self.pseudo_sum, &length), transport);
        transport[field_at..field_at + 2].copy_from_slice(&checksum::field(sum));
    }
}

impl Transport {
    fn protocol(self) -> u8 {
        match self {
            Self::Tcp => PROTOCOL_TCP,
            Self::Udp => PROTOCOL_UDP,
        }
    }

    fn checksum_offset(self) -> usize {
        match self {
            Self::Tcp => 16,
            Self::Udp => 6,
        }
    }
}

/// Where the headers of a frame are.
struct Places {
    version: Version,
    network_at: usize,
    transport_at: usize,
    payload_at: usize,
    /// Bytes before `transport_at` that segments don't have.
    left_out: usize,
}

impl Places {
    /// `None` if the frame isn't a whole packet of that protocol.
    fn of(frame: &[u8], transport: Transport) -> Option<Self> {
        let (ether_type, network_at) = ether_type(frame)?;
        let network = frame.get(network_at..)?;
        let left_out = if ether_type == ETHER_TYPE_IPV6 {
            jumbo_header_bytes(network)
        } else {
            0
        };
        let (version, protocol, header_bytes) = match ether_type {
            ETHER_TYPE_IPV4 => ipv4(network)?,
            ETHER_TYPE_IPV6 => ipv6(network)?,
            _ => return None,
        };
        if protocol != transport.protocol() {
            return None;
        }
        let transport_at = network_at + header_bytes;
        let segment = frame.get(transport_at..)?;
        let transport_bytes = match transport {
            Transport::Tcp => usize::from(*segment.get(12)? >> 4) * 4,
            Transport::Udp => UDP_HEADER_BYTES,
        };
        let least = if transport == Transport::Tcp {
            TCP_HEADER_BYTES
        } else {
            UDP_HEADER_BYTES
        };
        if transport_bytes < least || segment.len() < transport_bytes {
            return None;
        }
        Some(Self {
            version,
            network_at,
            transport_at,
            payload_at: transport_at + transport_bytes,
            left_out,
        })
    }

    fn pseudo_sum(&self, frame: &[u8], transport: Transport) -> u64 {
        let addresses = match self.version {
            Version::Four => self.network_at + 12..self.network_at + 20,
            Version::Six => self.network_at + 8..self.network_at + 40,
        };
        checksum::add(
            checksum::add(0, &frame[addresses]),
            &[0, transport.protocol()],
        )
    }
}

/// The type of what a frame carries, behind up to two VLAN tags, and where that begins.
fn ether_type(frame: &[u8]) -> Option<(u16, usize)> {
    let mut at = 12;
    for _ in 0..=VLAN_TAGS_MAX {
        let kind = u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?);
        if !VLAN_TYPES.contains(&kind) {
            return Some((kind, at + 2));
        }
        at += VLAN_TAG_BYTES;
    }
    None
}

/// Version, protocol and bytes of the header of a packet that isn't a fragment.
fn ipv4(packet: &[u8]) -> Option<(Version, u8, usize)> {
    let header_bytes = usize::from(*packet.first()? & 0x0f) * 4;
    let is_whole = packet[0] >> 4 == 4
        && header_bytes >= 20
        && packet.len() >= header_bytes
        && u16_at(packet, 6) & IPV4_FRAGMENT == 0;
    is_whole.then(|| (Version::Four, packet[9], header_bytes))
}

/// Version, protocol and bytes of all headers before it.
fn ipv6(packet: &[u8]) -> Option<(Version, u8, usize)> {
    if packet.len() < IPV6_HEADER_BYTES || packet[0] >> 4 != 6 {
        return None;
    }
    let mut protocol = packet[IPV6_NEXT_HEADER];
    let mut at = IPV6_HEADER_BYTES;
    for _ in 0..IPV6_EXTENSIONS_MAX {
        if !IPV6_EXTENSIONS.contains(&protocol) {
            return Some((Version::Six, protocol, at));
        }
        let extension = packet.get(at..at + 2)?;
        protocol = extension[0];
        at += 8 + 8 * usize::from(extension[1]);
    }
    None
}

/// Bytes of the header by which a super-packet says its length where the IPv6 header can't: hop-by-hop options of one, the
/// jumbo payload (RFC 2675), right before TCP, as Linux has made it since 5.19.
fn jumbo_header_bytes(packet: &[u8]) -> usize {
    let is_unsaid = packet.get(4..7) == Some(&[0, 0, IPV6_EXTENSIONS[0]]);
    let options = packet.get(IPV6_HEADER_BYTES..IPV6_HEADER_BYTES + 4);
    if is_unsaid && options == Some(&[PROTOCOL_TCP, 0, JUMBO_PAYLOAD, 4]) {
        JUMBO_HEADER_BYTES
    } else {
        0
    }
}

/// The two bytes there as a number; they must be there.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Lengths that were checked to fit, and counts that wrap.
fn low_u16(count: usize) -> u16 {
    #[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
    let low = count as u16;
    low
}

const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;
const TCP_HEADER_BYTES: usize = 20;
const UDP_HEADER_BYTES: usize = 8;
const IPV6_HEADER_BYTES: usize = 40;
/// Place of the protocol that follows, in the IPv6 header.
const IPV6_NEXT_HEADER: usize = 6;
const JUMBO_PAYLOAD: u8 = 0xc2;
const JUMBO_HEADER_BYTES: usize = 8;
const TCP_FIN: u8 = 0x01;
const TCP_PSH: u8 = 0x08;
const TCP_CWR: u8 = 0x80;
const ETHER_TYPE_IPV4: u16 = 0x0800;
const ETHER_TYPE_IPV6: u16 = 0x86dd;
const VLAN_TYPES: [u16; 3] = [0x8100, 0x88a8, 0x9100];
const VLAN_TAG_BYTES: usize = 4;
const VLAN_TAGS_MAX: usize = 2;
/// "More fragments" and the offset.
const IPV4_FRAGMENT: u16 = 0x3fff;
/// Hop-by-hop options, routing, destination options: what may stand before TCP or UDP in a whole packet.
const IPV6_EXTENSIONS: [u8; 3] = [0, 43, 60];
const IPV6_EXTENSIONS_MAX: usize = 8;

#[cfg(test)]
mod tests;
