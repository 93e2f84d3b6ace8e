//! Slots of our own, through the real daemon and its API.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use sandwire_api::{
    lease::{AcquireLease, Lease},
    pool::{PolicySpec, PoolSpec},
};
use serde_json::{Value, json};

use super::{Place, Plan, Sandbox, Way, xdp};
use crate::{
    daemon_process::{DaemonProcess, PATIENCE},
    private_host,
    world::{self, World},
};

/// Prefixes of the deny list.
const DENIED: u32 = 100;
/// Limits that no packet of a benchmark meets, but every packet is measured by.
const BITS_PER_SECOND: u64 = 1_000_000_000_000;
const PACKETS_PER_SECOND: u64 = 100_000_000;

/// Which stages of the path are on, of those that a policy can switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Switches {
    /// A deny list of 100 prefixes.
    pub(crate) deny_list: bool,
    /// Limits of bits and packets per second.
    pub(crate) limit: Limit,
}

/// How much a lease may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// As much as it can.
    None,
    /// More than it can, but every packet is measured.
    Wide,
    /// A packet per second.
    Spent,
}

/// A lease's policy: everything may leave, by its clone address.
pub(crate) fn policy(switches: Switches) -> Result<PolicySpec> {
    let mut spec: BTreeMap<&str, Value> = BTreeMap::from([
        ("uplink", json!("route")),
        ("host_services", json!(["all"])),
    ]);
    if switches.deny_list {
        let prefixes: Vec<String> = (0..DENIED)
            .map(|index| format!("203.0.{index}.0/24"))
            .collect();
        let rule = json!({ "action": "deny", "prefixes": prefixes });
        spec.insert("egress", json!({ "rules": [rule] }));
    }
    let packets = match switches.limit {
        Limit::None => None,
        Limit::Wide => Some(PACKETS_PER_SECOND),
        Limit::Spent => Some(1),
    };
    if let Some(packets) = packets {
        let limit = json!({
            "bits_per_second": BITS_PER_SECOND,
            "packets_per_second": packets,
        });
        spec.insert("limits", json!({ "egress": limit, "ingress": limit }));
    }
    let spec = serde_json::to_value(spec).context("cannot write a policy")?;
    serde_json::from_value(spec).context("the benchmark's policy is not a valid one")
}

/// Starts a daemon in a host of its own, fills a pool, and acquires the leases.
pub(super) fn build(way: Way, plan: &Plan) -> Result<Place> {
    let world = World::create(way.name())?;
    let folder = tempfile::tempdir_in("/run")?;
    let daemon = DaemonProcess::start_in(folder.path(), Some(world.name()))?;
    let spec = pool(way, plan.slots.saturating_sub(plan.leases))?;
    daemon.client().create_pool(&spec)?;
    let wanted = plan.leases.max(1);
    let mut sandboxes = Vec::new();
    for index in 0..wanted {
        private_host::wait_until("a slot is ready", PATIENCE, || {
            Ok(daemon.slots(&spec.name)?.ready > 0)
        })?;
        let policy = plan.policies.get(index as usize).or(plan.policies.last());
        let request = AcquireLease {
            pool: spec.name.clone(),
            name: None,
            clone_address: None,
            ttl_seconds: None,
            policy: policy.filter(|_| way.has_policies()).cloned(),
            process: false,
            vsock: None,
            attach: None,
        };
        let lease = daemon.client().acquire(&request)?.lease;
        sandboxes.push(sandbox(way, world.name(), &lease)?);
    }
    daemon.wait_full(&spec.name, spec.size)?;
    let instance = daemon.instance().to_owned();
    let mut place = Place {
        sandboxes,
        daemon: Some((daemon, folder)),
        note: None,
        world,
    };
    if !way.has_offloads() {
        let host = place.world.name().to_owned();
        let is_by_us = world::inside(&host, || xdp::attach(way, &instance, &place))?;
        place.note = (is_by_us && way == Way::Xdp)
            .then_some("attached by the benchmark: the pool had no XDP program");
    }
    Ok(place)
}

fn pool(way: Way, size: u32) -> Result<PoolSpec> {
    let (kind, data_path) = match way {
        Way::Nft => ("netns", "nft"),
        Way::EbpfNetns => ("netns", "ebpf"),
        Way::XdpGeneric | Way::Xdp => ("host", "xdp"),
        _ => ("host", "ebpf"),
    };
    let spec = json!({
        "name": "bench",
        "kind": kind,
        "data_path": data_path,
        "size": size.max(1),
        "tap": { "vnet_header": way.has_offloads() },
        "guest": { "ipv6": "" },
        "addresses": { "plan": "prefix", "ipv4": "10.64.0.0/16" },
        "policy": { "uplink": "route", "host_services": ["all"] },
    });
    serde_json::from_value(spec).context("the benchmark's pool is not a valid one")
}

fn sandbox(way: Way, host: &str, lease: &Lease) -> Result<Sandbox> {
    let nic = lease.nics.first().context("a lease without interface")?;
    let ipv4 = nic.ipv4.as_ref().context("a lease without IPv4")?;
    Ok(Sandbox {
        namespace: lease.netns_name.clone().unwrap_or_else(|| host.to_owned()),
        tap: nic.tap.clone(),
        has_offloads: way.has_offloads(),
        mac: nic.guest_mac.0,
        gateway_mac: nic.gateway_mac.0,
        guest: ipv4.guest.addr(),
        gateway: ipv4.gateway,
        prefix_length: ipv4.guest.prefix_len(),
        clone: ipv4.clone_address,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_policy_has_a_deny_list_and_limits() {
        let full = policy(Switches {
            deny_list: true,
            limit: Limit::Wide,
        })
        .unwrap();
        assert_eq!(full.egress.rules[0].prefixes.len(), 100);
        assert_eq!(
            full.limits.egress.packets_per_second,
            Some(PACKETS_PER_SECOND)
        );
        let none = policy(Switches {
            deny_list: false,
            limit: Limit::None,
        })
        .unwrap();
        assert!(none.egress.is_default());
        assert_eq!(none.limits.egress.bits_per_second, None);
    }

    #[test]
    fn every_way_of_ours_has_a_valid_pool() {
        for way in [
            Way::Nft,
            Way::EbpfNetns,
            Way::EbpfHost,
            Way::XdpGeneric,
            Way::Xdp,
        ] {
            let spec = pool(way, 10).unwrap();
            assert_eq!(spec.tap.vnet_header, way.has_offloads(), "{way:?}");
        }
    }
}
