//! The side of the handshake that is asked: `CONNECT PORT\n`, answered by `OK HOSTPORT\n`.
//!
//! Byte-exact: the line may come in any pieces, and what a client writes after it, in the same write even,
//! is left in the socket for the connection. Whoever accepts the socket keeps the deadline
//! ([`crate::limits::Limits::handshake_timeout`]) and the number of those that haven't spoken yet.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::net::{SendFlags, send};
use sandwire_api::vsock::VsockType;

use super::line::{Heard, Line};

/// A client that has connected and not yet said where to.
#[derive(Debug)]
pub struct Handshake {
    socket: OwnedFd,
    kind: VsockType,
    line: Line,
}

/// How far a handshake is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Call again when the socket is readable.
    Pending,
    /// It wants to be connected to this port of the guest.
    Connect {
        /// The guest's port.
        port: u32,
    },
    /// It said something else, or went away.
    Failed,
}

impl Handshake {
    /// For an accepted, non-blocking socket.
    #[must_use]
    pub fn new(socket: OwnedFd, kind: VsockType) -> Self {
        Self {
            socket,
            kind,
            line: Line::default(),
        }
    }

    /// The socket, to wait until it is readable.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads what is there, until the socket has nothing more or the line is whole: right for edge-triggered
    /// waiting.
    pub fn advance(&mut self) -> Asked {
        match self.line.read(&self.socket, self.kind) {
            Ok(Heard::Partly) => Asked::Pending,
            Ok(Heard::Line) => {
                port_of(self.line.text()).map_or(Asked::Failed, |port| Asked::Connect { port })
            }
            Ok(Heard::TooLong | Heard::End) | Err(_) => Asked::Failed,
        }
    }

    /// Stream or messages.
    #[must_use]
    pub fn kind(&self) -> VsockType {
        self.kind
    }

    /// The socket, for the connection.
    #[must_use]
    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }
}

/// Says that the guest has accepted. `port` is the one on the host's side, as with Firecracker.
///
/// # Errors
/// Of `send`. On a socket that was never written to, the line goes as a whole.
pub fn answer(socket: impl AsFd, port: u32) -> io::Result<()> {
    let line = format!("OK {port}\n");
    match send(socket, line.as_bytes(), SendFlags::NOSIGNAL)? {
        written if written == line.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// The port of `CONNECT PORT`. The word may be in small letters and white space may be more than one
/// character, as Firecracker takes it.
fn port_of(line: &[u8]) -> Option<u32> {
    let mut words = line
        .split(u8::is_ascii_whitespace)
        .filter(|word| !word.is_empty());
    let (verb, port) = (words.next()?, words.next()?);
    let digits = port.iter().all(u8::is_ascii_digit);
    if !verb.eq_ignore_ascii_case(b"connect") || !digits || words.next().is_some() {
        return None;
    }
    let port = std::str::from_utf8(port).ok()?.parse().ok()?;
    (port != u32::MAX).then_some(port)
}
