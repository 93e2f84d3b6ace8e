//! From what a user wrote to what the programs look up.
//!
//! The programs look a destination up in a trie that knows only the longest prefix. So each prefix gets
//! the rules of the prefixes around it too, behind its own, up to the first rule that covers every
//! port; prefixes whose rules are the same share a list.
//!
//! Two kinds of prefix are put before the user's rules: cloud metadata, unless the policy allows it (the
//! rules then decide), and the clone addresses of the instance's pools, which must never leave the host.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sandwire_api::{
    drop_reason::DropReason,
    policy::{CLOUD_METADATA, EgressPolicy, PolicyAction, RateLimit},
    pool::{HostService, PolicySpec, UplinkPolicy},
};

use crate::abi::{
    self, Action, Limit, PolicyFlag, PortRule, PrefixKey, PrefixValue, RULES_MAX, RuleList,
    SERVICES_MAX, UplinkMode,
};

/// Most prefixes of one policy.
pub const PREFIXES_MAX: usize = 100_000;

const PROTOCOL_ICMP: u8 = 1;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;

const NANOSECONDS: u128 = 1_000_000_000;
/// What a byte costs is a multiple of 2^-20 nanoseconds.
const BYTE_COST_SHIFT: u32 = 20;
/// A burst that nobody chose lasts this part of a second.
const BURST_DIVISOR: u64 = 20;
const BURST_BYTES_MIN: u64 = 131_072;
const BURST_PACKETS_MIN: u64 = 64;
/// Longer bursts make no sense, and their nanoseconds must fit 64 bits with room to spare.
const BURST_SECONDS_MAX: u128 = 3600;

/// A prefix and what it means.
type Entry = (PrefixKey, PrefixValue);

/// A policy as the programs look it up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compiled {
    /// The fixed part.
    pub policy: abi::Policy,
    /// Prefixes, with the policy's index left zero; `list` is a position in `lists` plus one, or 0.
    pub prefixes: Vec<Entry>,
    /// Lists of rules.
    pub lists: Vec<RuleList>,
}

/// Why a policy can't be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// More prefixes than [`PREFIXES_MAX`].
    #[error("the policy's egress rules have {0} prefixes; at most {PREFIXES_MAX} are possible")]
    Prefixes(usize),
    /// Too many rules on one prefix.
    #[error(
        "{0} and the prefixes around it have {1} egress rules; at most {RULES_MAX} are possible"
    )]
    Rules(IpNet, usize),
    /// An IPv6 prefix that stands for IPv4 addresses.
    #[error("{0} stands for IPv4 addresses; write them as IPv4")]
    Mapped(IpNet),
    /// Too many services of the host.
    #[error("the policy lists {0} host services; at most {SERVICES_MAX} are possible")]
    Services(usize),
    /// A rate or burst out of range.
    #[error("{field} is {value}; possible is {range}")]
    Rate {
        /// Field of the specification.
        field: &'static str,
        /// What it said.
        value: u64,
        /// What it may be.
        range: &'static str,
    },
}

/// Compiles a policy. `clone_prefixes` are those of all pools of the instance: no rule lets packets out
/// to clone addresses that no sandbox has.
///
/// # Errors
/// It is more than the maps hold, or out of range.
pub fn compile(spec: &PolicySpec, clone_prefixes: &[IpNet]) -> Result<Compiled, PolicyError> {
    let mut table = Table::default();
    table.reserve(spec, clone_prefixes);
    table.add_rules(&spec.egress)?;
    let default = action_of(spec.egress.default);
    let (prefixes, lists) = table.finish(default)?;
    let policy = fixed_part(spec, !prefixes.is_empty())?;
    Ok(Compiled {
        policy,
        prefixes,
        lists,
    })
}

/// What may be reached only by the relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Redirect {
    /// Sources.
    pub from: IpNet,
    /// Destinations.
    pub to: IpNet,
    /// Number of the protocol above IP; without one, all of them.
    pub protocol: Option<u8>,
    /// First and last port of the destination; without, all of them.
    pub ports: Option<(u16, u16)>,
}

