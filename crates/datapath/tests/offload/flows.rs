//! How many flows the table of decisions has room for, and what one packet may be cut into.

use std::collections::BTreeSet;

use super::*;

/// A table in which a flow has one place would keep 898 of these thousand; those that share one decide
/// anew with each packet.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_nearly_each_of_a_thousand_flows_is_decided_once() {
    const FLOWS: u16 = 1000;
    lab::run(|lab| {
        let setting = set_up(lab);
        let (from, nic) = &setting.slots[0];
        for port in 1..=FLOWS {
            let datagram = Transport::Udp {
                ports: (4000, port),
                data: b"one of many".to_vec(),
                summed: true,
            };
            let ip = Ip::new(guest(4), peer(4, 0), datagram);
            let bytes = unfinished(&ip, (GATEWAY_MAC, GUEST_MAC), 0);
            from.file().write_all(&bytes).expect("the TAP takes it");
            receive(&setting.uplink, clone(4, 0));
        }
        let table = lab.shell(&format!(
            "bpftool -j map dump pinned $(find {FOLDER} -name decisions)"
        ));
        let table: serde_json::Value = serde_json::from_str(&table).expect("bpftool tells it");
        let entries = table.as_array().expect("a list").iter();
        let kept: BTreeSet<u64> = entries
            .map(|entry| &entry["formatted"]["value"])
            .filter(|decision| decision["nic"] == nic.0 && decision["until"] != 0)
            .filter_map(|decision| decision["port"].as_u64())
            .collect();
        assert!(kept.len() > 950, "{} of {FLOWS}", kept.len());
    });
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
            send(36);
            let (header, _) = receive(&setting.uplink, clone(version, 0));
            assert_eq!(header.gso_size, 36);
        }
        let drops = setting.datapath.counters(*nic).drops;
        assert_eq!(drops[DropReason::Malformed as usize], 2);
    });
}
