//! Other people's programs beside ours, and ours taken away.

use sandwire_testlab::{
    command,
    host::{BEYOND_IPV4, HOST_IPV4},
    lab::{self, Lab},
    namespace,
    other_program::{OtherProgram, Place},
    sandwire::Lease,
};
use serde_json::{Value, json};

use crate::{
    assert_in_touch,
    ebpf::{POOLS, SECOND, StackWatch, World, wait_until},
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn other_peoples_programs_stay_before_and_after_ours() {
    lab::run(|lab| {
        let mut world = World::with_config(lab, "uplink_order = \"last\"");
        lab.run("tc qdisc add dev up0 clsact");
        let attach =
            |interface: &str, place| OtherProgram::attach(lab.folder(), interface, place).unwrap();
        // On the uplink: before ours, after ours in both hooks, and where what passed ours leaves.
        let (first, out) = (
            attach("up0", Place::TcxFirst),
            attach("up0", Place::TcxEgress),
        );
        world.add_pools(1, &json!({"uplink": "route"}));
        let (last, filter) = (
            attach("up0", Place::TcxLast),
            attach("up0", Place::Filter(1)),
        );
        let guests: Vec<_> = POOLS.iter().map(|pool| world.guest(pool, pool)).collect();
        let ends: Vec<String> = guests.iter().map(|(lease, _)| host_end(lease)).collect();
        let around: Vec<_> = ends
            .iter()
            .map(|end| {
                (
                    attach(end, Place::Filter(100)),
                    attach(end, Place::Filter(50_000)),
                )
            })
            .collect();
        for round in ["before", "after"] {
            let seen = |program: &OtherProgram| program.packets().unwrap();
            let was = [seen(&first), seen(&last), seen(&out)];
            for ((lease, guest), (low, high)) in guests.iter().zip(&around) {
                let was = [seen(low), seen(high)];
                for _ in 0..10 {
                    guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
                }
                assert!(seen(low) - was[0] >= 10, "{round} restart: {}", lease.name);
                assert_eq!(
                    seen(high),
                    was[1],
                    "{round} restart: ours lets nothing pass"
                );
            }
            assert!(seen(&first) - was[0] >= 20, "{round} restart");
            let left = seen(&out) - was[2];
            assert!(
                left >= 20,
                "{round} restart: {left} packets of 20 that passed ours"
            );
            world
                .beyond
                .run(&format!("ping -n -q -c 5 -i 0.05 -W 5 {HOST_IPV4}"))
                .unwrap();
            // What is for the host passes ours; what is for a sandbox doesn't.
            for program in [&last, &filter] {
                assert!(seen(program) >= 5, "{round} restart: ours let nothing pass");
            }
            let for_others = seen(&last) - was[1];
            assert!(
                for_others < 20,
                "{round} restart: {for_others} packets passed ours"
            );
            world.daemon.kill().unwrap();
            world.daemon.restart().unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_user_s_own_xdp_program_on_a_tap_stays() {
    lab::run(|lab| {
        let mut world = World::start(lab, "route", 1);
        let guests: Vec<_> = POOLS.iter().map(|pool| world.guest(pool, pool)).collect();
        let attach = |lease: &Lease| {
            let attach = || OtherProgram::attach(lab.folder(), &lease.tap, Place::Xdp);
            namespace::inside(&lease.path, attach).unwrap()
        };
        let programs: Vec<_> = guests.iter().map(|(lease, _)| attach(lease)).collect();
        let attached = || guests.iter().map(|(lease, _)| xdp_program(lease)).collect();
        let before: Vec<Value> = attached();
        for when in [
            "before",
            "after SIGKILL",
            "after an upgrade with other maps",
        ] {
            for ((lease, guest), program) in guests.iter().zip(&programs) {
                let was = program.packets().unwrap();
                for _ in 0..10 {
                    guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
                }
                let seen = program.packets().unwrap() - was;
                assert!(seen >= 10, "{when}, {}: {seen} frames", lease.name);
                assert_in_touch(lease, guest);
                assert_eq!(world.detail(lease)["defects"], json!([]), "{when}");
            }
            assert_eq!(attached(), before, "{when}");
            world.daemon.kill().unwrap();
            if when != "before" {
                world.configure("nics_max = 100");
            }
            world.daemon.restart().unwrap();
        }
    });
}

/// What `ip` says of the XDP program on a TAP.
fn xdp_program(lease: &Lease) -> Value {
    let show = format!("ip -d -j link show dev {}", lease.tap);
    let shown = namespace::run_in(&lease.path, &show).unwrap();
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert!(shown[0]["xdp"]["prog"]["id"].is_u64(), "{shown}");
    shown[0]["xdp"].clone()
}

/// The interface of the host that leads to a slot.
pub(crate) fn host_end(lease: &Lease) -> String {
    let text = command::run("ip -json link").unwrap();
    let interfaces: Value = serde_json::from_str(&text).unwrap();
    let slot = lease.namespace.clone().unwrap_or_default();
    let number = slot.rsplit('.').next().unwrap().to_owned();
    let alias = format!("sandwire:lab:netns:{number}");
    let found = interfaces.as_array().unwrap().iter().find(|interface| {
        interface["ifname"] == lease.tap.as_str() || interface["ifalias"] == alias.as_str()
    });
    found.unwrap()["ifname"].as_str().unwrap().to_owned()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_detached_program_is_seen_and_put_back() {
    lab::run(|lab| {
        let world = World::start(lab, "route", 1);
        let guests: Vec<_> = POOLS.iter().map(|pool| world.guest(pool, pool)).collect();
        for (lease, guest) in &guests {
            assert_in_touch(lease, guest);
            lab.run(&format!("tc qdisc delete dev {} ingress", host_end(lease)));
        }
        detach_from_uplink(lab);
        for (lease, guest) in &guests {
            let filters = format!("tc filter show dev {} ingress", host_end(lease));
            wait_until("the slot's program is back", 30 * SECOND, || {
                lab.run(&filters).contains("direct-action")
            });
            assert_in_touch(lease, guest);
        }
        let watch = StackWatch::start();
        wait_until("the uplink's program is back", 30 * SECOND, || {
            let before = watch.packets();
            let call = format!("ping -n -q -c 3 -i 0.05 -W 5 {}", guests[0].0.ipv4);
            world.beyond.run(&call).is_ok() && watch.packets() == before
        });
    });
}

/// As `bpftool link detach` does: the daemon still has its link, but it does nothing any more.
fn detach_from_uplink(lab: &Lab) {
    let links: Value = serde_json::from_str(&lab.run("bpftool -j link show")).unwrap();
    let mut detached = 0;
    for link in links.as_array().unwrap() {
        // The program of another lab's link may be gone by now.
        if !link_is_of_this_lab(lab, link) {
            continue;
        }
        let program = lab.run(&format!("bpftool -j prog show id {}", link["prog_id"]));
        if program.contains("\"from_uplink\"") {
            lab.run(&format!("bpftool link detach id {}", link["id"]));
            detached += 1;
        }
    }
    assert_eq!(detached, 1, "{links}");
}

/// Links of all labs are in one list; ours are those that are pinned here.
fn link_is_of_this_lab(lab: &Lab, link: &Value) -> bool {
    let pinned = lab.shell("find /sys/fs/bpf -type f");
    pinned.lines().any(|path| {
        // What isn't a link is refused; Debian 13's bpftool tells of links and fails all the same.
        let shown = lab.shell(&format!("bpftool -j link show pinned {path} || true"));
        serde_json::from_str::<Value>(&shown).is_ok_and(|shown| shown["id"] == link["id"])
    })
}
