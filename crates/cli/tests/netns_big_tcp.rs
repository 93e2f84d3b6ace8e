//! Super-packets of TCP that are longer than an IP header can say ("BIG TCP") pass like others.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

#[path = "children/mod.rs"]
mod children;
#[path = "containers/mod.rs"]
mod containers;
#[path = "ebpf/mod.rs"]
mod ebpf;
#[path = "forward/mod.rs"]
mod forward;
#[path = "protocols/mod.rs"]
mod protocols;

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Stdio},
    time::Duration,
};

use containers::{assert_no_drops, places, together};
use ebpf::{HERE, SECOND, StackWatch, World, addresses_of, pool, wait_until};
use forward::{by_every_edge, two_hosts};
use protocols::{BULK, Between, Place, assert_pass};
use sandwire_testlab::{
    command,
    guest::kernel::Series,
    host::{BEYOND_IPV4, BEYOND_IPV6},
    lab::{self, Lab},
    namespace::{Namespace, command_in},
    sandwire::Lease,
};
use serde_json::{Value, json};

const ALLOW: &str = include_str!("big_tcp/allow.py");
const DEADLINE: Duration = Duration::from_secs(300);
/// Bytes of a frame that no header can say the length of, with room for what Linux counts besides.
const LONG: u32 = 66_000;

/// Lets interfaces of a namespace have packets so long.
fn allow(netns: &Path, interfaces: &[&str]) {
    let mut python = command_in(netns, "python3");
    python.args(["-c", ALLOW]).args(interfaces);
    command::output_of(&mut python).unwrap();
}

/// Two containers, and red's addresses. Nobody but their own host ends keeps packets short.
fn long_containers(lab: &Lab, world: &World, policy: &Value) -> ([Namespace; 2], Vec<String>) {
    let (spaces, addresses) = containers::two(lab, world, policy);
    for space in &spaces {
        allow(&space.path(), &["eth0"]);
    }
    allow_uplink(world);
    (spaces, addresses)
}

fn allow_uplink(world: &World) {
    allow(Path::new(HERE), &["up0"]);
    allow(&world.beyond.path(), &["eth0"]);
}

/// Waits for a frame of so many bytes at `eth0` of a namespace.
struct Watch(Child);

impl Watch {
    fn start(netns: &Path) -> Self {
        let mut watch = command_in(netns, "tcpdump")
            .args(["-p", "-n", "-i", "eth0", "-c", "1", "greater"])
            .arg(LONG.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let errors = BufReader::new(watch.stderr.take().unwrap());
        let mut lines = errors.lines().map_while(Result::ok);
        assert!(lines.any(|line| line.starts_with("listening on")));
        Self(watch)
    }

    /// Wants one to have come.
    #[track_caller]
    fn assert_seen(mut self, what: &str) {
        wait_until(what, SECOND * 20, || self.0.try_wait().unwrap().is_some());
    }
}

/// Much data arrives, in packets that are longer than headers can say.
#[track_caller]
fn assert_long(caller: &Place, server: &Place, address: &str) {
    let watch = Watch::start(&server.netns);
    assert_pass(&[BULK], &[Between(caller, server, address)]);
    watch.assert_seen(&format!("a long packet has come at {address}"));
}

/// The second of two sandboxes, with these addresses, has long packets of the first one and exchanges them with the world beyond,
/// in these families; which the host's own stack doesn't see.
fn pass_between(world: &World, spaces: &[Namespace; 2], addresses: &[String], families: &[usize]) {
    let watch = StackWatch::start();
    let [blue, red] = places(spaces);
    let beyond = Place::namespace(&world.beyond.path());
    let outside = [BEYOND_IPV4.to_string(), BEYOND_IPV6.to_string()];
    for family in families {
        assert_long(&blue, &red, &addresses[*family]);
        assert_long(&red, &beyond, &outside[*family]);
        assert_long(&beyond, &red, &addresses[*family]);
    }
    assert_no_drops(world, &["blue", "red"]);
    assert_eq!(watch.packets(), 0);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn long_packets_pass_between_containers_and_the_world() {
    lab::run_within(DEADLINE, |lab| {
        let world = World::without_pools(lab);
        let (spaces, addresses) = long_containers(lab, &world, &together());
        pass_between(&world, &spaces, &addresses, &[0, 1]);
    });
}

/// It has such packets in IPv6 alone.
#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn long_packets_pass_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, DEADLINE, |lab| {
        let world = World::without_pools(lab);
        let (spaces, addresses) = long_containers(lab, &world, &together());
        pass_between(&world, &spaces, &addresses, &[1]);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn long_packets_pass_between_children_of_the_uplink() {
    lab::run_within(DEADLINE, |lab| {
        let (world, spaces, leases) = children::with_two(lab, "macvlan", &together());
        for space in &spaces {
            allow(&space.path(), &["eth0"]);
        }
        allow_uplink(&world);
        pass_between(&world, &spaces, &addresses_of(&leases[1]), &[0, 1]);
    });
}

/// Much data arrives, in whatever packets.
#[track_caller]
fn assert_all_arrives(between: &[Between<'_>]) {
    assert_pass(&[BULK], between);
}

/// Interfaces that take none so long have them in segments: that of a process in a slot, and the TAPs through which an impaired
/// network goes.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn long_packets_are_cut_for_those_who_have_none() {
    lab::run_within(DEADLINE, |lab| {
        let folder = lab.folder().join("impair");
        let world = World::with_config(lab, &format!("[impair]\nfolder = {folder:?}"));
        // Sandboxes of both pools talk to each other.
        let mut policy = together();
        policy["group"] = json!("both");
        let slots = pool("slots", "netns", 1, 1, &policy);
        world.daemon.create_pool(&slots).unwrap();
        world.route_back(1);
        let process = world.daemon.json("acquire slots process --process");
        let process = Lease::read(&process.unwrap()).unwrap();
        let (spaces, addresses) = long_containers(lab, &world, &policy);
        let mut impair = world.daemon.command("impair");
        impair.args(["blue", "--egress", "delay 1ms", "--ingress", "delay 1ms"]);
        command::output_of(&mut impair).unwrap();
        let beyond = Place::namespace(&world.beyond.path());
        let [blue, red] = places(&spaces);
        let inside = Place::namespace(&process.path);
        let own = [process.ipv4, process.ipv6].map(|own| own.to_string());
        let outside = [BEYOND_IPV4.to_string(), BEYOND_IPV6.to_string()];
        for family in 0..2 {
            assert_all_arrives(&[
                Between(&beyond, &inside, &own[family]),
                Between(&red, &inside, &own[family]),
                Between(&blue, &red, &addresses[family]),
                Between(&blue, &beyond, &outside[family]),
            ]);
        }
        assert_no_drops(&world, &["process", "blue", "red"]);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn long_packets_pass_the_forwarder_s_every_edge() {
    lab::run_within(DEADLINE, |lab| {
        let hosts = two_hosts(lab);
        allow(Path::new(HERE), &["va", "vb"]);
        for host in &hosts {
            allow(&host.path(), &["eth0"]);
        }
        let [a, b] = places(&hosts);
        let between = ["10.9.0.2", "fd09::2"].map(|own| Between(&a, &b, own));
        let look = |edge: &str, report: &str| {
            assert!(report.contains("dropped: none"), "{edge}: {report}");
            assert!(!report.contains("receive_drop"), "{edge}: {report}");
        };
        by_every_edge(lab, &hosts, || assert_all_arrives(&between), look);
    });
}
