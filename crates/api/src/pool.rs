//! A pool: slots of one kind, kept filled in the background.
//!
//! [`PoolSpec`] is what a user writes, in the configuration file and in the body of a request alike.
//! It is complete and self-contained: with a slot number it determines every name and address.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    num::NonZeroU32,
};

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{ObjectBuilder, RefOr, Schema, Type},
};

use crate::{
    attach::{DeviceChoice, ParentSpec},
    name::Name,
    policy::{EgressPolicy, LimitSpec},
    prefix,
    slot::{DataPath, MacAddress, SlotKind},
    vsock::VsockPolicy,
};

/// Everything about a pool that its creator decides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolSpec {
    /// Name of the pool, unique in the daemon.
    pub name: Name,
    /// Kind of slot. Default: `netns`.
    #[serde(default)]
    pub kind: SlotKind,
    /// Data path. Default: `auto`.
    #[serde(default = "default_data_path")]
    pub data_path: DataPath,
    /// What kind of interface containers get; only with `kind = "container"`. Default: `veth`.
    #[serde(default)]
    pub device: DeviceChoice,
    /// The interface of the host whose children containers get; only with a `device` that is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ParentSpec>,
    /// Slots to keep ready, beside those that are leased. Default: 8.
    #[serde(default = "default_size")]
    pub size: u32,
    /// Interfaces per sandbox, 1 to 8. Default: 1.
    #[serde(default = "default_nics")]
    pub nics: u8,
    /// The TAP that the sandbox plugs into.
    #[serde(default)]
    pub tap: TapSpec,
    /// What every guest of the pool believes about its network.
    #[serde(default)]
    pub guest: GuestSpec,
    /// How slot numbers become clone addresses.
    pub addresses: AddressPlan,
    /// What the sandboxes of the pool may reach.
    #[serde(default)]
    pub policy: PolicySpec,
    /// What guests may reach by vsock whose lease has a channel and says nothing of it. Default: nothing.
    #[serde(default)]
    pub vsock: Option<VsockPolicy>,
    /// Seconds a released clone address rests before it is given out again. Default: 3.
    #[serde(default = "default_quarantine_seconds")]
    pub quarantine_seconds: u32,
    /// Who, besides root, may do what with this pool. Default: nobody.
    #[serde(default)]
    pub access: Vec<AccessRule>,
}

/// The TAP interface of each slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TapSpec {
    /// Name of the first TAP, at most 15 bytes; with several interfaces per sandbox it must end in
    /// a number, from which the others count on. Default: `vmtap0`.
    pub name: String,
    /// Numeric user that may open the TAP, as by `TUNSETOWNER`. Default: only privileged users.
    pub owner_uid: Option<u32>,
    /// Numeric group that may open the TAP, as by `TUNSETGROUP`. Default: only privileged users.
    pub owner_gid: Option<u32>,
    /// Whether the TAP carries virtio-net headers (`IFF_VNET_HDR`), as VMMs expect. Default: true.
    pub vnet_header: bool,
    /// Whether the TAP has several queues (`IFF_MULTI_QUEUE`). Firecracker refuses such a TAP. Default: false.
    pub multi_queue: bool,
    /// MTU in bytes, 1280 to 65521. Default: 1500.
    pub mtu: u32,
}

