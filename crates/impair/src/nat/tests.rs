use sandwire_engine::classify;

use super::*;
use crate::test_frames::{ACK, SYN, assert_checksums, socket, tagged, tcp, udp, unreachable};

const HERE: &str = "10.0.0.1:4000";
const THERE: &str = "10.9.9.9:443";
const SECOND: u64 = 1_000_000_000;

fn every_second() -> NatModel {
    NatModel {
        first: SECOND,
        every: Some(SECOND),
        addresses: Vec::new(),
    }
}

/// Source and destination of a frame whose checksums are right.
fn ends(frame: &[u8]) -> (String, String) {
    assert_checksums(frame);
    let ip = classify::parse(frame).ip.unwrap();
    let (source, destination) = ip.ports.unwrap();
    let text = |address, port| std::net::SocketAddr::new(address, port).to_string();
    (text(ip.source, source), text(ip.destination, destination))
}

/// Sends; says from where the far side sees it.
fn send(nat: &mut Nat, now: u64, model: &NatModel, mut frame: Vec<u8>) -> Option<String> {
    let destination = ends(&frame).1;
    let translation = nat.leave(now, Some(model), &mut frame);
    let ends = ends(&frame);
    assert_eq!(ends.1, destination);
    (translation != Translation::Dead).then_some(ends.0)
}

/// Whether the sandbox gets what the far side sends to this port, at `HERE`.
fn comes_back(nat: &mut Nat, now: u64, seen: &str) -> bool {
    let mut frame = udp(THERE, seen, b"answer");
    let translation = nat.arrive(now, &mut frame);
    assert_eq!(ends(&frame).1, HERE);
    translation != Translation::Dead
}

#[test]
fn udp_goes_on_from_another_port_after_each_change() {
    let mut nat = Nat::new(1, 0);
    let model = every_second();
    let mut seen = Vec::new();
    for now in [
        0,
        SECOND / 2,
        SECOND,
        SECOND * 3 / 2,
        2 * SECOND,
        7 * SECOND,
    ] {
        seen.push(send(&mut nat, now, &model, udp(HERE, THERE, b"data")).unwrap());
        assert!(comes_back(&mut nat, now, seen.last().unwrap()));
    }
    assert_eq!(
        (&seen[0][..], &seen[1], &seen[2]),
        (HERE, &seen[0], &seen[3])
    );
    let mut different = seen.clone();
    different.dedup();
    assert_eq!(different.len(), 4);
    // The earlier ones lead nowhere.
    for old in &different[..3] {
        assert!(!comes_back(&mut nat, 7 * SECOND, old));
    }
    assert_eq!(nat.mappings(), 1);
}

/// The far side speaks first after a change: the sandbox doesn't hear it until it has spoken itself.
#[test]
fn nothing_comes_back_between_the_change_and_the_next_packet_out() {
    let mut nat = Nat::new(1, 0);
    let model = every_second();
    send(&mut nat, 0, &model, udp(HERE, THERE, b"data"));
    assert!(comes_back(&mut nat, SECOND - 1, HERE));
    assert!(!comes_back(&mut nat, SECOND, HERE));
    let seen = send(&mut nat, SECOND + 1, &model, udp(HERE, THERE, b"data")).unwrap();
    assert!(comes_back(&mut nat, SECOND + 2, &seen));
}

#[test]
fn a_tcp_connection_is_dead_until_another_one_begins() {
    let mut nat = Nat::new(1, 0);
    let model = every_second();
    let mut send = |now, flags| send(&mut nat, now, &model, tcp(HERE, THERE, flags));
    assert_eq!(send(0, SYN).unwrap(), HERE);
    assert_eq!(send(1, ACK).unwrap(), HERE);
    for flags in [ACK, ACK | 1, ACK | 4, SYN | ACK] {
        assert_eq!(send(SECOND, flags), None);
        assert_eq!(send(2 * SECOND, flags), None);
    }
    let seen = send(2 * SECOND, SYN).unwrap();
    assert_ne!(seen, HERE);
    assert_eq!(send(2 * SECOND + 1, ACK).unwrap(), seen);
    let mut back = tcp(THERE, &seen, SYN | ACK);
    assert_eq!(
        nat.arrive(2 * SECOND + 2, &mut back),
        Translation::Rewritten
    );
    assert_eq!(ends(&back).1, HERE);
}

