//! The journal in a state folder: whose it is, and its end.
//!
//! A running sandbox whose journal is gone loses its network when its daemon starts, so that of another instance is left
//! alone. What can't be read any more is nobody's.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};
use sandwire_api::{error::ErrorCode, name::Name};
use sandwire_slot::journal::Journal;

use crate::failure::Failure;

/// File that a running daemon has locked.
const LOCK_FILE: &str = "daemon.lock";
/// Start of the names of the journal's files.
const JOURNAL: &str = "journal.";

/// The journal's files in the state folder of an instance, whose name is locked already.
///
/// # Errors
/// There is no such folder, or another instance has it.
pub(super) fn find(folder: &Path, instance: &Name) -> Result<Vec<PathBuf>, Failure> {
    let shown = folder.display();
    let refuse = |code, reason: &str| {
        let action = "give the `state_dir` of its configuration, or leave --state-dir out";
        Failure::new(
            code,
            format!("cannot clean up instance {instance}: {reason}; {action}"),
        )
    };
    let files = files(folder).map_err(|error| {
        let reason = format!("cannot read the state folder {shown}: {error}");
        refuse(ErrorCode::InvalidRequest, &reason)
    })?;
    if is_locked(&folder.join(LOCK_FILE)) {
        let reason = format!("a daemon of another instance uses the state folder {shown}");
        return Err(refuse(ErrorCode::Conflict, &reason));
    }
    let whose = Journal::instance_in(folder);
    if let Some(other) = whose.filter(|name| name != instance.as_str()) {
        let reason = format!("the journal in {shown} is that of instance '{other}'");
        return Err(refuse(ErrorCode::Conflict, &reason));
    }
    Ok(files)
}

/// Removes the files, and tells what went wrong.
pub(super) fn remove(files: &[PathBuf]) -> Vec<String> {
    let failures = files.iter().filter_map(|file| {
        let error = fs::remove_file(file).err()?;
        Some(format!("cannot remove journal {}: {error}", file.display()))
    });
    failures.collect()
}

fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(JOURNAL) {
            files.push(entry.path());
        }
    }
    Ok(files)
}

/// Whether another process holds the lock.
fn is_locked(file: &Path) -> bool {
    fs::File::open(file).is_ok_and(|file| {
        let attempt = flock(&file, FlockOperation::NonBlockingLockShared);
        attempt.is_err_and(|error| error == rustix::io::Errno::WOULDBLOCK)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(name: &str) -> Name {
        name.parse().unwrap()
    }

    #[test]
    fn a_lock_is_seen_while_another_holds_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(LOCK_FILE);
        assert!(!is_locked(&path), "there is no file yet");
        let held = fs::File::create(&path).unwrap();
        assert!(!is_locked(&path));
        flock(&held, FlockOperation::LockExclusive).unwrap();
        assert!(is_locked(&path));
        let refused = find(folder.path(), &instance("two")).unwrap_err();
        assert!(
            refused.message.contains("a daemon of another instance"),
            "{}",
            refused.message
        );
    }

    #[test]
    fn only_the_journal_is_removed_from_a_state_folder() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "journal.sqlite",
            "journal.sqlite-wal",
            "daemon.lock",
            "notes",
        ] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        // It is damaged, and so nobody's.
        let found = find(folder.path(), &instance("two")).unwrap();
        assert_eq!(remove(&found), [""; 0]);
        let mut left: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["daemon.lock", "notes"]);
    }

    #[test]
    fn the_journal_of_another_instance_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let opened = Journal::open(folder.path(), &instance("one"), "this boot").unwrap();
        drop(opened);
        let seen = || files(folder.path()).unwrap();
        let before = seen();
        let refused = find(folder.path(), &instance("two")).unwrap_err();
        assert_eq!(refused.exit_status, 1);
        assert!(
            refused.message.contains("that of instance 'one'"),
            "{}",
            refused.message
        );
        assert_eq!(find(folder.path(), &instance("one")), Ok(before));
    }

    #[test]
    fn a_folder_that_is_not_there_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("wrong");
        let refused = find(&missing, &instance("two")).unwrap_err();
        assert_eq!(refused.exit_status, 1);
        assert!(
            refused.message.contains("--state-dir"),
            "{}",
            refused.message
        );
        assert_eq!(find(folder.path(), &instance("two")), Ok(Vec::new()));
    }
}
