//! What vsock channels carry and refuse: the sums of each pool, and on request each lease.
//!
//! As with leases' traffic, a pool's counters are those of its ended channels and of those that there are, and
//! none goes down.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use sandwire_api::{
    name::Name,
    vsock::{LeaseVsock, VsockClass, VsockClassTraffic, VsockTraffic},
};
use sandwire_slot::service::{Counted, Slots};
use serde::Serialize;

use super::leases::{Labels, Told, incarnations};

/// Sums that only grow.
#[derive(Debug)]
pub(crate) struct ChannelTotals {
    /// Whether each lease has figures of its own.
    per_lease: bool,
    /// What was told of each pool the last time.
    told: Mutex<Told<VsockTraffic>>,
}

impl ChannelTotals {
    pub(crate) fn new(per_lease: bool) -> Self {
        Self {
            per_lease,
            told: Mutex::default(),
        }
    }

    /// Asks the service, and has the pools' figures told, if there are channels; each lease's too if that is wanted and it is
    /// for root.
    pub(super) fn register(&self, slots: &Slots, for_root: bool, registry: &mut Registry) {
        let pools = incarnations(slots);
        let Counted {
            leases: channels,
            ended,
            earlier,
        } = slots.counted_channels();
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.keep(&pools);
        for (pool, sum) in sums(ended, &channels) {
            // An earlier daemon told of that.
            let sum = match earlier.get(&pool) {
                Some(earlier) => without(sum, earlier),
                None => sum,
            };
            if let Some(last) = told.of(pool, &pools) {
                *last = larger(sum, last);
            }
        }
        if told.iter().next().is_none() && channels.is_empty() {
            return;
        }
        let figures = Figures::default();
        for (pool, traffic) in told.iter() {
            figures.add(&vec![("pool", pool.to_string())], traffic);
        }
        figures.register("vsock", "of all leases of a pool", registry);
        drop(told);
        if self.per_lease && for_root {
            let figures = Figures::default();
            for channel in &channels {
                let labels = vec![
                    ("pool", channel.pool.to_string()),
                    ("owner", channel.owner_uid.to_string()),
                    ("lease", channel.lease.to_string()),
                ];
                if let Some(traffic) = &channel.traffic {
                    figures.add(&labels, traffic);
                }
            }
            figures.register("lease_vsock", "of a lease", registry);
        }
    }
}

/// Sums by pool, of channels that have ended and of those that there are.
fn sums(
    ended: BTreeMap<Name, VsockTraffic>,
    channels: &[LeaseVsock],
) -> BTreeMap<Name, VsockTraffic> {
    let mut sums = ended;
    // What there was at an end is no more.
    for sum in sums.values_mut() {
        (sum.attached, sum.connections, sum.buffered_bytes) = (false, 0, 0);
        for class in sum.classes.values_mut() {
            class.connections = 0;
        }
    }
    for channel in channels {
        if let Some(traffic) = &channel.traffic {
            sums.entry(channel.pool.clone()).or_default().add(traffic);
        }
    }
    sums
}

/// Counter by counter, what is more than it was; what there is now is as it is now.
fn without(mut sum: VsockTraffic, before: &VsockTraffic) -> VsockTraffic {
    let less = |count: &mut u64, before: u64| *count = count.saturating_sub(before);
    less(&mut sum.opened_by_guest, before.opened_by_guest);
    less(&mut sum.opened_by_peers, before.opened_by_peers);
    less(&mut sum.egress_bytes, before.egress_bytes);
    less(&mut sum.ingress_bytes, before.ingress_bytes);
    less(&mut sum.egress_packets, before.egress_packets);
    less(&mut sum.ingress_packets, before.ingress_packets);
    less(
        &mut sum.capture_dropped_packets,
        before.capture_dropped_packets,
    );
    for (reason, count) in &mut sum.refusals {
        less(count, before.refusals.get(reason).copied().unwrap_or(0));
    }
    sum.refusals.retain(|_, count| *count > 0);
    for (class, now) in &mut sum.classes {
        let before = before.classes.get(class).copied().unwrap_or_default();
        less(&mut now.opened_by_guest, before.opened_by_guest);
        less(&mut now.opened_by_peers, before.opened_by_peers);
        less(&mut now.egress_bytes, before.egress_bytes);
        less(&mut now.ingress_bytes, before.ingress_bytes);
    }
    sum
}

/// Counter by counter, the larger one; what there is now is as it is now.
fn larger(now: VsockTraffic, before: &VsockTraffic) -> VsockTraffic {
    let mut refusals = now.refusals;
    for (reason, count) in &before.refusals {
        let refused = refusals.entry(*reason).or_default();
        *refused = (*refused).max(*count);
    }
    let mut classes = now.classes;
    for (class, before) in &before.classes {
        let now = classes.entry(*class).or_default();
        *now = VsockClassTraffic {
            opened_by_guest: now.opened_by_guest.max(before.opened_by_guest),
            opened_by_peers: now.opened_by_peers.max(before.opened_by_peers),
            egress_bytes: now.egress_bytes.max(before.egress_bytes),
            ingress_bytes: now.ingress_bytes.max(before.ingress_bytes),
            connections: now.connections,
        };
    }
    VsockTraffic {
        opened_by_guest: now.opened_by_guest.max(before.opened_by_guest),
        opened_by_peers: now.opened_by_peers.max(before.opened_by_peers),
        egress_bytes: now.egress_bytes.max(before.egress_bytes),
        ingress_bytes: now.ingress_bytes.max(before.ingress_bytes),
        egress_packets: now.egress_packets.max(before.egress_packets),
        ingress_packets: now.ingress_packets.max(before.ingress_packets),
        capture_dropped_packets: now
            .capture_dropped_packets
            .max(before.capture_dropped_packets),
        refusals,
        classes,
        ..now
    }
}

