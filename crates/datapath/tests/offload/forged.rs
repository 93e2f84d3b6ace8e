//! A guest says where the kernel is to write a checksum. It writes what comes out after everything was judged, so where it
//! pleases would be into the addresses.

use std::time::Duration;

use sandwire_testlab::guest::kernel::Series;

use super::*;

const DEADLINE: Duration = Duration::from_secs(200);

/// Where an IPv4 packet's addresses are in a frame.
const SOURCE4: usize = 26;
pub(super) const DESTINATION4: usize = 30;

/// A datagram for whose checksum the kernel is told other places than the right ones.
pub(super) fn forged(version: u8, start: usize, place: usize) -> Vec<u8> {
    let datagram = Transport::Udp {
        ports: (40_000, 53),
        data: b"somewhere else".to_vec(),
        summed: false,
    };
    let ip = Ip::new(guest(version), peer(version, 0), datagram);
    let header = VnetHeader {
        flags: NEEDS_CHECKSUM,
        checksum_start: start as u16,
        checksum_offset: (place - start) as u16,
        ..VnetHeader::default()
    };
    [header.bytes(), ip.frame(GATEWAY_MAC, GUEST_MAC)].concat()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_checksum_is_written_nowhere_but_where_one_is() {
    lab::run(|lab| {
        assert_none_is_written_elsewhere(lab);
    });
}

/// Debian's kernels keep it at other places of their packets than this machine's.
#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_checksum_is_written_nowhere_else_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, DEADLINE, |lab| {
        assert_none_is_written_elsewhere(lab);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_checksum_is_written_nowhere_else_on_linux_6_12() {
    lab::run_on(Series::Linux6_12, DEADLINE, |lab| {
        assert_none_is_written_elsewhere(lab);
    });
}

fn assert_none_is_written_elsewhere(lab: &Lab) {
    let setting = set_up(lab);
    let (slot, nic) = &setting.slots[0];
    let malformed = || {
        let counters = setting.datapath.counters(*nic);
        counters.drops[DropReason::Malformed as usize]
    };
    for (version, places) in [
        (
            4,
            &[
                22,
                SOURCE4,
                SOURCE4 + 2,
                DESTINATION4,
                DESTINATION4 + 2,
                34,
                36,
                38,
            ][..],
        ),
        (6, &[22, 36, 38, 50, 52, 54, 56, 58][..]),
    ] {
        for place in places {
            let before = malformed();
            slot.file()
                .write_all(&forged(version, 20, *place))
                .expect("the TAP takes it");
            assert_eq!(malformed(), before + 1, "IPv{version}, byte {place}");
        }
    }
    assert_eq!(setting.datapath.counters(*nic).egress.packets, 0);
    for version in [4, 6] {
        let arrival = Arrival {
            from: clone(version, 0),
            to: guest(version),
            macs: (GUEST_MAC, GATEWAY_MAC),
            ttl: 63,
        };
        exchange(
            slot,
            &setting.slots[1].0,
            (guest(version), clone(version, 1)),
            (GATEWAY_MAC, GUEST_MAC),
            &arrival,
        );
    }
}

/// An error is judged by the packet that it quotes, into which the kernel would write later.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_no_checksum_is_written_into_what_an_error_tells_of() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let (slot, nic) = &setting.slots[0];
        for version in [4, 6] {
            let about = Transport::Udp {
                ports: (53, 40_000),
                data: vec![7; 8],
                summed: true,
            };
            let about = Ip::new(peer(version, 0), guest(version), about);
            let error = Transport::Icmp {
                kind: if version == 4 { 3 } else { 1 },
                code: if version == 4 { 3 } else { 4 },
                rest: [0; 4],
                data: about.bytes(),
            };
            let ip = Ip::new(guest(version), peer(version, 0), error);
            let quote: u16 = if version == 4 { 42 } else { 62 };
            // The second half of the address to which the quoted packet was sent.
            let place = quote + if version == 4 { 18 } else { 38 };
            for place in [0, place] {
                let header = VnetHeader {
                    flags: if place == 0 { 0 } else { NEEDS_CHECKSUM },
                    checksum_start: quote,
                    checksum_offset: place.max(quote) - quote,
                    ..VnetHeader::default()
                };
                let sent = [header.bytes(), ip.frame(GATEWAY_MAC, GUEST_MAC)].concat();
                slot.file().write_all(&sent).expect("the TAP takes it");
            }
            receive(&setting.uplink, clone(version, 0));
        }
        let counters = setting.datapath.counters(*nic);
        assert_eq!(counters.drops[DropReason::Malformed as usize], 2);
        assert_eq!(counters.egress.packets, 2);
    });
}

