//! Super-packets of TCP that are longer than an IP header can say ("BIG TCP") pass like others.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

#[path = "children/mod.rs"]
mod children;
#[path = "ebpf/mod.rs"]
mod ebpf;
#[path = "forward/mod.rs"]
mod forward;
#[path = "protocols/mod.rs"]
mod protocols;

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use ebpf::{HERE, StackWatch, World, addresses_of, pool, wait_until};
use forward::two_hosts;
use protocols::{BULK, Between, Place, assert_pass};
use sandwire_testlab::{
    command,
    guest::kernel::Series,
    host::{BEYOND_IPV4, BEYOND_IPV6},
    lab::{self, Lab},
    namespace::{Namespace, command_in},
    sandwire::{self, Lease},
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

fn together() -> Value {
    json!({"uplink": "route", "group": "together", "clone_to_clone": true})
}

/// Two containers, and red's addresses. Nobody but their own host ends keeps packets short.
fn containers(lab: &Lab, world: &World) -> ([Namespace; 2], Vec<String>) {
    let mut spec = pool("boxes", "container", 0, 2, &together());
    spec["device"] = json!("veth");
    world.daemon.create_pool(&spec).unwrap();
    world.route_back(0);
    let spaces = ["blue", "red"].map(|name| lab.namespace(name));
    let leases = ["blue", "red"].map(|name| {
        let line = format!("acquire boxes {name} --netns {name}");
        world.daemon.json(&line).unwrap()
    });
    for space in &spaces {
        allow(&space.path(), &["eth0"]);
    }
    allow_uplink(world);
    (spaces, addresses_of(&leases[1]))
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

    /// Whether one has come.
    fn has_seen(mut self) -> bool {
        let has_ended = self.0.try_wait().unwrap().is_some();
        let _ended = self.0.kill();
        let _status = self.0.wait();
        has_ended
    }
}

/// Much data arrives, in packets that are longer than headers can say.
#[track_caller]
fn assert_long(caller: &Place, server: &Place, address: &str) {
    let watch = Watch::start(&server.netns);
    assert_pass(&[BULK], &[Between(caller, server, address)]);
    assert!(watch.has_seen(), "{address}: all packets were short");
}

fn assert_no_drops(world: &World, names: &[&str]) {
    for name in names {
        let path = format!("/v1/leases/{name}");
        let lease = world.daemon.call("GET", &path, None).unwrap();
        let drops = lease["traffic"]["drops"].as_object().unwrap();
        let all_known = drops.keys().all(|reason| reason == "link_chatter");
        assert!(all_known, "{name}: {drops:?}");
    }
}

/// The second of two sandboxes, with these addresses, has long packets of the first one and exchanges them with the world beyond,
/// in these families; which the host's own stack doesn't see.
fn pass_between(world: &World, spaces: &[Namespace; 2], addresses: &[String], families: &[usize]) {
    let watch = StackWatch::start();
    let [blue, red] = spaces
        .each_ref()
        .map(|space| Place::namespace(&space.path()));
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
        let (spaces, addresses) = containers(lab, &world);
        pass_between(&world, &spaces, &addresses, &[0, 1]);
    });
}

/// It has such packets in IPv6 alone.
#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn long_packets_pass_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, DEADLINE, |lab| {
        let world = World::without_pools(lab);
        let (spaces, addresses) = containers(lab, &world);
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
        let slots = pool("slots", "netns", 1, 1, &together());
        world.daemon.create_pool(&slots).unwrap();
        world.route_back(1);
        let process = world.daemon.json("acquire slots process --process");
        let process = Lease::read(&process.unwrap()).unwrap();
        let (spaces, addresses) = containers(lab, &world);
        let mut impair = world.daemon.command("impair");
        impair.args(["blue", "--egress", "delay 1ms", "--ingress", "delay 1ms"]);
        command::output_of(&mut impair).unwrap();
        let beyond = Place::namespace(&world.beyond.path());
        let [blue, red] = spaces
            .each_ref()
            .map(|space| Place::namespace(&space.path()));
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
        let [a, b] = hosts.each_ref().map(|host| Place::namespace(&host.path()));
        for edge in ["raw", "ring", "xdp"] {
            let forwarder = Command::new(sandwire::executable().unwrap())
                .args(["forward", "va", "vb", "--edge", edge, "--ab", "delay 1ms"])
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let is_connected = || hosts[0].run("ping -c 1 -W 1 10.9.0.2").is_ok();
            wait_until(edge, DEADLINE, is_connected);
            let between = ["10.9.0.2", "fd09::2"].map(|own| Between(&a, &b, own));
            assert_all_arrives(&between);
            lab.run(&format!("kill -INT {}", forwarder.id()));
            let ended = forwarder.wait_with_output().unwrap();
            let report = String::from_utf8(ended.stdout).unwrap();
            assert!(report.contains("dropped: none"), "{edge}: {report}");
            assert!(!report.contains("receive_drop"), "{edge}: {report}");
        }
    });
}
