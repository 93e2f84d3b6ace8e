//! Judged by a checksum that goes through a packet word by word and shares nothing with the one that is tested.

use proptest::prelude::*;

use super::*;

/// One's complement sum of big-endian words; the plain form.
fn plain_sum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u32;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
            sum = (sum & 0xffff) + (sum >> 16);
        }
    }
    u16::try_from(sum).unwrap()
}

#[test]
fn what_sctp_leaves_to_others_is_its_own_checksum() {
    for (ethertype, network, protocol) in [(0x0800_u16, 20, 9), (0x86dd, 40, 6)] {
        let mut frame = vec![0; 14 + network + 12 + 20];
        frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
        frame[14 + protocol] = 132;
        frame[14 + network..].fill(0x5a);
        let start = 14 + network;
        let header = VnetHeader {
            flags: NEEDS_CHECKSUM,
            checksum_start: u16::try_from(start).unwrap(),
            checksum_offset: 8,
            ..VnetHeader::default()
        };
        assert_eq!(complete_checksum(&header, &mut frame), Ok(true));
        let field: [u8; 4] = frame[start + 8..start + 12].try_into().unwrap();
        frame[start + 8..start + 12].fill(0);
        assert_eq!(checksum::crc32c(&frame[start..]), field);
        // Where there is no room for all of it, nothing is written.
        frame.truncate(start + 11);
        let before = frame.clone();
        let error = complete_checksum(&header, &mut frame);
        assert_eq!(error, Err(OffloadError::ChecksumPlace));
        assert_eq!(frame, before);
        // Others' are as they were.
        frame[14 + protocol] = 17;
        frame.resize(start + 32, 0);
        assert_eq!(complete_checksum(&header, &mut frame), Ok(true));
        assert_eq!(plain_sum(&[&frame[start..]]), 0xffff);
    }
}

/// What a receiver sees of a frame, after it has checked everything that can be.
#[derive(Debug, PartialEq)]
struct Received {
    identification: u16,
    sequence: u32,
    flags: u8,
    payload: Vec<u8>,
}

/// Checks lengths and both checksums.
fn receive(frame: &[u8]) -> Received {
    let mut at = 12;
    while [0x8100, 0x88a8].contains(&u16_at(frame, at)) {
        at += 4;
    }
    let packet = &frame[at + 2..];
    let (identification, protocol, addresses, segment) = if u16_at(frame, at) == 0x0800 {
        let header = usize::from(packet[0] & 15) * 4;
        assert_eq!(usize::from(u16_at(packet, 2)), packet.len());
        assert_eq!(plain_sum(&[&packet[..header]]), 0xffff, "IPv4 header");
        let addresses = &packet[12..20];
        (u16_at(packet, 4), packet[9], addresses, &packet[header..])
    } else {
        assert_eq!(u16_at(frame, at), 0x86dd);
        assert_eq!(usize::from(u16_at(packet, 4)), packet.len() - 40);
        let (mut next, mut header) = (packet[6], 40);
        while next == 60 {
            next = packet[header];
            header += 8 + 8 * usize::from(packet[header + 1]);
        }
        (0, next, &packet[8..40], &packet[header..])
    };
    let length = u32::try_from(segment.len()).unwrap().to_be_bytes();
    let sum = plain_sum(&[addresses, &length, &[0, protocol], segment]);
    assert_eq!(sum, 0xffff, "checksum of the segment");
    if protocol == 17 {
        assert_eq!(usize::from(u16_at(segment, 4)), segment.len());
        assert_ne!(&segment[6..8], [0, 0], "UDP without a checksum");
        let payload = segment[8..].to_vec();
        return Received {
            identification,
            sequence: 0,
            flags: 0,
            payload,
        };
    }
    let header = usize::from(segment[12] >> 4) * 4;
    Received {
        identification,
        sequence: u32::from_be_bytes(segment[4..8].try_into().unwrap()),
        flags: segment[13],
        payload: segment[header..].to_vec(),
    }
}

