//! The service as a process: from its start to its end.
//!
//! Start: limits and folder, the control socket, then all privileges away, threads, the filter of system
//! calls, and last the guests that are remembered. So no byte of a guest is looked at before everything that
//! can be given up has been. It ends in order upon SIGTERM or SIGINT; after any other end the next start
//! finds the same guests.

pub mod channels;
mod folder;

use std::{
    io, mem,
    num::NonZeroUsize,
    os::fd::{FromRawFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
    thread,
    time::Duration,
};

use rustix::{fs::Mode, process::umask};

use self::channels::Channels;
use crate::{
    capture::Captures,
    control::{control_socket, server::Server},
    descriptors,
    limits::Limits,
    listener::{self, ListenerError},
    privileges::{self, PrivilegeError},
    readiness::{Interest, Poller, Waker},
    seccomp::{self, SeccompError},
    state::{State, StateError},
    worker::WorkerSettings,
};

/// Most threads that serve vhost-user guests where nothing else is asked for.
const THREADS_MAX: usize = 4;
const SIGNAL: u64 = 0;
const CAPTURE_ENDED: u64 = 1;
const FAILED: u64 = 2;
const CONTROL: u64 = 3;

/// What the service is told at its start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where its control socket and its memory are; made if it isn't there.
    pub folder: PathBuf,
    /// Threads that serve vhost-user guests; as many as processors, up to four, without.
    pub threads: Option<usize>,
    /// User and group to become after the start. Without, it stays who it is, with CAP_DAC_OVERRIDE alone where it is root.
    pub user: Option<(u32, u32)>,
    /// How long a worker looks for work before it sleeps.
    pub busy_poll: Duration,
    /// Bytes that all guests may have buffered together.
    pub total_bytes: u64,
    /// Which system calls are refused once everything is open.
    pub seccomp: Seccomp,
}

/// What happens upon a system call that the service has no use for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seccomp {
    /// All are allowed.
    Off,
    /// It fails with EPERM.
    #[default]
    Refuse,
    /// The process is killed.
    Kill,
}

impl Settings {
    /// What is usual, in that folder.
    #[must_use]
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            threads: None,
            user: None,
            busy_poll: Duration::ZERO,
            total_bytes: Limits::default().total_bytes,
            seccomp: Seccomp::default(),
        }
    }
}

