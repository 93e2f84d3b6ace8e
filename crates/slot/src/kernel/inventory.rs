//! What the kernel has by the name of an instance.

use std::collections::BTreeMap;

use sandwire_kernel_net::{interface, netlink::Request, netns};

use super::{Worker, ebpf::Ebpf};
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

pub(super) fn reclaim(
    worker: &mut Worker,
    leftovers: &[Leftover],
) -> Vec<Result<(), NetworkError>> {
    leftovers
        .iter()
        .map(|leftover| match leftover {
            Leftover::Namespace(name) => Ok(netns::remove(name)?),
            Leftover::Alias(alias) => delete_by_alias(worker, alias),
            Leftover::Child(alias) => Ok(interface::delete_children(&mut worker.route, alias)?),
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

fn delete_by_alias(worker: &mut Worker, alias: &str) -> Result<(), NetworkError> {
    let mut request = Request::new();
    let mut beside = Ok(());
    for interface in interface::list(&mut worker.route)? {
        if interface.alias.as_deref() == Some(alias) {
            beside = beside.and(interface::delete_taps_beyond(&mut worker.route, &interface));
            interface::delete(&mut request, &interface.name);
        }
    }
    let failures = worker.route.execute_all(request);
    let failed = failures.into_iter().find(|(_, error)| !error.is_missing());
    failed.map_or(Ok(beside?), |(_, error)| Err(error.into()))
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
}
