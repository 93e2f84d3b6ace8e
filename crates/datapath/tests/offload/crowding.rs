//! What a guest can do to the table of answers, which all sandboxes share.

use super::*;

/// A datagram larger than the interface's MTU goes to the stack, to be cut, and comes back as one that somebody sends.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_guest_enters_no_answers_by_sending_to_itself() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let (slot, nic) = &setting.slots[0];
        for port in 1..=20 {
            let datagram = Transport::Udp {
                ports: (4000, port),
                data: vec![7; 1600],
                summed: true,
            };
            let ip = Ip::new(guest(4), clone(4, 0), datagram);
            let frame = [&[0; VNET_HEADER], &ip.frame(GATEWAY_MAC, GUEST_MAC)[..]].concat();
            slot.file().write_all(&frame).expect("the TAP takes it");
            receive(slot, clone(4, 0));
        }
        let counters = setting.datapath.counters(*nic);
        assert!(counters.ingress.packets >= 20, "they come back");
        let table = lab.shell(&format!(
            "bpftool -j map dump pinned $(find {FOLDER} -name answers)"
        ));
        let table: serde_json::Value = serde_json::from_str(&table).expect("bpftool tells it");
        assert_eq!(table.as_array().map(Vec::len), Some(0));
    });
}
