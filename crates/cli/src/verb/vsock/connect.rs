//! `sandwire vsock connect`: standard input and output joined to a port of a guest.
//!
//! Each direction ends by itself: the end of standard input is told to the guest, which may go on sending, and
//! the other way round. It is over when both have ended, or the guest has closed.

use std::{
    io::{self, ErrorKind, IoSliceMut, Read, Write},
    os::fd::OwnedFd,
    process::ExitCode,
    thread,
};

use clap::Args;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendFlags, Shutdown, SocketType, recv,
        recvmsg, send, shutdown, sockopt,
    },
};

use super::{Which, guest};
use crate::{
    Context,
    failure::{Failure, Outcome},
    patient::Patient,
};

/// Bytes moved at a time; the longest message that is sent.
const BUFFER_BYTES: usize = 256 * 1024;

/// Command line of `sandwire vsock connect`.
#[derive(Debug, Args)]
#[command(
    after_help = "For ssh: ProxyCommand sandwire vsock connect %h 22. The channel's socket is used with your own \
    rights. Status 2 if the guest refuses."
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    which: Which,

    /// Port in the guest.
    port: u32,

    /// Messages instead of bytes: each read of standard input is one, each that comes is written at once.
    #[arg(long)]
    seqpacket: bool,
}

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let Arguments {
        which,
        port,
        seqpacket,
    } = arguments;
    let operation = format!("connect to vsock port {port} of lease {}", which.name);
    let channel = guest::channel(context, which, &operation)?;
    let socket = guest::socket_of(&channel, *seqpacket, &operation)?;
    let failed = |error: io::Error| Failure::failed(format!("cannot {operation}: {error}"));
    let stream = guest::dial(&socket, *port, *seqpacket).map_err(failed)?;
    join(&stream).map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}

/// Joins standard input and output to a connection until it is over.
pub(super) fn join(stream: &OwnedFd) -> io::Result<()> {
    let ours = stream.try_clone()?;
    // Not waited for: it may sit in a read of standard input for ever.
    thread::spawn(move || {
        // The other direction sees what is wrong with the connection.
        let _ = send_input(&ours);
    });
    receive_output(stream)?;
    await_closed(stream)
}

/// Standard input to the connection, and its end after it.
fn send_input(stream: &OwnedFd) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    // Not through the standard library's buffer, which would join messages.
    let mut input = Patient(io::stdin());
    loop {
        let length = input.read(&mut buffer).unwrap_or(0);
        if length == 0 {
            return Ok(shutdown(stream, Shutdown::Write)?);
        }
        let mut rest = &buffer[..length];
        while !rest.is_empty() {
            match send(stream, rest, SendFlags::NOSIGNAL) {
                Ok(sent) => rest = &rest[sent..],
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The connection to standard output, to its end.
fn receive_output(stream: &OwnedFd) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    // Nor here, where a message would be parted at its last line.
    let mut output = Patient(io::stdout());
    let has_messages = sockopt::socket_type(stream)? == SocketType::SEQPACKET;
    sockopt::set_socket_passcred(stream, has_messages)?;
    loop {
        if has_messages {
            make_room(stream, &mut buffer);
        }
        let length = match receive(stream, &mut buffer) {
            Ok(None) => return Ok(()),
            Ok(Some(length)) => length,
            Err(Errno::INTR) => continue,
            Err(Errno::CONNRESET) => {
                let reason = "the guest, or the service for vsock, reset the connection";
                return Err(io::Error::new(ErrorKind::ConnectionReset, reason));
            }
            Err(error) => return Err(error.into()),
        };
        match output.write_all(&buffer[..length]) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
            other => other?,
        }
    }
}

/// Receives bytes, or a message; nothing at the end. A message of no bytes isn't the end: it comes with credentials,
/// as each does, and there being no room for those is told.
fn receive(stream: &OwnedFd, buffer: &mut [u8]) -> Result<Option<usize>, Errno> {
    let mut no_room = RecvAncillaryBuffer::default();
    let mut pieces = [IoSliceMut::new(buffer)];
    let received = recvmsg(stream, &mut pieces, &mut no_room, RecvFlags::empty())?;
    let is_message = received.flags.contains(ReturnFlags::CTRUNC);
    Ok((is_message || received.bytes != 0).then_some(received.bytes))
}

/// Makes the buffer as long as the next message: what doesn't fit of it would be lost.
fn make_room(stream: &OwnedFd, buffer: &mut Vec<u8>) {
    let flags = RecvFlags::PEEK | RecvFlags::TRUNC;
    // An error comes again when the message is received.
    if let Ok((_, length)) = recv(stream, &mut buffer[..1], flags)
        && length > buffer.len()
    {
        buffer.resize(length, 0);
    }
}

/// Waits until both directions have ended.
fn await_closed(stream: &OwnedFd) -> io::Result<()> {
    // Whoever reads our output may be gone instead of the guest's end.
    shutdown(stream, Shutdown::Read)?;
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    loop {
        match poll(&mut fds, None) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, socketpair};

    use super::*;

    #[test]
    fn a_message_of_no_bytes_is_not_the_end() {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (ours, theirs) = socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        // Also one that was there before.
        send(&theirs, b"", SendFlags::empty()).unwrap();
        sockopt::set_socket_passcred(&ours, true).unwrap();
        send(&theirs, b"b", SendFlags::empty()).unwrap();
        send(&theirs, b"", SendFlags::empty()).unwrap();
        drop(theirs);
        let mut buffer = [0; 16];
        for expected in [Some(0), Some(1), Some(0), None] {
            assert_eq!(receive(&ours, &mut buffer).unwrap(), expected);
        }
    }
}
