//! Taking slots over from an older daemon, by the maps that it used or by new ones.
//!
//! Maps of another layout or size begin empty, so packets go on by the old programs and maps until the new ones
//! know every slot. Then programs are exchanged, first where packets come from, on the uplinks and the shared
//! interface, and then on the slots. What is remembered of calls is the same table for both, so that it doesn't matter
//! which of the two sees a call, and which its answer. Where that can't be (another size, another version), an answer is
//! judged by what has seen the call, or another packet of its flow: for a while any packet towards a slot counts as one.
//!
//! What the kernel refuses to exchange is left behind: the inspection of its slot finds and mends that, and until it has
//! seen the slot sound the old maps stay, whose counters then are complete.

use std::{collections::BTreeSet, sync::Mutex, thread};

use sandwire_api::slot::DataPath;
use sandwire_datapath::{
    Datapath, NicIndex, Uplink,
    abi::{Nic, NicFlag},
};
use sandwire_kernel_net::{interface::InterfaceIndex, netns::Home};

use super::{
    Worker,
    build::{Build, BuildStep, Steps},
    container,
    ebpf::{Ebpf, Place, place_of},
    filters::{Attachment, Found},
    lock,
    moving::{ANSWER_TIME, attach_inside, host_ends},
    xdp,
};
use crate::{error::NetworkError, network::Tenancy, plan::SlotPlan};

/// What goes by old maps until the new ones know every slot.
pub(super) struct Switch {
    waiting: Mutex<Option<Waiting>>,
    behind: Mutex<Behind>,
}

/// What may go by old maps still, after a failure.
#[derive(Default)]
struct Behind {
    host: bool,
    slots: BTreeSet<Place>,
}

#[derive(Default)]
struct Waiting {
    /// Shared interface and uplinks.
    host: Option<(InterfaceIndex, Vec<Uplink>)>,
    /// Slots whose entries are written.
    slots: Vec<SlotPlan>,
}

impl Switch {
    pub(super) fn new(waits: bool) -> Self {
        Self {
            waiting: Mutex::new(waits.then(Waiting::default)),
            behind: Mutex::default(),
        }
    }

    pub(super) fn waits(&self) -> bool {
        lock(&self.waiting).is_some()
    }

    /// Whether the host's programs are to be exchanged later.
    pub(super) fn keeps_host(&self, shared: InterfaceIndex, uplinks: &[Uplink]) -> bool {
        let mut waiting = lock(&self.waiting);
        if let Some(waiting) = &mut *waiting {
            waiting.host = Some((shared, uplinks.to_vec()));
        }
        waiting.is_some()
    }

    /// Whether the programs of a slot are to be exchanged later.
    fn keeps_slot(&self, slot: &SlotPlan) -> bool {
        let mut waiting = lock(&self.waiting);
        if let Some(waiting) = &mut *waiting {
            waiting.slots.push(slot.clone());
        }
        waiting.is_some()
    }

    /// From now on nothing waits.
    fn end(&self) -> Option<Waiting> {
        lock(&self.waiting).take()
    }

    /// Whether anything may go by old maps.
    pub(super) fn is_under_way(&self) -> bool {
        let behind = lock(&self.behind);
        self.waits() || behind.host || !behind.slots.is_empty()
    }

    /// Says whether the host's programs could be exchanged.
    pub(super) fn note_host(&self, is_done: bool) {
        lock(&self.behind).host = !is_done;
    }

    fn leave_behind(&self, slot: &SlotPlan) {
        lock(&self.behind).slots.insert(place_of(slot));
    }

    /// Nothing of a slot goes by old maps: it is sound, or gone.
    pub(super) fn catch_up(&self, slot: &SlotPlan) {
        lock(&self.behind).slots.remove(&place_of(slot));
    }
}

/// Leased interfaces of slots as old maps know them.
pub(super) fn former_nics(datapath: &Datapath) -> Vec<Nic> {
    datapath.former_nics().unwrap_or_else(|error| {
        tracing::warn!(%error, "what old maps say of leases can't be read");
        Vec::new()
    })
}

/// Slots whose packets other programs divert.
pub(super) fn impaired(nics: &[Nic]) -> BTreeSet<Place> {
    let is_impaired = |nic: &&Nic| nic.flags & NicFlag::Impaired.number() != 0;
    let impaired = nics.iter().filter(is_impaired);
    impaired.map(|nic| (nic.pool, nic.slot)).collect()
}

