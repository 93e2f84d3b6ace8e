//! The service as a process: from its start to its end.
//!
//! Start: folder, engines, what an earlier process has left, and last the control socket. Upon SIGTERM or SIGINT it lets
//! the packets of all targets go and takes the diversions away; after any other end its diversions stay, closed or open
//! as was said, and the next start takes them up again.

use std::{
    fs::{DirBuilder, File},
    io,
    os::{fd::AsFd, unix::fs::DirBuilderExt},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::mpsc::{self, RecvTimeoutError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FlockOperation, flock},
    io::Errno,
};
use sandwire_datapath::{divert, features};
use sandwire_engine::PoolLimits;
use sandwire_kernel_net::privileges::{keep_only, raise_descriptor_limit};

use crate::{
    control::{TARGETS, control_socket, server::Server},
    error::Error,
    host::{self, Host, SharedHost},
    privileges,
};

/// How often it is looked whether interfaces are still there.
const LOOK: Duration = Duration::from_millis(500);

/// How often it is looked whether there is room for another control connection, where there was none.
const FULL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 5_000_000,
};

/// What the service is told at its start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where its control socket and its memory are; made if it isn't there.
    pub folder: PathBuf,
    /// Where the pins of diversions are, on a bpffs.
    pub pins: PathBuf,
    /// Engines, each a thread.
    pub threads: usize,
    /// Targets at most.
    pub targets_max: usize,
    /// Packets that all targets of an engine may have under way together.
    pub packets_max: u32,
    /// Bytes of the longest frame.
    pub frame_bytes_max: u16,
    /// How long packets are let go at the end; then they are flushed.
    pub patience: Duration,
}

impl Settings {
    /// What is usual, in that folder.
    #[must_use]
    pub fn new(folder: PathBuf) -> Self {
        let limits = PoolLimits::default();
        Self {
            folder,
            pins: PathBuf::from(divert::FOLDER),
            threads: 1,
            targets_max: 1024,
            packets_max: limits.packets_max,
            frame_bytes_max: limits.frame_bytes_max,
            patience: Duration::from_secs(60),
        }
    }
}

