//! What programs of every day speak arrives as it was sent, whatever of sandwire is between them.

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
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use containers::{assert_no_drops, places, together, two};
use ebpf::{HERE, World, addresses_of, pool};
use forward::{by_every_edge, two_hosts};
use protocols::{Between, COMMON, Place, UDP_LITE, all, assert_pass};
use sandwire_testlab::{
    cgroup::Cgroup,
    guest::kernel::Series,
    host::{BEYOND_IPV4, BEYOND_IPV6},
    lab::{self, Lab},
    sandwire::{self, Lease},
};
use serde_json::json;

const DEADLINE: Duration = Duration::from_secs(900);

/// Between two sandboxes, the second of which has these addresses, and between that and the world beyond.
fn assert_all_pass(world: &World, sandboxes: &[Place; 2], addresses: &[String]) {
    let [blue, red] = sandboxes;
    let beyond = Place::namespace(&world.beyond.path());
    let outside = [BEYOND_IPV4.to_string(), BEYOND_IPV6.to_string()];
    let mut between = Vec::new();
    for (inside, outside) in addresses.iter().zip(&outside) {
        between.push(Between(blue, red, inside));
        between.push(Between(red, &beyond, outside));
        between.push(Between(&beyond, red, inside));
    }
    assert_pass(&all(), &between);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn between_containers() {
    lab::run_within(DEADLINE, |lab| {
        pass_between_containers(lab, &World::without_pools(lab));
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn between_containers_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, DEADLINE, |lab| {
        pass_between_containers(lab, &World::without_pools(lab));
    });
}

fn pass_between_containers(lab: &Lab, world: &World) {
    let (spaces, addresses) = two(lab, world, &together());
    assert_all_pass(world, &places(&spaces), &addresses);
    assert_no_drops(world, &["blue", "red"]);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn between_containers_whose_networks_are_impaired() {
    lab::run_within(DEADLINE, |lab| {
        let folder = lab.folder().join("impair");
        let world = World::with_config(lab, &format!("[impair]\nfolder = {folder:?}"));
        let (spaces, addresses) = two(lab, &world, &together());
        for name in ["blue", "red"] {
            let mut impair = world.daemon.command("impair");
            impair.args([name, "--egress", "delay 1ms", "--ingress", "delay 1ms"]);
            let said = impair.output().unwrap();
            assert!(said.status.success(), "{said:?}");
        }
        assert_all_pass(&world, &places(&spaces), &addresses);
        assert_no_drops(&world, &["blue", "red"]);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_comes_in_is_joined_in_lists() {
    lab::run_within(DEADLINE, |lab| {
        pass_in_lists(lab, &World::without_pools(lab));
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn what_comes_in_is_joined_in_lists_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, DEADLINE, |lab| {
        pass_in_lists(lab, &World::without_pools(lab));
    });
}

/// Datagrams that come one by one are joined as they come in, each with its headers (`rx-gro-list`), which leaves fewer bytes
/// in a packet's first part than there are headers of TCP.
fn pass_in_lists(lab: &Lab, world: &World) {
    let (spaces, addresses) = two(lab, world, &together());
    world
        .beyond
        .run("ethtool -K eth0 tx-udp-segmentation off")
        .unwrap();
    lab.run("ethtool -K up0 gro on");
    lab.run("ethtool -K up0 rx-gro-list on");
    let [_, red] = places(&spaces);
    let beyond = Place::namespace(&world.beyond.path());
    let between = addresses.iter().map(|own| Between(&beyond, &red, own));
    let protocols = ["udp-segments", "udp-segments-as-one"];
    assert_pass(&protocols, &between.collect::<Vec<_>>());
    assert_no_drops(world, &["blue", "red"]);
    let lease = world.daemon.call("GET", "/v1/leases/red", None).unwrap();
    let [packets, segments] =
        ["packets", "segments"].map(|of| lease["traffic"]["ingress"][of].as_u64().unwrap());
    assert!(
        packets * 4 < segments,
        "{packets} packets of {segments} segments"
    );
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn between_children_of_the_uplink() {
    lab::run_within(DEADLINE, |lab| {
        let (world, spaces, leases) = children::with_two(lab, "macvlan", &together());
        assert_all_pass(&world, &places(&spaces), &addresses_of(&leases[1]));
        assert_no_drops(&world, &["blue", "red"]);
    });
}

/// As `sandwire run` starts them.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn between_processes_in_slots() {
    lab::run_within(DEADLINE, |lab| {
        let world = World::without_pools(lab);
        for (number, data_path) in ["ebpf", "nft"].into_iter().enumerate() {
            let mut spec = pool(data_path, "netns", number, 2, &together());
            spec["data_path"] = json!(data_path);
            world.daemon.create_pool(&spec).unwrap();
            world.route_back(number);
        }
        let [blue, red] = ["blue", "red"].map(|name| process(&world, "ebpf", name));
        let addresses = [red.ipv4, red.ipv6].map(|own| own.to_string());
        let places = [&blue, &red].map(|lease| Place::namespace(&lease.path));
        assert_all_pass(&world, &places, &addresses);
        assert_no_drops(&world, &["blue", "red"]);
        // With this data path they can only call.
        let caller = process(&world, "nft", "green");
        let (caller, beyond) = (caller.path, world.beyond.path());
        let [caller, beyond] = [caller, beyond].map(|path| Place::namespace(&path));
        let outside = [BEYOND_IPV4.to_string(), BEYOND_IPV6.to_string()];
        let between = outside.each_ref().map(|own| Between(&caller, &beyond, own));
        // The kernel's connection tracking takes what this is of, partial checksums, for invalid.
        let mut protocols = all();
        protocols.retain(|protocol| *protocol != UDP_LITE);
        assert_pass(&protocols, &between);
    });
}

/// A lease for a process, of the pool with this data path.
fn process(world: &World, data_path: &str, name: &str) -> Lease {
    let line = format!("acquire {data_path} {name} --process");
    Lease::read(&world.daemon.json(&line).unwrap()).unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn between_identities() {
    lab::run_within(DEADLINE, |_| {
        let executable = sandwire::executable().unwrap();
        let policy = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(policy.path(), "clone_to_clone = true\ngroup = \"same\"\n").unwrap();
        let cgroups = [1, 2].map(|number| {
            let cgroup = Cgroup::create().unwrap();
            let added = Command::new(&executable)
                .args(["identity", "add", cgroup.path(), "--policy"])
                .arg(policy.path())
                .args(["--address", &format!("10.77.0.{number}")])
                .args(["--address", &format!("fd77::{number}")])
                .stdout(Stdio::null())
                .status();
            assert!(added.unwrap().success());
            cgroup
        });
        let [blue, red] = cgroups.each_ref().map(|cgroup| Place {
            cgroup: Some(cgroup.path().to_owned()),
            ..Place::namespace(Path::new(HERE))
        });
        let between = ["10.77.0.2", "fd77::2"].map(|own| Between(&blue, &red, own));
        assert_pass(&COMMON, &between);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn through_the_forwarder_s_every_edge() {
    lab::run_within(DEADLINE, |lab| {
        let hosts = two_hosts(lab);
        let [a, b] = places(&hosts);
        let between = ["10.9.0.2", "fd09::2"].map(|own| Between(&a, &b, own));
        by_every_edge(lab, &hosts, || assert_pass(&all(), &between), |_, _| {});
    });
}
