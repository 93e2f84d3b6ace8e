//! Cgroups by path: that one is there, of which version, and the number that the kernel knows it by.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};

use crate::Error;

const CGROUP2_MAGIC: u64 = 0x6367_7270;
const CGROUP1_MAGIC: u64 = 0x0027_e0eb;

/// A cgroup of version 2 that is there.
#[derive(Debug)]
pub struct Cgroup {
    /// Where it is, without symbolic links.
    pub path: PathBuf,
    /// Its number: the inode of its folder.
    pub id: u64,
    pub(crate) folder: File,
}

impl Cgroup {
    /// Opens a cgroup.
    ///
    /// # Errors
    /// It isn't there, is of version 1, or is the root of the hierarchy.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let missing = |source| Error::NoCgroup {
            path: path.to_owned(),
            source,
        };
        let path = path.canonicalize().map_err(missing)?;
        let folder = File::open(&path).map_err(missing)?;
        let found = file_system(&folder).map_err(missing)?;
        if found != CGROUP2_MAGIC {
            let found = if found == CGROUP1_MAGIC {
                "it is of cgroup version 1"
            } else {
                "it is on another file system"
            };
            return Err(Error::NotVersion2 { path, found });
        }
        let id = folder.metadata().map_err(missing)?.ino();
        // Only the root has none of it, and one that has just gone.
        if !path.join("cgroup.type").exists() {
            if !Self::is_there(&path, id) {
                return Err(missing(io::ErrorKind::NotFound.into()));
            }
            return Err(Error::RootCgroup { path });
        }
        Ok(Self { path, id, folder })
    }

    /// Whether a cgroup is still there under its path; another of that name is another.
    #[must_use]
    pub(crate) fn is_there(path: &Path, id: u64) -> bool {
        fs::metadata(path).is_ok_and(|found| found.ino() == id)
    }
}

/// Whether nobody is in a cgroup, and nobody holds a lock on its folder, as who made it for a command does. One that
/// isn't at its path may be at another for who has another view of cgroups.
pub(crate) fn is_abandoned(path: &Path, id: u64) -> bool {
    claim(path, id).is_some()
}

/// The lock on the folder of a cgroup that nobody is in and nobody has locked. Whoever removes it keeps that until it is
/// gone: who has just made it may be about to lock it.
pub(crate) fn claim(path: &Path, id: u64) -> Option<File> {
    let folder = File::open(path).ok()?;
    let is_meant = folder.metadata().is_ok_and(|found| found.ino() == id);
    let is_free = || flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok();
    (is_meant && is_free() && !is_populated(path)).then_some(folder)
}

/// Whether a process is in a cgroup or below it, or might be.
pub(crate) fn is_populated(path: &Path) -> bool {
    let events = fs::read_to_string(path.join("cgroup.events"));
    events.map_or(true, |text| !text.lines().any(|line| line == "populated 0"))
}

/// Removes a cgroup with those below it, unless a process is in one.
pub(crate) fn remove_if_empty(path: &Path, id: u64) {
    if Cgroup::is_there(path, id) && !is_populated(path) {
        // What can't be removed is busy, or gone.
        let _ = remove_tree(path);
    }
}

/// Folders of cgroups can't be emptied of files, and needn't be.
pub(crate) fn remove_tree(path: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(path)
}

fn file_system(folder: &File) -> std::io::Result<u64> {
    let found = rustix::fs::fstatfs(folder.as_fd())?;
    // The type of the magic number depends on the machine.
    Ok(u64::try_from(found.f_type).unwrap_or(0) & 0xffff_ffff)
}
