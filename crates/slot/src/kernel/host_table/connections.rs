//! How many connections each clone address may begin through the host's own stack.
//!
//! The kernel remembers these in one table, which the host and all sandboxes share (`nf_conntrack_max`). Whoever could
//! enter as many as it likes would take the others' room. So a packet that begins a connection, and it alone, meets the
//! chain of its pool's `connections_max`, by the map `bounds`; two sets keep count by clone address:
//!
//! | set | bound | of |
//! |---|---|---|
//! | `open` | `connections_max` | connections that the kernel remembers, of TCP those that haven't been closed: the kernel counts no others |
//! | `begun` | [`begun_per_minute`] | connections that are begun: the kernel remembers closed ones for two minutes |
//!
//! What is over either is dropped, and so would be what a set has no room for. A dropped packet leaves nothing in the
//! kernel's table. Connections that others open to a sandbox are theirs: no caller can use up what a sandbox may open.
//!
//! The sets are the same for all pools, since an address is of one pool. A bound is that of the moment in which its
//! address was entered, so when a pool's is changed, counting begins anew for all.

use std::{
    collections::{BTreeSet, HashSet},
    net::IpAddr,
    time::Duration,
};

use ipnet::IpNet;
use sandwire_kernel_net::nft::{
    self, Batch, Bound, CT_STATUS_CONFIRMED, Chain, CtState, Element, Family, Key, Rule, SetKind,
};

use super::{FORWARD, INPUT, PerFamily, name, source};
use crate::{
    error::NetworkError,
    kernel::{
        Worker,
        hosted::{Hosted, Served},
    },
};

/// Chains of bounds start with this.
const CHAINS: &str = "connections_";
/// Twice as many addresses as there can be interfaces in the eBPF data paths at a time.
const ADDRESSES_MAX: u32 = 131_072;
/// In which an empty allowance is full again, whatever its size.
const IDLE: Duration = Duration::from_secs(60);
/// Of these a small `connections_max` takes nothing away: they are little beside the kernel's table.
const BEGUN_LEAST: u64 = 600;
const AT_ONCE_LEAST: u32 = 100;

/// Sets that rules enter addresses into.
pub(super) const COUNTED: [PerFamily; 2] = [PerFamily::Open, PerFamily::Begun];

pub(super) fn set_kind(set: PerFamily) -> SetKind {
    SetKind::Entered {
        keys_max: ADDRESSES_MAX,
        // The kernel lets those in `open` go with their connections.
        idle: matches!(set, PerFamily::Begun).then_some(IDLE),
    }
}

/// Connections that an address may begin in a minute, which leaves at most four times `connections_max` closed ones
/// in the kernel's table, and what it may begin at once.
fn begun_per_minute(most: u32) -> (u64, u32) {
    let in_a_minute = 2 * u64::from(most);
    (in_a_minute.max(BEGUN_LEAST), most.max(AT_ONCE_LEAST))
}

fn chain(most: u32) -> String {
    format!("{CHAINS}{most}")
}

pub(super) fn is_chain(name: &str) -> bool {
    name.starts_with(CHAINS)
}

/// Where the bounds are asked, behind what passes as part of a connection.
pub(super) fn rules_of(chain: &'static str) -> impl Iterator<Item = (&'static str, Rule)> {
    debug_assert!([INPUT, FORWARD].contains(&chain));
    Family::ALL.into_iter().map(move |family| {
        let bounds = PerFamily::Bounds.name(family);
        let begins = Rule::new().state(CtState::NEW);
        (chain, begins.jump_by_map(&[source(family)], &bounds))
    })
}

fn rules(most: u32) -> Vec<Rule> {
    // Nobody has answered it yet, but it has been counted.
    let mut rules = vec![Rule::new().status(CT_STATUS_CONFIRMED).back()];
    let (in_a_minute, at_once) = begun_per_minute(most);
    for family in Family::ALL {
        let (open, begun) = (PerFamily::Open.name(family), PerFamily::Begun.name(family));
        let within = Rule::new()
            .each_source_within(
                family,
                &begun,
                Bound::PacketsPerMinute(in_a_minute, at_once),
            )
            .each_source_within(family, &open, Bound::Connections(most));
        rules.push(within.back());
    }
    let over = Rule::new().comment("too many connections");
    rules.push(over.counter().drop());
    rules
}

