//! A cgroup for one command, made and removed by who runs it.
//!
//! Its maker holds a lock on its folder. One that nobody is in and nobody has locked was left by a maker that was killed:
//! whoever comes next removes it, and its identity.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FlockOperation, flock},
    io::retry_on_intr,
};

use crate::{Cgroup, Error, cgroup};

/// How the folders begin.
const PREFIX: &str = "sandwire-run-";
/// Its files may be read by all, as is usual. The folder itself may not: who can open it can lock it.
const FOLDER_MODE: u32 = 0o711;
/// How often making one is tried again when others remove it meanwhile as abandoned.
const ATTEMPTS: usize = 100;

/// A cgroup that goes with this value, and with it all processes in it.
#[derive(Debug)]
pub struct OwnCgroup {
    path: PathBuf,
    /// Held for as long as the cgroup is in use.
    lock: File,
}

impl OwnCgroup {
    /// Makes a cgroup for the command `name` below another; by default below the one that this process is in.
    ///
    /// # Errors
    /// There is no cgroup of version 2, one of that name is in use, or the kernel refuses.
    pub fn create(parent: Option<&Path>, name: &str) -> Result<Self, Error> {
        let parent = match parent {
            Some(parent) => parent.to_owned(),
            None => current()?,
        };
        sweep(&parent);
        let path = parent.join(format!("{PREFIX}{name}"));
        let shown = path.display().to_string();
        let failed = |source| Error::system("create", shown.clone(), source);
        for _ in 0..ATTEMPTS {
            match DirBuilder::new().mode(FOLDER_MODE).create(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    return Err(Error::CgroupInUse { path });
                }
                made => made.map_err(failed)?,
            }
            // Somebody who sweeps may take it for abandoned until it is locked; then it is gone, or stays.
            if let Some(lock) = lock(&path) {
                return Ok(Self { path, lock });
            }
        }
        Err(failed(io::ErrorKind::TimedOut.into()))
    }

    /// Its folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file that a process enters it by, by writing `0`.
    ///
    /// # Errors
    /// It can't be opened.
    pub fn entrance(&self) -> Result<OwnedFd, Error> {
        let path = self.path.join("cgroup.procs");
        let opened = OpenOptions::new().write(true).open(&path);
        let failed = |source| Error::system("open", path.display().to_string(), source);
        Ok(opened.map_err(failed)?.into())
    }

    /// Whether it is still there: another of that name is another's.
    fn is_there(&self) -> bool {
        let found = self.lock.metadata();
        found.is_ok_and(|found| Cgroup::is_there(&self.path, found.ino()))
    }

    /// Ends all processes in it by SIGKILL, and waits until they are gone.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn kill(&self) -> Result<(), Error> {
        if !self.is_there() {
            return Ok(());
        }
        let kill = self.path.join("cgroup.kill");
        let failed =
            |source| Error::system("kill what is in", self.path.display().to_string(), source);
        fs::write(kill, "1").map_err(failed)?;
        let events = File::open(self.path.join("cgroup.events")).map_err(failed)?;
        while cgroup::is_populated(&self.path) {
            // The kernel tells of a change by POLLPRI; between look and poll one may be missed.
            let mut wanted = [PollFd::new(&events, PollFlags::PRI)];
            let patience = Timespec {
                tv_sec: 0,
                tv_nsec: 50_000_000,
            };
            poll(&mut wanted, Some(&patience)).map_err(|error| failed(error.into()))?;
        }
        Ok(())
    }
}

impl Drop for OwnCgroup {
    fn drop(&mut self) {
        // What stays is found by the next who runs a command.
        let _ = self.kill();
        if let Ok(found) = self.lock.metadata() {
            cgroup::remove_if_empty(&self.path, found.ino());
        }
    }
}

/// Locks a folder that is still the one at its path. Who sweeps has it for a moment.
fn lock(path: &Path) -> Option<File> {
    let folder = File::open(path).ok()?;
    retry_on_intr(|| flock(folder.as_fd(), FlockOperation::LockExclusive)).ok()?;
    let is_there = |found: fs::Metadata| fs::metadata(path).is_ok_and(|at| at.ino() == found.ino());
    folder.metadata().is_ok_and(is_there).then_some(folder)
}

/// Removes what killed commands have left below a cgroup. Those with an identity go with it, by its repair.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let Ok(found) = entry.metadata() else {
            continue;
        };
        if is_ours
            && found.is_dir()
            && let Some(_lock) = cgroup::claim(&entry.path(), found.ino())
        {
            cgroup::remove_if_empty(&entry.path(), found.ino());
        }
    }
}

/// The folder of the cgroup of version 2 that this process is in.
fn current() -> Result<PathBuf, Error> {
    let read = |path: &str| {
        fs::read_to_string(path).map_err(|source| Error::system("read", path.to_owned(), source))
    };
    let found = folder_of(&read("/proc/self/cgroup")?, &read("/proc/self/mountinfo")?);
    found.ok_or(Error::NoHierarchy)
}

/// The same, from the kernel's texts.
fn folder_of(cgroups: &str, mounts: &str) -> Option<PathBuf> {
    let own = cgroups.lines().find_map(|line| line.strip_prefix("0::"))?;
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        if !kind.starts_with("cgroup2 ") {
            return None;
        }
        let mut fields = mount.split(' ').skip(3);
        let (root, place) = (fields.next()?, fields.next()?);
        let below = Path::new(own).strip_prefix(root).ok()?;
        Some(Path::new(place).join(below))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 0:20 / /proc rw - proc proc rw
30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate
";

    #[test]
    fn the_own_cgroup_is_found_below_its_mount() {
        let found = folder_of("0::/user.slice/a.scope\n", MOUNTS);
        let expected = Path::new("/sys/fs/cgroup/user.slice/a.scope");
        assert_eq!(found.as_deref(), Some(expected));
        let both = "5:cpu:/x\n0::/\n";
        let unified = "31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 none rw\n";
        assert_eq!(
            folder_of(both, unified).as_deref(),
            Some(Path::new("/sys/fs/cgroup/unified"))
        );
        assert_eq!(folder_of("5:cpu:/x\n", MOUNTS), None);
        assert_eq!(
            folder_of("0::/a\n", "22 1 0:20 / /proc rw - proc proc rw\n"),
            None
        );
    }

    #[test]
    fn a_mount_of_a_part_shows_that_part() {
        let part = "30 25 0:26 /outer /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let found = folder_of("0::/outer/inner\n", part);
        assert_eq!(found.as_deref(), Some(Path::new("/sys/fs/cgroup/inner")));
        assert_eq!(folder_of("0::/elsewhere\n", part), None);
    }
}
