//! IPv6 addresses that the kernel gives interfaces by itself. Ours have none: a TAP that comes up with one would speak to its
//! guest, and each would be an address and a route of the host's.
//!
//! NetworkManager, when it stops, has the kernel make them for every interface, also for those that it doesn't manage. So
//! the shared interface shows it for all: whoever puts that right does so with the others first. It goes from one to the
//! next, though; what it comes to later is found when its slot is inspected.

use std::{collections::BTreeSet, net::IpAddr};

use sandwire_kernel_net::{
    address,
    interface::{self, Change, Interface, InterfaceIndex},
    netlink::{Request, Socket},
};

use super::Worker;
use crate::{error::NetworkError, plan::names};

/// Changes of interfaces in one request.
const AT_ONCE: usize = 500;

/// What is wrong then.
pub(super) const PROBLEM: &str = "the kernel may give IPv6 addresses by itself (addrgenmode), as NetworkManager has it for all interfaces when it stops";

/// Whether the kernel may give our interfaces addresses of its own, by the shared one.
pub(super) fn may_be_made(instance: &str, worker: &mut Worker) -> Result<bool, NetworkError> {
    let shared = interface::find(&mut worker.route, &names::shared_interface(instance))?;
    Ok(shared.is_some_and(|shared| shared.makes_addresses))
}

/// Has the kernel make none for any of the host's interfaces that are the instance's, and takes those away that it has made:
/// all link-local ones, of which we put none there. Every step is tried; the shared interface comes last, so that what fails
/// or is cut off is done again.
pub(super) fn end(instance: &str, worker: &mut Worker) -> Result<(), NetworkError> {
    let name = names::shared_interface(instance);
    let mut ours = interface::list(&mut worker.route)?;
    ours.retain(|found| found.name == name || is_of(instance, found));
    let all = ours.iter().map(|found| found.index).collect();
    let (shared, slots): (Vec<Interface>, Vec<Interface>) =
        ours.into_iter().partition(|found| found.name == name);
    let stopped = stop_making(&mut worker.route, &slots);
    stopped.and(delete_link_local(&mut worker.route, &all))?;
    stop_making(&mut worker.route, &shared)
}

/// The same for one interface, if it is there: last what shows that something is to be done.
pub(super) fn end_on(worker: &mut Worker, name: &str) -> Result<(), NetworkError> {
    let Some(found) = interface::find(&mut worker.route, name)? else {
        return Ok(());
    };
    let all = BTreeSet::from([found.index]);
    let deleted = delete_link_local(&mut worker.route, &all);
    deleted.and(stop_making(&mut worker.route, &[found]))
}

fn stop_making(route: &mut Socket, interfaces: &[Interface]) -> Result<(), NetworkError> {
    let making: Vec<&Interface> = interfaces
        .iter()
        .filter(|found| found.makes_addresses)
        .collect();
    let mut outcome = Ok(());
    for some in making.chunks(AT_ONCE) {
        let mut request = Request::new();
        for found in some {
            let change = Change {
                name: &found.name,
                index: Some(found.index),
                no_generated_addresses: true,
                ..Change::default()
            };
            change.apply(&mut request);
        }
        outcome = outcome.and(execute(route, request));
    }
    outcome
}

fn delete_link_local(
    route: &mut Socket,
    interfaces: &BTreeSet<InterfaceIndex>,
) -> Result<(), NetworkError> {
    let mut made = address::list(route)?;
    made.retain(|found| match found.address.addr() {
        IpAddr::V6(address) => {
            address.is_unicast_link_local() && interfaces.contains(&found.interface)
        }
        IpAddr::V4(_) => false,
    });
    let mut outcome = Ok(());
    for some in made.chunks(AT_ONCE) {
        let mut request = Request::new();
        some.iter().for_each(|address| address.delete(&mut request));
        outcome = outcome.and(execute(route, request));
    }
    outcome
}

/// One that is gone meanwhile is as good.
fn execute(route: &mut Socket, request: Request) -> Result<(), NetworkError> {
    let failures = route.execute_all(request).into_iter();
    let failed = failures
        .map(|(_, error)| error)
        .find(|error| !error.is_missing());
    failed.map_or(Ok(()), |error| Err(error.into()))
}

fn is_of(instance: &str, found: &Interface) -> bool {
    let alias = found.alias.as_deref().unwrap_or_default();
    names::parse_alias(alias).is_some_and(|(of, _, _)| of == instance)
}
