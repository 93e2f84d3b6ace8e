//! `sandwire vsock connect`: standard input and output joined to a port of a guest.
//!
//! Each direction ends by itself: the end of standard input is told to the guest, which may go on sending, and
//! the other way round. It is over when both have ended, or the guest has closed.

use std::{
    io::{self, ErrorKind, IoSliceMut, Read, Write},
    os::fd::OwnedFd,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
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
    let was_reset = Arc::new(AtomicBool::new(false));
    let reset_seen = Arc::clone(&was_reset);
    // Not waited for: it may sit in a read of standard input for ever.
    thread::spawn(move || {
        // The other direction sees what is wrong with the connection, but for a reset that was told here.
        if send_input(&ours).is_err_and(|error| error.kind() == ErrorKind::ConnectionReset) {
            reset_seen.store(true, Relaxed);
        }
    });
    // Not through the standard library's buffer, where a message would be parted at its last line.
    receive_output(stream, &was_reset, &mut Patient(io::stdout()))?;
    await_closed(stream)
}

/// Standard input to the connection, and its end after it.
fn send_input(stream: &OwnedFd) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    // Nor here, where messages would be joined.
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

/// The connection to the output, to its end. A reset is told once: for messages before those that came, so that they are
/// received all the same and the end after them isn't one in good order; by `was_reset`, if sending has met it.
fn receive_output(
    stream: &OwnedFd,
    was_reset: &AtomicBool,
    output: &mut impl Write,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let has_messages = sockopt::socket_type(stream)? == SocketType::SEQPACKET;
    sockopt::set_socket_passcred(stream, has_messages)?;
    loop {
        let received = match has_messages {
            true => receive_whole(stream, &mut buffer),
            false => receive(stream, &mut buffer),
        };
        let length = match received {
            Ok(Some(length)) => length,
            Ok(None) if !was_reset.load(Relaxed) => return Ok(()),
            Err(Errno::INTR) => continue,
            Err(Errno::CONNRESET) if has_messages && !was_reset.swap(true, Relaxed) => continue,
            Ok(None) | Err(Errno::CONNRESET) => {
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

/// The same of a message, for which the buffer is made as long as it is: what doesn't fit would be lost.
fn receive_whole(stream: &OwnedFd, buffer: &mut Vec<u8>) -> Result<Option<usize>, Errno> {
    let flags = RecvFlags::PEEK | RecvFlags::TRUNC;
    let (_, length) = recv(stream, &mut buffer[..1], flags)?;
    if length > buffer.len() {
        buffer.resize(length, 0);
    }
    receive(stream, buffer)
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

    /// The other end closes with a message unread, of which the kernel speaks to whoever asks first.
    #[test]
    fn messages_that_came_before_a_reset_are_written_and_the_reset_is_told() {
        for sending_meets_it in [false, true] {
            let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
            let (ours, theirs) = socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
            send(&ours, b"unread", SendFlags::empty()).unwrap();
            let long = vec![b'm'; BUFFER_BYTES / 2];
            for message in [b"answer, ".as_slice(), &long] {
                send(&theirs, message, SendFlags::empty()).unwrap();
            }
            drop(theirs);
            let was_reset = AtomicBool::new(sending_meets_it);
            if sending_meets_it {
                let sent = send(&ours, b"late", SendFlags::NOSIGNAL);
                assert_eq!(sent, Err(Errno::CONNRESET));
            }
            let mut output = Vec::new();
            let error = receive_output(&ours, &was_reset, &mut output).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            assert!(output == [b"answer, ".as_slice(), &long].concat());
        }
    }

    #[test]
    fn an_end_in_good_order_is_no_error() {
        for kind in [SocketType::SEQPACKET, SocketType::STREAM] {
            let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
            let (ours, theirs) = pair.unwrap();
            send(&theirs, b"answer", SendFlags::empty()).unwrap();
            drop(theirs);
            let mut output = Vec::new();
            receive_output(&ours, &AtomicBool::new(false), &mut output).unwrap();
            assert_eq!(output, b"answer");
        }
    }
}