#[test]
fn addresses_take_turns_by_version() {
    let mut nat = Nat::new(1, 0);
    let addresses = ["10.0.0.2", "fd00::2", "10.0.0.3"];
    let model = NatModel {
        addresses: addresses.map(|text| text.parse().unwrap()).to_vec(),
        ..every_second()
    };
    let mut from = |now, frame| {
        let seen = send(&mut nat, now, &model, frame).unwrap();
        socket(&seen).ip().to_string()
    };
    let v4 = [0, 1, 2, 3].map(|second| from(second * SECOND, udp(HERE, THERE, b"data!")));
    assert_eq!(v4, ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.2"]);
    let v6 = || tagged(udp("[fd00::1]:7", "[fd00::9]:8", b"data!"));
    assert_eq!(from(0, v6()), "fd00::1");
    assert_eq!(from(5 * SECOND, v6()), "fd00::2");
    // Who begins after a change has the address of the time, and its own port.
    let late = send(&mut nat, SECOND, &model, udp("10.0.0.1:5", THERE, b"")).unwrap();
    assert_eq!(late, "10.0.0.2:5");
}

#[test]
fn without_a_model_nothing_begins_and_nothing_changes() {
    let mut nat = Nat::new(1, 0);
    let mut frame = udp(HERE, THERE, b"data");
    let before = frame.clone();
    assert_eq!(nat.leave(0, None, &mut frame), Translation::Untouched);
    assert_eq!(nat.arrive(0, &mut frame), Translation::Untouched);
    assert_eq!((nat.mappings(), frame), (0, before));
    let model = every_second();
    send(&mut nat, 0, &model, udp(HERE, THERE, b"data"));
    let seen = send(&mut nat, SECOND, &model, udp(HERE, THERE, b"data")).unwrap();
    for second in 1..5 {
        let mut frame = udp(HERE, THERE, b"data");
        let now = second * SECOND + SECOND / 2;
        assert_eq!(nat.leave(now, None, &mut frame), Translation::Rewritten);
        assert_eq!(ends(&frame).0, seen);
    }
}

/// A socket that sends to several peers, of which a rule with rebinding matches some.
#[test]
fn who_sends_without_a_model_in_between_is_rebound_by_the_next_packet_with_one() {
    let mut nat = Nat::new(1, 0);
    let model = every_second();
    send(&mut nat, 0, &model, udp(HERE, THERE, b""));
    let mut seen = send(&mut nat, SECOND, &model, udp(HERE, THERE, b"")).unwrap();
    for second in 2..6 {
        let change = second * SECOND;
        for now in [change - 1, change] {
            let mut frame = udp(HERE, "10.0.0.7:7", b"");
            assert_eq!(nat.leave(now, None, &mut frame), Translation::Rewritten);
            assert_eq!(ends(&frame).0, seen, "it is kept");
            assert!(comes_back(&mut nat, now, &seen));
        }
        let next = send(&mut nat, change + 1, &model, udp(HERE, THERE, b"")).unwrap();
        assert_ne!(next, seen, "change {second}");
        assert!(!comes_back(&mut nat, change + 1, &seen));
        seen = next;
    }
}

#[test]
fn no_two_endpoints_share_a_port() {
    let mut nat = Nat::new(1, 0);
    let model = NatModel {
        every: None,
        ..every_second()
    };
    let hosts: Vec<String> = (0..6000)
        .map(|n| format!("10.0.0.1:{}", 1024 + n))
        .collect();
    let mut seen = Vec::new();
    for now in [0, SECOND] {
        seen.clear();
        for host in &hosts {
            seen.push(send(&mut nat, now, &model, udp(host, THERE, b"")).unwrap());
        }
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), hosts.len());
    assert!(seen.iter().all(|port| !hosts.contains(port)));
}

/// A port that another one was given can't be kept by who begins with it.
#[test]
fn who_begins_with_a_port_in_use_gets_another() {
    let mut nat = Nat::new(1, 0);
    let model = NatModel {
        every: None,
        ..every_second()
    };
    send(&mut nat, 0, &model, udp(HERE, THERE, b""));
    let seen = send(&mut nat, SECOND, &model, udp(HERE, THERE, b"")).unwrap();
    let other = send(&mut nat, SECOND, &model, udp(&seen, THERE, b"")).unwrap();
    assert_ne!(other, seen);
    assert!(comes_back(&mut nat, SECOND, &seen));
}

#[test]
fn the_table_is_bounded_and_keeps_who_is_in_use() {
    let mut nat = Nat::new(1, 0);
    let model = NatModel {
        every: None,
        ..every_second()
    };
    send(&mut nat, 0, &model, udp(HERE, THERE, b""));
    let busy = send(&mut nat, SECOND, &model, udp(HERE, THERE, b"")).unwrap();
    for number in 0..3 * u32::try_from(MAPPINGS_MAX).unwrap() {
        let host = format!("10.1.{}.{}:9", number >> 8, number & 255);
        send(&mut nat, SECOND, &model, udp(&host, THERE, b""));
        if number % 100 == 0 {
            assert!(comes_back(&mut nat, SECOND, &busy));
        }
        assert!(nat.mappings() <= MAPPINGS_MAX);
    }
    assert_eq!(nat.mappings(), MAPPINGS_MAX);
    assert!(nat.table.is_consistent());
}

