use proptest::prelude::*;

use super::*;

/// A frame with these tags, as (EtherType of the tag, identifier), around that.
fn ethernet(tags: &[(u16, u16)], ether_type: u16, inside: &[u8]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    for (kind, tag) in tags {
        frame.extend(kind.to_be_bytes());
        frame.extend(tag.to_be_bytes());
    }
    frame.extend(ether_type.to_be_bytes());
    frame.extend(inside);
    frame
}

/// An IPv4 packet from 10.1.2.3 to 192.0.2.9.
fn ipv4(options: &[u8], place: u16, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let header_bytes = 20 + options.len();
    let total = u16::try_from(header_bytes + payload.len()).unwrap();
    let words = u8::try_from(header_bytes / 4).unwrap();
    let mut packet = vec![0x40 | words, 0];
    packet.extend(total.to_be_bytes());
    packet.extend([0, 1]);
    packet.extend(place.to_be_bytes());
    packet.extend([64, protocol, 0, 0, 10, 1, 2, 3, 192, 0, 2, 9]);
    packet.extend(options);
    packet.extend(payload);
    packet
}

/// An IPv6 packet from fd00::3 to 2001:db8::9.
fn ipv6(next: u8, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len()).unwrap();
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(length.to_be_bytes());
    packet.extend([next, 64]);
    packet.extend("fd00::3".parse::<Ipv6Addr>().unwrap().octets());
    packet.extend("2001:db8::9".parse::<Ipv6Addr>().unwrap().octets());
    packet.extend(payload);
    packet
}

/// Source port 1000, destination port 53, and 4 bytes more.
const PORTS: [u8; 8] = [0x03, 0xe8, 0, 53, 0, 8, 0, 0];

fn parse_ip(frame: &[u8]) -> IpHeaders {
    parse(frame).ip.unwrap()
}

#[test]
fn an_ipv4_datagram_says_who_and_where() {
    let ip = parse_ip(&ethernet(&[], 0x0800, &ipv4(&[], 0x4000, UDP, &PORTS)));
    assert_eq!(ip.version, IpVersion::V4);
    assert_eq!(ip.source.to_string(), "10.1.2.3");
    assert_eq!(ip.destination.to_string(), "192.0.2.9");
    assert_eq!((ip.protocol, ip.fragment), (UDP, Fragment::Whole));
    assert_eq!(ip.ports, Some((1000, 53)));
    assert_eq!((ip.offset, ip.payload_offset, ip.end), (14, 34, 42));
}

#[test]
fn ports_come_after_ipv4_options() {
    for protocol in [TCP, UDP, SCTP, 33, 136] {
        let ip = parse_ip(&ethernet(&[], 0x0800, &ipv4(&[1; 40], 0, protocol, &PORTS)));
        assert_eq!(ip.ports, Some((1000, 53)), "protocol {protocol}");
        assert_eq!(ip.payload_offset, 74);
    }
}

#[test]
fn only_the_first_fragment_has_ports() {
    let of = |place| parse_ip(&ethernet(&[], 0x0800, &ipv4(&[], place, UDP, &PORTS)));
    assert_eq!(of(0x2000).fragment, Fragment::First);
    assert_eq!(of(0x2000).ports, Some((1000, 53)));
    for place in [0x0001, 0x2001, 0x1fff] {
        assert_eq!(of(place).fragment, Fragment::Later);
        assert_eq!(of(place).ports, None);
    }
}

#[test]
fn padding_is_no_part_of_the_packet() {
    let mut frame = ethernet(&[], 0x0800, &ipv4(&[], 0, UDP, &[]));
    frame.extend([9; 26]);
    let ip = parse_ip(&frame);
    assert_eq!((ip.end, ip.ports), (34, None));
}

#[test]
fn icmp_has_type_and_code_but_no_ports() {
    let ip = parse_ip(&ethernet(&[], 0x0800, &ipv4(&[], 0, ICMP, &[3, 4, 0, 0])));
    assert_eq!((ip.icmp, ip.ports), (Some((3, 4)), None));
    let ip = parse_ip(&ethernet(&[], 0x86dd, &ipv6(ICMPV6, &[128, 0, 0, 0])));
    assert_eq!((ip.icmp, ip.ports), (Some((128, 0)), None));
    // ICMPv6's number in an IPv4 packet is none of either.
    let ip = parse_ip(&ethernet(&[], 0x0800, &ipv4(&[], 0, ICMPV6, &[1, 2])));
    assert_eq!(ip.icmp, None);
}

