//! Services of groups that the configuration has no more.
//!
//! Each outlives the daemon that started it, and would go on serving its guests by policies that nobody can change any
//! more. So its channels are taken from it, before everybody's service has them, and it is ended, by SIGKILL where it doesn't
//! answer; under systemd, which would start it again, it stays without channels.

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags, open},
    io::Errno,
    net::sockopt::socket_peercred,
    process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use sandwire_api::name::Name;
use sandwire_vsock_host::control::{Client, ClientError, control_socket};

use super::watch::is_ours_to_start;

/// How long an answer may take.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// How long a service may take to give all its channels away: the daemon's start waits, and it may have been taken over.
const CHANNELS_MAX: Duration = Duration::from_secs(10);

/// How long one that has been told to end may take.
const ENDING_MAX: Duration = Duration::from_secs(5);
/// How long the end of one that was killed may take: its guests' memory is unmapped.
const KILLED_MAX: Duration = Duration::from_secs(10);

/// Ends the services in a folder of groups whose names aren't among these.
pub(super) fn end_all_but(names: &[&Name], groups: &Path) {
    let entries = match fs::read_dir(groups) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => {
            tracing::warn!(%error, folder = %groups.display(), "cannot look for services of former groups");
            return;
        }
    };
    for entry in entries.flatten() {
        let is_configured = |name: &&Name| entry.file_name() == name.as_str();
        if !names.iter().any(is_configured) {
            end(&entry.path());
        }
    }
}

fn end(folder: &Path) {
    // The folder is the service's, which may have fewer rights than we: no link leads to a process of somebody else's.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(found) = open(control_socket(folder), flags, Mode::empty()) else {
        return;
    };
    let socket = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
    // Kept, so that its process is the one that is ended.
    let mut client = match Client::connect(&socket, ANSWER_MAX) {
        Ok(client) => client,
        Err(ClientError::Connect { source, .. }) if is_nobody(&source) => return,
        // Its process can't be told without a connection, as where it has accepted nobody for so long that there is room for none more.
        Err(error) => {
            let socket = control_socket(folder);
            tracing::error!(%error, "the service of a group that is configured no more keeps its channels; end it by `fuser -k -KILL {}`", socket.display());
            return;
        }
    };
    match take_channels(&mut client) {
        Ok(channels) => {
            tracing::info!(folder = %folder.display(), channels, "took the channels of a group that is configured no more");
        }
        Err(error) => {
            tracing::error!(folder = %folder.display(), %error, "the service of a group that is configured no more keeps its channels");
        }
    }
    if is_ours_to_start()
        && let Err(error) = terminate(&client, ENDING_MAX)
    {
        let socket = control_socket(folder);
        tracing::error!(%error, "cannot end the service of a group that is configured no more; end it by `fuser -k -KILL {}`", socket.display());
    }
}

/// Whether that says that nobody listens.
fn is_nobody(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
    )
}

/// How many channels it had.
fn take_channels(client: &mut Client) -> Result<usize, ClientError> {
    let until = Instant::now() + CHANNELS_MAX;
    let vms = client.vms()?;
    let count = vms.len();
    for vm in vms {
        if Instant::now() > until {
            return Err(ClientError::Broken {
                operation: "remove all its channels",
                source: io::ErrorKind::TimedOut.into(),
            });
        }
        client.remove_vm(vm.key)?;
    }
    Ok(count)
}

/// Has the process end that listens there: it is told to, and killed where it doesn't. What it says of itself isn't asked for: it may have
/// fewer rights than we.
fn terminate(client: &Client, patience: Duration) -> io::Result<()> {
    let process = pidfd_open(socket_peercred(client)?.pid, PidfdFlags::empty())?;
    // Else it had ended before, and the number may be somebody else's by now.
    if has_happened(client, PollFlags::HUP, Duration::ZERO)? {
        return Ok(());
    }
    pidfd_send_signal(&process, Signal::TERM)?;
    if !has_happened(&process, PollFlags::IN, patience)? {
        tracing::warn!(
            "the service of a group that is configured no more doesn't end, and is killed"
        );
        pidfd_send_signal(&process, Signal::KILL)?;
        // Else its guests' next service finds their sockets in use.
        if !has_happened(&process, PollFlags::IN, KILLED_MAX)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// Whether something happens to a descriptor within that time.
fn has_happened(of: impl AsFd, what: PollFlags, within: Duration) -> io::Result<bool> {
    let until = Instant::now() + within;
    loop {
        let mut polled = [PollFd::new(&of, what)];
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut polled, Some(&left)) {
            Ok(_) => return Ok(polled[0].revents().intersects(what)),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        env,
        os::unix::net::UnixListener,
        process::{Command, Stdio},
        thread,
    };

    use super::*;

    /// Where the test, started by itself, is such a service.
    const FOLDER: &str = "SANDWIRE_TEST_STRAY";

    /// As one that was stopped (SIGSTOP), or that hangs.
    #[test]
    fn a_service_that_answers_nothing_is_killed() {
        if let Some(folder) = env::var_os(FOLDER) {
            let _listener = UnixListener::bind(control_socket(Path::new(&folder))).unwrap();
            thread::sleep(Duration::from_secs(600));
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let name = "vsock::strays::tests::a_service_that_answers_nothing_is_killed";
        let mut process = Command::new("env")
            .arg("--ignore-signal=TERM")
            .arg(env::current_exe().unwrap())
            .args(["--exact", name, "--test-threads=1"])
            .env(FOLDER, folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let socket = control_socket(folder.path());
        while Client::connect(&socket, ANSWER_MAX).is_err() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        let mut client = Client::connect(&socket, ANSWER_MAX).unwrap();
        take_channels(&mut client).unwrap_err();
        terminate(&client, Duration::from_millis(50)).unwrap();
        // Else whoever comes next finds its sockets in use.
        let ended = process.try_wait().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(ended.is_some(), "it goes on");
    }
}
