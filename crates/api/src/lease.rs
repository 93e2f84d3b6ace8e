//! A lease: who holds which slot, since when.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    attach::{Attach, Attached},
    impairment::ImpairmentSummary,
    name::Name,
    pool::PolicySpec,
    published_port::PublishedPort,
    slot::{DataPath, Defect, Nic, TapUse},
    traffic::Traffic,
    vsock::{VsockChannel, VsockRequest, VsockTraffic},
};

/// Body of a request for a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AcquireLease {
    /// Pool to take the slot from.
    pub pool: Name,
    /// The caller's own name for the lease, unique among the caller's leases. Asking again for the
    /// same name and pool gives the same lease. Default: one that the daemon makes up.
    #[serde(default)]
    pub name: Option<Name>,
    /// A certain clone address, IPv4 or IPv6, of the first interface: a paused sandbox comes back
    /// at its old one. Refused if it is in use.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub clone_address: Option<IpAddr>,
    /// Seconds after which the lease ends by itself. Default: never.
    #[serde(default)]
    pub ttl_seconds: Option<u64>,
    /// What this sandbox may reach, instead of the pool's policy. Only in the eBPF data paths, and for
    /// those who may manage the pool.
    #[serde(default)]
    pub policy: Option<PolicySpec>,
    /// Whether the sandbox is a process in the slot's namespace instead of a guest behind the TAP. The
    /// `nft` data path serves both without being told. Default: false.
    #[serde(default)]
    pub process: bool,
    /// A vsock channel beside the network. Default: none.
    #[serde(default)]
    pub vsock: Option<VsockRequest>,
    /// A namespace that the slot's interface is put into; only of pools of kind `container`, and only for
    /// root and the daemon's own user. Default: none.
    #[serde(default)]
    pub attach: Option<Attach>,
}

/// A lease, with all that a VMM needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Lease {
    /// Name of the lease.
    pub name: Name,
    /// Pool that the slot belongs to.
    pub pool: Name,
    /// Number of the slot in its pool.
    pub slot: u32,
    /// Numeric user that acquired the lease.
    pub owner_uid: u32,
    /// Where it is in its life.
    pub state: LeaseState,
    /// When it was acquired, in seconds since 1970-01-01 UTC.
    pub acquired_at: u64,
    /// When it ends by itself, in seconds since 1970-01-01 UTC.
    pub expires_at: Option<u64>,
    /// Path of the network namespace, for a jailer's `--netns`. Absent in host slots.
    #[schema(example = "/run/netns/sandwire.default.web.17")]
    pub netns: Option<String>,
    /// Name of the network namespace, for `ip netns exec`. Absent in host slots.
    #[schema(example = "sandwire.default.web.17")]
    pub netns_name: Option<String>,
    /// The sandbox's interfaces, in order.
    pub nics: Vec<Nic>,
    /// Its vsock channel, if it was asked for.
    #[serde(default)]
    pub vsock: Option<VsockChannel>,
    /// How its packets are impaired, as of up to two seconds ago. Absent if they aren't.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub impairment: Option<ImpairmentSummary>,
    /// Its interface in a namespace that somebody else made, if it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attached: Option<Attached>,
}

/// Where a lease is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LeaseState {
    /// Held.
    Active,
    /// Released, but a VMM still has a TAP open: the slot goes when that ends.
    Releasing,
}

/// A lease with what the kernel says of it now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseDetail {
    /// The lease itself.
    #[serde(flatten)]
    pub lease: Lease,
    /// Host ports that lead to it.
    pub published_ports: Vec<PublishedPort>,
    /// Use of each TAP, in the order of `nics`.
    pub taps: Vec<TapStatus>,
    /// What is wrong with the slot; empty if it is sound.
    pub defects: Vec<Defect>,
    /// Connections that the slot's namespace tracks now. Absent in the eBPF data paths, which need none.
    pub connections: Option<u32>,
    /// The data path that its packets take.
    #[serde(default)]
    pub data_path: DataPath,
    /// Why its packets take another data path than its pool asks for, or a part of them does: `xdp` needs
    /// a TAP without offloads and an uplink whose driver has XDP.
    #[serde(default)]
    pub data_path_note: Option<String>,
    /// What it may reach now.
    #[serde(default)]
    pub policy: PolicySpec,
    /// Whether that is a policy of its own instead of its pool's.
    #[serde(default)]
    pub has_own_policy: bool,
    /// Traffic since it was acquired. Absent with the `nft` data path.
    #[serde(default)]
    pub traffic: Option<Traffic>,
    /// Counters of its vsock channel. Absent without one, and while its service doesn't answer.
    #[serde(default)]
    pub vsock_traffic: Option<VsockTraffic>,
}

/// What a lease may reach.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeasePolicy {
    /// Whether it is a policy of its own instead of its pool's.
    pub own: bool,
    /// The policy.
    pub policy: PolicySpec,
}

/// What the kernel says of a TAP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TapStatus {
    /// Name of the TAP.
    pub tap: String,
    /// Whether somebody sits on it.
    pub used: TapUse,
    /// Packets and bytes that left the sandbox.
    pub egress: TrafficCount,
    /// Packets and bytes that reached the sandbox.
    pub ingress: TrafficCount,
}

/// Packets and bytes, as the interface counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TrafficCount {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
    /// Packets dropped by the interface.
    pub dropped: u64,
}

/// Answer to a release.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Released {
    /// Name of the lease.
    pub name: Name,
    /// Pool that the slot belongs to.
    pub pool: Name,
    /// Number of the slot in its pool.
    pub slot: u32,
    /// Whether the slot is free of its user.
    pub outcome: ReleaseOutcome,
    /// Processes that still have a TAP of the slot open.
    pub held_by: Vec<TapHolder>,
}

/// What a release came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReleaseOutcome {
    /// The lease has ended; the slot is torn down.
    Released,
    /// A VMM still runs on the slot and keeps it; it is torn down when that ends.
    Held,
}

/// A process that has a TAP open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TapHolder {
    /// Process number.
    pub pid: u32,
    /// Name of its program.
    pub command: String,
}
