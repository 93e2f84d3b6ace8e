//! Host ports that lead to a lease: `host:port → clone:port`.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::name::Name;

/// Transport protocol of a published port.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl std::fmt::Display for Protocol {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// Body of a request to publish a host port to a lease.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PublishPort {
    /// Transport protocol.
    pub protocol: Protocol,
    /// Address of the host that is published. Default: all of the host's addresses, in both families
    /// that the lease has.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub host_address: Option<IpAddr>,
    /// Port on the host.
    pub host_port: u16,
    /// Port of the sandbox.
    pub clone_port: u16,
    /// Interface of the sandbox, from 0. Default: 0.
    #[serde(default)]
    pub nic: u8,
}

/// A host port that leads to a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PublishedPort {
    /// Lease that it leads to.
    pub lease: Name,
    /// Numeric user that owns the lease.
    pub owner_uid: u32,
    /// What was asked for.
    #[serde(flatten)]
    pub port: PublishPort,
}
