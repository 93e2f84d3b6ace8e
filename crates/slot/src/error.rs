//! What can go wrong between a request, a pool and the kernel.

use std::{
    error::Error,
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use sandwire_api::{error::ErrorCode, name::Name, slot::MacAddress};
use sandwire_datapath::policy::PolicyError;

use crate::channel::{ChannelError, checks::RuleError};

/// Why settings can't become a [`crate::plan::Plan`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Settings that don't go together.
    #[error("{setting} = {value} {reason}")]
    Unsupported {
        /// Setting, as written in the configuration: `kind`.
        setting: &'static str,
        /// What was asked for.
        value: String,
        /// What it needs, and why.
        reason: &'static str,
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
    /// Guests have a family's address, which is so by default, and there is no prefix for their clone addresses.
    #[error(
        "{guest} is set, as it is unless said otherwise, but {prefix} is not: set {prefix}, or {guest} = \"\" for guests \
         without that family"
    )]
    NoPrefix {
        /// Setting of the guests.
        guest: &'static str,
        /// Setting that it needs.
        prefix: &'static str,
    },
    /// Guests without any address.
    #[error("the guests have neither IPv4 nor IPv6: set guest.ipv4 or guest.ipv6")]
    NoAddresses,
    /// Containers without any address.
    #[error("the containers have neither IPv4 nor IPv6: set addresses.ipv4 or addresses.ipv6")]
    NoPrefixes,
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
    /// A policy names more groups than one may.
    #[error(
        "policy.talks_to names {groups} groups, and may name {most}: have those sandboxes that may all talk to each \
         other share a group, with clone_to_clone"
    )]
    Groups {
        /// How many it names.
        groups: usize,
        /// How many it may.
        most: usize,
    },
    /// A policy names a group twice.
    #[error("policy.talks_to names group '{group}' twice: leave one of them out")]
    SameGroup {
        /// The group.
        group: Name,
    },
    /// What the guests may reach by vsock can't be so.
    #[error("vsock: {0}")]
    Vsock(#[from] RuleError),
    /// The paths of the channels' sockets would be too long.
    #[error(
        "the paths of its vsock sockets would be {excess} bytes too long (of 107): give the pool a shorter \
         name, or set a shorter `folder` in the section [vsock] of the configuration"
    )]
    ChannelPath {
        /// How many bytes too long.
        excess: usize,
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
    /// The kernel makes no netkit pairs.
    #[error("this kernel makes no netkit pairs (Linux 6.12 with CONFIG_NETKIT does): {reason}")]
    NoNetkit {
        /// What it says when one is tried.
        reason: String,
    },
    /// The policy is more than the data path holds.
    #[error("policy: {0}")]
    Policy(#[from] PolicyError),
    /// eBPF is missing, full, or failed.
    #[error("eBPF data path: {0}")]
    Datapath(#[from] sandwire_datapath::Error),
    /// Several operations of a clean-up failed; each is named.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<NetworkError>),
}

impl From<sandwire_kernel_net::Error> for NetworkError {
    fn from(error: sandwire_kernel_net::Error) -> Self {
        let (operation, object) = error.subject();
        Self::Kernel {
            operation,
            object: object.to_owned(),
            source: Box::new(error.into_cause()),
        }
    }
}

impl NetworkError {
    /// A failure of which only the text is left, because several objects share it.
    pub(crate) fn reason(operation: &'static str, object: impl Into<String>, text: &str) -> Self {
        Self::Kernel {
            operation,
            object: object.into(),
            source: text.into(),
        }
    }
}

/// Why the state folder or its journal can't be used. A failed write changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Another daemon works in the folder.
    #[error(
        "state folder {} is in use by another daemon{}: stop it, or set another state_dir",
        .folder.display(), .pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
    )]
    Locked {
        /// The folder.
        folder: PathBuf,
        /// The other daemon's process number, if it could be read.
        pid: Option<u32>,
    },
    /// The folder can't be made or written.
    #[error("cannot use state folder {}: {source}", .folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The kernel's reason.
        source: std::io::Error,
    },
    /// The journal can't be opened, though it may be sound.
    #[error("cannot open journal {}: {source}", .path.display())]
    Open {
        /// The journal's file.
        path: PathBuf,
        /// SQLite's reason.
        source: rusqlite::Error,
    },
    /// The journal is not readable any more. Its leases may still run, so that nothing is decided
    /// without the operator.
    #[error(
        "journal {path} is damaged: {reason}. Running sandboxes keep their network. To start anew, \
         which ends all leases: stop the sandboxes, run 'sandwire cleanup', delete {path}",
        path = .path.display()
    )]
    Damaged {
        /// The journal's file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The journal belongs to another instance.
    #[error(
        "journal {} belongs to instance '{found}', not to '{ours}': set another state_dir",
        .path.display()
    )]
    ForeignInstance {
        /// The journal's file.
        path: PathBuf,
        /// Whose it is.
        found: String,
        /// Who wants it.
        ours: Name,
    },
    /// The journal was written by another version.
    #[error(
        "journal {path} has schema {found}, this version has schema {ours}: release all leases with \
         the version that wrote it, then delete {path}",
        path = .path.display()
    )]
    ForeignVersion {
        /// The journal's file.
        path: PathBuf,
        /// Its schema.
        found: String,
        /// The schema of this version.
        ours: &'static str,
    },
    /// The journal is sound, and says what this version doesn't know.
    #[error(
        "journal {path} was written by another version, of which this one doesn't know everything: {reason}. Running \
         sandboxes keep their network. Start the version that wrote it; to go on with this one, release all leases and \
         delete the pools with that first",
        path = .path.display()
    )]
    ForeignWords {
        /// The journal's file.
        path: PathBuf,
        /// What isn't known.
        reason: String,
    },
    /// A change could not be written, because the disk is full for example.
    #[error("cannot {operation} in journal {}: {source}", .path.display())]
    Write {
        /// What was tried.
        operation: &'static str,
        /// The journal's file.
        path: PathBuf,
        /// SQLite's reason.
        source: rusqlite::Error,
    },
}

