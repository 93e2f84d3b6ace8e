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
//! eBPF, and must not mind. The host's is asked for many slots at once, since it tells of all there are each time: what it
//! begins to track afterwards it tolerates by itself if it has missed the beginning, and of a call of which it has seen
//! nothing but that, no tolerance would mend the answer.
//!
//! The answer to a call must leave by what knows of the call. So each move waits for guests that are
//! just answering, once new calls come the new way and before answers must leave by it.

use std::{
    collections::HashSet,
    net::IpAddr,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use sandwire_api::traffic::Traffic;
use sandwire_datapath::{PolicyIndex, abi::NicFlag};
use sandwire_kernel_net::{
    conntrack, interface::InterfaceIndex, netlink::Socket, netns::Home, nft::Batch,
};

use super::{KernelNetwork, Worker, ebpf::Ebpf, filters::Attachment, interfaces, lock, slot_table};
use crate::{error::NetworkError, network::Tenancy, plan::SlotPlan};

/// How long a guest may take to answer a call that came in just before calls went another way. Slower
/// answers are lost as if the network had lost them.
pub(super) const ANSWER_TIME: Duration = Duration::from_millis(10);

/// For so long the host is prepared for moves at most.
const PREPARED_FOR: Duration = Duration::from_secs(5);

/// Of which slots that are still to be moved to nft the host tolerates gaps.
#[derive(Default)]
pub(super) struct Prepared(Option<(Instant, HashSet<IpAddr>)>);

impl Prepared {
    fn note(&mut self, at: Instant, addresses: HashSet<IpAddr>) {
        self.0 = Some((at, addresses));
    }

    /// Whether that is so of a slot, by its clone addresses. What comes after its move is another's to tolerate.
    fn take(&mut self, now: Instant, slot: &SlotPlan) -> bool {
        let Some((at, addresses)) = &mut self.0 else {
            return false;
        };
        let known = slot.clone_addresses().filter(|its| addresses.remove(its));
        let is_known = known.count() == slot.clone_addresses().count();
        is_known && now < *at + PREPARED_FOR
    }
}

impl KernelNetwork {
    /// Has the host tolerate gaps of all slots that are to be moved to nft next.
    pub(super) fn tolerate_gaps_of(&self, slots: &[SlotPlan]) -> Result<(), NetworkError> {
        let leaving = || slots.iter().filter(|slot| !slot.is_ebpf());
        if leaving().next().is_none() {
            return Ok(());
        }
        let addresses = leaving().flat_map(addresses_of).collect();
        self.with_worker(|worker| {
            Ok(conntrack::tolerate_gaps(&mut worker.netfilter, &addresses)?)
        })?;
        lock(&self.prepared).note(Instant::now(), addresses);
        Ok(())
    }

    pub(super) fn move_between_paths(
        &self,
        slot: &SlotPlan,
        tenancy: Option<&Tenancy>,
    ) -> Result<Option<Traffic>, NetworkError> {
        let Some(ebpf) = self.ebpf.get() else {
            return Ok(None);
        };
        let shared = InterfaceIndex(self.shared.load(Ordering::Relaxed));
        let talks = {
            let state = lock(&self.host);
            let mut pools = state.pools.values();
            let pool = pools.find(|pool| pool.plan.number == slot.pool_number);
            pool.is_some_and(|pool| pool.plan.spec.policy.clone_to_clone)
        };
        let transit = ebpf.transit_policy(talks)?;
        let is_prepared = lock(&self.prepared).take(Instant::now(), slot);
        self.with_worker(|worker| match slot.is_ebpf() {
            true => {
                to_ebpf(&self.home, worker, ebpf, shared, slot, tenancy, transit).map(|()| None)
            }
            false => to_nft(&self.home, worker, ebpf, slot, transit, is_prepared),
        })
    }
}

/// By which connections of a slot are known, on the host or in its namespace.
fn addresses_of(slot: &SlotPlan) -> impl Iterator<Item = IpAddr> {
    slot.clone_addresses().chain(slot.guest_addresses())
}

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

fn to_ebpf(
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

fn to_nft(
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
    slot: &SlotPlan,
    transit: PolicyIndex,
    is_prepared: bool,
) -> Result<Option<Traffic>, NetworkError> {
    let index = interfaces::host_end_index(&mut worker.route, slot)?;
    ebpf.set_policy_only(slot, transit);
    let inside = home.enter(&slot.netns_name)?;
    let mut route = Socket::route()?;
    let mut netfilter = Socket::netfilter()?;
    let addresses: HashSet<IpAddr> = addresses_of(slot).collect();
    let done = conntrack::tolerate_gaps(&mut netfilter, &addresses)
        .map_err(Into::into)
        .and_then(|()| recreate_table(slot));
    drop(inside);
    done?;
    if !is_prepared {
        conntrack::tolerate_gaps(&mut worker.netfilter, &addresses)?;
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Plan, SlotNumber};

    #[test]
    fn the_host_is_prepared_once_for_each_slot_and_not_for_long() {
        let text = r#"{"name": "web", "data_path": "nft",
            "addresses": {"plan": "prefix", "ipv4": "10.64.0.0/24", "ipv6": "fd00:c10e::/64"}}"#;
        let spec = serde_json::from_str(text).unwrap();
        let plan = Plan::new(&"test".parse().unwrap(), &spec).unwrap();
        let slots = [0, 1, 2].map(|number| plan.slot(SlotNumber(number)));
        // All have the same guest addresses.
        let addresses = slots[..2].iter().flat_map(addresses_of);
        let at = Instant::now();
        let mut prepared = Prepared::default();
        assert!(!prepared.take(at, &slots[0]));
        prepared.note(at, addresses.collect());
        assert!(!prepared.take(at, &slots[2]));
        assert!(prepared.take(at, &slots[0]));
        assert!(!prepared.take(at, &slots[0]), "it may have come back since");
        assert!(!prepared.take(at + PREPARED_FOR, &slots[1]));
    }
}