/// RFC 5508 REQ-4: the error and the packet in it are those of the sandbox again.
#[test]
fn an_icmp_error_finds_its_way_back() {
    for (here, there, other) in [
        (HERE, THERE, "10.0.0.7"),
        ("[fd00::1]:4000", "[fd00::9]:443", "fd00::7"),
    ] {
        let mut nat = Nat::new(1, 0);
        let model = NatModel {
            addresses: vec![other.parse().unwrap()],
            ..every_second()
        };
        let sent = udp(here, there, b"data");
        send(&mut nat, 0, &model, sent.clone());
        let mut translated = sent.clone();
        nat.leave(SECOND, Some(&model), &mut translated);
        let mut error = unreachable(&translated);
        assert_eq!(nat.arrive(SECOND, &mut error), Translation::Rewritten);
        assert_checksums(&error);
        let ip = classify::parse(&error).ip.unwrap();
        assert_eq!(ip.destination, socket(here).ip());
        let quote = &error[ip.payload_offset + 8..ip.end];
        let addresses_end = ip.payload_offset + 4 - ip.offset;
        assert_eq!(quote[..addresses_end], sent[14..14 + addresses_end]);
        let mut late = unreachable(&translated);
        assert_eq!(nat.arrive(2 * SECOND, &mut late), Translation::Dead);
    }
}

/// The sandbox says that nobody listens: the far side must find the port that it sent to in what is quoted.
#[test]
fn an_icmp_error_of_the_sandbox_is_about_what_the_far_side_sent() {
    let mut nat = Nat::new(1, 0);
    let model = NatModel {
        addresses: vec!["10.0.0.7".parse().unwrap()],
        ..every_second()
    };
    send(&mut nat, 0, &model, udp(HERE, THERE, b"data"));
    let seen = send(&mut nat, SECOND, &model, udp(HERE, THERE, b"data")).unwrap();
    let asked = udp(THERE, &seen, b"anybody there?");
    let mut came = asked.clone();
    assert_eq!(nat.arrive(SECOND, &mut came), Translation::Rewritten);
    let mut error = unreachable(&came);
    let mut late = error.clone();
    assert_eq!(nat.leave(SECOND, None, &mut error), Translation::Rewritten);
    assert_checksums(&error);
    let ip = classify::parse(&error).ip.unwrap();
    assert_eq!(ip.source.to_string(), "10.0.0.7");
    assert_eq!(error[ip.payload_offset + 8..ip.end][..24], asked[14..38]);
    nat.leave(SECOND, Some(&model), &mut udp(HERE, THERE, b"data"));
    let translation = nat.leave(2 * SECOND, Some(&model), &mut late);
    assert_eq!(translation, Translation::Dead);
}

/// A router between, whose own address isn't the mapping's, stays who it is.
#[test]
fn a_routers_error_keeps_its_source() {
    let mut nat = Nat::new(1, 0);
    let model = NatModel {
        addresses: vec!["10.0.0.7".parse().unwrap()],
        ..every_second()
    };
    send(&mut nat, 0, &model, udp(HERE, THERE, b"data"));
    let mut sent = udp(HERE, THERE, b"data");
    nat.leave(SECOND, Some(&model), &mut sent);
    let mut error = unreachable(&sent);
    // From 10.9.9.8, one below the far side.
    error[29] -= 1;
    error[24..26].fill(0);
    let sum = crate::checksum::finish(crate::checksum::sum(0, &error[14..34]));
    error[24..26].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(nat.arrive(SECOND, &mut error), Translation::Rewritten);
    assert_checksums(&error);
    let ip = classify::parse(&error).ip.unwrap();
    let ends = [ip.source, ip.destination].map(|address| address.to_string());
    assert_eq!(ends, ["10.9.9.8", "10.0.0.1"]);
}

#[test]
fn a_udp_checksum_that_was_left_out_stays_out() {
    let mut nat = Nat::new(1, 0);
    let model = every_second();
    let mut frame = udp(HERE, THERE, b"data");
    frame[40..42].fill(0);
    nat.leave(0, Some(&model), &mut frame.clone());
    assert_eq!(
        nat.leave(SECOND, Some(&model), &mut frame),
        Translation::Rewritten
    );
    assert_eq!(frame[40..42], [0, 0]);
}

/// Anybody who changes these changes every recorded run.
#[test]
fn the_same_seed_gives_the_same_ports_for_ever() {
    let ports = |seed| {
        let mut nat = Nat::new(seed, 0);
        let model = every_second();
        [0, 1, 2, 3].map(|second| {
            let frame = udp(HERE, THERE, b"data");
            let seen = send(&mut nat, second * SECOND, &model, frame).unwrap();
            socket(&seen).port()
        })
    };
    assert_eq!(ports(1), [4000, 30949, 2766, 59856]);
    assert_eq!(ports(2), [4000, 62017, 61383, 31482]);
}

#[test]
fn what_is_cut_short_passes_as_it_is() {
    let mut nat = Nat::new(1, 0);
    let model = every_second();
    let frames = [
        udp(HERE, THERE, b"data"),
        tcp(HERE, THERE, SYN),
        unreachable(&udp(HERE, THERE, b"data")),
    ];
    for frame in &frames {
        send(&mut nat, 0, &model, udp(HERE, THERE, b"data"));
        send(&mut nat, 0, &model, tcp(HERE, THERE, SYN));
        for bytes in 0..frame.len() {
            let mut cut = frame[..bytes].to_vec();
            nat.leave(2 * SECOND, Some(&model), &mut cut);
            nat.arrive(2 * SECOND, &mut cut);
        }
    }
}
