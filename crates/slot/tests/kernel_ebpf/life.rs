//! Slots built, damaged, repaired, withdrawn and torn down.

use std::{
    fs::File,
    net::SocketAddr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use sandwire_api::{drop_reason::DropReason, slot::TapUse};
use sandwire_slot::{
    kernel::{BuildStep, KernelNetwork, Settings},
    network::{Network, Withdrawal},
    plan::{SlotNumber, SlotPlan},
};
use sandwire_testlab::{
    command,
    fake_guest::frame,
    lab::{self, Lab},
};
use serde_json::{Value, json};

use crate::fixture::{
    EBPF_KINDS, INSTANCE, IPV4, IPV6,
    failing_at::FailingAt,
    plan, prepare,
    sandbox::{Sandbox, tenancy},
    talk::{IN_VAIN, PATIENCE, udp_echo},
    tear_down, web,
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_slot_comes_and_goes_without_trace() {
    lab::run(|lab| {
        // Mounted and opened once, so that it is no difference.
        let network = prepare(&web("host", "{}"));
        network.remove_pool(&web("host", "{}")).unwrap();
        for kind in EBPF_KINDS {
            let before = lab.snapshot();
            let plan = web(kind, "{}");
            network.add_pool(&plan).unwrap();
            let slots: Vec<_> = (0..3).map(|number| plan.slot(SlotNumber(number))).collect();
            for slot in &slots {
                network.build(slot).unwrap();
                let inspection = network.inspect(slot);
                assert_eq!(inspection.defects, [], "{}", slot.netns_name);
                assert_eq!(inspection.taps[0].used, TapUse::Unused);
                let host_end = lab.run(&format!("ip -d -o link show {}", slot.host_interface));
                assert!(host_end.contains(&slot.host_alias), "{host_end}");
                let filter = filters_of(lab, slot);
                assert!(filter.contains("from_guest"), "{filter}");
            }
            assert_eq!(
                network.inspect_host(std::slice::from_ref(&plan.spec.name)),
                []
            );
            let routes = lab.run("ip route");
            assert!(!routes.contains("10.64.0.2"), "no route per slot: {routes}");
            tear_down(&network, &slots);
            network.remove_pool(&plan).unwrap();
            lab.assert_unchanged(&before);
        }
    });
}

/// A start may have missed a sandbox, and builds its slot again.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_build_that_finds_a_running_sandbox_leaves_it_alone() {
    lab::run(|_| {
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            network.build(&sandbox.slot).unwrap_err();
            let gateway = sandbox.guest.network().ipv4_gateway;
            sandbox.guest.ping(gateway.into(), PATIENCE).unwrap();
            let own = sandbox.clone_addresses()[0];
            command::run(&format!("ping -n -q -c 1 -W 5 {own}")).unwrap();
            let slot = sandbox.slot.clone();
            sandbox.guest.detach().unwrap();
            tear_down(&network, &[slot]);
            network.remove_pool(&plan).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_slot_s_tap_has_no_address_and_takes_none() {
    lab::run(|lab| {
        // Worse than any host: a router is believed, and told interfaces to make addresses by themselves.
        for setting in ["accept_ra=2", "autoconf=1", "addr_gen_mode=0"] {
            lab.run(&format!("sysctl -w net.ipv6.conf.default.{setting}"));
        }
        let plan = web("host", "{}");
        let network = prepare(&plan);
        let slot = plan.slot(SlotNumber(0));
        network.build(&slot).unwrap();
        assert_has_no_address(lab, &slot);
        tear_down(&network, &[slot]);
        // Only with its carrier the kernel would make one.
        let sandbox = Sandbox::start(&network, &plan, 1);
        let mac = sandbox.guest.network().mac;
        let (router, prefix) = ("fe80::2".parse().unwrap(), "2001:db8:77::".parse().unwrap());
        for _ in 0..3 {
            let frame = frame::router_advertisement(mac, router, prefix);
            sandbox.guest.send_frame(&frame).unwrap();
        }
        lab.run(&format!("ping -c 1 -W 2 {}", sandbox.clone_addresses()[1]));
        // Duplicate address detection and a router's word each take less than two seconds.
        thread::sleep(Duration::from_secs(2));
        assert_has_no_address(lab, &sandbox.slot);
        assert!(sandbox.dropped(&network, DropReason::RogueRa) >= 3);
        assert_eq!(network.inspect(&sandbox.slot).defects, []);
    });
}

/// Neither addresses nor ways to get one, nor routes but the kernel's own for multicast.
#[track_caller]
fn assert_has_no_address(lab: &Lab, slot: &SlotPlan) {
    let tap = &slot.host_interface;
    let json = |line: &str| -> Value { serde_json::from_str(&lab.run(line)).unwrap() };
    let address = json(&format!("ip -j address show dev {tap}"));
    assert_eq!(address[0]["addr_info"], json!([]), "{address}");
    let link = json(&format!("ip -d -j link show dev {tap}"));
    assert_eq!(link[0]["inet6_addr_gen_mode"], "none", "{link}");
    for family in ["-4", "-6"] {
        let routes = json(&format!("ip {family} -j route show table all dev {tap}"));
        let mut routes = routes.as_array().unwrap().iter();
        let own = routes.find(|route| route["dst"] != "ff00::/8");
        assert_eq!(own, None, "{tap}");
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_build_that_fails_at_any_step_leaves_nothing() {
    lab::run(|lab| {
        for (kind, steps) in [
            ("netns", &BuildStep::EBPF[..]),
            ("host", &BuildStep::HOST[..]),
        ] {
            let plan = web(kind, "{}");
            let slot = plan.slot(SlotNumber(0));
            let sound = prepare(&plan);
            let before = lab.snapshot();
            for step in steps {
                let settings = Settings::new(INSTANCE);
                let network =
                    KernelNetwork::with_steps(settings, Arc::new(FailingAt(*step))).unwrap();
                network.add_pool(&plan).unwrap();
                let error = network.build(&slot).unwrap_err().to_string();
                assert!(error.contains("no storage space"), "{error}");
                lab.assert_unchanged(&before);
                assert_eq!(network.traffic(&slot), None, "no entry is left");
            }
            sound.build(&slot).unwrap();
            assert_eq!(sound.inspect(&slot).defects, []);
            tear_down(&sound, &[slot]);
            sound.remove_pool(&plan).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_tap_in_use_keeps_its_slot() {
    lab::run(|lab| {
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            let slot = &sandbox.slot;
            assert_eq!(network.withdraw_taps(slot).unwrap(), Withdrawal::Held);
            let holders = network.tap_holders(slot);
            // In a namespace only processes that are in it are told, and here it is a thread.
            if !slot.has_netns() {
                assert_eq!(holders.len(), 1, "{holders:?}");
                assert_eq!(holders[0].pid, std::process::id());
            }
            assert_eq!(network.inspect(slot).taps[0].used, TapUse::Attached);
            lab.run(&format!("ping -c 1 -W 2 {}", sandbox.clone_addresses()[0]));
            let Sandbox { slot, guest } = sandbox;
            guest.detach().unwrap();
            assert_eq!(network.withdraw_taps(&slot).unwrap(), Withdrawal::Free);
            // Again after a crash in between, and nobody finds a TAP.
            assert_eq!(network.withdraw_taps(&slot).unwrap(), Withdrawal::Free);
            assert!(network.open_taps(&slot).is_err());
            tear_down(&network, &[slot.clone(), slot]);
            assert_eq!(network.inventory().unwrap(), Default::default());
            network.remove_pool(&plan).unwrap();
        }
    });
}

/// The kernel answers questions, and refuses to change anything of the network.
fn without_net_admin<T>(work: impl FnOnce() -> T) -> T {
    let before = capabilities(None).unwrap();
    let mut fewer = before;
    fewer.effective.remove(CapabilitySet::NET_ADMIN);
    set_capabilities(None, fewer).unwrap();
    let done = work();
    set_capabilities(None, before).unwrap();
    done
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_slot_whose_host_end_stays_keeps_its_entry() {
    lab::run(|lab| {
        let plan = web("netns", "{}");
        let network = prepare(&plan);
        let slot = plan.slot(SlotNumber(0));
        network.build(&slot).unwrap();
        network.activate(&slot, &tenancy(&network, &plan)).unwrap();
        // As a process of its last tenant does.
        let holder = File::open(slot.netns_path()).unwrap();
        let slots = [slot];
        let refused = without_net_admin(|| network.tear_down(&slots));
        let text = refused[0].as_ref().unwrap_err().to_string();
        assert!(text.contains(&slots[0].host_interface), "{text}");
        let filters = filters_of(lab, &slots[0]);
        assert!(filters.contains("from_guest"), "{filters}");
        assert!(network.traffic(&slots[0]).is_some(), "nobody else gets it");
        assert_eq!(network.inspect_tenancy(&slots[0], None), []);
        tear_down(&network, &slots);
        assert_eq!(network.traffic(&slots[0]), None);
        drop(holder);
        network.remove_pool(&plan).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_slot_s_open_taps_can_be_handed_on() {
    lab::run(|_| {
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let slot = plan.slot(SlotNumber(0));
            network.build(&slot).unwrap();
            let opened = network.open_taps(&slot).unwrap();
            assert_eq!(opened.len(), 1);
            assert!(network.open_taps(&slot).is_err(), "it is in use");
            assert_eq!(network.withdraw_taps(&slot).unwrap(), Withdrawal::Held);
            drop(opened);
            assert_eq!(network.withdraw_taps(&slot).unwrap(), Withdrawal::Free);
            tear_down(&network, &[slot]);
            network.remove_pool(&plan).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_somebody_took_away_is_seen_and_repaired() {
    lab::run(|lab| {
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            let slot = &sandbox.slot;
            let pool = std::slice::from_ref(&plan.spec.name);
            let shared = lab.run("ip -o link show type bridge");
            let shared = shared.split(": ").nth(1).unwrap();
            let mut damages = vec![
                format!("tc filter delete dev {} ingress", slot.host_interface),
                format!(
                    "tc qdisc delete dev {} parent ffff:fff1",
                    slot.host_interface
                ),
            ];
            if slot.has_netns() {
                let inside = format!("ip netns exec {}", slot.netns_name);
                damages.push(format!(
                    "{inside} tc qdisc delete dev uplink0 parent ffff:fff1"
                ));
                damages.push(format!(
                    "{inside} tc qdisc delete dev vmtap0 parent ffff:fff1"
                ));
            }
            damages.push(format!(
                "ip link set {} addrgenmode eui64",
                slot.host_interface
            ));
            for damage in damages {
                lab.run(&damage);
                assert_eq!(network.inspect(slot).defects.len(), 1, "{damage}");
                let defects = network.repair(slot);
                assert_eq!(defects.len(), 1, "{damage}: {defects:?}");
                assert_eq!(defects[0].action, "repaired", "{damage}: {defects:?}");
                assert_eq!(network.inspect(slot).defects, [], "{damage}");
                lab.run(&format!("ping -c 1 -W 2 {}", sandbox.clone_addresses()[0]));
            }
            // As NetworkManager has it when it stops, for every interface; an address comes when a VMM does. The second time,
            // as who puts that right leaves it when it is killed.
            let host_end = &slot.host_interface;
            for making in [&[host_end, shared][..], &[shared]] {
                for interface in making {
                    lab.run(&format!("ip link set {interface} addrgenmode eui64"));
                }
                for interface in [shared, host_end] {
                    lab.run(&format!("ip address add fe80::5/64 dev {interface} nodad"));
                }
                let defects = network.inspect_host(pool);
                assert_eq!(defects.len(), 1, "{defects:?}");
                assert_eq!(defects[0].action, "repaired", "{defects:?}");
                assert_eq!(network.inspect_host(pool), []);
                for interface in [shared, host_end] {
                    let now = lab.run(&format!("ip address show dev {interface}"));
                    assert!(!now.contains("fe80"), "{now}");
                    let now = lab.run(&format!("ip -d link show dev {interface}"));
                    assert!(now.contains("addrgenmode none"), "{now}");
                }
            }
            for damage in [
                format!("ip link set {shared} down"),
                format!("ip link delete {shared}"),
                format!("ip link set {shared} address 02:00:00:00:00:01"),
                format!("ip route delete {IPV4}"),
                format!("sysctl -w net.ipv4.conf.{shared}.forwarding=0"),
            ] {
                lab.run(&damage);
                let defects = network.inspect_host(pool);
                assert!(!defects.is_empty(), "{damage}");
                let all_repaired = defects.iter().all(|defect| defect.action == "repaired");
                assert!(all_repaired, "{damage}: {defects:?}");
                assert_eq!(network.inspect_host(pool), [], "{damage}");
                let begun = Instant::now();
                let address = sandbox.clone_addresses()[0];
                // Decisions of the time before hold for a moment.
                while udp_echo(SocketAddr::new(address, 7), IN_VAIN).is_err() {
                    assert!(begun.elapsed() < PATIENCE, "{damage}");
                }
            }
            if kind == "host" {
                // As systemd-udevd may have it.
                let other = format!("ip link set {} address 02:00:00:00:00:01", slot.nics[0].tap);
                lab.run(&other);
                assert_eq!(network.inspect(slot).defects, []);
                assert_eq!(network.inspect(slot).taps[0].used, TapUse::Attached);
                lab.run(&format!("ping -c 1 -W 2 {}", sandbox.clone_addresses()[0]));
            }
            if kind == "host" {
                // As a former version left it.
                let open = plan.slot(SlotNumber(1));
                network.build(&open).unwrap();
                let tap = &open.nics[0].tap;
                lab.run(&format!("ip link delete {tap}"));
                lab.run(&format!("ip tuntap add {tap} mode tap"));
                lab.run(&format!("ip link set {tap} up alias {}", open.host_alias));
                let defects = network.inspect(&open).defects;
                let is_told = |problem: &str| defects.iter().any(|it| it.problem.contains(problem));
                assert!(is_told("any user of the host may open it"), "{defects:?}");
                tear_down(&network, &[open]);
            }
            // A user's own programs before and behind ours stay where they are.
            for priority in [100, 60_000] {
                // Classic BPF that matches nothing.
                let place = format!("dev {} ingress pref {priority}", slot.host_interface);
                command::shell(&format!("tc filter add {place} bpf bytecode '1,6 0 0 0,'"))
                    .unwrap();
            }
            assert_eq!(network.inspect(slot).defects, []);
            let filters = filters_of(lab, slot);
            assert!(filters.contains("pref 100 ") && filters.contains("pref 60000 "));
            drop(sandbox.guest);
            tear_down(&network, &[sandbox.slot]);
            network.remove_pool(&plan).unwrap();
        }
    });
}

/// As a VMM leaves them that deletes its TAPs at its end.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn all_taps_of_a_slot_that_are_gone_are_made_again() {
    lab::run(|lab| {
        let plan = plan(&format!(
            r#"{{"name":"web","kind":"host","data_path":"ebpf","nics":2,"policy":{{}},
                "addresses":{{"plan":"prefix","ipv4":"{IPV4}","ipv6":"{IPV6}"}}}}"#
        ));
        let network = prepare(&plan);
        let slot = plan.slot(SlotNumber(0));
        network.build(&slot).unwrap();
        for nic in &slot.nics {
            lab.run(&format!("ip link delete {}", nic.tap));
        }
        let repaired = network.repair(&slot);
        let is_done = repaired.iter().all(|defect| defect.action == "repaired");
        assert!(is_done && repaired.len() >= 2, "{repaired:?}");
        assert_eq!(network.repair(&slot), []);
        for nic in &slot.nics {
            let link = lab.run(&format!("ip -d -o link show {}", nic.tap));
            assert!(link.contains(" qdisc noqueue "), "{link}");
            assert!(link.contains("tun type tap"), "{link}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_tap_s_name_that_is_taken_is_refused_and_left_alone() {
    lab::run(|lab| {
        let plan = web("host", "{}");
        let network = prepare(&plan);
        let slot = plan.slot(SlotNumber(0));
        for kind in ["bridge", "tap"] {
            let tap = &slot.host_interface;
            match kind {
                "tap" => lab.run(&format!("ip tuntap add {tap} mode tap vnet_hdr")),
                _ => lab.run(&format!("ip link add {tap} type bridge")),
            };
            let before = lab.snapshot();
            network.build(&slot).unwrap_err();
            lab.assert_unchanged(&before);
            lab.run(&format!("ip link delete {tap}"));
        }
        network.build(&slot).unwrap();
        assert_eq!(network.inspect(&slot).defects, []);
    });
}

fn filters_of(lab: &Lab, slot: &SlotPlan) -> String {
    lab.run(&format!(
        "tc filter show dev {} ingress",
        slot.host_interface
    ))
}
