//! Datagrams that a guest hands over in one piece (USO): right for who takes them so, and for who has them cut.

use sandwire_testlab::namespace;

use super::*;

/// Payload of the last one.
const REST: usize = 100;
const DATAGRAMS: usize = 6;
const PORT: u16 = 443;
/// `TUN_F_CSUM`, `TUN_F_TSO4` and `TUN_F_TSO6`, and the same with `TUN_F_USO4` and `TUN_F_USO6`.
const TAKES_TCP: libc::c_ulong = 1 | 2 | 4;
const TAKES_ALL: libc::c_ulong = TAKES_TCP | 0x20 | 0x40;
const UDP_HEADER: usize = 8;

/// The payloads of all, one after the other. Each byte is another than that a datagram earlier.
fn payload() -> Vec<u8> {
    let bytes = (DATAGRAMS - 1) * usize::from(SEGMENT) + REST;
    (0..bytes).map(|at| (at % 251) as u8).collect()
}

/// They, in one piece.
fn one_piece(source: IpAddr, destination: IpAddr, macs: (Mac, Mac)) -> Vec<u8> {
    let datagrams = Transport::Udp {
        ports: (40_000, PORT),
        data: payload(),
        summed: true,
    };
    unfinished(&Ip::new(source, destination, datagrams), macs, SEGMENT)
}

/// Wants each of them as a packet of its own, whose checksum is right, or left to a reader who takes that.
fn expect_cut(tap: &Opened, arrival: &Arrival, takes_unfinished: bool) {
    let payload = payload();
    for data in payload.chunks(usize::from(SEGMENT)) {
        let (header, frame) = receive(tap, arrival.from);
        let packet = Packet::parse(&frame).expect("a right packet");
        assert_eq!(packet.destination, arrival.to);
        assert_eq!(
            (&frame[..6], &frame[6..12]),
            (&arrival.macs.0[..], &arrival.macs.1[..])
        );
        assert_eq!(packet.ttl, arrival.ttl);
        assert_eq!(header.gso_type, 0);
        if packet.version == 4 {
            assert!(checksum::holds(&frame[14..packet.transport]), "IPv4 header");
        }
        let datagram = &frame[packet.transport..packet.end];
        let length = UDP_HEADER + data.len();
        assert_eq!(be16(datagram, 4), length as u16, "length");
        assert!(datagram[UDP_HEADER..] == *data, "the payload is as it was");
        let covers = checksum::pseudo_header(packet.source, packet.destination, 17, length);
        if header.flags & NEEDS_CHECKSUM == 0 {
            assert!(checksum::holds(&[&covers, datagram].concat()), "checksum");
        } else {
            assert!(takes_unfinished, "a checksum is left to who didn't ask");
            assert_eq!(be16(datagram, 6), checksum::sum(&covers), "pseudo-header");
        }
    }
}

/// Sends to each kind of reader, twice: the second time by what was decided for the first.
fn send_to_all(
    from: &Opened,
    to: &Opened,
    addresses: (IpAddr, IpAddr),
    macs: (Mac, Mac),
    arrival: &Arrival,
) {
    let bytes = one_piece(addresses.0, addresses.1, macs);
    for takes in [TAKES_ALL, TAKES_TCP, 0] {
        promise(to, takes);
        for _ in 0..2 {
            from.file().write_all(&bytes).expect("the TAP takes it");
            if takes == TAKES_ALL {
                expect_arrival(to, &bytes, arrival);
            } else {
                expect_cut(to, arrival, takes != 0);
            }
        }
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_datagrams_in_one_piece_arrive_right_everywhere() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let [(one, nic), (other, other_nic)] = &setting.slots;
        let from_guest = (GATEWAY_MAC, GUEST_MAC);
        let to_guest = |from| Arrival {
            from,
            to: guest(version_of(from)),
            macs: (GUEST_MAC, GATEWAY_MAC),
            ttl: 63,
        };
        for version in [4, 6] {
            let (own, cloned) = (guest(version), clone(version, 0));
            let addresses = (own, clone(version, 1));
            send_to_all(one, other, addresses, from_guest, &to_guest(cloned));
            for (which, way) in [&setting.uplink, &setting.plain].into_iter().enumerate() {
                let peer = peer(version, which);
                let out = Arrival {
                    from: cloned,
                    to: peer,
                    macs: (PEER_MAC, UPLINK_MAC),
                    ttl: 63,
                };
                send_to_all(one, way, (own, peer), from_guest, &out);
                let macs = (UPLINK_MAC, PEER_MAC);
                send_to_all(way, one, (peer, cloned), macs, &to_guest(peer));
            }
        }
        // Of each version: to three readers, twice; to the other, and to and from two peers.
        let all = |pieces: u64| (pieces, pieces * DATAGRAMS as u64);
        let counters = setting.datapath.counters(*nic);
        let (out, back) = (counters.egress, counters.ingress);
        assert_eq!((out.packets, out.segments), all(2 * 6 * 3));
        assert_eq!((back.packets, back.segments), all(2 * 6 * 2));
        assert_eq!(counters.drops, [0; 48]);
        let ingress = setting.datapath.counters(*other_nic).ingress;
        assert_eq!((ingress.packets, ingress.segments), all(2 * 6));
    });
}

fn version_of(address: IpAddr) -> u8 {
    if address.is_ipv4() { 4 } else { 6 }
}

/// The judge is the kernel of who receives, behind an uplink that finishes no checksum: it takes no wrong one.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_socket_far_away_gets_datagrams_that_left_in_one_piece() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let slot = &setting.slots[0].0;
        lab.shell(
            "ip netns add far
             ip link add up1 address 02:00:00:00:00:20 type veth peer name eth0 address 02:00:00:00:01:20 netns far
             for at in '' 'ip netns exec far'; do $at sysctl -q net.ipv6.conf.all.accept_dad=0; done
             ip link set up1 up; ip -n far link set eth0 up
             ip address add 192.0.4.1/24 dev up1; ip address add 2001:db8:4::1/64 dev up1 nodad
             ip -n far address add 192.0.4.7/24 dev eth0; ip -n far address add 2001:db8:4::7/64 dev eth0 nodad
             for far in 192.0.4.7 2001:db8:4::7; do ip neighbour add $far lladdr 02:00:00:00:01:20 dev up1 nud permanent; done
             ethtool -K up1 tx off",
        );
        let uplink = Uplink {
            index: index_of("up1"),
            name: "up1".to_owned(),
            fq: false,
            xdp: false,
        };
        setting
            .datapath
            .set_uplinks(&[uplink])
            .expect("it attaches");
        for version in [4, 6] {
            let far = address(version, Ipv4Addr::new(192, 0, 4, 7), "2001:db8:4::7");
            let socket = namespace::inside(&namespace::path_of("far"), || {
                Ok(UdpSocket::bind((far, PORT))?)
            })
            .expect("a socket");
            socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            let bytes = one_piece(guest(version), far, (GATEWAY_MAC, GUEST_MAC));
            slot.file().write_all(&bytes).expect("the TAP takes it");
            for data in payload().chunks(usize::from(SEGMENT)) {
                let mut heard = [0; 2048];
                let (length, from) = socket.recv_from(&mut heard).expect("it hears");
                assert!(heard[..length] == *data, "the payload is as it was");
                assert_eq!((from.ip(), from.port()), (clone(version, 0), 40_000));
            }
        }
    });
}
