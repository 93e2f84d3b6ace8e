//! Starting the service in the background, for whoever needs it first.

use std::{
    fs, io,
    os::unix::{fs::DirBuilderExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use sandwire_api::impairment::Impairment;
use sandwire_kernel_net::process::unblock_signals;
use serde::Deserialize;

use crate::{
    control::{Client, ClientError, Owner, TARGETS, control_socket},
    namespace::Namespace,
};

/// This program, whatever has become of its file.
const OURSELVES: &str = "/proc/self/exe";
/// What a service that was started so says.
const LOG: &str = "service.log";
/// How long a service may take until it listens.
const PATIENCE: Duration = Duration::from_secs(20);

/// Why there is no service.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// Only root can.
    #[error("only root can divert packets; run this as root")]
    NotRoot,
    /// There is one, which takes no connections.
    #[error("{0}")]
    Busy(ClientError),
    /// Its log can't be had.
    #[error("open {path}: {source}")]
    Log {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// There is no process.
    #[error("start a process: {0}")]
    Spawn(io::Error),
    /// It ended at once.
    #[error("it ended with {status}: {said}")]
    Ended {
        /// How.
        status: ExitStatus,
        /// The last line of its log.
        said: String,
    },
    /// It takes too long.
    #[error("it doesn't listen after {PATIENCE:?}; see {log}")]
    Silent {
        /// Its log.
        log: PathBuf,
    },
}

/// Network namespace that a service is started in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// That of whoever starts it.
    Own,
    /// The machine's, wherever it is started from: it serves others too, and would keep a sandbox's from going.
    Machine,
}

/// A service that has been started.
#[derive(Debug)]
pub struct Launched {
    /// Its process, to be waited for by whoever goes on living.
    pub child: Child,
    /// What it says.
    pub log: PathBuf,
}

/// Connects to the service of that folder; if nobody listens, starts one there first: this same executable, by
/// `impair serve --detach`. One that takes no connections is waited for, 30 s at most.
///
/// # Errors
/// See [`LaunchError`].
pub fn connect_or_start(
    folder: &Path,
    home: Home,
) -> Result<(Client, Option<Launched>), LaunchError> {
    let socket = control_socket(folder);
    if let Some(client) = found(Client::connect(&socket))? {
        return Ok((client, None));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(LaunchError::NotRoot);
    }
    let log = folder.join(LOG);
    let mut child = spawn(folder, &log, home)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match found(Client::connect(&socket)) {
            Ok(Some(client)) => return Ok((client, Some(Launched { child, log }))),
            Ok(None) => {}
            Err(error) => {
                leave_behind(child);
                return Err(error);
            }
        }
        if let Ok(Some(status)) = child.try_wait() {
            // Somebody else may have been quicker.
            if let Some(client) = found(Client::connect(&socket))? {
                return Ok((client, None));
            }
            let said = fs::read_to_string(&log).unwrap_or_default();
            let said = said.lines().last().unwrap_or("it said nothing").to_owned();
            return Err(LaunchError::Ended { status, said });
        }
        if Instant::now() >= deadline {
            leave_behind(child);
            return Err(LaunchError::Silent { log });
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// The service, if there is one. One that has more connections waiting than it accepts for a while is there.
fn found(connected: Result<Client, ClientError>) -> Result<Option<Client>, LaunchError> {
    match connected {
        Ok(client) => Ok(Some(client)),
        Err(error) if error.is_late() => Err(LaunchError::Busy(error)),
        Err(_) => Ok(None),
    }
}

/// It may end later, and whoever started it goes on living.
fn leave_behind(mut child: Child) {
    thread::spawn(move || child.wait());
}

fn spawn(folder: &Path, log: &Path, home: Home) -> Result<Child, LaunchError> {
    let open_log = || {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)?;
        fs::OpenOptions::new().create(true).append(true).open(log)
    };
    let output = open_log().map_err(|source| LaunchError::Log {
        path: log.to_owned(),
        source,
    })?;
    let mut command = Command::new(OURSELVES);
    command
        .arg0("sandwire")
        .args(["impair", "serve", "--detach", "--folder"])
        .arg(folder)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(output);
    unblock_signals(&mut command);
    let spawned = match home {
        Home::Own => Ok(command.spawn()),
        Home::Machine => {
            let machines = Namespace::machines();
            machines.and_then(|machines| machines.inside(|| Ok(command.spawn())))
        }
    };
    // Who may not enter it starts the service where he is.
    let spawned = spawned.unwrap_or_else(|_| command.spawn());
    spawned.map_err(LaunchError::Spawn)
}

/// What the service of a folder remembers, alive or dead.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Targets.
    pub targets: usize,
    /// Those of leases: on whose behalf, and how they are impaired.
    pub of_leases: Vec<(Owner, Impairment)>,
}

/// Looks what the service of that folder remembers.
#[must_use]
pub fn left(folder: &Path) -> Left {
    #[derive(Deserialize)]
    struct Remembered {
        owner: Owner,
        impairment: Impairment,
    }
    let is_target = |path: &PathBuf| path.extension().is_some_and(|it| it == "json");
    let entries = fs::read_dir(folder.join(TARGETS)).into_iter().flatten();
    let paths = entries.flatten().map(|entry| entry.path());
    let mut left = Left::default();
    for path in paths.filter(is_target) {
        left.targets += 1;
        let read: Option<Remembered> = fs::read(&path)
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok());
        let of_lease = read.filter(|read| matches!(read.owner, Owner::Lease { .. }));
        left.of_leases
            .extend(of_lease.map(|read| (read.owner, read.impairment)));
    }
    left
}

