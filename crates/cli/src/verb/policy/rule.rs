//! Rules as they are written on the command line: `--deny 10.0.0.0/8 --allow 10.1.0.0/16,tcp/443`.

use std::{net::IpAddr, str::FromStr};

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use ipnet::IpNet;
use sandwire_api::{
    policy::{EgressRule, PolicyAction},
    pool::HostService,
};

const ALLOW: &str = "allow";
const DENY: &str = "deny";
/// All destinations of both families.
const ANY: &str = "any";

/// `PREFIX[,PREFIX…][,PORT…]`, without the action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    prefixes: Vec<IpNet>,
    ports: Vec<HostService>,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut target = Self {
            prefixes: Vec::new(),
            ports: Vec::new(),
        };
        for part in text.split(',') {
            if let Some(prefixes) = prefixes(part) {
                target.prefixes.extend(prefixes);
            } else {
                let port = part.parse().map_err(|_| {
                    format!(
                        "'{part}' is neither a prefix (10.0.0.0/8, fd00::/8, 192.0.2.1, any) nor ports \
                         (tcp/443, udp/53, tcp/8000-8999, icmp, all)"
                    )
                })?;
                target.ports.push(port);
            }
        }
        if target.prefixes.is_empty() {
            return Err(format!(
                "'{text}' names no prefix: begin with one, as any,{text}"
            ));
        }
        Ok(target)
    }
}

fn prefixes(text: &str) -> Option<Vec<IpNet>> {
    if text == ANY {
        return Some(vec![
            IpNet::V4(ipnet::Ipv4Net::default()),
            IpNet::V6(ipnet::Ipv6Net::default()),
        ]);
    }
    let address = text.parse::<IpAddr>().map(IpNet::from);
    address
        .or_else(|_| text.parse())
        .ok()
        .map(|prefix| vec![prefix])
}

/// Rules in the order in which they stand on the command line, whatever their action.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rules(pub(crate) Vec<EgressRule>);

impl Args for Rules {
    fn augment_args(command: Command) -> Command {
        let flag = |name: &'static str, help: &'static str| {
            Arg::new(name)
                .long(name)
                .value_name("PREFIX[,PORT…]")
                .action(ArgAction::Append)
                .value_parser(value_parser!(Target))
                .help(help)
                .group(super::flags::GROUP)
        };
        command
            .arg(flag(
                ALLOW,
                "Let packets to these prefixes pass, or only those to these ports of them: tcp/PORT, \
                 udp/FIRST-LAST, icmp. May be given several times; the longest prefix decides, then the order",
            ))
            .arg(flag(DENY, "Drop packets to these prefixes, or only those to these ports of them"))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Rules {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut rules = Vec::new();
        for (name, action) in [(ALLOW, PolicyAction::Allow), (DENY, PolicyAction::Deny)] {
            let places = matches.indices_of(name).into_iter().flatten();
            let targets = matches.get_many::<Target>(name).into_iter().flatten();
            for (place, target) in places.zip(targets) {
                let rule = EgressRule {
                    action,
                    prefixes: target.prefixes.clone(),
                    ports: target.ports.clone(),
                };
                rules.push((place, rule));
            }
        }
        rules.sort_by_key(|(place, _)| *place);
        Ok(Self(rules.into_iter().map(|(_, rule)| rule).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Prefixes and ports that are shown of a rule before the rest is only counted.
const PARTS_SHOWN_MAX: usize = 8;

/// A rule as it would be written; a long one is cut.
pub(super) fn rule_text(rule: &EgressRule) -> String {
    let mut parts = written_parts(rule);
    let count = parts.len();
    if count > PARTS_SHOWN_MAX {
        parts.truncate(PARTS_SHOWN_MAX);
        parts.push(format!("… and {} more", count - PARTS_SHOWN_MAX));
    }
    let action = match rule.action {
        PolicyAction::Allow => ALLOW,
        PolicyAction::Deny => DENY,
    };
    format!("{action} {}", parts.join(","))
}

fn written_parts(rule: &EgressRule) -> Vec<String> {
    let prefixes = rule.prefixes.iter().map(ToString::to_string);
    // Ports first where prefixes are too many to be shown: they say more.
    let ports = rule.ports.iter().map(ToString::to_string);
    if rule.prefixes.len() > PARTS_SHOWN_MAX {
        ports.chain(prefixes).collect()
    } else {
        prefixes.chain(ports).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn target(text: &str) -> Result<Target, String> {
        text.parse()
    }

    #[test]
    fn prefixes_and_ports_are_told_apart() {
        let read = target("10.0.0.0/8,fd00::/8,192.0.2.1,tcp/443,udp/53-54,icmp").unwrap();
        let prefixes: Vec<String> = read.prefixes.iter().map(ToString::to_string).collect();
        assert_eq!(prefixes, ["10.0.0.0/8", "fd00::/8", "192.0.2.1/32"]);
        assert_eq!(read.ports.len(), 3);
        assert_eq!(target("any").unwrap().prefixes.len(), 2);
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for text in [
            "",
            ",",
            "tcp/443",
            "10.0.0.0/33",
            "10.0.0.0/8,",
            "10.0.0.0/8,http",
            "10.0.0.0/8;tcp/1",
            "example.com",
            "10.0.0.0/8,tcp/0",
            "fd00::/129",
        ] {
            assert!(target(text).is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn a_long_rule_is_cut_and_its_ports_are_shown() {
        let mut rule = EgressRule {
            action: PolicyAction::Allow,
            prefixes: vec!["10.0.0.0/8".parse().unwrap(); 100_000],
            ports: vec![HostService::Tcp(443, 443)],
        };
        let text = rule_text(&rule);
        assert!(text.starts_with("allow tcp/443,10.0.0.0/8"), "{text}");
        assert!(text.ends_with("… and 99993 more"), "{text}");
        rule.prefixes.truncate(1);
        assert_eq!(rule_text(&rule), "allow 10.0.0.0/8,tcp/443");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC{0,60}") {
            let _ = target(&text);
        }

        #[test]
        fn a_rule_reads_back_as_written(
            addresses in prop::collection::vec((any::<u32>(), 0u8..=32), 1..4),
            ports in prop::collection::vec((any::<bool>(), 1u16.., 1u16..), 0..4),
        ) {
            let rule = EgressRule {
                action: PolicyAction::Deny,
                prefixes: addresses.iter().map(|(address, length)| {
                    IpNet::new(IpAddr::V4((*address).into()), *length).unwrap()
                }).collect(),
                ports: ports.iter().map(|(tcp, a, b)| {
                    let (first, last) = (*a.min(b), *a.max(b));
                    if *tcp { HostService::Tcp(first, last) } else { HostService::Udp(first, last) }
                }).collect(),
            };
            let text = rule_text(&rule);
            let read = target(text.strip_prefix("deny ").unwrap()).unwrap();
            prop_assert_eq!(read, Target { prefixes: rule.prefixes, ports: rule.ports });
        }
    }
}
