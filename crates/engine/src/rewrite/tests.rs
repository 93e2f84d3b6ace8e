use std::process::Command;

use proptest::prelude::*;

use super::*;
use crate::classify::parse;
use crate::io::pcap::{Format, Writer};

/// What is done to frames, and asked of them.
const TTL: u8 = 64;

/// A frame with this protocol and payload, whose checksums are zero.
fn frame(v6: bool, protocol: u8, payload: &[u8], extensions: &[u8]) -> Vec<u8> {
    let mut frame = vec![2; 12];
    let length = u16::try_from(extensions.len() + payload.len()).unwrap();
    if v6 {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend(length.to_be_bytes());
        frame.push(if extensions.is_empty() { protocol } else { 60 });
        frame.push(TTL);
        frame.extend("fd00::1".parse::<std::net::Ipv6Addr>().unwrap().octets());
        frame.extend(
            "2001:db8::ffff:2"
                .parse::<std::net::Ipv6Addr>()
                .unwrap()
                .octets(),
        );
    } else {
        frame.extend([8, 0, 0x45, 0]);
        frame.extend((length + 20).to_be_bytes());
        frame.extend([0, 7, 0, 0, TTL, protocol, 0, 0]);
        frame.extend([10, 0, 0, 1, 192, 0, 2, 1]);
    }
    frame.extend(extensions);
    frame.extend(payload);
    frame
}

/// A TCP segment with these options, which are filled up to a multiple of four, and data.
fn segment(flags: u8, options: &[u8], data: &[u8]) -> Vec<u8> {
    let mut segment = vec![0x10, 0, 0, 80, 1, 2, 3, 4, 5, 6, 7, 8];
    let mut options = options.to_vec();
    options.resize(options.len().next_multiple_of(4), 0);
    segment.push(u8::try_from((20 + options.len()) * 4).unwrap());
    segment.extend([flags, 0xff, 0xff, 0, 0, 0, 0]);
    segment.extend(options);
    segment.extend(data);
    segment
}

/// A datagram whose checksum is to be computed.
fn datagram(data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(8 + data.len()).unwrap().to_be_bytes();
    let head = [0x10, 0, 0, 99, length[0], length[1], 1, 1];
    [&head[..], data].concat()
}

fn ip_of(frame: &[u8]) -> IpHeaders {
    parse(frame).ip.unwrap()
}

fn completed(mut frame: Vec<u8>) -> Vec<u8> {
    let ip = ip_of(&frame);
    assert!(complete_checksums(&mut frame, &ip));
    frame
}

/// The checksum of RFC 1071's own words, byte by byte, with the sum in one's complement at each step: right if 0xffff.
fn slow_sum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0_u32;
    for part in parts {
        for (place, byte) in part.iter().enumerate() {
            sum += u32::from(*byte) << if place % 2 == 0 { 8 } else { 0 };
            sum = (sum & 0xffff) + (sum >> 16);
        }
    }
    u16::try_from(sum).unwrap()
}

/// Whether all checksums are right, by nothing of the code under test.
fn is_right(frame: &[u8], protocol: u8, extension_bytes: usize) -> bool {
    let v6 = frame[12] == 0x86;
    let (addresses, start) = if v6 {
        (&frame[22..54], 54 + extension_bytes)
    } else {
        (&frame[26..34], 34)
    };
    let payload = &frame[start..];
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let pseudo = [addresses, &length, &[0, protocol]];
    let header = v6 || slow_sum(&[&frame[14..34]]) == 0xffff;
    let payload = match protocol {
        ICMP => slow_sum(&[payload]),
        _ => slow_sum(&[pseudo[0], pseudo[1], pseudo[2], payload]),
    };
    header && payload == 0xffff
}

#[test]
fn a_ttl_goes_down_to_one_and_no_further() {
    for v6 in [false, true] {
        let mut frame = completed(frame(v6, UDP, &datagram(b"odd"), &[]));
        let ip = ip_of(&frame);
        for left in (1..TTL).rev() {
            assert_eq!(decrement_ttl(&mut frame, &ip), Some(left));
            assert!(is_right(&frame, UDP, 0));
        }
        let before = frame.clone();
        assert_eq!(decrement_ttl(&mut frame, &ip), None);
        assert_eq!(frame, before);
    }
}

