//! Slots without a namespace: TAPs in the host's own, that only the eBPF data path can tell apart.
//!
//! A TAP stays with whoever made it until the last step makes it persistent, so that a crash at any
//! earlier instruction leaves nothing. Nobody gets an address, a route or a neighbour; IPv6 isn't even
//! told that the interface is up, since that costs a walk over the host's whole routing table: until a VMM
//! has the TAP open, it has no carrier.

use std::collections::HashSet;

use sandwire_api::slot::DataPath;
use sandwire_datapath::NicIndex;
use sandwire_kernel_net::{
    Error as KernelError,
    interface::{self, Change, DELETED_AT_ONCE, FIRST_GROUP, Interface, InterfaceIndex},
    netlink::Request,
    tap::{self, Opened},
};

use super::{
    Worker,
    build::{Build, BuildStep},
    ebpf::Ebpf,
    filters::{self, Attachment},
    interfaces::tap_options,
    withdraw,
};
use crate::{
    error::NetworkError,
    network::Withdrawal,
    plan::{NicPlan, SlotPlan, names},
};

pub(super) const GROUP_ATTEMPTS: u32 = 16;

/// Makes all of a slot. On error nothing is left of it.
pub(super) fn build(
    build: &Build<'_>,
    worker: &mut Worker,
    ebpf: &Ebpf,
    shared: InterfaceIndex,
) -> Result<(), NetworkError> {
    // What is there of that name may be a sandbox that runs, with an entry: that isn't ours to free.
    let opened = build.step(BuildStep::Tap, || create_taps(worker, build.slot))?;
    // Dropped on error, and the TAPs with them.
    let result = finish(build, worker, ebpf, shared, &opened);
    if result.is_err() {
        ebpf.free(build.slot);
    }
    result
}

fn finish(
    build: &Build<'_>,
    worker: &mut Worker,
    ebpf: &Ebpf,
    shared: InterfaceIndex,
    opened: &[(Opened, InterfaceIndex)],
) -> Result<(), NetworkError> {
    let slot = build.slot;
    let indexes: Vec<InterfaceIndex> = opened.iter().map(|(_, index)| *index).collect();
    let first = build.step(BuildStep::Entry, || {
        let first = ebpf.reserve(slot)?;
        ebpf.write(slot, &indexes, shared)?;
        Ok(first)
    })?;
    build.step(BuildStep::HostEnd, || {
        let mut request = Request::new();
        for (nic, (number, index)) in (first.0..).zip(&indexes).enumerate() {
            let attachment = Attachment::host_end(*index, NicIndex(number));
            configure(&mut request, slot, nic, *index);
            attachment.add(&mut request, &ebpf.datapath);
            if slot.data_path == DataPath::Xdp {
                super::xdp::attach(&mut request, ebpf, *index, NicIndex(number))?;
            }
            raise(&mut request, slot, nic, *index);
        }
        Ok(worker.route.execute(request)?)
    })?;
    build.step(BuildStep::Persist, || {
        opened
            .iter()
            .try_for_each(|(tap, _)| Ok(tap.make_persistent()?))
    })
}

fn create_taps(
    worker: &mut Worker,
    slot: &SlotPlan,
) -> Result<Vec<(Opened, InterfaceIndex)>, NetworkError> {
    let create = |nic: &NicPlan| {
        let opened = create_tap(slot, nic).map_err(|error| match error.is_existing() {
            true => NetworkError::Conflict {
                object: format!("tap {}", nic.tap),
                with: "an interface of that name".to_owned(),
                advice: "delete it".to_owned(),
            },
            false => error.into(),
        })?;
        let found = interface::find(&mut worker.route, &nic.tap)?
            .ok_or_else(|| KernelError::missing_interface(&nic.tap))?;
        Ok((opened, found.index))
    };
    slot.nics.iter().map(create).collect()
}

/// Creates a TAP that goes with its builder.
fn create_tap(slot: &SlotPlan, nic: &NicPlan) -> Result<Opened, KernelError> {
    let opened = tap::create_transient(&nic.tap, None, tap_options(slot))?;
    opened.set_carrier(false)?;
    Ok(opened)
}

/// By its alias it is ours. It may not keep the MAC: systemd-udevd exchanges one that was random when it looked
/// (`MACAddressPolicy=persistent`), and nothing depends on it, as no packet goes by the TAP into the host's stack.
fn configure(request: &mut Request, slot: &SlotPlan, nic: usize, index: InterfaceIndex) {
    let plan = &slot.nics[nic];
    let change = Change {
        name: &plan.tap,
        index: Some(index),
        alias: Some(&slot.host_alias),
        mac: Some(plan.gateway_mac.0),
        mtu: Some(slot.mtu),
        no_generated_addresses: true,
        ..Change::default()
    };
    change.apply(request);
    filters::spare_queues(request, [index]);
}

