//! The way to a guest: its channel as the daemon knows it, and the handshake on its socket.
//!
//! The socket is used with the caller's own rights; the daemon only says where it is. A byte behind the line
//! that answers the handshake is the guest's already, so nothing is read beyond it.

use std::{
    io::{self, ErrorKind},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    io::retry_on_intr,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect,
        recv, send, socket_with, sockopt,
    },
};
use sandwire_api::vsock::VsockChannel;

use super::{Which, connect::BUFFER_BYTES};
use crate::{
    Context,
    connection::cannot,
    failure::{Failure, Outcome},
};

/// How long who listens may take to let in, and a guest to accept: the service gives up before.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// Longest answer: `OK ` with a port and a newline.
const ANSWER_BYTES_MAX: usize = 32;

/// The channel of a lease.
pub(super) fn channel(
    context: &Context,
    which: &Which,
    operation: &str,
) -> Result<VsockChannel, Failure> {
    let found = context
        .client()
        .vsock(&which.name, which.owner_uid)
        .map_err(cannot(operation))?;
    Ok(found.channel)
}

/// The socket at which a port of the guest is asked for.
pub(super) fn socket_of(
    channel: &VsockChannel,
    seqpacket: bool,
    operation: &str,
) -> Result<PathBuf, Failure> {
    match (&channel.seqpacket_socket, seqpacket) {
        (_, false) => Ok(PathBuf::from(&channel.socket)),
        (Some(socket), true) => Ok(PathBuf::from(socket)),
        (None, true) => Err(Failure::refused(format!(
            "cannot {operation}: a guest whose VMM owns the device (hybrid) has streams only"
        ))),
    }
}

/// Connects to a port of the guest.
///
/// # Errors
/// Says whether the socket or the guest refused.
pub(super) fn dial(socket: &Path, port: u32, seqpacket: bool) -> io::Result<OwnedFd> {
    dial_within(ANSWER_MAX, socket, port, seqpacket)
}

fn dial_within(
    answer_max: Duration,
    socket: &Path,
    port: u32,
    seqpacket: bool,
) -> io::Result<OwnedFd> {
    let kind = match seqpacket {
        true => SocketType::SEQPACKET,
        false => SocketType::STREAM,
    };
    let stream = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    if seqpacket {
        // A message has to fit, and less than that does by default.
        sockopt::set_socket_send_buffer_size(&stream, BUFFER_BYTES)?;
    }
    let address = SocketAddrUnix::new(socket)?;
    // A VMM may stand still with as many callers waiting as it has room for: that is told as having no room.
    sockopt::set_socket_timeout(&stream, sockopt::Timeout::Send, Some(answer_max))?;
    connect(&stream, &address).map_err(|error| refused_at(socket, error.into()))?;
    sockopt::set_socket_timeout(&stream, sockopt::Timeout::Recv, Some(answer_max))?;
    let line = format!("CONNECT {port}\n");
    send(&stream, line.as_bytes(), SendFlags::NOSIGNAL)?;
    let answer = match seqpacket {
        true => read_message(&stream),
        false => read_line(&stream),
    };
    match answer {
        Ok(line) if line.starts_with("OK ") => {}
        Ok(line) if line.is_empty() => {
            let reason =
                format!("the guest refuses: nobody listens at its port {port}, or it isn't up");
            return Err(io::Error::new(ErrorKind::ConnectionRefused, reason));
        }
        Ok(line) => {
            let reason = format!("{} answered {line:?} instead of OK", socket.display());
            return Err(io::Error::new(ErrorKind::InvalidData, reason));
        }
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            let seconds = answer_max.as_secs();
            let reason = format!("the guest has not answered in {seconds} s");
            return Err(io::Error::new(ErrorKind::TimedOut, reason));
        }
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {
            let reason = format!("the guest refuses port {port}");
            return Err(io::Error::new(ErrorKind::ConnectionRefused, reason));
        }
        Err(error) => return Err(error),
    }
    for direction in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
        sockopt::set_socket_timeout(&stream, direction, None)?;
    }
    Ok(stream)
}

