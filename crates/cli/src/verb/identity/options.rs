//! Options of an identity, the same for `identity add` and for `run --no-netns`.

use std::{net::IpAddr, path::PathBuf};

use clap::Args;
use ipnet::IpNet;
use sandwire_api::{identity::IdentityPolicy, name::Name};
use sandwire_identity::{Allowed, FOLDER, NewIdentity};

use crate::{failure::Failure, prefix::prefix, verb::policy::read_policy};

/// What an identity has and may do.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// An address, IPv4 or IPv6; may be repeated. Sockets that choose none get the first of their family.
    #[arg(long = "address", value_name = "ADDRESS")]
    addresses: Vec<IpAddr>,

    /// Take the first free address of this prefix; may be repeated.
    #[arg(long = "prefix", value_name = "PREFIX", value_parser = prefix::<IpNet>("10.77.0.0/24"))]
    prefixes: Vec<IpNet>,

    /// Interface that the addresses are put on [default: lo].
    #[arg(long, value_name = "INTERFACE")]
    interface: Option<String>,

    /// Also take addresses that an interface has already; those stay when the identity goes.
    #[arg(long)]
    existing: bool,

    /// What it may reach: a policy, TOML or JSON; `-` reads standard input [default: all but other identities,
    /// services of the host, and cloud metadata].
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,

    /// Let it make no sockets but TCP's: then nothing is done per packet.
    #[arg(long, conflicts_with = "allow_other_protocols")]
    tcp_only: bool,

    /// Let it make sockets that can't be confined: raw ones, pings, UDP-Lite.
    #[arg(long)]
    allow_other_protocols: bool,

    /// Let everybody on the host reach its loopback.
    #[arg(long)]
    allow_loopback: bool,

    /// Have connections to ports that it doesn't listen to reach services of the host on the wildcard.
    #[arg(long)]
    allow_host_services: bool,
}

/// Where the kernel's objects are pinned.
#[derive(Debug, Args)]
pub(crate) struct FolderArguments {
    /// Folder on a bpffs with what belongs to the identities.
    #[arg(long, value_name = "FOLDER", env = "SANDWIRE_IDENTITY_FOLDER", default_value = FOLDER)]
    pub(crate) identity_folder: PathBuf,
}

impl Options {
    /// Whether none was given.
    pub(crate) fn is_empty(&self) -> bool {
        self.addresses.is_empty()
            && self.prefixes.is_empty()
            && self.interface.is_none()
            && self.policy.is_none()
            && !(self.existing
                || self.tcp_only
                || self.allow_other_protocols
                || self.allow_loopback
                || self.allow_host_services)
    }

    /// The identity of a cgroup.
    pub(crate) fn new_identity(
        &self,
        cgroup: PathBuf,
        name: Option<Name>,
        own_cgroup: bool,
        operation: &str,
    ) -> Result<NewIdentity, Failure> {
        let policy = match &self.policy {
            Some(file) => read_policy(file, operation)?,
            None => IdentityPolicy::default(),
        };
        Ok(NewIdentity {
            cgroup,
            name,
            addresses: self.addresses.clone(),
            prefixes: self.prefixes.clone(),
            interface: self.interface.clone().unwrap_or_else(|| "lo".to_owned()),
            existing: self.existing,
            allowed: Allowed {
                other_protocols: self.allow_other_protocols,
                loopback: self.allow_loopback,
                host_services: self.allow_host_services,
            },
            tcp_only: self.tcp_only,
            policy,
            own_cgroup,
            declared_by: None,
        })
    }
}