fn raise(request: &mut Request, slot: &SlotPlan, nic: usize, index: InterfaceIndex) {
    let change = Change {
        name: &slot.nics[nic].tap,
        index: Some(index),
        up: Some(true),
        ..Change::default()
    };
    change.apply(request);
}

/// Makes one TAP of a slot again.
pub(super) fn restore_tap(
    worker: &mut Worker,
    ebpf: &Ebpf,
    shared: InterfaceIndex,
    slot: &SlotPlan,
    nic: usize,
) -> Result<(), NetworkError> {
    let name = &slot.nics[nic].tap;
    let opened = create_tap(slot, &slot.nics[nic])?;
    let mut indexes = Vec::with_capacity(slot.nics.len());
    for plan in &slot.nics {
        // 0 of another that is missing: it comes next, and then all of them are written.
        let found = interface::find(&mut worker.route, &plan.tap)?;
        indexes.push(found.map_or(InterfaceIndex(0), |found| found.index));
    }
    if indexes[nic].0 == 0 {
        return Err(KernelError::missing_interface(name).into());
    }
    let first = ebpf.reserve(slot)?;
    ebpf.write(slot, &indexes, shared)?;
    let position = u32::try_from(nic).expect("a slot has at most 8 interfaces");
    let entry = NicIndex(first.0 + position);
    let mut request = Request::new();
    configure(&mut request, slot, nic, indexes[nic]);
    Attachment::host_end(indexes[nic], entry).add(&mut request, &ebpf.datapath);
    if slot.data_path == DataPath::Xdp {
        super::xdp::attach(&mut request, ebpf, indexes[nic], entry)?;
    }
    raise(&mut request, slot, nic, indexes[nic]);
    worker.route.execute(request)?;
    Ok(opened.make_persistent()?)
}

/// Takes the TAPs away from future users, or finds that somebody has one open.
pub(super) fn withdraw_taps(
    worker: &mut Worker,
    slot: &SlotPlan,
) -> Result<Withdrawal, NetworkError> {
    let mut found: Vec<(usize, Interface)> = Vec::new();
    for (nic, plan) in slot.nics.iter().enumerate() {
        let present = interface::find(&mut worker.route, &plan.tap)?;
        let is_ours = |found: &Interface| {
            found.tun.is_some() && found.alias.as_deref() == Some(&*slot.host_alias)
        };
        found.extend(present.filter(is_ours).map(|present| (nic, present)));
    }
    let taps: Vec<(usize, &Interface)> = found.iter().map(|(nic, tap)| (*nic, tap)).collect();
    let hidden = |nic: usize| names::withdrawn(&slot.nics[nic].tap);
    withdraw::withdraw(&mut worker.route, slot, &taps, hidden)
}

/// Deletes the TAPs of many slots, and says of each what became of it. Whatever is refused, the others go.
pub(super) fn tear_down(
    worker: &mut Worker,
    ebpf: Option<&Ebpf>,
    slots: &[&SlotPlan],
) -> Vec<Result<(), NetworkError>> {
    if slots.is_empty() {
        return Vec::new();
    }
    let group = match free_group(worker, slots) {
        Ok(group) => group,
        Err(error) => {
            let text = error.to_string();
            return slots.iter().map(|slot| Err(left(slot, &text))).collect();
        }
    };
    let nics = slots.iter().map(|slot| slot.nics.len()).max();
    let at_once = (DELETED_AT_ONCE / nics.unwrap_or(1).max(1)).max(1);
    let mut results = Vec::with_capacity(slots.len());
    for batch in slots.chunks(at_once) {
        let deleted = delete_taps(worker, batch, group);
        for slot in batch {
            let result = match &deleted {
                Ok(()) => Ok(()),
                Err(error) => check_gone(worker, slot, error),
            };
            if let (Ok(()), Some(ebpf)) = (&result, ebpf) {
                ebpf.free(slot);
            }
            results.push(result);
        }
    }
    results
}

fn delete_taps(worker: &mut Worker, slots: &[&SlotPlan], group: u32) -> Result<(), KernelError> {
    let all: Vec<String> = names_of(slots).collect();
    let all = all.iter().map(|name| (name.as_str(), None));
    interface::delete_together(&mut worker.route, all, group)
}

/// By which the TAPs of slots may be there: as they are found, and as they are withdrawn.
fn names_of(slots: &[&SlotPlan]) -> impl Iterator<Item = String> {
    let taps = slots.iter().flat_map(|slot| &slot.nics);
    taps.flat_map(|nic| [nic.tap.clone(), names::withdrawn(&nic.tap)])
}

