//! One daemon for each instance.
//!
//! Kernel objects are known by the instance's name alone: a second daemon of that name, with a state folder of its own,
//! would take the slots of the first for leftovers and tear them down under their sandboxes. So the name is locked, for
//! as long as the process lives, where the names of slots' namespaces are too: below `/run`.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use sandwire_api::name::Name;

const FOLDER: &str = "/run/sandwire";

/// Another daemon has the name.
#[derive(Debug, thiserror::Error)]
#[error(
    "another daemon{} is instance '{instance}' of this host, and has all slots of that name: stop it, or give \
     this one an `instance` and a `state_dir` of its own", .pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
)]
pub struct InstanceError {
    /// The name.
    pub instance: Name,
    /// The other daemon's process number, if it could be read.
    pub pid: Option<u32>,
}

/// The name, for as long as this is there: the kernel unlocks it however the process ends.
#[derive(Debug)]
pub struct InstanceLock {
    /// Held, not read.
    _file: Option<File>,
}

impl InstanceLock {
    /// Takes it. Where `/run` can't be written it goes without.
    ///
    /// # Errors
    /// A daemon has it.
    pub fn take(instance: &Name) -> Result<Self, InstanceError> {
        Self::take_in(Path::new(FOLDER), instance)
    }

    fn take_in(folder: &Path, instance: &Name) -> Result<Self, InstanceError> {
        let path = path_in(folder, instance);
        match open(folder, &path).and_then(|file| Ok(lock(&file)?.then_some(file))) {
            Ok(Some(mut file)) => {
                // Only for the error message of who comes second.
                let _ = file.set_len(0);
                let _ = writeln!(file, "{}", std::process::id());
                Ok(Self { _file: Some(file) })
            }
            Ok(None) => Err(InstanceError {
                instance: instance.clone(),
                pid: holder(&path),
            }),
            Err(error) => {
                tracing::warn!(%error, file = %path.display(), "can't make sure that no other daemon has this instance's name");
                Ok(Self { _file: None })
            }
        }
    }
}

fn path_in(folder: &Path, instance: &Name) -> PathBuf {
    folder.join(format!("instance-{instance}.lock"))
}

fn open(folder: &Path, path: &Path) -> io::Result<File> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(folder)?;
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
}

/// Whether it is ours now.
fn lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn holder(path: &Path) -> Option<u32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_daemons_until_it_ends() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = ("a".parse().unwrap(), "b".parse().unwrap());
        let first = InstanceLock::take_in(folder.path(), &a).unwrap();
        let error = InstanceLock::take_in(folder.path(), &a).unwrap_err();
        assert_eq!(error.pid, Some(std::process::id()));
        InstanceLock::take_in(folder.path(), &b).unwrap();
        drop(first);
        InstanceLock::take_in(folder.path(), &a).unwrap();
    }

    #[test]
    fn where_nothing_can_be_locked_a_daemon_starts_all_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        InstanceLock::take_in(&file, &"a".parse().unwrap()).unwrap();
    }
}
