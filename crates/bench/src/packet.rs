//! Frames that fake guests send, and a look at those that arrive. Pure.
//!
//! A frame is Ethernet, IPv4 and UDP, TCP or ICMP. Before it, on a TAP with a virtio header, stand
//! the ten bytes of [`VirtioHeader`]. A frame's L4 checksum is either complete or *partial*: the sum
//! over the pseudo-header alone, which says that whoever puts the packet on a wire has to finish it.

use std::net::{Ipv4Addr, SocketAddrV4};

/// An Ethernet address.
pub(crate) type Mac = [u8; 6];

/// Bytes of an Ethernet header.
pub(crate) const ETHERNET: usize = 14;
/// Bytes of an IPv4 header without options.
pub(crate) const IPV4: usize = 20;
/// Bytes of a TCP header without options.
pub(crate) const TCP: usize = 20;
/// Bytes of a UDP or ICMP echo header.
pub(crate) const UDP: usize = 8;
/// TCP payload of a full packet on an Ethernet.
pub(crate) const SEGMENT: usize = 1460;

const ICMP_PROTOCOL: u8 = 1;
const TCP_PROTOCOL: u8 = 6;
const UDP_PROTOCOL: u8 = 17;

/// TCP's flags.
pub(crate) const FIN: u8 = 0x01;
/// Opens a connection.
pub(crate) const SYN: u8 = 0x02;
/// Gives a connection up.
pub(crate) const RST: u8 = 0x04;
/// Hand this on at once.
pub(crate) const PSH: u8 = 0x08;
/// The acknowledgement counts.
pub(crate) const ACK: u8 = 0x10;

/// What stands before a frame on a TAP with virtio headers (virtio 1.2, 5.1.6, without `num_buffers`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VirtioHeader {
    /// The L4 checksum is partial.
    pub(crate) needs_checksum: bool,
    /// Payload per packet on the wire if this one is to be cut; zero if it isn't.
    pub(crate) segment: u16,
    /// Where the L4 header begins.
    pub(crate) checksum_start: u16,
    /// Where in the L4 header the checksum is.
    pub(crate) checksum_offset: u16,
    /// Length of all headers.
    pub(crate) header_length: u16,
}

impl VirtioHeader {
    /// Its bytes on a TAP.
    pub(crate) const LENGTH: usize = 10;

    /// As a TAP takes it.
    pub(crate) fn bytes(self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[0] = u8::from(self.needs_checksum);
        bytes[1] = u8::from(self.segment != 0);
        bytes[2..4].copy_from_slice(&self.header_length.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.segment.to_ne_bytes());
        bytes[6..8].copy_from_slice(&self.checksum_start.to_ne_bytes());
        bytes[8..10].copy_from_slice(&self.checksum_offset.to_ne_bytes());
        bytes
    }

    /// As a TAP gives it.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let field = |at: usize| Some(u16::from_ne_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]));
        let is_cut = *bytes.get(1)? != 0;
        Some(Self {
            needs_checksum: *bytes.first()? & 1 != 0,
            header_length: field(2)?,
            segment: if is_cut { field(4)? } else { 0 },
            checksum_start: field(6)?,
            checksum_offset: field(8)?,
        })
    }
}

/// How the checksum of a frame's L4 header is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Checksum {
    /// Finished by the guest.
    Complete,
    /// Left to the device, as a guest does that has negotiated checksum offload.
    Partial,
}

/// Between whom frames go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    /// Ethernet address of the sender.
    pub(crate) source_mac: Mac,
    /// Ethernet address of the next hop.
    pub(crate) target_mac: Mac,
    /// The sender.
    pub(crate) source: SocketAddrV4,
    /// The receiver.
    pub(crate) target: SocketAddrV4,
}

/// What a TCP header says besides the ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TcpFields {
    /// Number of the first byte.
    pub(crate) sequence: u32,
    /// Number of the next byte that is expected.
    pub(crate) acknowledged: u32,
    /// `SYN` and the like.
    pub(crate) flags: u8,
    /// Receive window, already scaled down.
    pub(crate) window: u16,
}

impl Flow {
    /// A UDP packet.
    pub(crate) fn udp(&self, checksum: Checksum, payload: usize) -> Frame {
        let mut frame = Frame::new(self, UDP_PROTOCOL, UDP + payload);
        let l4 = frame.l4();
        let length = u16::try_from(UDP + payload).unwrap_or(u16::MAX);
        l4[0..2].copy_from_slice(&self.source.port().to_be_bytes());
        l4[2..4].copy_from_slice(&self.target.port().to_be_bytes());
        l4[4..6].copy_from_slice(&length.to_be_bytes());
        frame.seal(checksum, UDP, 0);
        frame
    }

