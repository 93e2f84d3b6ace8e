//! `cleanup` after a daemon with many host slots.

use sandwire_testlab::lab;
use serde_json::{Value, json};

use crate::ebpf::{World, pool};

/// More than go at once, twice.
const SLOTS: u32 = 210;
/// The first group of interfaces that `cleanup` would take.
const GROUP: u32 = 0x4000_0000;

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn many_taps_go_and_those_of_others_stay() {
    lab::run(|lab| {
        let mut world = World::without_pools(lab);
        let mut spec = pool("host", "host", 0, SLOTS, &json!({"uplink": "route"}));
        spec["tap"] = json!({"multi_queue": true});
        world.daemon.create_pool(&spec).unwrap();
        // Somebody else's, one of them in the group, and one that looks like ours but for its instance.
        lab.run("ip tuntap add name theirs mode tap");
        lab.run(&format!("ip link set theirs group {GROUP}"));
        lab.run("ip tuntap add name labx mode tap");
        lab.run("ip link set labx alias sandwire:labx:host:7");
        world.daemon.kill().unwrap();
        // A part of an earlier attempt that failed.
        let links: Value = serde_json::from_str(&lab.run("ip -j link")).unwrap();
        let mut ours = links.as_array().unwrap().iter().filter(|link| {
            let alias = link["ifalias"].as_str().unwrap_or_default();
            alias.starts_with("sandwire:lab:host:")
        });
        let left = ours.next().unwrap()["ifname"].as_str().unwrap();
        lab.run(&format!("ip link set {left} group {}", GROUP + 1));

        let done = world.daemon.json("cleanup --instance lab").unwrap();
        assert_eq!(done["failures"], json!([]));
        let removed = done["removed"].as_array().unwrap().iter();
        let interfaces = removed.filter(|object| object["kind"] == "interface");
        // The shared interface too.
        assert!(interfaces.count() > SLOTS as usize, "{done}");
        let names = lab.run("ip -o link");
        assert!(!names.contains("alias sandwire:lab:"), "{names}");
        for name in ["theirs", "labx"] {
            assert!(names.contains(name), "{names}");
            lab.run(&format!("ip link delete {name}"));
        }
    });
}