/// What is to be built.
#[derive(Debug, Clone)]
struct Shape {
    six: bool,
    udp: bool,
    tags: usize,
    /// IPv4 options or an IPv6 extension header.
    options: bool,
    payload: Vec<u8>,
    segment: u16,
}

impl Shape {
    /// The frame as a kernel hands it over, with the pseudo header's sum for a checksum, and its header.
    fn build(&self) -> (VnetHeader, Vec<u8>) {
        let mut frame = b"\x02toTOt\x02frFRf".to_vec();
        for tag in 0..self.tags {
            frame.extend([[0x88, 0xa8, 0, 5], [0x81, 0, 0, 100]][2 - self.tags + tag]);
        }
        let transport = self.transport();
        let protocol = if self.udp { 17 } else { 6 };
        let addresses: Vec<u8> = if self.six {
            frame.extend([0x86, 0xdd]);
            let extension: &[u8] = if self.options {
                &[protocol, 0, 1, 4, 0, 0, 0, 0]
            } else {
                &[]
            };
            let length = low_u16(extension.len() + transport.len()).to_be_bytes();
            let next = if self.options { 60 } else { protocol };
            frame.extend([0x60, 0, 0, 0, length[0], length[1], next, 64]);
            let addresses = (0..32).map(|byte| byte * 7 + 1).collect::<Vec<u8>>();
            frame.extend(&addresses);
            frame.extend(extension);
            addresses
        } else {
            frame.extend([0x08, 0]);
            let words = if self.options { 6 } else { 5 };
            let length = low_u16(words * 4 + transport.len()).to_be_bytes();
            let first = 0x40 | u8::try_from(words).unwrap();
            frame.extend([
                first, 0, length[0], length[1], 0xff, 0xfe, 0x40, 0, 64, protocol, 0, 0,
            ]);
            let addresses = vec![192, 0, 2, 1, 198, 51, 100, 7];
            frame.extend(&addresses);
            frame.extend(if self.options { &[1, 1, 1, 0][..] } else { &[] });
            let header = frame.len() - words * 4;
            let field = !plain_sum(&[&frame[header..]]);
            frame[header + 10..header + 12].copy_from_slice(&field.to_be_bytes());
            addresses
        };
        let start = frame.len();
        frame.extend(&transport);
        let offset = if self.udp { 6 } else { 16 };
        let length = u32::try_from(transport.len()).unwrap().to_be_bytes();
        let pseudo = plain_sum(&[&addresses, &length, &[0, protocol]]);
        frame[start + offset..start + offset + 2].copy_from_slice(&pseudo.to_be_bytes());
        let gso_type = match (self.udp, self.six) {
            (true, _) => GSO_UDP_L4,
            (false, true) => GSO_TCPV6,
            (false, false) => GSO_TCPV4,
        };
        let header = VnetHeader {
            flags: NEEDS_CHECKSUM,
            gso_type,
            segment_bytes: self.segment,
            checksum_start: low_u16(start),
            checksum_offset: low_u16(offset),
            ..VnetHeader::default()
        };
        (header, frame)
    }

