//! A policy by flags, the same for pools and leases. What isn't given stays as it was.

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use sandwire_api::{
    name::Name,
    policy::{EgressRule, PolicyAction, RateLimit},
    pool::{HostService, PolicySpec, UplinkPolicy},
};
use serde::de::DeserializeOwned;

use super::{
    limit::{BitLimit, PacketLimit},
    rule::Rules,
};

/// The group of all flags of a policy.
pub(crate) const GROUP: &str = "policy-flags";

/// Flags of a policy. In two parts, because a group has no members if one of them is a group itself.
#[derive(Debug, Default, Args)]
#[group(skip)]
pub(crate) struct PolicyFlags {
    #[command(flatten)]
    settings: Settings,

    #[command(flatten)]
    rules: Rules,
}

/// All flags but those of rules.
#[derive(Debug, Default, Args)]
#[group(id = "policy-flags", multiple = true)]
struct Settings {
    /// Beyond the host: behind the host's address, with the clone address, or not at all
    /// [default: masquerade].
    #[arg(long, value_parser = words::<UplinkPolicy>(&["masquerade", "route", "deny"]))]
    uplink: Option<UplinkPolicy>,

    /// Let sandboxes of the same group reach each other.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    clone_to_clone: Option<bool>,

    /// Let sandboxes reach a service on the host: tcp/PORT, udp/PORT, tcp/FIRST-LAST, icmp or all.
    /// May be given several times.
    #[arg(long, value_name = "SERVICE")]
    host_service: Vec<HostService>,

    /// Let sandboxes reach the cloud's metadata service.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    cloud_metadata: Option<bool>,

    /// Most connections that one sandbox may have tracked at a time [default: 4096].
    #[arg(long, value_name = "NUMBER")]
    connections_max: Option<u32>,

    /// Group of the sandboxes [default: the pool's name].
    #[arg(long, value_name = "NAME")]
    group: Option<Name>,

    /// Another group that they may talk to, if that one names theirs too. May be given several times.
    #[arg(long, value_name = "GROUP")]
    talks_to: Vec<Name>,

    /// Drop the rules that there are.
    #[arg(long, conflicts_with_all = ["allow", "deny"])]
    no_rules: bool,

    /// What happens to packets that no rule covers [default: allow].
    #[arg(long, value_parser = words::<PolicyAction>(&["allow", "deny"]))]
    egress_default: Option<PolicyAction>,

    /// Bits per second that a sandbox may send, as 100mbit, 1.5gbit,burst=1mib or none.
    #[arg(long, value_name = "RATE[,burst=BYTES]")]
    limit_egress: Option<BitLimit>,

    /// Bits per second that reach a sandbox.
    #[arg(long, value_name = "RATE[,burst=BYTES]")]
    limit_ingress: Option<BitLimit>,

    /// Packets per second that a sandbox may send, as 20000, 20k,burst=64 or none.
    #[arg(long, value_name = "RATE[,burst=PACKETS]")]
    limit_egress_packets: Option<PacketLimit>,

    /// Packets per second that reach a sandbox.
    #[arg(long, value_name = "RATE[,burst=PACKETS]")]
    limit_ingress_packets: Option<PacketLimit>,

    /// Firewall mark by which the host's routing rules know the sandboxes' packets, as 7 or 0x10;
    /// 0 for none.
    #[arg(long, value_name = "MARK", value_parser = number)]
    route_mark: Option<u32>,

    /// Routing table to look up instead of following the host's rules; 0 for these.
    #[arg(long, value_name = "TABLE", value_parser = number)]
    route_table: Option<u32>,
}

/// Parses words of the API's own enumerations, which clap lists in the help.
pub(crate) fn words<T>(known: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: DeserializeOwned + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(known).try_map(|word| serde_json::from_value(word.into()))
}

/// A number, decimal or hexadecimal.
fn number(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("'{text}' is not a number: write it as 7 or 0x10"))
}

impl PolicyFlags {
    /// Whether no flag was given.
    pub(crate) fn is_empty(&self) -> bool {
        let Settings {
            uplink,
            clone_to_clone,
            host_service,
            cloud_metadata,
            connections_max,
            group,
            talks_to,
            no_rules,
            egress_default,
            limit_egress,
            limit_ingress,
            limit_egress_packets,
            limit_ingress_packets,
            route_mark,
            route_table,
        } = &self.settings;
        uplink.is_none()
            && clone_to_clone.is_none()
            && host_service.is_empty()
            && cloud_metadata.is_none()
            && connections_max.is_none()
            && group.is_none()
            && talks_to.is_empty()
            && self.rules.0.is_empty()
            && !no_rules
            && egress_default.is_none()
            && limit_egress.or(*limit_ingress).is_none()
            && limit_egress_packets.or(*limit_ingress_packets).is_none()
            && route_mark.or(*route_table).is_none()
    }

