//! How much of the host's table there has to be, and bringing it there.
//!
//! The full table tracks every connection of the host. It is there from the first pool or published port that
//! needs it to the last one; otherwise there is the guard alone. Both have the same sets with the same elements, but for
//! those that count connections, so that pools come and go alike. Each change of extent is one transaction: no packet meets half a table.
//!
//! A start adds one pool after the other to a table that already serves all of them, so adding never takes
//! anything away. What no pool has goes when all are known ([`settle`]).

use std::{collections::BTreeSet, net::IpAddr};

use sandwire_kernel_net::nft::{self, Batch, Element, Family, Rule};

use super::{
    super::{
        Worker,
        hosted::{Hosted, Served},
    },
    HOST_ENDS, PerFamily, connections, elements, keep_shared, name, rules, write, write_ports,
    write_spared,
};
use crate::error::NetworkError;

/// How much of the table there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// What keeps a slot whose eBPF program somebody has taken away from the host's stack. No connection
    /// is tracked for it.
    Guard,
    /// Everything.
    Full,
}

impl Extent {
    pub(super) fn for_all(served: &Served<'_>) -> Self {
        match served.need_judge() {
            true => Self::Full,
            false => Self::Guard,
        }
    }
}

/// Makes the published ports exactly these, in one transaction.
pub(in super::super) fn publish(
    instance: &str,
    worker: &mut Worker,
    served: &Served<'_>,
) -> Result<(), NetworkError> {
    let table = name(instance);
    let is_there = nft::tables(&mut worker.netfilter)?.contains(&table);
    if !is_there && served.published.is_empty() {
        return Ok(());
    }
    if falls_short(instance, worker, served)? {
        return make_anew(instance, worker, served);
    }
    let mut batch = Batch::new(&table);
    write_ports(&mut batch, served.published);
    batch.commit(&mut worker.netfilter)?;
    cut_back(instance, worker, served)
}

/// Makes the addresses that published ports leave alone exactly these, if there is a table.
pub(in super::super) fn spare(
    instance: &str,
    worker: &mut Worker,
    addresses: &BTreeSet<IpAddr>,
) -> Result<(), NetworkError> {
    let table = name(instance);
    if !nft::tables(&mut worker.netfilter)?.contains(&table) {
        return Ok(());
    }
    let mut batch = Batch::new(&table);
    // The table of an earlier version has none.
    for family in Family::ALL {
        PerFamily::Spared.add(&mut batch, family);
    }
    write_spared(&mut batch, addresses);
    Ok(batch.commit(&mut worker.netfilter)?)
}

/// Makes the table with all that it is to serve, in place of what is there, in one transaction.
pub(in super::super) fn make_anew(
    instance: &str,
    worker: &mut Worker,
    served: &Served<'_>,
) -> Result<(), NetworkError> {
    let table = name(instance);
    let mut batch = Batch::new(&table);
    batch.recreate_table();
    let extent = Extent::for_all(served);
    write(&mut batch, instance, extent);
    if extent == Extent::Full {
        for most in connections::bounds_of(served) {
            connections::write(&mut batch, most);
        }
    }
    for (set, of_set) in all_elements(instance, served, extent) {
        batch.add_elements(&set, &of_set);
    }
    write_ports(&mut batch, served.published);
    write_spared(&mut batch, served.spared);
    Ok(batch.commit(&mut worker.netfilter)?)
}

/// The elements of all pools, each once.
fn all_elements(
    instance: &str,
    served: &Served<'_>,
    extent: Extent,
) -> Vec<(String, Vec<Element>)> {
    let mut all = Vec::new();
    let mut has_shared = false;
    for pool in served.all() {
        let mut of_pool = elements(instance, pool, extent);
        for (set, of_set) in of_pool.iter_mut().filter(|_| has_shared) {
            keep_shared(instance, set, of_set);
        }
        has_shared |= pool.serves_ebpf();
        all.extend(of_pool);
    }
    all
}

