//! Unix sockets that we listen on.
//!
//! Anybody who may enter the folder may connect: the folder, which belongs to the lease's owner and whose
//! group is ours, is what keeps others out. So the mode is 0666, set before the socket has a name.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    fs::{Mode, fchmod, unlink},
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind as bind_socket, connect,
        listen, socket_with,
    },
};
use sandwire_api::vsock::VsockType;

use crate::{
    place::{Place, Spot},
    socket_file::SocketFile,
};

/// Longest path of a Unix socket: `sun_path` has 108 bytes, the last of which is zero.
pub const PATH_MAX: usize = 107;
/// Pause of a listener whose caller can't be accepted: there are no descriptors or memory, and it would be
/// reported again at once.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections that wait to be accepted; the kernel cuts it to `net.core.somaxconn`.
const BACKLOG: i32 = 4096;
/// Of `asm-generic/socket.h`.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Why there is no listener.
#[derive(Debug, thiserror::Error)]
pub enum ListenerError {
    /// The path doesn't fit.
    #[error(
        "listen on {path}: the path is {length} bytes long, {PATH_MAX} are the most for a Unix socket"
    )]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        length: usize,
    },
    /// Somebody else listens.
    #[error("listen on {0}: somebody listens there already; end that, or choose another folder")]
    InUse(PathBuf),
    /// There is something that isn't a socket.
    #[error("listen on {0}: there is something that is no socket, and it is left alone; remove it")]
    NotASocket(PathBuf),
    /// The kernel refused.
    #[error("listen on {path}: {source}")]
    Refused {
        /// The path.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// What becomes of descriptors that a caller sends along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Descriptors {
    /// They are part of the protocol.
    Taken,
    /// [`refuse_descriptors`], from the first caller on.
    Refused,
}

/// Listens on a path, without blocking. A socket file that nobody listens on any more is replaced.
///
/// # Errors
/// A path that is too long or taken, and whatever else the kernel says. Nothing was removed then but such a
/// left-over.
pub fn listen_on(
    path: &Path,
    kind: VsockType,
    descriptors: Descriptors,
) -> Result<OwnedFd, ListenerError> {
    check_length(path)?;
    let address = SocketAddrUnix::new(path).map_err(|error| refused(path, error.into()))?;
    let remove_old = || {
        let found = SocketFile::find(path);
        remove_left_over(path, found, || unlink(path))
    };
    listen_by(path, &address, kind, descriptors, remove_old)
}

/// The same in a guest's folder, whatever its owner mounts there. The kernel tells those who ask for the socket's name a path by a
/// descriptor, not this one.
///
/// # Errors
/// The same, and something that is mounted over the folder.
pub fn listen_at(
    path: &Path,
    kind: VsockType,
    descriptors: Descriptors,
) -> Result<OwnedFd, ListenerError> {
    check_length(path)?;
    let spot = Spot::of(path).map_err(|error| refused(path, error))?;
    let address = spot
        .address()
        .map_err(|error| refused(path, error.into()))?;
    let remove_old = || remove_left_over(path, spot.find(), || spot.remove());
    listen_by(path, &address, kind, descriptors, remove_old)
}

fn listen_by(
    path: &Path,
    address: &SocketAddrUnix,
    kind: VsockType,
    descriptors: Descriptors,
    remove_old: impl Fn() -> Result<(), ListenerError>,
) -> Result<OwnedFd, ListenerError> {
    let refused = |error: Errno| refused(path, error.into());
    let socket = unix_socket(kind).map_err(refused)?;
    // `bind` gives the file this mode, less the umask; by its name it could be somebody else's by then.
    fchmod(&socket, Mode::from_raw_mode(0o666)).map_err(refused)?;
    match bind_socket(&socket, address) {
        Err(Errno::ADDRINUSE) => {
            remove_old()?;
            bind_socket(&socket, address).map_err(refused)?;
        }
        outcome => outcome.map_err(refused)?,
    }
    // Who connects is asked what the listener was asked by then.
    if descriptors == Descriptors::Refused {
        refuse_descriptors(&socket);
    }
    listen(&socket, BACKLOG).map_err(refused)?;
    Ok(socket)
}

fn check_length(path: &Path) -> Result<(), ListenerError> {
    let length = path.as_os_str().len();
    if length > PATH_MAX {
        return Err(ListenerError::TooLong {
            path: path.to_owned(),
            length,
        });
    }
    Ok(())
}

fn refused(path: &Path, source: io::Error) -> ListenerError {
    ListenerError::Refused {
        path: path.to_owned(),
        source,
    }
}

