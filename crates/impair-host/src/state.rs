//! What the service remembers over its own end: a file per target.
//!
//! A file is written beside its place and renamed, so each is whole at any time. It is not synced: what has to survive
//! is the end of this process, and no diversion survives the end of the machine.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use sandwire_api::impairment::Impairment;
use serde::{Deserialize, Serialize};

use crate::{
    control::{Owner, Target},
    error::Error,
};

/// A target as it is remembered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Remembered {
    /// Which.
    pub(crate) target: Target,
    /// On whose behalf.
    pub(crate) owner: Owner,
    /// How.
    pub(crate) impairment: Impairment,
    /// Whether it was insisted on.
    pub(crate) force: bool,
    /// Of its namespace: by then another may have the same file.
    pub(crate) inode: u64,
    /// Of its namespace too, since its inode may be another's by then. Not known before Linux 5.14, and of what an earlier version
    /// remembered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cookie: Option<u64>,
    /// Of its interface: by then another may have the same name.
    pub(crate) ifindex: u32,
}

/// The folder of those files.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    folder: PathBuf,
}

impl Memory {
    /// In that folder, which is made.
    pub(crate) fn open(folder: PathBuf) -> Result<Self, Error> {
        fs::create_dir_all(&folder).map_err(|source| failed("create", &folder, source))?;
        Ok(Self { folder })
    }

    /// Remembers a target, in place of what was remembered of it.
    pub(crate) fn write(&self, remembered: &Remembered) -> Result<(), Error> {
        self.prepare(remembered)?.commit()
    }

    /// Writes what is to be remembered of a target from [`Written::commit`] on, which takes no more room on the disk.
    pub(crate) fn prepare(&self, remembered: &Remembered) -> Result<Written, Error> {
        let path = self.path(remembered.inode, remembered.ifindex);
        let beside = path.with_extension("new");
        // Made first, so that what fails leaves no file.
        let written = Written {
            beside: beside.clone(),
            path: path.clone(),
        };
        let write = || fs::write(&beside, serde_json::to_vec_pretty(remembered)?);
        write().map_err(|source| failed("write", &path, source))?;
        Ok(written)
    }

    /// Forgets a target; also right if it isn't remembered.
    pub(crate) fn remove(&self, inode: u64, ifindex: u32) -> Result<(), Error> {
        let path = self.path(inode, ifindex);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("remove", &path, error))
            }
            _ => Ok(()),
        }
    }

    /// Everything that is remembered; of each file that can't be read why.
    pub(crate) fn read(&self) -> Result<(Vec<Remembered>, Vec<Error>), Error> {
        let listing = |source| failed("list", &self.folder, source);
        let (mut found, mut errors) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(&self.folder).map_err(listing)? {
            let path = entry.map_err(listing)?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let read = fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?));
            match read {
                Ok(remembered) => found.push(remembered),
                Err(source) => errors.push(failed("read", &path, source)),
            }
        }
        Ok((found, errors))
    }

    fn path(&self, inode: u64, ifindex: u32) -> PathBuf {
        self.folder.join(format!("{inode}-{ifindex}.json"))
    }
}

/// What is written, but not remembered yet; gone if it isn't going to be.
#[derive(Debug)]
pub(crate) struct Written {
    beside: PathBuf,
    path: PathBuf,
}

impl Written {
    /// Remembers it, in place of what was remembered of the target.
    pub(crate) fn commit(self) -> Result<(), Error> {
        let renamed = fs::rename(&self.beside, &self.path);
        renamed.map_err(|source| failed("write", &self.path, source))
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        // After a commit there is none.
        let _ = fs::remove_file(&self.beside);
    }
}

fn failed(operation: &'static str, path: &Path, source: io::Error) -> Error {
    Error::State {
        operation,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

    use super::*;

    fn remembered(ifindex: u32) -> Remembered {
        Remembered {
            target: Target {
                netns: Some(PathBuf::from("/run/netns/far")),
                interface: "eth0".to_owned(),
                side: crate::control::Side::Sandbox,
            },
            owner: Owner::User { uid: 0 },
            impairment: "seed 7; delay 50ms; egress loss 1%".parse().unwrap(),
            force: false,
            inode: 4_026_531_840,
            cookie: Some(7),
            ifindex,
        }
    }

    #[test]
    fn what_is_written_is_read_until_it_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::open(folder.path().join("targets")).unwrap();
        memory.write(&remembered(7)).unwrap();
        memory.write(&remembered(8)).unwrap();
        memory.write(&remembered(7)).unwrap();
        let (mut found, errors) = memory.read().unwrap();
        found.sort_by_key(|found| found.ifindex);
        assert_eq!(found, [remembered(7), remembered(8)]);
        assert!(errors.is_empty());
        memory.remove(4_026_531_840, 7).unwrap();
        memory.remove(4_026_531_840, 7).unwrap();
        assert_eq!(memory.read().unwrap().0, [remembered(8)]);
    }

    #[test]
    fn a_damaged_file_is_said_and_the_others_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::open(folder.path().to_owned()).unwrap();
        memory.write(&remembered(7)).unwrap();
        fs::write(folder.path().join("1-2.json"), "{").unwrap();
        fs::write(folder.path().join("1-3.new"), "{").unwrap();
        let (found, errors) = memory.read().unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(errors.len(), 1);
        assert!(errors[0].to_string().contains("1-2.json"));
    }
}