/// Compiles what sources of the same redirects may not reach by themselves. Where that is more than the maps hold, they
/// reach nothing there.
pub(crate) fn compile_redirects(redirects: &[&Redirect]) -> Compiled {
    let compile = |is_exact: bool| {
        let mut table = Table::default();
        for redirect in redirects {
            let (first, last) = redirect.ports.unwrap_or((0, u16::MAX));
            let rule = match is_exact {
                true => rule(Action::Deny, redirect.protocol.unwrap_or(0), first, last),
                false => rule(Action::Deny, 0, 0, u16::MAX),
            };
            table
                .rules
                .entry(redirect.to.trunc())
                .or_default()
                .push(rule);
        }
        table.finish(Action::Allow)
    };
    let (mut prefixes, lists) = compile(true)
        .or_else(|_| compile(false))
        .expect("one rule for each prefix fits");
    for (_, value) in &mut prefixes {
        value.reason = u16::from(DropReason::NotRelayed as u8);
    }
    Compiled {
        policy: abi::Policy::default(),
        prefixes,
        lists,
    }
}

fn fixed_part(spec: &PolicySpec, has_prefixes: bool) -> Result<abi::Policy, PolicyError> {
    let services: BTreeSet<(u8, u16, u16)> = spec
        .host_services
        .iter()
        .filter_map(|service| match *service {
            HostService::All | HostService::Icmp => None,
            HostService::Tcp(first, last) => Some((PROTOCOL_TCP, first, last)),
            HostService::Udp(first, last) => Some((PROTOCOL_UDP, first, last)),
        })
        .collect();
    let mut policy = abi::Policy {
        flags: flags_of(spec, has_prefixes),
        uplink: match spec.uplink {
            UplinkPolicy::Masquerade => UplinkMode::Masquerade,
            UplinkPolicy::Route => UplinkMode::Route,
            UplinkPolicy::Deny => UplinkMode::Deny,
        }
        .number(),
        mark: spec.route_mark.unwrap_or(0),
        table: spec.route_table.unwrap_or(0),
        egress: limit(&spec.limits.egress)?,
        ingress: limit(&spec.limits.ingress)?,
        ..abi::Policy::default()
    };
    if services.len() > SERVICES_MAX {
        return Err(PolicyError::Services(services.len()));
    }
    for (place, (protocol, first, last)) in policy.services.iter_mut().zip(&services) {
        *place = rule(Action::Allow, *protocol, *first, *last);
        policy.service_count += 1;
    }
    Ok(policy)
}

fn flags_of(spec: &PolicySpec, has_prefixes: bool) -> u32 {
    let allows = spec.egress.default == PolicyAction::Allow;
    let denies = |rule: &sandwire_api::policy::EgressRule| rule.action == PolicyAction::Deny;
    let host_all = spec.host_services.contains(&HostService::All);
    let everything = allows
        && host_all
        && spec.cloud_metadata
        && spec.uplink == UplinkPolicy::Route
        && !spec.egress.rules.iter().any(denies);
    let flags = [
        (PolicyFlag::Prefixes, has_prefixes),
        (PolicyFlag::Allow, allows),
        (PolicyFlag::HostAll, host_all),
        (
            PolicyFlag::HostIcmp,
            spec.host_services.contains(&HostService::Icmp),
        ),
        (PolicyFlag::SameGroup, spec.clone_to_clone),
        // Which groups may talk changes with other pools; the look-up is rare and cheap.
        (PolicyFlag::OtherGroups, true),
        // A table of its own doesn't lead back to the host, which may have called.
        (
            PolicyFlag::Answers,
            !everything || spec.route_table.is_some(),
        ),
    ];
    let set = flags.into_iter().filter(|(_, is_set)| *is_set);
    set.fold(0, |flags, (flag, _)| flags | flag.number())
}

/// The costs of a limit; see `struct limit`.
fn limit(rate: &RateLimit) -> Result<Limit, PolicyError> {
    let mut limit = Limit::default();
    if let Some(bits) = rate.bits_per_second {
        in_range(
            "bits_per_second",
            bits,
            8_000..=1_000_000_000_000,
            "8,000 to 1,000,000,000,000",
        )?;
        let burst = rate
            .burst_bytes
            .unwrap_or_else(|| (bits / 8 / BURST_DIVISOR).max(BURST_BYTES_MIN));
        let byte = 8 * NANOSECONDS;
        limit.byte_cost = rounded(byte << BYTE_COST_SHIFT, bits);
        limit.byte_burst = burst_time("burst_bytes", burst, u128::from(burst) * byte, bits)?;
    }
    if let Some(packets) = rate.packets_per_second {
        in_range(
            "packets_per_second",
            packets,
            1..=1_000_000_000,
            "1 to 1,000,000,000",
        )?;
        let burst = rate
            .burst_packets
            .unwrap_or_else(|| (packets / BURST_DIVISOR).max(BURST_PACKETS_MIN));
        // The packet that is judged is not yet part of the debt.
        let before = u128::from(burst.saturating_sub(1));
        limit.packet_cost = rounded(NANOSECONDS, packets);
        limit.packet_burst = burst_time("burst_packets", burst, before * NANOSECONDS, packets)?;
    }
    Ok(limit)
}

