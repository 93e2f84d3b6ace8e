//! What the service remembers over its own end: a file per guest, `TENANT.LEASE.json`, with the folder that it had.
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

use serde_json::{Map, Value};

use crate::{address::VmKey, control::VmSpec, place::Place};

/// What a guest's file has beside the guest.
const PLACE: &str = "place";

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

/// A guest that is remembered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// What the service was told of it.
    pub vm: VmSpec,
    /// Its folder, if it was known: versions before this one didn't note it down.
    pub place: Option<Place>,
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
    pub fn write(&self, vm: &VmSpec, place: Option<Place>) -> Result<(), StateError> {
        let path = self.path(&vm.key);
        let beside = path.with_extension("new");
        let outcome = self.write_beside(&beside, vm, place).and_then(|()| {
            rename(&beside, &path).map_err(|error| failed("rename", &beside, error.into()))
        });
        if outcome.is_err() {
            // It may not even be there.
            let _ = unlink(&beside);
        }
        outcome
    }

    fn write_beside(
        &self,
        path: &Path,
        vm: &VmSpec,
        place: Option<Place>,
    ) -> Result<(), StateError> {
        let text = text_of(vm, place).map_err(|error| failed("write", path, error.into()))?;
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
    pub fn read(&self) -> Result<(Vec<Remembered>, Vec<StateError>), StateError> {
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
        vms.sort_by(|left: &Remembered, right| left.vm.key.cmp(&right.vm.key));
        Ok((vms, errors))
    }

    fn read_one(&self, path: &Path) -> io::Result<Remembered> {
        let mut text: Map<String, Value> = serde_json::from_slice(&fs::read(path)?)?;
        let place = text.remove(PLACE);
        let place = place.map(serde_json::from_value).transpose()?;
        let vm: VmSpec = serde_json::from_value(Value::Object(text))?;
        if self.path(&vm.key) != path {
            let message = format!("it is about {}, whose file is called otherwise", vm.key);
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(Remembered { vm, place })
    }

    fn path(&self, key: &VmKey) -> PathBuf {
        let VmKey { tenant, lease } = key;
        self.folder.join(format!("{tenant}.{lease}.json"))
    }
}

fn text_of(vm: &VmSpec, place: Option<Place>) -> serde_json::Result<Vec<u8>> {
    let mut value = serde_json::to_value(vm)?;
    if let (Value::Object(fields), Some(place)) = (&mut value, place) {
        fields.insert(PLACE.to_owned(), serde_json::to_value(place)?);
    }
    serde_json::to_vec_pretty(&value)
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
        let place = Place::of(folder.path()).ok();
        assert!(place.is_some());
        for (vm, place) in [(&first, None), (&second, None), (&changed, place)] {
            state.write(vm, place).expect("writing");
        }
        fs::write(folder.path().join("5.c.json"), "{").expect("a broken file");
        fs::copy(
            folder.path().join("7.a.json"),
            folder.path().join("8.a.json"),
        )
        .expect("a copy");
        fs::write(folder.path().join("9.d.new"), "{").expect("half a file");
        let (vms, errors) = state.read().expect("reading");
        let remembered = |vm: &VmSpec, place| Remembered {
            vm: vm.clone(),
            place,
        };
        let with_place = remembered(&changed, place);
        assert_eq!(vms, [with_place.clone(), remembered(&first, None)]);
        let mut errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        errors.sort();
        assert!(
            errors[0].contains("5.c.json") && errors[1].contains("a of user 7"),
            "{errors:?}"
        );
        assert!(!folder.path().join("9.d.new").exists());
        state.remove(&first.key).expect("removing");
        state.remove(&first.key).expect("removing it again");
        assert_eq!(state.read().expect("reading").0, [with_place]);
    }
}
