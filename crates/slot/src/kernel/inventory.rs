//! What the kernel has by the name of an instance.

use std::collections::HashSet;

use sandwire_kernel_net::{interface, netlink::Request, netns};

use super::Worker;
use crate::{
    error::NetworkError,
    network::{Inventory, Leftover},
    plan::names,
};

/// One list of the host's interfaces and one of `/run/netns`. An interface is ours by its name and by
/// its alias; the alias comes with the interface's first change, so a crash can leave one without
/// only while its namespace, and with it the interface, is about to go.
pub(super) fn inventory(instance: &str, worker: &mut Worker) -> Result<Inventory, NetworkError> {
    let interfaces = interface::list(&mut worker.route)?;
    let ours: Vec<_> = interfaces
        .iter()
        .filter_map(|interface| {
            let (pool, number) = parse_alias(instance, interface.alias.as_deref()?)?;
            names::parse_host_interface(&interface.name)?;
            Some((interface.name.as_str(), pool, number))
        })
        .collect();
    let with_interface: HashSet<(&str, u32)> = ours
        .iter()
        .map(|(_, pool, number)| (*pool, *number))
        .collect();
    let mut inventory = Inventory::default();
    let mut complete = HashSet::new();
    let files = netns::list(&format!("sandwire.{instance}."))?;
    for file in &files {
        let Some((_, pool, number)) = names::parse_netns(&file.name) else {
            continue;
        };
        if file.is_mounted && with_interface.contains(&(pool, number.0)) {
            complete.insert((pool, number.0));
            inventory.slots.push((pool.to_owned(), number.0));
        } else {
            inventory
                .leftovers
                .push(Leftover::Namespace(file.name.clone()));
        }
    }
    for (name, pool, number) in ours {
        if !complete.contains(&(pool, number)) {
            inventory
                .leftovers
                .push(Leftover::Interface(name.to_owned()));
        }
    }
    inventory.slots.sort();
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
            Leftover::Interface(name) => {
                let mut request = Request::new();
                interface::delete(&mut request, name);
                match worker.route.execute(request) {
                    Err(error) if error.is_missing() => Ok(()),
                    other => Ok(other?),
                }
            }
        })
        .collect()
}

fn delete_by_alias(worker: &mut Worker, alias: &str) -> Result<(), NetworkError> {
    let mut request = Request::new();
    for interface in interface::list(&mut worker.route)? {
        if interface.alias.as_deref() == Some(alias) {
            interface::delete(&mut request, &interface.name);
        }
    }
    let failures = worker.route.execute_all(request);
    let failed = failures.into_iter().find(|(_, error)| !error.is_missing());
    failed.map_or(Ok(()), |(_, error)| Err(error.into()))
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
