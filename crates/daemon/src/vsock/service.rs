//! One service: the connections to it, and what is known of it.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sandwire_api::{
    name::Name,
    vsock::{VsockConnection, VsockPolicy},
};
use sandwire_slot::channel::{Capture, ChannelError};
use sandwire_vsock_host::{
    address::VmKey,
    control::{Client, ClientError, RefusalCode, VmSpec, VmTraffic, control_socket},
};

use super::down;
use crate::config::VsockService;

/// How long an answer may take.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// How long a start waits for the service: longer than a process takes to come up on a busy host.
const UP_WAIT: Duration = Duration::from_secs(5);

/// Device and inode of a socket, and when it was made: some file systems give a number again at once.
type SocketId = (u64, u64, i64, i64);

/// A service for vsock.
#[derive(Debug)]
pub(super) struct Service {
    /// The group of users that it is for; none is everybody else.
    group: Option<Name>,
    uids: Vec<u32>,
    pub(super) folder: PathBuf,
    pub(super) socket: PathBuf,
    pub(super) settings: VsockService,
    /// Over which it has been asked who it is, and hasn't answered, with the socket that it was had by.
    asked: Mutex<Option<(Client, SocketId)>>,
    /// For what changes something.
    orders: Mutex<Option<Client>>,
    /// For what only asks, and may have long answers.
    questions: Mutex<Option<Client>>,
    status: Mutex<Status>,
    /// Told when the status changes, or something doesn't work that should.
    pub(super) changed: Condvar,
    generation: AtomicU64,
}

/// What is known of the process.
#[derive(Debug, Default)]
pub(super) struct Status {
    /// Its number, while it answers.
    pub(super) pid: Option<u32>,
    /// Its user and group, once it has answered.
    runs_as: Option<(u32, u32)>,
    /// Why it doesn't answer.
    reason: String,
    /// Nobody has to watch any more.
    pub(super) stopping: bool,
    /// It should be looked at now.
    pub(super) suspect: bool,
}

impl Service {
    pub(super) fn new(
        group: Option<Name>,
        uids: &[u32],
        folder: &Path,
        settings: &VsockService,
    ) -> Self {
        let reason = "it has not answered yet".to_owned();
        Self {
            group,
            uids: uids.to_vec(),
            folder: folder.to_owned(),
            socket: control_socket(folder),
            settings: settings.clone(),
            asked: Mutex::default(),
            orders: Mutex::default(),
            questions: Mutex::default(),
            status: Mutex::new(Status {
                reason,
                ..Status::default()
            }),
            changed: Condvar::new(),
            generation: AtomicU64::new(0),
        }
    }