/// Why a request was not done.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The pool's settings can't work.
    #[error("pool '{pool}': {source}")]
    Plan {
        /// The pool.
        pool: Name,
        /// Which setting, and why.
        source: PlanError,
    },
    /// A value of the request is impossible.
    #[error("{field} = {value}: {reason}")]
    Invalid {
        /// Field of the request.
        field: &'static str,
        /// Its value.
        value: String,
        /// Why not.
        reason: String,
    },
    /// The caller may not do that.
    #[error("uid {uid} may not {operation} {object}")]
    Forbidden {
        /// Who asked.
        uid: u32,
        /// What for: `acquire from`.
        operation: &'static str,
        /// Kind and name: `pool 'web'`.
        object: String,
    },
    /// The caller may not have sandboxes join a group whose members were not asked.
    #[error(
        "uid {uid} may not have sandboxes of pool '{pool}' join group '{group}': \
         only root may; the pool's own is group = \"{own}\""
    )]
    ForbiddenGroup {
        /// Who asked.
        uid: u32,
        /// Whose sandboxes they are.
        pool: Name,
        /// The group that was asked for.
        group: Name,
        /// The group that the pool is in.
        own: Name,
    },
    /// There is no such object for this caller.
    #[error("there is no {object}")]
    NotFound {
        /// Kind and name: `lease 'a7' of uid 1000`.
        object: String,
    },
    /// The name, address or port is taken, or the object is in a state that forbids it.
    #[error("cannot {operation} {object}: {reason}")]
    Conflict {
        /// What was asked.
        operation: &'static str,
        /// Kind and name.
        object: String,
        /// What stands against it, and what to do.
        reason: String,
    },
    /// No slot is ready right now.
    #[error("pool '{pool}' has no ready slot right now ({building} being built){hint}")]
    PoolEmpty {
        /// The pool.
        pool: Name,
        /// How many slots are being built.
        building: u32,
        /// Why, if building fails or nothing is to be built.
        hint: String,
    },
    /// All numbers are leased.
    #[error(
        "pool '{pool}' has all of its {slots_max} slots leased: release some, or enlarge its prefix"
    )]
    PoolExhausted {
        /// The pool.
        pool: Name,
        /// How many there are.
        slots_max: u32,
    },
    /// The kernel refused or failed.
    #[error("cannot {operation} {object}: {source}")]
    Network {
        /// What was tried.
        operation: &'static str,
        /// Kind and name.
        object: String,
        /// The kernel's reason.
        source: NetworkError,
    },
    /// What is asked of a vsock channel can't be.
    #[error("vsock: {0}")]
    Vsock(#[from] RuleError),
    /// A lease's vsock channel can't be had, changed or asked for.
    #[error("cannot {operation} {object}: {source}")]
    Channel {
        /// What was tried: `open the vsock channel of`.
        operation: &'static str,
        /// Kind and name: `lease 'a7'`.
        object: String,
        /// Why.
        source: ChannelError,
    },
    /// The journal could not be read or written.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A file of the kernel could not be read, or a thread not started.
    #[error("cannot {operation} {}: {source}", .path.display())]
    System {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's reason.
        source: std::io::Error,
    },
    /// What was asked for takes longer than the daemon waits; it goes on in the background.
    #[error("{object} takes longer than expected: {state}")]
    Late {
        /// Kind and name.
        object: String,
        /// What is still to do, and what to do about it.
        state: String,
    },
    /// The daemon is stopping.
    #[error("the daemon is stopping: try again when it is back")]
    Stopping,
    /// Whoever asked is not there any more.
    #[error("the caller has gone before it could be told of a lease, so there is none")]
    CallerGone,
}

