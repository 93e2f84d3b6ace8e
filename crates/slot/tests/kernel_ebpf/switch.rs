//! Slots that are taken over by maps of another size.

use std::{collections::BTreeSet, fs, net::SocketAddr, sync::Arc, time::Duration};

use sandwire_datapath::{Datapath, abi::NicFlag};
use sandwire_slot::{
    kernel::{BuildStep, KernelNetwork, Settings},
    network::{Network, Tenancy},
    plan::{Plan, SlotNumber},
};
use sandwire_testlab::{
    host::{BEYOND_IPV4, Beyond, ECHO_PORT},
    lab::{self, Lab},
};
use serde_json::Value;

use crate::fixture::{
    INSTANCE, IPV4, IPV6,
    failing_at::FailingAt,
    plan,
    sandbox::{Sandbox, tenancy},
    talk::{PATIENCE, udp_echo},
    tear_down, web,
};

pub(super) fn settings(nics_max: u32) -> Settings {
    let mut settings = Settings::new(INSTANCE);
    settings.ebpf.nics_max = nics_max;
    settings
}

/// Whether maps of before are there.
fn has_old_maps() -> bool {
    let folder = sandwire_datapath::folder_for(INSTANCE);
    let mut names = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    names.any(|name| name != "v1" && name != "links")
}

/// The kernel refuses to exchange the slot's programs at the start, and does it when somebody looks.
fn is_left_behind_and_mended(plan: &Plan) {
    let _beyond = Beyond::attach().unwrap();
    let network = KernelNetwork::open_with(settings(128)).unwrap();
    network.add_pool(plan).unwrap();
    let sandbox = Sandbox::start(&network, plan, 0);
    let slot = &sandbox.slot;
    let server = SocketAddr::new(BEYOND_IPV4.into(), ECHO_PORT);
    let speak = |patience| sandbox.guest.exchange_udp(server, b"ping", patience);
    speak(PATIENCE).unwrap();
    let counted = |network: &KernelNetwork| network.traffic(slot).unwrap().ingress.packets;
    let before = counted(&network);

    let failing = Arc::new(FailingAt(BuildStep::Exchange));
    let after = KernelNetwork::with_steps(settings(256), failing).unwrap();
    after.add_pool(plan).unwrap();
    assert_eq!(after.inventory().unwrap().slots, [("web".to_owned(), 0)]);
    let open = tenancy(&after, plan);
    after.adopt(slot, Some(&open)).unwrap();
    let error = after.switch_over().unwrap_err().to_string();
    assert!(error.contains("exchange the programs of"), "{error}");
    after.finish_adoption(&[open.policy].into(), &BTreeSet::new());
    after.finish_migration();
    assert!(has_old_maps(), "packets go by them");
    // Calls come by new maps, and answers leave by old ones.
    for address in sandbox.clone_addresses() {
        udp_echo(SocketAddr::new(address, 7), PATIENCE).unwrap();
    }

    let deny = r#"{"egress":{"rules":[{"action":"deny","prefixes":["203.0.113.0/24"]}]}}"#;
    let closed = Tenancy {
        policy: after
            .add_policy(&serde_json::from_str(deny).unwrap())
            .unwrap(),
        ..open
    };
    after.set_policy(slot, &closed).unwrap();
    speak(PATIENCE).unwrap();
    let text = "it uses other maps than the daemon, whose policies don't reach it";
    let found = after.inspect(slot).defects;
    assert_eq!((found.len(), found[0].problem.as_str()), (1, text));
    after.finish_migration();
    assert!(has_old_maps(), "nobody has mended it");
    let found = after.repair(slot);
    assert_eq!((found.len(), found[0].action.as_str()), (1, "repaired"));
    speak(Duration::from_millis(300)).unwrap_err();
    after.set_policy(slot, &open).unwrap();
    speak(PATIENCE).unwrap();
    assert_eq!(after.inspect(slot).defects, []);
    let by_new_maps = counted(&after);
    let taken_over = after.finish_migration();
    assert!(!has_old_maps());
    assert_eq!(counted(&after), before + 4, "by maps of both sizes");
    let of_pool = &taken_over[&slot.pool_number];
    assert_eq!(of_pool.ingress.packets, before + 4 - by_new_maps);
    tear_down(&after, &[sandbox.slot]);
    after.remove_pool(plan).unwrap();
}

/// The program of XDP on an interface.
fn xdp_program(lab: &Lab, interface: &str) -> Value {
    let shown = lab.run(&format!("ip -d -j link show dev {interface}"));
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert!(shown[0]["xdp"]["prog"]["id"].is_u64(), "{shown}");
    shown[0]["xdp"]["prog"]["id"].clone()
}

