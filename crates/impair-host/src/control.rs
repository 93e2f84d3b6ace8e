//! How the service is spoken to: one JSON document a line, over a Unix socket.
//!
//! Each [`Request`] has one [`Response`], in order. The service believes whoever may connect: root, and its own user.
//! Who may impair what is for whoever asks it to decide.

pub mod client;
pub(crate) mod server;

use std::{
    fmt,
    path::{Path, PathBuf},
};

use sandwire_api::{impairment::Impairment, name::Name};
use serde::{Deserialize, Serialize};

pub use sandwire_api::impairment::{State, Way};

pub use self::client::{Client, ClientError};

/// Folder of the service unless somebody wants it elsewhere.
pub const DEFAULT_FOLDER: &str = "/run/sandwire/impair";
/// Control socket of the service unless somebody wants it elsewhere.
pub const DEFAULT_SOCKET: &str = "/run/sandwire/impair/control.sock";
/// Name of the control socket in the service's folder.
pub const CONTROL_SOCKET: &str = "control.sock";
/// Name of the folder of what the service remembers: a file per target that is impaired, or was when it died.
pub const TARGETS: &str = "targets";
/// Longest request in bytes. Traces are part of an impairment.
pub const REQUEST_MAX: usize = 16 * 1024 * 1024;
/// Control connections at once; further ones wait until one of these ends. Each takes a thread.
pub(crate) const PEERS_MAX: usize = 512;

/// An interface whose packets are diverted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// File of its network namespace, as `/run/netns/NAME` or `/proc/PID/ns/net`; that of the service without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns: Option<PathBuf>,
    /// Its name.
    pub interface: String,
    /// Whose end it is.
    #[serde(default)]
    pub side: Side,
}

impl Target {
    /// Whether both name the same interface, whosever end it is.
    pub(crate) fn is_same_interface(&self, other: &Self) -> bool {
        self.netns == other.netns && self.interface == other.interface
    }
}

/// Whose end of the wire an interface is. Egress and ingress are always as the sandbox sees them.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The sandbox's own interface, as a container's `eth0`: egress is what it sends.
    #[default]
    Sandbox,
    /// The interface that leads to the sandbox, as a slot's TAP or the host's end of a veth: egress is what it receives.
    Host,
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.netns {
            Some(netns) => write!(formatter, "{} in {}", self.interface, netns.display()),
            None => formatter.write_str(&self.interface),
        }
    }
}

/// On whose behalf a target is impaired. Another owner is refused while it is, unless by force.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Owner {
    /// Somebody at the command line.
    User {
        /// Numeric user.
        uid: u32,
    },
    /// A lease of the daemon; it ends with it.
    Lease {
        /// Numeric user that holds the lease.
        uid: u32,
        /// The lease.
        lease: Name,
        /// The daemon's instance: others have leases of the same names. None for the default one, and of earlier versions' daemons.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        instance: Option<Name>,
    },
}

impl Owner {
    /// The user, numerically.
    #[must_use]
    pub fn uid(&self) -> u32 {
        match self {
            Self::User { uid } | Self::Lease { uid, .. } => *uid,
        }
    }

    /// Whether it may change what the other one impairs, as its own: of an interface that an earlier version's daemon has impaired it isn't
    /// known which instance that was.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let without_instance = |owner: &Self| match owner {
            Self::Lease { uid, lease, .. } => Self::Lease {
                uid: *uid,
                lease: lease.clone(),
                instance: None,
            },
            Self::User { .. } => owner.clone(),
        };
        let is_unknown = |owner: &Self| *owner == without_instance(owner);
        self == other
            || (is_unknown(self) || is_unknown(other))
                && without_instance(self) == without_instance(other)
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User { uid } => write!(formatter, "user {uid}"),
            Self::Lease {
                uid,
                lease,
                instance,
            } => {
                write!(formatter, "lease {lease} of user {uid}")?;
                match instance {
                    Some(instance) => write!(formatter, " of instance {instance}"),
                    None => Ok(()),
                }
            }
        }
    }
}

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Who are you?
    Hello,
    /// Impair a target from now on, or change how; what is under way stays so.
    Set {
        /// Which.
        target: Target,
        /// On whose behalf.
        owner: Owner,
        /// How.
        impairment: Box<Impairment>,
        /// Also if it has the machine's default route, or somebody else impairs it.
        #[serde(default)]
        force: bool,
    },
    /// Impair it no more. The answer comes when the packets that were under way have gone, in the order of their
    /// deadlines, and those that came meanwhile behind them. Also right for one that isn't impaired.
    Clear {
        /// Which.
        target: Target,
        /// Packets under way are dropped instead, and counted.
        #[serde(default)]
        flush: bool,
    },
    /// All targets, without the content of traces.
    List {
        /// But with that of this one's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        traces_of: Option<Owner>,
        /// And only this one's, so that no other is looked at. Earlier versions refuse that as invalid.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        only_of: Option<Owner>,
    },
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub enum Response {
    /// To [`Request::Hello`].
    Hello {
        /// Version of the service.
        version: String,
        /// Its process.
        pid: u32,
        /// Its engines.
        threads: usize,
        /// Inode of its network namespace, which a target without one is in. Absent from earlier versions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        netns_inode: Option<u64>,
    },
    /// To [`Request::Set`].
    Done,
    /// To [`Request::Clear`].
    Cleared {
        /// What became of packets under way.
        cleared: Cleared,
    },
    /// To [`Request::List`].
    Targets {
        /// In the order of their names.
        targets: Vec<Status>,
    },
    /// Nothing was changed.
    Refused {
        /// Whose fault it is.
        code: RefusalCode,
        /// What is wrong, for people.
        message: String,
    },
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalCode {
    /// It can't be meant: not JSON, unknown fields, an impairment that can't be carried out, a loopback interface.
    Invalid,
    /// Somebody else diverts it already.
    InUse,
    /// There is no such namespace or interface.
    NotFound,
    /// It would take the machine's own default route.
    DefaultRoute,
    /// There is no room for more targets, or for more who wait.
    Full,
    /// The kernel or the disk refused.
    Failed,
}

/// The end of an impairment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cleared {
    /// Whether it was impaired at all.
    pub was_impaired: bool,
    /// Packets that were under way and have been released, those that came meanwhile not counted.
    pub released: u64,
    /// Packets that were under way and have been dropped.
    pub flushed: u64,
}