/// The bounds that there have to be.
pub(super) fn bounds_of(served: &Served<'_>) -> BTreeSet<u32> {
    served.all().map(bound_of).collect()
}

fn bound_of(pool: &Hosted) -> u32 {
    pool.plan.spec.policy.connections_max
}

/// Makes the chain of a bound, which the table doesn't have or has without rules.
pub(super) fn write(batch: &mut Batch<'_>, most: u32) {
    let chain = chain(most);
    batch.ensure_chain(&Chain::Regular(&chain));
    for rule in rules(most) {
        batch.add_rule(&chain, &rule);
    }
}

/// Which bounds the table has no rules for, by its rules as listed.
pub(super) fn missing(found: &[(String, usize)], wanted: BTreeSet<u32>) -> Vec<u32> {
    let is_there = |most: &u32| found.iter().any(|(name, _)| *name == chain(*most));
    wanted.into_iter().filter(|most| !is_there(most)).collect()
}

/// Whether the table has the rules of these bounds, by its rules as listed.
pub(super) fn are_sound(found: &[(String, usize)], wanted: &BTreeSet<u32>) -> bool {
    wanted.iter().all(|most| {
        let chain = chain(*most);
        let there = found.iter().filter(|(name, _)| *name == chain);
        let lengths = there.map(|(_, instructions)| *instructions);
        lengths.eq(rules(*most).iter().map(Rule::instructions))
    })
}

pub(super) fn elements(pool: &Hosted, prefixes: &[IpNet]) -> Vec<Element> {
    let chain = chain(bound_of(pool));
    let leads = |prefix: &IpNet| Element::prefix_to_chain(*prefix, &chain);
    prefixes.iter().flat_map(leads).collect()
}

/// Forgets what these addresses have begun: who has them next begins with all that it may. What is in `open` goes with
/// the connections.
pub(in super::super) fn forget_begun(
    instance: &str,
    worker: &mut Worker,
    addresses: &HashSet<IpAddr>,
) -> Result<(), NetworkError> {
    let table = name(instance);
    let mut batch = Batch::new(&table);
    for family in Family::ALL {
        let is_of_family = |address: &&IpAddr| address.is_ipv4() == (family == Family::Ipv4);
        let elements: Vec<_> = addresses
            .iter()
            .filter(is_of_family)
            .map(|address| Element::exact(Key::default().address(*address)))
            .collect();
        let set = PerFamily::Begun.name(family);
        if elements.is_empty() {
            continue;
        }
        match nft::count_elements(&mut worker.netfilter, &table, &set) {
            Ok(0) => continue,
            // No table, or a guard that counts nothing.
            Err(error) if error.is_missing() => continue,
            found => found?,
        };
        // The kernel refuses to delete what isn't there; none is seen meanwhile.
        batch.add_elements(&set, &elements);
        batch.delete_elements(&set, &elements);
    }
    match batch.commit(&mut worker.netfilter) {
        // The table has become a guard meanwhile.
        Err(error) if error.is_missing() => Ok(()),
        done => Ok(done?),
    }
}

/// Counts anew if a pool's bound is another than it was.
pub(super) fn begin_anew(batch: &mut Batch<'_>, before: &Hosted, after: &Hosted) {
    if bound_of(before) == bound_of(after) {
        return;
    }
    for set in COUNTED {
        for family in Family::ALL {
            batch.clear_set(&set.name(family));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_connections_are_few_beside_the_open_ones_unless_hardly_any_may_be_open() {
        assert_eq!(begun_per_minute(4096), (8192, 4096));
        assert_eq!(begun_per_minute(1), (600, 100));
        assert_eq!(begun_per_minute(u32::MAX), (8_589_934_590, u32::MAX));
    }
}
