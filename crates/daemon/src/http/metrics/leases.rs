//! What leases have sent, received and lost: the sums of each pool, and on request each lease.
//!
//! Leases come and go, and so do their counters; a sum that goes down would look like a restart. So
//! the sums here only grow: by what each lease has counted since the last look.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, PoisonError},
};

use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use sandwire_api::{
    name::Name,
    traffic::{LeaseTraffic, Traffic},
};
use sandwire_slot::service::{Caller, Slots};

/// The daemon itself sees every lease.
const SELF: Caller = Caller {
    uid: 0,
    gid: 0,
    privileged: true,
};

/// Sums that only grow.
#[derive(Debug, Default)]
pub(crate) struct LeaseTotals {
    /// Whether each lease has figures of its own: as many time series as there are leases.
    per_lease: bool,
    sums: Mutex<Sums>,
}

#[derive(Debug, Default)]
struct Sums {
    /// What each lease had counted at the last look.
    seen: HashMap<Lease, Traffic>,
    pools: BTreeMap<Name, Traffic>,
}

/// A lease; one of the same name in another slot is another one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Lease {
    pool: Name,
    slot: u32,
    owner_uid: u32,
    name: Name,
}

/// Names and values of labels.
type Labels = Vec<(&'static str, String)>;

impl LeaseTotals {
    pub(crate) fn new(per_lease: bool) -> Self {
        Self {
            per_lease,
            ..Self::default()
        }
    }

    /// Looks at all leases, and has their figures told.
    pub(super) fn register(&self, slots: &Slots, registry: &mut Registry) {
        let leases = slots.traffic(SELF);
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        sums.look(&leases);
        let pools = sums.pools.iter();
        let rows = pools.map(|(pool, traffic)| (vec![("pool", pool.to_string())], traffic));
        register("pool", "of all leases of a pool", rows, registry);
        drop(sums);
        if self.per_lease {
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

impl Sums {
    /// Adds what has come since the last look.
    fn look(&mut self, leases: &[LeaseTraffic]) {
        let nothing = Traffic::default();
        let mut seen = HashMap::new();
        for lease in leases {
            let Some(traffic) = &lease.traffic else {
                continue;
            };
            let key = Lease {
                pool: lease.pool.clone(),
                slot: lease.slot,
                owner_uid: lease.owner_uid,
                name: lease.name.clone(),
            };
            let earlier = self.seen.get(&key).unwrap_or(&nothing);
            let sum = self.pools.entry(lease.pool.clone()).or_default();
            sum.add(&traffic.since(earlier));
            seen.insert(key, traffic.clone());
        }
        self.seen = seen;
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
    use sandwire_api::{
        drop_reason::DropReason,
        policy::LimitSpec,
        slot::{DataPath, SlotKind},
        traffic::TrafficTotal,
    };

    use super::*;

    fn lease(name: &str, slot: u32, packets: u64) -> LeaseTraffic {
        LeaseTraffic {
            name: name.parse().unwrap(),
            pool: "web".parse().unwrap(),
            owner_uid: 1000,
            slot,
            kind: SlotKind::Host,
            data_path: DataPath::Ebpf,
            limits: LimitSpec::default(),
            traffic: Some(Traffic {
                egress: TrafficTotal {
                    packets,
                    ..TrafficTotal::default()
                },
                drops: [(DropReason::Policy, packets)].into(),
                ..Traffic::default()
            }),
        }
    }

    #[test]
    fn a_pools_sum_never_goes_down() {
        let mut sums = Sums::default();
        let pool: Name = "web".parse().unwrap();
        for (leases, sum) in [
            (vec![lease("a", 1, 5), lease("b", 2, 7)], 12),
            // One has gone.
            (vec![lease("a", 1, 6)], 13),
            // The same name in another slot, and a slot's next tenant.
            (vec![lease("a", 3, 2), lease("c", 1, 1)], 16),
            (vec![], 16),
        ] {
            sums.look(&leases);
            assert_eq!(sums.pools[&pool].egress.packets, sum);
            assert_eq!(sums.pools[&pool].drops[&DropReason::Policy], sum);
        }
    }
}
