//! What leases have sent, received and lost: the sums of each pool, and on request each lease.
//!
//! A pool's sum is what its ended leases had counted and what those count that there are. A lease that ends between
//! the two readings is in neither for once; a sum that goes down would look like a restart, so that none does.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use sandwire_api::{
    name::Name,
    traffic::{LeaseTraffic, Traffic, TrafficTotal},
};
use sandwire_slot::service::{Counted, Slots};

/// Sums that only grow.
#[derive(Debug)]
pub(crate) struct LeaseTotals {
    /// Whether each lease has figures of its own: as many time series as there are leases.
    per_lease: bool,
    /// What was told of each pool the last time.
    told: Mutex<Told<Traffic>>,
}

/// What was told of each pool that there is.
#[derive(Debug, Default)]
pub(super) struct Told<Sum>(BTreeMap<Name, (u64, Sum)>);

impl<Sum: Default> Told<Sum> {
    /// Forgets pools that are deleted, also those in whose place there is another of that name.
    pub(super) fn keep(&mut self, pools: &BTreeMap<Name, u64>) {
        self.0
            .retain(|pool, (incarnation, _)| pools.get(pool) == Some(incarnation));
    }

    /// What was told of a pool; None if there is no such pool.
    pub(super) fn of(&mut self, pool: Name, pools: &BTreeMap<Name, u64>) -> Option<&mut Sum> {
        let incarnation = *pools.get(&pool)?;
        let (_, sum) = self.0.entry(pool).or_insert((incarnation, Sum::default()));
        Some(sum)
    }

    /// All of it, by pool.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Name, &Sum)> {
        self.0.iter().map(|(pool, (_, sum))| (pool, sum))
    }
}

/// The pools that there are. To be asked for before their sums.
pub(super) fn incarnations(slots: &Slots) -> BTreeMap<Name, u64> {
    let views = slots.pool_views().into_iter();
    let pools = views.map(|view| (view.spec().name.clone(), view.incarnation));
    pools.collect()
}