/// A later fragment of a datagram that the kernel is to cut into more: it would write their places anew, and the first
/// one's bytes, whatever they are, would be ports.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_no_fragment_becomes_a_first_one() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let (slot, nic) = &setting.slots[0];
        for more in [false, true] {
            let datagram = Transport::Udp {
                ports: (40_000, 53),
                data: vec![7; 4000],
                summed: false,
            };
            let mut ip = Ip::new(guest(4), peer(4, 0), datagram);
            ip.fragment = Some((100, more));
            let header = VnetHeader {
                flags: NEEDS_CHECKSUM,
                gso_type: GSO_UDP,
                header_length: 42,
                gso_size: 1024,
                checksum_start: 34,
                checksum_offset: 6,
            };
            let sent = [header.bytes(), ip.frame(GATEWAY_MAC, GUEST_MAC)].concat();
            slot.file().write_all(&sent).expect("the TAP takes it");
        }
        let counters = setting.datapath.counters(*nic);
        assert_eq!(counters.drops[DropReason::Malformed as usize], 2);
        assert_eq!(counters.egress.packets, 0);
    });
}

/// What a tunnel inside the guest carries has its checksum further in.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_checksum_inside_the_payload_is_the_guests_affair() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let slot = &setting.slots[0].0;
        for version in [4, 6] {
            let payload = if version == 4 { 42 } else { 62 };
            slot.file()
                .write_all(&forged(version, payload, payload + 6))
                .expect("the TAP takes it");
            let (header, frame) = receive(&setting.uplink, clone(version, 0));
            let packet = Packet::parse(&frame).expect("a right packet");
            assert_eq!(packet.destination, peer(version, 0));
            assert_eq!(usize::from(header.checksum_start), payload);
        }
    });
}

/// A datagram that holds another packet, whose checksum is left to be finished; its own is complete, and right once the
/// other one is. So Linux sends what it carries in VXLAN.
fn tunnelled(addresses: (IpAddr, IpAddr), macs: (Mac, Mac)) -> Vec<u8> {
    let inner: Vec<u8> = (0..40).map(|at| 255 - at * 5).collect();
    let datagram = Transport::Udp {
        ports: (40_000, 4789),
        data: inner,
        summed: true,
    };
    let ip = Ip::new(addresses.0, addresses.1, datagram);
    let mut frame = ip.frame(macs.0, macs.1);
    let packet = Packet::parse(&frame).expect("a right packet");
    let header = VnetHeader {
        flags: NEEDS_CHECKSUM,
        checksum_start: (packet.transport + 28) as u16,
        checksum_offset: 6,
        ..VnetHeader::default()
    };
    let unfinished = frame.clone();
    finish(&mut frame, &header);
    let at = packet.transport + 6;
    frame[at..at + 2].fill(0);
    let sum = checksum::of(&summed(&frame));
    frame = unfinished;
    frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    [header.bytes(), frame].concat()
}

/// What the hardware would do.
fn finish(frame: &mut [u8], header: &VnetHeader) {
    let start = usize::from(header.checksum_start);
    let at = start + usize::from(header.checksum_offset);
    let sum = checksum::of(&frame[start..]);
    frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

/// All that a datagram's checksum is about.
fn summed(frame: &[u8]) -> Vec<u8> {
    let packet = Packet::parse(frame).expect("a right packet");
    let length = packet.end - packet.transport;
    let mut covered =
        checksum::pseudo_header(packet.source, packet.destination, packet.protocol, length);
    covered.extend(&frame[packet.transport..packet.end]);
    covered
}

/// Sends twice, the second time by what was decided for the first, and wants every checksum to be right in the end.
fn expect_sums(from: &Opened, to: &Opened, sent: &[u8], source: IpAddr) {
    for _ in 0..2 {
        from.file().write_all(sent).expect("the TAP takes it");
        let (header, mut frame) = receive(to, source);
        if header.flags & NEEDS_CHECKSUM != 0 {
            finish(&mut frame, &header);
        }
        assert!(checksum::holds(&summed(&frame)), "from {source}");
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_tunnel_s_own_checksum_stays_right_around_an_unfinished_one() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let slot = &setting.slots[0].0;
        for version in [4, 6] {
            let sent = tunnelled((guest(version), peer(version, 0)), (GATEWAY_MAC, GUEST_MAC));
            expect_sums(slot, &setting.uplink, &sent, clone(version, 0));
        }
    });
}

/// From an uplink, and from an interface that is none through the host's own stack.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_tunnel_s_own_checksum_stays_right_on_the_way_to_a_guest() {
    lab::run(|lab| {
        assert_sums_stay_right_to_a_guest(lab);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_tunnel_s_own_checksum_stays_right_on_the_way_to_a_guest_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, DEADLINE, |lab| {
        assert_sums_stay_right_to_a_guest(lab);
    });
}

fn assert_sums_stay_right_to_a_guest(lab: &Lab) {
    let setting = set_up(lab);
    let slot = &setting.slots[0].0;
    for version in [4, 6] {
        for (which, tap) in [&setting.uplink, &setting.plain].into_iter().enumerate() {
            let source = peer(version, which);
            let sent = tunnelled((source, clone(version, 0)), (UPLINK_MAC, PEER_MAC));
            expect_sums(tap, slot, &sent, source);
        }
    }
}
