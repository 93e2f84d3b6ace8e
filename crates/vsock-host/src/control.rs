//! How the daemon speaks to the service: one JSON document a line, over a Unix socket in its folder.
//!
//! Each [`Request`] has one [`Response`], in order. A capture hands the descriptor over along with its
//! request (SCM_RIGHTS, on the first byte of the line); the connection then belongs to it: closing it ends the
//! capture, and when the capture ends by itself, a second response says why.
//!
//! The service believes whoever may connect: root, its own user, and the user that started it. Who may name
//! what in a policy is for the daemon to decide.

pub mod client;
pub mod server;

use std::path::{Path, PathBuf};

use sandwire_api::vsock::{
    DEFAULT_GUEST_CID, VsockConnection, VsockKind, VsockPolicy, VsockTraffic,
};
use serde::{Deserialize, Serialize};

pub use self::client::{Capture, Client, ClientError};
use crate::{address::VmKey, limits::Limits};

/// Name of the control socket in the service's folder.
pub const CONTROL_SOCKET: &str = "control.sock";
/// Name of the vhost-user socket in a guest's folder.
pub const VHOST_SOCKET: &str = "vhost.sock";
/// Name of the Unix socket for streams in a guest's folder.
pub const STREAM_SOCKET: &str = "vsock.sock";
/// Name of the Unix socket for messages in a guest's folder.
pub const SEQPACKET_SOCKET: &str = "vsock.sock_seqpacket";
/// Longest request in bytes: the largest policy fits several times.
pub const REQUEST_MAX: usize = 1024 * 1024;

/// A guest, as the service is told of it, and as it keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Which.
    pub key: VmKey,
    /// What owns its device.
    #[serde(default)]
    pub kind: VsockKind,
    /// The folder of its sockets, absolute. It exists, belongs to the lease's owner, and its group is the
    /// service's.
    pub folder: PathBuf,
    /// Its CID.
    #[serde(default = "default_cid")]
    pub cid: u32,
    /// CID by which siblings may call it.
    #[serde(default)]
    pub virtual_cid: Option<u32>,
    /// What it may reach.
    #[serde(default)]
    pub policy: VsockPolicy,
    /// What bounds it.
    #[serde(default)]
    pub limits: Limits,
}

fn default_cid() -> u32 {
    DEFAULT_GUEST_CID
}

impl VmSpec {
    /// Its vhost-user socket.
    #[must_use]
    pub fn vhost_socket(&self) -> PathBuf {
        self.folder.join(VHOST_SOCKET)
    }

    /// Its Unix socket for streams.
    #[must_use]
    pub fn stream_socket(&self) -> PathBuf {
        self.folder.join(STREAM_SOCKET)
    }

    /// Its Unix socket for messages.
    #[must_use]
    pub fn seqpacket_socket(&self) -> PathBuf {
        self.folder.join(SEQPACKET_SOCKET)
    }
}

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Who are you?
    Hello,
    /// Serve a guest.
    AddVm {
        /// Which, and how.
        vm: VmSpec,
    },
    /// Serve it no more; also right for one that isn't served.
    RemoveVm {
        /// Which.
        key: VmKey,
    },
    /// Replace what it may reach; connections that are no longer allowed are reset.
    SetPolicy {
        /// Which.
        key: VmKey,
        /// What it may reach from now on.
        policy: VsockPolicy,
    },
    /// All guests.
    ListVms,
    /// All connections of one guest or of all.
    ListConnections {
        /// Which.
        #[serde(default)]
        key: Option<VmKey>,
    },
    /// The counters of one guest or of all.
    Traffic {
        /// Which.
        #[serde(default)]
        key: Option<VmKey>,
    },
    /// Record a guest's packets into the descriptor that comes along.
    Capture {
        /// Which.
        key: VmKey,
        /// Bytes of payload kept of each packet; the whole packet without.
        #[serde(default)]
        snap_length: Option<u32>,
    },
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub enum Response {
    /// To [`Request::Hello`].
    Hello {
        /// Version of the service.
        version: String,
        /// Its process.
        pid: u32,
        /// Threads that serve vhost-user guests.
        threads: usize,
    },
    /// It is done.
    Done,
    /// To [`Request::ListVms`].
    Vms {
        /// In the order of their keys.
        vms: Vec<VmSpec>,
    },
    /// To [`Request::ListConnections`].
    Connections {
        /// In the order of leases, ports and age.
        connections: Vec<VsockConnection>,
    },
    /// To [`Request::Traffic`].
    Traffic {
        /// In the order of their keys.
        vms: Vec<VmTraffic>,
    },
    /// The capture has begun.
    CaptureStarted,
    /// It has ended by itself.
    CaptureEnded {
        /// Packets recorded.
        recorded: u64,
        /// Packets dropped, as writing was too slow.
        dropped: u64,
        /// Why.
        reason: String,
    },
    /// Nothing was changed.
    Refused {
        /// Whose fault it is.
        code: RefusalCode,
        /// What is wrong, for people.
        message: String,
    },
}

/// Counters of one guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmTraffic {
    /// Which.
    pub key: VmKey,
    /// Its counters.
    pub traffic: VsockTraffic,
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalCode {
    /// It can't be meant: not JSON, unknown fields, a policy that can't be carried out, a reserved CID.
    Invalid,
    /// Somebody has it already: a CID, a path, the name of a guest.
    InUse,
    /// There is no such guest.
    NotFound,
    /// The kernel or the disk refused.
    Failed,
}

/// The control socket of the service in that folder.
#[must_use]
pub fn control_socket(folder: &Path) -> PathBuf {
    folder.join(CONTROL_SOCKET)
}
