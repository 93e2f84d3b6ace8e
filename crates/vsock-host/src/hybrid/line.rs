//! One line of the handshake, read so that not a byte after its newline is taken from the socket.

use std::os::fd::AsFd;

use rustix::{
    io::Errno,
    net::{RecvFlags, recv},
};
use sandwire_api::vsock::VsockType;

/// Longest line, with its newline; the same as Firecracker's.
pub const LINE_MAX: usize = 32;

/// A line as far as it has arrived.
#[derive(Clone, Debug, Default)]
pub struct Line {
    bytes: [u8; LINE_MAX],
    length: usize,
}

/// How far a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Not all of it yet; the socket has nothing more.
    Partly,
    /// All of it.
    Line,
    /// More than [`LINE_MAX`] bytes without a newline.
    TooLong,
    /// The other side has ended before the newline.
    End,
}

impl Line {
    /// The line, without its newline.
    #[must_use]
    pub fn text(&self) -> &[u8] {
        let bytes = &self.bytes[..self.length];
        bytes.strip_suffix(b"\n").unwrap_or(bytes)
    }

    /// Reads on. A stream's line ends with a newline, and what follows it stays in the socket. With messages
    /// the line is one message, with or without a newline.
    ///
    /// # Errors
    /// Of `recv`, except that there is nothing now.
    pub fn read(&mut self, socket: impl AsFd, kind: VsockType) -> Result<Heard, Errno> {
        match kind {
            VsockType::Stream => self.read_stream(socket),
            VsockType::Seqpacket => self.read_message(socket),
        }
    }

    fn read_stream(&mut self, socket: impl AsFd) -> Result<Heard, Errno> {
        loop {
            let room = &mut self.bytes[self.length..];
            let peeked = match recv(&socket, &mut *room, RecvFlags::PEEK) {
                Ok((0, _)) => return Ok(Heard::End),
                Ok((peeked, _)) => peeked,
                Err(Errno::AGAIN) => return Ok(Heard::Partly),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error),
            };
            let newline = room[..peeked].iter().position(|byte| *byte == b'\n');
            let wanted = newline.map_or(peeked, |at| at + 1);
            // What was peeked at is there, and nobody else reads from this socket.
            let (taken, _) = recv(&socket, &mut room[..wanted], RecvFlags::empty())?;
            self.length += taken;
            if newline.is_some() && taken == wanted {
                return Ok(Heard::Line);
            }
            if self.length == LINE_MAX {
                return Ok(Heard::TooLong);
            }
        }
    }

    fn read_message(&mut self, socket: impl AsFd) -> Result<Heard, Errno> {
        match recv(&socket, &mut self.bytes, RecvFlags::TRUNC) {
            // An empty message can't be told from the end, and is no handshake either.
            Ok((_, 0)) => Ok(Heard::End),
            Ok((_, whole)) if whole > LINE_MAX => Ok(Heard::TooLong),
            Ok((length, _)) => {
                self.length = length;
                Ok(Heard::Line)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(Heard::Partly),
            Err(error) => Err(error),
        }
    }
}
