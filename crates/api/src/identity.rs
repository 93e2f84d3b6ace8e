//! Identities without a namespace: addresses of their own for the sockets of a cgroup.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
    path::PathBuf,
};

use ipnet::{IpNet, Ipv6Net};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    name::Name,
    policy::EgressPolicy,
    pool::{HostService, PolicySpec, UplinkPolicy},
};

/// Where what is `::1` inside identities lies on the host: a unique local prefix (RFC 4193) that no route leads to.
pub const LOOPBACK6: Ipv6Net = Ipv6Net::new_assert(
    Ipv6Addr::new(0xfd53, 0x7764, 0x6c6f, 0x6f70, 0, 0, 0, 0),
    64,
);

/// What an identity may reach: the keys of a pool's policy that have a meaning without a slot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct IdentityPolicy {
    /// Other identities of the same group. Default: false.
    pub clone_to_clone: bool,
    /// Services on the host itself, as `tcp/PORT`, `udp/PORT`, `tcp/FIRST-LAST`, `icmp` or `all`.
    /// Default: none.
    pub host_services: Vec<HostService>,
    /// Cloud metadata: 169.254.169.254, fd00:ec2::254, and where other clouds have theirs. Default: false.
    pub cloud_metadata: bool,
    /// Group of the identity; those of one group may talk if `clone_to_clone` is set. Default: its own name.
    pub group: Option<Name>,
    /// Other groups that it may talk to, at most 16. Holds where both name each other. Default: none.
    pub talks_to: Vec<Name>,
    /// Where it may connect and send to. Default: everywhere else.
    pub egress: EgressPolicy,
}

impl IdentityPolicy {
    /// The same as the policy of a pool.
    #[must_use]
    pub fn as_pool_policy(&self) -> PolicySpec {
        PolicySpec {
            uplink: UplinkPolicy::Route,
            clone_to_clone: self.clone_to_clone,
            host_services: self.host_services.clone(),
            cloud_metadata: self.cloud_metadata,
            group: self.group.clone(),
            talks_to: self.talks_to.clone(),
            egress: self.egress.clone(),
            ..PolicySpec::default()
        }
    }
}

/// What an identity may do that it may not by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Allowed {
    /// Make sockets other than TCP and UDP: raw ones, pings, SCTP.
    pub other_protocols: bool,
    /// Be reached at its loopback by everybody on the host.
    pub loopback: bool,
    /// Lead connections to ports that it doesn't listen to to services of the host on the wildcard.
    pub host_services: bool,
}

/// How an identity is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = IdentityState)]
pub enum State {
    /// In use.
    Active,
    /// Its cgroup was removed, and sockets of it are still open; it goes with the last one.
    Dying,
}

/// An identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Identity {
    /// Its name.
    pub name: Name,
    /// Its number on this host.
    pub number: u32,
    /// Whether it is in use.
    pub state: State,
    /// Folder of its cgroup, as it was when it was added.
    #[schema(value_type = String)]
    pub cgroup: PathBuf,
    /// Number of its cgroup.
    pub cgroup_id: u64,
    /// Its addresses; the first of each family is what sockets get that choose none.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// What 127.0.0.1 and ::1 are inside it.
    #[schema(value_type = Vec<String>)]
    pub loopback: [IpAddr; 2],
    /// The interface that the addresses were put on.
    pub interface: String,
    /// What it may do.
    pub allowed: Allowed,
    /// Whether it makes no sockets but TCP's, and nothing is done per packet.
    #[serde(default)]
    pub tcp_only: bool,
    /// Whether the configuration of a daemon has it.
    #[serde(default)]
    pub declared: bool,
    /// TCP sockets that listen now, and UDP sockets that receive at several addresses.
    pub listeners: u64,
    /// What its sockets did.
    pub counters: Counters,
}

/// An identity that a daemon's configuration has and that isn't there: its cgroup isn't, or it can't be added, as `/healthz` says then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AwaitedIdentity {
    /// Its name.
    pub name: Name,
    /// What tells it from an identity that is there.
    pub state: Awaited,
    /// Folder of its cgroup, as the configuration has it.
    #[schema(value_type = String)]
    pub cgroup: PathBuf,
    /// Its addresses to be.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// Prefixes of each of which it will have an address besides.
    #[schema(value_type = Vec<String>)]
    pub prefixes: Vec<IpNet>,
}

/// The state of one that isn't there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = AwaitedState)]
pub enum Awaited {
    /// It is added as its cgroup comes.
    Awaited,
}

