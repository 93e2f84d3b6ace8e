//! A policy for people.

use sandwire_api::{
    policy::{LimitSpec, PolicyAction, RateLimit},
    pool::{PolicySpec, UplinkPolicy},
};

use super::{
    flags::rules_text,
    limit::{BitLimit, PacketLimit},
};

/// Rules that are shown before the rest is only counted.
const RULES_SHOWN_MAX: usize = 12;

/// A policy in lines of key and value.
pub(crate) fn policy_rows(policy: &PolicySpec) -> Vec<(&'static str, String)> {
    let mut rows = vec![("may reach", reach_text(policy))];
    if let Some(group) = &policy.group {
        rows.push(("group", group.to_string()));
    }
    if !policy.talks_to.is_empty() {
        let groups: Vec<String> = policy.talks_to.iter().map(ToString::to_string).collect();
        rows.push(("talks to", format!("groups {}", groups.join(", "))));
    }
    if !policy.egress.is_default() {
        rows.extend(egress_rows(policy));
    }
    if policy.limits != LimitSpec::default() {
        rows.push(("limits", limits_text(&policy.limits)));
    }
    let routing = [
        policy.route_mark.map(|mark| format!("mark {mark:#x}")),
        policy.route_table.map(|table| format!("table {table}")),
    ];
    let routing: Vec<String> = routing.into_iter().flatten().collect();
    if !routing.is_empty() {
        rows.push(("routing", routing.join(", ")));
    }
    rows
}

fn reach_text(policy: &PolicySpec) -> String {
    let mut reach = vec![
        match policy.uplink {
            UplinkPolicy::Masquerade => "beyond the host with its address",
            UplinkPolicy::Route => "beyond the host with the clone address",
            UplinkPolicy::Deny => "nothing beyond the host",
        }
        .to_owned(),
    ];
    if policy.clone_to_clone {
        reach.push(
            match policy.group {
                None => "clones of this pool",
                Some(_) => "sandboxes of its group",
            }
            .to_owned(),
        );
    }
    if policy.cloud_metadata {
        reach.push("cloud metadata".to_owned());
    }
    let services = policy.host_services.iter();
    reach.extend(services.map(|service| format!("host {service}")));
    reach.join(", ")
}

fn egress_rows(policy: &PolicySpec) -> Vec<(&'static str, String)> {
    let rules = &policy.egress.rules;
    let shown = &rules[..rules.len().min(RULES_SHOWN_MAX)];
    let mut rows: Vec<(&'static str, String)> = rules_text(shown)
        .into_iter()
        .map(|rule| ("rule", rule))
        .collect();
    if shown.len() < rules.len() {
        rows.push(("rule", format!("and {} more", rules.len() - shown.len())));
    }
    let default = match policy.egress.default {
        PolicyAction::Allow => "allow",
        PolicyAction::Deny => "deny",
    };
    rows.push(("otherwise", default.to_owned()));
    rows
}

/// Both directions' limits in a line; `-` without any.
pub(crate) fn limits_text(limits: &LimitSpec) -> String {
    let parts: Vec<String> = [("egress", &limits.egress), ("ingress", &limits.ingress)]
        .into_iter()
        .filter(|(_, limit)| **limit != RateLimit::default())
        .map(|(direction, limit)| format!("{direction} {}", limit_text(limit)))
        .collect();
    if parts.is_empty() {
        return "-".to_owned();
    }
    parts.join("; ")
}

fn limit_text(limit: &RateLimit) -> String {
    let mut parts = Vec::new();
    if limit.bits_per_second.is_some() {
        let bits = BitLimit {
            bits_per_second: limit.bits_per_second,
            burst_bytes: limit.burst_bytes,
        };
        parts.push(bits.to_string());
    }
    if limit.packets_per_second.is_some() {
        let packets = PacketLimit {
            packets_per_second: limit.packets_per_second,
            burst_packets: limit.burst_packets,
        };
        parts.push(format!("{packets} packets/s"));
    }
    parts.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_tells_what_is_out_of_the_ordinary() {
        let rows = policy_rows(&PolicySpec::default());
        assert_eq!(
            rows,
            [("may reach", "beyond the host with its address".to_owned())]
        );
        let policy: PolicySpec = toml::from_str(
            "clone_to_clone = true\ngroup = \"a\"\ntalks_to = [\"b\", \"c\"]\nroute_mark = 16\n\
             egress = { default = \"deny\", rules = [{ action = \"allow\", prefixes = [\"10.0.0.0/8\"], ports = [\"tcp/443\"] }] }\n\
             limits = { egress = { bits_per_second = 100_000_000, packets_per_second = 20_000 } }\n",
        )
        .unwrap();
        let text = crate::render::pairs(&policy_rows(&policy));
        for line in [
            "may reach: beyond the host with its address, sandboxes of its group",
            "talks to:  groups b, c",
            "rule:      allow 10.0.0.0/8,tcp/443",
            "otherwise: deny",
            "limits:    egress 100mbit 20000 packets/s",
            "routing:   mark 0x10",
        ] {
            assert!(text.contains(line), "{line} is missing in:\n{text}");
        }
    }

    #[test]
    fn a_long_list_of_rules_is_cut() {
        let rule = "{ action = \"deny\", prefixes = [\"10.0.0.0/8\"] },";
        let policy: PolicySpec =
            toml::from_str(&format!("egress.rules = [{}]", rule.repeat(100))).unwrap();
        let rows = policy_rows(&policy);
        assert_eq!(rows.len(), RULES_SHOWN_MAX + 3);
        assert!(rows.iter().any(|(_, text)| text == "and 88 more"));
    }
}