#[test]
fn only_a_larger_mss_of_a_syn_is_lowered() {
    let with = |flags, options: &[u8]| {
        let mut frame = completed(frame(false, TCP, &segment(flags, options, b""), &[]));
        let ip = ip_of(&frame);
        let lowered = clamp_mss(&mut frame, &ip, 1360);
        assert!(is_right(&frame, TCP, 0));
        (lowered, frame[54..].to_vec())
    };
    assert_eq!(with(2, &[2, 4, 5, 0xb4]), (true, vec![2, 4, 5, 0x50]));
    // SYN and ACK; behind another option, at an odd place, and before the end of a list.
    assert_eq!(with(0x12, &[1, 2, 4, 5, 0xb4]).1[..5], [1, 2, 4, 5, 0x50]);
    assert_eq!(
        with(2, &[4, 2, 2, 4, 0xff, 0xff]).1[..6],
        [4, 2, 2, 4, 5, 0x50]
    );
    for (flags, options) in [
        (2, &[2, 4, 5, 0x50][..]),
        (2, &[2, 4, 0, 100]),
        (0x10, &[2, 4, 5, 0xb4]),
        (2, &[]),
        (2, &[0, 2, 4, 5, 0xb4]),
        // An option that says that it is longer than the header, or no option at all.
        (2, &[3, 200, 2, 4, 5, 0xb4]),
        (2, &[1, 1, 1, 2]),
        (2, &[3, 0, 2, 3]),
    ] {
        let (lowered, after) = with(flags, options);
        assert!(!lowered, "{options:?}");
        assert_eq!(after[..options.len()], *options);
    }
}

#[test]
fn what_has_no_checksum_of_its_own_is_left_alone() {
    let mut fragment = frame(false, UDP, &datagram(b"part"), &[]);
    fragment[20] = 0x20;
    let mut odd_protocol = frame(false, 132, &datagram(b"sctp"), &[]);
    let mut cut = frame(false, UDP, &datagram(b"cut"), &[]);
    cut.truncate(44);
    let mut without = frame(false, UDP, &datagram(b"none"), &[]);
    without[40..42].fill(0);
    // One segment is left of a route.
    let mut routed = frame(true, UDP, &datagram(b"via"), &[UDP, 0, 4, 1, 0, 0, 0, 0]);
    routed[20] = 43;
    for frame in [
        &mut fragment,
        &mut odd_protocol,
        &mut cut,
        &mut without,
        &mut routed,
    ] {
        let ip = ip_of(frame);
        let payload = frame[ip.payload_offset..].to_vec();
        assert!(!complete_checksums(frame, &ip));
        assert_eq!(frame[ip.payload_offset..], payload);
        assert!(checksums_are_right(frame, &ip));
    }
    let mut arrived = routed;
    arrived[57] = 0;
    arrived[60..62].fill(0);
    let ip = ip_of(&arrived);
    assert!(complete_checksums(&mut arrived, &ip));
}

/// Writes frames to a capture and wants tcpdump to find no checksum wrong.
#[test]
fn tcpdump_agrees() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("frames.pcap");
    let file = std::fs::File::create(&path).unwrap();
    let mut writer = Writer::new(file, Format::Pcap, &[]).unwrap();
    let mut count = 0;
    for v6 in [false, true] {
        let icmp = if v6 { ICMPV6 } else { ICMP };
        let kind = if v6 { 128 } else { 8 };
        for data in [&b""[..], b"x", b"even", &[0xff; 1001]] {
            let echo = [&[kind, 0, 0, 0, 0, 1, 0, 2], data].concat();
            let syn = segment(2, &[1, 2, 4, 0x20, 0], data);
            for (protocol, payload) in [(UDP, datagram(data)), (TCP, syn), (icmp, echo)] {
                let mut frame = completed(frame(v6, protocol, &payload, &[]));
                let ip = ip_of(&frame);
                assert_eq!(clamp_mss(&mut frame, &ip, 1234), protocol == TCP);
                assert_eq!(decrement_ttl(&mut frame, &ip), Some(63));
                writer.write(0, count, &frame, None).unwrap();
                count += 1;
            }
        }
    }
    drop(writer);
    let output = Command::new("tcpdump")
        .args(["-n", "-vv", "-r"])
        .arg(&path)
        .output()
        .expect("tcpdump, which `cargo xtask setup` installs");
    let text = String::from_utf8_lossy(&output.stdout);
    for wrong in ["bad", "wrong", "incorrect"] {
        assert!(!text.contains(wrong), "{text}");
    }
    // It says so of each UDP datagram, TCP segment and ICMPv6 message.
    let right = text.matches("udp sum ok").count()
        + text.matches("(correct)").count()
        + text.matches("icmp6 sum ok").count();
    assert_eq!(right, 20, "{text}");
    assert_eq!(text.matches("mss 1234").count(), 8, "{text}");
    assert!(text.contains("ttl 63") && text.contains("hlim 63"));
}