/// What every guest of a pool believes: the addresses frozen in its snapshot.
///
/// With several interfaces per sandbox, interface `k` (from 0) has the given subnets and
/// addresses moved up by `k` subnets, and the MAC addresses with `k` added to the last byte.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GuestSpec {
    /// Ethernet address of the guest's first interface. Default: `06:00:c0:a8:f1:02`.
    pub mac: MacAddress,
    /// Ethernet address of the gateway on the first TAP. Default: `02:73:77:00:00:01`.
    pub gateway_mac: MacAddress,
    /// Guest's IPv4 address with its prefix length; an empty string means no IPv4.
    /// Default: `192.168.241.2/29`.
    #[serde(with = "optional_text")]
    #[schema(value_type = String)]
    pub ipv4: Option<Ipv4Net>,
    /// IPv4 gateway. Default: the first usable address of the guest's subnet.
    #[schema(value_type = Option<String>)]
    pub ipv4_gateway: Option<Ipv4Addr>,
    /// Guest's IPv6 address with its prefix length; an empty string means no IPv6.
    /// Default: `fd00:5eed::2/64`.
    #[serde(with = "optional_text")]
    #[schema(value_type = String)]
    pub ipv6: Option<Ipv6Net>,
    /// IPv6 gateway. Default: the first address of the guest's subnet. `fe80::1` answers too.
    #[schema(value_type = Option<String>)]
    pub ipv6_gateway: Option<Ipv6Addr>,
}

/// How slot numbers become clone addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "plan", rename_all = "snake_case", deny_unknown_fields)]
pub enum AddressPlan {
    /// Clone addresses are counted up in the given prefixes. The first two addresses of a
    /// prefix (and in IPv4 the broadcast address) are kept for the host.
    Prefix {
        /// Prefix of the IPv4 clone addresses; required if the guests have IPv4.
        #[serde(default, deserialize_with = "prefix::optional")]
        #[schema(value_type = Option<String>, example = "10.64.0.0/16")]
        ipv4: Option<Ipv4Net>,
        /// Prefix of the IPv6 clone addresses; required if the guests have IPv6.
        #[serde(default, deserialize_with = "prefix::optional")]
        #[schema(value_type = Option<String>, example = "fd00:c10e::/64")]
        ipv6: Option<Ipv6Net>,
    },
    /// The scheme of Firecracker's document "Network Connectivity for Clones": clone
    /// `192.168.<n/30>.<(n%30)*8+3>`, veth `10.<n/30>.<(n%30)*8>.1` and `.2`. IPv4 by that scheme,
    /// one interface per sandbox; IPv6, if the guests have it, from a prefix.
    FirecrackerClones {
        /// Prefix of the IPv6 clone addresses; required if the guests have IPv6.
        #[serde(default, deserialize_with = "prefix::optional")]
        #[schema(value_type = Option<String>)]
        ipv6: Option<Ipv6Net>,
    },
}

/// What the sandboxes of a pool may reach. By default everything beyond the host but cloud metadata, under the host's address,
/// and neither the host's services nor each other. Answers to connections that came from outside always pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PolicySpec {
    /// Beyond the host: `masquerade` (behind the host's address), `route` (with the clone address)
    /// or `deny`. Default: `masquerade`.
    pub uplink: UplinkPolicy,
    /// Other sandboxes of the same pool (in the eBPF data paths: of the same group). Default: false.
    pub clone_to_clone: bool,
    /// Services on the host itself, as `tcp/PORT`, `udp/PORT`, `tcp/FIRST-LAST`, `icmp` or `all`.
    /// Default: none.
    pub host_services: Vec<HostService>,
    /// Cloud metadata: 169.254.169.254, fd00:ec2::254, and where other clouds have theirs. Default: false.
    pub cloud_metadata: bool,
    /// Most connections that one sandbox may have open at a time through the host's stack, which tracks them: in the
    /// `nft` data path all, in the others those that are masqueraded or for the host itself. Default: 4096.
    pub connections_max: u32,
    /// Group of the sandboxes; those of one group may talk if `clone_to_clone` is set. Default: the
    /// pool's name. Only in the eBPF data paths, as all that follows.
    pub group: Option<Name>,
    /// Other groups that they may talk to, at most 64. Holds where both groups name each other. Default: none.
    pub talks_to: Vec<Name>,
    /// Where they may send packets beyond the host. Default: everywhere that `uplink` allows.
    pub egress: EgressPolicy,
    /// How much they may send and receive. Default: no limit.
    pub limits: LimitSpec,
    /// Firewall mark for policy routing (`ip rule … fwmark`), 1 to 16777215: the bits above are the relay's. Default: none.
    pub route_mark: Option<u32>,
    /// Routing table to look up instead of following the host's rules. Default: the rules.
    pub route_table: Option<u32>,
}

