//! What no test run can judge, through real TAPs with virtio-net headers: checksums that the hardware
//! would have finished, super-packets, and where a packet comes out.

#![expect(
    clippy::cast_possible_truncation,
    reason = "packets are small, and a number that does not fit shows as a difference"
)]
#![allow(
    dead_code,
    reason = "the differential test uses the rest of what the two share"
)]

#[path = "offload/crowding.rs"]
mod crowding;
#[path = "offload/datagrams.rs"]
mod datagrams;
#[path = "offload/faults.rs"]
mod faults;
#[path = "offload/flows.rs"]
mod flows;
#[path = "offload/forged.rs"]
mod forged;
#[path = "generator/frames.rs"]
mod frames;
#[path = "offload/linear.rs"]
mod linear;
mod model;
mod mutants;
#[path = "offload/tunnel.rs"]
mod tunnel;
#[path = "offload/vnet.rs"]
mod vnet;

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use frames::{Ip, Transport};
use model::{
    Mac, Packet, checksum,
    packet::{TCP, be16},
};
use sandwire_api::{
    drop_reason::DropReason,
    policy::{EgressPolicy, EgressRule, PolicyAction},
    pool::{HostService, PolicySpec, UplinkPolicy},
};
use sandwire_datapath::{
    Datapath, FILTER_HANDLE, FILTER_PRIORITY, NicIndex, Program, Settings, Uplink,
    abi::{self, Address, Nic, NicState},
    policy,
};
use sandwire_kernel_net::{
    interface::InterfaceIndex,
    netlink::{Request, Socket},
    tap::{self, Opened},
    tc,
};
use sandwire_testlab::lab::{self, Lab};
use vnet::{GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4, NEEDS_CHECKSUM, VNET_HEADER, VnetHeader};

const GUEST_MAC: Mac = [0x06, 0, 0xac, 0x10, 0, 2];
const GATEWAY_MAC: Mac = [0x02, 0x73, 0x77, 0x67, 0, 1];
const SHARED_MAC: Mac = [0x02, 0x73, 0x77, 0x68, 0, 1];
const UPLINK_MAC: Mac = [0x02, 0, 0, 0, 0, 0x10];
const PEER_MAC: Mac = [0x02, 0, 0, 0, 1, 0x10];
const PATIENCE: Duration = Duration::from_secs(60);
/// Where the path's maps are pinned.
const FOLDER: &str = "/sys/fs/bpf/offload";
/// Payload of a segment.
const SEGMENT: u16 = 1400;

/// Both sandboxes have the same address, as clones do.
fn guest(version: u8) -> IpAddr {
    address(version, Ipv4Addr::new(10, 0, 0, 2), "fd00:aa::2")
}

/// Clone address of the first or second sandbox.
fn clone(version: u8, which: usize) -> IpAddr {
    let v6 = ["fd00:64::21", "fd00:64::22"][which];
    address(version, Ipv4Addr::new(10, 64, 0, 21 + which as u8), v6)
}

/// Somebody on the link of the uplink, and of the interface that is none.
fn peer(version: u8, which: usize) -> IpAddr {
    let v6 = ["2001:db8:1::7", "2001:db8:2::7"][which];
    address(version, Ipv4Addr::new(192, 0, 2 + which as u8, 7), v6)
}

fn address(version: u8, v4: Ipv4Addr, v6: &str) -> IpAddr {
    if version == 4 {
        v4.into()
    } else {
        v6.parse::<Ipv6Addr>().expect("an address").into()
    }
}

/// Sends a datagram of so many bytes from a guest's TAP, with a whole checksum.
fn send_datagram(from: &Opened, to: IpAddr, port: u16, bytes: usize) {
    let datagram = Transport::Udp {
        ports: (4000, port),
        data: vec![7; bytes],
        summed: true,
    };
    let version = if to.is_ipv4() { 4 } else { 6 };
    let ip = Ip::new(guest(version), to, datagram);
    let frame = [&[0; VNET_HEADER], &ip.frame(GATEWAY_MAC, GUEST_MAC)[..]].concat();
    from.file().write_all(&frame).expect("the TAP takes it");
}

/// Two host slots, an uplink, another interface, and the path between them.
struct Setting {
    slots: [(Opened, NicIndex); 2],
    uplink: Opened,
    plain: Opened,
    datapath: Datapath,
}

