//! The asking end of a control connection. Blocking, with a time-out for each answer.

use std::{
    io::{self, BufRead, BufReader, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    io::{Errno, retry_on_intr},
    net::{
        self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with,
        sockopt::{Timeout, set_socket_timeout},
    },
};
use sandwire_api::impairment::Impairment;

use super::{Cleared, Owner, RefusalCode, Request, Response, Status, Target};
use crate::{error::Error, namespace::Namespace};

/// How long an answer may take, unless packets are waited for.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the end of an impairment may take whose packets are dropped: the kernel takes a while for each, and hundreds may end at once.
const FLUSH_PATIENCE: Duration = Duration::from_secs(300);

/// Why there is no answer, or not the one that was hoped for.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody there.
    #[error("connect to the impairment service at {path}: {source}; is it running?")]
    Connect {
        /// The control socket.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The connection broke, or nothing came in time.
    #[error("ask the impairment service to {operation}: {source}")]
    Broken {
        /// What was asked.
        operation: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// Something came that is no answer to that.
    #[error(
        "ask the impairment service to {operation}: it answered {answer}; is it another version?"
    )]
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

impl ClientError {
    /// Whether the service is there but hasn't answered, or taken the connection, in time.
    #[must_use]
    pub fn is_late(&self) -> bool {
        let (Self::Connect { source, .. } | Self::Broken { source, .. }) = self else {
            return false;
        };
        matches!(
            source.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
        )
    }
}

/// Who the service is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Its engines.
    pub threads: usize,
    /// Inode of its network namespace, which a target without one is in. Earlier versions don't say.
    pub netns_inode: Option<u64>,
}

impl Hello {
    /// Whether a target without a namespace is where it is for the caller, as far as the service says.
    ///
    /// # Errors
    /// The caller's namespace can't be asked for.
    pub fn is_here(&self) -> Result<bool, Error> {
        let own = Namespace::open(None)?.inode;
        Ok(self.netns_inode.is_none_or(|inode| inode == own))
    }
}

/// A control connection.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to the control socket.
    ///
    /// # Errors
    /// When nobody listens there, or who listens takes no connections for 30 s.
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        Self::connect_within(path, PATIENCE)
    }

    pub(crate) fn connect_within(path: &Path, patience: Duration) -> Result<Self, ClientError> {
        let stream = connect(path, patience).map_err(|source| ClientError::Connect {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// Who is it?
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn hello(&mut self) -> Result<Hello, ClientError> {
        const WHAT: &str = "say who it is";
        match self.ask(WHAT, &Request::Hello, Some(PATIENCE))? {
            Response::Hello {
                version,
                pid,
                threads,
                netns_inode,
            } => Ok(Hello {
                version,
                pid,
                threads,
                netns_inode,
            }),
            other => Err(unexpected(WHAT, &other)),
        }
    }

    /// Impairs a target from now on, or changes how.
    ///
    /// # Errors
    /// See [`ClientError`]; refused is what would take the machine's own default route, and what somebody else impairs.
    pub fn set(
        &mut self,
        target: &Target,
        owner: &Owner,
        impairment: &Impairment,
    ) -> Result<(), ClientError> {
        self.set_with(target, owner, impairment, false)
    }

    /// The same whatever it takes, if `force` says so.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn set_with(
        &mut self,
        target: &Target,
        owner: &Owner,
        impairment: &Impairment,
        force: bool,
    ) -> Result<(), ClientError> {
        const WHAT: &str = "impair an interface";
        let request = Request::Set {
            target: target.clone(),
            owner: owner.clone(),
            impairment: Box::new(impairment.clone()),
            force,
        };
        match self.ask(WHAT, &request, Some(PATIENCE))? {
            Response::Done => Ok(()),
            other => Err(unexpected(WHAT, &other)),
        }
    }

    /// Ends an impairment. Without `flush` it waits until the packets that are under way have gone, however long
    /// that takes; with it five minutes at most.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn clear(&mut self, target: &Target, flush: bool) -> Result<Cleared, ClientError> {
        const WHAT: &str = "end an impairment";
        let request = Request::Clear {
            target: target.clone(),
            flush,
        };
        match self.ask(WHAT, &request, flush.then_some(FLUSH_PATIENCE))? {
            Response::Cleared { cleared } => Ok(cleared),
            other => Err(unexpected(WHAT, &other)),
        }
    }

    /// All targets, in the order of their names, without the content of traces.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn list(&mut self) -> Result<Vec<Status>, ClientError> {
        self.list_with(None, None)
    }

    /// The same of this one's alone, which keeps nobody waiting for a look at all others.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn list_of(&mut self, owner: &Owner) -> Result<Vec<Status>, ClientError> {
        self.list_only_of(owner, None)
    }

    /// The same; with the content of their traces.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn list_with_traces_of(&mut self, owner: &Owner) -> Result<Vec<Status>, ClientError> {
        self.list_only_of(owner, Some(owner))
    }

    fn list_only_of(
        &mut self,
        owner: &Owner,
        traces_of: Option<&Owner>,
    ) -> Result<Vec<Status>, ClientError> {
        let mut found = match self.list_with(traces_of, Some(owner)) {
            // A service of an earlier version, which has outlived its daemon, doesn't know what this asks for.
            Err(ClientError::Refused {
                code: RefusalCode::Invalid,
                ..
            }) => self.list_with(traces_of, None)?,
            listed => listed?,
        };
        found.retain(|status| status.owner == *owner);
        Ok(found)
    }

    fn list_with(
        &mut self,
        traces_of: Option<&Owner>,
        only_of: Option<&Owner>,
    ) -> Result<Vec<Status>, ClientError> {
        const WHAT: &str = "list its targets";
        let request = Request::List {
            traces_of: traces_of.cloned(),
            only_of: only_of.cloned(),
        };
        match self.ask(WHAT, &request, Some(PATIENCE))? {
            Response::Targets { targets } => Ok(targets),
            other => Err(unexpected(WHAT, &other)),
        }
    }

    fn ask(
        &mut self,
        operation: &'static str,
        request: &Request,
        patience: Option<Duration>,
    ) -> Result<Response, ClientError> {
        let answer = self.exchange(request, patience).map_err(|source| {
            // What still comes is no answer to the next question, which is refused so.
            let _ = self.stream.get_ref().shutdown(Shutdown::Both);
            ClientError::Broken { operation, source }
        })?;
        match serde_json::from_str(&answer) {
            Ok(Response::Refused { code, message }) => Err(ClientError::Refused { code, message }),
            Ok(response) => Ok(response),
            Err(_) => Err(ClientError::Unexpected {
                operation,
                answer: answer.chars().take(200).collect(),
            }),
        }
    }

    /// The line that comes after a request.
    fn exchange(&mut self, request: &Request, patience: Option<Duration>) -> io::Result<String> {
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        let stream = self.stream.get_mut();
        stream.set_read_timeout(patience)?;
        stream.write_all(&line)?;
        let mut answer = String::new();
        if self.stream.read_line(&mut answer)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(answer)
    }
}

