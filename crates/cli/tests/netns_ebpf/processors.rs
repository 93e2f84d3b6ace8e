//! A processor that is plugged in under a running daemon: the maps have no lines for it until the daemon starts anew.

use std::{fs, net::SocketAddr, thread};

use rustix::thread::{CpuSet, sched_setaffinity};
use sandwire_testlab::{
    fake_guest::{FakeGuest, frame},
    guest::{kernel::Series, machine},
    host::BEYOND_IPV4,
    lab::{self, Lab},
    sandwire::Lease,
    traffic::Tally,
};
use serde_json::{Value, json};

use crate::{
    GATEWAY_MAC, assert_in_touch,
    ebpf::{SECOND, World},
    guests_in_touch,
    restarts::{MAPS, wait_until_old_maps_are_gone},
};

const PORT: u16 = 5000;
/// What a guest may send: so little that its flood brings nearly all of it at once.
const PACKETS_PER_SECOND: u64 = 10;
const BURST_PACKETS: u64 = 40;
/// Packets of which nobody loses one.
const FEW: u64 = 20;
/// What a guest may say by itself meanwhile.
const SMALL_TALK: u64 = 8;

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_processor_that_is_plugged_in_counts_and_limits_too() {
    // Since 6.9 Linux has no room for one without a hypervisor that it knows, which QEMU alone isn't.
    lab::run_on_pluggable(Series::Linux6_1, 900 * SECOND, |lab| {
        let mut world = World::start(lab, "route", 2);
        let tally = world.beyond.inside(|| Tally::start(PORT)).unwrap();
        assert_eq!(processors_with_lines(lab), 1);
        machine::plug_in_processor().unwrap();
        let guests = on_the_new_one(|| guests_in_touch(&world));
        assert_all_is_well(&world, &tally, &guests);
        assert_eq!(processors_with_lines(lab), 1);
        let total = |world: &World| -> u64 {
            let each = guests.iter().flat_map(|(lease, _)| counted(world, lease));
            each.sum()
        };
        let before = total(&world);
        world.daemon.kill().unwrap();
        world.daemon.restart().unwrap();
        wait_until_old_maps_are_gone();
        assert!((before..before + SMALL_TALK).contains(&total(&world)));
        assert_eq!(processors_with_lines(lab), 2);
        assert_all_is_well(&world, &tally, &guests);
    });
}

/// For how many processors the maps have lines of counters. One more line is the daemon's.
fn processors_with_lines(lab: &Lab) -> u64 {
    let entries = |map: &str| {
        let shown = lab.shell(&format!("bpftool -j map show pinned {MAPS}/v*/{map}"));
        let shown: Value = serde_json::from_str(&shown).unwrap();
        shown["max_entries"].as_u64().unwrap()
    };
    entries("ledgers") / entries("nics") - 1
}

/// Has a thread, and those that it starts, run on the processor that was plugged in.
fn on_the_new_one<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let pinned = || {
        let mut only = CpuSet::new();
        only.set(1);
        sched_setaffinity(None, &only).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(pinned).join().unwrap())
}

/// What the guests send and get is counted, and limited, on the processor that was plugged in.
#[track_caller]
fn assert_all_is_well(world: &World, tally: &Tally, guests: &[(Lease, FakeGuest)]) {
    for (lease, guest) in guests {
        on_the_new_one(|| assert_in_touch(lease, guest));
        let received = received_by_the_new_one();
        assert_counts(world, lease);
        assert_limits(world, tally, lease, guest);
        // Each ping there and back, and the flood.
        let received = received_by_the_new_one() - received;
        assert!(received > 2 * FEW + BURST_PACKETS, "{received}");
    }
}

#[track_caller]
fn assert_counts(world: &World, lease: &Lease) {
    let before = counted(world, lease);
    let ping = format!("ping -n -q -c {FEW} -i 0.05 -W 5 {}", lease.ipv4);
    on_the_new_one(|| world.beyond.run(&ping).unwrap());
    let after = counted(world, lease);
    for (before, after) in before.into_iter().zip(after) {
        let more = after - before;
        assert!(
            (FEW..FEW + SMALL_TALK).contains(&more),
            "{}: {more}",
            lease.name
        );
    }
}

/// Of a flood comes what the limit says, and what is dropped is told.
#[track_caller]
fn assert_limits(world: &World, tally: &Tally, lease: &Lease, guest: &FakeGuest) {
    let limits = json!({"egress": {"packets_per_second": PACKETS_PER_SECOND,
        "burst_packets": BURST_PACKETS}});
    let policy = |limits: &Value| json!({"uplink": "route", "limits": limits});
    world
        .daemon
        .set_policy(&lease.name, &policy(&limits))
        .unwrap();
    let own = guest.network();
    let flood = frame::udp(
        own.mac,
        GATEWAY_MAC,
        SocketAddr::new(own.ipv4.0.into(), PORT),
        SocketAddr::new(BEYOND_IPV4.into(), PORT),
        b"flood",
    );
    let (before, dropped_before) = (tally.settled(), dropped(world, lease));
    let sent = guest.flood(vec![flood], SECOND).unwrap();
    let came = tally.settled() - before;
    let dropped = dropped(world, lease) - dropped_before;
    let said = format!("{}: {came} of {sent} came, {dropped} dropped", lease.name);
    assert!(came >= BURST_PACKETS, "{said}");
    // An emulated machine's second is not one exactly, and a sixteenth of the burst is on top.
    assert!(came <= 2 * BURST_PACKETS, "{said}");
    assert_eq!(dropped, sent - came, "{said}");
    world
        .daemon
        .set_policy(&lease.name, &policy(&json!({})))
        .unwrap();
}

/// Packets from and to a guest.
fn counted(world: &World, lease: &Lease) -> [u64; 2] {
    let traffic = &world.detail(lease)["traffic"];
    ["egress", "ingress"].map(|way| traffic[way]["packets"].as_u64().unwrap())
}

fn dropped(world: &World, lease: &Lease) -> u64 {
    let drops = &world.detail(lease)["traffic"]["drops"];
    drops["packet_limit"].as_u64().unwrap_or(0)
}

/// Packets that the kernel has received on the processor that was plugged in.
fn received_by_the_new_one() -> u64 {
    let table = fs::read_to_string("/proc/net/softnet_stat").unwrap();
    let row = table.lines().nth(1).unwrap();
    u64::from_str_radix(row.split_whitespace().next().unwrap(), 16).unwrap()
}