fn index_of(name: &str) -> InterfaceIndex {
    let text = std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex"));
    InterfaceIndex(text.expect("it is there").trim().parse().expect("a number"))
}

fn tap_with_offloads(name: &str) -> Opened {
    let options = tap::Options {
        vnet_header: true,
        multi_queue: false,
        owner: None,
        group: None,
    };
    let opened = tap::create_transient(name, None, options).expect("a TAP");
    // Partial checksums, TCP segmentation in IPv4 and IPv6: as a VMM promises it for its guest.
    promise(&opened, 1 | 2 | 4);
    opened
}

/// Says what whoever reads from the TAP takes.
fn promise(opened: &Opened, offloads: libc::c_ulong) {
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(opened.file());
    // SAFETY: TUNSETOFFLOAD takes its flags by value.
    let result = unsafe { libc::ioctl(descriptor, libc::TUNSETOFFLOAD, offloads) };
    assert_eq!(result, 0, "the kernel takes the offloads");
}

fn set_up(lab: &Lab) -> Setting {
    let taps = ["swa", "swb", "up0", "plain0"].map(tap_with_offloads);
    lab.shell(
        "mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf
         sysctl -q net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.default.accept_dad=0
         ip link add swtest address 02:73:77:68:00:01 type bridge
         for slot in swa swb; do sysctl -q net.ipv6.conf.$slot.disable_ipv6=1; ip link set $slot up; done
         ip link set swtest arp off up
         ip link set up0 address 02:00:00:00:00:10 up
         ip link set plain0 address 02:00:00:00:00:10 up
         ip address add 192.0.2.1/24 dev up0
         ip address add 192.0.3.1/24 dev plain0
         ip address add 2001:db8:1::1/64 dev up0 nodad
         ip address add 2001:db8:2::1/64 dev plain0 nodad
         ip route add 10.64.0.0/24 dev swtest
         ip -6 route add fd00:64::/64 dev swtest
         ip neighbour add 192.0.2.7 lladdr 02:00:00:00:01:10 dev up0 nud permanent
         ip neighbour add 192.0.3.7 lladdr 02:00:00:00:01:10 dev plain0 nud permanent
         ip neighbour add 2001:db8:1::7 lladdr 02:00:00:00:01:10 dev up0 nud permanent
         ip neighbour add 2001:db8:2::7 lladdr 02:00:00:00:01:10 dev plain0 nud permanent",
    );
    let settings = Settings::new(FOLDER.into());
    let datapath = Datapath::open(&settings).expect("it opens").datapath;
    datapath
        .attach_shared(index_of("swtest"))
        .expect("it attaches");
    let uplink = Uplink {
        index: index_of("up0"),
        name: "up0".to_owned(),
        fq: false,
        xdp: false,
    };
    datapath.set_uplinks(&[uplink]).expect("it attaches");
    let spec = PolicySpec {
        uplink: UplinkPolicy::Route,
        clone_to_clone: true,
        host_services: vec![HostService::All],
        ..PolicySpec::default()
    };
    let policy = policy::compile(&spec, &[]).expect("a policy");
    let policy = datapath.add_policy(&policy).expect("there is room");
    let [a, b, uplink, plain] = taps;
    let slots = [(a, "swa"), (b, "swb")].map(|(tap, name)| {
        let nic = datapath.allocate(1).expect("there is room");
        let which = usize::from(name == "swb");
        datapath.write_nic(nic, &entry(name, which));
        attach(datapath.program(Program::FromGuest), name, nic, false);
        datapath
            .activate(nic, policy, false)
            .expect("there is room");
        (tap, nic)
    });
    Setting {
        slots,
        uplink,
        plain,
        datapath,
    }
}

