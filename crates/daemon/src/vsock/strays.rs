//! Services of groups that the configuration has no more.
//!
//! Each outlives the daemon that started it, and would go on serving its guests by policies that nobody can change any
//! more. So its channels are taken from it, before everybody's service has them, and it is ended; under systemd, which
//! would start it again, it stays without channels.

use std::{
    fs, io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    fs::{Mode, OFlags, open},
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
        Err(error) => {
            tracing::error!(folder = %folder.display(), %error, "the service of a group that is configured no more keeps its channels");
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
        && let Err(error) = terminate(&client)
    {
        tracing::error!(folder = %folder.display(), %error, "cannot end the service of a group that is configured no more");
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

/// Tells the process that listens there to end. What it says of itself isn't asked for: it may have fewer rights than we.
fn terminate(client: &Client) -> io::Result<()> {
    let process = pidfd_open(socket_peercred(client)?.pid, PidfdFlags::empty())?;
    Ok(pidfd_send_signal(process, Signal::TERM)?)
}
