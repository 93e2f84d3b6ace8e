//! Taking slots over from an older daemon, by the maps that it used or by new ones.
//!
//! Maps of another layout or size begin empty, so packets go on by the old programs and maps until the new ones
//! know every slot. Then programs are exchanged, first where packets come from, on the uplinks and the shared
//! interface, and then on the slots: an answer is judged by what has seen the call, or another packet of its
//! flow. What was remembered of calls is not carried over; for a while any packet towards a slot counts as one.

use std::{sync::Mutex, thread};

use sandwire_api::slot::DataPath;
use sandwire_datapath::{NicIndex, Uplink};
use sandwire_kernel_net::{interface::InterfaceIndex, netns::Home};

use super::{
    Worker,
    ebpf::Ebpf,
    filters::{Attachment, Found},
    lock,
    moving::{ANSWER_TIME, attach_inside, host_ends},
    xdp,
};
use crate::{error::NetworkError, network::Tenancy, plan::SlotPlan};

/// What goes by old maps until the new ones know every slot.
pub(super) struct Switch(Mutex<Option<Waiting>>);

#[derive(Default)]
struct Waiting {
    /// Shared interface and uplinks.
    host: Option<(InterfaceIndex, Vec<Uplink>)>,
    /// Slots whose entries are written.
    slots: Vec<SlotPlan>,
}

impl Switch {
    pub(super) fn new(waits: bool) -> Self {
        Self(Mutex::new(waits.then(Waiting::default)))
    }

    pub(super) fn waits(&self) -> bool {
        lock(&self.0).is_some()
    }

    /// Whether the host's programs are to be exchanged later.
    pub(super) fn keeps_host(&self, shared: InterfaceIndex, uplinks: &[Uplink]) -> bool {
        let mut waiting = lock(&self.0);
        if let Some(waiting) = &mut *waiting {
            waiting.host = Some((shared, uplinks.to_vec()));
        }
        waiting.is_some()
    }

    /// Whether the programs of a slot are to be exchanged later.
    fn keeps_slot(&self, slot: &SlotPlan) -> bool {
        let mut waiting = lock(&self.0);
        if let Some(waiting) = &mut *waiting {
            waiting.slots.push(slot.clone());
        }
        waiting.is_some()
    }

    /// From now on nothing waits.
    fn end(&self) -> Option<Waiting> {
        lock(&self.0).take()
    }
}

/// Takes over a slot that is there: entries, tenant, and programs if those on it have other maps.
pub(super) fn adopt(
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
    shared: InterfaceIndex,
    slot: &SlotPlan,
    tenancy: Option<&Tenancy>,
) -> Result<(), NetworkError> {
    let Ok(host_ends) = host_ends(worker, slot) else {
        // Pieces of it are missing: its repair does all of this.
        return Ok(());
    };
    let had_entries = ebpf.find(slot).is_some();
    let first = ebpf.reserve(slot)?;
    if !ebpf.is_written(slot, &host_ends, shared) {
        ebpf.write(slot, &host_ends, shared)?;
    }
    if slot.data_path == DataPath::Xdp {
        for (number, host_end) in (first.0..).zip(&host_ends) {
            ebpf.know_xdp(*host_end, NicIndex(number))?;
        }
    }
    ebpf.adopt(slot, tenancy)?;
    // With the same maps older programs go on; the inspection replaces them one by one.
    if had_entries || ebpf.switch.keeps_slot(slot) {
        return Ok(());
    }
    exchange_programs(home, worker, ebpf, slot)
}

/// Has packets go by new maps that know every slot.
pub(super) fn switch_over(
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
) -> Result<(), NetworkError> {
    let Some(waiting) = ebpf.switch.end() else {
        return Ok(());
    };
    let mut failures = Vec::new();
    if let Some((shared, uplinks)) = waiting.host {
        failures.extend(ebpf.attach(shared, &uplinks).err());
        thread::sleep(ANSWER_TIME);
    }
    for slot in &waiting.slots {
        failures.extend(exchange_programs(home, worker, ebpf, slot).err());
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(NetworkError::Several(failures)),
    }
}

fn exchange_programs(
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
    slot: &SlotPlan,
) -> Result<(), NetworkError> {
    let first = ebpf.reserve(slot)?;
    for (number, host_end) in (first.0..).zip(host_ends(worker, slot)?) {
        let attachment = Attachment::host_end(host_end, NicIndex(number));
        attachment.restore(&mut worker.route, &ebpf.datapath)?;
        if slot.data_path == DataPath::Xdp {
            // A missing one is found by the inspection.
            if xdp::look(&mut worker.route, ebpf, host_end)? == Found::OtherMaps {
                xdp::exchange(&mut worker.route, ebpf, host_end)?;
            }
        }
    }
    if slot.has_netns() {
        attach_inside(home, ebpf, slot)?;
    }
    Ok(())
}
