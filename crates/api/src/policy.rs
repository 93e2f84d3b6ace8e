//! What a sandbox may send where, and how much: the parts of a policy that only the eBPF data paths have.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{pool::HostService, prefix};

/// Where clouds hand out credentials and what else is a machine's own, to whoever asks from it.
pub const CLOUD_METADATA: [IpAddr; 9] = [
    // Amazon, Azure, Google, Oracle, OpenStack and others.
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)),
    // Amazon's credentials for tasks (ECS) and pods (EKS).
    IpAddr::V4(Ipv4Addr::new(169, 254, 170, 2)),
    IpAddr::V4(Ipv4Addr::new(169, 254, 170, 23)),
    // Tencent, and Alibaba.
    IpAddr::V4(Ipv4Addr::new(169, 254, 0, 23)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    // Amazon's by IPv6, for pods too; Google's; Oracle's.
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23)),
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe)),
];

/// Where a sandbox may send packets beyond the host.
///
/// For a packet, the rules of the longest prefix that covers its destination are looked at first, in
/// the order written; then those of the next shorter prefix; then `default`. The first rule whose
/// ports cover the packet decides. Of a fragmented packet, fragments after the first carry no ports:
/// a rule covers them by protocol alone, and the first fragment decides whether they are of use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EgressPolicy {
    /// What happens to packets that no rule covers. Default: `allow`.
    pub default: PolicyAction,
    /// Rules, at most 100,000 prefixes in all and 32 rules on one prefix and those around it.
    pub rules: Vec<EgressRule>,
}

/// Whether packets pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PolicyAction {
    /// They pass.
    #[default]
    Allow,
    /// They are dropped and counted.
    Deny,
}

/// One rule of an [`EgressPolicy`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EgressRule {
    /// What the rule does.
    pub action: PolicyAction,
    /// Destinations. Domain names will stand beside them one day, as `domains`.
    #[serde(deserialize_with = "prefix::list")]
    #[schema(value_type = Vec<String>)]
    pub prefixes: Vec<IpNet>,
    /// Protocols and ports: `tcp/443`, `udp/53`, `tcp/8000-8999`, `icmp`, `all`. Default: all.
    #[serde(default)]
    pub ports: Vec<HostService>,
}

/// How much a sandbox may send and receive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LimitSpec {
    /// Of what leaves the sandbox.
    pub egress: RateLimit,
    /// Of what reaches it.
    pub ingress: RateLimit,
}

/// A limit in one direction. What exceeds it is dropped, or sent later where the uplink's queue can do
/// that (`fq`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RateLimit {
    /// Bits per second of Ethernet frames, 8,000 to 1,000,000,000,000. Default: no limit.
    pub bits_per_second: Option<u64>,
    /// Bytes that may exceed the rate at once. Default: what the rate carries in 50 ms, at least 131,072.
    pub burst_bytes: Option<u64>,
    /// Packets per second as they are on the wire, 1 to 1,000,000,000. Default: no limit.
    pub packets_per_second: Option<u64>,
    /// Packets that may exceed the rate at once. Default: what the rate carries in 50 ms, at least 64.
    pub burst_packets: Option<u64>,
}

impl EgressPolicy {
    /// Whether it is the one that every data path has: everything is allowed.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
