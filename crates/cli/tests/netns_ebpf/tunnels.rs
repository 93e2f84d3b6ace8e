//! Tunnels as uplinks: past the stack if their packets have Ethernet headers, else through it.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
};

use sandwire_testlab::{
    fake_guest::FakeGuest,
    host::{BEYOND_IPV4, ECHO_PORT, HOST_IPV4, WHO_AM_I_PORT},
    lab::{self, Lab},
    sandwire::Lease,
    tun,
};
use serde_json::{Value, json};

use crate::{
    ebpf::{HERE, POOLS, SECOND, StackWatch, World, pool},
    uplinks::{FAMILIES, routes_back},
};

/// Name of the tunnel's interface at both ends.
const TUNNEL: &str = "tunnel0";

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_vxlan_is_an_uplink_like_others() {
    lab::run(|lab| {
        let world = World::with_config(lab, &format!("uplinks = [\"{TUNNEL}\"]"));
        let vxlan = |lower: &str, local, remote| {
            format!(
                "ip link add {TUNNEL} type vxlan id 42 dstport 4789 local {local} remote {remote} dev {lower}"
            )
        };
        lab.run(&vxlan("up0", HOST_IPV4, BEYOND_IPV4));
        let there = vxlan("eth0", BEYOND_IPV4, HOST_IPV4);
        world.beyond.run(&there).unwrap();
        give_addresses(lab, &world);
        let guests = start_guests(&world);
        let watch = StackWatch::on(TUNNEL);
        for (lease, guest) in &guests {
            assert_passes(&world, lease, guest);
            assert_eq!(world.detail(lease)["data_path_note"], Value::Null);
        }
        assert_eq!(watch.packets(), 0, "went through the host's stack");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_tunnel_without_ethernet_is_left_to_the_hosts_stack_and_that_is_told() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        tun::tunnel([Path::new(HERE), &world.beyond.path()], TUNNEL).unwrap();
        give_addresses(lab, &world);
        // What leads out by default is an uplink without being named.
        for option in ["-4", "-6"] {
            lab.run(&format!("ip {option} route replace default dev {TUNNEL}"));
        }
        let guests = start_guests(&world);
        let watch = StackWatch::on(TUNNEL);
        for (lease, guest) in &guests {
            let before = watch.packets();
            assert_passes(&world, lease, guest);
            assert!(watch.packets() > before, "went past the host's stack");
            let note = world.detail(lease)["data_path_note"].to_string();
            for word in [TUNNEL, "no Ethernet headers"] {
                assert!(note.contains(word), "{note}");
            }
        }
        let attached = lab.run(&format!("bpftool net show dev {TUNNEL}"));
        assert!(!attached.contains("from_uplink"), "{attached}");
        let report = world.daemon.json("doctor").unwrap();
        let findings = report["findings"].as_array().unwrap();
        let name = format!("uplink {TUNNEL}");
        let finding = findings.iter().find(|finding| finding["name"] == *name);
        let finding = finding.expect("the doctor looks at the tunnel");
        assert_eq!(finding["found"], json!(false), "{finding}");
        for (key, words) in [
            ("detail", "no Ethernet headers"),
            ("used_instead", "own network stack"),
        ] {
            let text = finding[key].as_str().unwrap();
            assert!(text.contains(words), "{finding}");
        }
    });
}

/// Raises both ends.
fn give_addresses(lab: &Lab, world: &World) {
    for family in &FAMILIES {
        let [host, server] = family.second;
        lab.run(&family.add_address(host, family.length, TUNNEL));
        let there = family.add_address(server, family.length, TUNNEL);
        world.beyond.run(&there).unwrap();
    }
    let up = format!("ip link set {TUNNEL} up");
    lab.run(&up);
    world.beyond.run(&up).unwrap();
}

/// A guest in a pool of each kind, whom the world beyond answers through the tunnel.
fn start_guests(world: &World) -> Vec<(Lease, FakeGuest)> {
    let start = |(number, kind): (usize, &&str)| {
        let spec = pool(kind, kind, number, 1, &json!({"uplink": "route"}));
        world.daemon.create_pool(&spec).unwrap();
        for route in routes_back(number) {
            world.beyond.run(&route).unwrap();
        }
        world.guest(kind, kind)
    };
    POOLS.iter().enumerate().map(start).collect()
}

/// Both directions in both families.
#[track_caller]
fn assert_passes(world: &World, lease: &Lease, guest: &FakeGuest) {
    for family in &FAMILIES {
        let ask = |port, payload: &[u8]| {
            let server = SocketAddr::new(family.second[1], port);
            guest.exchange_udp(server, payload, 5 * SECOND).unwrap()
        };
        let clone: IpAddr = family.clone_address(lease);
        let answer = String::from_utf8(ask(WHO_AM_I_PORT, b"?")).unwrap();
        let caller: SocketAddr = answer.parse().unwrap();
        assert_eq!(caller.ip(), clone);
        let payload: Vec<u8> = (0..=250).cycle().take(1200).collect();
        assert_eq!(ask(ECHO_PORT, &payload), payload);
        let call = format!("ping -n -q -c 3 -i 0.05 -W 5 {clone}");
        world.beyond.run(&call).unwrap();
    }
}
