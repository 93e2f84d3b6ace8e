//! A guest without a VM: the driver's side of virtio-vsock on real virtqueues, over vhost-user.
//!
//! Tests use it to say things that no decent guest says, measurements to have a hundred guests in one process.
//! From below: [`memory`] is the guest's RAM (a memfd), [`ring`] one split virtqueue, [`packet`] the header,
//! [`front_end`] what a VMM says to the back end, [`transport`] the three queues with packets in and out, and
//! [`guest`] sockets with credit and states as Linux keeps them. A test that wants to misbehave takes the
//! lowest layer in which its misbehaviour can be said.
//!
//! It shares no code with the back end: what both got wrong in the same way would never be found. It judges
//! whatever the device does: see [`guest::Guest::violations`].

#![forbid(unsafe_code)]

pub mod content;
pub mod front_end;
pub mod guest;
pub mod memory;
pub mod packet;
pub mod ring;
pub mod socket;
pub mod transport;
pub mod wire;

use std::{io, time::Duration};

pub use content::Content;
pub use guest::{Guest, Snapshot};
pub use packet::{Header, Kind, Operation};
pub use socket::Socket;
pub use transport::{ReceiveLayout, Settings, TransmitLayout, Transport};

/// Why a guest couldn't do what it was told.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// Memory, eventfds or the socket of the back end.
    #[error("{operation}: {source}")]
    System {
        /// What was being done.
        operation: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The back end refused a vhost-user message, or hung up.
    #[error("vhost-user, {operation}: {source}")]
    VhostUser {
        /// The message.
        operation: &'static str,
        /// The cause.
        source: vhost::Error,
    },
    /// The back end lacks what the settings insist on.
    #[error("the back end doesn't offer {0}")]
    NotOffered(&'static str),
    /// The back end closed the vhost-user socket.
    #[error("the back end is gone")]
    BackEndGone,
    /// What was waited for didn't happen in time.
    #[error("{operation} took more than {waited:?}")]
    TimedOut {
        /// What was waited for.
        operation: &'static str,
        /// How long.
        waited: Duration,
    },
    /// The peer answered RST, or had done so before.
    #[error("connection reset")]
    Reset,
    /// No such socket, or it can't do that in its state.
    #[error("socket is not connected")]
    NotConnected,
    /// This side has said that it sends no more.
    #[error("socket is shut down for sending")]
    ShutDown,
    /// A message longer than the peer's whole buffer.
    #[error("message of {length} bytes, but the peer's buffer is {buffer}")]
    MessageTooLong {
        /// Bytes of the message.
        length: usize,
        /// What the peer can buffer.
        buffer: u32,
    },
}

impl GuestError {
    pub(crate) fn system(operation: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { operation, source }
    }

    pub(crate) fn vhost(operation: &'static str) -> impl FnOnce(vhost::Error) -> Self {
        move |source| Self::VhostUser { operation, source }
    }
}

/// Result of a guest's call.
pub type Result<T, E = GuestError> = std::result::Result<T, E>;
