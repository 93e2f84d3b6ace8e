//! Containers that are ipvlan children of the host's uplink: with its Ethernet address, and told apart by theirs.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

#[path = "children/mod.rs"]
mod children;
#[path = "ebpf/mod.rs"]
mod ebpf;

use std::time::Duration;

use children::{drops, live_under_policy, on_uplink, ping, routed, with_two};
use ebpf::{World, wait_until};
use sandwire_testlab::{
    guest::kernel::Series,
    host::{BEYOND_IPV4, HOST_IPV4},
    lab::{self, Lab},
};
use serde_json::Value;

fn mac_of(lab: &Lab, interface: &str) -> String {
    let shown = lab.run(&format!("ip -j link show dev {interface}"));
    let shown: Value = serde_json::from_str(&shown).unwrap();
    shown[0]["address"].as_str().unwrap().to_owned()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn ipvlan_is_refused_where_there_is_none() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        let body = on_uplink("ipvlan", 1, &routed());
        let answer = world.daemon.http("POST", "/v1/pools", Some(&body)).unwrap();
        if answer.status == 201 {
            return;
        }
        let said = &answer.body;
        assert!(
            answer.status == 400 && said.contains("makes no ipvlan"),
            "{said}"
        );
        let pools = world.daemon.call("GET", "/v1/pools", None).unwrap();
        assert_eq!(pools.as_array().unwrap().len(), 0, "{pools}");
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn ipvlan_children_live_under_their_policy_on_linux_6_12() {
    lab::run_on(Series::Linux6_12, Duration::from_secs(900), |lab| {
        let (mut world, spaces, leases) = with_two(lab, "ipvlan", &routed());
        let blue = &spaces[0];
        let parent = mac_of(lab, "up0");
        assert_eq!(leases[0]["attached"]["mac"], parent);
        // The kernel would hand the host what is sent to the MAC that they share.
        for neighbour in [HOST_IPV4.to_string(), "203.0.113.77".to_owned()] {
            let line =
                format!("ip neighbour replace {neighbour} lladdr {parent} dev eth0 nud permanent");
            blue.run(&line).unwrap();
        }
        let before = drops(&world, "blue", "host_service");
        ping(blue, &HOST_IPV4.to_string(), false);
        assert!(drops(&world, "blue", "host_service") > before);
        ping(blue, &BEYOND_IPV4.to_string(), true);
        blue.run("ip address add 203.0.113.200/32 dev eth0")
            .unwrap();
        blue.run(&format!(
            "ping -n -q -c 1 -W 1 -I 203.0.113.200 {BEYOND_IPV4}"
        ))
        .unwrap_err();
        assert!(drops(&world, "blue", "source_address") > 0);
        blue.run("ip address delete 203.0.113.200/32 dev eth0")
            .unwrap();
        // What somebody took away comes back.
        blue.run("tc filter del dev eth0 egress").unwrap();
        wait_until("the program is back", Duration::from_secs(60), || {
            let filters = blue.run("tc filter show dev eth0 egress").unwrap();
            filters.contains("from_child")
        });
        wait_until("it is sound", Duration::from_secs(60), || {
            world.daemon.json("show blue").unwrap()["defects"] == serde_json::json!([])
        });
        let own_mac = world
            .daemon
            .command("acquire lan more --netns blue --interface net1 --mac 06:00:00:00:00:01")
            .output()
            .unwrap();
        let said = String::from_utf8(own_mac.stderr).unwrap();
        assert!(said.contains("has its parent's"), "{said}");
        live_under_policy("ipvlan", "l2", &mut world, &spaces, &leases);
    });
}
