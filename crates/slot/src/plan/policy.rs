//! What a policy must satisfy: fields that its data path has, and numbers within their ranges.

use std::collections::HashSet;

use sandwire_api::{
    policy::{LimitSpec, RateLimit},
    pool::{PolicySpec, PoolSpec},
    slot::{DataPath, SlotKind},
};
use sandwire_kernel_net::nft::RELAY_MARK_MASK;

use super::checks::check_range;
use crate::error::PlanError;

/// Prefixes of all rules of one policy.
const PREFIXES_MAX: u64 = 100_000;
/// Other groups of one policy.
const GROUPS_MAX: usize = 64;
const BITS_PER_SECOND: std::ops::RangeInclusive<u64> = 8_000..=1_000_000_000_000;
const PACKETS_PER_SECOND: std::ops::RangeInclusive<u64> = 1..=1_000_000_000;
/// One frame of the usual size, to 4 GiB.
const BURST_BYTES: std::ops::RangeInclusive<u64> = 1_514..=1 << 32;
/// Linux keeps its own tables from 253 on, which may be named all the same.
const ROUTE_TABLE: std::ops::RangeInclusive<u64> = 1..=0xffff_ffff;
/// The bits above are the relay's: its routing rules take a packet that has one of them for one that may leave.
const ROUTE_MARK: std::ops::RangeInclusive<u32> = 1..=!RELAY_MARK_MASK;

/// Checks a policy for a data path: that of a pool, or one that a lease of the pool is to have.
///
/// # Errors
/// Names the field that can't work, and why.
pub fn check_policy(policy: &PolicySpec, data_path: DataPath) -> Result<(), PlanError> {
    if data_path == DataPath::Nft {
        refuse_what_nft_lacks(policy)?;
    }
    check_limits(&policy.limits)?;
    let prefixes: usize = policy
        .egress
        .rules
        .iter()
        .map(|rule| rule.prefixes.len())
        .sum();
    let prefixes = u64::try_from(prefixes).unwrap_or(u64::MAX);
    check_range("policy.egress: prefixes", prefixes, 0, PREFIXES_MAX)?;
    let (first, last) = (*ROUTE_TABLE.start(), *ROUTE_TABLE.end());
    for (setting, value) in [
        ("policy.route_mark", policy.route_mark),
        ("policy.route_table", policy.route_table),
    ] {
        if let Some(value) = value {
            check_range(setting, u64::from(value), first, last)?;
        }
    }
    Ok(())
}

/// Checks the mark of a policy that is new. Former versions took any, so pools and leases that are there may have one by
/// which packets go past the relay.
///
/// # Errors
/// The mark has bits of the relay's.
pub(crate) fn check_route_mark(policy: &PolicySpec) -> Result<(), PlanError> {
    policy.route_mark.map_or(Ok(()), |mark| {
        let (first, last) = (*ROUTE_MARK.start(), *ROUTE_MARK.end());
        check_range("policy.route_mark", mark, first, last)
    })
}

/// Checks the groups of a policy that is new. Former versions took any number of them.
///
/// # Errors
/// There are too many, or one is named twice.
pub(crate) fn check_talks_to(policy: &PolicySpec) -> Result<(), PlanError> {
    let groups = policy.talks_to.len();
    if groups > GROUPS_MAX {
        return Err(PlanError::Groups {
            groups,
            most: GROUPS_MAX,
        });
    }
    let mut seen = HashSet::new();
    match policy.talks_to.iter().find(|group| !seen.insert(*group)) {
        Some(group) => Err(PlanError::SameGroup {
            group: group.clone(),
        }),
        None => Ok(()),
    }
}

/// Settings with `auto` replaced by a data path: eBPF where the host has it, of which `has_ebpf` is asked, and `nft`
/// elsewhere. Host and container slots, and policies that nft can't keep, have no other than eBPF: then nobody is asked, and
/// its absence is an error of its own.
#[must_use]
pub fn choose_data_path(spec: &PoolSpec, has_ebpf: impl FnOnce() -> bool) -> PoolSpec {
    let mut chosen = spec.clone();
    if spec.data_path != DataPath::Auto {
        return chosen;
    }
    let needs_ebpf =
        spec.kind != SlotKind::Netns || check_policy(&spec.policy, DataPath::Nft).is_err();
    chosen.data_path = if needs_ebpf || has_ebpf() {
        DataPath::Ebpf
    } else {
        DataPath::Nft
    };
    chosen
}

fn refuse_what_nft_lacks(policy: &PolicySpec) -> Result<(), PlanError> {
    let reason =
        "needs data_path = ebpf: the nft data path has one policy per pool and no such rule";
    let refuse = |setting, value: String| {
        Err(PlanError::Unsupported {
            setting,
            value,
            reason,
        })
    };
    if let Some(group) = &policy.group {
        return refuse("policy.group", group.to_string());
    }
    if let Some(group) = policy.talks_to.first() {
        return refuse("policy.talks_to", group.to_string());
    }
    if !policy.egress.is_default() {
        let rules = policy.egress.rules.len();
        return refuse("policy.egress", format!("{rules} rules"));
    }
    if policy.limits != LimitSpec::default() {
        return refuse("policy.limits", "a limit".to_owned());
    }
    if let Some(mark) = policy.route_mark {
        return refuse("policy.route_mark", mark.to_string());
    }
    match policy.route_table {
        Some(table) => refuse("policy.route_table", table.to_string()),
        None => Ok(()),
    }
}

fn check_limits(limits: &LimitSpec) -> Result<(), PlanError> {
    let egress = [
        "policy.limits.egress.bits_per_second",
        "policy.limits.egress.burst_bytes",
        "policy.limits.egress.packets_per_second",
        "policy.limits.egress.burst_packets",
    ];
    let ingress = [
        "policy.limits.ingress.bits_per_second",
        "policy.limits.ingress.burst_bytes",
        "policy.limits.ingress.packets_per_second",
        "policy.limits.ingress.burst_packets",
    ];
    check_limit(&limits.egress, egress)?;
    check_limit(&limits.ingress, ingress)
}

fn check_limit(limit: &RateLimit, settings: [&'static str; 4]) -> Result<(), PlanError> {
    let [bits, burst_bytes, packets, burst_packets] = settings;
    for (setting, value, range) in [
        (bits, limit.bits_per_second, BITS_PER_SECOND),
        (burst_bytes, limit.burst_bytes, BURST_BYTES),
        (packets, limit.packets_per_second, PACKETS_PER_SECOND),
        (burst_packets, limit.burst_packets, PACKETS_PER_SECOND),
    ] {
        if let Some(value) = value {
            check_range(setting, value, *range.start(), *range.end())?;
        }
    }
    for (present, burst, absent, rate) in [
        (burst_bytes, limit.burst_bytes, bits, limit.bits_per_second),
        (
            burst_packets,
            limit.burst_packets,
            packets,
            limit.packets_per_second,
        ),
    ] {
        if burst.is_some() && rate.is_none() {
            return Err(PlanError::OneSided { present, absent });
        }
    }
    Ok(())
}
