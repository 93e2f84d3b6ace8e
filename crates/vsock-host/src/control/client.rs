//! The daemon's end of a control connection. Blocking, with a time-out for the connection and for each answer as a whole.
//!
//! The service may have been taken over by a guest, or hang: it gets nobody to wait longer than that, nor to hold more than
//! [`ANSWER_MAX`].

use std::{
    io::{self, IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, sendmsg, socket_with,
    sockopt::{Timeout, set_socket_timeout},
};
use sandwire_api::vsock::{VsockConnection, VsockPolicy};

use super::{RefusalCode, Request, Response, VmSpec, VmTraffic};
use crate::{address::VmKey, capture::Outcome};

/// Longest answer in bytes: tens of thousands of channels, with their policies.
const ANSWER_MAX: usize = 256 * 1024 * 1024;
/// Bytes read at once.
const READ_BYTES: usize = 64 * 1024;

/// Why there is no answer, or not the one that was hoped for.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody there.
    #[error("connect to the vsock service at {path}: {source}; is it running?")]
    Connect {
        /// The control socket.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The connection broke, or nothing came in time.
    #[error("ask the vsock service to {operation}: {source}")]
    Broken {
        /// What was asked.
        operation: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// Something came that is no answer to that.
    #[error("ask the vsock service to {operation}: it answered {answer}; is it another version?")]
    Unexpected {
        /// What was asked.
        operation: &'static str,
        /// What it said.
        answer: String,
    },
    /// It said no; nothing was changed.
    #[error("{message}")]
    Refused {
        /// Whose fault it is.
        code: RefusalCode,
        /// What is wrong.
        message: String,
    },
}

/// A control connection.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    /// What has been read of answers that nobody has asked for yet.
    incoming: Vec<u8>,
    /// How long an answer may take.
    timeout: Duration,
    /// It has been asked who it is, and has not answered.
    is_asked: bool,
}

/// A capture that is running; dropping it ends it.
#[derive(Debug)]
pub struct Capture {
    client: Client,
}

impl Client {
    /// Connects to the control socket, which may take as long as `timeout`, and each answer too.
    ///
    /// # Errors
    /// When nobody listens there, or who does has left too many others waiting.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let stream = connect_within(path, timeout).map_err(|source| ClientError::Connect {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            stream,
            incoming: Vec::new(),
            timeout,
            is_asked: false,
        })
    }

    /// The service's version, process and number of threads. Where that has timed out it may be asked for again, and nothing else:
    /// the same answer is waited for.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn hello(&mut self) -> Result<(String, u32, usize), ClientError> {
        const WHAT: &str = "say who it is";
        if !self.is_asked {
            self.write(&Request::Hello, None)
                .map_err(|source| broken(WHAT, source))?;
            self.is_asked = true;
        }
        let answer = self.answer(WHAT);
        self.is_asked = matches!(answer, Err(ClientError::Broken { .. }));
        match answer? {
            Response::Hello {
                version,
                pid,
                threads,
            } => Ok((version, pid, threads)),
            other => Err(unexpected(WHAT, &other)),
        }
    }

    /// Has a guest served.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn add_vm(&mut self, vm: VmSpec) -> Result<(), ClientError> {
        self.order("add a channel", &Request::AddVm { vm })
    }

    /// Has a guest served no more.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn remove_vm(&mut self, key: VmKey) -> Result<(), ClientError> {
        self.order("remove a channel", &Request::RemoveVm { key })
    }

    /// Replaces what a guest may reach.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn set_policy(&mut self, key: VmKey, policy: VsockPolicy) -> Result<(), ClientError> {
        self.order("set a policy", &Request::SetPolicy { key, policy })
    }

    /// All guests.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn vms(&mut self) -> Result<Vec<VmSpec>, ClientError> {
        const WHAT: &str = "list its channels";
        match self.ask(WHAT, &Request::ListVms)? {
            Response::Vms { vms } => Ok(vms),
            other => Err(unexpected(WHAT, &other)),
        }
    }

    /// The connections of one guest or of all.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn connections(&mut self, key: Option<VmKey>) -> Result<Vec<VsockConnection>, ClientError> {
        const WHAT: &str = "list connections";
        match self.ask(WHAT, &Request::ListConnections { key })? {
            Response::Connections { connections } => Ok(connections),
            other => Err(unexpected(WHAT, &other)),
        }
    }

    /// The counters of one guest or of all.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn traffic(&mut self, key: Option<VmKey>) -> Result<Vec<VmTraffic>, ClientError> {
        const WHAT: &str = "say what it counted";
        match self.ask(WHAT, &Request::Traffic { key })? {
            Response::Traffic { vms } => Ok(vms),
            other => Err(unexpected(WHAT, &other)),
        }
    }

    /// Begins a capture into `output`: a file, or the writing end of a pipe or socket, which becomes
    /// non-blocking.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn capture(
        mut self,
        key: VmKey,
        snap_length: Option<u32>,
        output: impl AsFd,
    ) -> Result<Capture, ClientError> {
        const WHAT: &str = "capture";
        let request = Request::Capture { key, snap_length };
        self.write(&request, Some(output.as_fd()))
            .map_err(|source| broken(WHAT, source))?;
        match self.answer(WHAT)? {
            Response::CaptureStarted => Ok(Capture { client: self }),
            other => Err(unexpected(WHAT, &other)),
        }
    }

    fn order(&mut self, operation: &'static str, request: &Request) -> Result<(), ClientError> {
        match self.ask(operation, request)? {
            Response::Done => Ok(()),
            other => Err(unexpected(operation, &other)),
        }
    }

    fn ask(&mut self, operation: &'static str, request: &Request) -> Result<Response, ClientError> {
        self.write(request, None)
            .map_err(|source| broken(operation, source))?;
        self.answer(operation)
    }

    fn write(&mut self, request: &Request, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        let mut rest = line.as_slice();
        if let Some(fd) = fd {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut along = SendAncillaryBuffer::new(&mut space);
            let fds = [fd];
            along.push(SendAncillaryMessage::ScmRights(&fds));
            let pieces = [IoSlice::new(rest)];
            let written = sendmsg(&self.stream, &pieces, &mut along, SendFlags::NOSIGNAL)?;
            rest = &rest[written..];
        }
        self.stream.write_all(rest)
    }

    fn answer(&mut self, operation: &'static str) -> Result<Response, ClientError> {
        let until = Instant::now() + self.timeout;
        let line = take_line(&self.stream, &mut self.incoming, until, ANSWER_MAX)
            .map_err(|source| broken(operation, source))?;
        match serde_json::from_slice(&line) {
            Ok(Response::Refused { code, message }) => Err(ClientError::Refused { code, message }),
            Ok(response) => Ok(response),
            Err(_) => Err(ClientError::Unexpected {
                operation,
                answer: String::from_utf8_lossy(&line).chars().take(200).collect(),
            }),
        }
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Capture {
    /// Waits until the capture ends by itself, for `timeout` at most; none if it goes on.
    ///
    /// # Errors
    /// When the service is gone.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<Outcome>, ClientError> {
        const WHAT: &str = "go on capturing";
        self.client.timeout = timeout;
        match self.client.answer(WHAT) {
            Ok(Response::CaptureEnded {
                recorded,
                dropped,
                reason,
            }) => Ok(Some(Outcome {
                recorded,
                dropped,
                reason: Some(reason),
            })),
            Ok(other) => Err(unexpected(WHAT, &other)),
            Err(ClientError::Broken { source, .. }) if source.kind() == io::ErrorKind::TimedOut => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// A socket whose connection, and whose each writing, take no longer than that.
fn connect_within(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Before it is connected: who listens and accepts nobody would have us wait for ever.
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

/// Takes a line, with its end, of what has been read and of what comes until then.
fn take_line(
    mut stream: &UnixStream,
    incoming: &mut Vec<u8>,
    until: Instant,
    bytes_max: usize,
) -> io::Result<Vec<u8>> {
    let mut looked_at = 0;
    loop {
        if let Some(end) = incoming[looked_at..].iter().position(|byte| *byte == b'\n') {
            let rest = incoming.split_off(looked_at + end + 1);
            return Ok(std::mem::replace(incoming, rest));
        }
        looked_at = incoming.len();
        if looked_at > bytes_max {
            let message = format!("an answer of more than {bytes_max} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let mut bytes = [0; READ_BYTES];
        match stream.read(&mut bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => incoming.extend_from_slice(&bytes[..read]),
            Err(error) if is_no_end(&error) => {}
            Err(error) => return Err(error),
        }
    }
}

/// A time-out is told by the clock, which a signal may have been faster than.
fn is_no_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

fn broken(operation: &'static str, source: io::Error) -> ClientError {
    ClientError::Broken { operation, source }
}

fn unexpected(operation: &'static str, answer: &Response) -> ClientError {
    let answer = serde_json::to_string(answer).unwrap_or_default();
    ClientError::Unexpected {
        operation,
        answer: answer.chars().take(200).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use rustix::{io::Errno, net};

    use super::*;

    const SOON: Duration = Duration::from_millis(50);

    #[test]
    fn who_accepts_nobody_has_nobody_wait_for_ever() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let address = SocketAddrUnix::new(&path).expect("an address");
        let socket = |flags| socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let listener = socket(SocketFlags::CLOEXEC).expect("a socket");
        net::bind(&listener, &address).expect("its name");
        net::listen(&listener, 0).expect("a listener");
        let mut waiting = Vec::new();
        loop {
            let caller = socket(SocketFlags::NONBLOCK).expect("a socket");
            match connect(&caller, &address) {
                Ok(()) => waiting.push(caller),
                Err(error) => {
                    assert_eq!(error, Errno::AGAIN);
                    break;
                }
            }
        }
        let error = Client::connect(&path, SOON).expect_err("nobody is let in");
        assert!(matches!(error, ClientError::Connect { .. }), "{error}");
    }

    #[test]
    fn an_answer_that_trickles_has_its_time_as_a_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).expect("a listener");
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut service, _) = listener.accept().expect("a caller");
                // Until the caller has gone.
                while service.write_all(b" ").is_ok() {
                    thread::sleep(SOON / 10);
                }
            });
            let mut client = Client::connect(&path, SOON).expect("a connection");
            let error = client.hello().expect_err("it never says");
            let is_late = |source: &io::Error| source.kind() == io::ErrorKind::TimedOut;
            assert!(
                matches!(&error, ClientError::Broken { source, .. } if is_late(source)),
                "{error}"
            );
        });
    }

    #[test]
    fn an_answer_without_an_end_is_not_kept() {
        let (ours, mut theirs) = UnixStream::pair().expect("two sockets");
        let until = || Instant::now() + Duration::from_secs(60);
        let mut incoming = Vec::new();
        theirs.write_all(b"one\ntwo").expect("writing");
        let mut line = |bytes_max| take_line(&ours, &mut incoming, until(), bytes_max);
        assert_eq!(line(10).expect("a line"), b"one\n");
        theirs.write_all(b"\n").expect("writing");
        assert_eq!(line(10).expect("a line"), b"two\n");
        theirs.write_all(&[b' '; 100]).expect("writing");
        let error = line(10).expect_err("too long");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(theirs);
        let mut nothing = Vec::new();
        let error = take_line(&ours, &mut nothing, until(), 10).expect_err("nobody there");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