/// One of a list: `state` says whether it is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum ListedIdentity {
    /// It is there.
    Found(Identity),
    /// The configuration has it.
    Awaited(AwaitedIdentity),
}

/// Why something was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// bind to an address that isn't the identity's.
    BindAddress,
    /// bind to the wildcard of a family in which the identity has no address.
    BindFamily,
    /// connect or send to the loopback of others, or to a service of the host on the own loopback.
    ConnectLoopback,
    /// connect or send to a family in which the identity has no address.
    ConnectFamily,
    /// connect or send from an address that isn't the identity's, or that can't be had any more.
    Source,
    /// A socket of a kind that can't be confined.
    Protocol,
    /// A packet to a socket of the identity, but to the address of somebody else.
    IngressAddress,
    /// A packet of somebody else to the identity's loopback.
    IngressLoopback,
    /// A packet from an address that isn't the identity's, or one that isn't understood.
    EgressSource,
    /// A destination that the rules of the policy deny.
    Policy,
    /// Cloud metadata.
    Metadata,
    /// An identity of another group.
    OtherIdentity,
    /// A service of the host that the policy doesn't list.
    HostService,
    /// Any destination, since there is no policy.
    NoPolicy,
    /// A socket that listens, beyond the number that one identity may have: no connections come to it.
    Listeners,
}

impl Refusal {
    /// All, in the order of their numbers.
    pub const ALL: [Self; 15] = [
        Self::BindAddress,
        Self::BindFamily,
        Self::ConnectLoopback,
        Self::ConnectFamily,
        Self::Source,
        Self::Protocol,
        Self::IngressAddress,
        Self::IngressLoopback,
        Self::EgressSource,
        Self::Policy,
        Self::Metadata,
        Self::OtherIdentity,
        Self::HostService,
        Self::NoPolicy,
        Self::Listeners,
    ];

    /// Its name in answers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::BindAddress => "bind_address",
            Self::BindFamily => "bind_family",
            Self::ConnectLoopback => "connect_loopback",
            Self::ConnectFamily => "connect_family",
            Self::Source => "source",
            Self::Protocol => "protocol",
            Self::IngressAddress => "ingress_address",
            Self::IngressLoopback => "ingress_loopback",
            Self::EgressSource => "egress_source",
            Self::Policy => "policy",
            Self::Metadata => "metadata",
            Self::OtherIdentity => "other_identity",
            Self::HostService => "host_service",
            Self::NoPolicy => "no_policy",
            Self::Listeners => "listeners",
        }
    }
}

/// Traffic of an identity in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = IdentityTraffic)]
pub struct Traffic {
    /// Packets as they are on the wire: a super-packet counts as those that it will be cut into.
    pub packets: u64,
    /// Bytes of IP packets; of a super-packet, with one header. With TCP only, bytes of data, and those sent that were
    /// acknowledged.
    pub bytes: u64,
}

/// What an identity's sockets did since it was added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = IdentityCounters)]
pub struct Counters {
    /// What they sent.
    pub egress: Traffic,
    /// What they received.
    pub ingress: Traffic,
    /// What was refused, by reason; reasons that never occurred are left out.
    #[schema(value_type = BTreeMap<String, u64>)]
    pub refused: BTreeMap<Refusal, u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_has_the_words_of_a_pools() {
        let text = r#"{"clone_to_clone": true, "host_services": ["tcp/53"], "cloud_metadata": true, "group": "a",
            "talks_to": ["b"], "egress": {"default": "deny", "rules": [
                {"action": "allow", "prefixes": ["10.1.0.0/16"], "ports": ["tcp/443"]}]}}"#;
        let policy: IdentityPolicy = serde_json::from_str(text).unwrap();
        let mut of_pool: PolicySpec = serde_json::from_str(text).unwrap();
        of_pool.uplink = UplinkPolicy::Route;
        assert_eq!(policy.as_pool_policy(), of_pool);
    }

    #[test]
    fn keys_without_a_meaning_are_refused() {
        for key in ["uplink = \"deny\"", "route_mark = 7", "connections_max = 1"] {
            let (key, value) = key.split_once(" = ").unwrap();
            let text = format!("{{\"{key}\": {value}}}");
            let error = serde_json::from_str::<IdentityPolicy>(&text).unwrap_err();
            assert!(error.to_string().contains("unknown field"), "{error}");
        }
    }

    #[test]
    fn reasons_are_named_as_they_are_written() {
        for refusal in Refusal::ALL {
            let text = serde_json::to_string(&refusal).unwrap();
            assert_eq!(text, format!("\"{}\"", refusal.name()));
        }
    }
}