/// The word of a reason or a class, as in the JSON.
fn word(value: impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        _ => String::new(),
    }
}

/// The figures of several subjects, of whom there are as many series each, whatever they do.
#[derive(Default)]
struct Figures {
    bytes: Family<Labels, Counter>,
    packets: Family<Labels, Counter>,
    opened: Family<Labels, Counter>,
    refused: Family<Labels, Counter>,
    not_captured: Family<Labels, Counter>,
    connections: Family<Labels, Gauge>,
    buffered: Family<Labels, Gauge>,
}

impl Figures {
    fn add(&self, labels: &Labels, traffic: &VsockTraffic) {
        for class in VsockClass::ALL {
            let labels = with(labels, "class", &word(class));
            let traffic = traffic.classes.get(&class).copied().unwrap_or_default();
            self.add_class(&labels, class, traffic);
        }
        for (direction, count) in [
            ("egress", traffic.egress_packets),
            ("ingress", traffic.ingress_packets),
        ] {
            let labels = with(labels, "direction", direction);
            self.packets.get_or_create(&labels).inc_by(count);
        }
        for (reason, count) in &traffic.refusals {
            let labels = with(labels, "reason", &word(reason));
            self.refused.get_or_create(&labels).inc_by(*count);
        }
        self.not_captured
            .get_or_create(labels)
            .inc_by(traffic.capture_dropped_packets);
        set(&self.buffered, labels, traffic.buffered_bytes);
    }

    fn add_class(&self, labels: &Labels, class: VsockClass, traffic: VsockClassTraffic) {
        for (direction, count) in [
            ("egress", traffic.egress_bytes),
            ("ingress", traffic.ingress_bytes),
        ] {
            let labels = with(labels, "direction", direction);
            self.bytes.get_or_create(&labels).inc_by(count);
        }
        let by_guest = ("guest", traffic.opened_by_guest);
        let by_peers = ("peer", traffic.opened_by_peers);
        let opened: &[_] = match class {
            VsockClass::GuestToHost => &[by_guest],
            VsockClass::HostToGuest => &[by_peers],
            VsockClass::GuestToGuest => &[by_guest, by_peers],
        };
        for (by, count) in opened {
            let labels = with(labels, "by", by);
            self.opened.get_or_create(&labels).inc_by(*count);
        }
        set(&self.connections, labels, traffic.connections);
    }

    fn register(self, subject: &str, of: &str, registry: &mut Registry) {
        for (what, help, family) in [
            ("bytes", "Bytes carried by vsock", self.bytes),
            ("packets", "vsock packets", self.packets),
            (
                "opened",
                "vsock connections opened, by the guest or by a peer",
                self.opened,
            ),
            (
                "refused",
                "What was refused or cut off by vsock",
                self.refused,
            ),
            (
                "capture_dropped_packets",
                "Packets that captures had no room for",
                self.not_captured,
            ),
        ] {
            registry.register(format!("{subject}_{what}"), format!("{help}, {of}"), family);
        }
        for (what, help, family) in [
            ("connections", "vsock connections now", self.connections),
            (
                "buffered_bytes",
                "Bytes that wait for a side that takes none",
                self.buffered,
            ),
        ] {
            registry.register(format!("{subject}_{what}"), format!("{help}, {of}"), family);
        }
    }
}

fn with(labels: &Labels, name: &'static str, value: &str) -> Labels {
    let mut labels = labels.clone();
    labels.push((name, value.to_owned()));
    labels
}

fn set(family: &Family<Labels, Gauge>, labels: &Labels, count: u64) {
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    family.get_or_create(labels).set(count);
}

#[cfg(test)]
mod tests {
    use sandwire_api::vsock::VsockRefusal;

    use super::*;

    fn of_class(bytes: u64, connections: u64) -> VsockClassTraffic {
        VsockClassTraffic {
            egress_bytes: bytes,
            connections,
            ..VsockClassTraffic::default()
        }
    }

    #[test]
    fn counters_never_go_down_and_gauges_do() {
        let traffic = |bytes, connections| VsockTraffic {
            egress_bytes: bytes,
            connections,
            refusals: [(VsockRefusal::Policy, bytes)].into(),
            classes: [(VsockClass::GuestToGuest, of_class(bytes, connections))].into(),
            ..VsockTraffic::default()
        };
        assert_eq!(larger(traffic(5, 1), &traffic(9, 7)), traffic(9, 1));
        assert_eq!(larger(traffic(9, 7), &traffic(5, 1)), traffic(9, 7));
    }

    #[test]
    fn a_refusal_has_the_word_of_the_api() {
        assert_eq!(
            word(VsockRefusal::TooManyConnections),
            "too_many_connections"
        );
    }

    #[test]
    fn what_an_ended_channel_had_open_is_not_open() {
        let ended = VsockTraffic {
            egress_bytes: 5,
            connections: 3,
            attached: true,
            classes: [(VsockClass::HostToGuest, of_class(5, 3))].into(),
            ..VsockTraffic::default()
        };
        let pool: Name = "web".parse().unwrap();
        let sums = sums([(pool.clone(), ended)].into(), &[]);
        assert_eq!((sums[&pool].egress_bytes, sums[&pool].connections), (5, 0));
        let class = sums[&pool].classes[&VsockClass::HostToGuest];
        assert_eq!(class, of_class(5, 0));
    }
}
