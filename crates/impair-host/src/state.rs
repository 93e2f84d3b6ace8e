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
        let path = self.path(remembered.inode, remembered.ifindex);
        let beside = path.with_extension("new");
        let write = || {
            let text = serde_json::to_vec_pretty(remembered)?;
            fs::write(&beside, text)?;
            fs::rename(&beside, &path)
        };
        write().map_err(|source| failed("write", &path, source))
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

fn failed(operation: &'static str, path: &Path, source: io::Error) -> Error {
    Error::State {
        operation,
        path: path.to_owned(),
        source,
    }
}
