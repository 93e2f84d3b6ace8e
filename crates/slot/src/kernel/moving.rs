//! Moving slots between data paths under traffic.
//!
//! From nft to eBPF, so that at every moment a packet finds one complete way in each direction:
//!
//! 1. entries, not active; the program on `uplink0`, which leaves what the veth brings to the namespace;
//! 2. active, as for a process: packets from uplinks come to the namespace's rules as before;
//! 3. the program on the host end: the namespace's packets go by eBPF;
//! 4. the programs on the TAPs: the guest's packets go by eBPF, and then those towards it as well;
//! 5. the host's routes to the slot, and the namespace's rules, go.
//!
//! Until the last step a policy leaves all judgement to the host's rules: eBPF doesn't know yet which
//! connections came from outside, and learns it only from packets that pass its programs.
//!
//! Back, the same from its end: rules and routes first, then packets from uplinks are left to them, then
//! the programs go from the TAPs on, and the entries with their counters last. Connection tracking has missed what went by
//! eBPF, and must not mind.
//!
//! The answer to a call must leave by what knows of the call. So each move waits for guests that are
//! just answering, once new calls come the new way and before answers must leave by it.

use std::{collections::HashSet, net::IpAddr, thread, time::Duration};

use sandwire_api::traffic::Traffic;
use sandwire_datapath::{PolicyIndex, abi::NicFlag};
use sandwire_kernel_net::{
    conntrack, interface::InterfaceIndex, netlink::Socket, netns::Home, nft::Batch,
};

use super::{Worker, ebpf::Ebpf, filters::Attachment, interfaces, slot_table};
use crate::{error::NetworkError, network::Tenancy, plan::SlotPlan};

/// How long a guest may take to answer a call that came in just before calls went another way. Slower
/// answers are lost as if the network had lost them.
pub(super) const ANSWER_TIME: Duration = Duration::from_millis(10);

/// Numbers of the slot's interfaces on the host.
pub(super) fn host_ends(
    worker: &mut Worker,
    slot: &SlotPlan,
) -> Result<Vec<InterfaceIndex>, NetworkError> {
    let mut indexes = Vec::new();
    for name in slot.host_ends() {
        let found = sandwire_kernel_net::interface::find(&mut worker.route, name)?;
        let index = found.map(|found| found.index);
        indexes.push(index.ok_or_else(|| sandwire_kernel_net::Error::missing_interface(name))?);
    }
    Ok(indexes)
}

/// Puts the programs inside a slot's namespace where they belong.
pub(super) fn attach_inside(home: &Home, ebpf: &Ebpf, slot: &SlotPlan) -> Result<(), NetworkError> {
    let inside = home.enter(&slot.netns_name)?;
    let mut route = Socket::route()?;
    let mut attachments = interfaces::attachments_inside(slot).into_iter();
    let done = attachments.try_for_each(|one| one.restore(&mut route, &ebpf.datapath));
    drop(inside);
    Ok(done?)
}

pub(super) fn to_ebpf(
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
    shared: InterfaceIndex,
    slot: &SlotPlan,
    tenancy: Option<&Tenancy>,
    transit: PolicyIndex,
) -> Result<(), NetworkError> {
    let index = interfaces::host_end_index(&mut worker.route, slot)?;
    let first = ebpf.reserve(slot)?;
    if !ebpf.is_written(slot, &[index], shared) {
        ebpf.write(slot, &[index], shared)?;
    }
    let (uplink, taps) = {
        let mut attachments = interfaces::attachments_inside(slot).into_iter();
        (attachments.next(), attachments)
    };
    let inside = home.enter(&slot.netns_name)?;
    let mut route = Socket::route()?;
    let done = uplink.map_or(Ok(()), |uplink| uplink.restore(&mut route, &ebpf.datapath));
    drop(inside);
    done?;
    if let Some(tenancy) = tenancy {
        let as_process = Tenancy {
            is_process: true,
            policy: transit,
            ..*tenancy
        };
        ebpf.adopt(slot, Some(&as_process))?;
        ebpf.learn(slot)?;
    }
    Attachment::host_end(index, first).restore(&mut worker.route, &ebpf.datapath)?;
    let inside = home.enter(&slot.netns_name)?;
    let done = taps
        .into_iter()
        .try_for_each(|tap| tap.restore(&mut route, &ebpf.datapath));
    drop(inside);
    done?;
    if tenancy.is_some_and(|tenancy| !tenancy.is_process) {
        ebpf.set_flag(slot, NicFlag::Process, false)?;
    }
    interfaces::remove_host_routes(&mut worker.route, slot, index)?;
    let inside = home.enter(&slot.netns_name)?;
    let done = delete_table();
    drop(inside);
    done?;
    let Some(tenancy) = tenancy else {
        return Ok(());
    };
    thread::sleep(ANSWER_TIME);
    ebpf.set_policy(slot, tenancy)
}

/// Deletes the table of the namespace that the thread is in, if there is one.
fn delete_table() -> Result<(), NetworkError> {
    let mut batch = Batch::new(slot_table::NAME);
    batch.delete_table();
    match batch.commit(&mut Socket::netfilter()?) {
        Err(error) if error.is_missing() => Ok(()),
        other => Ok(other?),
    }
}

pub(super) fn to_nft(
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
    slot: &SlotPlan,
    transit: PolicyIndex,
) -> Result<Option<Traffic>, NetworkError> {
    let index = interfaces::host_end_index(&mut worker.route, slot)?;
    ebpf.set_policy_only(slot, transit);
    let inside = home.enter(&slot.netns_name)?;
    let mut route = Socket::route()?;
    let mut netfilter = Socket::netfilter()?;
    let addresses: HashSet<IpAddr> = slot
        .clone_addresses()
        .chain(slot.guest_addresses())
        .collect();
    let done = conntrack::tolerate_gaps(&mut netfilter, &addresses)
        .map_err(Into::into)
        .and_then(|()| recreate_table(slot));
    drop(inside);
    done?;
    conntrack::tolerate_gaps(&mut worker.netfilter, &addresses)?;
    interfaces::configure_host_end(worker, slot, false)?;
    if ebpf.leave_to_host(slot)? {
        thread::sleep(ANSWER_TIME);
    }
    let attachments = interfaces::attachments_inside(slot);
    let inside = home.enter(&slot.netns_name)?;
    let done = attachments
        .iter()
        .skip(1)
        .try_for_each(|tap| tap.remove(&mut route));
    drop(inside);
    done?;
    // Also where the maps have nothing of the slot: they may be newer than the program.
    Attachment::clear(index, &mut worker.route)?;
    let inside = home.enter(&slot.netns_name)?;
    let done = attachments
        .first()
        .map_or(Ok(()), |uplink| uplink.remove(&mut route));
    drop(inside);
    done?;
    // Last: what was counted is told once, when nothing can fail any more.
    let counted = ebpf.traffic(slot);
    ebpf.free(slot);
    Ok(counted)
}

fn recreate_table(slot: &SlotPlan) -> Result<(), NetworkError> {
    let mut batch = Batch::new(slot_table::NAME);
    batch.recreate_table();
    slot_table::write(&mut batch, slot);
    Ok(batch.commit(&mut Socket::netfilter()?)?)
}
