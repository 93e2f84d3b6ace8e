//! `sandwire vsock listen`: connections that a guest makes to a port of its host.
//!
//! They come to a Unix socket beside the lease's own, `vsock.sock_PORT`, by the convention of Firecracker and
//! Cloud Hypervisor: the same whoever owns the guest's device.

use std::{
    fs, io,
    os::{
        fd::OwnedFd,
        unix::{fs::FileTypeExt, net::UnixDatagram},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use clap::Args;
use rustix::{fs::Mode, process::umask};
use sandwire_api::{
    name::Name,
    vsock::{VsockChannel, VsockDestination, VsockKind, VsockPolicy},
};
use tokio::{
    net::{UnixListener, UnixStream},
    time::sleep,
};

use super::{Which, connect, guest};
use crate::{
    Context,
    failure::{Failure, Outcome},
    interruption::Ends,
    output::note,
};

/// How long to wait after a failed accept: what is missing, mostly descriptors, has to come free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The folder lets in the owner and the service only; the service may be in the file's group or be others.
const SOCKET_MODE: u32 = 0o666;

/// Command line of `sandwire vsock listen`.
#[derive(Debug, Args)]
#[command(
    after_help = "The guest connects to CID 2 and this port. Its policy must have a rule for it: see sandwire \
    vsock policy allow; a hybrid guest gets through without. Interrupting it ends it in order."
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    which: Which,

    /// Port that the guest connects to.
    port: u32,

    /// Serve every connection by a shell command of its own, whose standard input and output it is. Without it,
    /// one connection is joined to standard input and output, and its end is the end.
    #[arg(long, value_name = "COMMAND")]
    exec: Option<String>,
}

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let Arguments { which, port, exec } = arguments;
    let operation = format!("listen at vsock port {port} for lease {}", which.name);
    let channel = guest::channel(context, which, &operation)?;
    note_policy(context, which, channel.kind, *port);
    let failed = |error: io::Error| Failure::failed(format!("cannot {operation}: {error}"));
    let work = async {
        let socket = PortSocket::bind(&channel, *port).map_err(failed)?;
        let mut ends = Ends::new().map_err(failed)?;
        loop {
            let accepted = tokio::select! {
                accepted = socket.listener.accept() => accepted,
                () = ends.wait() => return Ok(()),
            };
            // What is missing, descriptors or processes, is what the guest's other connections have.
            let (stream, _) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    pause(&error).await;
                    continue;
                }
            };
            let stream = blocking(stream).map_err(failed)?;
            match exec {
                Some(command) => {
                    if let Err(error) = execute(command, stream) {
                        pause(&error).await;
                    }
                }
                None => {
                    drop(socket);
                    let joined = tokio::task::spawn_blocking(move || connect::join(&stream));
                    return tokio::select! {
                        joined = joined => joined.map_err(io::Error::other).and_then(|done| done).map_err(failed),
                        () = ends.wait() => Ok(()),
                    };
                }
            }
        }
    };
    guest::serve(&operation, work)
}

/// Says so if the guest may not connect there: otherwise one waits in vain. Or that it may, whatever its policy says.
pub(super) fn note_policy(context: &Context, which: &Which, kind: VsockKind, port: u32) {
    let found = context.client().vsock_policy(&which.name, which.owner_uid);
    let told = found.map(|found| policy_note(kind, &found.policy, &which.name, port));
    if let Ok(Some(text)) = told {
        note(&text);
    }
}

fn policy_note(kind: VsockKind, policy: &VsockPolicy, lease: &Name, port: u32) -> Option<String> {
    let mut rules = policy.rules.iter();
    let rule = rules.find(|rule| rule.port.contains(port));
    let begin = format!("no rule leads port {port} of lease {lease} here");
    match (rule.map(|rule| &rule.to), kind) {
        (Some(VsockDestination::Host), _) => None,
        (None, VsockKind::Hybrid) => Some(format!(
            "{begin}, but its guest gets through: its VMM, which owns the device (hybrid), asks nobody"
        )),
        // Where another rule covers it, the router has the socket.
        _ => Some(format!(
            "{begin}, so that its guest is refused: sandwire vsock policy allow {lease} {port} host"
        )),
    }
}

/// The Unix socket of a port, gone when dropped.
pub(super) struct PortSocket {
    pub(super) listener: UnixListener,
    path: PathBuf,
}

impl PortSocket {
    /// Listens. What an earlier listener left is replaced; one that runs is not.
    pub(super) fn bind(channel: &VsockChannel, port: u32) -> io::Result<Self> {
        let path = guest::port_socket(channel, port);
        let listener = bind_by(&path, bind_for_service)?;
        Ok(Self { listener, path })
    }
}

impl Drop for PortSocket {
    fn drop(&mut self) {
        // The channel may be gone, and its folder with it.
        let _ = fs::remove_file(&self.path);
    }
}

/// Listens at a path that nobody else listens at, for those whom the caller's umask lets connect.
pub(super) fn bind(path: &Path) -> io::Result<UnixListener> {
    bind_by(path, |path| UnixListener::bind(path))
}

