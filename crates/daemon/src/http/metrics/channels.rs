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
    vsock::{LeaseVsock, VsockRefusal, VsockTraffic},
};
use sandwire_slot::service::Slots;

use super::leases::{Labels, SELF};

/// Sums that only grow.
#[derive(Debug, Default)]
pub(crate) struct ChannelTotals {
    /// Whether each lease has figures of its own.
    per_lease: bool,
    /// What was told of each pool the last time.
    told: Mutex<BTreeMap<Name, VsockTraffic>>,
}

impl ChannelTotals {
    pub(crate) fn new(per_lease: bool) -> Self {
        Self {
            per_lease,
            ..Self::default()
        }
    }

    /// Asks the service, and has the figures told. Without channels there are none.
    pub(super) fn register(&self, slots: &Slots, registry: &mut Registry) {
        // In this order: a channel that ends now is missing once, instead of counted twice.
        let ended = slots.ended_channels();
        let channels = slots.channels(SELF);
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        for (pool, sum) in sums(ended, &channels) {
            let before = told.entry(pool).or_default();
            *before = larger(sum, before);
        }
        if told.is_empty() && channels.is_empty() {
            return;
        }
        let rows = told
            .iter()
            .map(|(pool, traffic)| (vec![("pool", pool.to_string())], traffic));
        register("vsock", "of all leases of a pool", rows, registry);
        drop(told);
        if self.per_lease {
            let rows = channels.iter().filter_map(|channel| {
                let labels = vec![
                    ("pool", channel.pool.to_string()),
                    ("owner", channel.owner_uid.to_string()),
                    ("lease", channel.lease.to_string()),
                ];
                Some((labels, channel.traffic.as_ref()?))
            });
            register("lease_vsock", "of a lease", rows, registry);
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
    }
    for channel in channels {
        if let Some(traffic) = &channel.traffic {
            sums.entry(channel.pool.clone()).or_default().add(traffic);
        }
    }
    sums
}

/// Counter by counter, the larger one; what there is now is as it is now.
fn larger(now: VsockTraffic, before: &VsockTraffic) -> VsockTraffic {
    let mut refusals = now.refusals;
    for (reason, count) in &before.refusals {
        let refused = refusals.entry(*reason).or_default();
        *refused = (*refused).max(*count);
    }
    VsockTraffic {
        opened_by_guest: now.opened_by_guest.max(before.opened_by_guest),
        opened_by_peers: now.opened_by_peers.max(before.opened_by_peers),
        egress_bytes: now.egress_bytes.max(before.egress_bytes),
        ingress_bytes: now.ingress_bytes.max(before.ingress_bytes),
        egress_packets: now.egress_packets.max(before.egress_packets),
        ingress_packets: now.ingress_packets.max(before.ingress_packets),
        refusals,
        ..now
    }
}

/// The word of a refusal, as in the JSON.
fn word(reason: VsockRefusal) -> String {
    match serde_json::to_value(reason) {
        Ok(serde_json::Value::String(word)) => word,
        _ => String::new(),
    }
}

/// Registers the figures of several subjects.
fn register<'a>(
    subject: &str,
    of: &str,
    rows: impl Iterator<Item = (Labels, &'a VsockTraffic)>,
    registry: &mut Registry,
) {
    let [bytes, packets, opened, refused] =
        std::array::from_fn(|_| Family::<Labels, Counter>::default());
    let connections = Family::<Labels, Gauge>::default();
    let buffered = Family::<Labels, Gauge>::default();
    for (labels, traffic) in rows {
        let with = |name, value: &str| {
            let mut labels = labels.clone();
            labels.push((name, value.to_owned()));
            labels
        };
        for (family, name, value, count) in [
            (&bytes, "direction", "egress", traffic.egress_bytes),
            (&bytes, "direction", "ingress", traffic.ingress_bytes),
            (&packets, "direction", "egress", traffic.egress_packets),
            (&packets, "direction", "ingress", traffic.ingress_packets),
            (&opened, "by", "guest", traffic.opened_by_guest),
            (&opened, "by", "peer", traffic.opened_by_peers),
        ] {
            family.get_or_create(&with(name, value)).inc_by(count);
        }
        for (reason, count) in &traffic.refusals {
            refused
                .get_or_create(&with("reason", &word(*reason)))
                .inc_by(*count);
        }
        for (family, count) in [
            (&connections, traffic.connections),
            (&buffered, traffic.buffered_bytes),
        ] {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            family.get_or_create(&labels).set(count);
        }
    }
    for (what, help, family) in [
        ("bytes", "Bytes carried by vsock", bytes),
        ("packets", "vsock packets", packets),
        (
            "opened",
            "vsock connections opened, by the guest or by a peer",
            opened,
        ),
        ("refused", "What was refused or cut off by vsock", refused),
    ] {
        registry.register(format!("{subject}_{what}"), format!("{help}, {of}"), family);
    }
    for (what, help, family) in [
        ("connections", "vsock connections now", connections),
        (
            "buffered_bytes",
            "Bytes that wait for a side that takes none",
            buffered,
        ),
    ] {
        registry.register(format!("{subject}_{what}"), format!("{help}, {of}"), family);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_never_go_down_and_gauges_do() {
        let traffic = |bytes, connections| VsockTraffic {
            egress_bytes: bytes,
            connections,
            refusals: [(VsockRefusal::Policy, bytes)].into(),
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
            ..VsockTraffic::default()
        };
        let pool: Name = "web".parse().unwrap();
        let sums = sums([(pool.clone(), ended)].into(), &[]);
        assert_eq!((sums[&pool].egress_bytes, sums[&pool].connections), (5, 0));
    }
}