/// Why the service doesn't run.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// Its folder can't be had.
    #[error("{operation} {path}: {source}")]
    Folder {
        /// What was tried.
        operation: &'static str,
        /// The folder.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Another service is there, mostly.
    #[error("the vsock service's control socket: {0}")]
    Control(#[from] ListenerError),
    /// It can't become who it should be.
    #[error("give up privileges: {0}")]
    Privileges(#[from] PrivilegeError),
    /// System calls can't be filtered.
    #[error(transparent)]
    Seccomp(#[from] SeccompError),
    /// What it remembers can't be read.
    #[error("the vsock service's memory: {0}")]
    State(#[from] StateError),
    /// No threads or descriptors.
    #[error("{operation}: {source}")]
    Start {
        /// What was tried.
        operation: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// A thread has failed, and with it the channels of its guests.
    #[error(
        "a thread that serves guests has failed; the daemon, or systemd, starts the service anew, and guests connect again"
    )]
    Thread,
}

/// Runs the service in this process until it is told to end by SIGTERM or SIGINT.
///
/// The process becomes the service: its umask, its user, its signals and its system calls are the service's
/// from then on.
///
/// # Errors
/// See [`ServiceError`]; once it is ready, only when a thread has failed.
pub fn run(settings: &Settings) -> Result<(), ServiceError> {
    let descriptors = privileges::raise_descriptor_limit();
    descriptors::set_limit(descriptors);
    // Sockets get exactly the mode that they are given; see `listener`.
    umask(Mode::empty());
    let memory = folder::prepare(&settings.folder, settings.user)?;
    let socket = control_socket(&settings.folder);
    let mut server = Server::listen(&socket, CONTROL)?;
    if let Some((user, group)) = settings.user {
        privileges::become_user(user, group)?;
    }
    privileges::keep_only_access()?;
    privileges::renounce_new_privileges()?;
    let state = State::new(memory);
    let (vms, unreadable) = state.read()?;
    for error in unreadable {
        tracing::error!(%error, "a vsock channel that can't be recalled");
    }
    let start = |operation| move |source| ServiceError::Start { operation, source };
    let signals = end_signals().map_err(start("catch signals"))?;
    let ended = Arc::new(Waker::new().map_err(start("make an eventfd"))?);
    let captures = Captures::spawn(ended.clone()).map_err(start("start the capture thread"))?;
    let threads = settings.threads.unwrap_or_else(usual_threads).max(1);
    let worker = WorkerSettings {
        busy_poll: settings.busy_poll,
    };
    let failed = Arc::new(Waker::new().map_err(start("make an eventfd"))?);
    let total = settings.total_bytes;
    let mut channels = Channels::start(threads, total, &worker, state, captures, &failed)
        .map_err(start("start the worker threads"))?;
    let mut poller = Poller::new().map_err(start("make an epoll instance"))?;
    poller
        .add(&signals, SIGNAL, Interest::READ)
        .and_then(|()| poller.add(&*ended, CAPTURE_ENDED, Interest::READ))
        .and_then(|()| poller.add(&*failed, FAILED, Interest::READ))
        .and_then(|()| server.watch(&poller))
        .map_err(start("watch the control socket"))?;
    seccomp::install(settings.seccomp)?;
    for remembered in vms {
        let key = remembered.vm.key.clone();
        if let Err(error) = channels.restore(remembered) {
            tracing::error!(vm = %key, %error, "a vsock channel doesn't come back");
        }
    }
    tracing::info!(folder = %settings.folder.display(), threads, descriptors, "the vsock service is ready");
    notify(sd_notify::NotifyState::Ready);
    let outcome = serve(&mut poller, &ended, &mut server, &mut channels);
    drop(server);
    // Of a user of its own the next start removes it: the folder is root's.
    if settings.user.is_none()
        && let Err(error) = listener::remove(&socket)
    {
        tracing::warn!(%error, "removing the control socket failed");
    }
    channels.end();
    outcome
}

/// Until a signal says that it is enough.
fn serve(
    poller: &mut Poller,
    ended: &Waker,
    server: &mut Server,
    channels: &mut Channels,
) -> Result<(), ServiceError> {
    loop {
        let ready = poller.wait(server.pause());
        let ready = ready.map_err(|source| ServiceError::Start {
            operation: "wait for the control socket",
            source,
        })?;
        let ready = ready.to_vec();
        for ready in ready {
            match ready.token {
                SIGNAL => {
                    tracing::info!("the vsock service ends");
                    notify(sd_notify::NotifyState::Stopping);
                    return Ok(());
                }
                FAILED => return Err(ServiceError::Thread),
                CAPTURE_ENDED => {
                    ended.clear();
                    server.tell_ended_captures(poller, channels);
                }
                _ => server.ready(ready, poller, channels),
            }
        }
        server.listen_again(poller);
    }
}

fn usual_threads() -> usize {
    let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    processors.min(THREADS_MAX)
}

/// A descriptor that is readable when SIGTERM or SIGINT has come. All threads that start later have both
/// blocked too.
fn end_signals() -> io::Result<OwnedFd> {
    // SAFETY: the set is initialised by `sigemptyset` before anything reads it, and all calls get a pointer
    // to this live variable; `signalfd` gives a new descriptor that nobody else has.
    unsafe {
        let mut set: libc::sigset_t = mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        let blocked = libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        if blocked != 0 {
            return Err(io::Error::from_raw_os_error(blocked));
        }
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Tells systemd, if it asked.
fn notify(state: sd_notify::NotifyState) {
    if let Err(error) = sd_notify::notify(false, &[state]) {
        tracing::warn!(%error, "systemd couldn't be told how the vsock service is");
    }
}
