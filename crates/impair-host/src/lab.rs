//! Labs: a few hosts and the links between them, declared in a file, made of network namespaces and veth pairs.
//!
//! [`Lab::parse`] reads and checks the whole file before anything is made. [`up`] makes the lab, and leaves nothing
//! if a step fails; [`down`] takes it away, whatever of it there is; [`list`] says which there are. The kernel is the
//! only record of that: each namespace has a name with our prefix, and an alias on its loopback interface says whose it
//! is, so nothing that somebody else made is ever touched.

mod address;
mod build;
mod file;
mod remove;

use std::{fmt, io, path::PathBuf};

use crate::control::{Side, Target};
use ipnet::IpNet;
use sandwire_api::{impairment::Impairment, name::Name};
use sandwire_kernel_net::{Error as KernelError, interface::Mac, netns};

pub use self::{
    build::{Step, up},
    remove::{Found, FoundHost, Removed, down, list},
};

/// What the names of all namespaces of labs start with.
pub const PREFIX: &str = "sandwire-lab.";

/// A lab, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lab {
    /// Its name.
    pub name: Name,
    /// Hosts and switches, by name.
    pub hosts: Vec<Host>,
    /// Links in the order of the file.
    pub links: Vec<Link>,
}

/// A host or a switch: a network namespace either way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name in the lab.
    pub name: Name,
    /// Whether it is a switch, which has a bridge between its interfaces and no addresses.
    pub switch: bool,
    /// Whether it passes on packets that aren't for itself.
    pub forward: bool,
    /// Its routes beside those that its addresses bring.
    pub routes: Vec<Route>,
}

/// A route of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Destination; a prefix of length 0 is the default route.
    pub to: IpNet,
    /// The next hop.
    pub via: std::net::IpAddr,
    /// Position of the link that leads there.
    pub link: usize,
    /// Which end of that link the host has.
    pub end: usize,
}

/// A veth pair between two hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its two ends: `ab` is what goes from the first to the second.
    pub ends: [End; 2],
    /// MTU of both.
    pub mtu: u32,
    /// What happens to packets; egress is from the first end to the second.
    pub impairment: Impairment,
}

/// One end of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// Position of the host.
    pub host: usize,
    /// Name of the interface in that host.
    pub interface: String,
    /// Addresses of the interface.
    pub addresses: Vec<IpNet>,
    /// Its Ethernet address.
    pub mac: Mac,
}

impl Lab {
    /// Name of a host's namespace.
    #[must_use]
    pub fn namespace(&self, host: &Host) -> String {
        namespace(&self.name, &host.name)
    }

    /// Whether it needs the service that impairs links.
    #[must_use]
    pub fn is_impaired(&self) -> bool {
        self.links.iter().any(|link| !link.impairment.is_nothing())
    }

    /// Where packets of a link are impaired: at its first end, or, to keep hosts free of what that takes, at the end in a
    /// switch. Egress is from the first end to the second either way.
    fn target(&self, link: &Link) -> Target {
        let [first, second] = &link.ends;
        let is_at_second = self.hosts[second.host].switch && !self.hosts[first.host].switch;
        let (end, side) = if is_at_second {
            (second, Side::Host)
        } else {
            (first, Side::Sandbox)
        };
        Target {
            netns: Some(namespace_path(&self.name, &self.hosts[end.host].name)),
            interface: end.interface.clone(),
            side,
        }
    }
}

/// Name of the namespace of a lab's host.
#[must_use]
pub fn namespace(lab: &Name, host: &Name) -> String {
    format!("{PREFIX}{lab}.{host}")
}

/// Path of the namespace of a lab's host.
#[must_use]
pub fn namespace_path(lab: &Name, host: &Name) -> PathBuf {
    netns::path_of(&namespace(lab, host))
}

/// What the loopback interface of a host's namespace bears, so that we know it as ours.
fn alias(lab: &Name, host: &Name) -> String {
    format!("sandwire lab {lab} host {host}")
}

/// What both ends of a lab's links bear.
fn link_alias(lab: &Name) -> String {
    format!("sandwire lab {lab}")
}

/// Why a lab can't be made or taken away.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The file can't be read.
    #[error("cannot read lab {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The file says something that is unknown or impossible.
    #[error("{}:{position}: {reason}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Where in it.
        position: Position,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The lab is up.
    #[error("cannot make lab {lab}: it is up already; take it down first: sandwire lab down {lab}")]
    IsUp {
        /// Which.
        lab: Name,
    },
    /// A namespace that is not of a lab has the name that a host would get.
    #[error(
        "cannot make lab {lab}: there is a network namespace {namespace} that no lab has made; give the lab another \
         name, or delete it: ip netns delete {namespace}"
    )]
    Taken {
        /// Which.
        lab: Name,
        /// The namespace.
        namespace: String,
    },
    /// There is no such lab.
    #[error("there is no lab {lab}; those that are up are shown by: sandwire lab list")]
    Missing {
        /// Which.
        lab: Name,
    },
    /// Links are to be impaired, and nobody does it.
    #[error(
        "cannot make lab {lab}: its links are impaired, and no impairment service listens; start one: sandwire impair serve"
    )]
    NoService {
        /// Which.
        lab: Name,
    },
    /// A step failed, and what was made before was taken away again.
    #[error(
        "cannot make lab {lab}: {step}: {reason}; what was made has been taken away{}",
        left_text(left)
    )]
    Step {
        /// Which.
        lab: Name,
        /// What was tried.
        step: Box<Step>,
        /// Why not.
        reason: String,
        /// What could not be taken away again.
        left: Vec<String>,
    },
    /// The kernel doesn't say what there is.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl LabError {
    /// Whether the request was wrong, so that nothing was tried.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        !matches!(self, Self::Step { .. } | Self::Kernel(_))
    }
}

fn left_text(left: &[String]) -> String {
    if left.is_empty() {
        return String::new();
    }
    format!(", but for {}", left.join("; "))
}

/// A place in a text; both count from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Line.
    pub line: usize,
    /// Character in the line.
    pub column: usize,
}

impl Position {
    /// Where that byte of the text is.
    #[must_use]
    pub fn of(text: &str, byte: usize) -> Self {
        let before = text.get(..byte).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Self {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.line, self.column)
    }
}