fn in_range(
    field: &'static str,
    value: u64,
    possible: std::ops::RangeInclusive<u64>,
    range: &'static str,
) -> Result<(), PolicyError> {
    if possible.contains(&value) {
        Ok(())
    } else {
        Err(PolicyError::Rate {
            field,
            value,
            range,
        })
    }
}

fn burst_time(field: &'static str, value: u64, cost: u128, rate: u64) -> Result<u64, PolicyError> {
    let time = cost / u128::from(rate);
    if value == 0 || time > BURST_SECONDS_MAX * NANOSECONDS {
        return Err(PolicyError::Rate {
            field,
            value,
            range: "1 to what the rate carries in an hour",
        });
    }
    Ok(u64::try_from(time).expect("an hour fits"))
}

/// `dividend / divisor`, to the nearest, and never zero, which would mean no limit.
fn rounded(dividend: u128, divisor: u64) -> u64 {
    let divisor = u128::from(divisor);
    let quotient = (dividend + divisor / 2) / divisor;
    u64::try_from(quotient).unwrap_or(u64::MAX).max(1)
}

fn action_of(action: PolicyAction) -> Action {
    match action {
        PolicyAction::Allow => Action::Allow,
        PolicyAction::Deny => Action::Deny,
    }
}

fn rule(action: Action, protocol: u8, first: u16, last: u16) -> PortRule {
    PortRule {
        protocol,
        action: u8::try_from(action.number()).expect("actions are 0 and 1"),
        first,
        last,
        reserved: 0,
    }
}

fn port_rule(action: Action, ports: HostService) -> PortRule {
    match ports {
        HostService::All => rule(action, 0, 0, u16::MAX),
        HostService::Icmp => rule(action, PROTOCOL_ICMP, 0, u16::MAX),
        HostService::Tcp(first, last) => rule(action, PROTOCOL_TCP, first, last),
        HostService::Udp(first, last) => rule(action, PROTOCOL_UDP, first, last),
    }
}

fn covers_everything(rule: &PortRule) -> bool {
    rule.protocol == 0
}

/// What the trie says of a denied prefix.
fn denied(reason: DropReason) -> PrefixValue {
    PrefixValue {
        list: 0,
        action: 0,
        reason: u16::from(reason as u8),
    }
}

pub(crate) fn key_of(prefix: IpNet) -> PrefixKey {
    let length = match prefix {
        IpNet::V4(prefix) => 96 + prefix.prefix_len(),
        IpNet::V6(prefix) => prefix.prefix_len(),
    };
    PrefixKey {
        prefix_length: 32 + u32::from(length),
        policy: 0,
        address: prefix.network().into(),
    }
}

/// Prefixes while they are gathered.
#[derive(Debug, Default)]
struct Table {
    /// The user's, with the rules written for exactly this prefix. Sorted, a prefix stands before those
    /// inside it.
    rules: BTreeMap<IpNet, Vec<PortRule>>,
    /// Those that the user's rules can't open.
    reserved: BTreeMap<IpNet, PrefixValue>,
    clone_prefixes: Vec<IpNet>,
}

impl Table {
    fn reserve(&mut self, spec: &PolicySpec, clone_prefixes: &[IpNet]) {
        for prefix in clone_prefixes.iter().map(IpNet::trunc) {
            self.reserved
                .insert(prefix, denied(DropReason::NoSuchSandbox));
            self.clone_prefixes.push(prefix);
        }
        if !spec.cloud_metadata {
            let metadata =
                CLOUD_METADATA.map(|address| (address.into(), denied(DropReason::Metadata)));
            self.reserved.extend(metadata);
        }
    }

