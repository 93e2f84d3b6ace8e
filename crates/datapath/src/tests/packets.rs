//! Real packets through the programs, from one TAP to another.

use std::{
    io::{Read, Write},
    net::Ipv4Addr,
    thread,
    time::{Duration, Instant},
};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use sandwire_api::{
    drop_reason::DropReason,
    policy::{EgressPolicy, EgressRule, PolicyAction},
    pool::{PolicySpec, UplinkPolicy},
};
use sandwire_kernel_net::{
    netlink::{Request, Socket},
    tap::{self, Opened},
    tc,
};
use sandwire_testlab::lab::{self, Lab};

use super::{GATEWAY_MAC, GUEST, GUEST_MAC, index_of, nic, open, settings};
use crate::{
    Datapath, FILTER_HANDLE, FILTER_PRIORITY, NicIndex, PolicyIndex, Program, Uplink,
    abi::{Counters, Direction, NicFlag, Verdict},
    policy,
};

const PLAIN: tap::Options = tap::Options {
    vnet_header: false,
    multi_queue: false,
    owner: None,
    group: None,
};
const CLONE: Ipv4Addr = Ipv4Addr::new(10, 64, 0, 7);
const PEER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 5);
const DENIED: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 200);
const ROUTER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const PATIENCE: Duration = Duration::from_secs(5);

/// A host with an uplink behind which a router answers for [`ROUTER_MAC`].
fn host(lab: &Lab) -> Opened {
    let uplink = tap::create_transient("up0", None, PLAIN).unwrap();
    lab.shell(
        "sysctl -q net.ipv4.ip_forward=1 net.ipv6.conf.all.disable_ipv6=1
         ip link set up0 address 02:00:00:00:00:01 up
         ip addr add 198.51.100.1/24 dev up0
         ip neigh add 198.51.100.2 lladdr 02:00:00:00:00:09 dev up0 nud permanent
         ip route add 203.0.113.0/24 via 198.51.100.2
         ip link add swtest address 02:73:77:68:00:01 type bridge
         ip link set swtest up
         ip route add 10.64.0.0/16 dev swtest",
    );
    uplink
}

/// A host slot: the guest's side of its TAP, and its entry, ready.
fn slot(datapath: &Datapath, lab: &Lab) -> (Opened, NicIndex) {
    let guest = tap::create_transient("swguest", None, PLAIN).unwrap();
    lab.run("ip link set swguest address 02:73:77:00:00:01 up");
    let index = datapath.allocate(1).unwrap();
    datapath.write_nic(index, &nic(index_of("swguest"), index_of("swtest"), CLONE));
    let mut request = Request::new();
    tc::add_ingress(&mut request, index_of("swguest"));
    Socket::route().unwrap().execute(request).unwrap();
    put_filter(datapath, index);
    (guest, index)
}

/// A slot on a host with an uplink, and the policy of a lease that doesn't count yet.
struct Path {
    uplink: Opened,
    guest: Opened,
    datapath: Datapath,
    index: NicIndex,
    policy: PolicyIndex,
}

impl Path {
    fn open(lab: &Lab) -> Self {
        let uplink = host(lab);
        let datapath = open(&settings());
        datapath.attach_shared(index_of("swtest")).unwrap();
        datapath.set_uplinks(&[up0()]).unwrap();
        let (guest, index) = slot(&datapath, lab);
        let clones = ["10.64.0.0/16".parse().unwrap()];
        let policy = policy::compile(&route_policy(), &clones).unwrap();
        let policy = datapath.add_policy(&policy).unwrap();
        Self {
            uplink,
            guest,
            datapath,
            index,
            policy,
        }
    }
}

/// Puts the program on the guest's host end, in the place of an older one.
fn put_filter(datapath: &Datapath, index: NicIndex) {
    let mut request = Request::new();
    let place = tc::Place {
        interface: index_of("swguest"),
        hook: tc::Hook::Ingress,
        priority: FILTER_PRIORITY,
        handle: FILTER_HANDLE,
    };
    let filter = tc::Filter {
        place,
        class_id: Some(index.0),
        program: datapath.program(Program::FromGuest),
        name: "from_guest",
    };
    filter.replace(&mut request);
    Socket::route().unwrap().execute(request).unwrap();
}

fn up0() -> Uplink {
    Uplink {
        index: index_of("up0"),
        name: "up0".into(),
        fq: false,
        xdp: false,
    }
}

fn route_policy() -> PolicySpec {
    PolicySpec {
        uplink: UplinkPolicy::Route,
        egress: EgressPolicy {
            default: PolicyAction::Allow,
            rules: vec![EgressRule {
                action: PolicyAction::Deny,
                prefixes: vec!["203.0.113.128/25".parse().unwrap()],
                ports: Vec::new(),
            }],
        },
        ..PolicySpec::default()
    }
}

