//! `sandwire vsock connect`: standard input and output joined to a port of a guest.
//!
//! Each direction ends by itself: the end of standard input is told to the guest, which may go on sending, and
//! the other way round. It is over when both have ended, or the guest has closed.

use std::{
    io::{self, ErrorKind, IoSliceMut, Read, Write},
    os::fd::OwnedFd,
    process::ExitCode,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
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
pub(super) const BUFFER_BYTES: usize = 256 * 1024;

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
    // Not through the standard library's buffers, where messages would be joined, or parted at their last lines.
    join_with(stream, Patient(io::stdin()), &mut Patient(io::stdout()))
}

fn join_with(
    stream: &OwnedFd,
    mut input: impl Read + Send + 'static,
    output: &mut impl Write,
) -> io::Result<()> {
    let ours = stream.try_clone()?;
    let sending = Arc::new(Sending::default());
    let told = Arc::clone(&sending);
    // Not waited for: it may sit in a read of standard input for ever.
    thread::spawn(move || told.ended(send_input(&ours, &mut input), &ours));
    let over =
        receive_output(stream, &sending.was_reset, output).and_then(|()| await_closed(stream));
    match sending.failure().take() {
        Some(error) => Err(error),
        None => over,
    }
}

/// What has become of sending, for who receives.
#[derive(Debug, Default)]
struct Sending {
    /// It was told there that the connection was reset, which is told once.
    was_reset: AtomicBool,
    failure: Mutex<Option<io::Error>>,
}

impl Sending {
    /// What the other direction doesn't see ends that too.
    fn ended(&self, outcome: io::Result<()>, stream: &OwnedFd) {
        match outcome {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                self.was_reset.store(true, Relaxed);
            }
            Err(error) => {
                *self.failure() = Some(error);
                // Fails only if it is over already.
                let _ = shutdown(stream, Shutdown::Both);
            }
        }
    }

    fn failure(&self) -> MutexGuard<'_, Option<io::Error>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The input to the connection, and its end after it.
fn send_input(stream: &OwnedFd, input: &mut impl Read) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let length = input.read(&mut buffer).map_err(|error| {
            // Of whatever kind: it isn't the connection's.
            io::Error::other(format!("cannot read standard input: {error}"))
        })?;
        if length == 0 {
            return Ok(shutdown(stream, Shutdown::Write)?);
        }
        let mut rest = &buffer[..length];
        while !rest.is_empty() {
            match send(stream, rest, SendFlags::NOSIGNAL) {
                Ok(sent) => rest = &rest[sent..],
                Err(Errno::INTR) => {}
                Err(Errno::MSGSIZE) => {
                    let reason = format!(
                        "a message of {length} bytes is longer than a socket takes here: write shorter ones, or raise \
                         net.core.wmem_max"
                    );
                    return Err(io::Error::new(ErrorKind::InvalidInput, reason));
                }
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
    use std::time::Duration;

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

    /// An input that can't be read, as a folder's or a broken disk's.
    struct Broken;

    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(Errno::ISDIR.into())
        }
    }

    /// Joins a connection to an input until the other end, which says nothing and waits for the end, has heard it.
    fn send_only(kind: SocketType, input: impl Read + Send + 'static) -> io::Result<()> {
        const PATIENCE: Duration = Duration::from_secs(10);
        let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.unwrap();
        sockopt::set_socket_send_buffer_size(&ours, BUFFER_BYTES / 4).unwrap();
        sockopt::set_socket_timeout(&theirs, sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
        let other = thread::spawn(move || {
            let mut buffer = vec![0; BUFFER_BYTES];
            while recv(&theirs, &mut buffer[..], RecvFlags::empty())
                .is_ok_and(|(length, _)| length != 0)
            {}
        });
        let joined = join_with(&ours, input, &mut io::sink());
        other.join().unwrap();
        joined
    }

    #[test]
    fn an_input_that_cannot_be_read_is_no_end_in_good_order() {
        for kind in [SocketType::SEQPACKET, SocketType::STREAM] {
            let error = send_only(kind, Broken).unwrap_err();
            assert!(error.to_string().contains("standard input"), "{error}");
        }
    }

    #[test]
    fn a_message_that_cannot_be_sent_is_told_and_ends_the_connection() {
        let long = io::Cursor::new(vec![b'm'; BUFFER_BYTES]);
        let error = send_only(SocketType::SEQPACKET, long.clone()).unwrap_err();
        assert!(error.to_string().contains("262144 bytes"), "{error}");
        send_only(SocketType::STREAM, long).unwrap();
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
