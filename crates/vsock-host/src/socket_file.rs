//! The file of a Unix socket in a folder of somebody else's, who may put a link in its place at any time: by our rights it would lead
//! wherever the other may not look.

use std::{
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{FileType, Mode, OFlags, open},
    io::Errno,
    net::SocketAddrUnix,
};

use crate::place::look_at;

/// How a path is looked at.
pub(crate) const LOOK_FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A socket's file that was looked at, whatever has its name by now.
pub(crate) struct SocketFile(OwnedFd);

impl SocketFile {
    /// Looks for a socket at a path.
    ///
    /// # Errors
    /// `NOENT` if nothing is there, `NOTSOCK` if it is no socket, and what the kernel says else.
    pub(crate) fn find(path: &Path) -> Result<Self, Errno> {
        Self::checked(open(path, LOOK_FLAGS, Mode::empty())?)
    }

    /// The same of what was found in another way, opened with [`LOOK_FLAGS`].
    pub(crate) fn checked(found: OwnedFd) -> Result<Self, Errno> {
        match FileType::from_raw_mode(look_at(&found)?.stx_mode.into()) {
            FileType::Socket => Ok(Self(found)),
            _ => Err(Errno::NOTSOCK),
        }
    }

    /// By what it is connected to, for as long as this lives.
    ///
    /// # Errors
    /// None: the address is short enough.
    pub(crate) fn address(&self) -> Result<SocketAddrUnix, Errno> {
        SocketAddrUnix::new(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::{fs::symlink, net::UnixListener},
    };

    use rustix::net::{AddressFamily, SocketType, connect, socket};

    use super::*;

    #[test]
    fn a_socket_is_found_and_stays_the_one_that_was_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let listener = UnixListener::bind(at("socket")).expect("a listener");
        symlink(at("socket"), at("link")).expect("a link");
        fs::write(at("file"), "").expect("a file");
        let refusal = |name: &str| SocketFile::find(&at(name)).err();
        assert_eq!(refusal("nothing"), Some(Errno::NOENT));
        assert_eq!(refusal("file"), Some(Errno::NOTSOCK));
        assert_eq!(refusal("link"), Some(Errno::NOTSOCK));
        let found = SocketFile::find(&at("socket")).expect("the socket");
        fs::rename(at("link"), at("socket")).expect("a link in its place");
        let caller = socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
        connect(&caller, &found.address().expect("an address")).expect("a connection");
        listener.accept().expect("the caller");
    }
}