    fn transport(&self) -> Vec<u8> {
        let mut bytes = if self.udp {
            let length = low_u16(8 + self.payload.len()).to_be_bytes();
            vec![0x30, 0x39, 0, 53, length[0], length[1], 0, 0]
        } else {
            // Sequence number near its end, 12 bytes of options, FIN, PSH, ACK, ECE and CWR.
            let mut tcp = vec![0x30, 0x39, 0, 80, 0xff, 0xff, 0xff, 0x00, 0, 0, 0, 9];
            tcp.extend([0x80, 0xd9, 1, 0, 0, 0, 0, 0]);
            tcp.extend([1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
            tcp
        };
        bytes.extend(&self.payload);
        bytes
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let payload = prop::collection::vec(any::<u8>(), 0..4000);
    let flags = (any::<bool>(), any::<bool>(), 0..=2usize, any::<bool>());
    (flags, payload, 1..1500u16).prop_map(|((six, udp, tags, options), payload, segment)| Shape {
        six,
        udp,
        tags,
        options,
        payload,
        segment,
    })
}

fn cut(header: &VnetHeader, frame: &[u8]) -> Vec<Vec<u8>> {
    let whole = SuperPacket::new(header, frame).unwrap();
    let mut frames = Vec::new();
    for index in 0..whole.count() {
        let mut room = vec![0xee; 2048];
        let length = whole.write(index, &mut room).unwrap();
        assert!(length <= whole.longest());
        frames.push(room[..length].to_vec());
    }
    assert_eq!(whole.write(whole.count(), &mut [0; 2048]), None);
    frames
}

proptest! {
    #[test]
    fn a_completed_checksum_is_what_a_receiver_computes(shape in shapes()) {
        let (mut header, mut frame) = shape.build();
        header.gso_type = GSO_NONE;
        prop_assert_eq!(complete_checksum(&header, &mut frame), Ok(true));
        prop_assert_eq!(receive(&frame).payload, shape.payload);
    }

    #[test]
    fn a_cut_super_packet_is_the_same_bytes_in_valid_frames(shape in shapes()) {
        let (header, frame) = shape.build();
        let frames: Vec<Received> = cut(&header, &frame).iter().map(|frame| receive(frame)).collect();
        let last = frames.len() - 1;
        let mut payload: Vec<u8> = Vec::new();
        for (index, received) in frames.iter().enumerate() {
            if !shape.six {
                prop_assert_eq!(received.identification, 0xfffe_u16.wrapping_add(low_u16(index)));
            }
            if !shape.udp {
                let sequence = 0xffff_ff00_u32.wrapping_add(u32::try_from(payload.len()).unwrap());
                prop_assert_eq!(received.sequence, sequence);
                prop_assert_eq!(received.flags & TCP_CWR != 0, index == 0);
                prop_assert_eq!(received.flags & TCP_PSH != 0, index == last);
                prop_assert_eq!(received.flags & TCP_FIN != 0, index == last);
                prop_assert_eq!(received.flags & 0x50, 0x50, "ACK and ECE are in all");
            }
            prop_assert!(index == last || received.payload.len() == usize::from(shape.segment));
            payload.extend(&received.payload);
        }
        prop_assert_eq!(payload, shape.payload);
    }

    #[test]
    fn no_bytes_of_a_guest_make_it_panic(
        words in any::<[u8; 10]>(),
        mut frame in prop::collection::vec(any::<u8>(), 0..200),
        shape in shapes(),
        damage in prop::collection::vec((0..90usize, any::<u8>()), 0..6),
        cut_at in 0..200usize,
        start in 0..120u16,
    ) {
        let header = VnetHeader::read(words);
        prop_assert_eq!(header.write(), words);
        try_both(&header, &mut frame);
        let (mut header, mut frame) = shape.build();
        for (place, byte) in damage {
            if let Some(target) = frame.get_mut(place) {
                *target = byte;
            }
        }
        try_both(&header, &mut frame);
        frame.truncate(cut_at);
        try_both(&header, &mut frame);
        header.checksum_start = start;
        try_both(&header, &mut frame);
    }
}

fn try_both(header: &VnetHeader, frame: &mut [u8]) {
    if let Ok(whole) = SuperPacket::new(header, frame) {
        for index in [0, 1, whole.count() - 1, whole.count(), usize::MAX] {
            let _ = whole.write(index, &mut [0; 300]);
        }
    }
    let before = frame.to_vec();
    if complete_checksum(header, frame).is_err() {
        assert_eq!(frame, before);
    }
}

fn shape() -> Shape {
    Shape {
        six: false,
        udp: false,
        tags: 0,
        options: false,
        payload: vec![7; 3000],
        segment: 1448,
    }
}

#[test]
fn a_datagram_whose_checksum_is_zero_gets_all_ones() {
    // Two bytes of payload that bring the sum to 0xffff.
    let mut shape = Shape {
        udp: true,
        payload: vec![0, 0],
        ..shape()
    };
    let (mut header, mut frame) = shape.build();
    header.gso_type = GSO_NONE;
    assert_eq!(complete_checksum(&header, &mut frame), Ok(true));
    shape.payload = frame[40..42].to_vec();
    let (mut header, mut frame) = shape.build();
    header.gso_type = GSO_NONE;
    assert_eq!(complete_checksum(&header, &mut frame), Ok(true));
    assert_eq!(frame[40..42], [0xff, 0xff]);
    receive(&frame);
}

#[test]
fn a_datagram_without_a_checksum_stays_so_when_it_is_cut() {
    let shape = Shape {
        udp: true,
        ..shape()
    };
    let (mut header, mut frame) = shape.build();
    header.flags = 0;
    frame[40..42].fill(0);
    for segment in cut(&header, &frame) {
        assert_eq!(segment[40..42], [0, 0]);
    }
}

#[test]
fn what_a_tunnel_carries_is_not_cut() {
    let (mut header, frame) = shape().build();
    header.checksum_start += 50;
    let error = SuperPacket::new(&header, &frame).unwrap_err();
    assert_eq!(error, OffloadError::Headers);
}

/// The jumbo payload option of a super-packet of `length` bytes behind its IPv6 header.
fn jumbo_option(length: usize) -> Vec<u8> {
    let length = u32::try_from(length).unwrap().to_be_bytes();
    [&[6, 0, 0xc2, 4], &length[..]].concat()
}

#[test]
fn a_super_packet_may_be_longer_than_its_header_can_say() {
    let payload: Vec<u8> = (0..100_000u32).map(|at| at.to_le_bytes()[0]).collect();
    for (six, has_option) in [(false, false), (true, false), (true, true)] {
        // Its lengths are what fits into 16 bits of them.
        let mut small = Shape { six, ..shape() };
        let (mut header, mut frame) = small.build();
        small.payload = payload.clone();
        frame.truncate(frame.len() - shape().payload.len());
        frame.extend(&payload);
        let length_at = if six { 18 } else { 16 };
        frame[length_at..length_at + 2].fill(0);
        if has_option {
            let option = jumbo_option(frame.len() - 14 - 40 + 8);
            frame[20] = 0;
            frame.splice(54..54, option);
            header.checksum_start += 8;
        }
        let frames = cut(&header, &frame);
        assert_eq!(frames.len(), payload.len().div_ceil(1448));
        let arrived = frames.iter().flat_map(|frame| receive(frame).payload);
        assert!(arrived.eq(payload.iter().copied()), "{six} {has_option}");
    }
}

#[test]
fn an_option_before_anything_but_tcp_stays() {
    let six = Shape {
        six: true,
        ..shape()
    };
    let (mut header, mut frame) = six.build();
    // Six bytes of padding.
    frame[20] = 0;
    frame.splice(54..54, [6, 0, 1, 4, 0, 0, 0, 0]);
    header.checksum_start += 8;
    for segment in cut(&header, &frame) {
        assert_eq!((segment[20], &segment[54..58]), (0, &[6, 0, 1, 4][..]));
    }
}

#[test]
fn what_is_not_what_its_header_says_is_refused() {
    let (header, frame) = shape().build();
    let refused = |change: fn(&mut VnetHeader, &mut Vec<u8>)| {
        let (mut header, mut frame) = (header, frame.clone());
        change(&mut header, &mut frame);
        SuperPacket::new(&header, &frame).unwrap_err()
    };
    let six = refused(|header, _| header.gso_type = GSO_TCPV6);
    assert_eq!(six, OffloadError::Headers);
    let udp = refused(|header, _| header.gso_type = GSO_UDP_L4);
    assert_eq!(udp, OffloadError::Headers);
    let fragments = refused(|header, _| header.gso_type = 3);
    assert_eq!(fragments, OffloadError::Type(3));
    let endless = refused(|header, _| header.segment_bytes = 0);
    assert_eq!(endless, OffloadError::SegmentSize);
    let fragment = refused(|_, frame| frame[20] = 0x20);
    assert_eq!(fragment, OffloadError::Headers);
    let short = refused(|_, frame| frame.truncate(50));
    assert_eq!(short, OffloadError::Headers);
    let huge = refused(|header, frame| {
        header.segment_bytes = u16::MAX;
        frame.resize(80_000, 0);
    });
    assert_eq!(huge, OffloadError::SegmentSize);
}
