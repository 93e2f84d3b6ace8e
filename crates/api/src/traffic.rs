//! What a lease has sent, received and lost, as the eBPF data paths count it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    drop_reason::DropReason,
    impairment::ImpairmentSummary,
    name::Name,
    policy::LimitSpec,
    slot::{DataPath, SlotKind},
};

/// Traffic of a lease, all interfaces together, since it was acquired.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Traffic {
    /// What left the sandbox and was let through.
    pub egress: TrafficTotal,
    /// What reached the sandbox.
    pub ingress: TrafficTotal,
    /// Packets dropped, by reason; a reason that is absent never applied. See `GET /v1/drop-reasons`.
    #[schema(value_type = BTreeMap<String, u64>, example = json!({"policy": 3}))]
    pub drops: BTreeMap<DropReason, u64>,
}

/// Traffic in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TrafficTotal {
    /// Packets as the driver hands them over: a super-packet of up to 64 KiB counts once.
    pub packets: u64,
    /// Bytes of Ethernet frames, counted as `packets` are.
    pub bytes: u64,
    /// Packets as they are on the wire: a super-packet counts its segments.
    pub segments: u64,
}

/// A lease's traffic with what it takes to read it: one row of `sandwire top`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseTraffic {
    /// Name of the lease.
    pub name: Name,
    /// Pool that the slot belongs to.
    pub pool: Name,
    /// Numeric user that acquired the lease.
    pub owner_uid: u32,
    /// Number of the slot in its pool.
    pub slot: u32,
    /// Kind of the slot.
    pub kind: SlotKind,
    /// The data path that its packets take.
    pub data_path: DataPath,
    /// Limits that apply to it.
    pub limits: LimitSpec,
    /// What was counted. Absent with the `nft` data path.
    pub traffic: Option<Traffic>,
    /// How its packets are impaired, as of up to two seconds ago. Absent if they aren't.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub impairment: Option<ImpairmentSummary>,
}

impl Traffic {
    /// Adds what another interface, or another lease, has counted.
    pub fn add(&mut self, other: &Self) {
        self.egress.add(&other.egress);
        self.ingress.add(&other.ingress);
        for (reason, count) in &other.drops {
            let sum = self.drops.entry(*reason).or_default();
            *sum = sum.wrapping_add(*count);
        }
    }

    /// What has come since `earlier`. Counters that went back, because the slot has another tenant, have
    /// come anew.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let drops = self.drops.iter().map(|(reason, count)| {
            let before = earlier.drops.get(reason).copied().unwrap_or(0);
            (*reason, came(*count, before))
        });
        Self {
            egress: self.egress.since(&earlier.egress),
            ingress: self.ingress.since(&earlier.ingress),
            drops: drops.filter(|(_, count)| *count > 0).collect(),
        }
    }

    /// Packets dropped for any reason.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.drops
            .values()
            .fold(0, |sum, count| sum.wrapping_add(*count))
    }
}

impl TrafficTotal {
    fn add(&mut self, other: &Self) {
        self.packets = self.packets.wrapping_add(other.packets);
        self.bytes = self.bytes.wrapping_add(other.bytes);
        self.segments = self.segments.wrapping_add(other.segments);
    }

    fn since(&self, earlier: &Self) -> Self {
        Self {
            packets: came(self.packets, earlier.packets),
            bytes: came(self.bytes, earlier.bytes),
            segments: came(self.segments, earlier.segments),
        }
    }
}

fn came(now: u64, before: u64) -> u64 {
    now.checked_sub(before).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traffic(packets: u64, policy: u64) -> Traffic {
        Traffic {
            egress: TrafficTotal {
                packets,
                bytes: packets * 100,
                segments: packets,
            },
            ingress: TrafficTotal::default(),
            drops: BTreeMap::from([(DropReason::Policy, policy)]),
        }
    }

    #[test]
    fn drops_are_written_by_the_names_of_their_reasons() {
        let json = serde_json::to_value(traffic(1, 3)).unwrap();
        assert_eq!(json["drops"]["policy"], 3);
        let back: Traffic = serde_json::from_value(json).unwrap();
        assert_eq!(back, traffic(1, 3));
    }

    #[test]
    fn the_difference_leaves_out_what_did_not_grow_and_survives_a_reset() {
        let difference = traffic(10, 3).since(&traffic(4, 3));
        assert_eq!(difference.egress.packets, 6);
        assert!(difference.drops.is_empty());
        assert_eq!(traffic(2, 1).since(&traffic(4, 3)).egress.packets, 2);
    }

    #[test]
    fn sums_go_over_all_reasons() {
        let mut sum = traffic(1, 2);
        sum.add(&Traffic {
            drops: BTreeMap::from([(DropReason::Arp, 1), (DropReason::Policy, 1)]),
            ..Traffic::default()
        });
        assert_eq!((sum.dropped(), sum.drops[&DropReason::Policy]), (4, 3));
    }
}