/// Takes over a slot that is there: entries, tenant, and programs if those on it have other maps. One that is on its
/// way to nft is taken over too if its packets still go by eBPF, so that they do until it is moved.
pub(super) fn adopt(
    build: &Build<'_>,
    home: &Home,
    worker: &mut Worker,
    (ebpf, shared): (&Ebpf, InterfaceIndex),
    tenancy: Option<&Tenancy>,
) -> Result<(), NetworkError> {
    let slot = build.slot;
    let host_ends = match slot.is_child() {
        true => Ok(vec![InterfaceIndex(0)]),
        false => host_ends(worker, slot),
    };
    let Ok(host_ends) = host_ends else {
        // Pieces of it are missing: its repair does all of this.
        return Ok(());
    };
    let goes_by_ebpf = slot.is_ebpf() || ebpf.is_migrating() && has_program(worker, &host_ends)?;
    if !goes_by_ebpf {
        return Ok(());
    }
    let had_entries = ebpf.find(slot).is_some();
    let done = enter(ebpf, &host_ends, shared, slot, tenancy);
    // With the same maps older programs go on; the inspection replaces them one by one.
    if done.is_ok() && (had_entries || ebpf.switch.keeps_slot(slot)) {
        return Ok(());
    }
    let done = done.and_then(|()| exchange_programs(build, home, worker, ebpf));
    if done.is_err() {
        ebpf.switch.leave_behind(slot);
    }
    done
}

/// Whether a filter of ours is on one of a slot's host ends.
fn has_program(worker: &mut Worker, host_ends: &[InterfaceIndex]) -> Result<bool, NetworkError> {
    for host_end in host_ends {
        if Attachment::is_place_taken(*host_end, &mut worker.route)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Has the maps say of a slot what they should.
fn enter(
    ebpf: &Ebpf,
    host_ends: &[InterfaceIndex],
    shared: InterfaceIndex,
    slot: &SlotPlan,
    tenancy: Option<&Tenancy>,
) -> Result<(), NetworkError> {
    let first = ebpf.reserve(slot)?;
    if !ebpf.is_written(slot, host_ends, shared) {
        ebpf.write(slot, host_ends, shared)?;
    }
    if slot.data_path == DataPath::Xdp {
        for (number, host_end) in (first.0..).zip(host_ends) {
            ebpf.know_xdp(*host_end, NicIndex(number))?;
        }
    }
    ebpf.adopt(slot, tenancy)
}

/// Has packets go by new maps that know every slot.
pub(super) fn switch_over(
    steps: &dyn Steps,
    home: &Home,
    worker: &mut Worker,
    (ebpf, shared): (&Ebpf, InterfaceIndex),
) -> Result<(), NetworkError> {
    let Some(waiting) = ebpf.switch.end() else {
        return Ok(());
    };
    let mut failures: Vec<NetworkError> = Vec::new();
    failures.extend(ebpf.datapath.take_into_use().err().map(NetworkError::from));
    if let Some((shared, uplinks)) = waiting.host {
        failures.extend(ebpf.attach(shared, &uplinks).err());
        if !ebpf.datapath.shares_answers() {
            thread::sleep(ANSWER_TIME);
        }
    }
    for slot in &waiting.slots {
        let build = Build {
            steps,
            slot,
            ebpf: Some((ebpf, shared)),
        };
        if let Err(error) = exchange_programs(&build, home, worker, ebpf) {
            ebpf.switch.leave_behind(slot);
            failures.push(error);
        }
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(NetworkError::Several(failures)),
    }
}

fn exchange_programs(
    build: &Build<'_>,
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
) -> Result<(), NetworkError> {
    let slot = build.slot;
    if slot.is_child() {
        return build.step(BuildStep::Exchange, || {
            container::exchange_child_programs(home, worker, ebpf, slot)
        });
    }
    let first = ebpf.reserve(slot)?;
    build.step(BuildStep::Exchange, || {
        for (number, host_end) in (first.0..).zip(host_ends(worker, slot)?) {
            let attachment = Attachment::host_end(host_end, NicIndex(number));
            attachment.restore(&mut worker.route, &ebpf.datapath)?;
            // A missing one is found by the inspection.
            if slot.data_path == DataPath::Xdp
                && xdp::look(&mut worker.route, ebpf, host_end)? == Found::OtherMaps
            {
                xdp::exchange(&mut worker.route, ebpf, host_end)?;
            }
        }
        Ok(())
    })?;
    if slot.has_netns() {
        attach_inside(home, ebpf, slot)?;
    }
    Ok(())
}
