//! Which folder a guest's sockets are in, and how that is entered.
//!
//! A path doesn't say that: it follows from a slot's number, which the next lease has too. Whoever comes late, at a start
//! or with an end that was missed, would touch the sockets of somebody else's guest.
//!
//! Nor does a path lead only there: the folder's owner may mount a file system of its own over it, by FUSE, and whoever asked that for
//! anything would wait for as long as the owner likes. So the folder itself is opened, which asks nobody, and what is in it is reached from
//! there.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{
        AtFlags, Mode, OFlags, Statx, StatxAttributes, StatxFlags, makedev, open, openat, statx,
        unlinkat,
    },
    io::Errno,
    net::SocketAddrUnix,
};
use serde::{Deserialize, Serialize};

use crate::socket_file::{LOOK_FLAGS, SocketFile};

/// How a guest's folder is opened.
pub(crate) const FOLDER_FLAGS: OFlags = LOOK_FLAGS.union(OFlags::DIRECTORY);

/// A folder, whatever its path leads to by now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Number of its file system's device.
    device: u64,
    inode: u64,
    /// When it was made, in nanoseconds since 1970, if its file system knows: some give a number again at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    made: Option<u64>,
}

impl Place {
    /// What is at a path. A link isn't followed.
    ///
    /// # Errors
    /// `NotFound`, also where something is mounted over it, and what the kernel says else.
    pub fn of(folder: &Path) -> io::Result<Self> {
        let (_, found) = open_folder(folder)?;
        Ok(Self::told_by(&found))
    }

    fn told_by(found: &Statx) -> Self {
        let at = &found.stx_btime;
        let since = u64::try_from(at.tv_sec).ok().and_then(|seconds| {
            let whole = seconds.checked_mul(1_000_000_000)?;
            whole.checked_add(u64::from(at.tv_nsec))
        });
        let is_known = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::BTIME);
        Self {
            device: makedev(found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
            made: since.filter(|_| is_known),
        }
    }
}

/// A socket's file in a guest's folder: the folder, opened, and the name there.
#[derive(Debug)]
pub(crate) struct Spot {
    folder: OwnedFd,
    place: Place,
    name: OsString,
}

impl Spot {
    /// That of a path whose last folder is a guest's.
    ///
    /// # Errors
    /// See [`Place::of`].
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let (folder, found) = open_folder(folder)?;
        Ok(Self {
            folder,
            place: Place::told_by(&found),
            name: name.to_owned(),
        })
    }

    /// Which folder that is.
    pub(crate) fn place(&self) -> Place {
        self.place
    }

    /// By what a socket is bound there, for as long as this lives.
    ///
    /// # Errors
    /// The name is too long.
    pub(crate) fn address(&self) -> Result<SocketAddrUnix, Errno> {
        let mut path = format!("/proc/self/fd/{}/", self.folder.as_raw_fd()).into_bytes();
        path.extend_from_slice(self.name.as_bytes());
        SocketAddrUnix::new(OsStr::from_bytes(&path))
    }

    /// The socket that is there.
    ///
    /// # Errors
    /// See [`SocketFile::find`].
    pub(crate) fn find(&self) -> Result<SocketFile, Errno> {
        SocketFile::checked(openat(&self.folder, &self.name, LOOK_FLAGS, Mode::empty())?)
    }

    /// Removes what is there.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn remove(&self) -> Result<(), Errno> {
        unlinkat(&self.folder, &self.name, AtFlags::empty())
    }
}

/// What is known of something that was opened, without asking a file system that may never answer.
pub(crate) fn look_at(opened: impl AsFd) -> Result<Statx, Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    statx(opened, "", flags, wanted)
}

fn open_folder(path: &Path) -> io::Result<(OwnedFd, Statx)> {
    let opened = open(path, FOLDER_FLAGS, Mode::empty())?;
    let found = look_at(&opened)?;
    if found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        let text = "something is mounted over the folder";
        return Err(io::Error::new(io::ErrorKind::NotFound, text));
    }
    Ok((opened, found))
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        os::unix::fs::symlink,
        sync::mpsc::channel,
        thread,
        time::Duration,
    };

    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    use sandwire_api::vsock::VsockType;

    use super::*;
    use crate::listener::{Descriptors, listen_at, remove_in};

    #[test]
    fn a_folder_that_was_made_anew_is_another_and_a_renamed_one_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let is_at = |place: &Place, name: &str| Place::of(&at(name)).is_ok_and(|it| it == *place);
        fs::create_dir(at("a")).expect("a folder");
        let place = Place::of(&at("a")).expect("its place");
        assert!(is_at(&place, "a"));
        let text = serde_json::to_string(&place).expect("JSON");
        let read: Place = serde_json::from_str(&text).expect("a place");
        assert_eq!(read, place);
        fs::rename(at("a"), at("b")).expect("renaming it");
        fs::create_dir(at("a")).expect("another one");
        assert!(!is_at(&place, "a") && is_at(&place, "b"));
        symlink(at("b"), at("c")).expect("a link");
        assert!(!is_at(&place, "c") && !is_at(&place, "d"));
    }

    /// As its owner can have there, where `/etc/fuse.conf` says `user_allow_other`.
    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn nobody_waits_for_what_an_owner_has_mounted_over_its_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let covered = folder.path().join("web.1");
        fs::create_dir(&covered).expect("a guest's folder");
        let place = Place::of(&covered).expect("its place");
        let (mounted, is_mounted) = channel();
        let (done, is_done) = channel();
        let act = move || {
            let fuse = mount_silent(&covered);
            mounted.send(fuse).expect("a test that waits");
            let socket = covered.join("vhost.sock");
            let found = Place::of(&covered).map_err(|error| error.kind());
            assert_eq!(found, Err(io::ErrorKind::NotFound));
            let listener = listen_at(&socket, VsockType::Stream, Descriptors::Refused);
            let error = listener.expect_err("it isn't the guest's").to_string();
            assert!(error.contains("mounted over"), "{error}");
            remove_in(Some(place), &socket).expect("nothing to remove");
            Spot::of(&socket).expect_err("nobody calls there");
            done.send(()).expect("a test that waits");
        };
        let thread = thread::spawn(act);
        let fuse = is_mounted.recv().expect("what is mounted");
        let was_in_time = is_done.recv_timeout(Duration::from_secs(60));
        // Whoever waits is told that nobody will answer.
        drop(fuse);
        let ended = thread.join();
        was_in_time.expect("an end without an answer");
        ended.expect("nothing that was refused");
    }

    /// Mounts a file system that answers nothing while what this gives lives, where this thread alone sees it.
    fn mount_silent(at: &Path) -> File {
        // SAFETY: no memory is touched; what differs from then on is where this thread, which is the test's own, finds files.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNS) }, 0, "root's");
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        mount_change("/", private).expect("mounts of its own");
        let fuse = File::options().read(true).write(true).open("/dev/fuse");
        let fuse = fuse.expect("FUSE");
        let number = fuse.as_raw_fd();
        let options =
            format!("fd={number},rootmode=40000,user_id=0,group_id=0,allow_other\0").into_bytes();
        let options = std::ffi::CString::from_vec_with_nul(options).expect("options");
        mount("owner", at, "fuse", MountFlags::empty(), &*options).expect("mounting");
        fuse
    }
}