/// Sum of 16-bit words, folded; 0xffff over data with its checksum.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0)));
    let mut total: u32 = words.sum();
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    u16::try_from(total).unwrap()
}

/// A UDP datagram in an Ethernet frame.
fn datagram(macs: ([u8; 6], [u8; 6]), from: (Ipv4Addr, u16), to: (Ipv4Addr, u16)) -> Vec<u8> {
    let payload = b"through the path";
    let udp_length = u16::try_from(8 + payload.len()).unwrap();
    let mut udp = Vec::new();
    for field in [from.1, to.1, udp_length, 0] {
        udp.extend(field.to_be_bytes());
    }
    udp.extend(payload);
    let mut pseudo = [from.0.octets(), to.0.octets(), [0, 17, 0, 0]].concat();
    pseudo[10..12].copy_from_slice(&udp_length.to_be_bytes());
    let checksum = !sum(&[&pseudo[..], &udp].concat());
    udp[6..8].copy_from_slice(&checksum.to_be_bytes());
    let mut ip = vec![0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 17, 0, 0];
    ip[2..4].copy_from_slice(&(20 + udp_length).to_be_bytes());
    ip.extend(from.0.octets());
    ip.extend(to.0.octets());
    let checksum = !sum(&ip);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    [&macs.1[..], &macs.0, &[8, 0], &ip, &udp].concat()
}

/// Whether IPv4 header and UDP datagram of a frame have right checksums.
fn checksums_are_right(frame: &[u8]) -> bool {
    let (ip, udp) = (&frame[14..34], &frame[34..]);
    let mut pseudo = [&ip[12..20], &[0, 17, 0, 0]].concat();
    pseudo[10..12].copy_from_slice(&udp[4..6]);
    sum(ip) == 0xffff && sum(&[&pseudo[..], udp].concat()) == 0xffff
}

