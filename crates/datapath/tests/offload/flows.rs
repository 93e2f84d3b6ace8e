//! How many flows the table of decisions has room for.

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