fn entry(name: &str, which: usize) -> Nic {
    let v4 = |address| match address {
        IpAddr::V4(address) => abi::network_order(address),
        IpAddr::V6(_) => unreachable!("asked for IPv4"),
    };
    Nic {
        state: NicState::Ready.number(),
        ifindex: index_of(name).0,
        shared_ifindex: index_of("swtest").0,
        mtu: 1500,
        guest_mac: GUEST_MAC,
        gateway_mac: GATEWAY_MAC,
        shared_mac: SHARED_MAC,
        guest4: v4(guest(4)),
        clone4: v4(clone(4, which)),
        gateway4: abi::network_order(Ipv4Addr::new(10, 0, 0, 1)),
        slot: which as u32,
        count: 1,
        has_ipv6: 1,
        guest6: Address::from(guest(6)),
        clone6: Address::from(clone(6, which)),
        gateway6: Address::from(address(6, Ipv4Addr::UNSPECIFIED, "fd00:aa::1")),
        ..Nic::default()
    }
}

/// Puts the program on the host end, or in the place of one that is there.
fn attach(program: BorrowedFd<'_>, name: &str, nic: NicIndex, replace: bool) {
    let place = tc::Place {
        interface: index_of(name),
        hook: tc::Hook::Ingress,
        priority: FILTER_PRIORITY,
        handle: FILTER_HANDLE,
    };
    let filter = tc::Filter {
        place,
        class_id: Some(nic.0),
        program,
        name: "from_guest",
    };
    let mut request = Request::new();
    if replace {
        filter.replace(&mut request);
    } else {
        tc::add_ingress(&mut request, place.interface);
        filter.add(&mut request);
    }
    Socket::route()
        .expect("netlink")
        .execute(request)
        .expect("it attaches");
}

/// A packet whose checksum is left to the hardware: only the pseudo-header's sum is there.
fn unfinished(ip: &Ip, macs: (Mac, Mac), gso_size: u16) -> Vec<u8> {
    let mut frame = ip.frame(macs.0, macs.1);
    let packet = Packet::parse(&frame).expect("a right packet");
    let is_tcp = packet.protocol == TCP;
    let offset = if is_tcp { 16 } else { 6 };
    let sum = pseudo_sum(&packet);
    let at = packet.transport + offset;
    frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    let (gso_type, own_header) = match (gso_size, packet.version) {
        (0, _) => (0, 0),
        _ if !is_tcp => (GSO_UDP_L4, 8),
        (_, 4) => (GSO_TCPV4, 20),
        _ => (GSO_TCPV6, 20),
    };
    let header = VnetHeader {
        flags: NEEDS_CHECKSUM,
        gso_type,
        header_length: if gso_size == 0 {
            0
        } else {
            (packet.transport + own_header) as u16
        },
        gso_size,
        checksum_start: packet.transport as u16,
        checksum_offset: offset as u16,
    };
    [header.bytes(), frame].concat()
}

fn pseudo_sum(packet: &Packet) -> u16 {
    let length = packet.end - packet.transport;
    let (source, destination) = (packet.source, packet.destination);
    checksum::sum(&checksum::pseudo_header(
        source,
        destination,
        packet.protocol,
        length,
    ))
}