    /// A TCP packet; one with more than a segment's payload is to be cut by the device.
    pub(crate) fn tcp(
        &self,
        checksum: Checksum,
        fields: &TcpFields,
        options: &[u8],
        payload: usize,
    ) -> Frame {
        let head = TCP + options.len();
        let mut frame = Frame::new(self, TCP_PROTOCOL, head + payload);
        let l4 = frame.l4();
        l4[0..2].copy_from_slice(&self.source.port().to_be_bytes());
        l4[2..4].copy_from_slice(&self.target.port().to_be_bytes());
        l4[4..8].copy_from_slice(&fields.sequence.to_be_bytes());
        l4[8..12].copy_from_slice(&fields.acknowledged.to_be_bytes());
        l4[12] = u8::try_from(head / 4 * 16).unwrap_or(0xf0);
        l4[13] = fields.flags;
        l4[14..16].copy_from_slice(&fields.window.to_be_bytes());
        l4[TCP..head].copy_from_slice(options);
        frame.seal(checksum, head, payload);
        frame
    }
}

/// A frame with its virtio header before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame(Vec<u8>);

const IP_START: usize = VirtioHeader::LENGTH + ETHERNET;
const L4_START: usize = IP_START + IPV4;

impl Frame {
    fn new(flow: &Flow, protocol: u8, l4_length: usize) -> Self {
        let mut bytes = vec![0; L4_START + l4_length];
        let ethernet = &mut bytes[VirtioHeader::LENGTH..];
        ethernet[0..6].copy_from_slice(&flow.target_mac);
        ethernet[6..12].copy_from_slice(&flow.source_mac);
        ethernet[12..14].copy_from_slice(&[0x08, 0x00]);
        let total = u16::try_from(IPV4 + l4_length).unwrap_or(u16::MAX);
        let ip = &mut bytes[IP_START..];
        ip[0] = 0x45;
        ip[2..4].copy_from_slice(&total.to_be_bytes());
        ip[6] = 0x40; // don't fragment
        ip[8] = 64;
        ip[9] = protocol;
        ip[12..16].copy_from_slice(&flow.source.ip().octets());
        ip[16..20].copy_from_slice(&flow.target.ip().octets());
        let sum = !folded(sum_of(&ip[..IPV4]));
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        Self(bytes)
    }

    /// With the virtio header, for a TAP that has it.
    pub(crate) fn with_header(&self) -> &[u8] {
        &self.0
    }

    /// Without it.
    pub(crate) fn plain(&self) -> &[u8] {
        &self.0[VirtioHeader::LENGTH..]
    }

    fn l4(&mut self) -> &mut [u8] {
        &mut self.0[L4_START..]
    }

    /// Fills in the L4 checksum and the virtio header.
    fn seal(&mut self, checksum: Checksum, l4_head: usize, payload: usize) {
        let protocol = self.0[IP_START + 9];
        let at = L4_START + checksum_offset(protocol);
        let pseudo = pseudo_sum(&self.0[IP_START..]);
        let mut header = VirtioHeader::default();
        if payload > SEGMENT {
            header.segment = u16::try_from(SEGMENT).unwrap_or(0);
            header.header_length = u16::try_from(ETHERNET + IPV4 + l4_head).unwrap_or(0);
        }
        let sum = match checksum {
            Checksum::Partial => {
                header.needs_checksum = true;
                header.checksum_start = u16::try_from(ETHERNET + IPV4).unwrap_or(0);
                header.checksum_offset = u16::try_from(checksum_offset(protocol)).unwrap_or(0);
                folded(pseudo)
            }
            Checksum::Complete => match !folded(pseudo + sum_of(&self.0[L4_START..])) {
                0 if protocol == UDP_PROTOCOL => 0xffff,
                sum => sum,
            },
        };
        self.0[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        self.0[..VirtioHeader::LENGTH].copy_from_slice(&header.bytes());
    }
}

/// The parts of an IPv4 frame that a receiver looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen<'a> {
    /// Ethernet address of the sender.
    pub(crate) source_mac: Mac,
    /// Sender's address.
    pub(crate) source: Ipv4Addr,
    /// Receiver's address.
    pub(crate) target: Ipv4Addr,
    /// IP's protocol number.
    pub(crate) protocol: u8,
    /// The IP packet, without what Ethernet may have appended.
    ip: &'a [u8],
}

