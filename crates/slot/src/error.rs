//! What can go wrong between a request, a pool and the kernel.

use std::error::Error;

use ipnet::IpNet;
use sandwire_api::{error::ErrorCode, slot::MacAddress};

/// Why settings can't become a [`crate::plan::Plan`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A later version will have it.
    #[error("{setting} = {value} needs the ebpf data path, which this version does not have")]
    Unsupported {
        /// Setting, as written in the configuration: `kind`.
        setting: &'static str,
        /// What was asked for.
        value: &'static str,
    },
    /// A number outside its range.
    #[error("{setting} = {value} is out of range: it must be {min} to {max}")]
    Range {
        /// Setting, as written in the configuration: `tap.mtu`.
        setting: &'static str,
        /// What was asked for.
        value: u64,
        /// Least value.
        min: u64,
        /// Greatest value.
        max: u64,
    },
    /// The TAP's name is not one.
    #[error("tap.name: '{name}' {reason}")]
    TapName {
        /// What was asked for, or what counting on from it gives.
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// The Ethernet address can't be an interface's own.
    #[error("{setting} = {address} is not a unicast address")]
    NotUnicast {
        /// Setting.
        setting: &'static str,
        /// What was asked for.
        address: MacAddress,
    },
    /// Guest and gateway have the same Ethernet address.
    #[error("guest.mac and guest.gateway_mac are both {address}")]
    SameMac {
        /// The address.
        address: MacAddress,
    },
    /// One address family is set on one side only.
    #[error("{present} is set but {absent} is not: set both, or neither")]
    OneSided {
        /// Setting that is there.
        present: &'static str,
        /// Setting that it needs.
        absent: &'static str,
    },
    /// Guests without any address.
    #[error("the guests have neither IPv4 nor IPv6: set guest.ipv4 or guest.ipv6")]
    NoAddresses,
    /// The prefix has bits set behind its length.
    #[error("{setting} = {prefix} is not a prefix: write {truncated}")]
    HostBits {
        /// Setting.
        setting: &'static str,
        /// What was asked for.
        prefix: IpNet,
        /// What it would be with those bits cleared.
        truncated: IpNet,
    },
    /// The prefix has no room.
    #[error("{setting} = {prefix} is too small: {reason}")]
    TooSmall {
        /// Setting.
        setting: &'static str,
        /// What was asked for.
        prefix: IpNet,
        /// What it must have room for.
        reason: &'static str,
    },
    /// Two address ranges that must be apart.
    #[error("{setting} = {prefix} overlaps {with}, {what}")]
    Overlap {
        /// Setting.
        setting: &'static str,
        /// What was asked for.
        prefix: IpNet,
        /// What it overlaps.
        with: IpNet,
        /// What that is.
        what: &'static str,
    },
    /// An address that can't have its role in the guest's subnet.
    #[error("{setting} = {address} {reason}")]
    GuestAddress {
        /// Setting.
        setting: &'static str,
        /// What was asked for, or what moving up to a further interface gives.
        address: String,
        /// Why not.
        reason: &'static str,
    },
}

impl PlanError {
    /// The word that the API answers.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Unsupported { .. } => ErrorCode::Unsupported,
            _ => ErrorCode::InvalidRequest,
        }
    }
}

/// A kernel operation on a named object that failed.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The kernel refused or failed.
    #[error("cannot {operation} {object}: {source}")]
    Kernel {
        /// What was tried: `create`, `mount`, `write nft table of`.
        operation: &'static str,
        /// Kind and name of the object: `interface sw3f2a01-17`.
        object: String,
        /// The kernel's reason, with its extended-ack text where it gave one.
        source: Box<dyn Error + Send + Sync>,
    },
    /// What was asked contradicts what the host has. Nothing changed.
    #[error("{object} conflicts with {with}: {advice}")]
    Conflict {
        /// What was asked for: `clone prefix 10.64.0.0/16`.
        object: String,
        /// What is there: `route 10.0.0.0/8 dev eth0`.
        with: String,
        /// What to do.
        advice: String,
    },
    /// Several operations of a clean-up failed; each is named.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<NetworkError>),
}
