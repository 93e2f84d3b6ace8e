//! The data path `xdp` from end to end: a guest on a host slot's TAP and a server on an uplink, neither
//! with any offload, so that every checksum is checked by whoever receives it.
//!
//! What XDP redirects never becomes a packet of the host: a capture on all interfaces doesn't see it.
//! What it leaves to tc is captured, and what goes either way is counted on the sandbox.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod fixture;

use std::{
    collections::BTreeMap,
    fs::File,
    io::Write,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::unix::fs::FileExt,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use fixture::{INSTANCE, IPV4, ebpf_pool};
use sandwire_api::{
    lease::{AcquireLease, Lease},
    published_port::{Protocol, PublishPort},
    slot::DataPath,
};
use sandwire_datapath::Order;
use sandwire_slot::{
    clock::SystemClock,
    kernel::{KernelNetwork, Settings},
    network::{Network, Tenancy},
    plan::{Plan, SlotNumber, SlotPlan},
    service::{self, Caller, Slots},
};
use sandwire_testlab::{
    command,
    fake_guest::{FakeGuest, GuestNetwork, frame},
    guest::{kernel::Series, machine},
    host::ECHO_PORT,
    lab::{self, Lab},
    namespace,
    other_program::{OtherProgram, Place},
};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);
/// Nearer to the server's own address than its link-local one, which it would call from otherwise.
const IPV6: &str = "2001:db8:77::/64";
const UPLINK: &str = "up9";
const GATEWAY_MAC: [u8; 6] = [0x02, 0x73, 0x77, 0x00, 0x00, 0x01];
/// Addresses of the host on the uplink.
const HOST: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 1)),
];
const SERVER4: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
const SERVER6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 2);
const SERVER: [IpAddr; 2] = [IpAddr::V4(SERVER4), IpAddr::V6(SERVER6)];

/// An uplink whose driver runs XDP and takes frames from it, and a server beyond.
fn attach_server(lab: &Lab) -> FakeGuest {
    lab.run(&format!("ip tuntap add {UPLINK} mode tap"));
    start_server(lab, Path::new("/proc/self/ns/net"), UPLINK)
}

/// The same by a card of a machine, with the server behind its other one.
fn attach_server_by_cards(lab: &Lab) -> FakeGuest {
    let [near, far] = machine::CARDS;
    lab.shell(&format!(
        "ip link set {near} name {UPLINK}
         ip netns add far; ip link set {far} netns far
         ip netns exec far sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
         ip -n far tuntap add tap9 mode tap
         ip -n far link add both type bridge mcast_snooping 0
         for port in {far} tap9 both; do ip -n far link set $port up; done
         for port in {far} tap9; do ip -n far link set $port master both; done"
    ));
    start_server(lab, &namespace::path_of("far"), "tap9")
}

/// A server behind a TAP, and addresses and routes of the host to it by the uplink.
fn start_server(lab: &Lab, netns: &Path, tap: &str) -> FakeGuest {
    lab.run(&format!("ip address add {}/24 dev {UPLINK}", HOST[0]));
    lab.run(&format!("ip address add {}/64 dev {UPLINK} nodad", HOST[1]));
    lab.run(&format!("ip link set {UPLINK} up"));
    let network = GuestNetwork {
        mac: [0x02, 0, 0, 0, 9, 9],
        ipv4: (SERVER4, 24),
        ipv4_gateway: Ipv4Addr::new(198, 51, 100, 1),
        ipv6: (SERVER6, 64),
        ipv6_gateway: Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 1),
    };
    let server = FakeGuest::attach_as(netns, tap, network).unwrap();
    lab.run(&format!("ip route add default via {SERVER4} dev {UPLINK}"));
    lab.run(&format!(
        "ip -6 route add default via {SERVER6} dev {UPLINK}"
    ));
    for (host, server_address) in HOST.into_iter().zip(SERVER) {
        command::run(&format!("ping -n -q -c 1 -w 60 {server_address}")).unwrap();
        // It loses what it sends while it asks for its gateway.
        server.ping(host, PATIENCE).unwrap();
    }
    server
}