fn bind_by(
    path: &Path,
    bind: impl FnOnce(&Path) -> io::Result<UnixListener>,
) -> io::Result<UnixListener> {
    let told =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    if let Ok(found) = fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(told(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "there is a file that is no socket; remove it",
            )));
        }
        if is_alive(path).map_err(told)? {
            return Err(told(io::Error::new(
                io::ErrorKind::AddrInUse,
                "somebody listens there already",
            )));
        }
        fs::remove_file(path).map_err(told)?;
    }
    bind(path).map_err(told)
}

/// For the service, which has other users' rights, in a folder that lets in nobody else. The file gets its mode as it comes to be. Given by its name, the mode would go to whatever the folder's owner has put
/// there by then, a link to a file of root's for one.
fn bind_for_service(path: &Path) -> io::Result<UnixListener> {
    // The umask is the whole process's, which makes no other files meanwhile.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let usual = umask(Mode::from_raw_mode(!SOCKET_MODE & 0o777));
    let listener = UnixListener::bind(path);
    umask(usual);
    listener
}

/// Whether somebody has the socket at a path. Asked by a socket of another type, which is refused either way: the
/// other has no connection to serve.
fn is_alive(path: &Path) -> io::Result<bool> {
    match UnixDatagram::unbound()?.connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        _ => Ok(true),
    }
}

/// Waits after a connection that couldn't be accepted or served, until there may be room for the next.
pub(super) async fn pause(error: &io::Error) {
    note(&format!("cannot accept a connection: {error}"));
    sleep(ACCEPT_PAUSE).await;
}

fn blocking(stream: UnixStream) -> io::Result<OwnedFd> {
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    Ok(stream.into())
}

fn execute(command: &str, stream: OwnedFd) -> io::Result<()> {
    let mut child = Command::new("/bin/sh")
        .args(["-c", command])
        .stdin(Stdio::from(stream.try_clone()?))
        .stdout(Stdio::from(stream))
        .spawn()?;
    tokio::task::spawn_blocking(move || child.wait());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::{PermissionsExt, symlink},
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use sandwire_api::vsock::VsockRule;
    use sandwire_testlab::lab;

    use super::*;

    /// The folder's owner may put anything there, at any moment. In a process of its own, for the umask.
    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn a_link_in_the_place_of_the_socket_changes_nothing_that_it_leads_to() {
        lab::run(|_| bind_beside_links());
    }

    fn bind_beside_links() {
        const MODE: u32 = 0o600;
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _inside = runtime.enter();
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let (path, link, file) = (at("vsock.sock_5"), at("link"), at("file"));
        fs::write(&file, "ours").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(MODE)).unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|threads| {
            threads.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    if fs::symlink_metadata(&path).is_ok_and(|found| found.file_type().is_socket())
                    {
                        symlink(&file, &link).unwrap();
                        fs::rename(&link, &path).unwrap();
                    }
                }
            });
            for _ in 0..2000 {
                // Refused whenever the other one was quicker.
                drop(bind_by(&path, bind_for_service));
                let _ = fs::remove_file(&path);
            }
            over.store(true, Ordering::Relaxed);
        });
        let mode = fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, MODE);
    }

    #[test]
    fn whether_a_guest_gets_through_is_told_as_its_device_has_it() {
        let lease = "a".parse().unwrap();
        let rule = |port: &str, to| VsockRule {
            port: port.parse().unwrap(),
            to,
            identity: false,
        };
        let elsewhere = VsockDestination::Unix {
            path: "/run/x".into(),
        };
        let policy = VsockPolicy {
            rules: vec![rule("1-9", VsockDestination::Host), rule("20", elsewhere)],
        };
        for (kind, port, expected) in [
            (VsockKind::VhostUser, 5, None),
            (VsockKind::Hybrid, 5, None),
            (VsockKind::VhostUser, 10, Some("is refused")),
            (VsockKind::Hybrid, 10, Some("gets through")),
            (VsockKind::VhostUser, 20, Some("is refused")),
            (VsockKind::Hybrid, 20, Some("is refused")),
        ] {
            let told = policy_note(kind, &policy, &lease, port);
            let is_as_expected = match (&told, expected) {
                (Some(told), Some(expected)) => told.contains(expected),
                (told, expected) => told.is_none() && expected.is_none(),
            };
            assert!(is_as_expected, "{kind:?}, port {port}: {told:?}");
        }
    }

    #[tokio::test]
    async fn a_listener_that_runs_is_not_replaced_and_one_that_is_gone_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vsock.sock_5");
        let first = bind(&path).unwrap();
        let error = bind(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        let first = first.into_std().unwrap();
        let called = first.accept().map_err(|error| error.kind());
        assert_eq!(called.err(), Some(io::ErrorKind::WouldBlock));
        drop(first);
        let _second = bind(&path).unwrap();
        let other = folder.path().join("file");
        fs::write(&other, "precious").unwrap();
        assert!(bind(&other).is_err());
        assert_eq!(fs::read_to_string(&other).unwrap(), "precious");
    }

    #[tokio::test]
    async fn who_else_may_connect_says_the_umask_but_in_a_channels_folder() {
        let folder = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let [usual, own, service] =
            ["usual", "own", "service"].map(|name| folder.path().join(name));
        let _usual = UnixListener::bind(&usual).unwrap();
        let _own = bind(&own).unwrap();
        assert_eq!(mode(&own), mode(&usual));
        let _service = bind_by(&service, bind_for_service).unwrap();
        assert_eq!(mode(&service), SOCKET_MODE);
    }
}
