//! What the service remembers over its own end: a file per guest, `TENANT.LEASE.json`.
//!
//! A file is written beside its place and renamed, so each is whole at any time. It is not synced: what has
//! to survive is the end of this process, and no guest survives the end of the host.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags, open, rename, unlink},
    io::Errno,
};

use crate::{address::VmKey, control::VmSpec};

/// How a file is opened for writing: only ever a new one. The seccomp filter allows nothing else.
pub const CREATE_FLAGS: OFlags = OFlags::WRONLY
    .union(OFlags::CREATE)
    .union(OFlags::EXCL)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOFOLLOW);

/// Why something can't be remembered or recalled.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {path}: {source}")]
pub struct StateError {
    operation: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// The folder of those files.
#[derive(Clone, Debug)]
pub struct State {
    folder: PathBuf,
}

impl State {
    /// In that folder, which exists.
    #[must_use]
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Remembers a guest, in place of what was remembered of it.
    ///
    /// # Errors
    /// A full disk, mostly. What was remembered before still is.
    pub fn write(&self, vm: &VmSpec) -> Result<(), StateError> {
        let path = self.path(&vm.key);
        let beside = path.with_extension("new");
        let outcome = self.write_beside(&beside, vm).and_then(|()| {
            rename(&beside, &path).map_err(|error| failed("rename", &beside, error.into()))
        });
        if outcome.is_err() {
            // It may not even be there.
            let _ = unlink(&beside);
        }
        outcome
    }

    fn write_beside(&self, path: &Path, vm: &VmSpec) -> Result<(), StateError> {
        let text =
            serde_json::to_vec_pretty(vm).map_err(|error| failed("write", path, error.into()))?;
        match unlink(path) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(failed("remove", path, error.into())),
        }
        let file = open(path, CREATE_FLAGS, Mode::RUSR | Mode::WUSR)
            .map_err(|error| failed("create", path, error.into()))?;
        let mut rest = text.as_slice();
        while !rest.is_empty() {
            match rustix::io::write(&file, rest) {
                Ok(written) => rest = &rest[written..],
                Err(Errno::INTR) => {}
                Err(error) => return Err(failed("write", path, error.into())),
            }
        }
        Ok(())
    }

    /// Forgets a guest; also right if it isn't remembered.
    ///
    /// # Errors
    /// Whatever the kernel says.
    pub fn remove(&self, key: &VmKey) -> Result<(), StateError> {
        let path = self.path(key);
        match unlink(&path) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(failed("remove", &path, error.into())),
        }
    }

    /// Everything that is remembered, in the order of keys, and for each file that can't be read why.
    ///
    /// # Errors
    /// When the folder itself can't be read.
    pub fn read(&self) -> Result<(Vec<VmSpec>, Vec<StateError>), StateError> {
        let listing = |source| failed("list", &self.folder, source);
        let (mut vms, mut errors) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(&self.folder).map_err(listing)? {
            let path = entry.map_err(listing)?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("json") => match self.read_one(&path) {
                    Ok(vm) => vms.push(vm),
                    Err(source) => errors.push(failed("read", &path, source)),
                },
                // What an end in the middle of writing has left.
                Some("new") => {
                    let _ = unlink(&path);
                }
                _ => {}
            }
        }
        vms.sort_by(|left, right| left.key.cmp(&right.key));
        Ok((vms, errors))
    }

    fn read_one(&self, path: &Path) -> io::Result<VmSpec> {
        let vm: VmSpec = serde_json::from_slice(&fs::read(path)?)?;
        if self.path(&vm.key) != path {
            let message = format!("it is about {}, whose file is called otherwise", vm.key);
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(vm)
    }

    fn path(&self, key: &VmKey) -> PathBuf {
        let VmKey { tenant, lease } = key;
        self.folder.join(format!("{tenant}.{lease}.json"))
    }
}

fn failed(operation: &'static str, path: &Path, source: io::Error) -> StateError {
    StateError {
        operation,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(tenant: u32, lease: &str) -> VmSpec {
        let text = format!(
            r#"{{"key": {{"tenant": {tenant}, "lease": "{lease}"}}, "folder": "/run/{lease}",
                "policy": {{"rules": [{{"port": "1-9", "to": {{"kind": "host"}}}}]}}}}"#
        );
        serde_json::from_str(&text).expect("a spec")
    }

    #[test]
    fn what_was_written_last_is_read_again_and_broken_files_are_told_of() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = State::new(folder.path().to_owned());
        let (first, second) = (spec(1000, "b"), spec(7, "a"));
        let mut changed = second.clone();
        changed.cid = 77;
        for vm in [&first, &second, &changed] {
            state.write(vm).expect("writing");
        }
        fs::write(folder.path().join("5.c.json"), "{").expect("a broken file");
        fs::copy(
            folder.path().join("7.a.json"),
            folder.path().join("8.a.json"),
        )
        .expect("a copy");
        fs::write(folder.path().join("9.d.new"), "{").expect("half a file");
        let (vms, errors) = state.read().expect("reading");
        assert_eq!(vms, [changed.clone(), first.clone()]);
        let mut errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        errors.sort();
        assert!(
            errors[0].contains("5.c.json") && errors[1].contains("a of user 7"),
            "{errors:?}"
        );
        assert!(!folder.path().join("9.d.new").exists());
        state.remove(&first.key).expect("removing");
        state.remove(&first.key).expect("removing it again");
        assert_eq!(state.read().expect("reading").0, [changed]);
    }
}
