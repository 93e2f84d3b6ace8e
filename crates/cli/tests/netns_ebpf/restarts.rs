//! What happens to packets while there is no daemon.

use std::{fs, net::SocketAddr, thread};

use sandwire_testlab::{
    fake_guest::FakeGuest,
    host::{BEYOND_IPV4, BEYOND_IPV6, HTTP_PORT},
    lab::{self, Lab},
    pinger::Pinger,
    sandwire::Lease,
};
use serde_json::{Value, json};

use crate::{
    assert_in_touch,
    ebpf::{HERE, POOLS, SECOND, World, assert_none_lost, ping, wait_until},
    guests_in_touch,
};

/// Where the daemon's maps are.
pub(crate) const MAPS: &str = "/sys/fs/bpf/sandwire/lab";

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn killing_and_restarting_the_daemon_loses_no_packet() {
    lab::run(|lab| {
        let mut world = World::start(lab, "route", 1);
        let guests = guests_in_touch(&world);
        let pingers = ping_all(&world, &guests).into_iter().flatten();
        thread::sleep(SECOND);
        world.daemon.kill().unwrap();
        thread::sleep(SECOND);
        world.daemon.restart().unwrap();
        thread::sleep(SECOND);
        // As for an upgrade, where another executable lies there by then: it exchanges the programs on slots, too
        // (`crates/slot/tests/kernel_ebpf/versions.rs`).
        assert!(world.daemon.terminate().unwrap().success());
        world.daemon.restart().unwrap();
        thread::sleep(SECOND);
        for pinger in pingers {
            assert_none_lost(pinger, "while the daemon went and came");
        }
        for (lease, guest) in &guests {
            assert_in_touch(lease, guest);
            assert_eq!(world.detail(lease)["defects"], json!([]));
        }
    });
}

/// Pings both guests, in both families, from the host and from beyond.
fn ping_all(world: &World, guests: &[(Lease, FakeGuest)]) -> [[Pinger; 2]; 2] {
    let (here, beyond) = (HERE.as_ref(), world.beyond.path());
    let (first, second) = (&guests[0].0, &guests[1].0);
    [
        [ping(here, first.ipv4), ping(&beyond, first.ipv6)],
        [ping(here, second.ipv6), ping(&beyond, second.ipv4)],
    ]
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_upgrade_with_other_maps_loses_no_packet_and_keeps_policies_and_counters() {
    lab::run(|lab| {
        let mut world = World::with_config(lab, "nics_max = 128");
        // What the guests answer leaves only because somebody has called: also the new maps must know of that.
        let all = json!(["203.0.113.0/24", "2001:db8:1::/64"]);
        let rules = json!([
            {"action": "allow", "prefixes": all, "ports": ["tcp/80"]},
            {"action": "deny", "prefixes": all},
        ]);
        world.add_pools(1, &json!({"uplink": "route", "egress": {"rules": rules}}));
        let guests: Vec<_> = POOLS.iter().map(|pool| world.guest(pool, pool)).collect();
        assert_allowed(&guests);
        for pool in POOLS {
            world.daemon.wait_pool(pool, 1, 20 * SECOND).unwrap();
        }
        let before = interfaces(lab);
        let pingers = ping_all(&world, &guests);
        thread::sleep(SECOND);
        world.daemon.kill().unwrap();
        // Cut off: the next one begins anew, with the maps of two daemons before it. Where looking took too long those before
        // it have gone by then, and it is tried with others.
        let is_cut_off = [256, 320, 384, 448].into_iter().any(|nics| {
            start_with_maps_for(lab, &mut world, &guests, nics);
            let has_old = fs::exists(format!("{MAPS}/old-1-v1")).unwrap();
            world.daemon.kill().unwrap();
            has_old
        });
        assert!(is_cut_off, "no daemon was killed early enough");
        start_with_maps_for(lab, &mut world, &guests, 64);
        wait_for_the_end(&guests);
        assert!(world.daemon.terminate().unwrap().success());
        start_with_maps_for(lab, &mut world, &guests, 512);
        wait_for_the_end(&guests);
        assert_allowed(&guests);
        for ((lease, _), pingers) in guests.iter().zip(pingers) {
            let sent = pingers.map(|pinger| assert_none_lost(pinger, "while maps were made anew"));
            let detail = world.detail(lease);
            let received = detail["traffic"]["ingress"]["packets"].as_u64().unwrap();
            let sent = sent.map(u64::from).iter().sum();
            assert!(received >= sent, "{received} counted of {sent}");
            assert_eq!(detail["defects"], json!([]));
        }
        assert_eq!(
            interfaces(lab),
            before,
            "slots that wait were not made anew"
        );
    });
}

/// Numbers and names of the host's interfaces.
fn interfaces(lab: &Lab) -> Vec<String> {
    let listed: Value = serde_json::from_str(&lab.run("ip -j link")).unwrap();
    let listed = listed.as_array().unwrap().iter();
    listed
        .map(|found| format!("{} {}", found["ifindex"], found["ifname"]))
        .collect()
}

/// Starts the daemon with another size of its maps, while the policy holds.
fn start_with_maps_for(lab: &Lab, world: &mut World, guests: &[(Lease, FakeGuest)], nics: u32) {
    let answers = 16 * nics;
    world.configure(&format!("nics_max = {nics}\nanswers_max = {answers}"));
    world.daemon.spawn().unwrap();
    wait_until("the daemon is ready", 60 * SECOND, || {
        assert_denied(guests);
        world.daemon.wait_ready(SECOND / 100).is_ok()
    });
    for (map, entries) in [("nics", nics), ("answers", answers)] {
        let shown = lab.shell(&format!("bpftool -j map show pinned {MAPS}/v*/{map}"));
        let shown: Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(shown["max_entries"], entries, "{map}: {shown}");
    }
}

/// Waits until the daemon has let go of the old maps, while the policy holds.
fn wait_for_the_end(guests: &[(Lease, FakeGuest)]) {
    wait_until("the old maps are gone", 30 * SECOND, || {
        assert_denied(guests);
        old_maps().is_empty()
    });
}

/// Waits until the daemon has let go of the old maps.
pub(crate) fn wait_until_old_maps_are_gone() {
    wait_until("the old maps are gone", 30 * SECOND, || {
        old_maps().is_empty()
    });
}

/// Folders of maps of before, or of pieces of them.
pub(crate) fn old_maps() -> Vec<String> {
    let names = fs::read_dir(MAPS).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names
        .filter(|name| name != "links" && name != "v1")
        .collect()
}

#[track_caller]
fn assert_denied(guests: &[(Lease, FakeGuest)]) {
    for (_, guest) in guests {
        guest.ping(BEYOND_IPV4.into(), SECOND / 50).unwrap_err();
        guest.ping(BEYOND_IPV6.into(), SECOND / 50).unwrap_err();
    }
}

#[track_caller]
fn assert_allowed(guests: &[(Lease, FakeGuest)]) {
    for (_, guest) in guests {
        for server in [BEYOND_IPV4.into(), BEYOND_IPV6.into()] {
            guest
                .fetch(SocketAddr::new(server, HTTP_PORT), 5 * SECOND)
                .unwrap();
        }
    }
}
