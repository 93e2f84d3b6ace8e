//! Why something isn't done to a channel.

use std::{io, path::PathBuf};

use crate::{
    address::VmKey, control::RefusalCode, directory::DirectoryError, hybrid::router::RouterError,
    limits::LimitsError, listener::ListenerError, policy::PolicyError, state::StateError,
    worker::VmError,
};

/// Why something isn't done to a channel. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// A CID or a guest that is taken or not there.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// A policy that can't be carried out.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// Limits that make no sense.
    #[error("limits of vsock channel {vm}: {source}")]
    Limits {
        /// Whose.
        vm: VmKey,
        /// What is wrong.
        source: LimitsError,
    },
    /// A folder that no socket can be in.
    #[error(
        "folder {folder} of vsock channel {vm}: {}",
        if folder.is_absolute() { "its longest socket has a path of more than 107 bytes" } else { "it isn't absolute" }
    )]
    Folder {
        /// Whose.
        vm: VmKey,
        /// The folder.
        folder: PathBuf,
    },
    /// A folder that isn't there, or another in its place.
    #[error(
        "folder {folder} of vsock channel {vm} isn't there, has something mounted over it, or is another lease's by now; the daemon \
         makes it when it has the channel opened"
    )]
    Gone {
        /// Whose.
        vm: VmKey,
        /// The folder.
        folder: PathBuf,
    },
    /// A socket that can't be had.
    #[error("serve vsock channel {vm}: {source}")]
    Listen {
        /// Whose.
        vm: VmKey,
        /// Why.
        source: ListenerError,
    },
    /// The disk is full, or the like.
    #[error("remember vsock channel: {0}")]
    State(#[from] StateError),
    /// A worker refused.
    #[error(transparent)]
    Worker(#[from] VmError),
    /// The router refused.
    #[error(transparent)]
    Router(#[from] RouterError),
    /// It is being captured already.
    #[error("vsock channel {0} is being captured already; end that first")]
    Captured(VmKey),
    /// The descriptor of a capture.
    #[error("capture vsock channel {vm}: the file to write to: {source}")]
    Capture {
        /// Whose.
        vm: VmKey,
        /// What the kernel said.
        source: io::Error,
    },
    /// A thread doesn't answer.
    #[error("a thread of the vsock service doesn't answer; restart it, its channels come back")]
    Silent,
}

impl ChannelError {
    /// Whose fault it is.
    #[must_use]
    pub fn code(&self) -> RefusalCode {
        match self {
            Self::Directory(error) | Self::Router(RouterError::Directory(error)) => match error {
                DirectoryError::ReservedCid { .. } => RefusalCode::Invalid,
                DirectoryError::CidInUse { .. } | DirectoryError::Exists(_) => RefusalCode::InUse,
                DirectoryError::Unknown(_) => RefusalCode::NotFound,
            },
            Self::Policy(_) | Self::Limits { .. } | Self::Folder { .. } | Self::Capture { .. } => {
                RefusalCode::Invalid
            }
            Self::Listen { source, .. } | Self::Router(RouterError::Listen { source, .. }) => {
                match source {
                    ListenerError::InUse(_) | ListenerError::NotASocket(_) => RefusalCode::InUse,
                    ListenerError::TooLong { .. } => RefusalCode::Invalid,
                    ListenerError::Refused { .. } => RefusalCode::Failed,
                }
            }
            Self::Captured(_) => RefusalCode::InUse,
            Self::Gone { .. }
            | Self::State(_)
            | Self::Worker(_)
            | Self::Router(_)
            | Self::Silent => RefusalCode::Failed,
        }
    }
}
