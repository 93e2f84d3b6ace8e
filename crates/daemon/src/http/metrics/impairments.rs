//! What impaired leases' packets meet, if each lease has figures of its own.

use std::{collections::BTreeMap, sync::atomic::AtomicU64};

use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};
use sandwire_api::impairment::{RuleReport, Way};
use sandwire_slot::lease::LeaseKey;

use super::leases::Labels;
use crate::impair::Impairments;

type Figure = Gauge<f64, AtomicU64>;

/// One direction of a lease, all its interfaces together.
#[derive(Debug, Default, PartialEq)]
struct Sum {
    offered: u64,
    drops: BTreeMap<String, u64>,
    queued: u64,
    delay_nanoseconds: Option<u64>,
    bits_per_second: u64,
    late_nanoseconds: u64,
    is_invalid: bool,
}

impl Sum {
    fn add(&mut self, way: &Way) {
        self.is_invalid |= !way.line.valid;
        for (cause, count) in [
            ("engine_dead", way.dead_dropped),
            ("unread", way.unread),
            ("too_long", way.too_long),
            ("uncut", way.uncut),
            ("refused", way.refused),
            ("nat_forgotten", way.line.nat_dropped),
            ("consumer_full", way.line.passed_dropped),
        ] {
            self.drop(cause, count);
        }
        way.line.rules.iter().for_each(|rule| self.add_rule(rule));
    }

    fn add_rule(&mut self, rule: &RuleReport) {
        self.offered += rule.packets.offered;
        for (cause, count) in &rule.packets.dropped {
            self.drop(cause, *count);
        }
        self.queued += rule.queued_packets;
        self.delay_nanoseconds = self.delay_nanoseconds.max(rule.achieved_delay_nanoseconds);
        self.bits_per_second += rule.achieved_bits_per_second;
        self.late_nanoseconds = self.late_nanoseconds.max(rule.timing.p99_nanoseconds);
    }

    fn drop(&mut self, cause: &str, count: u64) {
        if count > 0 {
            *self.drops.entry(cause.to_owned()).or_default() += count;
        }
    }
}

/// Asks the impairment service, if some lease may be impaired, and has its figures told.
pub(super) fn register(impairments: &Impairments, registry: &mut Registry) {
    let all = match impairments.all() {
        Ok(all) => all,
        Err(error) => {
            tracing::warn!(%error, "no figures of impaired leases");
            return;
        }
    };
    let mut sums = BTreeMap::<(LeaseKey, &str), Sum>::new();
    for (lease, status) in &all {
        for (direction, way) in [("egress", &status.egress), ("ingress", &status.ingress)] {
            let sum = sums.entry((lease.clone(), direction)).or_default();
            sum.add(way);
        }
    }
    if !sums.is_empty() {
        tell(&sums, registry);
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "53 bits are more than these figures have"
)]
fn tell(sums: &BTreeMap<(LeaseKey, &str), Sum>, registry: &mut Registry) {
    let offered = Family::<Labels, Counter>::default();
    let drops = Family::<Labels, Counter>::default();
    let queued = Family::<Labels, Figure>::default();
    let delay = Family::<Labels, Figure>::default();
    let rate = Family::<Labels, Figure>::default();
    let late = Family::<Labels, Figure>::default();
    let valid = Family::<Labels, Figure>::default();
    for ((lease, direction), sum) in sums {
        let labels: Labels = vec![
            ("owner", lease.owner_uid.to_string()),
            ("lease", lease.name.to_string()),
            ("direction", (*direction).to_owned()),
        ];
        let set = |family: &Family<Labels, Figure>, value: f64| {
            family.get_or_create(&labels).set(value);
        };
        offered.get_or_create(&labels).inc_by(sum.offered);
        for (cause, count) in &sum.drops {
            let mut labels = labels.clone();
            labels.push(("cause", cause.clone()));
            drops.get_or_create(&labels).inc_by(*count);
        }
        set(&queued, sum.queued as f64);
        if let Some(nanoseconds) = sum.delay_nanoseconds {
            set(&delay, nanoseconds as f64 / 1e9);
        }
        set(&rate, sum.bits_per_second as f64);
        set(&late, sum.late_nanoseconds as f64 / 1e9);
        set(&valid, if sum.is_invalid { 0.0 } else { 1.0 });
    }
    let name = |name: &str| format!("impairment_{name}");
    let help = "Packets that met a rule of the impairment";
    registry.register(name("offered"), help, offered);
    registry.register(name("drops"), "Packets dropped by the impairment", drops);
    let help = "Packets that wait for the impaired line";
    registry.register(name("queued_packets"), help, queued);
    let help = "Bits per second released in the last whole second";
    registry.register(name("rate_bits_per_second"), help, rate);
    let help = "1 if packets were released in time, else 0";
    registry.register(name("valid"), help, valid);
    let help = "Mean time under way in the last whole second, of the slowest rule";
    registry.register_with_unit(name("delay"), help, Unit::Seconds, delay);
    let help = "How late 99 of 100 packets were released at most";
    registry.register_with_unit(name("late_p99"), help, Unit::Seconds, late);
}

#[cfg(test)]
mod tests {
    use sandwire_api::impairment::{LineReport, Packets};

    use super::*;

    #[test]
    fn rules_and_interfaces_are_put_together() {
        let rule = |offered, delay| RuleReport {
            packets: Packets {
                offered,
                dropped: [("loss".to_owned(), 2)].into(),
                ..Packets::default()
            },
            achieved_delay_nanoseconds: delay,
            ..RuleReport::default()
        };
        let way = |valid, rules| Way {
            unread: 1,
            line: LineReport {
                valid,
                rules,
                ..LineReport::default()
            },
            ..Way::default()
        };
        let mut sum = Sum::default();
        sum.add(&way(true, vec![rule(3, None), rule(4, Some(5))]));
        assert!(!sum.is_invalid);
        sum.add(&way(false, vec![rule(1, Some(2))]));
        let expected = Sum {
            offered: 8,
            drops: [("loss".to_owned(), 6), ("unread".to_owned(), 2)].into(),
            delay_nanoseconds: Some(5),
            is_invalid: true,
            ..Sum::default()
        };
        assert_eq!(sum, expected);
    }
}
