//! What the kernel has by the name of an instance.

use std::collections::{BTreeMap, HashMap, HashSet};

use sandwire_kernel_net::{
    Error as KernelError,
    interface::{self, DELETED_AT_ONCE, FIRST_GROUP, Interface},
    netns,
};

use super::{Worker, ebpf::Ebpf, host_slot::GROUP_ATTEMPTS};
use crate::{
    error::NetworkError,
    network::{Inventory, Leftover},
    plan::names,
};

/// One list of the host's interfaces and one of `/run/netns`. An interface is ours by its name and by
/// its alias; the alias comes with the interface's first change, so a crash can leave one without
/// only while its namespace, and with it the interface, is about to go.
///
/// A veth is the host end of a netns slot. A TAP is one of a host slot, which is complete if it has as
/// many as its entries in the data path say. One by another name is withdrawn, or half deleted.
///
/// Children of the host's interfaces are in other namespaces, which are only looked at if there may be some.
pub(super) fn inventory(
    instance: &str,
    worker: &mut Worker,
    ebpf: Option<&Ebpf>,
    may_have_children: bool,
) -> Result<Inventory, NetworkError> {
    let interfaces = interface::list(&mut worker.route)?;
    let mut inventory = Inventory::default();
    let (mut veths, mut taps) = (BTreeMap::new(), BTreeMap::new());
    for interface in &interfaces {
        let alias = interface.alias.as_deref().unwrap_or_default();
        let Some((pool, number)) = parse_alias(instance, alias) else {
            continue;
        };
        let is_tap = interface.tun.is_some();
        let is_named = names::parse_host_interface(&interface.name).is_some();
        if is_tap {
            let is_sound = is_named && interface.tun.is_some_and(|tun| tun.is_persistent);
            let found = taps.entry((pool, number)).or_insert((alias, 0));
            found.1 += u8::from(is_sound);
        } else if is_named {
            veths.insert((pool, number), interface.name.as_str());
        }
    }
    for ((pool, number), (alias, count)) in taps {
        let pool_number = names::pool_number(instance, pool);
        let wanted = match ebpf {
            // New maps know of no slot yet.
            Some(ebpf) if !ebpf.switch.waits() => ebpf.count(pool_number, number),
            _ => Some(count),
        };
        if count > 0 && wanted == Some(count) {
            inventory.slots.push((pool.to_owned(), number));
        } else {
            inventory.leftovers.push(Leftover::Alias(alias.to_owned()));
        }
    }
    let files = netns::list(&format!("sandwire.{instance}."))?;
    for file in &files {
        let Some((_, pool, number)) = names::parse_netns(&file.name) else {
            continue;
        };
        if file.is_mounted && veths.remove(&(pool, number.0)).is_some() {
            inventory.slots.push((pool.to_owned(), number.0));
        } else {
            inventory
                .leftovers
                .push(Leftover::Namespace(file.name.clone()));
        }
    }
    let without_netns = veths.into_values();
    inventory
        .leftovers
        .extend(without_netns.map(|name| Leftover::Interface(name.to_owned())));
    inventory.slots.sort();
    if may_have_children {
        let is_ours = |alias: &str| parse_alias(instance, alias).is_some();
        let found = interface::find_children(&mut worker.route, is_ours)?;
        let aliases = found.into_iter().filter_map(|(_, child)| child.alias);
        inventory.leftovers.extend(aliases.map(Leftover::Child));
    }
    Ok(inventory)
}

/// What could not be removed of the leftovers of an alias, by that alias.
type Failures<'a> = HashMap<&'a str, NetworkError>;

/// Those that are known by an alias first, with one look for all.
pub(super) fn reclaim(
    worker: &mut Worker,
    leftovers: &[Leftover],
) -> Vec<Result<(), NetworkError>> {
    let (mut aliases, mut children) = (HashSet::new(), HashSet::new());
    for leftover in leftovers {
        match leftover {
            Leftover::Alias(alias) => drop(aliases.insert(alias.as_str())),
            Leftover::Child(alias) => drop(children.insert(alias.as_str())),
            Leftover::Namespace(_) | Leftover::Interface(_) => {}
        }
    }
    let mut of_host = delete_by_alias(worker, &aliases);
    let mut elsewhere = delete_children(worker, &children);
    let told =
        |failures: &mut Failures<'_>, alias: &str| failures.remove(alias).map_or(Ok(()), Err);
    leftovers
        .iter()
        .map(|leftover| match leftover {
            Leftover::Namespace(name) => Ok(netns::remove(name)?),
            Leftover::Alias(alias) => told(&mut of_host, alias),
            Leftover::Child(alias) => told(&mut elsewhere, alias),
            Leftover::Interface(name) => delete_interface(worker, name),
        })
        .collect()
}

fn delete_interface(worker: &mut Worker, name: &str) -> Result<(), NetworkError> {
    match interface::find(&mut worker.route, name)? {
        Some(found) => Ok(interface::delete_with_taps_beyond(
            &mut worker.route,
            &found,
        )?),
        None => Ok(()),
    }
}