fn left(slot: &SlotPlan, text: &str) -> NetworkError {
    NetworkError::reason("tear down", &slot.netns_name, text)
}

/// Of several that were deleted together, of which one is still there, perhaps this one.
fn check_gone(
    worker: &mut Worker,
    slot: &SlotPlan,
    error: &KernelError,
) -> Result<(), NetworkError> {
    for nic in &slot.nics {
        for name in [nic.tap.clone(), names::withdrawn(&nic.tap)] {
            if !matches!(interface::find(&mut worker.route, &name), Ok(None)) {
                return Err(left(slot, &error.to_string()));
            }
        }
    }
    Ok(())
}

/// A group in which there is nobody but those that are torn down, whoever is deleted with it. One of ours that a crash left in
/// such a group may have been handed out since: it is taken out, so that groups don't run out.
fn free_group(worker: &mut Worker, slots: &[&SlotPlan]) -> Result<u32, NetworkError> {
    let Some(slot) = slots.first() else {
        return Ok(FIRST_GROUP);
    };
    let first = FIRST_GROUP | slot.pool_number;
    let going: HashSet<String> = names_of(slots).collect();
    let mut present = interface::list(&mut worker.route)?;
    present.retain(|found| {
        (first..first + GROUP_ATTEMPTS).contains(&found.group) && !going.contains(&found.name)
    });
    let mut request = Request::new();
    for stray in present.iter().filter(|found| is_of_instance(slot, found)) {
        interface::leave_group(&mut request, stray);
    }
    let failures = worker.route.execute_all(request);
    if let Some((_, error)) = failures.into_iter().find(|(_, error)| !error.is_missing()) {
        return Err(error.into());
    }
    present.retain(|found| !is_of_instance(slot, found));
    interface::free_group(&present, first, GROUP_ATTEMPTS, |_| false).ok_or_else(|| {
        NetworkError::Conflict {
            object: format!("interface group {first}"),
            with: "interfaces of somebody else".to_owned(),
            advice: "take them out of that group".to_owned(),
        }
    })
}

/// Whether an interface is a slot's of the same instance, of whatever pool: they are torn down together.
fn is_of_instance(slot: &SlotPlan, interface: &Interface) -> bool {
    let parsed = names::parse_alias(interface.alias.as_deref().unwrap_or_default());
    let own = names::parse_alias(&slot.host_alias);
    matches!((parsed, own), (Some((its, ..)), Some((ours, ..))) if its == ours)
}

#[cfg(test)]
mod tests {
    use sandwire_testlab::lab;

    use super::*;
    use crate::plan::{Plan, SlotNumber};

    fn plan(pool: &str) -> Plan {
        let text = format!(
            r#"{{"name": "{pool}", "kind": "host", "data_path": "ebpf",
                 "addresses": {{"plan": "prefix", "ipv4": "10.64.0.0/24", "ipv6": "fd00:c10e::/64"}}}}"#
        );
        let spec = serde_json::from_str(&text).unwrap();
        Plan::new(&"test".parse().unwrap(), &spec).unwrap()
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn what_a_crash_left_in_a_group_outlives_the_tear_down_of_others() {
        lab::run(|lab| {
            let (web, db) = (plan("web"), plan("db"));
            let [gone, leased] = [0, 1].map(|number| web.slot(SlotNumber(number)));
            let of_other_pool = db.slot(SlotNumber(0));
            let group = FIRST_GROUP | web.number;
            for slot in [&gone, &leased, &of_other_pool] {
                let tap = &slot.nics[0].tap;
                lab.run(&format!("ip tuntap add {tap} mode tap"));
                lab.run(&format!(
                    "ip link set {tap} group {group} alias {}",
                    slot.host_alias
                ));
            }
            lab.run("ip link add others type bridge");
            lab.run(&format!("ip link set others group {group}"));
            let mut worker = Worker::new().unwrap();
            for result in tear_down(&mut worker, None, &[&gone]) {
                result.unwrap();
            }
            let left = lab.run("ip -o link show");
            assert!(!left.contains(&gone.nics[0].tap), "{left}");
            for stays in [&leased.nics[0].tap, &of_other_pool.nics[0].tap, "others"] {
                assert!(left.contains(stays), "{stays}: {left}");
            }
            // Where they are, the next that is torn down finds them again.
            let in_group = lab.run(&format!("ip -o link show group {group}"));
            assert!(in_group.contains("others"), "{in_group}");
            assert!(!in_group.contains("sandwire:"), "{in_group}");
        });
    }
}
