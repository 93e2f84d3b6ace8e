//! Tears slots down, many at once.
//!
//! Taking a namespace's name away makes the kernel dissolve it with all its interfaces; namespaces
//! that are given up together share the kernel's waits. While it does so the kernel holds the lock
//! that all network configuration needs, hence batches of limited size.

use std::{
    collections::HashSet,
    thread,
    time::{Duration, Instant},
};

use sandwire_kernel_net::{
    conntrack, interface,
    netlink::{Request, Socket},
    netns,
};

use super::{Worker, container, ebpf::Ebpf, host_slot, host_table};
use crate::{error::NetworkError, plan::SlotPlan};

/// Slots whose namespaces are given up at once. Measured per slot: 32 take 2.0 ms, 64 take 1.5, 128 take 1.3;
/// the kernel holds the lock once per batch, so more would make others wait longer for little.
const BATCH: usize = 64;
/// How long a namespace may take to dissolve. One that takes longer is held by a process inside.
const DISSOLVE_MAX: Duration = Duration::from_millis(500);
const POLL: Duration = Duration::from_millis(2);

pub(super) fn tear_down(
    instance: &str,
    worker: &mut Worker,
    ebpf: Option<&Ebpf>,
    slots: &[SlotPlan],
) -> Vec<Result<(), NetworkError>> {
    let mut results: Vec<Result<(), NetworkError>> = slots.iter().map(|_| Ok(())).collect();
    let (mut held, mut failure) = (Vec::new(), None);
    let (with_netns, on_host): (Vec<_>, Vec<_>) = slots
        .iter()
        .enumerate()
        .partition(|(_, slot)| slot.has_netns());
    let (attached, on_host): (Vec<_>, Vec<_>) = on_host
        .into_iter()
        .partition(|(_, slot)| slot.is_container());
    let done = host_slot::tear_down(worker, ebpf, &plans(&on_host));
    let done = done
        .into_iter()
        .chain(container::tear_down(worker, ebpf, &plans(&attached)));
    for ((place, _), result) in on_host.iter().chain(&attached).zip(done) {
        results[*place] = result;
    }
    let mut before: &[(usize, &SlotPlan)] = &[];
    for batch in with_netns.chunks(BATCH).chain([&[][..]]) {
        for (place, slot) in batch {
            results[*place] = netns::remove(&slot.netns_name).map_err(Into::into);
        }
        // The kernel dissolves the batch before while the names of this one are taken away.
        let mut waiting: Vec<&str> = host_ends(before).collect();
        let waited = wait_dissolved(&mut worker.route, &mut waiting);
        failure = waited.err().or(failure);
        held.append(&mut waiting);
        before = batch;
    }
    let deleted = delete_host_ends(&mut worker.route, &mut held);
    if let Some(ebpf) = ebpf {
        failure = give_up_entries(ebpf, &with_netns, &held).err().or(failure);
    }
    let addresses: HashSet<_> = slots.iter().flat_map(SlotPlan::clone_addresses).collect();
    let forgotten = conntrack::forget(&mut worker.netfilter, &addresses);
    let begun = host_table::forget_begun(instance, worker, &addresses);
    let failures = [
        failure,
        deleted.err(),
        forgotten.err().map(NetworkError::from),
        begun.err(),
    ];
    for error in failures.into_iter().flatten() {
        let text = error.to_string();
        for (slot, result) in slots.iter().zip(&mut results) {
            let added = NetworkError::reason("tear down", &slot.netns_name, &text);
            *result = Err(match std::mem::replace(result, Ok(())) {
                Ok(()) => added,
                Err(first) => NetworkError::Several(vec![first, added]),
            });
        }
    }
    results
}

/// The same failure for every slot.
pub(super) fn all_failed(
    slots: &[SlotPlan],
    error: &NetworkError,
) -> Vec<Result<(), NetworkError>> {
    let text = error.to_string();
    let failed = |slot: &SlotPlan| NetworkError::reason("tear down", &slot.netns_name, &text);
    slots.iter().map(|slot| Err(failed(slot))).collect()
}

fn plans<'a>(slots: &[(usize, &'a SlotPlan)]) -> Vec<&'a SlotPlan> {
    slots.iter().map(|(_, slot)| *slot).collect()
}

fn host_ends<'a>(slots: &[(usize, &'a SlotPlan)]) -> impl Iterator<Item = &'a str> {
    slots.iter().map(|(_, slot)| slot.host_interface.as_str())
}

/// Waits until host ends are gone. What stays in `names` may be there: a process holds the namespace, or the
/// kernel doesn't say.
fn wait_dissolved(route: &mut Socket, names: &mut Vec<&str>) -> Result<(), NetworkError> {
    let deadline = Instant::now() + DISSOLVE_MAX;
    loop {
        // The kernel removes a batch at once: one that is still there speaks for those behind it.
        while let Some(name) = names.last() {
            if interface::find(route, name)?.is_some() {
                break;
            }
            names.pop();
        }
        if names.is_empty() || Instant::now() >= deadline {
            return Ok(());
        }
        thread::sleep(POLL);
    }
}

/// Deletes host ends. What stays in `names` may be there still.
fn delete_host_ends(route: &mut Socket, names: &mut Vec<&str>) -> Result<(), NetworkError> {
    let mut request = Request::new();
    for name in &*names {
        interface::delete(&mut request, name);
    }
    let failures = route.execute_all(request);
    let failed = failures.into_iter().find(|(_, error)| !error.is_missing());
    // Of some failures it isn't known which names they are about.
    names.retain(|name| failed.is_some() && !matches!(interface::find(route, name), Ok(None)));
    failed.map_or(Ok(()), |(_, error)| Err(error.into()))
}

/// Gives the entries of slots back. Where the host end may be there, with its program and a sandbox behind it, nobody
/// else gets them yet, and no packet passes.
fn give_up_entries(
    ebpf: &Ebpf,
    slots: &[(usize, &SlotPlan)],
    held: &[&str],
) -> Result<(), NetworkError> {
    let mut done = Ok(());
    for (_, slot) in slots {
        if held.contains(&slot.host_interface.as_str()) {
            done = done.and(ebpf.deactivate(slot));
        } else {
            ebpf.free(slot);
        }
    }
    done
}
