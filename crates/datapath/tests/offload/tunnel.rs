//! Super-packets in a tunnel: each of the packets that they are cut into has the inner headers as well as the outer ones.

use std::time::Duration;

use sandwire_testlab::guest::kernel::Series;

use super::*;

const DEADLINE: Duration = Duration::from_secs(200);

/// Nothing comes any more when nothing has for so long.
const QUIET: Duration = Duration::from_millis(300);
/// Payload of a segment: with the headers of two IPv6 packets it fits.
const INNER_SEGMENT: u16 = 1350;
/// Of Ethernet, and the largest packet that it takes here.
const FRAME_MAX: usize = 14 + 1500;

/// One end of a tunnel, and whom it leads to.
struct End {
    addresses: (IpAddr, IpAddr),
    /// Of the packets outside: destination and source.
    macs: (Mac, Mac),
}

fn text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// A namespace behind the interface `near`, with a VXLAN that has checksums outside and a TAP beside it: what is
/// written to the TAP leaves by the tunnel, uncut.
fn tunnel(lab: &Lab, near: &str, end: &End) -> Opened {
    let inner = tap_with_offloads("inner");
    let (local, remote) = end.addresses;
    let (gateway, own) = (text(end.macs.0), text(end.macs.1));
    let route = if local.is_ipv4() { "0.0.0.0/0" } else { "::/0" };
    lab.shell(&format!(
        "ip netns add box
         sysctl -q net.ipv6.conf.default.disable_ipv6=1
         ip netns exec box sysctl -q net.ipv6.conf.default.disable_ipv6=1
         ip link add {near} address {gateway} type veth peer name eth0 address {own} netns box
         sysctl -q net.ipv6.conf.default.disable_ipv6=0
         ip link set {near} up; ip link set inner netns box
         ip netns exec box sysctl -q net.ipv6.conf.eth0.disable_ipv6=0 net.ipv6.conf.eth0.accept_dad=0
         ip -n box link set eth0 up
         ip -n box address add {local} dev eth0
         ip -n box route add {route} dev eth0
         ip -n box neighbour replace {remote} lladdr {gateway} dev eth0 nud permanent
         ip -n box link add tunnel type vxlan id 1 dstport 4789 local {local} remote {remote} udpcsum
         ip -n box link add both type bridge mcast_snooping 0
         for port in inner tunnel both; do ip -n box link set $port mtu 1500 up; done
         for port in inner tunnel; do ip -n box link set $port master both; done"
    ));
    inner
}

fn take_away(lab: &Lab, inner: Opened) {
    drop(inner);
    lab.shell("ip netns del box");
}

/// A super-packet of so many segments that are full.
fn super_packet(version: u8, is_udp: bool, segments: usize, segment: u16) -> Vec<u8> {
    let data = vec![7; segments * usize::from(segment)];
    let transport = if is_udp {
        Transport::Udp {
            ports: (40_000, 443),
            data,
            summed: true,
        }
    } else {
        Transport::Tcp {
            ports: (40_000, 443),
            flags: 0x18,
            data,
        }
    };
    let ip = Ip::new(guest(version), peer(version, 0), transport);
    unfinished(&ip, (GATEWAY_MAC, GUEST_MAC), segment)
}

/// Frames from this source, until none comes any more.
fn receive_all(tap: &Opened, from: IpAddr) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let mut buffer = vec![0; 70_000];
    let mut last = Instant::now();
    while last.elapsed() < QUIET {
        let Ok(length) = tap.file().read(&mut buffer) else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let frame = buffer[VNET_HEADER..length].to_vec();
        if Packet::parse(&frame).is_ok_and(|packet| packet.source == from) {
            frames.push(frame);
            last = Instant::now();
        }
    }
    frames
}

/// The kernel cuts what no TAP takes in one piece: as many packets must have been counted.
fn expect_as_counted(
    inner: &Opened,
    to: &Opened,
    from: IpAddr,
    kinds: &[bool],
    count: impl Fn() -> u64,
) {
    for version in [4, 6] {
        for is_udp in kinds.iter().copied() {
            for segments in [2, 5, 20] {
                let before = count();
                inner
                    .file()
                    .write_all(&super_packet(version, is_udp, segments, INNER_SEGMENT))
                    .expect("the TAP takes it");
                let frames = receive_all(to, from);
                assert_eq!(
                    frames.len(),
                    segments,
                    "UDP: {is_udp}, IPv{version} inside, from {from}"
                );
                let counted = count() - before;
                assert_eq!(counted, segments as u64, "UDP: {is_udp}, from {from}");
            }
        }
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_super_packets_in_a_tunnel_count_as_what_they_are_cut_into() {
    lab::run(|lab| {
        assert_all_are_counted(lab, &[false, true]);
    });
}

/// It takes no datagrams in one piece from a TAP.
#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn super_packets_in_a_tunnel_count_as_what_they_are_cut_into_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, DEADLINE, |lab| {
        assert_all_are_counted(lab, &[false]);
    });
}

/// TCP, or UDP.
fn assert_all_are_counted(lab: &Lab, kinds: &[bool]) {
    let setting = set_up(lab);
    let (slot, nic) = &setting.slots[0];
    let counters = || setting.datapath.counters(*nic);
    for version in [4, 6] {
        let out = End {
            addresses: (guest(version), peer(version, 0)),
            macs: (GATEWAY_MAC, GUEST_MAC),
        };
        let inner = tunnel(lab, "swv", &out);
        attach(
            setting.datapath.program(Program::FromGuest),
            "swv",
            *nic,
            false,
        );
        expect_as_counted(&inner, &setting.uplink, clone(version, 0), kinds, || {
            counters().egress.segments
        });
        take_away(lab, inner);
        let back = End {
            addresses: (peer(version, 0), clone(version, 0)),
            macs: (UPLINK_MAC, PEER_MAC),
        };
        let inner = tunnel(lab, "up1", &back);
        let uplinks = ["up0", "up1"].map(|name| Uplink {
            index: index_of(name),
            name: name.to_owned(),
            fq: false,
            xdp: false,
        });
        setting.datapath.set_uplinks(&uplinks).expect("it attaches");
        expect_as_counted(&inner, slot, peer(version, 0), kinds, || {
            counters().ingress.segments
        });
        take_away(lab, inner);
    }
}

/// The kernel lets past whatever is to be cut; the outer headers alone would fit.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_no_packet_in_a_tunnel_leaves_that_is_larger_than_the_uplink_takes() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let (_, nic) = &setting.slots[0];
        let out = End {
            addresses: (guest(4), peer(4, 0)),
            macs: (GATEWAY_MAC, GUEST_MAC),
        };
        let inner = tunnel(lab, "swv", &out);
        let program = setting.datapath.program(Program::FromGuest);
        attach(program, "swv", *nic, false);
        // A container's own interface may take more than the uplink does.
        lab.shell("ip link set swv mtu 1600; ip -n box link set eth0 mtu 1600");
        inner
            .file()
            .write_all(&super_packet(4, false, 10, 1440))
            .expect("the TAP takes it");
        let frames = receive_all(&setting.uplink, clone(4, 0));
        let longest = frames.iter().map(Vec::len).max();
        assert!(
            longest.is_none_or(|length| length <= FRAME_MAX),
            "{longest:?}"
        );
        assert_eq!(setting.datapath.counters(*nic).egress.packets, 1);
    });
}