/// The next frame from this source; others, such as the kernel's own, are passed over.
fn receive(tap: &Opened, from: IpAddr) -> (VnetHeader, Vec<u8>) {
    let deadline = Instant::now() + PATIENCE;
    let mut buffer = vec![0; 70_000];
    while Instant::now() < deadline {
        match tap.file().read(&mut buffer) {
            Ok(length) => {
                let frame = buffer[VNET_HEADER..length].to_vec();
                if Packet::parse(&frame).is_ok_and(|packet| packet.source == from) {
                    return (VnetHeader::read(&buffer), frame);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => panic!("read from the TAP: {error}"),
        }
    }
    panic!("nothing from {from} within {PATIENCE:?}");
}

/// What has to arrive where `sent` was sent.
struct Arrival {
    from: IpAddr,
    to: IpAddr,
    /// Destination and source.
    macs: (Mac, Mac),
    /// What is left of 64 hops.
    ttl: u8,
}

/// Wants the packet to have arrived in one piece, translated, and with a checksum that is right or
/// that the hardware can still finish.
fn expect_arrival(tap: &Opened, sent: &[u8], arrival: &Arrival) {
    let (header, frame) = receive(tap, arrival.from);
    let before = VnetHeader::read(sent);
    let sent = &sent[VNET_HEADER..];
    let packet = Packet::parse(&frame).expect("a right packet");
    assert_eq!(packet.destination, arrival.to);
    assert_eq!(
        (&frame[..6], &frame[6..12]),
        (&arrival.macs.0[..], &arrival.macs.1[..])
    );
    assert_eq!(packet.ttl, arrival.ttl);
    assert_eq!(frame.len(), sent.len(), "it comes in one piece");
    assert_eq!(
        (header.gso_type & 0x7f, header.gso_size),
        (before.gso_type, before.gso_size)
    );
    if packet.version == 4 {
        assert!(checksum::holds(&frame[14..packet.transport]), "IPv4 header");
    }
    let offset = usize::from(before.checksum_offset);
    let at = packet.transport + offset;
    if header.flags & NEEDS_CHECKSUM != 0 {
        assert_eq!(usize::from(header.checksum_start), packet.transport);
        assert_eq!(header.checksum_offset, before.checksum_offset);
        assert_eq!(
            be16(&frame, at),
            pseudo_sum(&packet),
            "sum of the pseudo-header"
        );
    } else {
        let mut covered = checksum::pseudo_header(
            packet.source,
            packet.destination,
            packet.protocol,
            packet.end - packet.transport,
        );
        covered.extend(&frame[packet.transport..packet.end]);
        assert!(checksum::holds(&covered), "transport checksum");
    }
    assert_eq!(frame[packet.transport..at], sent[packet.transport..at]);
    assert!(
        frame[at + 2..] == sent[at + 2..],
        "the payload is as it was"
    );
}

/// Packets with an unfinished checksum, and super-packets of 16 and 64 KB.
fn packets(source: IpAddr, destination: IpAddr) -> Vec<(Ip, u16)> {
    let tcp = |length: usize| Transport::Tcp {
        ports: (40_000, 443),
        flags: 0x18,
        data: (0..length).map(|at| (at % 251) as u8).collect(),
    };
    let udp = Transport::Udp {
        ports: (40_000, 53),
        data: b"odd".to_vec(),
        summed: true,
    };
    [
        (tcp(100), 0),
        (udp, 0),
        (tcp(16_384), SEGMENT),
        (tcp(65_400), SEGMENT),
    ]
    .into_iter()
    .map(|(transport, gso_size)| (Ip::new(source, destination, transport), gso_size))
    .collect()
}

/// Sends everything twice: the second time by what was decided for the first.
fn exchange(
    from: &Opened,
    to: &Opened,
    addresses: (IpAddr, IpAddr),
    macs: (Mac, Mac),
    arrival: &Arrival,
) {
    for (ip, gso_size) in packets(addresses.0, addresses.1) {
        let bytes = unfinished(&ip, macs, gso_size);
        for _ in 0..2 {
            from.file().write_all(&bytes).expect("the TAP takes it");
            expect_arrival(to, &bytes, arrival);
        }
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_offloads_survive_between_sandboxes() {
    lab::run(|lab| {
        let setting = set_up(lab);
        for version in [4, 6] {
            for (from, to) in [(0, 1), (1, 0)] {
                let arrival = Arrival {
                    from: clone(version, from),
                    to: guest(version),
                    macs: (GUEST_MAC, GATEWAY_MAC),
                    ttl: 63,
                };
                exchange(
                    &setting.slots[from].0,
                    &setting.slots[to].0,
                    (guest(version), clone(version, to)),
                    (GATEWAY_MAC, GUEST_MAC),
                    &arrival,
                );
            }
        }
        // Of each version four packets, twice, each way: 1 + 1 + 12 + 47 segments.
        let segments = 1 + 1 + 16_384_u64.div_ceil(1400) + 65_400_u64.div_ceil(1400);
        for (_, nic) in &setting.slots {
            let counters = setting.datapath.counters(*nic);
            for traffic in [counters.egress, counters.ingress] {
                assert_eq!((traffic.packets, traffic.segments), (16, 4 * segments));
            }
            assert_eq!(counters.drops, [0; 48]);
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_offloads_survive_on_the_way_out_and_in() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let slot = &setting.slots[0].0;
        for version in [4, 6] {
            let out = Arrival {
                from: clone(version, 0),
                to: peer(version, 0),
                macs: (PEER_MAC, UPLINK_MAC),
                ttl: 63,
            };
            let addresses = (guest(version), peer(version, 0));
            exchange(
                slot,
                &setting.uplink,
                addresses,
                (GATEWAY_MAC, GUEST_MAC),
                &out,
            );
            let back = Arrival {
                from: peer(version, 0),
                to: guest(version),
                macs: (GUEST_MAC, GATEWAY_MAC),
                ttl: 63,
            };
            let addresses = (peer(version, 0), clone(version, 0));
            exchange(
                &setting.uplink,
                slot,
                addresses,
                (UPLINK_MAC, PEER_MAC),
                &back,
            );
        }
    });
}

/// Through the host's own stack in both directions: an interface that is no uplink.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_offloads_survive_the_stack() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let slot = &setting.slots[0].0;
        for version in [4, 6] {
            let out = Arrival {
                from: clone(version, 0),
                to: peer(version, 1),
                macs: (PEER_MAC, UPLINK_MAC),
                ttl: 63,
            };
            let addresses = (guest(version), peer(version, 1));
            exchange(
                slot,
                &setting.plain,
                addresses,
                (GATEWAY_MAC, GUEST_MAC),
                &out,
            );
            let back = Arrival {
                from: peer(version, 1),
                to: guest(version),
                macs: (GUEST_MAC, GATEWAY_MAC),
                ttl: 63,
            };
            let addresses = (peer(version, 1), clone(version, 0));
            exchange(
                &setting.plain,
                slot,
                addresses,
                (UPLINK_MAC, PEER_MAC),
                &back,
            );
        }
    });
}

/// A socket of the host hears the clone address, and its answer finds the guest.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_the_host_and_a_sandbox_talk() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let slot = &setting.slots[0].0;
        for version in [4, 6] {
            let host = address(version, Ipv4Addr::new(192, 0, 2, 1), "2001:db8:1::1");
            let socket = UdpSocket::bind((host, 53)).expect("a socket");
            socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            let question = Transport::Udp {
                ports: (5000, 53),
                data: b"question".to_vec(),
                summed: true,
            };
            let ip = Ip::new(guest(version), host, question);
            let bytes = unfinished(&ip, (GATEWAY_MAC, GUEST_MAC), 0);
            slot.file().write_all(&bytes).expect("the TAP takes it");
            let mut heard = [0; 64];
            let (length, from) = socket.recv_from(&mut heard).expect("it hears");
            assert_eq!(&heard[..length], b"question");
            assert_eq!((from.ip(), from.port()), (clone(version, 0), 5000));
            socket.send_to(b"answer", from).expect("it answers");
            let (_, frame) = receive(slot, host);
            let packet = Packet::parse(&frame).expect("a right packet");
            assert_eq!(packet.destination, guest(version));
            assert_eq!(
                (&frame[..6], &frame[6..12]),
                (&GUEST_MAC[..], &GATEWAY_MAC[..])
            );
            assert!(frame.ends_with(b"answer"));
        }
    });
}