/// A TCP packet's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeenTcp {
    /// Sender's port.
    pub(crate) source_port: u16,
    /// Receiver's port.
    pub(crate) target_port: u16,
    /// Sequence, acknowledgement, flags and window.
    pub(crate) fields: TcpFields,
    /// Bytes of payload.
    pub(crate) payload: u32,
    /// How far the window is to be shifted, if the packet says so.
    pub(crate) window_scale: Option<u8>,
}

impl<'a> Seen<'a> {
    /// Looks at a frame without virtio header. None if it isn't whole IPv4 without options.
    pub(crate) fn parse(frame: &'a [u8]) -> Option<Self> {
        let ip = frame.get(ETHERNET..)?;
        if frame.get(12..14)? != [0x08, 0x00] || *ip.first()? != 0x45 {
            return None;
        }
        let total = usize::from(u16::from_be_bytes([*ip.get(2)?, *ip.get(3)?]));
        let ip = ip.get(..total).filter(|ip| ip.len() >= IPV4)?;
        Some(Self {
            source_mac: *frame[6..].first_chunk()?,
            source: Ipv4Addr::from(*ip[12..].first_chunk::<4>()?),
            target: Ipv4Addr::from(*ip[16..].first_chunk::<4>()?),
            protocol: ip[9],
            ip,
        })
    }

    /// Its TCP header, if it has one.
    pub(crate) fn tcp(&self) -> Option<SeenTcp> {
        let l4 = self.ip.get(IPV4..).filter(|l4| l4.len() >= TCP)?;
        if self.protocol != TCP_PROTOCOL {
            return None;
        }
        let short = |at: usize| u16::from_be_bytes([l4[at], l4[at + 1]]);
        let long = |at: usize| u32::from_be_bytes([l4[at], l4[at + 1], l4[at + 2], l4[at + 3]]);
        let head = usize::from(l4[12] >> 4) * 4;
        let payload = l4.len().checked_sub(head)?;
        Some(SeenTcp {
            source_port: short(0),
            target_port: short(2),
            fields: TcpFields {
                sequence: long(4),
                acknowledged: long(8),
                flags: l4[13],
                window: short(14),
            },
            payload: u32::try_from(payload).ok()?,
            window_scale: window_scale(l4.get(TCP..head)?),
        })
    }

