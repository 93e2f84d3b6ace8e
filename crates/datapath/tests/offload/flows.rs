//! How many flows the table of decisions has room for, and what one packet may be cut into.

use std::collections::BTreeSet;

use super::*;

/// A table in which a flow has one place would keep 898 of these thousand; those that share one decide
/// anew with each packet.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_nearly_each_of_a_thousand_flows_is_decided_once() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let (from, nic) = &setting.slots[0];
        let spec = PolicySpec {
            uplink: UplinkPolicy::Route,
            egress: EgressPolicy {
                default: PolicyAction::Deny,
                rules: vec![EgressRule {
                    action: PolicyAction::Allow,
                    prefixes: vec!["0.0.0.0/0".parse().expect("a prefix")],
                    ports: vec!["udp/1-65535".parse().expect("ports")],
                }],
            },
            ..PolicySpec::default()
        };
        let policy = policy::compile(&spec, &[]).expect("a policy");
        let policy = setting.datapath.add_policy(&policy);
        setting
            .datapath
            .set_policy(*nic, policy.expect("there is room"));
        send_to_ports(from, &setting.uplink);
        let kept = decided_ports(lab, *nic);
        assert!(kept.len() > 950, "{} of {FLOWS}", kept.len());
    });
}

/// Where nothing looks at ports, a destination is decided once: a server's clients, each answered at a port of its own,
/// cost what one costs.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_destination_is_decided_once_for_all_its_ports() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let (from, nic) = &setting.slots[0];
        send_to_ports(from, &setting.uplink);
        assert_eq!(decided_ports(lab, *nic), BTreeSet::from([0]));
        // A rule that names a port may lead any of them elsewhere.
        lab.run("ip rule add ipproto udp dport 7 lookup main");
        std::thread::sleep(Duration::from_millis(150));
        send_to_ports(from, &setting.uplink);
        let kept = decided_ports(lab, *nic);
        assert!(kept.len() > 950, "{} of {FLOWS}", kept.len());
    });
}

/// That ports are looked at is decided for all of them at another time than what is decided for each.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_port_whose_decision_outlives_that_for_all_leaves() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let (from, _) = &setting.slots[0];
        lab.run("ip rule add ipproto udp dport 7 lookup main");
        lab.run("ip -6 rule add ipproto udp dport 7 lookup main");
        std::thread::sleep(Duration::from_millis(150));
        for _ in 0..8 {
            // The second port is decided while the decision for all holds, and asked for again when that is over.
            for (port, rest) in [(1, 60), (2, 60), (2, 0)] {
                for version in [4, 6] {
                    send_datagram(from, peer(version, 0), port, 20);
                    receive(&setting.uplink, clone(version, 0));
                }
                std::thread::sleep(Duration::from_millis(rest));
            }
        }
    });
}

const FLOWS: u16 = 1000;

/// A datagram to each of a peer's ports, one after the other.
fn send_to_ports(from: &Opened, uplink: &Opened) {
    for port in 1..=FLOWS {
        send_datagram(from, peer(4, 0), port, 20);
        receive(uplink, clone(4, 0));
    }
}

/// The ports for which something is decided, of all processors; 0 for all of them.
fn decided_ports(lab: &Lab, nic: NicIndex) -> BTreeSet<u64> {
    let table = lab.shell(&format!(
        "bpftool -j map dump pinned $(find {FOLDER} -name decisions)"
    ));
    let table: serde_json::Value = serde_json::from_str(&table).expect("bpftool tells it");
    let entries = table.as_array().expect("a list").iter();
    entries
        .map(|entry| &entry["formatted"]["value"])
        .filter(|decision| decision["nic"] == nic.0 && decision["until"] != 0)
        .filter_map(|decision| decision["port"].as_u64())
        .collect()
}

/// A write of 64 KiB that are to be cut into single ones would keep a processor from all others; in the smallest that a
/// peer may have asked for, it passes.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_no_packet_is_cut_into_more_segments_than_any_sender_means() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let (from, nic) = &setting.slots[0];
        for version in [4, 6] {
            let (ip, _) = packets(guest(version), peer(version, 0)).remove(3);
            let send = |gso_size| {
                let bytes = unfinished(&ip, (GATEWAY_MAC, GUEST_MAC), gso_size);
                from.file().write_all(&bytes).expect("the TAP takes it");
            };
            send(1);
            // Nor by headers that it doesn't have.
            let mut bytes = unfinished(&ip, (GATEWAY_MAC, GUEST_MAC), 20);
            bytes[6..8].copy_from_slice(&30_000_u16.to_ne_bytes());
            from.file().write_all(&bytes).expect("the TAP takes it");
            send(36);
            let (header, _) = receive(&setting.uplink, clone(version, 0));
            assert_eq!(header.gso_size, 36);
        }
        let drops = setting.datapath.counters(*nic).drops;
        assert_eq!(drops[DropReason::Malformed as usize], 4);
    });
}