#[test]
fn up_to_two_vlan_tags_are_seen_through() {
    let inside = ipv4(&[], 0, UDP, &PORTS);
    let one = parse(&ethernet(&[(0x8100, 0xe007)], 0x0800, &inside));
    assert_eq!((one.vlan, one.inner_vlan), (Some(7), None));
    assert_eq!(one.ip.unwrap().offset, 18);
    let two = parse(&ethernet(&[(0x88a8, 7), (0x8100, 8)], 0x0800, &inside));
    assert_eq!((two.vlan, two.inner_vlan), (Some(7), Some(8)));
    assert_eq!(two.ip.unwrap().ports, Some((1000, 53)));
    assert_eq!(two.ethernet.unwrap().ether_type, 0x0800);
    let three = parse(&ethernet(
        &[(0x88a8, 7), (0x8100, 8), (0x8100, 9)],
        0x0800,
        &inside,
    ));
    assert_eq!((three.vlan, three.inner_vlan), (Some(7), Some(8)));
    assert_eq!(three.ip, None);
    let cut = parse(&ethernet(&[], 0x8100, &[0, 7, 8]));
    assert_eq!((cut.vlan, cut.ip), (None, None));
}

#[test]
fn ports_come_after_ipv6_extensions() {
    let hop_by_hop = [43, 0, 1, 4, 0, 0, 0, 0];
    let routing = [51, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let authentication = [60, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let options = [TCP, 0, 1, 4, 0, 0, 0, 0];
    let payload = [&hop_by_hop[..], &routing, &authentication, &options, &PORTS].concat();
    let ip = parse_ip(&ethernet(&[], 0x86dd, &ipv6(0, &payload)));
    assert_eq!(ip.source.to_string(), "fd00::3");
    assert_eq!((ip.protocol, ip.ports), (TCP, Some((1000, 53))));
    assert_eq!(ip.payload_offset, 14 + 40 + 8 + 16 + 12 + 8);
}

#[test]
fn an_ipv6_fragment_header_is_understood() {
    let of = |place: u16| {
        let mut payload = vec![UDP, 0];
        payload.extend(place.to_be_bytes());
        payload.extend([0, 0, 0, 1]);
        payload.extend(PORTS);
        let ip = parse_ip(&ethernet(&[], 0x86dd, &ipv6(44, &payload)));
        assert_eq!(ip.protocol, UDP);
        (ip.fragment, ip.ports)
    };
    assert_eq!(of(1), (Fragment::First, Some((1000, 53))));
    assert_eq!(of(8), (Fragment::Later, None));
    assert_eq!(of(9), (Fragment::Later, None));
    // RFC 6946: with nothing before and nothing after, it is the whole datagram.
    assert_eq!(of(0), (Fragment::Whole, Some((1000, 53))));
}

#[test]
fn endless_and_cut_extensions_are_given_up() {
    let endless = [60, 0, 1, 4, 0, 0, 0, 0].repeat(100);
    let ip = parse_ip(&ethernet(&[], 0x86dd, &ipv6(60, &endless)));
    assert_eq!((ip.protocol, ip.ports), (60, None));
    assert_eq!(ip.payload_offset, 14 + 40 + 8 * EXTENSIONS_MAX);
    let too_long = [UDP, 200, 0, 0, 0, 0, 0, 0];
    let ip = parse_ip(&ethernet(&[], 0x86dd, &ipv6(0, &too_long)));
    assert_eq!((ip.protocol, ip.ports), (0, None));
}

#[test]
fn what_contradicts_itself_is_no_ip() {
    let good = ipv4(&[], 0, UDP, &PORTS);
    for (at, byte) in [(0, 0x65), (0, 0x44), (0, 0x4f), (3, 19)] {
        let mut bad = good.clone();
        bad[at] = byte;
        assert_eq!(
            parse(&ethernet(&[], 0x0800, &bad)).ip,
            None,
            "{byte} at {at}"
        );
    }
    assert_eq!(parse(&ethernet(&[], 0x86dd, &good)).ip, None);
    assert_eq!(parse(&ethernet(&[], 0x0806, &good)).ip, None);
}

#[test]
fn a_jumbogram_ends_with_its_frame() {
    let mut packet = ipv6(UDP, &PORTS);
    packet[4..6].fill(0);
    let ip = parse_ip(&ethernet(&[], 0x86dd, &packet));
    assert_eq!((ip.end, ip.ports), (14 + 48, Some((1000, 53))));
}

#[test]
fn rules_ask_for_prefixes_protocol_ports_version_and_vlan() {
    let v4 = parse(&ethernet(
        &[(0x8100, 7)],
        0x0800,
        &ipv4(&[], 0, UDP, &PORTS),
    ));
    let v6 = parse(&ethernet(&[], 0x86dd, &ipv6(TCP, &PORTS)));
    let arp = parse(&ethernet(&[], 0x0806, &[0; 28]));
    let matched = |rule: Match| [&v4, &v6, &arp].map(|headers| rule.matches(headers));
    let all = Match::default;
    let net = |text: &str| Some(text.parse().unwrap());
    for (rule, expected) in [
        (all(), [true, true, true]),
        (
            Match {
                version: Some(IpVersion::V4),
                ..all()
            },
            [true, false, false],
        ),
        (
            Match {
                version: Some(IpVersion::V6),
                ..all()
            },
            [false, true, false],
        ),
        (
            Match {
                protocol: Some(TCP),
                ..all()
            },
            [false, true, false],
        ),
        (
            Match {
                source: net("10.0.0.0/8"),
                ..all()
            },
            [true, false, false],
        ),
        (
            Match {
                source: net("10.1.2.4/32"),
                ..all()
            },
            [false, false, false],
        ),
        (
            Match {
                destination: net("2001:db8::/32"),
                ..all()
            },
            [false, true, false],
        ),
        (
            Match {
                source: net("0.0.0.0/0"),
                ..all()
            },
            [true, false, false],
        ),
        (
            Match {
                source_ports: Some(999..=1000),
                ..all()
            },
            [true, true, false],
        ),
        (
            Match {
                source_ports: Some(1001..=65535),
                ..all()
            },
            [false, false, false],
        ),
        (
            Match {
                destination_ports: Some(53..=53),
                ..all()
            },
            [true, true, false],
        ),
        (
            Match {
                destination_ports: Some(0..=52),
                ..all()
            },
            [false, false, false],
        ),
        (
            Match {
                vlan: Some(7),
                ..all()
            },
            [true, false, false],
        ),
    ] {
        let text = rule.to_string();
        assert_eq!(rule.check(), Ok(()), "{text}");
        assert_eq!(matched(rule), expected, "{text}");
    }
}

#[test]
fn a_later_fragment_matches_only_rules_without_ports() {
    let later = parse(&ethernet(&[], 0x0800, &ipv4(&[], 0x0010, UDP, &PORTS)));
    let by_protocol = Match {
        protocol: Some(UDP),
        ..Match::default()
    };
    let any_port = Match {
        destination_ports: Some(0..=65535),
        ..by_protocol.clone()
    };
    assert!(by_protocol.matches(&later));
    assert!(!any_port.matches(&later));
}

#[test]
#[expect(clippy::reversed_empty_ranges, reason = "that is what is refused")]
fn a_rule_that_never_matches_is_refused_with_the_reason() {
    let rule = Match {
        source: Some("10.0.0.0/8".parse().unwrap()),
        destination: Some("fd00::/8".parse().unwrap()),
        ..Match::default()
    };
    let error = rule.check().unwrap_err().to_string();
    assert!(error.contains("from 10.0.0.0/8 to fd00::/8"), "{error}");
    let empty = Match {
        destination_ports: Some(9..=8),
        ..Match::default()
    };
    assert!(matches!(empty.check(), Err(MatchError::EmptyRange { .. })));
    let portless = Match {
        protocol: Some(ICMP),
        source_ports: Some(1..=1),
        ..Match::default()
    };
    assert!(matches!(portless.check(), Err(MatchError::NoPorts { .. })));
    let vlan = Match {
        vlan: Some(4096),
        ..Match::default()
    };
    assert!(matches!(vlan.check(), Err(MatchError::Vlan { .. })));
}

#[test]
fn a_flow_has_one_hash_and_its_way_back_another() {
    let of = |packet: &[u8]| flow_hash(&parse(&ethernet(&[], 0x0800, packet)));
    let packet = ipv4(&[], 0, UDP, &PORTS);
    let hash = of(&packet);
    assert_eq!(
        of(&ipv4(&[1; 8], 0, UDP, &[&PORTS[..], &[1; 99]].concat())),
        hash
    );
    let mut back = ipv4(&[], 0, UDP, &[0, 53, 0x03, 0xe8, 0, 8, 0, 0]);
    back[12..20].copy_from_slice(&[192, 0, 2, 9, 10, 1, 2, 3]);
    assert_ne!(of(&back), hash);
    // Also where the numbers of protocol and port differ in the same bits.
    let mut nearly = PORTS;
    nearly[3] ^= TCP ^ UDP;
    assert_ne!(of(&ipv4(&[], 0, TCP, &PORTS)), hash);
    assert_ne!(of(&ipv4(&[], 0, TCP, &nearly)), hash);
    // All fragments of a datagram go together.
    assert_eq!(
        of(&ipv4(&[], 0x2000, UDP, &PORTS)),
        of(&ipv4(&[], 0x0010, UDP, &[7; 8]))
    );
    // Runs are repeated by it, so it may not change from one version to the next.
    assert_eq!(hash, 0x4283_c3ed_d0cd_c3c4);
}

#[test]
fn hashes_of_neighbouring_flows_spread_evenly() {
    let mut counts = [0_u32; 64];
    for port in 0..64_000_u16 {
        let mut payload = PORTS;
        payload[..2].copy_from_slice(&port.to_be_bytes());
        let frame = ethernet(&[], 0x0800, &ipv4(&[], 0, UDP, &payload));
        counts[usize::try_from(flow_hash(&parse(&frame)) % 64).unwrap()] += 1;
    }
    // 1000 expected in each, with a standard deviation of 31.
    assert!(
        counts.iter().all(|count| (850..1150).contains(count)),
        "{counts:?}"
    );
}

proptest! {
    #[test]
    fn any_bytes_can_be_parsed(frame in prop::collection::vec(any::<u8>(), 0..200)) {
        check(&frame);
    }

    /// Bytes that look like IP get further in.
    #[test]
    fn any_broken_packet_can_be_parsed(
        tags in 0..4_usize,
        v6 in any::<bool>(),
        next in prop::sample::select(vec![0_u8, 43, 44, 51, 60, 135, 1, 6, 17, 58, 132]),
        payload in prop::collection::vec(prop::sample::select(vec![0_u8, 1, 2, 6, 43, 44, 60, 255]), 0..120),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let (kind, packet) = if v6 { (0x86dd, ipv6(next, &payload)) } else { (0x0800, ipv4(&[], 0, next, &payload)) };
        let mut frame = ethernet(&[(0x8100, 5); 3][..tags.min(3)], kind, &packet);
        check(&frame);
        for (at, byte) in changes {
            *at.get_mut(&mut frame[..]) = byte;
        }
        check(&frame[..cut.index(frame.len() + 1)]);
    }

    /// Each whole packet has the ports that it was made with, wherever the headers before them end.
    #[test]
    fn ports_are_found(
        source in any::<u16>(),
        destination in any::<u16>(),
        tags in 0..3_usize,
        options in 0..11_usize,
        extensions in 0..9_usize,
        v6 in any::<bool>(),
    ) {
        let ports = [source.to_be_bytes(), destination.to_be_bytes()].concat();
        let frame = if v6 {
            let mut payload: Vec<u8> = (0..extensions)
                .flat_map(|left| [if left + 1 == extensions { TCP } else { 60 }, 0, 1, 4, 0, 0, 0, 0])
                .collect();
            payload.extend(&ports);
            let first = if extensions == 0 { TCP } else { 60 };
            ethernet(&[(0x88a8, 5); 2][..tags], 0x86dd, &ipv6(first, &payload))
        } else {
            ethernet(&[(0x88a8, 5); 2][..tags], 0x0800, &ipv4(&[1; 40][..options * 4], 0, TCP, &ports))
        };
        prop_assert_eq!(parse_ip(&frame).ports, Some((source, destination)));
    }
}

/// What holds for any frame.
fn check(frame: &[u8]) {
    let headers = parse(frame);
    if let Some(ip) = headers.ip {
        assert!(ip.offset < ip.payload_offset);
        assert!(ip.payload_offset <= ip.end || ip.ports.is_none());
        assert!(ip.end <= frame.len());
        assert!(ip.ports.is_none() || ip.fragment != Fragment::Later);
        let own = Match {
            version: Some(ip.version),
            protocol: Some(ip.protocol),
            source: Some(ip.source.into()),
            destination: Some(ip.destination.into()),
            source_ports: ip.ports.map(|(port, _)| port..=port),
            destination_ports: ip.ports.map(|(_, port)| port..=port),
            vlan: headers.vlan,
        };
        assert!(own.matches(&headers));
    }
    assert!(Match::default().matches(&headers));
    assert_eq!(flow_hash(&headers), flow_hash(&parse(frame)));
}