    /// The port that it is for, of TCP and UDP.
    pub(crate) fn target_port(&self) -> Option<u16> {
        let is_ported = matches!(self.protocol, TCP_PROTOCOL | UDP_PROTOCOL);
        let bytes = self.ip.get(IPV4 + 2..IPV4 + 4).filter(|_| is_ported)?;
        Some(u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    /// Whether header and L4 checksums are right, complete or, if the header says so, partial.
    pub(crate) fn checksums_hold(&self, header: Option<VirtioHeader>) -> bool {
        if folded(sum_of(&self.ip[..IPV4])) != 0xffff {
            return false;
        }
        let at = IPV4 + checksum_offset(self.protocol);
        let Some(found) = self.ip.get(at..at + 2) else {
            return false;
        };
        let found = u16::from_be_bytes([found[0], found[1]]);
        let pseudo = pseudo_sum(self.ip);
        if header.is_some_and(|header| header.needs_checksum) {
            return found == folded(pseudo);
        }
        folded(pseudo + sum_of(&self.ip[IPV4..])) == 0xffff
    }
}

/// The answer to a frame if it is a ping, or a question by ARP for this address.
pub(crate) fn answer(frame: &[u8], mac: Mac, address: Ipv4Addr) -> Option<Vec<u8>> {
    match frame.get(12..14)? {
        [0x08, 0x06] => arp_answer(frame, mac, address),
        [0x08, 0x00] => echo_answer(frame, mac, address),
        _ => None,
    }
}

fn arp_answer(frame: &[u8], mac: Mac, address: Ipv4Addr) -> Option<Vec<u8>> {
    let asked = frame.get(20..22)? == [0, 1] && frame.get(38..42)? == address.octets();
    if !asked {
        return None;
    }
    let mut reply = frame[..42].to_vec();
    reply[0..6].copy_from_slice(&frame[6..12]);
    reply[6..12].copy_from_slice(&mac);
    reply[20..22].copy_from_slice(&[0, 2]);
    reply[22..28].copy_from_slice(&mac);
    reply[28..32].copy_from_slice(&address.octets());
    reply[32..42].copy_from_slice(&frame[22..32]);
    Some(reply)
}

/// Swapping the addresses leaves IP's sum as it is; the type's change from 8 to 0 adds 0x0800 to ICMP's.
fn echo_answer(frame: &[u8], mac: Mac, address: Ipv4Addr) -> Option<Vec<u8>> {
    let seen = Seen::parse(frame)?;
    let is_echo = seen.protocol == ICMP_PROTOCOL && *seen.ip.get(IPV4)? == 8;
    if seen.target != address || !is_echo || seen.ip.len() < IPV4 + UDP {
        return None;
    }
    let mut reply = frame[..ETHERNET + seen.ip.len()].to_vec();
    reply[0..6].copy_from_slice(&frame[6..12]);
    reply[6..12].copy_from_slice(&mac);
    let ip = &mut reply[ETHERNET..];
    ip[12..16].copy_from_slice(&seen.target.octets());
    ip[16..20].copy_from_slice(&seen.source.octets());
    ip[IPV4] = 0;
    let old = u16::from_be_bytes([ip[IPV4 + 2], ip[IPV4 + 3]]);
    let new = !folded(u64::from(!old) + u64::from(!0x0800_u16));
    ip[IPV4 + 2..IPV4 + 4].copy_from_slice(&new.to_be_bytes());
    Some(reply)
}

/// The echo request that a host's raw socket sends: ICMP alone.
pub(crate) fn echo_request(identifier: u16, sequence: u16) -> [u8; 64] {
    let mut packet = [0; 64];
    packet[0] = 8;
    packet[4..6].copy_from_slice(&identifier.to_be_bytes());
    packet[6..8].copy_from_slice(&sequence.to_be_bytes());
    let sum = !folded(sum_of(&packet));
    packet[2..4].copy_from_slice(&sum.to_be_bytes());
    packet
}

/// Identifier and sequence number of an echo reply that a raw socket received, IP header first.
pub(crate) fn echo_reply(packet: &[u8]) -> Option<(Ipv4Addr, u16, u16)> {
    let head = usize::from(packet.first()? & 0x0f) * 4;
    let icmp = packet.get(head..head + UDP).filter(|icmp| icmp[0] == 0)?;
    let source = Ipv4Addr::from(*packet.get(12..)?.first_chunk::<4>()?);
    let identifier = u16::from_be_bytes([icmp[4], icmp[5]]);
    Some((source, identifier, u16::from_be_bytes([icmp[6], icmp[7]])))
}

fn window_scale(mut options: &[u8]) -> Option<u8> {
    loop {
        match options {
            [3, 3, scale, ..] => return Some(*scale),
            [1, rest @ ..] => options = rest,
            [0, ..] | [_] | [] => return None,
            [_, length, ..] => options = options.get(usize::from(*length).max(2)..)?,
        }
    }
}

fn checksum_offset(protocol: u8) -> usize {
    match protocol {
        TCP_PROTOCOL => 16,
        UDP_PROTOCOL => 6,
        _ => 2,
    }
}

/// Sum over addresses, protocol and length, of which only TCP and UDP have one.
fn pseudo_sum(ip: &[u8]) -> u64 {
    let protocol = ip[9];
    if !matches!(protocol, TCP_PROTOCOL | UDP_PROTOCOL) {
        return 0;
    }
    let total = u64::from(u16::from_be_bytes([ip[2], ip[3]]));
    sum_of(&ip[12..20]) + u64::from(protocol) + total - IPV4 as u64
}

fn sum_of(bytes: &[u8]) -> u64 {
    let mut pairs = bytes.chunks_exact(2);
    let even: u64 = pairs
        .by_ref()
        .map(|pair| u64::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    even + pairs
        .remainder()
        .first()
        .map_or(0, |last| u64::from(*last) << 8)
}

fn folded(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOW: Flow = Flow {
        source_mac: [2, 0, 0, 0, 0, 1],
        target_mac: [2, 0, 0, 0, 0, 2],
        source: SocketAddrV4::new(Ipv4Addr::new(192, 168, 241, 2), 4000),
        target: SocketAddrV4::new(Ipv4Addr::new(198, 18, 0, 2), 5001),
    };

    #[test]
    fn checksums_of_what_we_send_hold() {
        let fields = TcpFields {
            sequence: 7,
            flags: ACK | PSH,
            ..TcpFields::default()
        };
        for checksum in [Checksum::Complete, Checksum::Partial] {
            for frame in [
                FLOW.udp(checksum, 22),
                FLOW.udp(checksum, 23),
                FLOW.tcp(checksum, &fields, &[], 1460),
                FLOW.tcp(checksum, &fields, &[2, 4, 5, 0xb4], 0),
            ] {
                let header = VirtioHeader::parse(frame.with_header()).unwrap();
                let seen = Seen::parse(frame.plain()).unwrap();
                assert_eq!(header.needs_checksum, checksum == Checksum::Partial);
                assert!(seen.checksums_hold(Some(header)), "{checksum:?} {frame:?}");
            }
        }
    }

    #[test]
    fn a_changed_byte_breaks_a_checksum() {
        let frame = FLOW.udp(Checksum::Complete, 22);
        for at in [
            ETHERNET + 13,
            ETHERNET + IPV4 + 1,
            ETHERNET + IPV4 + UDP + 5,
        ] {
            let mut changed = frame.plain().to_vec();
            changed[at] ^= 0x10;
            assert!(!Seen::parse(&changed).unwrap().checksums_hold(None), "{at}");
        }
    }

    #[test]
    fn an_address_changed_without_its_sum_breaks_a_partial_checksum() {
        let frame = FLOW.tcp(Checksum::Partial, &TcpFields::default(), &[], 1000);
        let header = VirtioHeader::parse(frame.with_header());
        let mut changed = frame.plain().to_vec();
        changed[ETHERNET + IPV4 + 16] ^= 1;
        assert!(!Seen::parse(&changed).unwrap().checksums_hold(header));
    }

    #[test]
    fn only_what_exceeds_a_segment_is_to_be_cut() {
        let small = FLOW.tcp(Checksum::Partial, &TcpFields::default(), &[], SEGMENT);
        assert_eq!(small.plain().len(), 1514);
        assert_eq!(VirtioHeader::parse(small.with_header()).unwrap().segment, 0);
        let large = FLOW.tcp(Checksum::Partial, &TcpFields::default(), &[], 16_384);
        let header = VirtioHeader::parse(large.with_header()).unwrap();
        assert_eq!((header.segment, header.header_length), (1460, 54));
    }

    #[test]
    fn a_tcp_header_reads_back_as_written() {
        let fields = TcpFields {
            sequence: 0xfedc_ba98,
            acknowledged: 0x0123_4567,
            flags: SYN | ACK,
            window: 0xabcd,
        };
        let options = [2, 4, 5, 0xb4, 1, 3, 3, 7];
        let frame = FLOW.tcp(Checksum::Complete, &fields, &options, 3);
        let tcp = Seen::parse(frame.plain()).unwrap().tcp().unwrap();
        assert_eq!((tcp.source_port, tcp.target_port), (4000, 5001));
        assert_eq!((tcp.fields, tcp.payload), (fields, 3));
        assert_eq!(tcp.window_scale, Some(7));
    }

    #[test]
    fn a_ping_is_answered_with_right_checksums() {
        let mut frame = Frame::new(&FLOW, ICMP_PROTOCOL, 64);
        frame.l4().copy_from_slice(&echo_request(77, 0xffff));
        assert!(Seen::parse(frame.plain()).unwrap().checksums_hold(None));
        let mac = FLOW.target_mac;
        let reply = answer(frame.plain(), mac, *FLOW.target.ip()).unwrap();
        let seen = Seen::parse(&reply).unwrap();
        assert!(seen.checksums_hold(None));
        assert_eq!(
            (seen.source, seen.target),
            (*FLOW.target.ip(), *FLOW.source.ip())
        );
        let replied = echo_reply(&reply[ETHERNET..]);
        assert_eq!(replied, Some((*FLOW.target.ip(), 77, 0xffff)));
        assert_eq!(answer(frame.plain(), mac, *FLOW.source.ip()), None);
    }

    #[test]
    fn an_arp_question_is_answered_by_who_is_asked() {
        let mut question = vec![0xff; 6];
        question.extend([2, 0, 0, 0, 0, 9, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        question.extend([2, 0, 0, 0, 0, 9, 10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 10, 0, 0, 2]);
        let ours = [2, 0, 0, 0, 0, 1];
        let reply = answer(&question, ours, Ipv4Addr::new(10, 0, 0, 2)).unwrap();
        assert_eq!(&reply[..12], &[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 1]);
        assert_eq!(
            &reply[20..],
            &[
                0, 2, 2, 0, 0, 0, 0, 1, 10, 0, 0, 2, 2, 0, 0, 0, 0, 9, 10, 0, 0, 1
            ]
        );
        assert_eq!(answer(&question, ours, Ipv4Addr::new(10, 0, 0, 3)), None);
    }
}
