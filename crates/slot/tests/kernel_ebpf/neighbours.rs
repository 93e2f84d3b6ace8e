//! What sandboxes of one host have to do with each other: groups that may talk, and what one may not say on its link in
//! another's name.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use sandwire_api::drop_reason::DropReason;
use sandwire_datapath::group_number;
use sandwire_slot::{kernel::KernelNetwork, network::Network};
use sandwire_testlab::{fake_guest::frame, host::Beyond, lab};

use crate::fixture::{
    ebpf_pool, prepare,
    sandbox::{GATEWAY_MAC, Sandbox},
    talk::{IN_VAIN, PATIENCE},
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn groups_that_may_talk_do_in_both_directions_and_a_third_is_shut_out() {
    lab::run(|_| {
        let group = |name: &str| format!(r#"{{"group":"{name}"}}"#);
        let pools = [
            ebpf_pool("a", "netns", &group("shop"), "10.1.0.0/24", "fd00:1::/64"),
            ebpf_pool("b", "host", &group("bank"), "10.2.0.0/24", "fd00:2::/64"),
            ebpf_pool("c", "host", &group("thief"), "10.3.0.0/24", "fd00:3::/64"),
        ];
        let network = prepare(&pools[0]);
        for plan in &pools[1..] {
            network.add_pool(plan).unwrap();
        }
        let [shop, bank, thief] = pools
            .each_ref()
            .map(|plan| Sandbox::start(&network, plan, 0));
        let all = [(&shop, &bank), (&bank, &shop), (&shop, &thief)];
        let all = all
            .into_iter()
            .chain([(&thief, &shop), (&bank, &thief), (&thief, &bank)]);
        for (from, to) in all.clone() {
            assert_apart(&network, from, to);
        }
        let pair = ["shop", "bank"].map(group_number);
        let both = BTreeSet::from([(pair[0], pair[1]), (pair[1], pair[0])]);
        network.set_group_pairs(&both).unwrap();
        for (from, to) in all.clone().take(2) {
            for address in to.clone_addresses() {
                from.guest.ping(address, PATIENCE).unwrap();
                let page = from.guest.fetch(SocketAddr::new(address, 80), PATIENCE);
                page.unwrap();
            }
        }
        for (from, to) in all.clone().skip(2) {
            assert_apart(&network, from, to);
        }
        network.set_group_pairs(&BTreeSet::new()).unwrap();
        for (from, to) in all {
            assert_apart(&network, from, to);
        }
    });
}

/// One gets nothing to the other, which is counted.
#[track_caller]
fn assert_apart(network: &KernelNetwork, from: &Sandbox, to: &Sandbox) {
    for address in to.clone_addresses() {
        let before = from.dropped(network, DropReason::OtherSandbox);
        from.guest.ping(address, IN_VAIN).unwrap_err();
        let counted = from.dropped(network, DropReason::OtherSandbox);
        assert!(counted > before, "to {address}");
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_a_guest_says_as_another_or_as_a_router_is_counted_and_heard_by_nobody() {
    lab::run(|_| {
        let _beyond = Beyond::attach().unwrap();
        let together = r#"{"clone_to_clone":true,"group":"team"}"#;
        let pools = [
            ebpf_pool("a", "netns", together, "10.1.0.0/24", "fd00:1::/64"),
            ebpf_pool("b", "host", together, "10.2.0.0/24", "fd00:2::/64"),
        ];
        let network = prepare(&pools[0]);
        network.add_pool(&pools[1]).unwrap();
        let neighbours = pools
            .each_ref()
            .map(|plan| Sandbox::start(&network, plan, 0));
        for plan in &pools {
            let liar = Sandbox::start(&network, plan, 1);
            for neighbour in &neighbours {
                // They may talk, so that it is not for their policy that nothing comes.
                for address in neighbour.clone_addresses() {
                    liar.guest.ping(address, PATIENCE).unwrap();
                }
            }
            for lie in lies(&liar, &neighbours[0]) {
                assert_heard_by_nobody(&network, &liar, &lie, &neighbours);
            }
        }
    });
}

#[track_caller]
fn assert_heard_by_nobody(
    network: &KernelNetwork,
    liar: &Sandbox,
    lie: &Lie,
    neighbours: &[Sandbox],
) {
    for neighbour in neighbours {
        neighbour.guest.received_frames().unwrap();
    }
    let before = liar.dropped(network, lie.reason);
    liar.guest.send_frame(&lie.frame).unwrap();
    for neighbour in neighbours {
        // What was sent before has come by then, if it comes at all.
        liar.guest
            .ping(neighbour.clone_addresses()[0], PATIENCE)
            .unwrap();
        let heard = neighbour.guest.received_frames().unwrap();
        assert!(!heard.is_empty(), "the ping came");
        assert!(!heard.iter().any(|frame| lie.is_in(frame)), "{}", lie.what);
    }
    let counted = liar.dropped(network, lie.reason);
    assert_eq!(counted, before + 1, "{}", lie.what);
}

/// A frame that a guest may not send.
struct Lie {
    what: &'static str,
    reason: DropReason,
    frame: Vec<u8>,
    /// Bytes of it that nothing else has.
    mark: Vec<u8>,
}

impl Lie {
    fn is_in(&self, frame: &[u8]) -> bool {
        let mut places = frame.windows(self.mark.len());
        places.any(|place| place == self.mark)
    }
}

/// That it has a neighbour's address or the gateway's, as a server of DHCP, and as a router.
fn lies(liar: &Sandbox, neighbour: &Sandbox) -> Vec<Lie> {
    let own = liar.guest.network();
    let theirs = match neighbour.clone_addresses()[0] {
        IpAddr::V4(theirs) => theirs,
        IpAddr::V6(other) => panic!("{other}"),
    };
    let all = [0xff; 6];
    let offer = b"an offer that nobody asked for";
    let from = SocketAddr::from((own.ipv4.0, 67));
    let offer_to = |mac, to: Ipv4Addr| frame::udp(own.mac, mac, from, (to, 68).into(), offer);
    let (router, prefix) = ("fe80::2".parse().unwrap(), "2001:db8:77::".parse().unwrap());
    let lie = |what, reason, frame, mark: &[u8]| Lie {
        what,
        reason,
        frame,
        mark: mark.to_vec(),
    };
    let has = |what, address: Ipv4Addr| {
        let frame = frame::arp_reply(own.mac, address, (all, own.ipv4_gateway));
        let mark = [&own.mac[..], &address.octets()].concat();
        lie(what, DropReason::Arp, frame, &mark)
    };
    let dhcp = DropReason::RogueDhcp;
    let advertisement = frame::router_advertisement(own.mac, router, prefix);
    vec![
        has("a neighbour's address", theirs),
        has("the gateway's address", own.ipv4_gateway),
        lie(
            "a DHCP server to all",
            dhcp,
            offer_to(all, Ipv4Addr::BROADCAST),
            offer,
        ),
        lie(
            "a DHCP server to a neighbour",
            dhcp,
            offer_to(GATEWAY_MAC, theirs),
            offer,
        ),
        lie(
            "a router",
            DropReason::RogueRa,
            advertisement,
            &[0x20, 0x01, 0x0d, 0xb8, 0x00, 0x77],
        ),
    ]
}