impl ServiceError {
    /// The word that the API answers.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Plan { source, .. } => source.code(),
            Self::Invalid { .. } | Self::Vsock(_) => ErrorCode::InvalidRequest,
            Self::Forbidden { .. } | Self::ForbiddenGroup { .. } => ErrorCode::Forbidden,
            Self::NotFound { .. } => ErrorCode::NotFound,
            // A full map is no fault: others have all of the room that the settings leave.
            Self::Network {
                source:
                    NetworkError::Conflict { .. }
                    | NetworkError::Datapath(sandwire_datapath::Error::Full { .. }),
                ..
            }
            | Self::Conflict { .. } => ErrorCode::Conflict,
            Self::Network {
                source: NetworkError::Policy(_),
                ..
            } => ErrorCode::InvalidRequest,
            Self::Network {
                source:
                    NetworkError::Datapath(
                        sandwire_datapath::Error::Unsupported { .. }
                        | sandwire_datapath::Error::NoBpffs { .. },
                    ),
                ..
            } => ErrorCode::Unsupported,
            Self::Channel { source, .. } => source.code(),
            Self::PoolEmpty { .. } => ErrorCode::PoolEmpty,
            Self::PoolExhausted { .. } => ErrorCode::PoolExhausted,
            Self::Network { .. } | Self::Journal(_) | Self::System { .. } => ErrorCode::Internal,
            Self::Late { .. } | Self::Stopping | Self::CallerGone => ErrorCode::Unavailable,
        }
    }

    pub(crate) fn system(operation: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::System {
            operation,
            path: path.to_owned(),
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_map_is_no_fault_of_the_daemon_s() {
        let full = sandwire_datapath::Error::Full {
            map: "policies",
            entries: 128,
        };
        let error = ServiceError::Network {
            operation: "add the policy of",
            object: "pool 'web'".to_owned(),
            source: full.into(),
        };
        assert_eq!(error.code(), ErrorCode::Conflict);
        assert_eq!(
            error.to_string(),
            "cannot add the policy of pool 'web': eBPF data path: the map policies is full (128 entries): have leases and pools \
             share policies, which are kept once, or raise nics_max, to which this map's size is in proportion, and restart the \
             daemon"
        );
    }
}