/// Deletes the host's interfaces that bear one of these aliases, many at once.
fn delete_by_alias<'a>(worker: &mut Worker, aliases: &HashSet<&'a str>) -> Failures<'a> {
    if aliases.is_empty() {
        return Failures::new();
    }
    let mut all = match interface::list(&mut worker.route) {
        Ok(all) => all,
        Err(error) => return all_left(aliases, &error),
    };
    let alias_of = |found: &Interface| aliases.get(found.alias.as_deref()?).copied();
    let may_go = |found: &Interface| alias_of(found).is_some();
    let group = interface::free_group(&all, FIRST_GROUP, GROUP_ATTEMPTS, may_go);
    all.retain(may_go);
    let mut failures = Failures::new();
    for batch in all.chunks(DELETED_AT_ONCE) {
        for found in batch {
            // First: without the interface nothing leads to them any more.
            let beyond = interface::delete_taps_beyond(&mut worker.route, found);
            if let (Err(error), Some(alias)) = (beyond, alias_of(found)) {
                failures.entry(alias).or_insert(error.into());
            }
        }
        let numbered = batch
            .iter()
            .map(|found| (found.name.as_str(), Some(found.index)));
        let deleted = match group {
            Some(group) => interface::delete_together(&mut worker.route, numbered, group),
            None => interface::delete_each(&mut worker.route, numbered),
        };
        let Err(error) = deleted else { continue };
        for found in batch {
            let is_gone = matches!(
                interface::find_by_index(&mut worker.route, found.index),
                Ok(None)
            );
            if let (false, Some(alias)) = (is_gone, alias_of(found)) {
                failures.entry(alias).or_insert_with(|| left(alias, &error));
            }
        }
    }
    failures
}

/// Deletes the children that bear one of these aliases; all of them, also if one would not go.
fn delete_children<'a>(worker: &mut Worker, aliases: &HashSet<&'a str>) -> Failures<'a> {
    if aliases.is_empty() {
        return Failures::new();
    }
    let found = match interface::find_children(&mut worker.route, |its| aliases.contains(its)) {
        Ok(found) => found,
        Err(error) => return all_left(aliases, &error),
    };
    let mut failures = Failures::new();
    for (namespace, child) in found {
        let deleted = interface::delete_elsewhere(&mut worker.route, namespace, child.index);
        let alias = child.alias.as_deref();
        if let (Err(error), Some(alias)) = (deleted, alias.and_then(|its| aliases.get(its))) {
            failures.entry(*alias).or_insert(error.into());
        }
    }
    failures
}

fn all_left<'a>(aliases: &HashSet<&'a str>, error: &KernelError) -> Failures<'a> {
    let failed = aliases.iter().map(|alias| (*alias, left(alias, error)));
    failed.collect()
}

fn left(alias: &str, error: &KernelError) -> NetworkError {
    NetworkError::reason("reclaim", alias, &error.to_string())
}

/// Pool and slot number of an alias that names a slot of this instance.
fn parse_alias<'a>(instance: &str, alias: &'a str) -> Option<(&'a str, u32)> {
    let (of, rest) = alias.strip_prefix("sandwire:")?.split_once(':')?;
    let (pool, number) = rest.split_once(':')?;
    let number = (of == instance).then(|| number.parse().ok()).flatten()?;
    Some((pool, number))
}

#[cfg(test)]
mod tests {
    use sandwire_testlab::lab;

    use super::*;

    #[test]
    fn only_aliases_of_slots_of_this_instance_are_ours() {
        assert_eq!(parse_alias("a", "sandwire:a:web:17"), Some(("web", 17)));
        for alias in [
            "sandwire:a",
            "sandwire:b:web:17",
            "sandwire:a:web:x",
            "other:a:web:17",
            "",
        ] {
            assert_eq!(parse_alias("a", alias), None, "{alias}");
        }
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn all_that_bears_the_alias_of_a_leftover_goes_and_nothing_else() {
        lab::run(|lab| {
            let aliases = ["sandwire:a:web:1", "sandwire:a:web:2", "sandwire:b:web:1"];
            let [first, second, stranger] = aliases;
            for (name, alias) in [
                ("tap1", first),
                ("tap2", first),
                ("tap3", second),
                ("stays", stranger),
                ("others", "somebody's"),
            ] {
                lab.run(&format!("ip tuntap add {name} mode tap"));
                lab.run(&format!("ip link set {name} alias {alias}"));
            }
            // Whoever is in a group would be deleted with it.
            lab.run(&format!("ip link set others group {FIRST_GROUP}"));
            let mut worker = Worker::new().unwrap();
            let leftovers = [first, "sandwire:a:web:9", second, first]
                .map(|alias| Leftover::Alias(alias.to_owned()));
            for result in reclaim(&mut worker, &leftovers) {
                result.unwrap();
            }
            let left = lab.run("ip -o link show");
            for gone in ["tap1", "tap2", "tap3"] {
                assert!(!left.contains(&format!(" {gone}:")), "{left}");
            }
            assert!(
                left.contains(" stays:") && left.contains(" others:"),
                "{left}"
            );
        });
    }
}
