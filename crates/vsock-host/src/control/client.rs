//! The daemon's end of a control connection. Blocking, with a time-out for each answer.

use std::{
    io::{self, BufRead, BufReader, IoSlice, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use sandwire_api::vsock::{VsockConnection, VsockPolicy};

use super::{RefusalCode, Request, Response, VmSpec, VmTraffic};
use crate::{address::VmKey, capture::Outcome};

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
    stream: BufReader<UnixStream>,
}

/// A capture that is running; dropping it ends it.
#[derive(Debug)]
pub struct Capture {
    client: Client,
}

impl Client {
    /// Connects to the control socket; each answer may take as long as `timeout`.
    ///
    /// # Errors
    /// When nobody listens there.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let connect = || {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(timeout))?;
            Ok(stream)
        };
        let stream = connect().map_err(|source| ClientError::Connect {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// The service's version, process and number of threads.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn hello(&mut self) -> Result<(String, u32, usize), ClientError> {
        const WHAT: &str = "say who it is";
        match self.ask(WHAT, &Request::Hello)? {
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
            let stream = self.stream.get_ref();
            let written = sendmsg(stream, &pieces, &mut along, SendFlags::NOSIGNAL)?;
            rest = &rest[written..];
        }
        self.stream.get_mut().write_all(rest)
    }

    fn answer(&mut self, operation: &'static str) -> Result<Response, ClientError> {
        let mut line = String::new();
        let length = self
            .stream
            .read_line(&mut line)
            .map_err(|source| broken(operation, source))?;
        if length == 0 {
            return Err(broken(operation, io::ErrorKind::UnexpectedEof.into()));
        }
        match serde_json::from_str(&line) {
            Ok(Response::Refused { code, message }) => Err(ClientError::Refused { code, message }),
            Ok(response) => Ok(response),
            Err(_) => Err(ClientError::Unexpected {
                operation,
                answer: line.chars().take(200).collect(),
            }),
        }
    }
}

impl Capture {
    /// Waits until the capture ends by itself, for `timeout` at most; none if it goes on.
    ///
    /// # Errors
    /// When the service is gone.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<Outcome>, ClientError> {
        const WHAT: &str = "go on capturing";
        let stream = self.client.stream.get_ref();
        stream
            .set_read_timeout(Some(timeout))
            .map_err(|source| broken(WHAT, source))?;
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
            Err(ClientError::Broken { source, .. })
                if source.kind() == io::ErrorKind::WouldBlock =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
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