/// TCP and UDP packets that the host's side of any interface sees.
struct Capture {
    child: Child,
    output: File,
}

impl Capture {
    fn start() -> Self {
        let (output, messages) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let told = messages.try_clone().unwrap();
        let child = Command::new("tcpdump")
            .args([
                "-n",
                "-q",
                "--immediate-mode",
                "-l",
                "-p",
                "-s",
                "200",
                "-B",
                "16384",
                "-i",
                "any",
                "tcp or udp",
            ])
            .stdout(output.try_clone().unwrap())
            .stderr(Stdio::from(messages))
            .spawn()
            .unwrap();
        let deadline = Instant::now() + PATIENCE;
        while !read_in_place(&told).contains("listening on") {
            assert!(Instant::now() < deadline, "{}", read_in_place(&told));
            std::thread::sleep(Duration::from_millis(20));
        }
        Self { child, output }
    }

    /// How many packets came in (`In`) or left (`Out`), by interface.
    fn stop(mut self) -> BTreeMap<(String, String), u64> {
        // Once it has written this one, it has written those before.
        let last = UdpSocket::bind("127.0.0.1:0").unwrap();
        let marker = format!("127.0.0.1.{}: ", last.local_addr().unwrap().port());
        last.send_to(b"end", last.local_addr().unwrap()).unwrap();
        let deadline = Instant::now() + PATIENCE;
        while !self.written().contains(&marker) {
            assert!(Instant::now() < deadline, "tcpdump doesn't get on");
            std::thread::sleep(Duration::from_millis(50));
        }
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        self.child.wait().unwrap();
        let mut seen = BTreeMap::new();
        for line in self.written().lines() {
            // Behind a short name there are two spaces.
            let mut words = line.split_whitespace().skip(1).map(str::to_owned);
            // Some packets take tcpdump more than a line.
            let (Some(interface), Some(direction)) = (words.next(), words.next()) else {
                continue;
            };
            *seen.entry((interface, direction)).or_default() += 1;
        }
        seen
    }

    fn written(&self) -> String {
        read_in_place(&self.output)
    }
}