/// Has the kernel refuse descriptors that somebody sends along, before they are ours to close: closing one may wait for as
/// long as its sender likes (a TCP socket that lingers, a file of its own FUSE). Who connects to a listener from then on is
/// asked the same, so it comes before `listen`. Whether the kernel does; before 6.16 it has no such option.
pub fn refuse_descriptors(socket: impl AsFd) -> bool {
    let refuse: libc::c_int = 0;
    // SAFETY: the option takes an int, which lives through the call.
    let done = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const refuse).cast(),
            libc::socklen_t::try_from(size_of::<libc::c_int>()).expect("four"),
        )
    };
    done == 0
}

/// Whether the next caller may be accepted after that error of the former.
#[must_use]
pub fn is_callers_own(error: Errno) -> bool {
    matches!(error, Errno::INTR | Errno::CONNABORTED)
}

/// Removes the file of a socket that was ours in a guest's folder, unless that isn't there any more: what has its path then is
/// another guest's, or what its owner has mounted over it.
///
/// # Errors
/// Whatever the kernel says, except that it is gone already.
pub fn remove_in(place: Option<Place>, path: &Path) -> io::Result<()> {
    let spot = match Spot::of(path) {
        Ok(spot) => spot,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if place.is_some_and(|place| place != spot.place()) {
        return Ok(());
    }
    match spot.remove() {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Removes the file of a socket that was ours.
///
/// # Errors
/// Whatever the kernel says, except that it is gone already.
pub fn remove(path: &Path) -> io::Result<()> {
    match unlink(path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn remove_left_over(
    path: &Path,
    found: Result<SocketFile, Errno>,
    remove: impl Fn() -> Result<(), Errno>,
) -> Result<(), ListenerError> {
    let refused = |error: Errno| refused(path, error.into());
    let found = match found {
        Ok(found) => found,
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::NOTSOCK) => return Err(ListenerError::NotASocket(path.to_owned())),
        Err(error) => return Err(refused(error)),
    };
    // Of a type that nobody listens with: who is there has no connection to serve, which may be all it serves.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let probe =
        socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None).map_err(refused)?;
    match connect(&probe, &found.address().map_err(refused)?) {
        Err(Errno::CONNREFUSED) => match remove() {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(refused(error)),
        },
        Err(Errno::NOENT) => Ok(()),
        // Another type of socket, or one that we may not connect to.
        Ok(()) | Err(_) => Err(ListenerError::InUse(path.to_owned())),
    }
}

fn unix_socket(kind: VsockType) -> Result<OwnedFd, Errno> {
    let socket_type = match kind {
        VsockType::Stream => SocketType::STREAM,
        VsockType::Seqpacket => SocketType::SEQPACKET,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    socket_with(AddressFamily::UNIX, socket_type, flags, None)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::net::UnixStream};

    use rustix::net::accept_with;

    use super::*;

    #[test]
    fn a_left_over_is_replaced_and_a_listener_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let first =
            listen_on(&path, VsockType::Stream, Descriptors::Refused).expect("a first listener");
        for kind in [VsockType::Stream, VsockType::Seqpacket] {
            let error = listen_on(&path, kind, Descriptors::Refused).expect_err("it is taken");
            assert!(matches!(error, ListenerError::InUse(_)), "{error}");
        }
        let called = accept_with(&first, SocketFlags::CLOEXEC).err();
        assert_eq!(called, Some(Errno::AGAIN), "it has nobody to serve");
        drop(first);
        assert!(path.exists(), "the file outlives its listener");
        let _second =
            listen_on(&path, VsockType::Stream, Descriptors::Refused).expect("a second listener");
        UnixStream::connect(&path).expect("connecting to the second");
    }

    #[test]
    fn a_file_is_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        fs::write(&path, "precious").expect("writing it");
        let error =
            listen_on(&path, VsockType::Stream, Descriptors::Refused).expect_err("it is no socket");
        assert!(matches!(error, ListenerError::NotASocket(_)), "{error}");
        assert_eq!(fs::read(&path).expect("reading it"), b"precious");
    }

    #[test]
    fn a_path_that_does_not_fit_is_refused_with_its_length() {
        let path = PathBuf::from(format!("/{}", "x".repeat(107)));
        let error =
            listen_on(&path, VsockType::Stream, Descriptors::Refused).expect_err("it doesn't fit");
        assert!(error.to_string().contains("108 bytes long, 107"), "{error}");
    }
}