/// Why the service doesn't run.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The kernel or the disk refuses something.
    #[error("{operation}: {source}")]
    Start {
        /// What was tried.
        operation: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Namespaces, programs or engines can't be had.
    #[error(transparent)]
    Host(#[from] Error),
}

/// Runs the service in this process until it is told to end by SIGTERM or SIGINT.
///
/// The process becomes the service: its capabilities and its signals are the service's from then on.
///
/// # Errors
/// See [`ServiceError`]; only before it is ready.
pub fn run(settings: &Settings) -> Result<(), ServiceError> {
    let failed = |operation: &str| {
        let operation = operation.to_owned();
        move |source: io::Error| ServiceError::Start { operation, source }
    };
    let folder = &settings.folder;
    make_folder(folder).map_err(failed(&format!("make the folder {}", folder.display())))?;
    // Until the very end, when the last diversion has been taken away.
    let _lock = lock_folder(folder).map_err(failed(&format!("lock {}", folder.display())))?;
    raise_descriptor_limit(privileges::DESCRIPTORS);
    keep_only(privileges::KEPT).map_err(failed("give up capabilities"))?;
    let signals = end_signals().map_err(|errno| failed("catch signals")(errno.into()))?;
    let host = start_host(settings)?;
    let socket = control_socket(folder);
    let listening = format!("listen at {}", socket.display());
    // Before anything of an earlier process is touched: it may be alive.
    let server = Server::listen(&socket, host.clone()).map_err(failed(&listening))?;
    host.lock().recall()?;
    let looker = Looker::start(host.clone()).map_err(failed("start a thread"))?;
    tracing::info!(folder = %folder.display(), threads = settings.threads, "the impairment service is ready");
    notify(sd_notify::NotifyState::Ready);
    let outcome = serve(&signals, &server);
    tracing::info!("the impairment service ends");
    notify(sd_notify::NotifyState::Stopping);
    let removed = std::fs::remove_file(&socket);
    drop(server);
    drop(looker);
    leave(&signals, &host, settings.patience);
    if let Err(error) = removed {
        tracing::warn!(%error, "removing the control socket failed");
    }
    outcome.map_err(failed("wait for control connections"))
}

fn start_host(settings: &Settings) -> Result<SharedHost, ServiceError> {
    let features = features::probe().map_err(Error::from)?;
    let pins = divert::lasting(&settings.pins);
    if pins != settings.pins {
        tracing::info!(folder = %pins.display(), "what stays in the kernel is in the machine's bpffs, which isn't in this mount namespace");
    }
    let host = Host::start(host::Settings {
        memory: settings.folder.join(TARGETS),
        pins,
        threads: settings.threads,
        targets_max: settings.targets_max,
        limits: PoolLimits {
            packets_max: settings.packets_max,
            frame_bytes_max: settings.frame_bytes_max,
        },
        uses_links: features.tcx,
    })?;
    Ok(SharedHost::new(host))
}

/// Looks from time to time whether interfaces are still there, until it is dropped.
struct Looker {
    enough: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Looker {
    fn start(host: SharedHost) -> io::Result<Self> {
        let (enough, is_enough) = mpsc::channel();
        let look = move || {
            let mut pause = LOOK;
            while is_enough.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                let looked = catch_unwind(AssertUnwindSafe(|| host.look()));
                // Where some are gone others may be, too.
                let goes_on = looked.unwrap_or_else(|_| {
                    tracing::error!("a look at impaired interfaces ended early");
                    false
                });
                pause = if goes_on { Duration::ZERO } else { LOOK };
            }
        };
        let thread = thread::Builder::new().name("look".to_owned()).spawn(look)?;
        Ok(Self {
            enough: Some(enough),
            thread: Some(thread),
        })
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        drop(self.enough.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that looks for interfaces panicked");
        }
    }
}

/// Until a signal says that it is enough.
fn serve(signals: &SignalFd, server: &Server) -> io::Result<()> {
    loop {
        // Who connects to a server that is full waits: nobody tells when it isn't any more.
        let (connections, patience) = match server.has_room() {
            true => (PollFlags::IN, None),
            false => (PollFlags::empty(), Some(&FULL)),
        };
        let mut fds = [
            PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(server.listener().as_fd(), connections),
        ];
        match poll(&mut fds, patience) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if !fds[0].revents().is_empty() {
            let _ = signals.read_signal();
            return Ok(());
        }
        if !fds[1].revents().is_empty() {
            server.accept();
        }
    }
}

/// Lets the packets of all targets go; a second signal, or the end of patience, flushes them.
fn leave(signals: &SignalFd, host: &SharedHost, patience: Duration) {
    let leaving = host.begin_clear_all();
    let count = leaving.len();
    let (left, all_left) = mpsc::channel();
    let other = host.clone();
    let wait = move || {
        other.finish_clear_all(leaving);
        let _ = left.send(());
    };
    let deadline = Instant::now() + patience;
    let waiting = thread::spawn(wait);
    let has_left = || all_left.recv_timeout(Duration::from_millis(50)).is_ok();
    loop {
        if has_left() {
            let _ = waiting.join();
            break;
        }
        if Instant::now() >= deadline || matches!(signals.read_signal(), Ok(Some(_))) {
            tracing::warn!(
                targets = count,
                "packets that are still under way are flushed"
            );
            break;
        }
    }
    host.flush_all();
}

fn make_folder(path: &Path) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(parent)?;
    }
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Makes the folder this service's, for as long as that is there: the kernel unlocks it however the process ends. Two that are started at the
/// same time would take each other's socket, and one that is started while another ends, which takes as long as packets are
/// under way, would take that one's targets for what a dead one has left.
fn lock_folder(folder: &Path) -> io::Result<File> {
    let file = File::open(folder)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => {
            let text = "another service is there, or still ending; end it, wait until it has ended, or choose another folder";
            Err(io::Error::new(io::ErrorKind::AddrInUse, text))
        }
        Err(error) => Err(error.into()),
    }
}

/// A descriptor that is readable when SIGTERM or SIGINT has come. All threads that start later have both blocked too.
fn end_signals() -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGTERM);
    set.add(Signal::SIGINT);
    set.thread_block()?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// Tells systemd, if it asked.
fn notify(state: sd_notify::NotifyState) {
    if let Err(error) = sd_notify::notify(false, &[state]) {
        tracing::warn!(%error, "systemd couldn't be told how the impairment service is");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

    use super::*;

    #[test]
    fn a_folder_is_one_services_until_it_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let first = lock_folder(folder.path()).unwrap();
        let refusal = lock_folder(folder.path()).unwrap_err().to_string();
        assert!(refusal.contains("still ending"), "{refusal}");
        drop(first);
        lock_folder(folder.path()).unwrap();
    }
}