/// Frames that the kernel refuses to test-run: too short for an IP header, or with a tag that the
/// kernel has taken off before the program sees it.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_short_and_tagged_frames_are_dropped() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let (slot, nic) = &setting.slots[0];
        let tcp = || Transport::Tcp {
            ports: (1, 2),
            flags: 2,
            data: Vec::new(),
        };
        let drops = |reason: DropReason| setting.datapath.counters(*nic).drops[reason as usize];
        let send = |frame: &[u8]| {
            let bytes = [&[0; VNET_HEADER], frame].concat();
            slot.file().write_all(&bytes).expect("the TAP takes it");
        };
        for version in [4, 6] {
            let ip = Ip::new(guest(version), peer(version, 0), tcp());
            let frame = ip.frame(GATEWAY_MAC, GUEST_MAC);
            for end in 14..frame.len() {
                let before = drops(DropReason::Malformed);
                send(&frame[..end]);
                assert_eq!(drops(DropReason::Malformed), before + 1, "{end} bytes");
            }
            let tag = [0x81, 0, 0, 5];
            let tagged = [&frame[..12], &tag, &frame[12..]].concat();
            let before = drops(DropReason::VlanTag);
            send(&tagged);
            assert_eq!(drops(DropReason::VlanTag), before + 1);
        }
        assert_eq!(setting.datapath.counters(*nic).egress.packets, 0);
    });
}