impl PolicySpec {
    /// Whether packets may leave by other routes than those that the host's rules lead to without a mark.
    #[must_use]
    pub fn has_own_routes(&self) -> bool {
        self.route_table.or(self.route_mark).is_some()
    }
}

/// See [`PolicySpec::uplink`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum UplinkPolicy {
    /// Packets leave the host with the host's own address.
    #[default]
    Masquerade,
    /// Packets leave the host with the clone address; the network must route it back.
    Route,
    /// Packets that a sandbox starts do not leave the host.
    Deny,
}

/// A service on the host that sandboxes may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HostService {
    /// Everything.
    All,
    /// ICMP and ICMPv6 echo.
    Icmp,
    /// A range of TCP ports, both ends included.
    Tcp(u16, u16),
    /// A range of UDP ports, both ends included.
    Udp(u16, u16),
}

impl std::fmt::Display for HostService {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::All => formatter.write_str("all"),
            Self::Icmp => formatter.write_str("icmp"),
            Self::Tcp(first, last) if first == last => write!(formatter, "tcp/{first}"),
            Self::Tcp(first, last) => write!(formatter, "tcp/{first}-{last}"),
            Self::Udp(first, last) if first == last => write!(formatter, "udp/{first}"),
            Self::Udp(first, last) => write!(formatter, "udp/{first}-{last}"),
        }
    }
}

/// Why a text is not a [`HostService`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' is not a host service: write tcp/PORT, udp/PORT, tcp/FIRST-LAST, udp/FIRST-LAST, icmp or all"
)]
pub struct ParseHostServiceError {
    text: String,
}

impl std::str::FromStr for HostService {
    type Err = ParseHostServiceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || ParseHostServiceError {
            text: text.chars().take(40).collect(),
        };
        let (protocol, ports) = match text {
            "all" => return Ok(Self::All),
            "icmp" => return Ok(Self::Icmp),
            _ => text.split_once('/').ok_or_else(refuse)?,
        };
        let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
        let first: u16 = first.parse().map_err(|_| refuse())?;
        let last: u16 = last.parse().map_err(|_| refuse())?;
        match protocol {
            _ if first == 0 || last < first => Err(refuse()),
            "tcp" => Ok(Self::Tcp(first, last)),
            "udp" => Ok(Self::Udp(first, last)),
            _ => Err(refuse()),
        }
    }
}

impl PartialSchema for HostService {
    fn schema() -> RefOr<Schema> {
        let pattern = "^(all|icmp|(tcp|udp)/[0-9]+(-[0-9]+)?)$";
        ObjectBuilder::new()
            .schema_type(Type::String)
            .pattern(Some(pattern))
            .description(Some("A service on the host that sandboxes may use."))
            .examples(["tcp/8080"])
            .into()
    }
}

impl ToSchema for HostService {}

impl Serialize for HostService {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for HostService {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

/// Grants verbs on a pool to users and groups, told by the credentials of their socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AccessRule {
    /// What is granted.
    pub verbs: Vec<AccessVerb>,
    /// Numeric users that it is granted to.
    #[serde(default)]
    pub uids: Vec<u32>,
    /// Numeric groups that it is granted to (the peer's primary group).
    #[serde(default)]
    pub gids: Vec<u32>,
    /// Most leases of the pool that each user may hold who acquires by this rule. Of several such rules the largest counts;
    /// without it in one of them there may be any number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    pub leases_max: Option<NonZeroU32>,
}

/// What can be granted on a pool. Whoever holds a lease may always show and release it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AccessVerb {
    /// Acquire leases of the pool.
    Acquire,
    /// Publish host ports to own leases of the pool.
    Publish,
    /// Show the pool and its figures.
    Show,
    /// Change and delete the pool, and see, limit, trace and release everybody's leases of it.
    Manage,
}

