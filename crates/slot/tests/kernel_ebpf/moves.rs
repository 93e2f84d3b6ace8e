//! What changes under traffic, and mustn't cost a packet: the data path, the policy, who is in charge.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{IpAddr, SocketAddr},
    thread,
    time::Duration,
};

use sandwire_api::drop_reason::DropReason;
use sandwire_slot::{
    kernel::KernelNetwork,
    network::{Network, Tenancy},
    plan::SlotNumber,
};
use sandwire_testlab::{
    host::{BEYOND_IPV4, BEYOND_IPV6, Beyond, ECHO_PORT, HOST_IPV4, HTTP_PORT},
    lab,
    pinger::Pinger,
};

use crate::fixture::{
    EBPF_KINDS, INSTANCE, IPV4, IPV6, pool, prepare,
    sandbox::{Sandbox, attach, tenancy},
    talk::{IN_VAIN, PATIENCE, connect, udp_echo},
    tear_down, web,
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_slot_moves_to_ebpf_and_back_without_losing_a_packet() {
    lab::run(|lab| {
        let beyond = Beyond::attach().unwrap();
        let nft = pool("web", "{}");
        let ebpf = nft
            .with_data_path(sandwire_api::slot::DataPath::Ebpf)
            .unwrap();
        let network = prepare(&nft);
        beyond.route_through_host(IPV4).unwrap();
        beyond.route_through_host(IPV6).unwrap();
        let slot = nft.slot(SlotNumber(0));
        network.build(&slot).unwrap();
        let guest = attach(&slot);
        let addresses: Vec<IpAddr> = slot.clone_addresses().collect();
        for address in &addresses {
            while udp_echo(SocketAddr::new(*address, 7), IN_VAIN).is_err() {}
        }
        // A connection that is open all the time, with something to say in every state.
        let server = SocketAddr::new(addresses[0], 7);
        let mut inward = beyond.inside(|| Ok(connect(server, PATIENCE)?)).unwrap();
        let mut say = |word: &[u8]| {
            inward.write_all(word).unwrap();
            let mut answer = vec![0; word.len()];
            inward.read_exact(&mut answer).unwrap();
            assert_eq!(answer, word);
        };
        say(b"nft");
        for round in 0..3 {
            for plan in [&ebpf, &nft] {
                let from = match plan.spec.data_path {
                    sandwire_api::slot::DataPath::Nft => ebpf.spec.data_path,
                    _ => nft.spec.data_path,
                };
                let moved = plan.slot(SlotNumber(0));
                let pingers: Vec<_> = addresses.iter().map(|one| ping(*one)).collect();
                network.change_pool(plan, Some(from)).unwrap();
                let tenancy = moved.is_ebpf().then(|| tenancy(&network, plan));
                if round == 1 {
                    network.prepare_moves(std::slice::from_ref(&moved)).unwrap();
                    say(b"prepared");
                }
                network.move_slot(&moved, tenancy.as_ref()).unwrap();
                say(b"just now");
                // Once more, as after a crash.
                network.move_slot(&moved, tenancy.as_ref()).unwrap();
                network.change_pool(plan, None).unwrap();
                for pinger in pingers {
                    let path = plan.spec.data_path;
                    assert_none_lost(pinger, &format!("to {path:?}, round {round}"));
                }
                say(b"moved");
                assert_eq!(network.inspect(&moved).defects, []);
                assert_eq!(
                    network.inspect_host(std::slice::from_ref(&plan.spec.name)),
                    []
                );
                guest.ping(BEYOND_IPV4.into(), PATIENCE).unwrap();
                guest.ping(BEYOND_IPV6.into(), PATIENCE).unwrap();
                let page = guest.fetch(SocketAddr::new(BEYOND_IPV4.into(), HTTP_PORT), PATIENCE);
                assert!(page.unwrap().contains(&HOST_IPV4.to_string()));
            }
        }
        // Slots of an older version have no qdiscs, which is no damage, and get them.
        let inside = format!("ip netns exec {} ", slot.netns_name);
        for (prefix, interface) in [
            ("", &*slot.host_interface),
            (&inside, "uplink0"),
            (&inside, "vmtap0"),
        ] {
            lab.run(&format!(
                "{prefix}tc qdisc delete dev {interface} parent ffff:fff1"
            ));
        }
        assert_eq!(network.inspect(&slot).defects, []);
        network
            .change_pool(&ebpf, Some(nft.spec.data_path))
            .unwrap();
        let moved = ebpf.slot(SlotNumber(0));
        let tenancy = tenancy(&network, &ebpf);
        network.move_slot(&moved, Some(&tenancy)).unwrap();
        network.change_pool(&ebpf, None).unwrap();
        assert_eq!(network.inspect(&moved).defects, []);
        guest.ping(BEYOND_IPV4.into(), PATIENCE).unwrap();
        drop(guest);
        tear_down(&network, &[moved]);
        network.remove_pool(&ebpf).unwrap();
        assert!(!lab.run("ip -o link").contains("sw"), "nothing is left");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_policy_changes_under_traffic() {
    lab::run(|_| {
        let _beyond = Beyond::attach().unwrap();
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            let who = SocketAddr::new(BEYOND_IPV4.into(), ECHO_PORT);
            let speak = |patience| sandbox.guest.exchange_udp(who, b"ping", patience);
            let open = tenancy(&network, &plan);
            let text = r#"{"egress":{"rules":[{"action":"deny","prefixes":["203.0.113.0/24"],
                "ports":["udp/7"]}]}}"#;
            let closed = Tenancy {
                policy: network
                    .add_policy(&serde_json::from_str(text).unwrap())
                    .unwrap(),
                ..open
            };
            for _ in 0..3 {
                speak(PATIENCE).unwrap();
                network.set_policy(&sandbox.slot, &closed).unwrap();
                let before = sandbox.dropped(&network, DropReason::Policy);
                speak(Duration::from_millis(200)).unwrap_err();
                assert!(sandbox.dropped(&network, DropReason::Policy) > before);
                sandbox.guest.ping(BEYOND_IPV4.into(), PATIENCE).unwrap();
                network.set_policy(&sandbox.slot, &open).unwrap();
            }
            assert_eq!(network.inspect_tenancy(&sandbox.slot, Some(&open)), []);
            assert_eq!(
                network.inspect_tenancy(&sandbox.slot, Some(&closed)).len(),
                1
            );
            network.remove_policy(closed.policy);
            drop(sandbox.guest);
            tear_down(&network, &[sandbox.slot]);
            network.remove_pool(&plan).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn traffic_goes_on_while_nobody_is_there_and_when_somebody_comes_back() {
    lab::run(|_| {
        let _beyond = Beyond::attach().unwrap();
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            let spare = plan.slot(SlotNumber(1));
            network.build(&spare).unwrap();
            let addresses = sandbox.clone_addresses();
            let pingers = addresses.map(ping);
            for _ in 0..3 {
                // As SIGKILL does: nothing is taken back.
                let after = KernelNetwork::open(INSTANCE).unwrap();
                after.add_pool(&plan).unwrap();
                let found = after.inventory().unwrap();
                assert_eq!(found.slots, [("web".to_owned(), 0), ("web".to_owned(), 1)]);
                let tenancy = tenancy(&after, &plan);
                after.adopt(&sandbox.slot, Some(&tenancy)).unwrap();
                after.adopt(&spare, None).unwrap();
                thread::sleep(Duration::from_millis(50));
                after.finish_adoption(&[tenancy.policy].into(), &BTreeSet::new());
                assert_eq!(after.inspect_tenancy(&sandbox.slot, Some(&tenancy)), []);
                assert_eq!(after.inspect_tenancy(&spare, None), []);
                let wrong = after.repair(&sandbox.slot);
                assert!(
                    wrong.iter().all(|found| found.action == "repaired"),
                    "{wrong:?}"
                );
                assert_eq!(after.inspect(&sandbox.slot).defects, []);
                sandbox.guest.ping(BEYOND_IPV4.into(), PATIENCE).unwrap();
            }
            for pinger in pingers {
                assert_none_lost(pinger, &format!("in a {kind} slot"));
            }
            let slots = [sandbox.slot, spare];
            drop(sandbox.guest);
            tear_down(&network, &slots);
            network.remove_pool(&plan).unwrap();
        }
    });
}

/// Pings every 5 ms.
fn ping(address: IpAddr) -> Pinger {
    let pinger = Pinger::start(
        "/proc/self/ns/net".as_ref(),
        address,
        Duration::from_millis(5),
    );
    thread::sleep(Duration::from_millis(100));
    pinger.unwrap()
}

/// Ends a ping of which no packet may be lost.
#[track_caller]
fn assert_none_lost(pinger: Pinger, when: &str) {
    thread::sleep(Duration::from_millis(100));
    let pinged = pinger.stop().unwrap();
    assert!(
        pinged.sent > 20 && pinged.lost.is_empty(),
        "{pinged:?} {when}"
    );
}