    /// Whether a user's channels are carried by it because of its group.
    pub(super) fn has(&self, uid: u32) -> bool {
        self.uids.contains(&uid)
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    pub(super) fn check(&self) -> Result<(), ChannelError> {
        let status = self.status();
        match status.pid {
            Some(_) => Ok(()),
            None => Err(down(&self.socket, &status.reason)),
        }
    }

    pub(super) fn problem(&self) -> Option<(String, String)> {
        let message = match self.check() {
            Err(error) => error.to_string(),
            Ok(()) => self.other_user()?,
        };
        let subject = match &self.group {
            Some(group) => format!("vsock service of group {group}"),
            None => "vsock service".to_owned(),
        };
        Some((subject, message))
    }

    /// That it runs as another user than the configuration says. Whoever started it said which: we don't, under systemd.
    fn other_user(&self) -> Option<String> {
        let (user, group) = self.settings.user?;
        let (uid, gid) = self.status().runs_as?;
        ((uid, gid) != (user, group)).then(|| {
            format!(
                "it runs as {uid}:{gid}, and the configuration says user = \"{user}:{group}\": under systemd the unit's --user says which, so \
                 change that or the configuration; without systemd end its process, and the daemon starts it anew"
            )
        })
    }

    /// The group that it runs as, which the folders of channels have.
    pub(super) fn gid(&self) -> Result<u32, ChannelError> {
        let status = self.status();
        let runs_as = status.runs_as.or(self.settings.user);
        runs_as
            .map(|(_, gid)| gid)
            .ok_or_else(|| down(&self.socket, &status.reason))
    }

    /// Waits until it answers, for some seconds at most.
    pub(super) fn await_up(&self) {
        let waiting = |status: &mut Status| status.pid.is_none();
        let status = self.status();
        let waited = self.changed.wait_timeout_while(status, UP_WAIT, waiting);
        let (status, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if status.pid.is_none() {
            tracing::error!(socket = %self.socket.display(), reason = status.reason, "the service for vsock doesn't answer");
        }
    }

    /// Asks it who it is, and notes the answer.
    pub(super) fn greet(&self) -> Result<(), ClientError> {
        let greeted = self.ask_who_it_is();
        let mut status = self.status();
        let mut is_new = false;
        match &greeted {
            Ok((version, pid, threads)) => {
                is_new = status.pid != Some(*pid);
                if is_new {
                    tracing::info!(pid, version, threads, folder = %self.folder.display(), "the service for vsock answers");
                    status.runs_as = user_of(*pid);
                    self.generation.fetch_add(1, Ordering::Relaxed);
                }
                status.pid = Some(*pid);
            }
            Err(error) => {
                if status.pid.take().is_some() {
                    tracing::error!(%error, "the service for vsock is gone");
                }
                status.reason = error.to_string();
            }
        }
        drop(status);
        if is_new && let Some(message) = self.other_user() {
            tracing::warn!(folder = %self.folder.display(), "the service for vsock: {message}");
        }
        self.changed.notify_all();
        greeted.map(|_| ())
    }

    /// While it doesn't answer that is over one connection: those that were given up wait to be accepted, until there is room for none
    /// more.
    fn ask_who_it_is(&self) -> Result<(String, u32, usize), ClientError> {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        // Before it is connected to: it may be replaced at once.
        let socket = id_of(&self.socket);
        let mut client = match asked.take() {
            Some((client, had_by)) if Some(had_by) == socket => client,
            _ => Client::connect(&self.socket, ANSWER_MAX)?,
        };
        let answer = client.hello();
        if let (Err(error), Some(socket)) = (&answer, socket)
            && is_late(error)
        {
            *asked = Some((client, socket));
        }
        answer
    }

    /// Notes why it can't be started.
    pub(super) fn cannot_start(&self, error: &io::Error) {
        self.status().reason = format!("it can't be started: {error}");
    }

    /// Adds a channel. One of the same lease, which can only be of an earlier time, makes way for it.
    pub(super) fn add(&self, vm: &VmSpec) -> Result<(), ChannelError> {
        self.call(&self.orders, |client| {
            let in_use = |code| code == RefusalCode::InUse;
            match client.add_vm(vm.clone()) {
                Err(ClientError::Refused { code, .. }) if in_use(code) => {
                    client.remove_vm(vm.key.clone())?;
                    client.add_vm(vm.clone())
                }
                other => other,
            }
        })
    }

    pub(super) fn remove(&self, key: VmKey) -> Result<(), ChannelError> {
        self.call(&self.orders, |client| client.remove_vm(key.clone()))
    }

    pub(super) fn set_policy(&self, key: &VmKey, policy: &VsockPolicy) -> Result<(), ChannelError> {
        self.call(&self.orders, |client| {
            client.set_policy(key.clone(), policy.clone())
        })
    }

    pub(super) fn vms(&self) -> Result<Vec<VmSpec>, ChannelError> {
        self.call(&self.orders, Client::vms)
    }

    pub(super) fn traffic(&self, key: Option<VmKey>) -> Result<Vec<VmTraffic>, ChannelError> {
        self.call(&self.questions, |client| client.traffic(key.clone()))
    }

    pub(super) fn connections(
        &self,
        key: Option<VmKey>,
    ) -> Result<Vec<VsockConnection>, ChannelError> {
        self.call(&self.questions, |client| client.connections(key.clone()))
    }

    pub(super) fn capture(&self, key: VmKey, snap_bytes: u32) -> Result<Capture, ChannelError> {
        self.check()?;
        let (reader, writer) = io::pipe().map_err(|error| down(&self.socket, error))?;
        let mut capture = Client::connect(&self.socket, ANSWER_MAX)
            .and_then(|client| client.capture(key, Some(snap_bytes), &writer))
            .map_err(|error| self.told(error))?;
        Ok(Capture {
            bytes: reader.into(),
            hold: Box::new(move || matches!(capture.wait(ANSWER_MAX), Ok(Some(_)))),
        })
    }

    /// Asks over the connection that is kept, or over a new one if that has broken. While the watch knows it not to answer
    /// nobody waits for it.
    fn call<T>(
        &self,
        kept: &Mutex<Option<Client>>,
        ask: impl Fn(&mut Client) -> Result<T, ClientError>,
    ) -> Result<T, ChannelError> {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        // Who has waited for one that waited in vain does not wait as well.
        self.check()?;
        let old = kept.take();
        let was_kept = old.is_some();
        let mut client = match old {
            Some(client) => client,
            None => self.connect()?,
        };
        let mut answer = ask(&mut client);
        if was_kept && answer.as_ref().is_err_and(has_broken) {
            // What it was asked can be asked again: each order says how things are to be.
            self.generation.fetch_add(1, Ordering::Relaxed);
            client = self.connect()?;
            answer = ask(&mut client);
        }
        if !matches!(&answer, Err(error) if !matches!(error, ClientError::Refused { .. })) {
            *kept = Some(client);
        }
        answer.map_err(|error| self.told(error))
    }

    fn connect(&self) -> Result<Client, ChannelError> {
        Client::connect(&self.socket, ANSWER_MAX).map_err(|error| self.told(error))
    }

    fn told(&self, error: ClientError) -> ChannelError {
        if let ClientError::Refused { message, .. } = error {
            return ChannelError::Refused(message);
        }
        self.status().suspect = true;
        self.changed.notify_all();
        down(&self.socket, error)
    }

    pub(super) fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the other end is gone, as opposed to being slow.
fn has_broken(error: &ClientError) -> bool {
    matches!(error, ClientError::Broken { .. }) && !is_late(error)
}

/// Whether the other end is slow.
fn is_late(error: &ClientError) -> bool {
    let ClientError::Broken { source, .. } = error else {
        return false;
    };
    matches!(
        source.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

/// Which socket is at a path, if there is one.
fn id_of(socket: &Path) -> Option<SocketId> {
    let found = fs::symlink_metadata(socket).ok()?;
    Some((found.dev(), found.ino(), found.mtime(), found.mtime_nsec()))
}

/// The effective user and group of a process.
fn user_of(pid: u32) -> Option<(u32, u32)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let effective = |name| {
        let ids = status.lines().find_map(|line| line.strip_prefix(name))?;
        ids.split_whitespace().nth(1)?.parse().ok()
    };
    Some((effective("Uid:")?, effective("Gid:")?))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Write},
        os::unix::net::{UnixListener, UnixStream},
        thread,
    };

    use sandwire_vsock_host::{control::Response, limits::Limits};

    use super::*;

    #[test]
    fn the_user_of_a_process_is_its_effective_one() {
        assert_eq!(user_of(std::process::id()), Some(own_user()));
        assert_eq!(user_of(u32::MAX), None);
    }

    fn own_user() -> (u32, u32) {
        use rustix::process::{getegid, geteuid};
        (geteuid().as_raw(), getegid().as_raw())
    }

    /// As under systemd, where the unit says it.
    #[test]
    fn a_service_that_runs_as_another_user_than_is_configured_is_a_problem() {
        let folder = tempfile::tempdir().unwrap();
        let (uid, gid) = own_user();
        for (configured, is_problem) in [
            (None, false),
            (Some((uid, gid)), false),
            (Some((uid + 1, gid)), true),
            (Some((uid, gid + 1)), true),
        ] {
            let mut service = service(folder.path());
            service.settings.user = configured;
            let listener = UnixListener::bind(&service.socket).unwrap();
            thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut called, _) = listener.accept().unwrap();
                    called.write_all(&answer(std::process::id())).unwrap();
                    let mut question = String::new();
                    BufReader::new(&called).read_line(&mut question).unwrap();
                });
                service.greet().unwrap();
            });
            fs::remove_file(&service.socket).unwrap();
            let problem = service.problem();
            assert_eq!(problem.is_some(), is_problem, "{configured:?}: {problem:?}");
            if let Some((_, message)) = problem {
                assert!(message.contains(&format!("{uid}:{gid}")), "{message}");
            }
            assert_eq!(service.gid().unwrap(), gid, "the one that it has");
        }
    }

    #[test]
    fn a_service_that_is_not_there_is_down_and_says_where_it_should_be() {
        let folder = tempfile::tempdir().unwrap();
        let service = service(folder.path());
        assert!(service.greet().is_err());
        let error = service.check().unwrap_err().to_string();
        let socket = folder.path().join("control.sock");
        assert!(error.contains(&*socket.to_string_lossy()), "{error}");
        // As if it had answered before.
        service.status().pid = Some(1);
        let removed = service.remove(VmKey {
            tenant: 0,
            lease: "a".parse().unwrap(),
        });
        assert!(matches!(removed, Err(ChannelError::Down { .. })));
        assert!(service.status().suspect, "somebody has to look at it");
        assert!(service.greet().is_err());
        let (subject, _) = service.problem().unwrap();
        assert_eq!(subject, "vsock service");
    }

    #[test]
    fn a_service_that_is_known_not_to_answer_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let service = service(folder.path());
        // It hangs: callers are let in by the kernel.
        let listener = UnixListener::bind(&service.socket).unwrap();
        listener.set_nonblocking(true).unwrap();
        assert!(matches!(service.vms(), Err(ChannelError::Down { .. })));
        let called = listener.accept().map(|_| ()).map_err(|error| error.kind());
        assert_eq!(called, Err(io::ErrorKind::WouldBlock));
    }

    /// Else they fill its backlog, and nobody can connect any more, not even to have it end.
    #[test]
    fn a_service_that_does_not_answer_is_asked_over_one_connection() {
        let folder = tempfile::tempdir().unwrap();
        let service = service(folder.path());
        let greet = || service.greet().map_err(|error| error.to_string());
        let listener = UnixListener::bind(&service.socket).unwrap();
        greet().unwrap_err();
        greet().unwrap_err();
        let (mut called, _) = listener.accept().unwrap();
        listener.set_nonblocking(true).unwrap();
        let again = listener.accept().map(|_| ()).map_err(|error| error.kind());
        assert_eq!(again, Err(io::ErrorKind::WouldBlock));
        called.write_all(&answer(7)).unwrap();
        greet().unwrap();
        assert_eq!(service.status().pid, Some(7));
        greet().unwrap_err();
        // Another one is there, while that still hangs.
        fs::remove_file(&service.socket).unwrap();
        let other = UnixListener::bind(&service.socket).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut called, _) = other.accept().unwrap();
                // It would be gone before the question otherwise.
                let mut question = String::new();
                BufReader::new(&called).read_line(&mut question).unwrap();
                called.write_all(&answer(8)).unwrap();
            });
            let has_answered = (0..30).any(|_| greet().is_ok());
            // Whom nobody has called waits no more.
            drop(UnixStream::connect(&service.socket));
            assert!(has_answered);
        });
        assert_eq!(service.status().pid, Some(8));
    }

    /// Of a service that is that process.
    fn answer(pid: u32) -> Vec<u8> {
        let answer = Response::Hello {
            version: String::new(),
            pid,
            threads: 1,
        };
        let mut line = serde_json::to_vec(&answer).unwrap();
        line.push(b'\n');
        line
    }

    fn service(folder: &Path) -> Service {
        let settings = VsockService {
            threads: 1,
            user: None,
            busy_poll_us: 0,
            limits: Limits::default(),
        };
        Service::new(None, &[], folder, &settings)
    }
}