fn refused_at(socket: &Path, error: io::Error) -> io::Error {
    let advice = match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
            "; a hybrid VMM makes it when it starts, else the service for vsock does"
        }
        ErrorKind::PermissionDenied => {
            "; the channel's folder belongs to the lease's owner: connect as that user or as root"
        }
        ErrorKind::WouldBlock => "; who listens there lets nobody in: does the VMM stand still?",
        _ => "",
    };
    let reason = format!("{}: {error}{advice}", socket.display());
    io::Error::new(error.kind(), reason)
}

/// Byte by byte: what follows the line is not ours. Empty if the other end closes first.
fn read_line(stream: &OwnedFd) -> io::Result<String> {
    let mut line = Vec::with_capacity(ANSWER_BYTES_MAX);
    loop {
        let mut byte = [0];
        if read(stream, &mut byte)? == 0 {
            line.clear();
            break;
        }
        line.push(byte[0]);
        if byte[0] == b'\n' || line.len() == ANSWER_BYTES_MAX {
            break;
        }
    }
    Ok(String::from_utf8_lossy(&line).into_owned())
}

fn read_message(stream: &OwnedFd) -> io::Result<String> {
    let mut message = [0; ANSWER_BYTES_MAX];
    let length = read(stream, &mut message)?;
    Ok(String::from_utf8_lossy(&message[..length]).into_owned())
}

/// A read with a time limit is interrupted when we are suspended and go on (signal(7)).
fn read(stream: &OwnedFd, bytes: &mut [u8]) -> io::Result<usize> {
    Ok(retry_on_intr(|| recv(stream, &mut *bytes, RecvFlags::empty()))?.0)
}

/// The socket that a guest's connections to a port of its host come to.
pub(super) fn port_socket(channel: &VsockChannel, port: u32) -> PathBuf {
    PathBuf::from(format!("{}_{port}", channel.socket))
}

/// A runtime for verbs that serve several connections at once, and their outcome.
pub(super) fn serve<F: Future<Output = Result<(), Failure>>>(operation: &str, work: F) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::failed(format!("cannot {operation}: {error}")))?;
    runtime.block_on(work)?;
    // A child or a dial that still goes on must not hold up the end.
    runtime.shutdown_background();
    Ok(std::process::ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::unix::net::{UnixListener, UnixStream},
        thread::{self, JoinHandle},
    };

    use super::*;

    /// Somebody who answers one handshake as told.
    fn answering(answer: &'static [u8]) -> (tempfile::TempDir, PathBuf, JoinHandle<String>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vsock.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = [0; 64];
            let length = stream.read(&mut asked).unwrap();
            stream.write_all(answer).unwrap();
            String::from_utf8(asked[..length].to_vec()).unwrap()
        });
        (folder, path, thread)
    }

    #[test]
    fn what_follows_the_answer_is_the_guests() {
        let (_folder, path, thread) = answering(b"OK 1024\nhello");
        let mut stream = UnixStream::from(dial(&path, 52, false).unwrap());
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello");
        assert_eq!(thread.join().unwrap(), "CONNECT 52\n");
    }

    #[test]
    fn a_refusal_and_nonsense_are_told_apart() {
        let (_folder, path, _thread) = answering(b"");
        let error = dial(&path, 52, false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        assert!(error.to_string().contains("port 52"), "{error}");
        let (_folder, path, _thread) = answering(b"SSH-2.0-x\n");
        let error = dial(&path, 52, false).unwrap_err();
        assert!(error.to_string().contains("SSH-2.0"), "{error}");
        let error = dial(Path::new("/nowhere/vsock.sock"), 1, false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn who_lets_nobody_in_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vsock.sock");
        let address = SocketAddrUnix::new(&path).unwrap();
        let socket = |flags| socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let listener = socket(SocketFlags::CLOEXEC).unwrap();
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let waiting = || {
            let caller = socket(SocketFlags::NONBLOCK).unwrap();
            connect(&caller, &address).ok().map(|()| caller)
        };
        let _waiting: Vec<OwnedFd> = std::iter::from_fn(waiting).collect();
        let soon = Duration::from_millis(50);
        let error = dial_within(soon, &path, 52, false).unwrap_err();
        assert!(error.to_string().contains("lets nobody in"), "{error}");
    }
}