fn xdp_pool() -> Plan {
    plan(&format!(
        r#"{{"name":"web","kind":"host","data_path":"xdp",
            "addresses":{{"plan":"prefix","ipv4":"{IPV4}","ipv6":"{IPV6}"}}}}"#
    ))
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_slot_with_xdp_left_behind_by_a_switch_is_mended() {
    lab::run(|_| is_left_behind_and_mended(&xdp_pool()));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_switch_exchanges_programs_of_xdp_too() {
    lab::run(|lab| {
        let _beyond = Beyond::attach().unwrap();
        let plan = xdp_pool();
        let network = KernelNetwork::open_with(settings(128)).unwrap();
        network.add_pool(&plan).unwrap();
        let sandbox = Sandbox::start(&network, &plan, 0);
        let slot = &sandbox.slot;
        let before = xdp_program(lab, &slot.host_interface);
        // Another daemon's, by the same maps: it is exchanged when somebody looks.
        let same = KernelNetwork::open_with(settings(128)).unwrap();
        same.add_pool(&plan).unwrap();
        same.adopt(slot, Some(&tenancy(&same, &plan))).unwrap();
        same.switch_over().unwrap();
        assert_eq!(xdp_program(lab, &slot.host_interface), before);
        assert_eq!(same.inspect(slot).defects, []);
        let exchanged = xdp_program(lab, &slot.host_interface);
        assert_ne!(exchanged, before);

        let after = KernelNetwork::open_with(settings(256)).unwrap();
        after.add_pool(&plan).unwrap();
        after.adopt(slot, Some(&tenancy(&after, &plan))).unwrap();
        assert_eq!(xdp_program(lab, &slot.host_interface), exchanged, "not yet");
        after.switch_over().unwrap();
        assert_ne!(xdp_program(lab, &slot.host_interface), exchanged);
        assert_eq!(after.inspect(slot).defects, []);
        after.finish_migration();
        assert!(!has_old_maps());
        sandbox.guest.ping(BEYOND_IPV4.into(), PATIENCE).unwrap();
        tear_down(&after, &[sandbox.slot]);
        after.remove_pool(&plan).unwrap();
    });
}

/// Of which slots the maps in use say that other programs divert their packets.
fn impaired(settings: &Settings) -> Vec<(u32, bool)> {
    let known = Datapath::open(&settings.ebpf).unwrap().datapath.used();
    let is_impaired = |flags: u32| flags & NicFlag::Impaired.number() != 0;
    let mut slots: Vec<_> = known
        .iter()
        .map(|(_, nic)| (nic.slot, is_impaired(nic.flags)))
        .collect();
    slots.sort_unstable();
    slots
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_impaired_slot_is_impaired_by_new_maps_too() {
    lab::run(|_| {
        let plan = xdp_pool();
        // What is remembered of calls is kept with the first, and not with the second.
        let mut other_answers = settings(128);
        other_answers.ebpf.answers_max = 1024;
        for other in [settings(256), other_answers] {
            let network = KernelNetwork::open_with(settings(128)).unwrap();
            network.add_pool(&plan).unwrap();
            let slots = [0, 1, 2].map(|number| plan.slot(SlotNumber(number)));
            for slot in &slots {
                network.build(slot).unwrap();
                network.activate(slot, &tenancy(&network, &plan)).unwrap();
            }
            network.set_impaired(&slots[0], true).unwrap();
            network.set_impaired(&slots[2], true).unwrap();
            let after = KernelNetwork::open_with(other.clone()).unwrap();
            after.add_pool(&plan).unwrap();
            // Its impairment has ended meanwhile, which is found out before anybody takes it over.
            after.set_impaired(&slots[2], false).unwrap();
            for slot in &slots {
                after.adopt(slot, Some(&tenancy(&after, &plan))).unwrap();
            }
            after.switch_over().unwrap();
            after.finish_migration();
            assert_eq!(impaired(&other), [(0, true), (1, false), (2, false)]);
            tear_down(&after, &slots);
            after.remove_pool(&plan).unwrap();
            Datapath::remove(&other.ebpf.folder).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_netns_slot_left_behind_by_a_switch_is_mended() {
    lab::run(|_| is_left_behind_and_mended(&web("netns", "{}")));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_slot_left_behind_by_a_switch_is_mended() {
    lab::run(|_| is_left_behind_and_mended(&web("host", "{}")));
}
