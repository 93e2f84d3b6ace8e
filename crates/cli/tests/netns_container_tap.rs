//! MicroVMs in containers' namespaces under a running daemon: a TAP beside the container's interface, and a guest on it
//! that has the interface's addresses and MAC. Real traffic both ways, damage, SIGKILL, and what stands in the way.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

#[path = "ebpf/mod.rs"]
mod ebpf;

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use ebpf::{HERE, World, assert_none_lost, wait_until};
use sandwire_testlab::{
    command,
    fake_guest::{FakeGuest, GuestNetwork, frame},
    host::{BEYOND_IPV4, BEYOND_IPV6, ECHO_PORT, HTTP_PORT},
    lab::{self, Lab},
    namespace::Namespace,
};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);
/// How long nothing has to come.
const SILENCE: Duration = Duration::from_millis(500);

fn world_with_boxes(lab: &Lab) -> World {
    let world = World::without_pools(lab);
    let boxes = json!({
        "name": "boxes", "kind": "container", "data_path": "auto", "size": 2, "quarantine_seconds": 0,
        "addresses": {"plan": "prefix", "ipv4": "10.70.0.0/24", "ipv6": "fd00:b0::/64"},
    });
    world.daemon.create_pool(&boxes).unwrap();
    world
}

/// What a guest is told who takes over a lease's interface.
fn network_of(lease: &Value) -> GuestNetwork {
    let attached = &lease["attached"];
    let mut mac = [0; 6];
    let bytes = attached["mac"].as_str().unwrap().split(':');
    for (place, byte) in mac.iter_mut().zip(bytes) {
        *place = u8::from_str_radix(byte, 16).unwrap();
    }
    let mut network = GuestNetwork {
        mac,
        ..GuestNetwork::default()
    };
    for own in attached["addresses"].as_array().unwrap() {
        let address = own["address"].as_str().unwrap();
        let gateway = own["gateway"].as_str().unwrap();
        match address.split('/').next().unwrap().parse().unwrap() {
            IpAddr::V4(address) => {
                network.ipv4 = (address, 32);
                network.ipv4_gateway = gateway.parse().unwrap();
            }
            IpAddr::V6(address) => {
                network.ipv6 = (address, 128);
                network.ipv6_gateway = gateway.parse().unwrap();
            }
        }
    }
    network
}

fn addresses_of(network: &GuestNetwork) -> [IpAddr; 2] {
    [network.ipv4.0.into(), network.ipv6.0.into()]
}

/// A lease with a guest in a namespace.
fn guest_in(world: &World, space: &Namespace) -> (Value, FakeGuest) {
    let name = space.name();
    let line = format!("acquire boxes {name} --netns {name} --tap tap0");
    let lease = world.daemon.json(&line).unwrap();
    assert_eq!(lease["attached"]["tap"], json!({"name": "tap0"}));
    let guest = FakeGuest::attach_as(&space.path(), "tap0", network_of(&lease)).unwrap();
    let link = space.run("ip -o link show tap0").unwrap();
    assert!(link.contains(" qdisc noqueue "), "{link}");
    (lease, guest)
}

#[track_caller]
fn assert_reaches_beyond(guest: &FakeGuest) {
    for server in [IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()] {
        guest.ping(server, PATIENCE).unwrap();
        let page = guest.fetch(SocketAddr::new(server, HTTP_PORT), PATIENCE);
        assert!(page.unwrap().contains("hello"));
        // Several segments, so that they may come as one.
        let sent: Vec<u8> = (0..60_000_u32)
            .map(|number| number.to_le_bytes()[0])
            .collect();
        let echo = guest.exchange_tcp(SocketAddr::new(server, ECHO_PORT), &sent, PATIENCE);
        assert!(echo.unwrap() == sent, "{server} echoed something else");
        let echo = guest.exchange_udp(SocketAddr::new(server, ECHO_PORT), b"?", PATIENCE);
        assert_eq!(echo.unwrap(), b"?");
    }
}

fn defects_of(world: &World, lease: &str) -> Value {
    let path = format!("/v1/leases/{lease}/attached");
    let mut state = world.daemon.call("GET", &path, None).unwrap();
    state["defects"].take()
}