/// The next frame with the payload of [`datagram`].
fn receive(tap: &Opened) -> Vec<u8> {
    let deadline = Instant::now() + PATIENCE;
    let mut buffer = [0; 0x1_0000];
    while Instant::now() < deadline {
        match tap.file().read(&mut buffer) {
            Ok(length) if buffer[..length].get(42..58) == Some(b"through the path") => {
                return buffer[..length].to_vec();
            }
            Ok(_) => {}
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
    panic!("no frame came within {PATIENCE:?}");
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_packet_leaves_translated_and_its_answer_comes_back() {
    lab::run(|lab| {
        let Path {
            uplink,
            guest,
            datapath,
            index,
            policy,
        } = Path::open(lab);
        let out = datagram((GUEST_MAC, GATEWAY_MAC), (GUEST, 1000), (PEER, 2000));
        guest.file().write_all(&out).unwrap();
        let not_leased = datapath.counters(index).drops[DropReason::NotLeased as usize];
        assert_eq!(not_leased, 1);
        datapath.activate(index, policy, false).unwrap();

        for _ in 0..2 {
            // The second goes by what was decided for the first.
            guest.file().write_all(&out).unwrap();
            let frame = receive(&uplink);
            assert_eq!(
                (&frame[..6], &frame[6..12]),
                (&ROUTER_MAC[..], &UPLINK_MAC[..])
            );
            assert_eq!(frame[22], 63, "one hop");
            assert_eq!(
                (&frame[26..30], &frame[30..34]),
                (&CLONE.octets()[..], &PEER.octets()[..])
            );
            assert!(checksums_are_right(&frame), "{frame:x?}");
        }
        let back = datagram((ROUTER_MAC, UPLINK_MAC), (PEER, 2000), (CLONE, 1000));
        uplink.file().write_all(&back).unwrap();
        let frame = receive(&guest);
        assert_eq!(
            (&frame[..6], &frame[6..12]),
            (&GUEST_MAC[..], &GATEWAY_MAC[..])
        );
        assert_eq!(
            (&frame[26..30], &frame[30..34]),
            (&PEER.octets()[..], &GUEST.octets()[..])
        );
        assert!(checksums_are_right(&frame), "{frame:x?}");
        let counters = datapath.counters(index);
        assert_eq!((counters.egress.packets, counters.ingress.packets), (2, 1));
        assert_eq!(counters.egress.bytes, 2 * out.len() as u64);
        assert_eq!(counters.drops, [0; 48]);
    });
}

/// At 8 kbit/s a burst of 128 KiB is paid for in two minutes.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_new_limit_doesn_t_make_a_sandbox_pay_at_the_old_rate() {
    lab::run(|lab| {
        let Path {
            guest,
            datapath,
            index,
            uplink: _uplink,
            ..
        } = Path::open(lab);
        let add = |bits, rules| {
            let mut spec = route_policy();
            spec.limits.egress.bits_per_second = Some(bits);
            spec.egress.rules.truncate(rules);
            let policy = policy::compile(&spec, &[]).unwrap();
            datapath.add_policy(&policy).unwrap()
        };
        datapath.activate(index, add(8_000, 1), false).unwrap();
        let mut out = datagram((GUEST_MAC, GATEWAY_MAC), (GUEST, 1000), (PEER, 2000));
        // Behind the packet.
        out.resize(1400, 0);
        let over = || datapath.counters(index).drops[DropReason::BitLimit as usize];
        let send = || guest.file().write_all(&out).unwrap();
        let until_over = |most: usize| {
            let before = over();
            let sent = (1..=most).find(|_| {
                send();
                over() > before
            });
            sent.expect("it is over the limit")
        };
        assert!(until_over(1000) > 50);
        // The same limit, by another policy: a second pays for less than a frame.
        datapath.set_policy(index, add(8_000, 0));
        until_over(30);
        datapath.set_policy(index, add(1_000_000_000, 1));
        let before = datapath.counters(index).egress.packets;
        send();
        assert_eq!(datapath.counters(index).egress.packets, before + 1);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_no_frame_leaves_that_is_larger_than_the_uplink_takes() {
    lab::run(|lab| {
        let Path {
            uplink,
            guest,
            datapath,
            index,
            policy,
        } = Path::open(lab);
        datapath.activate(index, policy, false).unwrap();
        let out = datagram((GUEST_MAC, GATEWAY_MAC), (GUEST, 1000), (PEER, 2000));
        for behind in [20, 9000, 60000] {
            // The packet itself is small.
            let mut frame = out.clone();
            frame.resize(out.len() + behind, 0x5a);
            guest.file().write_all(&frame).unwrap();
            let left = receive(&uplink);
            assert!(left.len() <= 1514, "{} bytes", left.len());
            assert_eq!(left[30..34], PEER.octets());
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_denied_packet_is_counted_and_traced() {
    lab::run(|lab| {
        let Path {
            uplink: _uplink,
            guest,
            datapath,
            index,
            policy,
        } = Path::open(lab);
        datapath.activate(index, policy, false).unwrap();
        datapath.set_flag(index, NicFlag::Trace, true);
        let mut events = datapath.trace_events().unwrap();
        assert!(events.next_event().is_none());
        let out = datagram((GUEST_MAC, GATEWAY_MAC), (GUEST, 1000), (DENIED, 2000));
        guest.file().write_all(&out).unwrap();
        assert!(events.wait(PATIENCE).unwrap());
        let event = events.next_event().unwrap();
        assert_eq!(event.nic, index.0);
        assert_eq!(event.verdict, Verdict::Drop as u8);
        assert_eq!(event.direction, Direction::Egress as u8);
        assert_eq!(event.reason, DropReason::Policy as u8);
        assert_eq!(event.frame[..event.captured as usize], out);
        let drops = datapath.counters(index).drops;
        assert_eq!(drops[DropReason::Policy as usize], 1);
        assert_eq!(drops.iter().sum::<u64>(), 1);
        assert!(!events.wait(Duration::from_millis(10)).unwrap());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_what_a_lease_may_answer_the_next_may_not() {
    lab::run(|lab| {
        let Path {
            uplink,
            guest,
            datapath,
            index,
            policy,
        } = Path::open(lab);
        let request = datagram((ROUTER_MAC, UPLINK_MAC), (DENIED, 2000), (CLONE, 1000));
        let answer = datagram((GUEST_MAC, GATEWAY_MAC), (GUEST, 1000), (DENIED, 2000));
        let denied = || datapath.counters(index).drops[DropReason::Policy as usize];
        for _ in 0..2 {
            // What counts is told anew with each lease.
            datapath.activate(index, policy, false).unwrap();
            guest.file().write_all(&answer).unwrap();
            let deadline = Instant::now() + PATIENCE;
            while denied() == 0 {
                assert!(Instant::now() < deadline, "nobody has asked this lease");
                thread::sleep(Duration::from_millis(1));
            }
            uplink.file().write_all(&request).unwrap();
            receive(&guest);
            guest.file().write_all(&answer).unwrap();
            assert_eq!(&receive(&uplink)[30..34], DENIED.octets());
            assert_eq!(denied(), 1);
            datapath.deactivate(index).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_datagrams_end_when_their_server_is_denied() {
    lab::run(|lab| {
        let Path {
            uplink,
            guest,
            datapath,
            index,
            policy,
        } = Path::open(lab);
        let closed = PolicySpec {
            egress: EgressPolicy {
                default: PolicyAction::Deny,
                rules: Vec::new(),
            },
            ..route_policy()
        };
        let closed = policy::compile(&closed, &[]).unwrap();
        let closed = datapath.add_policy(&closed).unwrap();
        datapath.activate(index, policy, false).unwrap();
        let to = |port| datagram((GUEST_MAC, GATEWAY_MAC), (GUEST, port), (PEER, 2000));
        let from = |port| datagram((ROUTER_MAC, UPLINK_MAC), (PEER, 2000), (CLONE, port));
        let answered = |port| {
            uplink.file().write_all(&from(port)).unwrap();
            receive(&guest);
        };
        let denied = || datapath.counters(index).drops[DropReason::Policy as usize];
        let is_denied = |port| {
            let before = denied();
            guest.file().write_all(&to(port)).unwrap();
            let deadline = Instant::now() + PATIENCE;
            while denied() == before {
                assert!(Instant::now() < deadline, "port {port} goes on");
                thread::sleep(Duration::from_millis(1));
            }
        };
        guest.file().write_all(&to(1000)).unwrap();
        assert_eq!(&receive(&uplink)[30..34], PEER.octets());
        answered(1000);
        datapath.set_policy(index, closed);
        is_denied(1000);
        // The server doesn't know, and doesn't keep it open.
        answered(1000);
        is_denied(1000);
        // Who calls now is a caller.
        answered(1001);
        guest.file().write_all(&to(1001)).unwrap();
        assert_eq!(&receive(&uplink)[30..34], PEER.octets());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_no_packet_is_lost_while_programs_are_replaced() {
    const TIMES: usize = 10;
    lab::run(|lab| {
        let Path {
            uplink,
            guest,
            datapath,
            index,
            policy,
        } = Path::open(lab);
        datapath.activate(index, policy, false).unwrap();
        drop(datapath);
        let out = datagram((GUEST_MAC, GATEWAY_MAC), (GUEST, 1000), (PEER, 2000));
        let packets = thread::scope(|scope| {
            let replacing = scope.spawn(|| {
                for _ in 0..TIMES {
                    let datapath = open(&settings());
                    put_filter(&datapath, index);
                    datapath.set_uplinks(&[up0()]).unwrap();
                }
            });
            let mut packets = 0;
            // However long it takes, packets are on their way. The first that doesn't come ends the test.
            while !replacing.is_finished() {
                guest.file().write_all(&out).unwrap();
                receive(&uplink);
                packets += 1;
            }
            replacing.join().unwrap();
            packets
        });
        assert!(
            packets > TIMES as u64,
            "{packets} while {TIMES} times replaced"
        );
        let counters = open(&settings()).counters(index);
        assert_eq!(counters.egress.packets, packets);
        assert_eq!(counters.drops, [0; 48]);
    });
}

/// Keeps this thread on the processor that is this many behind the first of those that it may use.
fn stay_on(number: usize) {
    let usable = sched_getaffinity(None).unwrap();
    let processors = (0..CpuSet::MAX_CPU).filter(|processor| usable.is_set(*processor));
    let processors: Vec<usize> = processors.collect();
    let mut only = CpuSet::new();
    only.set(processors[number % processors.len()]);
    sched_setaffinity(None, &only).unwrap();
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_processors_that_count_at_once_lose_nothing() {
    const PACKETS: u32 = 40_000;
    const PROCESSORS: u32 = 2;
    lab::run(|lab| {
        let Path {
            uplink,
            guest,
            datapath,
            index,
            policy,
        } = Path::open(lab);
        datapath.activate(index, policy, false).unwrap();
        let out = datagram((GUEST_MAC, GATEWAY_MAC), (GUEST, 1000), (PEER, 2000));
        let back = datagram((ROUTER_MAC, UPLINK_MAC), (PEER, 2000), (CLONE, 1000));
        // The kernel runs the program before the write returns. What finds no room behind it was counted.
        let packets = |processor: usize| {
            stay_on(processor);
            for _ in 0..PACKETS {
                guest.file().write_all(&out).unwrap();
                uplink.file().write_all(&back).unwrap();
            }
        };
        thread::scope(|scope| {
            for processor in 0..PROCESSORS as usize {
                scope.spawn(move || packets(processor));
            }
        });
        let all = u64::from(PROCESSORS * PACKETS);
        let counters = datapath.counters(index);
        for (traffic, frame) in [(counters.egress, &out), (counters.ingress, &back)] {
            let counted = (traffic.packets, traffic.bytes, traffic.segments);
            assert_eq!(counted, (all, all * frame.len() as u64, all));
        }
        assert_eq!(counters.drops, [0; 48]);
        // Today's programs leave to those of before what they share.
        let shared = datapath.counters.read(index.0);
        assert_eq!(shared, Counters::default());
    });
}
