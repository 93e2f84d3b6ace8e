//! Diversions under real traffic: a thread hands every frame back to the TAP that it came from.

use std::{
    io::{ErrorKind, Read, Write},
    net::UdpSocket,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandwire_kernel_net::{
    interface::Change,
    netlink::{Request, Socket},
    tap,
    tc::Hook,
};
use sandwire_testlab::{
    iperf3,
    lab::{self, Lab},
    namespace,
};

use super::{index_of, json, names_in};
use crate::{
    divert::{Diversion, Way, remove},
    features,
};

const FOLDER: &str = "/sys/fs/bpf/diversion";
const TAPS: [(&str, Hook); 2] = [("tapi", Hook::Ingress), ("tape", Hook::Egress)];

/// A namespace `far` behind `near0`, addresses 10.9.0.1 here and 10.9.0.2 there.
fn interfaces(lab: &Lab) {
    lab.shell(
        "ip netns add far
         ip link add near0 type veth peer name far0 netns far
         ip addr add 10.9.0.1/24 dev near0; ip addr add fd09::1/64 dev near0 nodad
         ip link set near0 up
         ip -n far addr add 10.9.0.2/24 dev far0; ip -n far addr add fd09::2/64 dev far0 nodad
         ip -n far link set far0 up; ip -n far link set lo up",
    );
}

/// What reads each TAP and writes it back, until it is dropped; the TAPs go with it.
struct Echo {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

/// Makes the TAPs and hands them to threads; the numbers are in the order of [`TAPS`].
fn echo(diversion: &Diversion, passes_when_gone: bool) -> Echo {
    let stop = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    for (name, hook) in TAPS {
        let options = tap::Options {
            vnet_header: false,
            multi_queue: false,
            owner: None,
            group: None,
        };
        let opened = tap::create_transient(name, None, options).unwrap();
        let index = index_of(name);
        diversion.prepare_tap(hook, index).unwrap();
        raise(name);
        diversion.set_way(
            hook,
            Way::Tap {
                tap: index,
                passes_when_gone,
            },
        );
        let stop = stop.clone();
        threads.push(thread::spawn(move || give_back(&opened, &stop)));
    }
    Echo { stop, threads }
}

fn raise(name: &str) {
    let mut request = Request::new();
    let change = Change {
        name,
        no_generated_addresses: true,
        up: Some(true),
        ..Change::default()
    };
    change.apply(&mut request);
    Socket::route().unwrap().execute(request).unwrap();
}

fn give_back(tap: &tap::Opened, stop: &AtomicBool) {
    let mut file = tap.file();
    let mut frame = [0; 65_536];
    while !stop.load(Ordering::Relaxed) {
        match file.read(&mut frame) {
            Ok(length) => {
                assert!(length <= 1518, "a frame of {length} bytes");
                // A write fails when the interface is down; the frame is lost then.
                let _ = file.write(&frame[..length]);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let mut fds = [PollFd::new(file, PollFlags::IN)];
                let patience = Timespec {
                    tv_sec: 0,
                    tv_nsec: 50_000_000,
                };
                poll(&mut fds, Some(&patience)).unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn diversion(uses_links: bool) -> Diversion {
    Diversion::open(FOLDER.as_ref(), index_of("near0"), uses_links).unwrap()
}

/// What ping says once all of its twenty were answered: it leaves before the last answer where the machine is slow.
fn pings(lab: &Lab, address: &str) -> String {
    let ping = format!("ping -n -q -c 20 -i 0.01 -W 1 {address} || true");
    let mut said = lab.shell(&ping);
    for _ in 1..20 {
        if said.contains("20 received") {
            break;
        }
        said = lab.shell(&ping);
    }
    said
}

fn is_reached(lab: &Lab) -> bool {
    lab.shell("ping -n -q -c 3 -i 0.05 -W 0.2 10.9.0.2 || true")
        .contains(" 0% packet loss")
}

fn goes_both_ways(lab: &Lab, uses_links: bool) {
    interfaces(lab);
    let diversion = diversion(uses_links);
    let echo = echo(&diversion, false);
    diversion.attach().unwrap();
    for address in ["10.9.0.2", "fd09::2"] {
        let said = pings(lab, address);
        assert!(said.contains("20 received"), "{said}");
    }
    for hook in [Hook::Ingress, Hook::Egress] {
        let counters = diversion.counters(hook);
        assert!(counters.diverted >= 40, "{counters:?}");
        assert_eq!(counters.diverted, counters.returned, "{counters:?}");
        assert_eq!((counters.dead_dropped, counters.dead_passed), (0, 0));
    }
    diversion.detach().unwrap();
    let before = diversion.counters(Hook::Egress).diverted;
    assert!(pings(lab, "10.9.0.2").contains("20 received"));
    assert_eq!(diversion.counters(Hook::Egress).diverted, before);
    assert!(!std::path::Path::new(FOLDER).exists());
    drop(echo);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_packets_go_by_the_taps_and_come_back_once() {
    lab::run(|lab| {
        assert!(features::probe().unwrap().tcx, "this test is about links");
        goes_both_ways(lab, true);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_filters_do_the_same_as_links() {
    lab::run(|lab| goes_both_ways(lab, false));
}

/// Streams in both directions, with the senders' offloads on: the kernel cuts what is too long, sums
/// it up before we read it, and judges the sums when it comes back.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_super_packets_are_cut_and_summed_before_they_are_read() {
    lab::run(|lab| {
        interfaces(lab);
        let diversion = diversion(features::probe().unwrap().tcx);
        let _echo = echo(&diversion, false);
        diversion.attach().unwrap();
        let far = namespace::path_of("far");
        let _server = iperf3::Server::start(Some(&far)).unwrap();
        for (address, options) in [
            ("10.9.0.2", ""),
            ("10.9.0.2", "-R"),
            ("fd09::2", ""),
            ("fd09::2", "-R"),
        ] {
            let client = format!("--client {address} --bytes 20M {options}");
            let report = iperf3::report(None, &client).unwrap();
            // What was under way at the end isn't counted as received.
            let bytes = report["end"]["sum_received"]["bytes"].as_u64().unwrap();
            assert!(bytes >= 10_000_000, "{address} {options}: {bytes}");
        }
        for place in ["", "ip netns exec far "] {
            let wrong = lab.run(&format!("{place}nstat -asz TcpInCsumErrors"));
            let line = wrong.lines().find(|line| line.contains("Csum")).unwrap();
            assert_eq!(line.split_whitespace().nth(1), Some("0"), "{line}");
        }
        // Segments were counted, not super-packets.
        let counters = diversion.counters(Hook::Egress);
        assert!(counters.diverted > 2 * 10_000_000 / 1448, "{counters:?}");
    });
}

/// Payload of a segment.
const SEGMENT: usize = 1400;

/// Headers of a super-packet, as a VMM writes it for its guest.
struct Headers {
    /// From Ethernet's on, those before the transport's.
    before: Vec<u8>,
    transport: Vec<u8>,
    gso_type: u8,
}

impl Headers {
    fn new(ethertype: u16, network: &[u8], transport: Vec<u8>, gso_type: u8) -> Self {
        let mut before = vec![2; 12];
        before.extend(ethertype.to_be_bytes());
        before.extend(network);
        Self {
            before,
            transport,
            gso_type,
        }
    }

    /// With a payload of so many bytes, behind a virtio-net header.
    fn with(&self, payload: usize) -> Vec<u8> {
        self.with_segments(payload, SEGMENT)
    }

    fn with_segments(&self, payload: usize, segment: usize) -> Vec<u8> {
        let is_udp = self.transport.len() == 8;
        let all = self.before.len() + self.transport.len();
        let mut bytes = vec![1, self.gso_type];
        for number in [all, segment, self.before.len(), if is_udp { 6 } else { 16 }] {
            bytes.extend(u16::try_from(number).unwrap().to_ne_bytes());
        }
        bytes.extend(&self.before);
        bytes.extend(&self.transport);
        bytes.resize(bytes.len() + payload, 7);
        bytes
    }
}

/// What guests send, and that with options, with an extension header, and with two tags, of which the kernel takes off
/// one.
fn kinds() -> Vec<Headers> {
    let ipv4 = |words: u8, protocol| {
        let mut header = vec![0x40 | words, 0, 0, 0, 0, 0, 0, 0, 64, protocol];
        header.resize(usize::from(words) * 4, 1);
        header
    };
    let ipv6 = |next: u8, rest: &[u8]| {
        let mut header = vec![0x60, 0, 0, 0, 0, 0, next, 64];
        header.resize(40, 1);
        header.extend(rest);
        header
    };
    let tcp = |words: u8| {
        let mut header = vec![0; usize::from(words) * 4];
        header[12] = words << 4;
        header
    };
    let tagged = [&[0, 5, 0x81, 0, 0, 6, 8, 0], &ipv4(5, 6)[..]].concat();
    vec![
        Headers::new(0x0800, &ipv4(5, 6), tcp(5), 1),
        Headers::new(0x0800, &ipv4(7, 6), tcp(8), 1),
        Headers::new(0x88a8, &tagged, tcp(5), 1),
        Headers::new(0x86dd, &ipv6(6, &[]), tcp(8), 4),
        Headers::new(0x86dd, &ipv6(60, &[6, 0, 1, 4, 0, 0, 0, 0]), tcp(5), 4),
        Headers::new(0x0800, &ipv4(5, 17), vec![0; 8], 5),
        Headers::new(0x86dd, &ipv6(17, &[]), vec![0; 8], 5),
    ]
}

fn wait_until_all_are_back(diversion: &Diversion) -> u64 {
    for _ in 0..500 {
        if diversion.outstanding(Hook::Ingress) == 0 {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    let counters = diversion.counters(Hook::Ingress);
    assert_eq!(counters.diverted, counters.returned, "{counters:?}");
    counters.returned
}

/// The kernel doesn't count the segments of what a VMM writes, and the TAP cuts it all the same.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_super_packets_of_guests_are_counted_as_what_comes_back_of_them() {
    lab::run(|lab| {
        let options = tap::Options {
            vnet_header: true,
            multi_queue: false,
            owner: None,
            group: None,
        };
        let guest = tap::create_transient("near0", None, options).unwrap();
        lab.shell("sysctl -q net.ipv6.conf.near0.disable_ipv6=1; ip link set near0 up");
        let diversion = diversion(features::probe().unwrap().tcx);
        let _echo = echo(&diversion, false);
        diversion.attach().unwrap();
        for (number, headers) in kinds().iter().enumerate() {
            for segments in [2, 3, 20] {
                for payload in [(segments - 1) * SEGMENT + 1, segments * SEGMENT] {
                    let before = wait_until_all_are_back(&diversion);
                    guest.file().write_all(&headers.with(payload)).unwrap();
                    let back = wait_until_all_are_back(&diversion) - before;
                    assert_eq!(back, segments as u64, "kind {number}, {payload} bytes");
                }
            }
        }
        // By one write a guest would have the kernel make as many packets as bytes.
        let before = diversion.counters(Hook::Ingress);
        let many = kinds()[0].with_segments(2049, 1);
        guest.file().write_all(&many).unwrap();
        let after = diversion.counters(Hook::Ingress);
        assert_eq!(
            (after.uncut, after.diverted),
            (before.uncut + 1, before.diverted)
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_when_the_taps_are_gone_packets_are_dropped_or_pass_as_was_said() {
    lab::run(|lab| {
        interfaces(lab);
        let diversion = diversion(features::probe().unwrap().tcx);
        let first = echo(&diversion, false);
        diversion.attach().unwrap();
        assert!(is_reached(lab));
        drop(first);
        assert!(!is_reached(lab));
        let counters = diversion.counters(Hook::Egress);
        assert!(counters.dead_dropped >= 3, "{counters:?}");

        // Another process finds the map and says otherwise.
        let other = self::diversion(features::probe().unwrap().tcx);
        let second = echo(&other, true);
        other.attach().unwrap();
        assert!(is_reached(lab));
        drop(second);
        assert!(is_reached(lab));
        let counters = other.counters(Hook::Egress);
        assert!(counters.dead_passed >= 3, "{counters:?}");

        drop((diversion, other));
        assert_eq!(
            names_in(FOLDER.as_ref()),
            ["directions", "egress", "ingress"]
        );
        remove(FOLDER.as_ref()).unwrap();
        remove(FOLDER.as_ref()).unwrap();
        let attached = json("bpftool", &["-j", "net", "show", "dev", "near0"]);
        let text = attached.to_string();
        assert!(!text.contains("divert"), "{text}");
    });
}

/// The number of packets that a counting rule has seen.
/// Nobody can get into a namespace any more that has lost its name, and filters stay on its interface.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_filters_of_what_was_removed_let_packets_pass() {
    lab::run(|lab| {
        interfaces(lab);
        let diversion = diversion(false);
        let echo = echo(&diversion, false);
        diversion.attach().unwrap();
        assert!(is_reached(lab));
        drop(echo);
        assert!(!is_reached(lab));
        drop(diversion);
        remove(FOLDER.as_ref()).unwrap();
        let filters = lab.run("tc filter show dev near0 egress");
        assert!(filters.contains("divert"), "{filters}");
        assert!(is_reached(lab));
    });
}

fn counted(lab: &Lab, chain: &str) -> u64 {
    let rules = lab.run("nft -j list table netdev judge");
    let rules: serde_json::Value = serde_json::from_str(&rules).unwrap();
    let rule = rules["nftables"].as_array().unwrap().iter();
    rule.filter(|entry| entry["rule"]["chain"] == chain)
        .find_map(|entry| {
            entry["rule"]["expr"]
                .as_array()?
                .iter()
                .find_map(|part| part["counter"]["packets"].as_u64())
        })
        .unwrap()
}

/// A mark that somebody set in front of us has no meaning to us, and what passes has none of ours.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_nobody_gets_past_by_a_mark_and_none_is_left_on_packets() {
    lab::run(|lab| {
        interfaces(lab);
        lab.shell(
            "nft add table netdev judge
             nft add chain netdev judge in '{ type filter hook ingress device near0 priority 0; }'
             nft add rule netdev judge in meta mark 0 ip protocol udp counter
             nft add table inet m; nft add chain inet m o '{ type filter hook output priority 0; }'
             nft add rule inet m o meta mark set 0x5d1b",
        );
        let diversion = diversion(features::probe().unwrap().tcx);
        let _echo = echo(&diversion, false);
        diversion.attach().unwrap();
        pings(lab, "10.9.0.2");
        let counters = diversion.counters(Hook::Egress);
        assert!(counters.diverted >= 20, "{counters:?}");

        let socket = UdpSocket::bind("10.9.0.1:7000").unwrap();
        lab.shell("for i in 1 2 3 4 5; do echo x | ip netns exec far bash -c 'cat > /dev/udp/10.9.0.1/7000'; done");
        socket
            .set_read_timeout(Some(Duration::from_secs(2)))
            .unwrap();
        let mut bytes = [0; 16];
        for _ in 0..5 {
            socket.recv(&mut bytes).unwrap();
        }
        assert_eq!(counted(lab, "in"), 5);
    });
}

/// Who has the other end of a veth to itself, as a container with the right to set up its network, chooses the class of what it
/// sends, which comes over as `tc_index`. A filter without a program of eBPF takes no right besides.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_nobody_gets_past_by_a_class_set_at_the_other_end() {
    lab::run(|lab| {
        interfaces(lab);
        let diversion = diversion(features::probe().unwrap().tcx);
        let _echo = echo(&diversion, false);
        diversion.attach().unwrap();
        lab.shell(
            "ip netns exec far tc qdisc add dev far0 clsact
             ip netns exec far tc filter add dev far0 egress bpf bytecode '1,6 0 0 4294967295' flowid 1:5d1b",
        );
        let said = pings(lab, "10.9.0.2");
        assert!(said.contains("20 received"), "{said}");
        let counters = diversion.counters(Hook::Ingress);
        assert!(counters.diverted >= 20, "{counters:?}");
        assert_eq!(counters.diverted, counters.returned, "{counters:?}");
    });
}

/// The TAPs are for diverted packets alone.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_what_somebody_sends_into_a_tap_goes_nowhere() {
    lab::run(|lab| {
        interfaces(lab);
        let diversion = diversion(features::probe().unwrap().tcx);
        let _echo = echo(&diversion, false);
        diversion.attach().unwrap();
        lab.shell("ip addr add 10.10.0.1/24 dev tape; ip neigh add 10.10.0.2 lladdr 02:00:00:00:00:02 dev tape");
        lab.shell("ping -n -q -c 5 -i 0.01 -W 0.1 10.10.0.2 || true");
        thread::sleep(Duration::from_millis(200));
        // What the interface itself says when it is new comes back; what was sent into the TAP doesn't.
        let counters = diversion.counters(Hook::Egress);
        assert_eq!(counters.returned, counters.diverted, "{counters:?}");
        let sent = lab.run("ip -s -j link show dev tape");
        let sent: serde_json::Value = serde_json::from_str(&sent).unwrap();
        assert_eq!(sent[0]["stats64"]["tx"]["packets"], counters.diverted);
    });
}
