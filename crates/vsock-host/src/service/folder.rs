//! The service's folder: root's, where the service becomes a user of its own, and within it the memory, which is that user's.
//!
//! The folder also has channels' folders, which the daemon makes and removes, and this is prepared by root at each start. Were it the
//! user's, whoever has taken a service over could put links in the place of what is in it, and have files of anybody's given to itself.

use std::{
    fs::DirBuilder,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Uid, chownat, fchown, fstat, mkdirat,
        openat,
    },
    io::Errno,
    path::Arg,
    process::{getegid, geteuid},
};

use super::ServiceError;

/// Name of what the service remembers, in its folder.
const MEMORY: &str = "vms";

/// Makes the folder and the one of its memory, and has them belong to whom they should. Gives the path of the second.
pub(super) fn prepare(folder: &Path, user: Option<(u32, u32)>) -> Result<PathBuf, ServiceError> {
    let memory = folder.join(MEMORY);
    let failed = |operation, path: &Path, source| ServiceError::Folder {
        operation,
        path: path.to_owned(),
        source,
    };
    let made = DirBuilder::new().recursive(true).mode(0o755).create(folder);
    made.map_err(|source| failed("make the folder", folder, source))?;
    let outer = open_folder(CWD, folder);
    let outer = outer.map_err(|error| failed("open the folder", folder, error.into()))?;
    if user.is_some() {
        keep(&outer)
            .map_err(|error| failed("keep from its user the folder", folder, error.into()))?;
    }
    let inner = make_memory(&outer);
    let inner = inner.map_err(|error| failed("make the folder", &memory, error.into()))?;
    if let Some((user, group)) = user {
        give(&inner, Uid::from_raw(user), Gid::from_raw(group))
            .map_err(|error| failed("give to its user", &memory, error.into()))?;
    }
    Ok(memory)
}

/// Takes the folder from the service's user, who had it in earlier versions.
fn keep(folder: &OwnedFd) -> Result<(), Errno> {
    match fstat(folder)?.st_uid == geteuid().as_raw() {
        true => Ok(()),
        false => fchown(folder, Some(geteuid()), Some(getegid())),
    }
}

fn make_memory(folder: &OwnedFd) -> Result<OwnedFd, Errno> {
    match mkdirat(folder, MEMORY, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => open_folder(folder, MEMORY),
        Err(error) => Err(error),
    }
}

/// Gives the memory away, with the files that a service under another user has written. What that service can't have written
/// stays as it is: it may have been taken over.
fn give(memory: &OwnedFd, user: Uid, group: Gid) -> Result<(), Errno> {
    fchown(memory, Some(user), Some(group))?;
    for entry in Dir::read_from(memory)? {
        let entry = entry?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(memory, entry.file_name(), flags, Mode::empty())?;
        let found = fstat(&file)?;
        let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
        if is_file && found.st_nlink == 1 {
            chownat(&file, "", Some(user), Some(group), AtFlags::EMPTY_PATH)?;
        }
    }
    Ok(())
}

fn open_folder(at: impl AsFd, path: impl Arg) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    openat(at, path, flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, chown, symlink},
    };

    use super::*;

    const USER: (u32, u32) = (65_534, 65_534);

    fn owner(path: &Path) -> (u32, u32) {
        let found = fs::symlink_metadata(path).expect("a file");
        (found.uid(), found.gid())
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn the_memory_is_the_users_and_the_folder_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("vms")).expect("the memory");
        fs::write(at("vms/0.web.json"), "").expect("a guest");
        // As a former version left it.
        chown(folder.path(), Some(USER.0), Some(USER.1)).expect("giving it away");
        let memory = prepare(folder.path(), Some(USER)).expect("preparing");
        assert_eq!(memory, at("vms"));
        assert_eq!(owner(&memory), USER);
        assert_eq!(owner(&at("vms/0.web.json")), USER);
        assert_eq!(owner(folder.path()), (0, 0));
        prepare(folder.path(), None).expect("preparing for root");
        assert_eq!(owner(&memory), USER, "root can read it as it is");
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn what_a_taken_over_service_has_put_there_gives_it_nothing() {
        let (folder, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir());
        let other = other.expect("another folder");
        let at = |name: &str| folder.path().join(name);
        let precious = other.path().join("precious");
        fs::write(&precious, "").expect("a file");
        symlink(other.path(), at("vms")).expect("a link in its place");
        prepare(folder.path(), Some(USER)).expect_err("the memory is a link");
        fs::remove_file(at("vms")).expect("removing the link");
        fs::create_dir(at("vms")).expect("the memory");
        symlink(&precious, at("vms/link")).expect("a link within");
        fs::hard_link(&precious, at("vms/other")).expect("a file of somebody else's");
        prepare(folder.path(), Some(USER)).expect("preparing");
        assert_eq!(owner(&precious), (0, 0));
        assert_eq!(owner(other.path()), (0, 0));
    }
}
