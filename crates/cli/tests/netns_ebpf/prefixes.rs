//! The largest policy that is taken, over the command line.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    process::Output,
    time::Instant,
};

use ipnet::IpNet;
use sandwire_testlab::{
    command,
    fake_guest::FakeGuest,
    host::{BEYOND_IPV4, BEYOND_IPV6},
    lab::{self, Lab},
    sandwire::Lease,
};
use serde_json::{Value, json};

use crate::ebpf::{POOLS, SECOND, World};

/// As docs/policy.md has it.
const PREFIXES_MAX: u32 = 100_000;
/// Most that setting it may add to the daemon's memory at its peak, in KiB; docs/policy.md tells what was measured.
const PEAK_MAX: u64 = 64 << 10;
/// Most that it may take of the kernel's, in KiB.
const KERNEL_MAX: u64 = 16 << 10;
/// A second address of the server beyond, in each family.
const OTHER_IPV4: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 3);
const OTHER_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 3);

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_policy_of_a_hundred_thousand_prefixes_takes_effect_and_a_larger_one_changes_nothing() {
    lab::run_within(200 * SECOND, |lab| {
        let world = World::start(lab, "route", 1);
        for other in [format!("{OTHER_IPV4}/24"), format!("{OTHER_IPV6}/64 nodad")] {
            world
                .beyond
                .run(&format!("ip address add {other} dev eth0"))
                .unwrap();
        }
        for pool in POOLS {
            let (lease, guest) = world.guest(pool, pool);
            assert_reaches(&guest, [BEYOND_IPV4.into(), BEYOND_IPV6.into()]);
            let before = memory(&world);
            let begun = Instant::now();
            let output = set_policy(lab, &world, &lease, PREFIXES_MAX);
            let took = begun.elapsed();
            assert!(output.status.success(), "{output:?}");
            // Some fifty times what docs/policy.md tells: what grows with the square of their number takes longer.
            assert!(took < 60 * SECOND, "{PREFIXES_MAX} prefixes took {took:?}");
            let after = memory(&world);
            println!("{pool}: {PREFIXES_MAX} prefixes in {took:?}; KiB {before:?}, then {after:?}");
            let is_bounded = after.peak - before.now < PEAK_MAX
                && after.kernel.saturating_sub(before.kernel) < KERNEL_MAX;
            assert!(is_bounded, "{before:?}, then {after:?}");
            assert_holds(&guest);

            // One more, which would deny what is allowed.
            let shown = world
                .daemon
                .json(&format!("policy show {}", lease.name))
                .unwrap();
            let refused = set_policy(lab, &world, &lease, PREFIXES_MAX + 1);
            assert_eq!(refused.status.code(), Some(1), "{refused:?}");
            let reason = String::from_utf8_lossy(&refused.stderr);
            assert!(
                reason.contains("100001") && reason.contains("100000"),
                "{reason}"
            );
            let still = world
                .daemon
                .json(&format!("policy show {}", lease.name))
                .unwrap();
            assert!(shown == still, "the policy changed");
            assert_holds(&guest);

            world
                .daemon
                .json(&format!("policy reset {}", lease.name))
                .unwrap();
            assert_reaches(&guest, [BEYOND_IPV4.into(), BEYOND_IPV6.into()]);
        }
    });
}

/// Denies so many destinations, among them the server's own addresses; its others too if it is more than may be.
fn set_policy(lab: &Lab, world: &World, lease: &Lease, count: u32) -> Output {
    let mut denied = vec![IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()];
    if count > PREFIXES_MAX {
        denied.extend([IpAddr::from(OTHER_IPV4), OTHER_IPV6.into()]);
    }
    let elsewhere = (0..count).map(|number| match number % 2 {
        0 => IpAddr::from(Ipv4Addr::from(0x1400_0000 + number)),
        _ => Ipv6Addr::from((0x2001_0db9 << 96) + u128::from(number)).into(),
    });
    denied.extend(elsewhere);
    denied.truncate(count as usize);
    let prefixes: Vec<IpNet> = denied.into_iter().map(IpNet::from).collect();
    let policy = json!({
        "uplink": "route",
        "egress": {"rules": [{"action": "deny", "prefixes": prefixes}]},
    });
    let file = lab.folder().join("policy.json");
    fs::write(&file, policy.to_string()).unwrap();
    let verb = format!("policy set {} --file {}", lease.name, file.display());
    world.daemon.output(&verb).unwrap()
}

#[track_caller]
fn assert_holds(guest: &FakeGuest) {
    for denied in [BEYOND_IPV4.into(), BEYOND_IPV6.into()] {
        guest.ping(denied, SECOND / 5).unwrap_err();
    }
    assert_reaches(guest, [OTHER_IPV4.into(), OTHER_IPV6.into()]);
}

#[track_caller]
fn assert_reaches(guest: &FakeGuest, servers: [IpAddr; 2]) {
    for server in servers {
        guest.ping(server, 5 * SECOND).unwrap();
    }
}

/// KiB of memory.
#[derive(Debug)]
struct Memory {
    /// Of the daemon's process.
    now: u64,
    /// The most that it has had.
    peak: u64,
    /// Of the kernel, for prefixes and their rules.
    kernel: u64,
}

fn memory(world: &World) -> Memory {
    let pid = world.daemon.pid().unwrap();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| -> u64 {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    let of_map = |name: &str| {
        let shown = format!("bpftool -j map show pinned /sys/fs/bpf/sandwire/lab/v*/{name}");
        let shown: Value = serde_json::from_str(&command::shell(&shown).unwrap()).unwrap();
        shown["bytes_memlock"].as_u64().unwrap() >> 10
    };
    Memory {
        now: field("VmRSS:"),
        peak: field("VmHWM:"),
        kernel: of_map("prefixes") + of_map("rule_lists"),
    }
}