/// A pool as the daemon sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pool {
    /// What its creator decided; `size` is the current one.
    pub spec: PoolSpec,
    /// Slots that the address plan has room for.
    pub slots_max: u32,
    /// How many slots are in which state.
    pub slots: SlotCounts,
    /// Why the pool isn't full, if building fails: the last error.
    pub last_error: Option<String>,
}

/// How many slots of a pool are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SlotCounts {
    /// Built and free.
    pub ready: u32,
    /// Being built.
    pub building: u32,
    /// Held by a lease.
    pub leased: u32,
    /// Released while a VMM still has the TAP open; torn down when it ends.
    pub held: u32,
    /// Being torn down.
    pub tearing_down: u32,
    /// Torn down; the clone address rests.
    pub quarantined: u32,
}

/// Body of a request to change a pool. What is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ChangePool {
    /// Slots to keep ready, beside those that are leased.
    pub size: Option<u32>,
    /// What the sandboxes of the pool may reach: at once for all leases that have no policy of their own.
    pub policy: Option<PolicySpec>,
    /// Data path, `nft` or `ebpf`, of a pool of netns slots. Slots move one by one, leased ones too;
    /// connections go on.
    pub data_path: Option<DataPath>,
    /// What guests may reach by vsock: at once for all leases that have no such policy of their own.
    pub vsock: Option<VsockPolicy>,
    /// Who may use the pool from now on: all rules. Only root may say. Leases that are there stay.
    pub access: Option<Vec<AccessRule>>,
    /// Seconds that a clone address rests that is released from now on.
    pub quarantine_seconds: Option<u32>,
}

impl Default for TapSpec {
    fn default() -> Self {
        Self {
            name: "vmtap0".to_owned(),
            owner_uid: None,
            owner_gid: None,
            vnet_header: true,
            multi_queue: false,
            mtu: 1500,
        }
    }
}

impl Default for GuestSpec {
    fn default() -> Self {
        let ipv4 = Ipv4Net::new_assert(Ipv4Addr::new(192, 168, 241, 2), 29);
        let ipv6 = Ipv6Net::new_assert(Ipv6Addr::new(0xfd00, 0x5eed, 0, 0, 0, 0, 0, 2), 64);
        Self {
            mac: MacAddress([0x06, 0x00, 0xc0, 0xa8, 0xf1, 0x02]),
            gateway_mac: MacAddress([0x02, 0x73, 0x77, 0x00, 0x00, 0x01]),
            ipv4: Some(ipv4),
            ipv4_gateway: None,
            ipv6: Some(ipv6),
            ipv6_gateway: None,
        }
    }
}

impl Default for PolicySpec {
    fn default() -> Self {
        Self {
            uplink: UplinkPolicy::Masquerade,
            clone_to_clone: false,
            host_services: Vec::new(),
            cloud_metadata: false,
            connections_max: 4096,
            group: None,
            talks_to: Vec::new(),
            egress: EgressPolicy::default(),
            limits: LimitSpec::default(),
            route_mark: None,
            route_table: None,
        }
    }
}

fn default_data_path() -> DataPath {
    DataPath::Auto
}

fn default_size() -> u32 {
    8
}

fn default_nics() -> u8 {
    1
}

fn default_quarantine_seconds() -> u32 {
    3
}

/// An optional prefix written as text, where the empty text means none: TOML has no null.
mod optional_text {
    use std::{fmt::Display, str::FromStr};

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<T: Display, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => serializer.collect_str(value),
            None => serializer.serialize_str(""),
        }
    }

    pub(super) fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr,
        D: Deserializer<'de>,
    {
        match String::deserialize(deserializer)?.as_str() {
            "" => Ok(None),
            text => crate::prefix::parse(text).map(Some),
        }
    }
}
