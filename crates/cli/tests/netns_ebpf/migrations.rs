//! What can go wrong while maps are made anew for other sizes.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use sandwire_kernel_net::{
    netlink::{Request, Socket},
    tc::{self, Filter, Hook, Listed},
};
use sandwire_testlab::{
    fake_guest::FakeGuest,
    host::BEYOND_IPV4,
    kept_program::KeptProgram,
    lab::{self, Lab},
    sandwire::Lease,
};
use serde_json::{Value, json};

use crate::{
    assert_in_touch,
    ebpf::{SECOND, World, wait_until},
    programs::host_end,
    restarts::{MAPS, old_maps, wait_until_old_maps_are_gone},
    with_small_maps,
};

/// What a user reads of a slot that goes by maps of before.
const DEFECT: &str = "it uses other maps than the daemon, whose policies don't reach it";

/// A filter of the product as it was before maps were made anew.
struct Before {
    filter: Listed,
    program: KeptProgram,
}

impl Before {
    fn of(lab: &Lab, lease: &Lease) -> Self {
        let filter = filter_on(lab, &host_end(lease));
        let pin = format!("{MAPS}/v1/programs/from_guest");
        let program = KeptProgram::open(Path::new(&pin)).unwrap();
        Self { filter, program }
    }

    /// Leaves the slot as an exchange does that fails.
    fn put_back(&self) {
        let mut request = Request::new();
        let filter = Filter {
            place: self.filter.place,
            class_id: self.filter.class_id,
            program: std::os::fd::AsFd::as_fd(&self.program),
            name: &self.filter.name,
        };
        filter.replace(&mut request);
        Socket::route().unwrap().execute(request).unwrap();
    }
}

/// The only BPF filter on the way into an interface.
fn filter_on(lab: &Lab, interface: &str) -> Listed {
    let index = lab.run(&format!("cat /sys/class/net/{interface}/ifindex"));
    let index = sandwire_kernel_net::interface::InterfaceIndex(index.trim().parse().unwrap());
    let listed = tc::list(&mut Socket::route().unwrap(), index, Hook::Ingress).unwrap();
    assert_eq!(listed.len(), 1, "{listed:?}");
    listed.into_iter().next().unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_slot_left_with_maps_of_before_is_seen_and_mended() {
    lab::run(|lab| {
        let (mut world, guests) = with_small_maps(lab);
        let before: Vec<_> = guests
            .iter()
            .map(|(lease, _)| Before::of(lab, lease))
            .collect();
        assert!(world.daemon.terminate().unwrap().success());
        world.configure("nics_max = 256");
        world.daemon.restart().unwrap();
        wait_until_old_maps_are_gone();
        for ((lease, guest), before) in guests.iter().zip(&before) {
            assert_in_touch(lease, guest);
            assert_eq!(world.detail(lease)["defects"], json!([]));
            let object = format!("eBPF program on {}", host_end(lease));
            let defect = json!({"object": object, "problem": DEFECT, "action": "reported"});
            // The audit may be quicker: then once more.
            wait_until("the defect is shown", 30 * SECOND, || {
                before.put_back();
                guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
                world.detail(lease)["defects"] == json!([defect])
            });
        }
        world.daemon.kill().unwrap();
        before.iter().for_each(Before::put_back);
        // As many as nobody counts: what the maps have that are in use is of before.
        for (_, guest) in &guests {
            for _ in 0..5 {
                guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
            }
        }
        world.daemon.restart().unwrap();
        for (lease, guest) in &guests {
            assert_mended(&world, lease, guest);
        }
        assert!(world.daemon.log().contains(DEFECT), "the audit says so");
    });
}

/// Waits for the audit: policies reach the slot's packets, which are counted.
fn assert_mended(world: &World, lease: &Lease, guest: &FakeGuest) {
    wait_until("the slot has no defect", 30 * SECOND, || {
        world.detail(lease)["defects"] == json!([])
    });
    let sent = |detail: &Value| detail["traffic"]["egress"]["packets"].as_u64().unwrap();
    let before = sent(&world.detail(lease));
    assert_in_touch(lease, guest);
    let after = sent(&world.detail(lease));
    assert!(after >= before + 4, "{before} before, {after} after");
    let deny = json!({"uplink": "route", "egress": {"default": "deny"}});
    world.daemon.set_policy(&lease.name, &deny).unwrap();
    guest.ping(BEYOND_IPV4.into(), SECOND / 2).unwrap_err();
    assert_eq!(
        world.detail(lease)["traffic"]["drops"]["policy"],
        1,
        "{}",
        lease.name
    );
    let allow = json!({"uplink": "route"});
    world.daemon.set_policy(&lease.name, &allow).unwrap();
    assert_in_touch(lease, guest);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn whenever_the_daemon_is_killed_while_maps_are_made_anew_no_packet_is_counted_twice() {
    // The daemon starts thirteen times.
    lab::run_within(600 * SECOND, |lab| {
        let (mut world, guests) = with_small_maps(lab);
        let received = |world: &World, lease: &Lease| {
            let traffic = world.detail(lease)["traffic"].clone();
            traffic["ingress"]["packets"].as_u64().unwrap()
        };
        let mut expected: Vec<_> = guests
            .iter()
            .map(|(lease, _)| received(&world, lease))
            .collect();
        for round in 0..ROUNDS {
            world.daemon.kill().unwrap();
            for ((lease, _), expected) in guests.iter().zip(&mut expected) {
                // The guest may only answer, by whatever maps it goes now.
                lab.run(&format!("ping -n -q -c 10 -i 0.01 -W 5 {}", lease.ipv4));
                *expected += 10;
            }
            world.configure(&format!("nics_max = {}", 129 + round));
            world.daemon.spawn().unwrap();
            wait_for_the_moment(&mut world, round);
        }
        world.daemon.kill().unwrap();
        world.daemon.restart().unwrap();
        wait_until_old_maps_are_gone();
        for ((lease, guest), expected) in guests.iter().zip(expected) {
            assert_eq!(received(&world, lease), expected, "{}", lease.name);
            assert_in_touch(lease, guest);
            assert_eq!(world.detail(lease)["defects"], json!([]));
        }
    });
}

const ROUNDS: u32 = 12;

/// Waits for a moment to kill a daemon that makes its maps anew: when the old ones begin to go, or, in every third
/// round, any other on the way there.
fn wait_for_the_moment(world: &mut World, round: u32) {
    wait_until("maps are moved aside", 30 * SECOND, || {
        old_maps().iter().any(|name| name.starts_with("old-"))
    });
    if round.is_multiple_of(3) {
        // Its programs are loaded within half a second, its slots taken over soon after.
        thread::sleep(Duration::from_millis(u64::from(round) * 60));
        return;
    }
    world.daemon.wait_ready(60 * SECOND).unwrap();
    // On a busy machine all may be gone by now.
    let before = old_maps();
    let deadline = Instant::now() + 30 * SECOND;
    while !before.is_empty() && old_maps() == before {
        let log = || world.daemon.log();
        assert!(
            Instant::now() < deadline,
            "round {round}: the old maps stay: {before:?}\n{}",
            log()
        );
    }
}