/// Takes away what no pool may by its policy: a daemon that was killed may have left what it had begun to change. Interfaces
/// that lead to slots stay: they are judged by that, also those of slots that nobody knows any more. A table that isn't as it should be is
/// left to the inspection.
pub(in super::super) fn settle(
    instance: &str,
    worker: &mut Worker,
    served: &Served<'_>,
) -> Result<(), NetworkError> {
    // Who knows of no pool has perhaps lost the journal.
    if served.all().next().is_none()
        || !nft::tables(&mut worker.netfilter)?.contains(&name(instance))
        || !is_sound(instance, worker, served)?
    {
        return Ok(());
    }
    exchange(instance, worker, served, PerFamily::is_of_pools)
}

/// Makes the elements of pools in some sets exactly these, in one transaction, and adds what others lack.
fn exchange(
    instance: &str,
    worker: &mut Worker,
    served: &Served<'_>,
    is_meant: impl Fn(PerFamily) -> bool,
) -> Result<(), NetworkError> {
    let table = name(instance);
    let mut batch = Batch::new(&table);
    let extent = prepare(instance, worker, &mut batch, served)?;
    for family in Family::ALL {
        let sets = PerFamily::ALL.into_iter();
        for set in sets.filter(|set| is_meant(*set) && set.is_part_of(extent)) {
            batch.clear_set(&set.name(family));
        }
    }
    for (set, of_set) in all_elements(instance, served, extent) {
        batch.add_elements(&set, &of_set);
    }
    Ok(batch.commit(&mut worker.netfilter)?)
}

/// Adds a pool's elements to a table that has as much as is needed.
pub(in super::super) fn add_elements(
    instance: &str,
    worker: &mut Worker,
    pool: &Hosted,
    all: &Served<'_>,
) -> Result<(), NetworkError> {
    let table = name(instance);
    let mut batch = Batch::new(&table);
    let extent = prepare(instance, worker, &mut batch, all)?;
    for (set, of_set) in elements(instance, pool, extent) {
        batch.add_elements(&set, &of_set);
    }
    match batch.commit(&mut worker.netfilter) {
        // A prefix leads to the chain of one bound: to another, if a daemon was killed while it changed that. Those of pools that
        // are still to come are without one until then.
        Err(error) if error.is_clash() && extent == Extent::Full => {
            exchange(instance, worker, all, |set| {
                matches!(set, PerFamily::Bounds)
            })
        }
        done => Ok(done?),
    }
}

/// Exchanges a pool's elements in one step, in a table that has as much as is needed.
pub(in super::super) fn change_elements(
    instance: &str,
    worker: &mut Worker,
    (before, after): (&Hosted, &Hosted),
    beside: &Served<'_>,
) -> Result<(), NetworkError> {
    let table = name(instance);
    let mut batch = Batch::new(&table);
    let extent = prepare(instance, worker, &mut batch, &beside.with(after))?;
    let others_need_shared = beside.need_shared();
    let keeps_shared = others_need_shared || after.serves_ebpf();
    for (set, mut of_set) in elements(instance, before, extent) {
        if keeps_shared {
            keep_shared(instance, &set, &mut of_set);
        }
        batch.delete_elements(&set, &of_set);
    }
    for (set, mut of_set) in elements(instance, after, extent) {
        if keeps_shared && (others_need_shared || before.serves_ebpf()) {
            keep_shared(instance, &set, &mut of_set);
        }
        batch.add_elements(&set, &of_set);
    }
    if extent == Extent::Full {
        connections::begin_anew(&mut batch, before, after);
    }
    match batch.commit(&mut worker.netfilter) {
        // Somebody has taken an element out, or a change before it ended half way.
        Err(error) if error.is_missing() => make_anew(instance, worker, &beside.with(after)),
        done => Ok(done?),
    }
}

/// Takes a pool's elements out, as far as they are there.
pub(in super::super) fn remove_elements(
    instance: &str,
    worker: &mut Worker,
    pool: &Hosted,
    others_need_shared: bool,
) -> Vec<NetworkError> {
    let table = name(instance);
    let mut errors = Vec::new();
    // One transaction per set: a set that lacks its elements must not keep the others.
    for (set, mut of_set) in elements(instance, pool, Extent::Full) {
        if others_need_shared {
            keep_shared(instance, &set, &mut of_set);
        }
        let mut batch = Batch::new(&table);
        batch.delete_elements(&set, &of_set);
        let failed = batch.commit(&mut worker.netfilter).err();
        errors.extend(failed.filter(|error| !error.is_missing()).map(Into::into));
    }
    errors
}

