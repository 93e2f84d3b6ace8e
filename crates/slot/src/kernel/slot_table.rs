//! The nftables table of a slot, the same in every slot but for the clone addresses.
//!
//! It makes the clone address and the guest address one (destination rewritten on the way in, source
//! on the way out), drops what the guest sends with a source that is not its own, and caps the number
//! of connections. It is the only table in the slot's namespace, so its chains drop by default.

use std::net::IpAddr;

use sandwire_kernel_net::nft::{
    Batch, Chain, ChainKind, CtState, Direction, Hook, ICMP_ECHO_REQUEST, ICMPV6_ECHO_REQUEST,
    Policy, Protocol, Rule,
};

use crate::plan::{NicPlan, SlotPlan};

pub(super) const NAME: &str = "sandwire";

const INPUT: &str = "input";
const FORWARD: &str = "forward";
const KNOWN: &str = "known";
const PREROUTING: &str = "prerouting";
const POSTROUTING: &str = "postrouting";
/// The kernel's own names for these are dstnat, filter and srcnat.
const PRIORITY_DESTINATION_NAT: i32 = -100;
const PRIORITY_FILTER: i32 = 0;
const PRIORITY_SOURCE_NAT: i32 = 100;
const ICMPV6_NEIGHBOUR_SOLICITATION: u8 = 135;
const ICMPV6_NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// Neighbour solicitations of a guest that are heard in a second, and at once. The kernel remembers the sender of each,
/// in a table of some 1000 entries that all namespaces share; it forgets those that are older than 5 s when it
/// lacks room.
const SOLICITATIONS_PER_SECOND: u64 = 2;
const SOLICITATIONS_AT_ONCE: u32 = 20;

/// Adds the chains and rules of a slot to a table that has none.
pub(super) fn write(batch: &mut Batch<'_>, slot: &SlotPlan) {
    batch.add_chain(&Chain::Regular(KNOWN));
    for (name, kind, hook, priority, policy) in [
        (
            PREROUTING,
            ChainKind::Nat,
            Hook::Prerouting,
            PRIORITY_DESTINATION_NAT,
            Policy::Accept,
        ),
        (
            INPUT,
            ChainKind::Filter,
            Hook::Input,
            PRIORITY_FILTER,
            Policy::Drop,
        ),
        (
            FORWARD,
            ChainKind::Filter,
            Hook::Forward,
            PRIORITY_FILTER,
            Policy::Drop,
        ),
        (
            POSTROUTING,
            ChainKind::Nat,
            Hook::Postrouting,
            PRIORITY_SOURCE_NAT,
            Policy::Accept,
        ),
    ] {
        batch.add_chain(&Chain::Base {
            name,
            kind,
            hook,
            priority,
            policy,
        });
    }
    for (chain, rule) in rules(slot) {
        batch.add_rule(chain, &rule);
    }
}

/// The rules of a slot with their chains, in order.
pub(super) fn rules(slot: &SlotPlan) -> Vec<(&'static str, Rule)> {
    let uplink = &slot.slot_interface;
    let answered = CtState::ESTABLISHED | CtState::RELATED;
    let mut rules = vec![
        (KNOWN, Rule::new().state(CtState::INVALID).counter().drop()),
        (KNOWN, too_many_connections(slot.connections_max)),
        (KNOWN, Rule::new().accept()),
        (
            INPUT,
            Rule::new().interface(Direction::Source, "lo").accept(),
        ),
        (
            INPUT,
            Rule::new()
                .interface(Direction::Source, uplink)
                .state(answered)
                .accept(),
        ),
    ];
    for nic in &slot.nics {
        add_nic(&mut rules, nic, uplink);
    }
    rules.extend([
        (INPUT, Rule::new().counter().drop()),
        (
            FORWARD,
            Rule::new().interface(Direction::Source, uplink).jump(KNOWN),
        ),
        (
            FORWARD,
            Rule::new().comment("foreign source").counter().drop(),
        ),
    ]);
    rules
}

fn too_many_connections(count: u32) -> Rule {
    let rule = Rule::new()
        .comment("too many connections")
        .state(CtState::NEW);
    rule.connections_over(count).counter().drop()
}

fn add_nic(rules: &mut Vec<(&'static str, Rule)>, nic: &NicPlan, uplink: &str) {
    let ipv4 = nic.ipv4.map(|ipv4| {
        let (guest, clone_address) = (ipv4.guest.addr(), ipv4.clone_address);
        (
            guest.into(),
            clone_address.into(),
            Protocol::Icmp,
            ICMP_ECHO_REQUEST,
        )
    });
    let ipv6 = nic.ipv6.map(|ipv6| {
        let (guest, clone_address) = (ipv6.guest.addr(), ipv6.clone_address);
        (
            guest.into(),
            clone_address.into(),
            Protocol::Icmpv6,
            ICMPV6_ECHO_REQUEST,
        )
    });
    let from_tap = || Rule::new().interface(Direction::Source, &nic.tap);
    for (guest, clone_address, icmp, echo) in [ipv4, ipv6].into_iter().flatten() {
        let from_guest = || from_tap().address(Direction::Source, guest);
        rules.extend(translation(guest, clone_address, uplink));
        rules.push((FORWARD, from_guest().jump(KNOWN)));
        // The guest may ping its gateway, and answer processes that run in the namespace.
        let answered = CtState::ESTABLISHED | CtState::RELATED;
        rules.push((INPUT, from_guest().state(answered).accept()));
        rules.push((INPUT, from_guest().icmp(icmp, echo).jump(KNOWN)));
    }
    if nic.ipv6.is_some() {
        let discovery = |message| from_tap().icmp(Protocol::Icmpv6, message);
        let solicitation = discovery(ICMPV6_NEIGHBOUR_SOLICITATION)
            .at_most(SOLICITATIONS_PER_SECOND, SOLICITATIONS_AT_ONCE);
        let advertisement = discovery(ICMPV6_NEIGHBOUR_ADVERTISEMENT);
        rules.extend([solicitation, advertisement].map(|rule| (INPUT, rule.accept())));
    }
}

/// The two rules that make the guest address and the clone address one.
fn translation(guest: IpAddr, clone_address: IpAddr, uplink: &str) -> [(&'static str, Rule); 2] {
    let inbound = Rule::new()
        .interface(Direction::Source, uplink)
        .address(Direction::Destination, clone_address)
        .nat_to(Direction::Destination, guest);
    let outbound = Rule::new()
        .interface(Direction::Destination, uplink)
        .address(Direction::Source, guest)
        .nat_to(Direction::Source, clone_address);
    [(PREROUTING, inbound), (POSTROUTING, outbound)]
}