/// A connection that waits so long for whoever has more of them than it accepts, and for each write. Otherwise the kernel has it wait for
/// ever, once so many others wait that were given up meanwhile.
pub(super) fn connect(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
    // With a time-out it isn't begun anew by the kernel after a signal.
    match retry_on_intr(|| net::connect(&socket, &SocketAddrUnix::new(path)?)) {
        Ok(()) => Ok(socket.into()),
        Err(Errno::AGAIN) => {
            let text = "it listens, but takes no connections";
            Err(io::Error::new(io::ErrorKind::TimedOut, text))
        }
        Err(error) => Err(error.into()),
    }
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
    #![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::control::{Side, State, Way};

    /// A client and what it talks to.
    fn connected() -> (Client, UnixStream) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let client = Client::connect(&path).unwrap();
        (client, listener.accept().unwrap().0)
    }

    fn status(uid: u32) -> Status {
        Status {
            target: Target {
                netns: None,
                interface: format!("of{uid}"),
                side: Side::Host,
            },
            owner: Owner::User { uid },
            state: State::Impaired,
            impairment: "delay 1ms".parse().unwrap(),
            ifindex: 1,
            thread: 0,
            egress: Way::default(),
            ingress: Way::default(),
        }
    }

    #[test]
    fn one_owners_targets_are_had_from_a_service_that_can_only_list_all() {
        let (mut client, mut service) = connected();
        let refused = Response::Refused {
            code: RefusalCode::Invalid,
            message: "that is no request: unknown field `only_of`".to_owned(),
        };
        let all = Response::Targets {
            targets: vec![status(7), status(8)],
        };
        // Answers wait for the questions.
        for answer in [refused, all] {
            let mut text = serde_json::to_vec(&answer).unwrap();
            text.push(b'\n');
            service.write_all(&text).unwrap();
        }
        let owner = Owner::User { uid: 7 };
        assert_eq!(client.list_with_traces_of(&owner).unwrap(), [status(7)]);
        drop(client);
        let asked = BufReader::new(service).lines();
        let asked: Vec<Request> = asked
            .map(|line| serde_json::from_str(&line.unwrap()).unwrap())
            .collect();
        let with = |only_of: Option<Owner>| Request::List {
            traces_of: Some(owner.clone()),
            only_of,
        };
        assert_eq!(asked, [with(Some(owner.clone())), with(None)]);
    }

    /// As of a service that was stopped (SIGSTOP), and goes on.
    #[test]
    fn an_answer_that_came_too_late_is_not_taken_for_the_next() {
        let (mut client, mut service) = connected();
        let late = client.ask("wait", &Request::Hello, Some(Duration::from_millis(20)));
        assert!(matches!(late, Err(ClientError::Broken { .. })), "{late:?}");
        assert!(late.unwrap_err().is_late());
        let mut answer = serde_json::to_vec(&Response::Done).unwrap();
        answer.push(b'\n');
        // Fails where nobody hears it any more.
        let _ = service.write_all(&answer);
        let next = client.ask("go on", &Request::Hello, Some(PATIENCE));
        assert!(matches!(next, Err(ClientError::Broken { .. })), "{next:?}");
        assert!(!next.unwrap_err().is_late(), "it is gone");
    }

    /// As of a service that was stopped (SIGSTOP), after so many questions that nobody waits any more for their answers.
    #[test]
    fn who_accepts_no_connection_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let listening = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        net::bind(&listening, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        net::listen(&listening, 0).unwrap();
        let connect = || Client::connect_within(&path, Duration::from_millis(20));
        let waiting: Vec<_> = (0..3).map_while(|_| connect().ok()).collect();
        assert_eq!(waiting.len(), 1, "as many as the queue has room for");
        let refusal = connect().unwrap_err();
        assert!(refusal.is_late());
        let refusal = refusal.to_string();
        assert!(refusal.contains("takes no connections"), "{refusal}");
    }
}