#[cfg(test)]
mod tests {
    use std::{io::Read, os::unix::net::UnixStream};

    use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

    use super::*;

    /// As of one that was stopped, or has hundreds who ask: another one wouldn't start beside it, and its own refusal says nothing of that.
    #[test]
    fn a_service_that_takes_no_connections_is_not_taken_for_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = control_socket(folder.path());
        let connect = || found(Client::connect_within(&path, Duration::from_millis(20)));
        assert!(connect().unwrap().is_none(), "there is none");
        let flags = SocketFlags::CLOEXEC;
        let listening = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        net::bind(&listening, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        net::listen(&listening, 0).unwrap();
        let first = connect().unwrap().unwrap();
        assert!(matches!(connect(), Err(LaunchError::Busy(_))));
        // Who waits for its turn gets it.
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| found(Client::connect_within(&path, PATIENCE)));
            let accepted = net::accept(&listening).unwrap();
            drop(first);
            assert!(waiting.join().unwrap().unwrap().is_some());
            let ended = UnixStream::from(accepted).read(&mut [0]).unwrap();
            assert_eq!(ended, 0);
        });
        drop(listening);
        assert!(connect().unwrap().is_none(), "nobody listens any more");
    }

    #[test]
    fn targets_of_leases_are_told_from_others() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(left(folder.path()), Left::default());
        let targets = folder.path().join(TARGETS);
        fs::create_dir(&targets).unwrap();
        let write = |name: &str, text: &str| fs::write(targets.join(name), text).unwrap();
        write(
            "1-1.json",
            r#"{"owner": {"user": {"uid": 1}}, "impairment": {}, "force": false}"#,
        );
        write(
            "1-2.json",
            r#"{"owner": {"lease": {"uid": 1, "lease": "a"}}, "impairment": {"seed": 3}}"#,
        );
        write(
            "1-3.new",
            r#"{"owner": {"lease": {"uid": 1, "lease": "a"}}}"#,
        );
        write("1-4.json", "{");
        let owner = Owner::Lease {
            uid: 1,
            lease: "a".parse().unwrap(),
            instance: None,
        };
        let impairment = Impairment {
            seed: 3,
            ..Impairment::default()
        };
        let expected = Left {
            targets: 3,
            of_leases: vec![(owner, impairment)],
        };
        assert_eq!(left(folder.path()), expected);
    }
}