/// Makes the bounds of connections that a full table lacks, and sets that an earlier version's has not. Says for which extent elements
/// are to be: to the table of an earlier version, which has no bounds, the inspection adds them with all else.
fn prepare(
    instance: &str,
    worker: &mut Worker,
    batch: &mut Batch<'_>,
    all: &Served<'_>,
) -> Result<Extent, NetworkError> {
    for family in Family::ALL {
        PerFamily::Judged.add(batch, family);
    }
    if !has_extent(instance, worker, Extent::Full)? {
        return Ok(Extent::Guard);
    }
    let found = nft::rules(&mut worker.netfilter, &name(instance))?;
    for most in connections::missing(&found, connections::bounds_of(all)) {
        connections::write(batch, most);
    }
    Ok(Extent::Full)
}

/// Whether there is no table, or not as much of it as is needed.
pub(in super::super) fn falls_short(
    instance: &str,
    worker: &mut Worker,
    served: &Served<'_>,
) -> Result<bool, NetworkError> {
    if !nft::tables(&mut worker.netfilter)?.contains(&name(instance)) {
        return Ok(true);
    }
    Ok(served.need_judge() && has_extent(instance, worker, Extent::Guard)?)
}

/// Leaves the guard alone of a table of which no more is needed. One that has elements of others, such as
/// pools that this process could not take over, stays.
pub(in super::super) fn cut_back(
    instance: &str,
    worker: &mut Worker,
    served: &Served<'_>,
) -> Result<(), NetworkError> {
    if served.need_judge() || !has_extent(instance, worker, Extent::Full)? {
        return Ok(());
    }
    let known = all_elements(instance, served, Extent::Guard);
    let ends = known.iter().filter(|(set, _)| set == HOST_ENDS);
    let ends: usize = ends.map(|(_, of_set)| of_set.len()).sum();
    let found = nft::count_elements(&mut worker.netfilter, &name(instance), HOST_ENDS)?;
    match found == ends {
        true => make_anew(instance, worker, served),
        false => Ok(()),
    }
}

/// Whether the table has the rules that it should have. More than are needed do no harm.
pub(in super::super) fn is_sound(
    instance: &str,
    worker: &mut Worker,
    served: &Served<'_>,
) -> Result<bool, NetworkError> {
    let may_be_guard = !served.need_judge();
    if may_be_guard && has_extent(instance, worker, Extent::Guard)? {
        return Ok(true);
    }
    let found = nft::rules(&mut worker.netfilter, &name(instance))?;
    Ok(
        connections::are_sound(&found, &connections::bounds_of(served))
            && has_extent(instance, worker, Extent::Full)?,
    )
}

fn has_extent(instance: &str, worker: &mut Worker, extent: Extent) -> Result<bool, NetworkError> {
    let mut found = nft::rules(&mut worker.netfilter, &name(instance))?;
    found.retain(|(chain, _)| !connections::is_chain(chain));
    Ok(same_rules(found, &rules(instance, extent)))
}

/// Whether listed rules are these, chain by chain.
pub(in super::super) fn same_rules(
    mut found: Vec<(String, usize)>,
    wanted: &[(&str, Rule)],
) -> bool {
    // Both sorts keep the order within a chain.
    found.sort_by(|one, other| one.0.cmp(&other.0));
    let mut wanted: Vec<_> = wanted
        .iter()
        .map(|(chain, rule)| ((*chain).to_owned(), rule.instructions()))
        .collect();
    wanted.sort_by(|one, other| one.0.cmp(&other.0));
    found == wanted
}

/// Whether no pool has an interface in the table any more.
pub(in super::super) fn has_no_pool(
    instance: &str,
    worker: &mut Worker,
) -> Result<bool, NetworkError> {
    Ok(nft::count_elements(&mut worker.netfilter, &name(instance), HOST_ENDS)? == 0)
}
