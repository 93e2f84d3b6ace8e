//! Slots in a real kernel: built, damaged, repaired, withdrawn, crashed and torn down. Everything
//! happens in a lab; the judges are `ip` and `nft`.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "../fixture/mod.rs"]
mod fixture;
mod others;

use std::{
    collections::BTreeSet,
    env, fs, io,
    net::Ipv4Addr,
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use fixture::{INSTANCE, failing_at::FailingAt, pool, pool_of, prepare, tear_down, web};
use sandwire_api::slot::TapUse;
use sandwire_kernel_net::capability::REQUIRED_CAPABILITIES;
use sandwire_slot::{
    error::NetworkError,
    kernel::{BuildStep, KernelNetwork, Settings},
    network::{Leftover, Network, Withdrawal},
    plan::{Plan, SlotNumber, SlotPlan},
};
use sandwire_testlab::{
    command,
    fake_guest::FakeGuest,
    lab::{self, Lab},
    namespace,
};

fn open() -> KernelNetwork {
    KernelNetwork::open(INSTANCE).unwrap()
}

fn in_slot(slot: &SlotPlan, line: &str) -> String {
    namespace::run_in(slot.netns_path().as_ref(), line).unwrap()
}

/// The first slots of a pool.
fn slots(plan: &Plan, count: u32) -> Vec<SlotPlan> {
    (0..count)
        .map(|number| plan.slot(SlotNumber(number)))
        .collect()
}

/// A pool with slots that are built.
fn filled(network: &KernelNetwork, plan: &Plan, count: u32) -> Vec<SlotPlan> {
    network.add_pool(plan).unwrap();
    let slots = slots(plan, count);
    for slot in &slots {
        network.build(slot).unwrap();
    }
    slots
}

/// Pings a guest. The fake guest drops its first answer, because it asks for its gateway first.
fn reach(lab: &Lab, guest: Ipv4Addr) {
    lab.run(&format!("ping -c 3 -i 0.2 -W 1 {guest}"));
}

/// Waits until the kernel has told IPv6 that the shared interface has a carrier: up to a second.
fn settle(lab: &Lab) {
    for _ in 0..300 {
        if lab
            .run("ip -6 route show table local")
            .contains("fd00:c10e::1")
        {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!(
        "the host's address never became usable: {}",
        lab.run("ip -6 address")
    );
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_slot_comes_and_goes_without_trace() {
    lab::run(|lab| {
        let network = open();
        let before = lab.snapshot();
        let plan = pool("web", "{}");
        let slots = filled(&network, &plan, 3);
        let names = lab.run("ip netns");
        for slot in &slots {
            assert!(names.contains(&slot.netns_name), "{names}");
            let link = in_slot(slot, "ip -d -o link show vmtap0");
            assert!(link.contains("tun type tap"), "{link}");
            assert!(link.contains("02:73:77:00:00:01"), "{link}");
            assert!(link.contains(" qdisc noqueue "), "{link}");
            let addresses = in_slot(slot, "ip -o address show dev vmtap0");
            for address in [
                "192.168.241.1 peer 192.168.241.2/32",
                "fd00:5eed::1 peer fd00:5eed::2/128",
                "fe80::1/128",
            ] {
                assert!(addresses.contains(address), "{address} in {addresses}");
            }
            assert!(!addresses.contains("tentative"), "{addresses}");
            let inspection = network.inspect(slot);
            assert_eq!(inspection.defects, [], "{}", slot.netns_name);
            assert_eq!(inspection.taps[0].used, TapUse::Unused);
        }
        assert_eq!(
            network.inspect_host(std::slice::from_ref(&plan.spec.name)),
            []
        );
        tear_down(&network, &slots);
        network.remove_pool(&plan).unwrap();
        lab.assert_unchanged(&before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_document_s_own_addresses_can_be_had() {
    lab::run(|lab| {
        let network = open();
        let before = lab.snapshot();
        let plan = fixture::plan(
            r#"{"name":"seed","guest":{"ipv6":""},"addresses":{"plan":"firecracker_clones"}}"#,
        );
        let slots = filled(&network, &plan, 2);
        let addresses = in_slot(&slots[1], "ip -o -4 address show dev uplink0");
        assert!(addresses.contains("10.0.8.2 peer 10.0.8.1"), "{addresses}");
        assert!(
            lab.run("ip route get 192.168.0.11")
                .contains(&slots[1].host_interface)
        );
        assert_eq!(network.inspect(&slots[1]).defects, []);
        lab.run("ping -c 1 -W 2 10.0.8.1");
        tear_down(&network, &slots);
        network.remove_pool(&plan).unwrap();
        lab.assert_unchanged(&before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_build_that_fails_at_any_step_leaves_nothing() {
    lab::run(|lab| {
        let plan = pool("web", "{}");
        open().add_pool(&plan).unwrap();
        let slot = &slots(&plan, 1)[0];
        let before = lab.snapshot();
        let mut operations = BTreeSet::new();
        for step in BuildStep::ALL {
            let network =
                KernelNetwork::with_steps(Settings::new(INSTANCE), Arc::new(FailingAt(step)))
                    .unwrap();
            let error = network.build(slot).unwrap_err();
            // At once, not some time later.
            let host = lab.run("ip -o link");
            assert!(!host.contains(&slot.host_interface), "{step:?} left {host}");
            lab.assert_unchanged(&before);
            let text = error.to_string();
            assert!(text.contains(&slot.netns_name), "{text}");
            assert!(text.contains("no storage space"), "{text}");
            operations.insert(text);
        }
        assert_eq!(
            operations.len(),
            BuildStep::ALL.len(),
            "each step has its words"
        );
        open().build(slot).unwrap();
        assert_eq!(open().inspect(slot).defects, []);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_name_that_is_taken_is_refused_and_left_alone() {
    lab::run(|lab| {
        let network = open();
        let plan = pool("web", "{}");
        network.add_pool(&plan).unwrap();
        let slots = slots(&plan, 2);
        lab.run(&format!(
            "ip link add {} type bridge",
            slots[0].host_interface
        ));
        lab.run(&format!("ip netns add {}", slots[1].netns_name));
        let before = lab.snapshot();
        let text = network.build(&slots[0]).unwrap_err().to_string();
        assert!(text.contains("create the veth of"), "{text}");
        assert!(text.contains(&slots[0].host_interface), "{text}");
        assert!(text.contains("File exists"), "{text}");
        let text = network.build(&slots[1]).unwrap_err().to_string();
        assert!(text.contains("publish the namespace of"), "{text}");
        lab.assert_unchanged(&before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn several_threads_build_and_tear_down_at_once() {
    lab::run(|lab| {
        let network = open();
        let before = lab.snapshot();
        let plan = pool("web", "{}");
        network.add_pool(&plan).unwrap();
        let slots = slots(&plan, 100);
        thread::scope(|scope| {
            for part in slots.chunks(25) {
                let network = &network;
                scope.spawn(move || {
                    for slot in part {
                        network.build(slot).unwrap();
                    }
                });
            }
        });
        let inventory = network.inventory().unwrap();
        let expected: Vec<_> = (0..100).map(|number| ("web".to_owned(), number)).collect();
        assert_eq!(inventory.slots, expected);
        assert_eq!(inventory.leftovers, []);
        for slot in &slots {
            assert_eq!(network.inspect(slot).defects, [], "{}", slot.netns_name);
        }
        thread::scope(|scope| {
            for part in slots.chunks(50) {
                scope.spawn(|| tear_down(&network, part));
            }
        });
        network.remove_pool(&plan).unwrap();
        lab.assert_unchanged(&before);
    });
}

const BUILDER: &str = "SANDWIRE_TEST_BUILDER";
const CRASH_TEST: &str = "a_builder_killed_at_any_moment_leaves_complete_slots_or_nothing";

/// Kinds of slots, and how often their builder is killed. A round of eBPF takes longer: each daemon loads programs.
const CRASHES: [(&str, u32); 3] = [("nft", 30), ("netns", 15), ("host", 15)];
/// A builder is killed at any moment of its first so much time, in which it builds and tears down.
const BUILDING: Duration = Duration::from_millis(40);
/// File that a builder makes when it begins.
const BEGUN: &str = "/run/lab/begun";

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_builder_killed_at_any_moment_leaves_complete_slots_or_nothing() {
    if let Ok(kind) = env::var(BUILDER) {
        build_for_ever(&crash_plan(&kind));
    }
    lab::run_within(Duration::from_secs(300), |lab| {
        for (kind, rounds) in CRASHES {
            let plan = crash_plan(kind);
            let network = prepare(&plan);
            let before = lab.snapshot();
            for round in 0..rounds {
                kill_a_builder(kind, BUILDING * round / rounds);
                // As a daemon that comes after the one that was killed.
                check_after_crash(lab, &prepare(&plan), &plan);
                lab.assert_unchanged(&before);
            }
            network.remove_pool(&plan).unwrap();
        }
    });
}

/// The pool of a kind of [`CRASHES`].
fn crash_plan(kind: &str) -> Plan {
    match kind {
        "nft" => pool("web", "{}"),
        kind => web(kind, "{}"),
    }
}

fn kill_a_builder(kind: &str, after: Duration) {
    let mut builder = Command::new(env::current_exe().unwrap())
        .args(["--exact", CRASH_TEST, "--include-ignored"])
        .env(BUILDER, kind)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    while fs::remove_file(BEGUN).is_err() {
        assert_eq!(
            builder.try_wait().unwrap(),
            None,
            "it builds until it is killed"
        );
        thread::sleep(Duration::from_millis(1));
    }
    thread::sleep(after);
    builder.kill().unwrap();
    builder.wait().unwrap();
}

/// Builds and tears down until it is killed.
fn build_for_ever(plan: &Plan) -> ! {
    let network = prepare(plan);
    let slots = slots(plan, 4);
    fs::write(BEGUN, "").unwrap();
    loop {
        thread::scope(|scope| {
            for part in slots.chunks(2) {
                let network = &network;
                scope.spawn(move || part.iter().for_each(|slot| network.build(slot).unwrap()));
            }
        });
        tear_down(&network, &slots);
    }
}

fn check_after_crash(lab: &Lab, network: &KernelNetwork, plan: &Plan) {
    // What the kernel removes by itself is gone soon.
    let mut inventory = network.inventory().unwrap();
    for _ in 0..100 {
        let waits = |left: &Leftover| matches!(left, Leftover::Interface(_));
        if !inventory.leftovers.iter().any(waits) {
            break;
        }
        thread::sleep(Duration::from_millis(20));
        inventory = network.inventory().unwrap();
    }
    for left in &inventory.leftovers {
        // The one thing that a crash can leave: the mount point, made an instant before the mount.
        let Leftover::Namespace(name) = left else {
            panic!("{left:?} in {}", lab.run("ip -o link"));
        };
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(&format!("{name} ")), "{mounts}");
    }
    for result in network.reclaim(&inventory.leftovers) {
        result.unwrap();
    }
    let found: Vec<_> = inventory
        .slots
        .iter()
        .map(|(_, number)| plan.slot(SlotNumber(*number)))
        .collect();
    for slot in &found {
        assert_eq!(network.inspect(slot).defects, [], "{}", slot.netns_name);
    }
    tear_down(network, &found);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_somebody_breaks_is_seen_and_repaired() {
    lab::run(|lab| {
        let network = open();
        let plan = pool("web", "{}");
        let slots = filled(&network, &plan, 1);
        let slot = &slots[0];
        let clone_address = slot.nics[0].ipv4.unwrap().clone_address;
        let inside = |line: &str| in_slot(slot, line);
        let host_end = &slot.host_interface;
        let damages: [(&str, &dyn Fn() -> String); 7] = [
            (host_end, &|| {
                lab.run(&format!("ip link set {host_end} addrgenmode eui64"))
            }),
            ("tap vmtap0", &|| inside("ip link delete vmtap0")),
            ("interface uplink0", &|| inside("ip link delete uplink0")),
            ("interface uplink0", &|| inside("ip link set uplink0 down")),
            ("nft table sandwire", &|| {
                inside("nft delete table inet sandwire")
            }),
            ("nft table sandwire", &|| {
                inside("nft flush chain inet sandwire forward")
            }),
            ("route", &|| {
                lab.run(&format!("ip route delete {clone_address}"))
            }),
        ];
        for (object, damage) in damages {
            damage();
            let seen = network.inspect(slot).defects;
            assert!(
                seen.iter().any(|defect| defect.object.contains(object)),
                "{object}: {seen:?}"
            );
            assert!(
                seen.iter().all(|defect| defect.action == "reported"),
                "{seen:?}"
            );
            let repaired = network.repair(slot);
            assert!(
                repaired.iter().all(|defect| defect.action == "repaired"),
                "{repaired:?}"
            );
            assert_eq!(network.inspect(slot).defects, [], "after {object}");
            let guest = FakeGuest::attach(slot.netns_path().as_ref(), "vmtap0").unwrap();
            reach(lab, clone_address);
            let link = inside("ip -o link show vmtap0");
            assert!(link.contains(" qdisc noqueue "), "after {object}: {link}");
            guest.detach().unwrap();
        }
        lab.run(&format!("ip netns delete {}", slot.netns_name));
        let seen = network.repair(slot);
        assert!(seen[0].problem.contains("gone"), "{seen:?}");
        assert!(
            seen.iter().all(|defect| defect.action == "reported"),
            "{seen:?}"
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_tap_of_another_s_making_is_told_from_ours() {
    lab::run(|_| {
        let network = open();
        let plan = pool("web", "{}");
        let slots = filled(&network, &plan, 1);
        in_slot(&slots[0], "ip link delete vmtap0");
        assert_eq!(network.inspect(&slots[0]).taps[0].used, TapUse::Missing);
        in_slot(&slots[0], "ip tuntap add name vmtap0 mode tap");
        let inspection = network.inspect(&slots[0]);
        assert_eq!(inspection.taps[0].used, TapUse::Foreign);
        assert_eq!(inspection.defects.len(), 1, "{:?}", inspection.defects);
        assert_eq!(network.repair(&slots[0])[0].action, "reported");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_damaged_host_side_is_repaired() {
    lab::run(|lab| {
        let network = open();
        let plan = pool(
            "web",
            r#"{"host_services":["tcp/80","tcp/70-90"],"clone_to_clone":true}"#,
        );
        network.add_pool(&plan).unwrap();
        settle(lab);
        let before = lab.snapshot();
        let pools = std::slice::from_ref(&plan.spec.name);
        for damage in [
            "nft delete table inet sandwire-test",
            "nft flush chain inet sandwire-test forward",
            "ip route delete unreachable 10.64.0.0/24",
            "ip -6 route delete unreachable fd00:c10e::/64",
            "ip address delete 10.64.0.1/32 dev swHERE",
            "ip link delete swHERE",
            "sysctl -w net.ipv4.ip_forward=0",
            "sysctl -w net.ipv6.conf.all.forwarding=0",
        ] {
            let shared = sandwire_slot::plan::names::shared_interface(INSTANCE);
            lab.run(&damage.replace("swHERE", &shared));
            let defects = network.inspect_host(pools);
            assert_eq!(defects.len(), 1, "{damage}: {defects:?}");
            assert_eq!(defects[0].action, "repaired", "{damage}: {defects:?}");
            assert_eq!(network.inspect_host(pools), [], "{damage}");
            lab.assert_unchanged(&before);
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_withdrawn_tap_is_not_found_by_a_vmm_that_comes_late() {
    lab::run(|_| {
        let network = open();
        for (number, tap) in [r"{}", r#"{"multi_queue":true}"#].into_iter().enumerate() {
            let (ipv4, ipv6) = (format!("10.{number}.0.0/24"), format!("fd00:{number}::/64"));
            let plan = pool_of(&format!("web{number}"), "{}", tap, &ipv4, &ipv6);
            let slots = filled(&network, &plan, 1);
            assert_eq!(network.withdraw_taps(&slots[0]).unwrap(), Withdrawal::Free);
            let inside = in_slot(&slots[0], "ip -o link");
            assert!(!inside.contains("vmtap0"), "{inside}");
            assert_eq!(network.inspect(&slots[0]).taps[0].used, TapUse::Missing);
            // Asking again, as after a crash, comes to the same.
            assert_eq!(network.withdraw_taps(&slots[0]).unwrap(), Withdrawal::Free);
            tear_down(&network, &slots);
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_tap_in_use_is_kept_and_its_user_named() {
    lab::run(|lab| {
        let network = open();
        let plan = pool("web", "{}");
        let slots = filled(&network, &plan, 2);
        let guest = FakeGuest::attach(slots[0].netns_path().as_ref(), "vmtap0").unwrap();
        let clone_address = slots[0].nics[0].ipv4.unwrap().clone_address;
        reach(lab, clone_address);
        assert_eq!(network.withdraw_taps(&slots[0]).unwrap(), Withdrawal::Held);
        let holders = network.tap_holders(&slots[0]);
        // The guest is a thread of this process, whose main thread is elsewhere.
        assert!(holders.len() <= 1, "{holders:?}");
        reach(lab, clone_address);
        assert_eq!(network.inspect(&slots[0]).taps[0].used, TapUse::Attached);
        assert_eq!(network.withdraw_taps(&slots[1]).unwrap(), Withdrawal::Free);
        guest.detach().unwrap();
        assert_eq!(network.withdraw_taps(&slots[0]).unwrap(), Withdrawal::Free);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_process_with_a_multi_queue_tap_is_named() {
    lab::run(|_| {
        let network = open();
        let plan = pool_of(
            "web",
            "{}",
            r#"{"multi_queue":true}"#,
            fixture::IPV4,
            fixture::IPV6,
        );
        let slots = filled(&network, &plan, 1);
        let mut vmm = namespace::command_in(slots[0].netns_path().as_ref(), "python3")
            .args(["-c", OPEN_MULTI_QUEUE])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        io::BufRead::read_line(
            &mut io::BufReader::new(vmm.stdout.take().unwrap()),
            &mut ready,
        )
        .unwrap();
        assert_eq!(ready, "open\n");
        let queues = in_slot(&slots[0], "tc qdisc show dev vmtap0");
        assert!(queues.contains("qdisc noqueue "), "{queues}");
        assert!(
            !queues.contains(" parent :"),
            "none of each queue: {queues}"
        );
        let known = || {
            let addresses = in_slot(&slots[0], "ip -o address show dev vmtap0");
            addresses + &in_slot(&slots[0], "ip neigh show dev vmtap0 nud permanent")
        };
        let before = known();
        assert_eq!(network.withdraw_taps(&slots[0]).unwrap(), Withdrawal::Held);
        assert_eq!(known(), before, "the guest goes on");
        let holders = network.tap_holders(&slots[0]);
        let pids: Vec<_> = holders.iter().map(|holder| holder.pid).collect();
        assert_eq!(pids, [vmm.id()], "{holders:?}");
        assert_eq!(holders[0].command, "python3");
        assert_eq!(network.inspect(&slots[0]).taps[0].used, TapUse::Attached);
        vmm.kill().unwrap();
        vmm.wait().unwrap();
        assert_eq!(network.tap_holders(&slots[0]), [], "nobody is any more");
        assert_eq!(network.withdraw_taps(&slots[0]).unwrap(), Withdrawal::Free);
    });
}

/// Opens `vmtap0` as a VMM does: TUNSETIFF with TAP, NO_PI, MULTI_QUEUE and VNET_HDR.
const OPEN_MULTI_QUEUE: &str = r"
import fcntl, os, struct, time
tap = os.open('/dev/net/tun', os.O_RDWR)
fcntl.ioctl(tap, 0x400454ca, struct.pack('16sH22x', b'vmtap0', 0x2 | 0x1000 | 0x100 | 0x4000))
print('open', flush=True)
time.sleep(60)
";

const CAPABILITY_TEST: &str = "nothing_needs_more_than_the_capabilities_that_are_listed";

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn nothing_needs_more_than_the_capabilities_that_are_listed() {
    if env::var_os(BUILDER).is_some() {
        let network = open();
        let plan = pool("web", "{}");
        let slots = filled(&network, &plan, 2);
        assert_eq!(network.inspect(&slots[0]).defects, []);
        assert_eq!(network.withdraw_taps(&slots[0]).unwrap(), Withdrawal::Free);
        tear_down(&network, &slots);
        network.remove_pool(&plan).unwrap();
        fs::write("/run/lab/done", "").unwrap();
        return;
    }
    lab::run(|_| {
        let needed: BTreeSet<String> = REQUIRED_CAPABILITIES
            .iter()
            .flat_map(|required| required.capabilities)
            .map(|name| name.trim_start_matches("CAP_").to_lowercase())
            .collect();
        let only = needed
            .iter()
            .fold("-all".to_owned(), |list, name| format!("{list},+{name}"));
        let status = Command::new("setpriv")
            .args(["--bounding-set", &only, "--inh-caps", &only, "--"])
            .arg(env::current_exe().unwrap())
            .args([
                "--exact",
                CAPABILITY_TEST,
                "--include-ignored",
                "--nocapture",
            ])
            .env(BUILDER, "1")
            .status()
            .unwrap();
        assert!(status.success());
        assert!(
            Path::new("/run/lab/done").exists(),
            "the builder came to its end"
        );
    });
}
