//! Keeps a service running: looks whether it answers, and starts it where nobody else does.
//!
//! Under systemd `sandwire-vsock.service` does that, and the daemon only looks.

use std::{
    fs::{DirBuilder, File},
    io,
    os::unix::{
        fs::{DirBuilderExt, OpenOptionsExt},
        process::CommandExt,
    },
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::fs::OFlags;

use super::service::Service;

/// How often a service that answers is asked whether it does.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often one that was just started is asked.
const COMING_EVERY: Duration = Duration::from_millis(20);
/// How long a process that was started may take until it answers.
const COMING_MAX: Duration = Duration::from_secs(10);
/// Least and longest time between two starts.
const RESTART_AFTER: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// Set by systemd for units of type `notify`, such as ours.
const UNDER_SYSTEMD: &str = "NOTIFY_SOCKET";
/// Our own executable, also if the file has been replaced since.
const OURSELVES: &str = "/proc/self/exe";

/// Whether nobody else starts services.
pub(super) fn is_ours_to_start() -> bool {
    std::env::var_os(UNDER_SYSTEMD).is_none()
}

/// A service being watched. Dropping it ends that; the service goes on.
pub(super) struct Watch {
    service: Arc<Service>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Begins.
    ///
    /// # Errors
    /// No thread can be had.
    pub(super) fn start(service: &Arc<Service>) -> io::Result<Self> {
        let watched = Arc::clone(service);
        let thread = thread::Builder::new()
            .name("vsock watch".to_owned())
            .spawn(move || watch(&watched))?;
        Ok(Self {
            service: Arc::clone(service),
            thread: Some(thread),
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.service.status().stopping = true;
        self.service.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been reported on standard error already.
            let _ = thread.join();
        }
    }
}

/// What is known of starts.
struct Starts {
    child: Option<Child>,
    /// When the last one was.
    at: Option<Instant>,
    /// Time to the next one.
    after: Duration,
}

fn watch(service: &Service) {
    let is_ours_to_start = is_ours_to_start();
    let mut starts = Starts {
        child: None,
        at: None,
        after: RESTART_AFTER.0,
    };
    loop {
        let answers = service.greet().is_ok();
        starts.reap();
        if answers {
            starts.after = RESTART_AFTER.0;
        } else if is_ours_to_start {
            starts.consider(service);
        }
        let pause = match answers {
            true => LOOK_EVERY,
            false => COMING_EVERY,
        };
        if is_told_to_stop(service, pause) {
            return;
        }
    }
}

/// Waits for the time, or until somebody found the service not to answer.
fn is_told_to_stop(service: &Service, pause: Duration) -> bool {
    let status = service.status();
    let waited = service
        .changed
        .wait_timeout_while(status, pause, |status| !status.stopping && !status.suspect);
    let (mut status, _) = waited.unwrap_or_else(PoisonError::into_inner);
    status.suspect = false;
    status.stopping
}

impl Starts {
    /// Takes note of the end of a process that we started.
    fn reap(&mut self) {
        if let Some(child) = &mut self.child
            && let Ok(Some(ended)) = child.try_wait()
        {
            tracing::warn!(pid = child.id(), %ended, "the service for vsock has ended");
            self.child = None;
        }
    }

    /// Starts the service unless one is just coming, or the last start was too short ago.
    fn consider(&mut self, service: &Service) {
        let since = self.at.map(|at| at.elapsed());
        let is_coming = self.child.is_some() && since.is_some_and(|since| since < COMING_MAX);
        if is_coming || since.is_some_and(|since| since < self.after) {
            return;
        }
        self.at = Some(Instant::now());
        self.after = (self.after * 2).min(RESTART_AFTER.1);
        match spawn(service) {
            Ok(child) => {
                tracing::info!(pid = child.id(), folder = %service.folder.display(), "started the service for vsock");
                self.child = Some(child);
            }
            Err(error) => {
                tracing::error!(%error, "cannot start the service for vsock");
                service.cannot_start(&error);
            }
        }
    }
}

/// Starts the process: with nothing of ours but a log of its own, so that it outlives us.
fn spawn(service: &Service) -> io::Result<Child> {
    let folder = &service.folder;
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(folder)?;
    let log = open_log(&folder.join("service.log"))?;
    let settings = &service.settings;
    let mut command = Command::new(OURSELVES);
    command
        .arg0("sandwire")
        .args(["vsock", "serve", "--detach", "--folder"])
        .arg(folder)
        .arg("--threads")
        .arg(settings.threads.to_string())
        .arg("--busy-poll-us")
        .arg(settings.busy_poll_us.to_string())
        .arg("--total-bytes")
        .arg(settings.limits.total_bytes.to_string());
    if let Some((user, group)) = settings.user {
        command.arg("--user").arg(format!("{user}:{group}"));
    }
    command
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
}

/// The service keeps it short. The folder is the service's, which has fewer rights than we: no link is followed.
fn open_log(path: &Path) -> io::Result<File> {
    File::options()
        .create(true)
        .append(true)
        .mode(0o600)
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn a_link_in_the_place_of_the_log_leads_nowhere() {
        let folder = tempfile::tempdir().expect("a folder");
        let (log, other) = (folder.path().join("log"), folder.path().join("other"));
        symlink(&other, &log).expect("a link");
        assert!(open_log(&log).is_err());
        assert!(!other.exists());
        fs::remove_file(&log).expect("removing the link");
        for _ in 0..2 {
            let mut log = open_log(&log).expect("the log");
            log.write_all(b"line\n").expect("writing");
        }
        assert_eq!(fs::read(&log).expect("reading"), b"line\nline\n");
    }
}