/// What a process has written to a file so far. The offset is that process's too, and stays.
fn read_in_place(file: &File) -> String {
    let length = file.metadata().unwrap().len();
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// A pool of the data path, with one leased slot.
struct Sandbox {
    network: KernelNetwork,
    plan: Plan,
    slot: SlotPlan,
}

/// What a piece of work has sent, and how much of it the host saw.
#[derive(Debug)]
struct Passed {
    /// By the sandbox's counters.
    egress: u64,
    ingress: u64,
    /// Left to tc.
    egress_by_tc: u64,
    ingress_by_tc: u64,
}

impl Sandbox {
    fn start() -> Self {
        Self::start_with(Settings::new(INSTANCE))
    }

    fn start_with(settings: Settings) -> Self {
        let plan = xdp_pool();
        let network = KernelNetwork::open_with(settings).unwrap();
        network.add_pool(&plan).unwrap();
        let slot = plan.slot(SlotNumber(0));
        network.build(&slot).unwrap();
        let policy = &plan.spec.policy;
        let tenancy = Tenancy {
            policy: network.add_policy(policy).unwrap(),
            group: sandwire_datapath::group_number(plan.group_of(policy).as_str()),
            is_process: false,
        };
        network.activate(&slot, &tenancy).unwrap();
        Self {
            network,
            plan,
            slot,
        }
    }

    fn note(&self) -> Option<String> {
        self.network.inspect(&self.slot).data_path_note
    }

    fn measure(&self, work: impl FnOnce()) -> Passed {
        let capture = Capture::start();
        let before = self.network.traffic(&self.slot).unwrap();
        work();
        let after = self.network.traffic(&self.slot).unwrap();
        let seen = capture.stop();
        let came_in = |interface: &str| {
            let key = (interface.to_owned(), "In".to_owned());
            seen.get(&key).copied().unwrap_or(0)
        };
        Passed {
            egress: after.egress.packets - before.egress.packets,
            ingress: after.ingress.packets - before.ingress.packets,
            egress_by_tc: came_in(&self.slot.host_interface),
            ingress_by_tc: came_in(UPLINK),
        }
    }
}

fn xdp_pool() -> Plan {
    let mut spec = ebpf_pool("web", "host", r#"{"uplink":"route"}"#, IPV4, IPV6).spec;
    spec.data_path = DataPath::Xdp;
    Plan::new(&INSTANCE.parse().unwrap(), &spec).unwrap()
}

/// A pool that a start takes up before that one.
fn earlier_pool() -> Plan {
    ebpf_pool("a", "host", "{}", "10.65.0.0/24", "2001:db8:78::/64")
}

/// Calls a server's echo by TCP and UDP, in both families.
#[track_caller]
fn call(caller: &FakeGuest, servers: impl IntoIterator<Item = IpAddr>, port: u16) {
    let stream: Vec<u8> = (0..=250).cycle().take(400_000).collect();
    for server in servers {
        let server = SocketAddr::new(server, port);
        let echoed = caller.exchange_tcp(server, &stream, PATIENCE).unwrap();
        assert!(echoed == stream, "{server}: the stream came back otherwise");
        let datagram = caller.exchange_udp(server, b"echo", PATIENCE).unwrap();
        assert_eq!(datagram, b"echo");
    }
}

impl Passed {
    /// Decisions are made by tc, again every 100 ms; what comes from the uplink needs none.
    #[track_caller]
    fn assert_by_xdp(&self) {
        assert!(self.egress > 300 && self.ingress > 300, "{self:?}");
        assert!(self.egress_by_tc * 4 < self.egress, "{self:?}");
        assert_eq!(self.ingress_by_tc, 0, "{self:?}");
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn packets_of_a_proven_tap_go_to_the_uplink_and_back_by_xdp() {
    lab::run(|lab| {
        let server = attach_server(lab);
        let sandbox = Sandbox::start();
        let guest = FakeGuest::attach("/proc/self/ns/net".as_ref(), &sandbox.slot.nics[0].tap);
        let guest = guest.unwrap();
        let known = guest.network();
        for gateway in [IpAddr::from(known.ipv4_gateway), known.ipv6_gateway.into()] {
            guest.ping(gateway, PATIENCE).unwrap();
        }
        assert_eq!(sandbox.note(), None);
        for address in SERVER {
            guest.ping(address, PATIENCE).unwrap();
        }
        let outward = sandbox.measure(|| call(&guest, SERVER, ECHO_PORT));
        outward.assert_by_xdp();
        let clones: Vec<IpAddr> = sandbox.slot.clone_addresses().collect();
        let inward = sandbox.measure(|| call(&server, clones.clone(), ECHO_PORT));
        inward.assert_by_xdp();

        // Only the stack can translate what answers a published port.
        let ports = [Protocol::Tcp, Protocol::Udp].map(|protocol| {
            let port = PublishPort {
                protocol,
                host_address: None,
                host_port: 8007,
                clone_port: ECHO_PORT,
                nic: 0,
            };
            (port, clones.clone())
        });
        sandbox.network.set_published_ports(&ports).unwrap();
        let published = sandbox.measure(|| call(&server, HOST, 8007));
        assert_eq!(published.egress, published.egress_by_tc, "{published:?}");
        sandbox.network.set_published_ports(&[]).unwrap();
        let outward = sandbox.measure(|| call(&guest, SERVER, ECHO_PORT));
        outward.assert_by_xdp();

        assert_eq!(sandbox.network.inspect(&sandbox.slot).defects, []);
        guest.detach().unwrap();
        assert!(sandbox.note().unwrap().contains("nobody has the TAP open"));
        assert_unloading_leaves_nothing(lab, &sandbox);
    });
}

/// The judge is the card's driver, which counts what XDP had it send and took from it.
#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn packets_go_to_a_card_and_back_by_xdp_on_linux_6_12() {
    lab::run_on_with_cards(Series::Linux6_12, 6 * PATIENCE, |lab| {
        let server = attach_server_by_cards(lab);
        let sandbox = Sandbox::start();
        let tap = &sandbox.slot.nics[0].tap;
        let guest = FakeGuest::attach("/proc/self/ns/net".as_ref(), tap).unwrap();
        for address in SERVER {
            guest.ping(address, PATIENCE).unwrap();
        }
        assert_eq!(sandbox.note(), None);
        let clones: Vec<IpAddr> = sandbox.slot.clone_addresses().collect();
        for (caller, called) in [(&guest, SERVER.to_vec()), (&server, clones)] {
            let before = DriverCounts::read(lab);
            call(caller, called, ECHO_PORT);
            let counted = DriverCounts::read(lab).since(&before);
            // How many depends on how often a slow machine has to decide anew.
            assert!(counted.sent > 0 && counted.taken > 0, "{counted:?}");
        }
        assert_eq!(sandbox.network.inspect(&sandbox.slot).defects, []);
        guest.detach().unwrap();
        assert_unloading_leaves_nothing(lab, &sandbox);
    });
}

/// Frames of the uplink's driver.
#[derive(Debug)]
struct DriverCounts {
    /// Sent by XDP.
    sent: u64,
    /// Taken by XDP, which has led them elsewhere.
    taken: u64,
}

impl DriverCounts {
    fn read(lab: &Lab) -> Self {
        let text = lab.run(&format!("ethtool -S {UPLINK}"));
        let sum = |ending: &str| {
            let counts = text.lines().filter_map(|line| line.trim().split_once(": "));
            let named = counts.filter(|(name, _)| name.ends_with(ending));
            let numbers: Vec<u64> = named.map(|(_, count)| count.parse().unwrap()).collect();
            assert!(!numbers.is_empty(), "no {ending} in {text}");
            numbers.iter().sum()
        };
        Self {
            sent: sum("xdp_tx"),
            taken: sum("xdp_redirects"),
        }
    }

    fn since(self, before: &Self) -> Self {
        Self {
            sent: self.sent - before.sent,
            taken: self.taken - before.taken,
        }
    }
}

/// The last pool of the data path goes, while its uplink stays.
fn assert_unloading_leaves_nothing(lab: &Lab, sandbox: &Sandbox) {
    let programs = || lab.run("bpftool net");
    let of_uplink = |programs: &str| programs.lines().any(|line| line.contains(UPLINK));
    let before = programs();
    assert!(of_uplink(&before) && before.contains(&*sandbox.slot.host_interface));
    let slot = std::slice::from_ref(&sandbox.slot);
    for result in sandbox.network.tear_down(slot) {
        result.unwrap();
    }
    sandbox.network.remove_pool(&sandbox.plan).unwrap();
    let after = programs();
    assert!(!of_uplink(&after), "{after}");
    let left = lab.run("ip -d link");
    assert!(left.contains(UPLINK) && !left.contains("xdp"), "{left}");
    assert!(!left.contains(": sw"), "{left}");
    let known = "bpftool -j map dump pinned $(find /sys/fs/bpf/sandwire -name xdp_nics)";
    assert_eq!(command::shell(known).unwrap().trim(), "[]");
    let pinned = lab.run("find /sys/fs/bpf/sandwire -path *links*");
    assert!(
        !pinned.contains("xdp-") && !pinned.contains("uplink-"),
        "{pinned}"
    );
}

/// What a VMM with offloads sends may lack its checksum, or be many packets in one.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn packets_of_a_tap_with_offloads_are_left_to_tc_and_the_reason_is_told() {
    lab::run(|lab| {
        let _server = attach_server(lab);
        let sandbox = Sandbox::start();
        let opened = sandbox.network.open_taps(&sandbox.slot).unwrap();
        let reason = sandbox.note().unwrap();
        assert!(reason.starts_with("ebpf instead of xdp: "), "{reason}");
        assert!(reason.contains("virtio-net headers"), "{reason}");
        let known = GuestNetwork::default();
        let datagram = frame::udp(
            known.mac,
            GATEWAY_MAC,
            SocketAddr::new(known.ipv4.0.into(), 5000),
            SocketAddr::new(SERVER4.into(), 5000),
            &[7; 100],
        );
        // Behind a header that says nothing.
        let packet = [vec![0; VNET_HEADER], datagram].concat();
        let mut tap = File::from(opened.into_iter().next().unwrap());
        let deadline = Instant::now() + PATIENCE;
        while tap.write(&packet).is_err() {
            assert!(Instant::now() < deadline, "the TAP takes no frame");
            std::thread::sleep(Duration::from_millis(20));
        }
        let passed = sandbox.measure(|| {
            for _ in 0..100 {
                assert_eq!(tap.write(&packet).unwrap(), packet.len());
            }
        });
        assert_eq!((passed.egress, passed.egress_by_tc), (100, 100));
        drop(tap);
        assert_unloading_leaves_nothing(lab, &sandbox);
    });
}

/// XDP would come before the programs that are to be first.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn uplinks_where_others_come_first_are_left_to_tc_and_the_reason_is_told() {
    lab::run(|lab| {
        let server = attach_server(lab);
        let mut settings = Settings::new(INSTANCE);
        settings.ebpf.order = Order::Last;
        let sandbox = Sandbox::start_with(settings);
        let other = OtherProgram::attach(lab.folder(), UPLINK, Place::TcxFirst).unwrap();
        let tap = &sandbox.slot.nics[0].tap;
        let guest = FakeGuest::attach("/proc/self/ns/net".as_ref(), tap).unwrap();
        for address in SERVER {
            guest.ping(address, PATIENCE).unwrap();
        }
        let reason = sandbox.note().unwrap();
        assert!(reason.contains("uplink_order"), "{reason}");
        let before = other.packets().unwrap();
        let passed = sandbox.measure(|| call(&guest, SERVER, ECHO_PORT));
        assert!(passed.ingress_by_tc >= passed.ingress, "{passed:?}");
        let seen = other.packets().unwrap() - before;
        assert!(seen >= passed.ingress, "{seen}: {passed:?}");
        server.detach().unwrap();
    });
}

/// The kernel's number of the link by which XDP is on the uplink: another one is that of a program that was taken off and
/// put on again.
fn xdp_link(lab: &Lab) -> u64 {
    let shown = lab.shell("bpftool -j link show pinned $(find /sys/fs/bpf/sandwire -name 'xdp-*')");
    let link: Value = serde_json::from_str(&shown).unwrap();
    let shown = lab.run(&format!("ip link show {UPLINK}"));
    assert!(shown.contains("xdp"), "{shown}");
    link["id"].as_u64().unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_start_leaves_xdp_on_the_uplink_whatever_pool_it_takes_up_first() {
    lab::run(|lab| {
        let _server = attach_server(lab);
        let start = || {
            let settings = service::Settings {
                instance: INSTANCE.parse().unwrap(),
                state_dir: lab.folder().join("state"),
                builders: 1,
                audit_interval: PATIENCE,
            };
            let network = KernelNetwork::open(INSTANCE).unwrap();
            Slots::open(settings, Arc::new(network), Arc::new(SystemClock)).unwrap()
        };
        let slots = start();
        for plan in [earlier_pool(), xdp_pool()] {
            slots.create_pool(&plan.spec).unwrap();
        }
        let lease = acquire(&slots, r#"{"pool":"web","name":"one"}"#);
        let guest = FakeGuest::attach("/proc/self/ns/net".as_ref(), &lease.nics[0].tap).unwrap();
        for address in SERVER {
            guest.ping(address, PATIENCE).unwrap();
        }
        let before = xdp_link(lab);
        let has_started = AtomicBool::new(false);
        let slots = std::thread::scope(|scope| {
            scope.spawn(|| {
                let server = SocketAddr::new(SERVER4.into(), ECHO_PORT);
                while !has_started.load(Ordering::Relaxed) {
                    // Nobody sends it again if it is lost.
                    guest.exchange_udp(server, b"echo", PATIENCE).unwrap();
                }
            });
            drop(slots);
            let slots = start();
            has_started.store(true, Ordering::Relaxed);
            slots
        });
        assert_eq!(xdp_link(lab), before);
        let health = slots.health();
        assert!(health.problems.is_empty(), "{health:?}");
    });
}

fn acquire(slots: &Slots, request: &str) -> Lease {
    let root = Caller {
        uid: 0,
        gid: 0,
        privileged: true,
    };
    let request: AcquireLease = serde_json::from_str(request).unwrap();
    let deadline = Instant::now() + PATIENCE;
    loop {
        match slots.acquire(root, &request) {
            Ok(acquired) => return acquired.lease,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Its sandboxes run on all the same.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_pool_that_the_host_refuses_keeps_xdp_on_the_uplink() {
    lab::run(|lab| {
        let _server = attach_server(lab);
        let sandbox = Sandbox::start();
        let (earlier, plan) = (earlier_pool(), &sandbox.plan);
        sandbox.network.add_pool(&earlier).unwrap();
        let before = xdp_link(lab);

        // Part of the pool's addresses.
        let foreign = format!("10.64.0.128/25 dev {UPLINK}");
        lab.run(&format!("ip route add {foreign}"));
        let after = KernelNetwork::open(INSTANCE).unwrap();
        after.expect_pools(&[&earlier, plan]);
        after.take_up_pool(&earlier, None).unwrap();
        let refusal = after.take_up_pool(plan, None).unwrap_err().to_string();
        assert!(refusal.contains("10.64.0.128/25"), "{refusal}");
        after.switch_over().unwrap();
        let pools = [earlier.spec.name.clone(), plan.spec.name.clone()];
        assert_eq!(after.inspect_host(&pools[..1]), []);
        assert_eq!(xdp_link(lab), before);

        lab.run(&format!("ip route delete {foreign}"));
        after.take_up_pool(plan, None).unwrap();
        assert_eq!(after.inspect_host(&pools), []);
        assert_eq!(xdp_link(lab), before);
        after.remove_pool(&earlier).unwrap();
    });
}

/// What XDP sends where nobody takes it is lost.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_uplink_that_comes_to_take_frames_or_ceases_to_is_followed() {
    lab::run(|lab| {
        lab.shell(&format!(
            "ip link add {UPLINK} type veth peer name far9
             ip link set {UPLINK} up; ip link set far9 up
             ip address add {}/24 dev {UPLINK}; ip route add default via {SERVER4} dev {UPLINK}",
            HOST[0]
        ));
        let sandbox = Sandbox::start();
        let pools = [sandbox.plan.spec.name.clone()];
        let has_xdp = || {
            assert_eq!(sandbox.network.inspect_host(&pools), []);
            lab.run(&format!("ip link show {UPLINK}")).contains("xdp")
        };
        assert!(!has_xdp());
        lab.run("ethtool -K far9 gro on");
        assert!(has_xdp());
        lab.run("ethtool -K far9 gro off");
        assert!(!has_xdp());
    });
}

/// Bytes of `struct virtio_net_hdr` before each frame of a TAP that nobody has told otherwise.
const VNET_HEADER: usize = 10;
