//! What the eBPF data path has counted of slots, in the maps in use and in those of before.

use std::{collections::BTreeMap, sync::atomic::Ordering};

use sandwire_api::{
    drop_reason::DropReason,
    traffic::{Traffic, TrafficTotal},
};
use sandwire_datapath::abi;

use super::{ebpf::Ebpf, lock};
use crate::plan::SlotPlan;

impl Ebpf {
    /// Counted at all interfaces of a slot.
    pub(super) fn traffic(&self, slot: &SlotPlan) -> Option<Traffic> {
        let mut sum = Traffic::default();
        for index in self.entries(slot).ok()? {
            sum.add(&traffic_of(&self.datapath.counters(index)));
        }
        Some(sum)
    }

    /// Whether there are maps of before.
    pub(super) fn is_migrating(&self) -> bool {
        self.is_migrating.load(Ordering::Relaxed)
    }

    /// Lets go of maps of before once nothing goes by them. Returns what was counted there of slots that go on, by the
    /// numbers of their pools.
    pub(super) fn finish_migration(&self) -> BTreeMap<u32, Traffic> {
        let mut moved = BTreeMap::new();
        if !self.is_migrating() || self.switch.is_under_way() {
            return moved;
        }
        self.is_migrating.store(false, Ordering::Relaxed);
        let continued = std::mem::take(&mut *lock(&self.continued));
        let is_same = |nic: &abi::Nic| continued.contains(&(nic.pool, nic.slot));
        let tell = |nic: &abi::Nic, counted: &abi::Counters| {
            let sum: &mut Traffic = moved.entry(nic.pool).or_default();
            sum.add(&traffic_of(counted));
        };
        if let Err(error) = self.datapath.finish_migration(is_same, tell) {
            tracing::error!(%error, "maps of an older layout stay until the next start");
        }
        moved
    }
}

fn traffic_of(counted: &abi::Counters) -> Traffic {
    let drops = (0u8..).zip(counted.drops).filter(|(_, count)| *count > 0);
    Traffic {
        egress: total(counted.egress),
        ingress: total(counted.ingress),
        drops: drops
            .filter_map(|(number, count)| Some((DropReason::from_number(number)?, count)))
            .collect(),
    }
}

fn total(traffic: abi::Traffic) -> TrafficTotal {
    TrafficTotal {
        packets: traffic.packets,
        bytes: traffic.bytes,
        segments: traffic.segments,
    }
}
