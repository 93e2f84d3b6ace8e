//! Rules beside those that redirect, for where processes of this host are senders.

use sandwire_kernel_net::nft::{
    Batch, Chain, ChainKind, Direction, Hook, Policy, Protocol, RELAY_MARK_MASK, Rule,
};

use super::{
    Entrance, MARK_PASS, OWN, OWN_REST, POSTROUTING, PREROUTING, PRIORITY, Steered, TRANSLATED,
    begin_behind_translation, neither,
};
use crate::config::{Egress, Origin};

/// Whether processes of this host are senders.
pub(super) fn has_own(egress: &Egress) -> bool {
    let is_own = |origin: &Origin| matches!(origin, Origin::Identity(_) | Origin::Cgroup { .. });
    egress.senders.iter().any(|sender| is_own(&sender.origin))
}

/// What becomes of packets from identities' addresses that are redirected. An address alone doesn't say that it is the identity:
/// any process of the host may bind to it. One of a cgroup that is a sender is that one, and what no redirect of its own covers
/// isn't known to be anybody's. What is for the host stays: an identity's own addresses are the host's, and its loopback may be one of
/// these.
pub(super) fn write_own(batch: &mut Batch<'_>, mark: u32, cgroups: &[Steered]) {
    for chain in [OWN, OWN_REST] {
        batch.add_chain(&Chain::Regular(chain));
        let stays = Rule::new().comment("it is for this host");
        batch.add_rule(chain, &stays.to_this_host().accept());
    }
    batch.add_rule(OWN_REST, &neither(Rule::new()));
    for steered in cgroups {
        batch.add_rule(OWN, &steered.rule().counter().drop());
    }
    let taken = Rule::new().set_mark(mark, RELAY_MARK_MASK);
    batch.add_rule(OWN, &taken.accept());
}

/// Begins the chain of what processes send that is translated. What is for the host doesn't leave it.
pub(super) fn begin_translated(batch: &mut Batch<'_>) {
    begin_behind_translation(batch, TRANSLATED, Hook::Output);
    let redirected = Rule::new().mark_is_not(0, RELAY_MARK_MASK);
    batch.add_rule(TRANSLATED, &redirected.accept());
    let stays = Rule::new().comment("it is for this host");
    batch.add_rule(TRANSLATED, &stays.to_this_host().accept());
}

/// Keeps marked packets of this host from leaving where no rule leads them to the loopback: somebody has deleted it.
pub(super) fn write_guard(batch: &mut Batch<'_>, entrances: &[Entrance]) {
    batch.add_chain(&Chain::Base {
        name: POSTROUTING,
        kind: ChainKind::Filter,
        hook: Hook::Postrouting,
        priority: PRIORITY,
        policy: Policy::Accept,
    });
    // Most packets end here.
    let unmarked = Rule::new().mark_is(0, RELAY_MARK_MASK);
    batch.add_rule(POSTROUTING, &unmarked.accept());
    let comes_back = Rule::new().interface(Direction::Destination, "lo");
    batch.add_rule(POSTROUTING, &comes_back.accept());
    for entrance in entrances {
        let astray = Rule::new().comment("no routing rule leads it to the relay");
        let astray = astray.mark_is(entrance.mark, RELAY_MARK_MASK);
        batch.add_rule(POSTROUTING, &astray.counter().drop());
    }
}

/// Drops datagrams of ours to processes of this host for which there is no socket any more. The kernel would answer them by
/// an ICMP error that quotes them, and nobody could tell whose that is: it would leave. What there is for TCP is in
/// [`super::ends`].
pub(super) fn write_silence(batch: &mut Batch<'_>) {
    let answer = || {
        let ours = Rule::new().mark_is(MARK_PASS, RELAY_MARK_MASK);
        let ours = ours.interface(Direction::Source, "lo");
        ours.protocol(Protocol::Udp)
    };
    batch.add_rule(PREROUTING, &answer().for_a_socket().accept());
    let late = answer().comment("nobody waits for it");
    batch.add_rule(PREROUTING, &late.counter().drop());
}
