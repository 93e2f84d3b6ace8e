//! Real guests on the product's slots: many with one configuration, and clones of one snapshot.
//!
//! Whatever a guest does here it does by itself; nothing is run in it to make its network work.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

mod streams;

use std::{
    fs::{self, File},
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{
    command,
    fake_guest::GuestNetwork,
    guest::{kernel::Kernel, qemu::Recipe, user_mode_linux::UserModeLinux, web::GuestWeb},
    host::{BEYOND_IPV4, BEYOND_IPV6, Beyond, HOST_IPV4, HOST_IPV6, HTTP_PORT, serve_tcp},
    lab::{self, Lab},
    namespace,
    sandwire::{self, Daemon, Lease},
    traffic::{BLOCK, Receiver},
};
use serde_json::Value;
use streams::{STREAM_PORT, checksum_errors, send_from_guest, send_to_guest, super_packets};

const SECOND: Duration = Duration::from_secs(1);

/// A daemon on a host with an uplink, and guests in slots of its pool.
struct World {
    daemon: Daemon,
    leases: Vec<Lease>,
    guests: Vec<UserModeLinux>,
    _beyond: Beyond,
}

impl World {
    /// Starts user-mode Linux guests, all with the same initramfs and arguments but for file names.
    fn with_guests(lab: &Lab, count: usize) -> Self {
        let beyond = Beyond::attach().unwrap();
        let daemon = start_daemon(lab, count, "");
        let network = GuestNetwork::default();
        let initramfs = UserModeLinux::initramfs(lab.folder(), &network).unwrap();
        let leases: Vec<Lease> = (0..count)
            .map(|number| daemon.acquire("web", &format!("guest-{number}")).unwrap())
            .collect();
        let start = |lease: &Lease| {
            let folder = lab.folder();
            UserModeLinux::start(&lease.path, &lease.tap, folder, &lease.name, &initramfs).unwrap()
        };
        let mut guests: Vec<_> = leases.iter().map(start).collect();
        for guest in &mut guests {
            guest.wait_ready(90 * SECOND).unwrap();
        }
        Self {
            daemon,
            leases,
            guests,
            _beyond: beyond,
        }
    }
}

fn start_daemon(lab: &Lab, slots: usize, flags: &str) -> Daemon {
    let executable = sandwire::executable().unwrap();
    let folder = lab.folder().join("daemon");
    fs::create_dir(&folder).unwrap();
    let daemon = Daemon::start(&executable, &folder, "instance = \"guests\"\n").unwrap();
    daemon
        .json(&format!(
            "pool create web {flags} --size {slots} --ipv4 10.64.0.0/24 --ipv6 fd00:c10e::/64"
        ))
        .unwrap();
    daemon
        .wait_pool("web", u64::try_from(slots).unwrap(), 30 * SECOND)
        .unwrap();
    daemon
}

/// The very first packet to an address must be answered: exactly one is sent.
fn assert_first_packet_answered(address: IpAddr) {
    command::run(&format!("ping -n -c 1 -W 10 {address}")).unwrap();
}

/// Every guest serves at its own addresses, keeps a value of its own, and calls out.
fn assert_separate(leases: &[Lease]) {
    for lease in leases {
        GuestWeb::at(lease.ipv4).store(&lease.name).unwrap();
    }
    for lease in leases {
        assert_eq!(GuestWeb::at(lease.ipv6).value().unwrap(), lease.name);
        for (server, host) in [
            (IpAddr::from(BEYOND_IPV4), IpAddr::from(HOST_IPV4)),
            (BEYOND_IPV6.into(), HOST_IPV6.into()),
        ] {
            let web = GuestWeb::at(lease.ipv4);
            assert!(web.ping(server).unwrap(), "{} ping {server}", lease.name);
            let page = web.fetch(SocketAddr::new(server, HTTP_PORT)).unwrap();
            assert_eq!(page, format!("beyond: hello {host}\n"));
        }
    }
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn eight_guests_with_one_configuration_are_told_apart_by_their_clone_addresses() {
    lab::run_within(200 * SECOND, |lab| {
        let world = World::with_guests(lab, 8);
        for lease in &world.leases {
            assert_first_packet_answered(lease.ipv4);
            assert_first_packet_answered(lease.ipv6);
        }
        assert_separate(&world.leases);

        // By default no guest reaches another one or a service of the host.
        serve_tcp(8080, sandwire_testlab::host::answer_http).unwrap();
        let web = GuestWeb::at(world.leases[0].ipv4);
        for (neighbour, host) in [
            (world.leases[1].ipv4, IpAddr::from(HOST_IPV4)),
            (world.leases[1].ipv6, HOST_IPV6.into()),
        ] {
            assert!(!web.ping(neighbour).unwrap(), "reached {neighbour}");
            let page = web
                .fetch_within(SocketAddr::new(neighbour, 80), 5 * SECOND)
                .unwrap();
            assert!(
                !page.contains("guest-1"),
                "fetched from {neighbour}: {page}"
            );
            let page = web
                .fetch_within(SocketAddr::new(host, 8080), 5 * SECOND)
                .unwrap();
            assert!(!page.contains("hello"), "fetched from {host}: {page}");
        }
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_killed_daemon_costs_running_guests_no_packet() {
    lab::run_within(150 * SECOND, |lab| {
        let mut world = World::with_guests(lab, 2);
        let before = sorted_leases(&world.daemon);
        // 6 s at 100 packets a second; the daemon is away from the 2nd to the 4th.
        let pings: Vec<_> = world
            .leases
            .iter()
            .flat_map(|lease| [lease.ipv4, lease.ipv6])
            .map(|address| {
                let line = format!("ping -n -q -i 0.01 -c 600 -W 5 {address}");
                thread::spawn(move || command::run(&line).unwrap())
            })
            .collect();
        thread::sleep(SECOND);
        world.daemon.kill().unwrap();
        thread::sleep(2 * SECOND);
        world.daemon.restart().unwrap();
        assert_eq!(sorted_leases(&world.daemon), before);
        for ping in pings {
            let text = ping.join().unwrap();
            assert!(
                text.contains("600 packets transmitted, 600 received"),
                "{text}"
            );
        }
        assert_separate(&world.leases);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_guest_that_still_runs_keeps_its_slot_after_release() {
    lab::run_within(150 * SECOND, |lab| {
        let mut world = World::with_guests(lab, 1);
        let lease = world.leases[0].clone();
        let answer = world.daemon.json("release guest-0").unwrap();
        let released = &answer["released"][0];
        assert_eq!(released["outcome"], "held", "{answer}");
        assert!(
            released["held_by"].to_string().contains("linux"),
            "{answer}"
        );
        let next = world.daemon.acquire("web", "next").unwrap();
        assert_ne!(next.path, lease.path, "the slot was leased twice");

        world.guests[0].vmm().kill().unwrap();
        wait_until("the slot is torn down", || !lease.path.exists());

        // Released with nobody on it: a VMM that is in the namespace, but late, finds no TAP.
        let namespace = File::open(&next.path).unwrap();
        world.daemon.json("release next").unwrap();
        let kept = format!("/proc/{}/fd/{}", std::process::id(), namespace.as_raw_fd());
        let interfaces = namespace::run_in(Path::new(&kept), "ip -o link").unwrap();
        assert!(!interfaces.contains(&next.tap), "{interfaces}");
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn clones_of_one_snapshot_work_from_their_first_packet_on() {
    let kernel = Kernel::fetch().unwrap();
    lab::run_within(600 * SECOND, move |lab| {
        assert_clones_work(lab, &kernel, "");
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn clones_on_host_slots_work_from_their_first_packet_on() {
    let kernel = Kernel::fetch().unwrap();
    lab::run_within(600 * SECOND, move |lab| {
        assert_clones_work(lab, &kernel, "--kind host --data-path ebpf");
    });
}

/// Saves a guest and restores it four times, into slots of a pool with these flags.
fn assert_clones_work(lab: &Lab, kernel: &Kernel, flags: &str) {
    let beyond = Beyond::attach().unwrap();
    let daemon = start_daemon(lab, 4, flags);
    let network = GuestNetwork::default();
    let (folder, script) = (lab.folder(), CALL_OUT);
    let mut recipe = Recipe::prepare_with_traffic(kernel, &network, folder, script).unwrap();
    let original = daemon.acquire("web", "original").unwrap();
    let guest = recipe.boot(&original.path, &original.tap).unwrap();
    let saved = guest.save(&recipe).unwrap();
    daemon.json("release original").unwrap();

    let leases: Vec<Lease> = (0..4)
        .map(|number| daemon.acquire("web", &format!("clone-{number}")).unwrap())
        .collect();
    let clones: Vec<_> = leases
        .iter()
        .map(|lease| saved.restore(&lease.name, &lease.path, &lease.tap).unwrap())
        .collect();
    // Outward: nobody has sent a packet to the last two clones yet, in either family.
    for clone in &clones[2..] {
        wait_until("the clone has called out", || {
            FAMILIES
                .iter()
                .all(|family| first_call(&clone.console(), family).is_some())
        });
        for family in FAMILIES {
            let console = clone.console();
            let first = first_call(&console, family).unwrap();
            assert_eq!(first, "answered", "{console}");
        }
    }
    // Inward, where nobody has sent a packet either.
    for lease in &leases {
        assert_first_packet_answered(lease.ipv4);
        assert_first_packet_answered(lease.ipv6);
    }
    assert_separate(&leases);
    assert_streams_in_super_packets(&beyond, &leases[0]);
}

/// A few MiB each way, by both families, which the driver of these guests can leave uncut: every byte is as it was sent, and
/// nobody has found a wrong checksum.
fn assert_streams_in_super_packets(beyond: &Beyond, lease: &Lease) {
    let host = Path::new("/proc/self/ns/net");
    let blocks = (8 << 20) / BLOCK as u64;
    for (server, address) in [
        (IpAddr::from(BEYOND_IPV4), lease.ipv4),
        (BEYOND_IPV6.into(), lease.ipv6),
    ] {
        let out = super_packets(&beyond.path(), "eth0", 5, || {
            let receiver = beyond.inside(|| Receiver::listen(STREAM_PORT)).unwrap();
            let (sent, received) = send_from_guest(lease, receiver, server, blocks);
            assert_eq!(sent, received.to_string(), "to {server}");
        });
        assert_eq!(out, 5, "no super-packets to {server}");
        let into = super_packets(&lease.path, &lease.tap, 5, || {
            let (received, sent) = send_to_guest(lease, host, address, blocks);
            assert_eq!(received, sent.to_string(), "to {address}");
        });
        assert_eq!(into, 5, "no super-packets to {address}");
    }
    for namespace in [host, &beyond.path()] {
        assert_eq!(checksum_errors(namespace), 0, "{}", namespace.display());
    }
    assert_eq!(checksum_errors_inside(lease), 0);
}

/// Packets with a wrong checksum that a guest has received.
fn checksum_errors_inside(lease: &Lease) -> u64 {
    let script = "cat /proc/net/snmp /proc/net/netstat /proc/net/snmp6";
    let all = GuestWeb::at(lease.ipv4).run(script).unwrap();
    let lines: Vec<Vec<&str>> = all
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    // Names above their numbers, but for IPv6, where each has a line.
    let pairs = lines
        .windows(2)
        .filter(|pair| pair[0].first() == pair[1].first());
    let above = pairs.flat_map(|pair| pair[0].iter().zip(&pair[1]));
    let beside = lines
        .iter()
        .filter(|line| line.len() == 2)
        .map(|line| (&line[0], &line[1]));
    let found: Vec<u64> = above
        .chain(beside)
        .filter(|(name, _)| name.contains("CsumErrors"))
        .map(|(_, value)| value.parse().unwrap())
        .collect();
    assert!(found.len() >= 4, "{all}");
    found.iter().sum()
}

/// Has the guest ping beyond the host once a second, one packet each time, and print what came of it.
const CALL_OUT: &str = "\
call_out() {
  while :; do
    number=$((number + 1))
    echo \"start $1 $number\"
    ping -c 1 -W 5 $2 > /dev/null 2>&1 && echo \"answered $1 $number\" || echo \"silent $1 $number\"
    sleep 1
  done
}
call_out v4 203.0.113.2 &
call_out v6 2001:db8:1::2 &";

const FAMILIES: [&str; 2] = ["v4", "v6"];

/// What came of the first call that a clone began itself, if it is over. One that the original had
/// begun when it was saved doesn't count: its packet was another's.
fn first_call<'a>(console: &'a str, family: &str) -> Option<&'a str> {
    let started = format!("start {family} ");
    let mut lines = console.lines().map(str::trim);
    let number = lines
        .find_map(|line| line.strip_prefix(&started))?
        .to_owned();
    let ending = format!(" {family} {number}");
    lines.find_map(|line| line.strip_suffix(&ending))
}

fn sorted_leases(daemon: &Daemon) -> Vec<Value> {
    let mut leases = daemon.json("list").unwrap().as_array().unwrap().clone();
    leases.sort_by_key(|lease| lease["name"].to_string());
    leases
}

#[track_caller]
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + 30 * SECOND;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