proptest! {
    #[test]
    fn checksums_are_right_after_each_change(
        v6 in any::<bool>(),
        is_tcp in any::<bool>(),
        extensions in 0..3_usize,
        data in prop::collection::vec(any::<u8>(), 0..200),
        nothings in 0..5_usize,
        asked in any::<u16>(),
        mss in any::<u16>(),
    ) {
        let protocol = if is_tcp { TCP } else { UDP };
        let chain: Vec<u8> = (0..if v6 { extensions } else { 0 })
            .flat_map(|number| [if number + 1 == extensions { protocol } else { 60 }, 0, 1, 4, 0, 0, 0, 0])
            .collect();
        let mut options = vec![1; nothings];
        options.extend([2, 4]);
        options.extend(asked.to_be_bytes());
        let payload = if is_tcp { segment(2, &options, &data) } else { datagram(&data) };
        let mut frame = completed(frame(v6, protocol, &payload, &chain));
        let ip = ip_of(&frame);
        prop_assert!(is_right(&frame, protocol, chain.len()));
        prop_assert!(checksums_are_right(&frame, &ip));
        prop_assert_eq!(clamp_mss(&mut frame, &ip, mss), is_tcp && asked > mss);
        prop_assert!(is_right(&frame, protocol, chain.len()));
        prop_assert_eq!(decrement_ttl(&mut frame, &ip), Some(TTL - 1));
        prop_assert!(is_right(&frame, protocol, chain.len()));
        // One bit changed is a wrong checksum.
        let at = ip.payload_offset + 4 * usize::from(is_tcp);
        frame[at] ^= 0x40;
        prop_assert!(!checksums_are_right(&frame, &ip));
    }

    #[test]
    fn a_difference_is_worth_the_whole(
        bytes in prop::collection::vec(any::<u8>(), 2..40),
        new in prop::collection::vec(any::<u8>(), 2..6),
        place in any::<prop::sample::Index>(),
    ) {
        let mut bytes = bytes;
        bytes.resize(bytes.len().next_multiple_of(2).max(8), 1);
        let new = &new[..new.len() & !1];
        let at = place.index(bytes.len() - new.len() + 1) & !1;
        let before = !fold(sum(0, &bytes));
        let old = bytes[at..at + new.len()].to_vec();
        bytes[at..at + new.len()].copy_from_slice(new);
        let whole = !fold(sum(0, &bytes));
        let updated = updated_checksum(before, &old, new);
        // Zero has two forms.
        prop_assert!(updated == whole || (whole == 0 || whole == u16::MAX) && (updated == 0 || updated == u16::MAX));
    }

    #[test]
    fn any_bytes_can_be_rewritten(
        v6 in any::<bool>(),
        protocol in prop::sample::select(vec![1_u8, 6, 17, 58, 43, 44, 60]),
        payload in prop::collection::vec(any::<u8>(), 0..80),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut frame = frame(v6, protocol, &payload, &[]);
        let ip = parse(&frame).ip;
        for (at, byte) in changes {
            *at.get_mut(&mut frame[..]) = byte;
        }
        frame.truncate(cut.index(frame.len() + 1));
        // What belongs to the frame, and what doesn't.
        for ip in [parse(&frame).ip, ip].into_iter().flatten() {
            complete_checksums(&mut frame, &ip);
            clamp_mss(&mut frame, &ip, 1);
            decrement_ttl(&mut frame, &ip);
            let _ = checksums_are_right(&frame, &ip);
        }
    }
}