    fn add_rules(&mut self, egress: &EgressPolicy) -> Result<(), PolicyError> {
        let written = egress.rules.iter().map(|rule| rule.prefixes.len()).sum();
        if written > PREFIXES_MAX {
            return Err(PolicyError::Prefixes(written));
        }
        for written in &egress.rules {
            let action = action_of(written.action);
            let all = [HostService::All];
            let ports = if written.ports.is_empty() {
                &all[..]
            } else {
                &written.ports
            };
            for prefix in written.prefixes.iter().map(IpNet::trunc) {
                if mapped().contains(&prefix) {
                    return Err(PolicyError::Mapped(prefix));
                }
                let rules = ports.iter().map(|ports| port_rule(action, *ports));
                self.rules.entry(prefix).or_default().extend(rules);
            }
        }
        Ok(())
    }

    fn finish(mut self, default: Action) -> Result<(Vec<Entry>, Vec<RuleList>), PolicyError> {
        let mut lists = Lists::default();
        let mut entries = std::mem::take(&mut self.reserved);
        // The prefixes around the current one, from the widest, with all their rules.
        let mut around: Vec<(IpNet, Vec<PortRule>)> = Vec::new();
        for (prefix, own) in &self.rules {
            while around
                .last()
                .is_some_and(|(outer, _)| !outer.contains(prefix))
            {
                around.pop();
            }
            let inherited = around.last().map_or(&[][..], |(_, rules)| rules);
            let rules = shortened(own.iter().chain(inherited));
            if rules.len() > RULES_MAX {
                return Err(PolicyError::Rules(*prefix, rules.len()));
            }
            let is_reserved = self
                .clone_prefixes
                .iter()
                .any(|outer| outer.contains(prefix));
            if !is_reserved {
                entries
                    .entry(*prefix)
                    .or_insert_with(|| lists.value(&rules));
            }
            around.push((*prefix, rules));
        }
        // In the trie IPv4 lies inside IPv6: what is said of ::/0 must not hold for IPv4.
        if entries.keys().any(|prefix| prefix.contains(&mapped())) {
            entries
                .entry(all_ipv4())
                .or_insert_with(|| lists.value(&[rule(default, 0, 0, u16::MAX)]));
        }
        let prefixes = entries.into_iter();
        let prefixes = prefixes.map(|(prefix, value)| (key_of(prefix), value));
        Ok((prefixes.collect(), lists.lists))
    }
}

/// Rules without those that can't decide: behind one for every port, or a repetition.
fn shortened<'a>(rules: impl Iterator<Item = &'a PortRule>) -> Vec<PortRule> {
    let mut kept: Vec<PortRule> = Vec::new();
    for rule in rules {
        let covers = |other: &PortRule| {
            other.protocol == rule.protocol && other.first <= rule.first && rule.last <= other.last
        };
        if !kept.iter().any(covers) {
            kept.push(*rule);
        }
        if covers_everything(rule) {
            break;
        }
    }
    kept
}

/// Lists of rules, each once.
#[derive(Debug, Default)]
struct Lists {
    lists: Vec<RuleList>,
    positions: HashMap<Vec<u8>, u32>,
}

impl Lists {
    fn value(&mut self, rules: &[PortRule]) -> PrefixValue {
        use abi::Plain;
        let reason = u16::from(DropReason::Policy as u8);
        if let [only] = rules
            && covers_everything(only)
        {
            return PrefixValue {
                list: 0,
                action: u16::from(only.action),
                reason,
            };
        }
        let mut list = RuleList::default();
        for (place, rule) in list.rules.iter_mut().zip(rules) {
            *place = *rule;
            list.count += 1;
        }
        let next = u32::try_from(self.lists.len() + 1).expect("fewer than prefixes");
        let position = *self.positions.entry(list.bytes().to_vec()).or_insert(next);
        if position == next {
            self.lists.push(list);
        }
        PrefixValue {
            list: position,
            action: 0,
            reason,
        }
    }
}

pub(crate) fn all_ipv4() -> IpNet {
    IpNet::V4(Ipv4Net::default())
}

/// Where IPv4 lies in the trie.
pub(crate) fn mapped() -> IpNet {
    let first = std::net::Ipv4Addr::UNSPECIFIED.to_ipv6_mapped();
    let prefix = Ipv6Net::new(first, 96);
    prefix.expect("96 is a length of IPv6 prefixes").into()
}

#[cfg(test)]
mod tests;