    /// The policy with these flags applied. A list that is given replaces the one that was there.
    pub(crate) fn apply(self, policy: PolicySpec) -> PolicySpec {
        let settings = self.settings;
        let mut limits = policy.limits;
        set_limit(
            &mut limits.egress,
            settings.limit_egress,
            settings.limit_egress_packets,
        );
        set_limit(
            &mut limits.ingress,
            settings.limit_ingress,
            settings.limit_ingress_packets,
        );
        let mut egress = policy.egress;
        egress.default = settings.egress_default.unwrap_or(egress.default);
        if settings.no_rules || !self.rules.0.is_empty() {
            egress.rules = self.rules.0;
        }
        PolicySpec {
            uplink: settings.uplink.unwrap_or(policy.uplink),
            clone_to_clone: settings.clone_to_clone.unwrap_or(policy.clone_to_clone),
            host_services: replaced(policy.host_services, settings.host_service),
            cloud_metadata: settings.cloud_metadata.unwrap_or(policy.cloud_metadata),
            connections_max: settings.connections_max.unwrap_or(policy.connections_max),
            group: settings.group.or(policy.group),
            talks_to: replaced(policy.talks_to, settings.talks_to),
            egress,
            limits,
            route_mark: settings
                .route_mark
                .or(policy.route_mark)
                .filter(|mark| *mark != 0),
            route_table: settings
                .route_table
                .or(policy.route_table)
                .filter(|table| *table != 0),
        }
    }
}

fn replaced<T>(before: Vec<T>, given: Vec<T>) -> Vec<T> {
    if given.is_empty() { before } else { given }
}

fn set_limit(limit: &mut RateLimit, bits: Option<BitLimit>, packets: Option<PacketLimit>) {
    if let Some(bits) = bits {
        limit.bits_per_second = bits.bits_per_second;
        limit.burst_bytes = bits.burst_bytes;
    }
    if let Some(packets) = packets {
        limit.packets_per_second = packets.packets_per_second;
        limit.burst_packets = packets.burst_packets;
    }
}

/// Rules of a policy, for messages.
pub(super) fn rules_text(rules: &[EgressRule]) -> Vec<String> {
    rules.iter().map(super::rule::rule_text).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        flags: PolicyFlags,
    }

    fn parse(line: &str) -> Result<PolicyFlags, clap::Error> {
        let line = std::iter::once("set").chain(line.split_whitespace());
        Ok(Line::try_parse_from(line)?.flags)
    }

    fn policy(line: &str, before: PolicySpec) -> PolicySpec {
        parse(line).unwrap().apply(before)
    }

    #[test]
    fn every_flag_reaches_the_policy() {
        let got = policy(
            "--uplink route --clone-to-clone --host-service tcp/53 --cloud-metadata --connections-max 9 \
             --group a --talks-to b --talks-to c --deny 10.0.0.0/8 --allow 10.1.0.0/16,tcp/443 --deny 10.1.0.0/16 \
             --egress-default deny --limit-egress 100mbit,burst=1mib --limit-ingress 1gbit \
             --limit-egress-packets 20k --limit-ingress-packets 5,burst=6 --route-mark 0x10 --route-table 100",
            PolicySpec::default(),
        );
        let expected: PolicySpec = toml::from_str(
            r#"
            uplink = "route"
            clone_to_clone = true
            host_services = ["tcp/53"]
            cloud_metadata = true
            connections_max = 9
            group = "a"
            talks_to = ["b", "c"]
            route_mark = 16
            route_table = 100
            [egress]
            default = "deny"
            rules = [
                { action = "deny", prefixes = ["10.0.0.0/8"] },
                { action = "allow", prefixes = ["10.1.0.0/16"], ports = ["tcp/443"] },
                { action = "deny", prefixes = ["10.1.0.0/16"] },
            ]
            [limits.egress]
            bits_per_second = 100_000_000
            burst_bytes = 1_048_576
            packets_per_second = 20_000
            [limits.ingress]
            bits_per_second = 1_000_000_000
            packets_per_second = 5
            burst_packets = 6
            "#,
        )
        .unwrap();
        assert_eq!(got, expected);
    }

    #[test]
    fn what_is_not_given_stays_and_what_is_given_replaces() {
        let before = policy(
            "--clone-to-clone --host-service tcp/53 --deny 10.0.0.0/8 --limit-egress 1mbit --route-mark 7",
            PolicySpec::default(),
        );
        assert!(parse("").unwrap().is_empty());
        assert_eq!(policy("", before.clone()), before);
        let after = policy(
            "--clone-to-clone=false --host-service icmp --no-rules --limit-egress none --route-mark 0",
            before,
        );
        let expected = PolicySpec {
            host_services: vec![HostService::Icmp],
            ..PolicySpec::default()
        };
        assert_eq!(after, expected);
    }

    #[test]
    fn each_flag_alone_is_noticed() {
        for line in [
            "--uplink deny",
            "--clone-to-clone=false",
            "--host-service icmp",
            "--cloud-metadata",
            "--connections-max 1",
            "--group a",
            "--talks-to b",
            "--allow any",
            "--deny any",
            "--no-rules",
            "--egress-default deny",
            "--limit-egress none",
            "--limit-ingress none",
            "--limit-egress-packets none",
            "--limit-ingress-packets none",
            "--route-mark 0",
            "--route-table 0",
        ] {
            assert!(!parse(line).unwrap().is_empty(), "{line}");
        }
    }

    #[test]
    fn wrong_values_are_refused() {
        for line in [
            "--uplink nat",
            "--clone-to-clone=maybe",
            "--no-rules --deny any",
            "--limit-egress 100",
            "--deny tcp/1",
            "--route-mark x",
            "--route-mark 0x100000000",
            "--egress-default drop",
        ] {
            assert!(parse(line).is_err(), "{line} was taken");
        }
    }
}
