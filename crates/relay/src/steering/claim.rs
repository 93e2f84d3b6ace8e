//! Who steers in a network namespace: one at a time.
//!
//! What the kernel is told has fixed names there. Two relays would tell it anew in turn, each for itself. The sign is a lock
//! on a file, which the kernel takes away with its owner, however that ends. Where there can be no such file, it is steered
//! without: a host that can't keep two relays apart still lets nothing out.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::Path,
};

/// Whatever the configuration says of folders: two may say something different.
const FOLDER: &str = "/run/sandwire";
const NAMESPACE: &str = "/proc/thread-self/ns/net";

/// That nobody else steers in the namespace. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    _file: Option<File>,
}

impl Claim {
    /// Takes it for the namespace that the thread is in, unless somebody has it.
    pub(crate) fn take() -> Option<Self> {
        Self::take_in(Path::new(FOLDER))
    }

    fn take_in(folder: &Path) -> Option<Self> {
        match lock(folder) {
            Ok(file) => Some(Self { _file: Some(file) }),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Error(error)) => {
                tracing::warn!(%error, folder = FOLDER, "it can't be seen whether another relay steers here");
                Some(Self { _file: None })
            }
        }
    }
}

fn lock(folder: &Path) -> Result<File, TryLockError> {
    let file = open(folder).map_err(TryLockError::Error)?;
    file.try_lock()?;
    Ok(file)
}

/// The file stays: whoever removed it might remove one that somebody else has just locked.
fn open(folder: &Path) -> io::Result<File> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(folder)?;
    let namespace = fs::metadata(NAMESPACE)?.ino();
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(folder.join(format!("relay-steers-{namespace}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_it_until_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("not-there-yet");
        let first = Claim::take_in(&folder).unwrap();
        assert!(Claim::take_in(&folder).is_none());
        drop(first);
        assert!(Claim::take_in(&folder).is_some());
    }

    #[test]
    fn without_a_folder_it_is_steered_nevertheless() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let claims = [(); 2].map(|()| Claim::take_in(file.path()));
        assert!(claims.iter().all(Option::is_some));
    }
}
