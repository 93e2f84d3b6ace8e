//! Which folder a guest's sockets are in.
//!
//! A path doesn't say that: it follows from a slot's number, which the next lease has too. Whoever comes late, at a start
//! or with an end that was missed, would touch the sockets of somebody else's guest.

use std::{fs, io, os::unix::fs::MetadataExt, path::Path, time::UNIX_EPOCH};

use serde::{Deserialize, Serialize};

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
    /// `NotFound`, and what the kernel says else.
    pub fn of(folder: &Path) -> io::Result<Self> {
        let found = fs::symlink_metadata(folder)?;
        let made = found.created().ok();
        let made = made.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        Ok(Self {
            device: found.dev(),
            inode: found.ino(),
            made: made.and_then(|since| u64::try_from(since.as_nanos()).ok()),
        })
    }

    /// Whether a path leads there.
    #[must_use]
    pub fn is_at(&self, folder: &Path) -> bool {
        Self::of(folder).is_ok_and(|found| found == *self)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_folder_that_was_made_anew_is_another_and_a_renamed_one_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("a")).expect("a folder");
        let place = Place::of(&at("a")).expect("its place");
        assert!(place.is_at(&at("a")));
        let text = serde_json::to_string(&place).expect("JSON");
        let read: Place = serde_json::from_str(&text).expect("a place");
        assert_eq!(read, place);
        fs::rename(at("a"), at("b")).expect("renaming it");
        fs::create_dir(at("a")).expect("another one");
        assert!(!place.is_at(&at("a")) && place.is_at(&at("b")));
        symlink(at("b"), at("c")).expect("a link");
        assert!(!place.is_at(&at("c")) && !place.is_at(&at("d")));
    }
}
