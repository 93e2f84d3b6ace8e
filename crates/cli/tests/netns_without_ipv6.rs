//! Hosts without IPv6, by their kernel or by its settings: everything of IPv4 works, and what would need IPv6 is refused with a reason.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

mod ebpf;

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    process::Command,
};

use ebpf::{
    SECOND, World, assert_a_port_is_published, assert_none_lost, assert_sound, prefixes, wait_until,
};
use sandwire_testlab::{
    cgroup::Cgroup,
    command::Process,
    fake_guest::FakeGuest,
    guest::kernel::Series,
    host::{BEYOND_IPV4, HOST_IPV4, WHO_AM_I_PORT},
    lab::{self, Lab},
    namespace::{Namespace, command_in},
    pinger::Pinger,
    sandwire,
};
use serde_json::{Value, json};

/// Name, kind and data path of each pool.
const POOLS: [(&str, &str, &str); 3] = [
    ("netns", "netns", "ebpf"),
    ("host", "host", "ebpf"),
    ("tables", "netns", "nft"),
];

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn sandboxes_and_identities_live_where_the_kernel_has_no_ipv6() {
    lab::run_booted(Series::Linux6_12, "ipv6.disable=1", 900 * SECOND, |lab| {
        assert!(!Path::new("/proc/sys/net/ipv6").exists());
        live_without_ipv6(lab);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn sandboxes_and_identities_live_where_ipv6_is_switched_off() {
    lab::run(|lab| {
        for which in ["all", "default"] {
            lab.run(&format!("sysctl -q net.ipv6.conf.{which}.disable_ipv6=1"));
        }
        live_without_ipv6(lab);
    });
}

/// From the first pool to the last trace.
fn live_without_ipv6(lab: &Lab) {
    let before = lab.snapshot();
    let mut world = World::without_pools(lab);
    let sandboxes: Vec<_> = (0..POOLS.len())
        .map(|number| assert_a_pool_works(&world, number))
        .collect();
    assert_ipv6_is_refused(&world);
    assert_the_doctor_knows(&world);
    assert_containers_work(&world);
    assert_a_port_is_published(&world, "host-one");
    let address = address_of(&sandboxes[1].0);
    let pinger = Pinger::start(&world.beyond.path(), address, SECOND / 50).unwrap();
    world.daemon.kill().unwrap();
    world.daemon.restart().unwrap();
    assert_none_lost(pinger, "while the daemon came back");
    for (lease, _) in &sandboxes {
        let name = lease["name"].as_str().unwrap();
        let found = world.daemon.json(&format!("show {name}")).unwrap();
        assert_eq!(found["defects"], json!([]), "{found}");
    }
    assert_an_identity_works(lab, &world);
    assert_a_pool_is_relayed(lab, &world);
    drop(sandboxes);
    world.daemon.kill().unwrap();
    world.daemon.json("cleanup --instance lab").unwrap();
    drop(world);
    let executable = sandwire::executable().unwrap();
    lab.run(&format!("{} relay clear", executable.display()));
    // The maps of identities stay for the next one.
    lab.run("rm -r /sys/fs/bpf/sandwire-identity");
    lab.run("ip link delete up0");
    lab.assert_unchanged(&before);
}

fn address_of(lease: &Value) -> IpAddr {
    let text = &lease["nics"][0]["ipv4"]["clone_address"];
    text.as_str().unwrap().parse().unwrap()
}

fn spec(number: usize) -> Value {
    let (name, kind, data_path) = POOLS[number];
    let [ipv4, _] = prefixes(number);
    json!({"name": name, "kind": kind, "data_path": data_path, "size": 3, "guest": {"ipv6": ""},
        "addresses": {"plan": "prefix", "ipv4": ipv4}, "policy": {"uplink": "route"}})
}

/// A sandbox of it reaches the world and is reached, and reaches no other. It is left running.
fn assert_a_pool_works(world: &World, number: usize) -> (Value, FakeGuest) {
    let pool = POOLS[number].0;
    world.daemon.create_pool(&spec(number)).unwrap();
    let back = &prefixes(number)[0];
    world.beyond.route_through_host(back).unwrap();
    let acquire = |name: &str| {
        let line = format!("acquire {pool} {pool}-{name}");
        world.daemon.json(&line).unwrap()
    };
    let (lease, other) = (acquire("one"), acquire("two"));
    let guest = attach(&lease);
    let _neighbour = attach(&other);
    let who = SocketAddr::new(BEYOND_IPV4.into(), WHO_AM_I_PORT);
    let seen = guest.exchange_udp(who, b"?", 5 * SECOND).unwrap();
    let address = address_of(&lease);
    assert!(
        String::from_utf8(seen)
            .unwrap()
            .starts_with(&format!("{address}:"))
    );
    let ping = format!("ping -n -q -c 1 -W 5 {address}");
    world.beyond.run(&ping).unwrap();
    guest.ping(address_of(&other), SECOND).unwrap_err();
    guest.ping(HOST_IPV4.into(), SECOND).unwrap_err();
    (lease, guest)
}

fn attach(lease: &Value) -> FakeGuest {
    let netns = lease["netns"].as_str().unwrap_or("/proc/self/ns/net");
    let tap = lease["nics"][0]["tap"].as_str().unwrap();
    FakeGuest::attach(Path::new(netns), tap).unwrap()
}

/// The host says why, and nothing of the pool stays.
fn assert_ipv6_is_refused(world: &World) {
    let [ipv4, ipv6] = prefixes(7);
    for (kind, data_path) in [("netns", "nft"), ("netns", "ebpf"), ("host", "ebpf")] {
        let spec = json!({"name": "both", "kind": kind, "data_path": data_path, "size": 1,
            "addresses": {"plan": "prefix", "ipv4": ipv4, "ipv6": ipv6}});
        let error = world
            .daemon
            .call("POST", "/v1/pools", Some(&spec))
            .unwrap_err();
        let error = format!("{error:#}");
        for part in ["IPv6 of pool both", "guest.ipv6 = "] {
            assert!(error.contains(part), "{kind}, {data_path}: {error}");
        }
        world
            .daemon
            .call("GET", "/v1/pools/both", None)
            .unwrap_err();
    }
}

fn assert_the_doctor_knows(world: &World) {
    let report = world.daemon.json("doctor").unwrap();
    let findings = report["findings"].as_array().unwrap();
    let named = |name: &str| findings.iter().find(|finding| finding["name"] == name);
    assert_eq!(named("IPv6").unwrap()["found"], false);
    assert_eq!(named("programs load").unwrap()["found"], true);
    assert_eq!(named("identities").unwrap()["found"], true);
    assert_eq!(report["works"], true);
}

/// On a pair of its own, and as a child of the uplink.
fn assert_containers_work(world: &World) {
    let [ipv4, _] = prefixes(4);
    world.beyond.route_through_host(&ipv4).unwrap();
    let own = json!({"name": "own", "kind": "container", "size": 1, "guest": {"ipv6": ""},
        "addresses": {"plan": "prefix", "ipv4": ipv4}, "policy": {"uplink": "route"}});
    let lan = json!({"name": "lan", "kind": "container", "size": 1, "guest": {"ipv6": ""},
        "device": "macvlan", "parent": {"interface": "up0"},
        "addresses": {"plan": "prefix", "ipv4": "203.0.113.64/26"}, "policy": {"uplink": "route"}});
    for spec in [own, lan] {
        world.daemon.create_pool(&spec).unwrap();
        let name = spec["name"].as_str().unwrap();
        let space = Namespace::create(name).unwrap();
        let line = format!("acquire {name} in-{name} --netns {name}");
        world.daemon.json(&line).unwrap();
        let ping = format!("ping -n -q -c 1 -W 5 {BEYOND_IPV4}");
        space.run(&ping).unwrap();
        assert_sound(world, &format!("in-{name}"));
        world.daemon.json(&format!("release in-{name}")).unwrap();
    }
}

/// What a sandbox sends to one port beyond comes from the relay's peer there, which is beyond too.
fn assert_a_pool_is_relayed(lab: &Lab, world: &World) {
    let folder = lab.folder().join("relay");
    let path = folder.display();
    let executable = sandwire::executable().unwrap();
    lab.run(&format!(
        "{} relay keys {path} host.example peer.example",
        executable.display()
    ));
    let common = |name: &str| {
        format!(
            "folder = \"{path}/{name}\"\n[tls]\ncertificate = \"{path}/{name}.example.pem\"\n\
             key = \"{path}/{name}.example.key\"\nauthorities = \"{path}/authority.pem\"\n"
        )
    };
    let host = format!(
        "{}[egress]\ndaemon = \"{}\"\n[[peer]]\nname = \"beyond\"\naddress = \"{BEYOND_IPV4}:4433\"\nserver_name = \"peer.example\"\n\
         [[redirect]]\nfrom = [\"{}\"]\nto = [\"198.51.100.7/32\"]\nvia = \"beyond\"\n",
        common("host"),
        world.daemon.socket().display(),
        prefixes(1)[0]
    );
    let peer = format!(
        "{}[deliver]\nlisten = [\"{BEYOND_IPV4}:4433\"]\nclients = [\"host.example\"]\nallow = [\"198.51.100.7/32\"]\n",
        common("peer")
    );
    world
        .beyond
        .run("ip address add 198.51.100.7/32 dev eth0")
        .unwrap();
    let _running = [("peer", peer), ("host", host)].map(|(name, config)| {
        let file = folder.join(format!("{name}.toml"));
        std::fs::write(&file, config).unwrap();
        let mut command = match name {
            "peer" => command_in(&world.beyond.path(), executable.to_str().unwrap()),
            _ => Command::new(&executable),
        };
        let log = folder.join(format!("{name}.log"));
        command.args(["relay", "serve", "--config"]).arg(file);
        command.stderr(std::fs::File::create(&log).unwrap());
        let running = Process(command.spawn().unwrap());
        wait_until("the relay is ready", 20 * SECOND, || {
            std::fs::read_to_string(&log).is_ok_and(|text| text.contains("the relay is ready"))
        });
        running
    });
    let lease = world.daemon.json("acquire host relayed").unwrap();
    let guest = attach(&lease);
    let who = SocketAddr::new([198, 51, 100, 7].into(), WHO_AM_I_PORT);
    // The peer calls from its own address, and the sandbox would from the clone's.
    wait_until("a datagram comes back from the peer", 60 * SECOND, || {
        guest
            .exchange_udp(who, b"?", 3 * SECOND)
            .is_ok_and(|seen| seen.starts_with(b"198.51.100.7:"))
    });
}

/// Of one address; one of IPv6 is refused.
fn assert_an_identity_works(lab: &Lab, world: &World) {
    let cgroup = Cgroup::create().unwrap();
    let identity = |arguments: &str| {
        let mut command = Command::new(sandwire::executable().unwrap());
        let arguments = arguments.split(' ');
        command.arg("identity").args(arguments).output().unwrap()
    };
    let path = cgroup.path();
    let refused = identity(&format!("add {path} --address 10.77.0.1 --address fd77::1"));
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && error.contains("IPv6"),
        "{error}"
    );
    let added = identity(&format!("add {path} --name web --address 10.77.0.1"));
    let error = String::from_utf8_lossy(&added.stderr).into_owned();
    assert!(added.status.success(), "{error}");
    world.beyond.route_through_host("10.77.0.1/32").unwrap();
    let seen = lab.shell(&format!(
        "echo 0 > {path}/cgroup.procs; exec python3 -c 'import socket; \
         s = socket.socket(); s.connect((\"{BEYOND_IPV4}\", {WHO_AM_I_PORT})); print(s.recv(99).decode())'"
    ));
    assert!(seen.starts_with("10.77.0.1:"), "{seen}");
    assert!(identity("remove web").status.success());
}
