//! What identities without a namespace do.

use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use sandwire_api::identity::Identity;

use super::leases::Labels;
use crate::identities::HostIdentities;

/// Has their figures told, if there are any.
pub(super) fn register(identities: &HostIdentities, registry: &mut Registry) {
    match identities.snapshot() {
        Ok(listed) => tell(&listed, registry),
        Err(error) => tracing::warn!(%error, "no figures of identities"),
    }
}

fn tell(listed: &[Identity], registry: &mut Registry) {
    if listed.is_empty() {
        return;
    }
    let packets = Family::<Labels, Counter>::default();
    let bytes = Family::<Labels, Counter>::default();
    let refused = Family::<Labels, Counter>::default();
    let listeners = Family::<Labels, Gauge>::default();
    for identity in listed {
        let label = || ("identity", identity.name.to_string());
        let counters = &identity.counters;
        for (direction, traffic) in [("egress", counters.egress), ("ingress", counters.ingress)] {
            let labels: Labels = vec![label(), ("direction", direction.to_owned())];
            packets.get_or_create(&labels).inc_by(traffic.packets);
            bytes.get_or_create(&labels).inc_by(traffic.bytes);
        }
        for (refusal, count) in &counters.refused {
            let labels: Labels = vec![label(), ("reason", refusal.name().to_owned())];
            refused.get_or_create(&labels).inc_by(*count);
        }
        let count = i64::try_from(identity.listeners).unwrap_or(i64::MAX);
        listeners.get_or_create(&vec![label()]).set(count);
    }
    let name = |name: &str| format!("identity_{name}");
    let help = "Packets of an identity's sockets";
    registry.register(name("packets"), help, packets);
    let help = "Bytes of an identity's sockets, as IP packets";
    registry.register(name("bytes"), help, bytes);
    let help = "What an identity's sockets were refused";
    registry.register(name("refused"), help, refused);
    let help = "Sockets of an identity that listen, or that receive datagrams at several addresses";
    registry.register(name("listeners"), help, listeners);
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use sandwire_api::identity::{Allowed, Counters, Refusal, State, Traffic};

    use super::*;

    #[test]
    fn each_identity_has_figures_by_direction_and_reason() {
        let identity = Identity {
            name: "web".parse().unwrap(),
            number: 256,
            state: State::Active,
            cgroup: "/sys/fs/cgroup/web".into(),
            cgroup_id: 7,
            addresses: Vec::new(),
            loopback: ["127.1.0.1".parse().unwrap(), "::2".parse().unwrap()],
            interface: "lo".to_owned(),
            allowed: Allowed::default(),
            tcp_only: false,
            declared: false,
            listeners: 3,
            counters: Counters {
                egress: Traffic {
                    packets: 5,
                    bytes: 500,
                },
                refused: [(Refusal::Policy, 4)].into(),
                ..Counters::default()
            },
        };
        let mut registry = Registry::default();
        tell(&[identity], &mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "identity_packets_total{identity=\"web\",direction=\"egress\"} 5",
            "identity_refused_total{identity=\"web\",reason=\"policy\"} 4",
            "identity_listeners{identity=\"web\"} 3",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }
}
