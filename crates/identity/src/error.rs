//! What can go wrong between an identity and the kernel.

use std::{io, net::IpAddr, path::PathBuf};

/// Why something of an identity failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A cgroup that isn't there.
    #[error("{path} is no cgroup: {source}; name a folder below a cgroup2 mount, as /sys/fs/cgroup/NAME", path = .path.display())]
    NoCgroup {
        /// What was named.
        path: PathBuf,
        /// Why it can't be used.
        source: io::Error,
    },
    /// A folder on another file system.
    #[error("{path} is not in a cgroup v2 hierarchy: {found}; name a folder below a cgroup2 mount (findmnt -t cgroup2)", path = .path.display())]
    NotVersion2 {
        /// What was named.
        path: PathBuf,
        /// What it is on.
        found: &'static str,
    },
    /// The root of the hierarchy, in which the host itself is.
    #[error("{path} is the root of the cgroup hierarchy, the host itself: make a cgroup below it", path = .path.display())]
    RootCgroup {
        /// What was named.
        path: PathBuf,
    },
    /// An identity inside another.
    #[error("{path} and {other}, the cgroup of identity {name}, are one inside the other; identities can't be nested", path = .path.display(), other = .other.display())]
    Nested {
        /// What was named.
        path: PathBuf,
        /// Cgroup of the other.
        other: PathBuf,
        /// Name of the other.
        name: String,
    },
    /// What excludes each other.
    #[error(
        "an identity with TCP alone can't make sockets of other protocols: leave one of the two out"
    )]
    TcpOnly,
    /// The cgroup has an identity.
    #[error("cgroup {path} has an identity already, {name}; remove it first", path = .path.display())]
    CgroupTaken {
        /// The cgroup.
        path: PathBuf,
        /// Name of its identity.
        name: String,
    },
    /// The name is in use.
    #[error("there is an identity {name} already, of cgroup {path}; choose another name", path = .path.display())]
    NameTaken {
        /// The name.
        name: String,
        /// Whose it is.
        path: PathBuf,
    },
    /// What was asked for is that of an identity whose cgroup is gone.
    #[error(
        "identity {name} of {path}, a cgroup that is gone, is in the way: sockets of it are still open; end it with \
         them, or at once: sandwire identity remove {name}",
        path = .path.display()
    )]
    Dying {
        /// Its name.
        name: String,
        /// Where its cgroup was.
        path: PathBuf,
    },
    /// The address is another identity's.
    #[error(
        "{address} is an address of identity {name} already; choose another, or remove that identity first"
    )]
    AddressTaken {
        /// The address.
        address: IpAddr,
        /// Whose it is.
        name: String,
    },
    /// The address is on an interface of the host.
    #[error(
        "{address} is an address of the host's interface {interface} already; what the host does there would stop. \
         Choose another, or say --existing (in the configuration: existing = true) if it is meant for this identity"
    )]
    AddressOnHost {
        /// The address.
        address: IpAddr,
        /// Where it is.
        interface: String,
    },
    /// An address that no identity can have.
    #[error("{address} can't be the address of an identity: {reason}")]
    BadAddress {
        /// The address.
        address: IpAddr,
        /// Why not.
        reason: &'static str,
    },
    /// None, or too many.
    #[error(
        "an identity has 1 to {most} addresses, and {count} were given: name each by --address, or by --prefix one to take \
         the first free address of (in the configuration: `addresses`, `prefixes`), {most} at most in all",
        most = crate::ADDRESSES_MAX
    )]
    AddressCount {
        /// How many.
        count: usize,
    },
    /// A path that the record can't hold.
    #[error("the path {path} is longer than {most} bytes; move the cgroup up in its hierarchy", path = .path.display(), most = crate::abi::RECORD_PATH_MAX)]
    LongPath {
        /// The path.
        path: PathBuf,
    },
    /// A path that nobody could write in an answer.
    #[error("the path {path} isn't UTF-8; rename the folder", path = .path.display())]
    PathBytes {
        /// The path.
        path: PathBuf,
    },
    /// No name was given, and the cgroup's own isn't one.
    #[error("{text} is not a name for an identity: {reason}; give one by --name")]
    BadName {
        /// What the cgroup is called.
        text: String,
        /// Why not.
        reason: String,
    },
    /// There is no such interface.
    #[error("there is no interface {name}; see: ip link")]
    NoInterface {
        /// Its name.
        name: String,
    },
    /// Nothing goes by this name.
    #[error("there is no identity {name}; see: sandwire identity list")]
    NoIdentity {
        /// Name or cgroup.
        name: String,
    },
    /// The pins are of another network namespace.
    #[error(
        "the identities in {folder} are those of another network namespace; go there, or use another folder",
        folder = .folder.display()
    )]
    OtherNamespace {
        /// Where the pins are.
        folder: PathBuf,
    },
    /// A policy that the maps can't hold, or that makes no sense.
    #[error(transparent)]
    Policy(#[from] sandwire_datapath::policy::PolicyError),
    /// More groups than there is room for.
    #[error(
        "the policy names {groups} groups in talks_to; at most {most} are possible: let more identities share a group",
        most = crate::abi::TALKS_MAX
    )]
    Talks {
        /// How many.
        groups: usize,
    },
    /// Two groups whose numbers are the same.
    #[error(
        "the groups {group} and {other} can't be told apart in the kernel: choose another name for {group}"
    )]
    GroupClash {
        /// The new one.
        group: String,
        /// The one of another identity.
        other: String,
    },
    /// The policy's entry is gone from the map.
    #[error(
        "identity {name} has no policy, and may reach nothing; set one: sandwire identity policy set {name}"
    )]
    NoPolicy {
        /// Its name.
        name: String,
    },
    /// A stored policy that can't be read.
    #[error(
        "cannot read or write the policy's text: {reason}; set it anew: sandwire identity policy set"
    )]
    PolicyText {
        /// Why not.
        reason: String,
    },
    /// A command of that name runs.
    #[error("there is a cgroup {path} already, of a command that runs; choose another --name", path = .path.display())]
    CgroupInUse {
        /// The cgroup.
        path: PathBuf,
    },
    /// No hierarchy of version 2.
    #[error(
        "no cgroup v2 hierarchy is mounted that this process is in (findmnt -t cgroup2); name a folder of one by --cgroup"
    )]
    NoHierarchy,
    /// No address of a prefix is free.
    #[error("no address of {prefix} is free; remove an identity, or choose a wider prefix")]
    PrefixFull {
        /// The prefix.
        prefix: ipnet::IpNet,
    },
    /// All numbers are in use.
    #[error(
        "there are {0} identities, and no room for more; remove one first: sandwire identity list"
    )]
    Full(usize),
    /// There is no bpffs where pins would live.
    #[error("{folder} is not on a bpffs; mount one: mount -t bpf bpf /sys/fs/bpf", folder = .folder.display())]
    NoBpffs {
        /// Where it should have been.
        folder: PathBuf,
    },
    /// The process has too few rights.
    #[error(
        "cannot {operation}: the kernel refuses ({source}); it takes root, or CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN"
    )]
    Forbidden {
        /// What was tried.
        operation: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A program of somebody else has a hook of the cgroup for itself. Who has too few rights has failed before.
    #[error(
        "cannot attach {program} to cgroup {path}: the kernel refuses ({source}), as it does where somebody else's program on it, or \
         on a cgroup above, shares the hook with nobody: see `bpftool cgroup show {path} effective`, and have that one attached \
         with BPF_F_ALLOW_MULTI",
        path = .path.display()
    )]
    NotShared {
        /// What was to be attached.
        program: String,
        /// Folder of the cgroup.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The programs don't load, or a hook is missing.
    #[error(
        "cannot {operation}: {source}; identities need Linux 6.1 or newer with CONFIG_CGROUP_BPF"
    )]
    Program {
        /// What was tried.
        operation: String,
        /// Why, with what the verifier says.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A map can't be used.
    #[error("cannot {operation} the map {map}: {source}")]
    Map {
        /// What was tried.
        operation: &'static str,
        /// Which.
        map: &'static str,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A system call failed.
    #[error("cannot {operation} {object}: {source}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// On what.
        object: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Netlink refused.
    #[error(transparent)]
    Kernel(#[from] sandwire_kernel_net::Error),
    /// Several steps of a removal failed; the others were done.
    #[error(
        "cannot remove all of identity {name}: {failures}; try again: sandwire identity remove {name}"
    )]
    Remains {
        /// Its name.
        name: String,
        /// What failed, one after the other.
        failures: String,
    },
}

impl Error {
    pub(crate) fn system(
        operation: &'static str,
        object: impl Into<String>,
        source: impl Into<io::Error>,
    ) -> Self {
        Self::System {
            operation,
            object: object.into(),
            source: source.into(),
        }
    }

    /// Whether the request can't be had, and nothing was changed; else something failed that should have worked.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        !matches!(
            self,
            Self::Program { .. }
                | Self::Map { .. }
                | Self::System { .. }
                | Self::Kernel(_)
                | Self::PolicyText { .. }
                | Self::NoPolicy { .. }
                | Self::Remains { .. }
        )
    }
}
