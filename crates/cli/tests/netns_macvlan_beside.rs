//! macvlan children beside others: in one namespace with further interfaces, and on a parent with several addresses.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

#[path = "children/mod.rs"]
mod children;
#[path = "ebpf/mod.rs"]
mod ebpf;

use children::{PATIENCE, on_uplink, ping, routed};
use ebpf::{World, addresses_of, assert_sound};
use sandwire_testlab::{
    host::{BEYOND_IPV4, BEYOND_IPV6},
    lab::{self, Lab},
    namespace::Namespace,
};
use serde_json::{Value, json};

/// Subnets that the uplink is given addresses in beside those that it has.
const FURTHER: [&str; 2] = ["198.51.100.0/24", "2001:db8:2::/64"];

fn add_addresses(lab: &Lab, numbers: &[u32]) {
    for number in numbers {
        lab.run(&format!("ip address add 198.51.100.{number}/24 dev up0"));
        lab.run(&format!(
            "ip address add 2001:db8:2::{number}/64 dev up0 nodad"
        ));
    }
}

/// The routes that lead to a subnet, as `ip` shows them.
fn routes(space: &Namespace, subnet: &str) -> Vec<String> {
    let family = if subnet.contains(':') { "-6" } else { "-4" };
    shown(space, &format!("ip {family} route show {subnet}"))
}

fn shown(space: &Namespace, line: &str) -> Vec<String> {
    let text = space.run(line).unwrap();
    text.lines().map(str::to_owned).collect()
}

fn failure(world: &World, line: &str) -> String {
    let output = world.daemon.command(line).output().unwrap();
    assert!(!output.status.success(), "{line}");
    String::from_utf8(output.stderr).unwrap()
}

fn pool(name: &str, addresses: [&str; 2], parent: &Value) -> Value {
    let mut pool = on_uplink("macvlan", 2, &routed());
    pool["name"] = name.into();
    pool["parent"] = parent.clone();
    pool["addresses"] = json!({"plan": "prefix", "ipv4": addresses[0], "ipv6": addresses[1]});
    pool
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_subnet_that_the_parent_has_several_addresses_in_is_one_route() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        add_addresses(lab, &[1, 2]);
        let up0 = json!({"interface": "up0"});
        let own = pool("own", ["203.0.113.64/26", "2001:db8:1::b0:0/112"], &up0);
        let twice = json!({
            "interface": "up0",
            "subnets": ["203.0.113.0/24", "2001:db8:1::/64", FURTHER[0], FURTHER[1], FURTHER[0], FURTHER[1]],
        });
        let named = pool(
            "named",
            ["203.0.113.128/26", "2001:db8:1::c0:0/112"],
            &twice,
        );
        for pool in [own, named] {
            world.daemon.create_pool(&pool).unwrap();
            let name = pool["name"].as_str().unwrap();
            let space = lab.namespace(name);
            let line = format!("acquire {name} {name} --netns {name}");
            world.daemon.json(&line).unwrap();
            for subnet in FURTHER {
                let found = routes(&space, subnet);
                assert_eq!(found.len(), 1, "{found:?}");
                assert!(found[0].contains("dev eth0"), "{found:?}");
            }
            ping(&space, &BEYOND_IPV4.to_string(), true);
            ping(&space, &BEYOND_IPV6.to_string(), true);
            assert_sound(&world, name);
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn further_children_of_a_namespace_have_the_routes_that_they_are_for() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        add_addresses(lab, &[1]);
        // Nobody on the wire has an address of the pool, so all of the wire is reached by routes.
        let parent = json!({
            "interface": "up0", "gateways": [BEYOND_IPV4.to_string(), BEYOND_IPV6.to_string()],
        });
        let mut lan = pool("lan", ["10.70.0.0/24", "fd00:b0::/64"], &parent);
        lan["size"] = 4.into();
        world.daemon.create_pool(&lan).unwrap();
        world.daemon.wait_pool("lan", 4, PATIENCE).unwrap();
        let space = lab.namespace("blue");
        let first = world.daemon.json("acquire lan first --netns blue").unwrap();
        let none = "acquire lan second --netns blue --interface net1 --no-routes";
        world.daemon.json(none).unwrap();
        for family in ["-4", "-6"] {
            let line = format!("ip {family} route show dev net1 proto static");
            assert_eq!(shown(&space, &line), Vec::<String>::new());
        }
        let some = "--route 10.9.0.0/16 --route fd09::/64";
        let third = format!("acquire lan third --netns blue --interface net2 {some}");
        world.daemon.json(&third).unwrap();
        // What the first one has stays first.
        for subnet in FURTHER
            .into_iter()
            .chain(["203.0.113.0/24", "2001:db8:1::/64"])
        {
            let found = routes(&space, subnet);
            assert_eq!(found.len(), 2, "{found:?}");
            assert!(found[0].contains("dev eth0"), "{found:?}");
            assert!(found[1].contains("dev net2"), "{found:?}");
        }
        for destination in ["10.9.0.0/16", "fd09::/64"] {
            let found = routes(&space, destination);
            assert!(
                found.len() == 1 && found[0].contains("dev net2"),
                "{found:?}"
            );
        }
        let taken = format!("acquire lan fourth --netns blue --interface net3 {some}");
        let said = failure(&world, &taken);
        assert!(
            said.contains("route 10.9.0.0/16") && said.contains("one that is there"),
            "{said}"
        );
        assert!(!space.run("ip -o link").unwrap().contains("net3"));
        // The way back, as a router of that network would have it.
        for (address, family) in addresses_of(&first).iter().zip(["-4", "-6"]) {
            let line = format!("ip {family} route add {address} dev eth0");
            world.beyond.run(&line).unwrap();
        }
        ping(&space, &BEYOND_IPV4.to_string(), true);
        for lease in ["first", "second", "third"] {
            assert_sound(&world, lease);
        }
        world.daemon.json("release first").unwrap();
        let left = routes(&space, "203.0.113.0/24");
        assert!(left.len() == 1 && left[0].contains("dev net2"), "{left:?}");
        assert_sound(&world, "third");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_bears_the_name_already_is_left_as_it_was() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        world
            .daemon
            .create_pool(&on_uplink("macvlan", 1, &routed()))
            .unwrap();
        let space = lab.namespace("blue");
        space.run("ip link add eth0 type bridge").unwrap();
        let settings = || {
            let link = space.run("ip -d -j link show dev eth0").unwrap();
            let link: Value = serde_json::from_str(&link).unwrap();
            ["ifalias", "inet6_addr_gen_mode", "mtu", "address"].map(|key| link[0][key].clone())
        };
        let before = settings();
        let said = failure(&world, "acquire lan blue --netns blue");
        assert!(said.contains("one of that name"), "{said}");
        assert_eq!(settings(), before);
        world.daemon.wait_pool("lan", 1, PATIENCE).unwrap();
        let other = "acquire lan blue --netns blue --interface net1";
        world.daemon.json(other).unwrap();
        world.daemon.json("release blue").unwrap();
        assert_eq!(settings(), before);
        assert!(!space.run("ip -o link").unwrap().contains("net1"));
    });
}