/// Names and values of labels.
pub(super) type Labels = Vec<(&'static str, String)>;

impl LeaseTotals {
    pub(crate) fn new(per_lease: bool) -> Self {
        Self {
            per_lease,
            told: Mutex::default(),
        }
    }

    /// Whether each lease has figures of its own.
    pub(super) fn is_per_lease(&self) -> bool {
        self.per_lease
    }

    /// Looks at all leases, and has the pools' sums told; each lease's too if that is wanted and it is for root.
    pub(super) fn register(&self, slots: &Slots, for_root: bool, registry: &mut Registry) {
        let pools = incarnations(slots);
        let Counted {
            leases,
            ended,
            earlier,
        } = slots.counted_traffic();
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.keep(&pools);
        for (pool, sum) in sums(ended, &leases) {
            // An earlier daemon told of that: whoever sees a counter go down takes all that it shows then for new.
            let sum = match earlier.get(&pool) {
                Some(earlier) => without(&sum, earlier),
                None => sum,
            };
            if let Some(before) = told.of(pool, &pools) {
                *before = larger(&sum, before);
            }
        }
        let rows = told
            .iter()
            .map(|(pool, traffic)| (vec![("pool", pool.to_string())], traffic));
        register("pool", "of all leases of a pool", rows, registry);
        drop(told);
        if self.per_lease && for_root {
            let rows = leases.iter().filter_map(|lease| {
                let labels = vec![
                    ("pool", lease.pool.to_string()),
                    ("owner", lease.owner_uid.to_string()),
                    ("lease", lease.name.to_string()),
                ];
                Some((labels, lease.traffic.as_ref()?))
            });
            register("lease", "of a lease", rows, registry);
        }
    }
}

/// Sums by pool, of leases that have ended and of those that there are.
fn sums(ended: BTreeMap<Name, Traffic>, leases: &[LeaseTraffic]) -> BTreeMap<Name, Traffic> {
    let mut sums = ended;
    for lease in leases {
        if let Some(traffic) = &lease.traffic {
            sums.entry(lease.pool.clone()).or_default().add(traffic);
        }
    }
    sums
}

/// What is more than it was; of a lease that is just missing in the sum that may be nothing.
fn without(sum: &Traffic, before: &Traffic) -> Traffic {
    let total = |sum: &TrafficTotal, before: &TrafficTotal| TrafficTotal {
        packets: sum.packets.saturating_sub(before.packets),
        bytes: sum.bytes.saturating_sub(before.bytes),
        segments: sum.segments.saturating_sub(before.segments),
    };
    let drops = sum.drops.iter().map(|(reason, count)| {
        let before = before.drops.get(reason).copied().unwrap_or(0);
        (*reason, count.saturating_sub(before))
    });
    Traffic {
        egress: total(&sum.egress, &before.egress),
        ingress: total(&sum.ingress, &before.ingress),
        drops: drops.filter(|(_, count)| *count > 0).collect(),
    }
}

/// Figure by figure, the larger one.
fn larger(left: &Traffic, right: &Traffic) -> Traffic {
    let total = |left: &TrafficTotal, right: &TrafficTotal| TrafficTotal {
        packets: left.packets.max(right.packets),
        bytes: left.bytes.max(right.bytes),
        segments: left.segments.max(right.segments),
    };
    let mut drops = left.drops.clone();
    for (reason, count) in &right.drops {
        let drop = drops.entry(*reason).or_default();
        *drop = (*drop).max(*count);
    }
    Traffic {
        egress: total(&left.egress, &right.egress),
        ingress: total(&left.ingress, &right.ingress),
        drops,
    }
}

/// Registers packets, bytes, segments and drops of several subjects.
fn register<'a>(
    subject: &str,
    of: &str,
    rows: impl Iterator<Item = (Labels, &'a Traffic)>,
    registry: &mut Registry,
) {
    let packets = Family::<Labels, Counter>::default();
    let bytes = Family::<Labels, Counter>::default();
    let segments = Family::<Labels, Counter>::default();
    let drops = Family::<Labels, Counter>::default();
    for (labels, traffic) in rows {
        let with = |name, value: &str| {
            let mut labels = labels.clone();
            labels.push((name, value.to_owned()));
            labels
        };
        for (direction, total) in [("egress", &traffic.egress), ("ingress", &traffic.ingress)] {
            for (family, count) in [
                (&packets, total.packets),
                (&bytes, total.bytes),
                (&segments, total.segments),
            ] {
                family
                    .get_or_create(&with("direction", direction))
                    .inc_by(count);
            }
        }
        for (reason, count) in &traffic.drops {
            drops
                .get_or_create(&with("reason", &reason.name()))
                .inc_by(*count);
        }
    }
    for (what, help, family) in [
        ("packets", "Packets let through", packets),
        ("bytes", "Bytes let through", bytes),
        (
            "segments",
            "Packets let through, as they are on the wire",
            segments,
        ),
    ] {
        registry.register(format!("{subject}_{what}"), format!("{help}, {of}"), family);
    }
    registry.register(
        format!("{subject}_drops"),
        format!("Packets dropped, {of}"),
        drops,
    );
}

#[cfg(test)]
mod tests {
    use sandwire_api::drop_reason::DropReason;

    use super::*;

    fn traffic(packets: u64, drops: &[(DropReason, u64)]) -> Traffic {
        Traffic {
            egress: TrafficTotal {
                packets,
                ..TrafficTotal::default()
            },
            drops: drops.iter().copied().collect(),
            ..Traffic::default()
        }
    }

    #[test]
    fn no_figure_goes_down() {
        let before = traffic(9, &[(DropReason::Arp, 1), (DropReason::Policy, 4)]);
        let now = traffic(7, &[(DropReason::Policy, 5)]);
        let told = traffic(9, &[(DropReason::Arp, 1), (DropReason::Policy, 5)]);
        assert_eq!(larger(&now, &before), told);
    }
}