fn drops_of(world: &World, lease: &str, reason: &str) -> u64 {
    let shown = world.daemon.json(&format!("show {lease}")).unwrap();
    shown["traffic"]["drops"][reason].as_u64().unwrap_or(0)
}

/// Interfaces, and what is on their ways in and out.
fn state_of(space: &Namespace) -> String {
    space.run("ip -o link").unwrap() + &space.run("tc qdisc").unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn guests_beside_containers_live_under_their_policy_and_vanish_without_a_trace() {
    lab::run_within(Duration::from_secs(300), |lab| {
        let mut world = world_with_boxes(lab);
        let spaces = ["blue", "red"].map(|name| lab.namespace(name));
        let before = spaces.each_ref().map(state_of);
        let guests = spaces.each_ref().map(|space| guest_in(&world, space));
        let networks = guests.each_ref().map(|(_, guest)| guest.network());
        for (number, (_, guest)) in guests.iter().enumerate() {
            let network = networks[number];
            guest.ping(network.ipv6_gateway.into(), PATIENCE).unwrap();
            assert_reaches_beyond(guest);
            for own in addresses_of(&network) {
                command::run(&format!("ping -n -q -c 1 -W 20 {own}")).unwrap();
            }
            for other in addresses_of(&networks[1 - number]) {
                guest.ping(other, SILENCE).unwrap_err();
            }
        }
        for name in ["blue", "red"] {
            let together = json!({"clone_to_clone": true});
            world.daemon.set_policy(name, &together).unwrap();
        }
        for (number, (_, guest)) in guests.iter().enumerate() {
            for other in addresses_of(&networks[1 - number]) {
                guest.ping(other, PATIENCE).unwrap();
                guest.fetch(SocketAddr::new(other, 80), PATIENCE).unwrap();
            }
        }
        assert_no_forgery(&world, &guests[0].1);

        let pingers = addresses_of(&networks[0]).map(|own| ebpf::ping(Path::new(HERE), own));
        world.daemon.kill().unwrap();
        world.daemon.restart().unwrap();
        for pinger in pingers {
            assert_none_lost(pinger, "SIGKILL and a start");
        }
        assert_eq!(
            world.daemon.json("show blue").unwrap()["attached"],
            guests[0].0["attached"]
        );
        assert_eq!(defects_of(&world, "blue"), json!([]));

        // One with its TAP open, one without.
        let [_held, (_, closed)] = guests;
        closed.detach().unwrap();
        for lease in ["blue", "red"] {
            let released = world.daemon.json(&format!("release {lease}")).unwrap();
            assert_eq!(released["released"][0]["outcome"], "released");
        }
        assert_eq!(spaces.each_ref().map(state_of), before);
        let left = command::run("ip -o link").unwrap();
        assert!(!left.contains("sandwire:lab:boxes"), "{left}");
    });
}

/// The guest speaks by the interface's MAC and addresses alone.
fn assert_no_forgery(world: &World, guest: &FakeGuest) {
    let network = guest.network();
    let gateway_mac = [0x02, 0x73, 0x77, 0, 0, 1];
    let send = |mac, source: IpAddr| {
        let target = SocketAddr::new(BEYOND_IPV4.into(), ECHO_PORT);
        let frame = frame::udp(mac, gateway_mac, SocketAddr::new(source, 1), target, b"?");
        guest.send_frame(&frame).unwrap();
    };
    send([6, 0, 0, 0, 0, 1], network.ipv4.0.into());
    send(network.mac, "10.70.0.99".parse().unwrap());
    for reason in ["source_mac", "source_address"] {
        wait_until(reason, PATIENCE, || drops_of(world, "blue", reason) == 1);
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_taken_away_of_a_tap_and_its_interface_is_put_back() {
    lab::run_within(Duration::from_secs(300), |lab| {
        let world = world_with_boxes(lab);
        let blue = lab.namespace("blue");
        let before = state_of(&blue);
        let (_, guest) = guest_in(&world, &blue);
        for damage in [
            "tc qdisc del dev eth0 parent ffff:fff1",
            "tc qdisc del dev tap0 parent ffff:fff1",
            "ip link set tap0 down",
            // The guest has the TAP open and keeps it.
            "ip link del eth0",
        ] {
            blue.run(damage).unwrap();
            assert_ne!(defects_of(&world, "blue"), json!([]), "{damage}");
            wait_until(damage, PATIENCE, || defects_of(&world, "blue") == json!([]));
            if damage.contains("down") {
                continue;
            }
            assert_reaches_beyond(&guest);
        }
        drop(guest);
        blue.run("ip link del tap0").unwrap();
        wait_until("a TAP", PATIENCE, || {
            defects_of(&world, "blue") == json!([])
        });
        let lease = world.daemon.json("show blue").unwrap();
        let guest = FakeGuest::attach_as(&blue.path(), "tap0", network_of(&lease)).unwrap();
        assert_reaches_beyond(&guest);
        drop(guest);

        // Found without the namespace's path as well as without the pair.
        blue.run("ip link del eth0").unwrap();
        world.daemon.json("release blue").unwrap();
        assert_eq!(state_of(&blue), before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_tap_is_found_when_nothing_leads_to_its_namespace_any_more() {
    lab::run(|lab| {
        let world = world_with_boxes(lab);
        let blue = lab.namespace("blue");
        let before = state_of(&blue);
        std::fs::File::create("/run/netns/second").unwrap();
        command::run("mount --bind /run/netns/blue /run/netns/second").unwrap();
        world
            .daemon
            .json("acquire boxes second --netns second --tap tap0 --tap-owner-uid 54321")
            .unwrap();
        let shown = blue.run("ip -d link show dev tap0").unwrap();
        assert!(
            shown.contains("user 54321") && shown.contains("vnet_hdr on"),
            "{shown}"
        );
        command::run("umount /run/netns/second").unwrap();
        world.daemon.json("release second").unwrap();
        assert_eq!(state_of(&blue), before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn cleanup_takes_what_is_in_containers_namespaces_too() {
    lab::run(|lab| {
        let mut world = world_with_boxes(lab);
        let spaces = ["pod1", "pod2"].map(|name| lab.namespace(name));
        let before = spaces.each_ref().map(state_of);
        let guests = spaces.each_ref().map(|space| {
            let (_, guest) = guest_in(&world, space);
            assert_reaches_beyond(&guest);
            guest
        });
        world.daemon.kill().unwrap();
        // In no container's namespace, with their TAPs open.
        let refused = world.daemon.output("cleanup --instance lab").unwrap();
        let message = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(1), "{message}");
        assert!(message.contains("2 slots are still in use"), "{message}");
        for guest in guests {
            guest.detach().unwrap();
        }
        let done = world.daemon.json("cleanup --instance lab").unwrap();
        assert_eq!(done["failures"], json!([]));
        assert_eq!(spaces.each_ref().map(state_of), before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_stands_in_the_way_of_a_tap_is_named_and_left_alone() {
    lab::run(|lab| {
        let world = world_with_boxes(lab);
        let blue = lab.namespace("blue");
        let attempt = |more: &str, wanted: &str| {
            let before = state_of(&blue);
            let line = format!("acquire boxes blue --netns blue {more}");
            let error = world.daemon.json(&line).unwrap_err().to_string();
            assert!(error.contains(wanted), "{more}: {error}");
            assert_eq!(state_of(&blue), before, "{more}");
            let leases = world.daemon.call("GET", "/v1/leases", None).unwrap();
            assert_eq!(leases, json!([]), "{more}");
        };
        attempt("--tap eth0", "--tap = eth0");
        attempt("--interface net1 --tap net1", "--tap = net1");
        blue.run("ip link add veth0 type veth peer name other")
            .unwrap();
        attempt("--tap veth0", "one of that name");
        blue.run("ip tuntap add dev tap0 mode tap").unwrap();
        attempt("--tap tap0", "one of that name");
        blue.run("ip link del tap0").unwrap();
        world
            .daemon
            .json("acquire boxes blue --netns blue --tap tap0")
            .unwrap();
    });
}
