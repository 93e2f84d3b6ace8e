//! What a guest can do to what all share: the table of answers, that of neighbours, links.

use super::*;

/// A datagram larger than the interface's MTU goes to the stack, to be cut, and comes back as one that somebody sends.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_guest_enters_no_answers_by_sending_to_itself() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let (slot, nic) = &setting.slots[0];
        for port in 1..=20 {
            send_datagram(slot, clone(4, 0), port, 1600);
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

/// Addresses on the uplink's link that nobody has: more than the path takes in, however slow the machine is.
const SCANNED: u16 = 400;

/// Each would be an entry in the table of neighbours, which is one for the whole machine.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_guest_that_scans_a_link_fills_no_table_of_neighbours() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let (slot, nic) = &setting.slots[0];
        let send = |to| send_datagram(slot, to, 53, 20);
        for last in 1..=SCANNED {
            send(Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 1, last).into());
        }
        let counters = setting.datapath.counters(*nic);
        let refused = counters.drops[DropReason::NeighbourLimit as usize];
        assert_eq!(counters.egress.packets + refused, u64::from(SCANNED));
        assert!(counters.egress.packets >= 32, "{counters:?}");
        assert!(refused >= u64::from(SCANNED) / 4, "{counters:?}");
        let table: serde_json::Value =
            serde_json::from_str(&lab.run("ip -6 -j neighbour show dev up0")).expect("ip tells it");
        let asked = table.as_array().expect("a list").iter();
        let asked = asked.filter(|entry| entry["state"][0] != "PERMANENT");
        assert!(
            asked.count() as u64 <= counters.egress.packets,
            "{counters:?}"
        );
        // Whom the host knows can be reached all the same.
        send(peer(6, 0));
        receive(&setting.uplink, clone(6, 0));
    });
}

/// More new neighbours in a moment than anybody may have looked for.
const CRAWLED: u16 = 100;

/// The kernel enters each all the same, but has nobody to wait for and makes room by them.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_links_where_nobody_is_looked_for_are_without_limit() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let (slot, nic) = &setting.slots[0];
        lab.shell(
            "ip link set up0 arp off
             ip tuntap add dev tun0 mode tun
             ip link set tun0 up
             ip -6 route add 2001:db8:ffff::/48 dev tun0",
        );
        for (link, first) in [("up0", 0x0001_0000_u32), ("tun0", 0xffff_0000)] {
            let send = |last| {
                let [a, b] = [(first >> 16) as u16, first as u16];
                let to = Ipv6Addr::new(0x2001, 0xdb8, a, b, 0, 0, 2, last);
                send_datagram(slot, to.into(), 53, 20);
            };
            send(0);
            // What goes through the host's stack is there a moment later.
            let until = Instant::now() + PATIENCE;
            let show = format!("ip -6 neighbour show dev {link} nud noarp");
            while !lab.run(&show).contains("::2:0 ") {
                assert!(Instant::now() < until, "no neighbour by {link}");
            }
            (1..=CRAWLED).for_each(send);
        }
        let counters = setting.datapath.counters(*nic);
        assert_eq!(counters.drops[DropReason::NeighbourLimit as usize], 0);
        assert_eq!(counters.egress.packets, 2 * (u64::from(CRAWLED) + 1));
    });
}

/// The kernel knows no such neighbour before the first packet, and everybody from then on.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_table_of_its_own_leads_no_guest_to_everybody_on_a_link() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let (slot, nic) = &setting.slots[0];
        lab.run("ip route add 192.0.2.0/24 dev up0 table 77");
        let spec = PolicySpec {
            uplink: UplinkPolicy::Route,
            route_table: Some(77),
            ..PolicySpec::default()
        };
        let policy = policy::compile(&spec, &[]).expect("a policy");
        let policy = setting.datapath.add_policy(&policy);
        setting
            .datapath
            .set_policy(*nic, policy.expect("there is room"));
        let send = |to| send_datagram(slot, to, 53, 20);
        for _ in 0..2 {
            send(Ipv4Addr::new(192, 0, 2, 255).into());
        }
        let counters = setting.datapath.counters(*nic);
        assert_eq!(counters.drops[DropReason::Multicast as usize], 2);
        assert_eq!(counters.egress.packets, 0);
        send(peer(4, 0));
        receive(&setting.uplink, clone(4, 0));
    });
}
