//! Interfaces in namespaces that somebody else made: two "containers" made by `ip netns`, the host, and the world
//! beyond the uplink. The judges are `ip`, ping and sockets.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use sandwire_api::{
    attach::{Attach, AttachedDevice},
    drop_reason::DropReason,
};
use sandwire_slot::{
    attach::AttachRecord,
    kernel::{BuildStep, KernelNetwork, Settings},
    network::Network,
    plan::{Plan, SlotNumber, SlotPlan},
};
use sandwire_testlab::{
    host::{BEYOND_IPV4, BEYOND_IPV6, Beyond, HTTP_PORT, answer_http, serve_tcp},
    lab::{self, Lab},
    namespace::Namespace,
};

use crate::fixture::{
    INSTANCE,
    failing_at::FailingAt,
    prepare,
    sandbox::tenancy,
    talk::{PATIENCE, connect, http_get, serve_on_host},
    tear_down, web,
};

/// Two that may talk to each other and to nobody else.
const TALKATIVE: &str = r#"{"clone_to_clone": true, "uplink": "deny"}"#;

/// The slot as a lease has it whose interface goes into a namespace, with further fields of the request.
fn slot_for(
    network: &KernelNetwork,
    plan: &Plan,
    number: u32,
    netns: &str,
    more: &str,
) -> SlotPlan {
    let request: Attach =
        serde_json::from_str(&format!(r#"{{"netns": "{netns}"{more}}}"#)).unwrap();
    let netns_cookie = network.find_namespace(&request.netns).unwrap();
    let record = AttachRecord {
        request,
        netns_cookie,
        device: AttachedDevice::Veth,
        device_reason: None,
        parent: None,
        has_mac_of_all: true,
        is_done: true,
    };
    plan.slot(SlotNumber(number)).attached_by(Some(&record))
}

/// Builds a slot, hands it out and attaches it.
fn attach(network: &KernelNetwork, plan: &Plan, number: u32, netns: &str, more: &str) -> SlotPlan {
    let slot = slot_for(network, plan, number, netns, more);
    network.build(&plan.slot(slot.number)).unwrap();
    network.activate(&slot, &tenancy(network, plan)).unwrap();
    network.attach(&slot).unwrap();
    slot
}

fn path_of(namespace: &Namespace) -> String {
    namespace.path().display().to_string()
}

fn dropped(network: &KernelNetwork, slot: &SlotPlan, reason: DropReason) -> u64 {
    let traffic = network.traffic(slot).unwrap();
    traffic.drops.get(&reason).copied().unwrap_or(0)
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_attached_interface_is_as_it_was_asked_for_and_goes_without_trace() {
    lab::run(|lab| {
        let plan = web("container", "{}");
        let network = prepare(&plan);
        let blue = lab.namespace("blue");
        let before = lab.snapshot();
        let mac = "06:00:00:00:00:77";
        let more = format!(r#", "interface": "net1", "mtu": 1400, "mac": "{mac}""#);
        let slot = attach(&network, &plan, 0, &path_of(&blue), &more);
        assert_eq!(network.inspect(&slot).defects, []);
        assert_eq!(network.inspect_attached(&slot), []);

        let shown = blue.run("ip -d -j address show dev net1").unwrap();
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        let shown = &shown[0];
        assert_eq!(
            (&shown["mtu"], &shown["address"]),
            (&1400.into(), &mac.into())
        );
        let mut addresses: Vec<String> = shown["addr_info"]
            .as_array()
            .unwrap()
            .iter()
            .map(|own| {
                assert_eq!(own["tentative"], serde_json::Value::Null, "{own}");
                format!("{}/{}", own["local"].as_str().unwrap(), own["prefixlen"])
            })
            .collect();
        addresses.sort();
        assert_eq!(addresses, ["10.64.0.2/32", "fd00:c10e::2/128"]);
        let routes = blue.run("ip route").unwrap();
        assert_eq!(
            routes.trim(),
            "default via 169.254.1.1 dev net1 proto static src 10.64.0.2 onlink"
        );
        let routes = blue.run("ip -6 route show default").unwrap();
        assert!(routes.contains("default via fe80::1 dev net1"), "{routes}");
        let neighbours = blue.run("ip neighbour").unwrap();
        assert_eq!(
            neighbours
                .matches("lladdr 02:73:77:00:00:01 PERMANENT")
                .count(),
            2,
            "{neighbours}"
        );
        let setting = blue
            .run("cat /proc/sys/net/ipv6/conf/net1/accept_ra")
            .unwrap();
        assert_eq!(setting.trim(), "0");
        let offloads = blue.run("ethtool -k net1");
        if let Ok(offloads) = offloads {
            assert!(
                offloads.contains("tcp-segmentation-offload: on"),
                "{offloads}"
            );
        }

        network.withdraw_taps(&slot).unwrap();
        let left = blue.run("ip -o link").unwrap();
        assert_eq!(left.lines().count(), 1, "only the loopback is left: {left}");
        tear_down(&network, &[slot]);
        lab.assert_unchanged(&before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn containers_reach_what_their_policy_allows() {
    lab::run(|lab| {
        serve_on_host();
        let beyond = Beyond::attach().unwrap();
        let plan = web("container", "{}");
        let network = prepare(&plan);
        let spaces = [lab.namespace("blue"), lab.namespace("red")];
        let slots = [0, 1].map(|number| {
            let place = usize::try_from(number).unwrap();
            attach(&network, &plan, number, &path_of(&spaces[place]), "")
        });
        for space in &spaces {
            space.inside(|| serve_tcp(80, answer_http)).unwrap();
            // The gateway answers, though there is nobody. The first answers are lost until the kernel has set the host end's
            // queue going, a moment after it has a carrier.
            space.run("ping -c 10 -i 0.2 169.254.1.1").unwrap();
        }
        for (slot, other, space) in [
            (&slots[0], &slots[1], &spaces[0]),
            (&slots[1], &slots[0], &spaces[1]),
        ] {
            for own in slot.clone_addresses() {
                let page = http_get(SocketAddr::new(own, 80)).unwrap();
                assert!(page.starts_with("HTTP/1"), "{page}");
            }
            // By the world's address behind the host's, as masquerading is the default.
            for server in [IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()] {
                let page = space
                    .inside(|| Ok(http_get(SocketAddr::new(server, HTTP_PORT))?))
                    .unwrap();
                assert!(page.starts_with("HTTP/1"), "{page}");
            }
            for address in other.clone_addresses() {
                let ping = format!("ping -c 1 -W 1 {address}");
                space.run(&ping).unwrap_err();
            }
            assert!(dropped(&network, slot, DropReason::OtherSandbox) >= 2);
        }
        beyond.route_through_host("10.64.0.0/24").unwrap();
        for slot in &slots {
            for own in slot.clone_addresses().filter(IpAddr::is_ipv4) {
                beyond.run(&format!("ping -c 1 -W 5 {own}")).unwrap();
            }
        }

        // Their policy changes under them: they reach each other, past the host's stack, and nobody else.
        let talkative = web("container", TALKATIVE);
        for (slot, other, space) in [
            (&slots[0], &slots[1], &spaces[0]),
            (&slots[1], &slots[0], &spaces[1]),
        ] {
            for both in [slot, other] {
                network
                    .set_policy(both, &tenancy(&network, &talkative))
                    .unwrap();
            }
            for address in other.clone_addresses() {
                let page = space
                    .inside(|| Ok(http_get(SocketAddr::new(address, 80))?))
                    .unwrap();
                assert!(page.starts_with("HTTP/1"), "{page}");
            }
            let denied = SocketAddr::new(BEYOND_IPV4.into(), HTTP_PORT);
            space
                .inside(|| Ok(connect(denied, std::time::Duration::from_millis(700))?))
                .unwrap_err();
            assert!(dropped(&network, slot, DropReason::UplinkDenied) > 0);
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_container_speaks_for_itself_alone() {
    lab::run(|lab| {
        let plan = web("container", TALKATIVE);
        let network = prepare(&plan);
        let spaces = [lab.namespace("blue"), lab.namespace("red")];
        let slots = [0, 1].map(|number| {
            let place = usize::try_from(number).unwrap();
            attach(&network, &plan, number, &path_of(&spaces[place]), "")
        });
        spaces[0]
            .run("ip address add 10.64.0.99/32 dev eth0")
            .unwrap();
        spaces[0]
            .run("ping -c 1 -W 1 -I 10.64.0.99 10.64.0.3")
            .unwrap_err();
        assert_eq!(dropped(&network, &slots[0], DropReason::SourceAddress), 1);
        spaces[0]
            .run("ip link set eth0 address 06:00:00:00:00:01")
            .unwrap();
        spaces[0].run("ping -c 1 -W 1 10.64.0.3").unwrap_err();
        assert!(dropped(&network, &slots[0], DropReason::SourceMac) >= 1);
    });
}

/// What a failed attempt must not have changed in a namespace and on the host.
fn state_of(lab: &Lab, space: &Namespace) -> String {
    let inside = space.run("ip -o address").unwrap() + &space.run("ip route").unwrap();
    inside + &lab.run("ip -o link")
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_attach_that_fails_at_any_step_leaves_nothing() {
    lab::run(|lab| {
        let plan = web("container", "{}");
        let sound = prepare(&plan);
        let blue = lab.namespace("blue");
        let before = state_of(lab, &blue);
        let tap = r#", "tap": {"name": "tap0"}"#;
        for step in BuildStep::ATTACH.into_iter().chain(BuildStep::BESIDE) {
            let settings = Settings::new(INSTANCE);
            let network = KernelNetwork::with_steps(settings, Arc::new(FailingAt(step))).unwrap();
            network.add_pool(&plan).unwrap();
            let slot = slot_for(&sound, &plan, 0, &path_of(&blue), tap);
            if step != BuildStep::Entry {
                network.build(&plan.slot(slot.number)).unwrap();
            }
            let error = network.attach(&slot).unwrap_err().to_string();
            assert!(error.contains("no storage space"), "{error}");
            assert_eq!(state_of(lab, &blue), before, "{step:?}");
        }
        attach(&sound, &plan, 0, &path_of(&blue), tap);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_stands_in_the_way_is_named_and_left_alone() {
    lab::run(|lab| {
        let plan = web("container", "{}");
        let network = prepare(&plan);
        let blue = lab.namespace("blue");
        let path = path_of(&blue);
        network.build(&plan.slot(SlotNumber(0))).unwrap();
        let attempt = |more: &str| {
            let slot = slot_for(&network, &plan, 0, &path, more);
            network.attach(&slot).unwrap_err().to_string()
        };

        blue.run("ip link add eth0 type veth peer name other")
            .unwrap();
        let before = state_of(lab, &blue);
        let error = attempt("");
        assert!(
            error.contains("eth0") && error.contains("one of that name"),
            "{error}"
        );
        assert_eq!(state_of(lab, &blue), before);

        blue.run("ip address add 192.0.2.1/24 dev eth0").unwrap();
        blue.run("ip link set eth0 up").unwrap();
        blue.run("ip route add default via 192.0.2.2").unwrap();
        let before = state_of(lab, &blue);
        let error = attempt(r#", "interface": "net1""#);
        assert!(
            error.contains("route 0.0.0.0/0") && error.contains("one that is there"),
            "{error}"
        );
        assert_eq!(state_of(lab, &blue), before, "their default route stays");
        // A further interface, with routes that nobody has yet.
        let more = r#", "interface": "net1", "routes": ["198.51.100.0/24"]"#;
        let slot = slot_for(&network, &plan, 0, &path, more);
        network.attach(&slot).unwrap();
        assert_eq!(network.inspect_attached(&slot), []);

        for (wrong, said) in [
            ("/proc/self/ns/net", "the host's own"),
            ("/run/netns/nobody", "No such file"),
            ("/etc/hostname", "not a network namespace"),
            ("/proc/self/ns/mnt", "not a network namespace"),
        ] {
            let error = network
                .find_namespace(wrong.as_ref())
                .unwrap_err()
                .to_string();
            assert!(error.contains(said) && error.contains(wrong), "{error}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_namespace_that_goes_takes_its_interface_and_another_of_its_name_gets_none() {
    lab::run(|lab| {
        let plan = web("container", "{}");
        let network = prepare(&plan);
        lab.run("ip netns add green");
        let slot = attach(&network, &plan, 0, "/run/netns/green", "");
        lab.run("ip netns delete green");
        let begun = Instant::now();
        while lab.run("ip -o link").contains(&slot.host_interface) {
            assert!(
                begun.elapsed() < PATIENCE,
                "the kernel takes the interface away"
            );
        }
        assert_eq!(network.inspect(&slot).defects.len(), 1);
        let told = network.inspect_attached(&slot);
        assert!(told[0].problem.contains("No such file"), "{told:?}");
        lab.run("ip netns add green");
        let repaired = network.repair(&slot);
        assert!(repaired[0].action == "reported", "{repaired:?}");
        assert!(
            repaired[0].problem.contains("that of the lease is gone"),
            "{repaired:?}"
        );
        assert!(!lab.run("ip -n green -o link").contains("eth0"));
        // Releasing it has nothing to do, and says so to nobody.
        network.withdraw_taps(&slot).unwrap();
        tear_down(&network, &[slot]);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_interface_that_somebody_deletes_is_made_again_and_what_is_changed_is_told() {
    lab::run(|lab| {
        let plan = web("container", "{}");
        let network = prepare(&plan);
        let blue = lab.namespace("blue");
        let slot = attach(&network, &plan, 0, &path_of(&blue), "");
        blue.run("ip link delete eth0").unwrap();
        let told = network.inspect_attached(&slot);
        assert!(told[0].problem.contains("gone"), "{told:?}");
        let repaired = network.repair(&slot);
        assert!(
            repaired.iter().all(|defect| defect.action == "repaired"),
            "{repaired:?}"
        );
        assert_eq!(network.inspect(&slot).defects, []);
        assert_eq!(network.inspect_attached(&slot), []);
        blue.run("ping -c 10 -i 0.2 169.254.1.1").unwrap();

        for (change, said) in [
            ("ip route delete default", "the route to 0.0.0.0/0 is gone"),
            (
                "ip address delete fd00:c10e::2/128 dev eth0",
                "it lacks address fd00:c10e::2/128",
            ),
            ("ip link set eth0 mtu 1300", "its MTU is 1300, not 1500"),
            ("ip link set eth0 down", "it is down"),
        ] {
            blue.run(change).unwrap();
            let told = network.inspect_attached(&slot);
            assert!(told.iter().any(|defect| defect.problem == said), "{told:?}");
        }
        // The sandbox's own affair: nobody repairs it.
        assert_eq!(network.repair(&slot), []);
        blue.run("ip link delete eth0").unwrap();
        blue.run("ip link add eth0 type veth peer name other")
            .unwrap();
        let told = network.inspect_attached(&slot);
        assert!(told[0].problem.contains("not the other end"), "{told:?}");
    });
}

/// Nothing but their entries is there, by which the next daemon doesn't take them over.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn entries_of_slots_that_waited_are_given_back_after_a_start() {
    lab::run(|_| {
        let plan = web("container", "{}");
        let network = prepare(&plan);
        let [waited, torn_down, anew] = [7, 8, 9].map(|number| plan.slot(SlotNumber(number)));
        for slot in [&waited, &torn_down, &anew] {
            network.build(slot).unwrap();
        }
        drop(network);
        let network = prepare(&plan);
        let is_known = |slot: &SlotPlan| network.traffic(slot).is_some();
        assert!(is_known(&waited));
        network.build(&anew).unwrap();
        let present = [(torn_down.pool_number, torn_down.number.0)].into();
        network.finish_adoption(&BTreeSet::new(), &present);
        assert_eq!(
            [&waited, &torn_down, &anew].map(is_known),
            [false, true, true]
        );
        // It may come later, as any other.
        network.build(&waited).unwrap();
        assert!(is_known(&waited));
        tear_down(&network, &[waited, torn_down, anew]);
        network.remove_pool(&plan).unwrap();
    });
}