/// A target as it is now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Which.
    pub target: Target,
    /// On whose behalf.
    pub owner: Owner,
    /// What becomes of its packets.
    pub state: State,
    /// How it is impaired. The content of traces is there only if it was asked for.
    pub impairment: Impairment,
    /// Number of the interface in its namespace.
    pub ifindex: u32,
    /// Which engine, from 0.
    pub thread: usize,
    /// What leaves the sandbox.
    pub egress: Way,
    /// What comes to the sandbox.
    pub ingress: Way,
}

/// The control socket of the service in that folder.
#[must_use]
pub fn control_socket(folder: &Path) -> PathBuf {
    folder.join(CONTROL_SOCKET)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

    use super::*;

    /// Other programs may speak to the service, so the words stay what they are.
    #[test]
    fn requests_are_read_as_they_are_written() {
        let line = r#"{"request":"set","target":{"netns":"/run/netns/far","interface":"eth0","side":"host"},
            "owner":{"lease":{"uid":7,"lease":"a1"}},"impairment":{"rule":[{"delay":"50ms"}]}}"#;
        let request: Request = serde_json::from_str(line).unwrap();
        let expected = Request::Set {
            target: Target {
                netns: Some(PathBuf::from("/run/netns/far")),
                interface: "eth0".to_owned(),
                side: Side::Host,
            },
            owner: Owner::Lease {
                uid: 7,
                lease: "a1".parse().unwrap(),
                instance: None,
            },
            impairment: Box::new("delay 50ms".parse().unwrap()),
            force: false,
        };
        assert_eq!(request, expected);
        let again = serde_json::to_string(&request).unwrap();
        assert_eq!(serde_json::from_str::<Request>(&again).unwrap(), expected);
    }

    #[test]
    fn leases_of_two_instances_have_two_owners() {
        let owner = |instance: Option<&str>| Owner::Lease {
            uid: 7,
            lease: "a1".parse().unwrap(),
            instance: instance.map(|instance| instance.parse().unwrap()),
        };
        let (default, other) = (owner(None), owner(Some("b")));
        // As earlier versions write and read it.
        let text = r#"{"lease":{"uid":7,"lease":"a1"}}"#;
        assert_eq!(serde_json::to_string(&default).unwrap(), text);
        assert_eq!(serde_json::from_str::<Owner>(text).unwrap(), default);
        let text = serde_json::to_string(&other).unwrap();
        assert_eq!(serde_json::from_str::<Owner>(&text).unwrap(), other);
        assert_eq!(other.to_string(), "lease a1 of user 7 of instance b");
        assert!(other.is_same(&default) && default.is_same(&other));
        assert!(other.is_same(&other) && !other.is_same(&owner(Some("c"))));
        assert!(!default.is_same(&Owner::User { uid: 7 }));
    }

    /// Earlier versions know nothing but this, whichever end they are.
    #[test]
    fn all_targets_are_asked_for_as_ever() {
        let line = r#"{"request":"list"}"#;
        let all = Request::List {
            traces_of: None,
            only_of: None,
        };
        assert_eq!(serde_json::from_str::<Request>(line).unwrap(), all);
        assert_eq!(serde_json::to_string(&all).unwrap(), line);
        let line = r#"{"request":"list","only_of":{"user":{"uid":7}}}"#;
        let own = Request::List {
            traces_of: None,
            only_of: Some(Owner::User { uid: 7 }),
        };
        assert_eq!(serde_json::from_str::<Request>(line).unwrap(), own);
        assert_eq!(serde_json::to_string(&own).unwrap(), line);
    }

    #[test]
    fn what_is_no_request_is_not_taken_for_one() {
        for line in [
            "",
            "{}",
            r#"{"request":"sit"}"#,
            r#"{"request":"clear"}"#,
            r#"{"request":"clear","target":{"interface":"a"},"flash":true}"#,
            r#"{"request":"set","target":{"interface":"a"},"owner":{"user":{"uid":-1}},"impairment":{}}"#,
        ] {
            assert!(serde_json::from_str::<Request>(line).is_err(), "{line}");
        }
    }
}
