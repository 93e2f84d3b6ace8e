//! Folders of channels: made for a lease's owner, and removed with whatever the owner left there.
//!
//! The owner may write into its folder. So nothing in there is followed, and a removal needs no more memory,
//! stack or descriptors for a deep tree than for a flat one: the folder is first moved out of the way into
//! `removed/`, which only the daemon may enter, and folders within it are moved up beside it one after the
//! other. They are taken from the owner there: what lies in another's folder with a sticky bit is not root's to remove without
//! CAP_FOWNER, which the unit doesn't have. A removal that meets its bound goes on with the next sweep.
//!
//! Nor is a mount crossed: an owner can have some in its folder by FUSE, and over it, and who serves them answers when it likes. They
//! are taken away. What can't be removed all the same is told, and stops nothing else.
//!
//! Nor does a folder's owner say whose it is: whoever has it may give it on, as to the user that a VMM runs as. So it is noted down in
//! `made/`, which is the daemon's alone, which folder was made for whom.

use std::{
    collections::HashSet,
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use rustix::{
    fs::{
        AtFlags, CWD, FileType, Gid, Mode, OFlags, Statx, StatxAttributes, StatxFlags, Uid,
        chownat, fchmod, fchown, open, statx,
    },
    mount::{UnmountFlags, unmount},
    process::{getegid, geteuid},
};
use sandwire_slot::channel::{ChannelError, is_folder_name};
use sandwire_vsock_host::place::Place;
use serde::{Deserialize, Serialize};

/// Files and folders that one removal touches, whatever comes of it: what is more waits for the next sweep.
const REMOVED_AT_ONCE: usize = 10_000;
/// Mounts over one another that are taken away. More than FUSE lets all users have.
const MOUNTS_MAX: usize = 10_000;
/// How something is looked at.
const LOOK: AtFlags = AtFlags::SYMLINK_NOFOLLOW.union(AtFlags::STATX_DONT_SYNC);
/// Owner and the service's group may do everything; files get that group.
const MODE: u32 = 0o2770;

/// The folder of all channels.
#[derive(Debug)]
pub(super) struct Folders {
    base: PathBuf,
    removed: PathBuf,
    /// A note for each folder, of the same name.
    made: PathBuf,
    /// For names in `removed` that were never there.
    next: AtomicU64,
    /// How much couldn't be removed the last time.
    told_stuck: AtomicUsize,
}

/// Whom a folder was made for.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    owner: u32,
    place: Place,
}

impl Folders {
    /// Makes what is missing.
    ///
    /// # Errors
    /// The folder can't be written.
    pub(super) fn new(base: &Path) -> io::Result<Self> {
        let [removed, made] = ["removed", "made"].map(|name| base.join(name));
        for folder in [&removed, &made] {
            let mut builder = DirBuilder::new();
            builder.recursive(true).mode(0o700).create(folder)?;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let first = now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(0));
        Ok(Self {
            base: base.to_owned(),
            removed,
            made,
            next: AtomicU64::new(first),
            told_stuck: AtomicUsize::new(0),
        })
    }

    pub(super) fn base(&self) -> &Path {
        &self.base
    }

    /// Makes a channel's folder. One of the same owner stays as it is, which is false, also where that has given it to somebody else; it
    /// gets the service's group back. Any other makes way.
    pub(super) fn make(&self, folder: &Path, uid: u32, gid: u32) -> Result<bool, ChannelError> {
        let failed = |source| ChannelError::Folder {
            operation: "make the folder of a vsock channel,",
            path: folder.to_owned(),
            source,
        };
        match look(folder) {
            Ok(found) if is_ours(&found) && (found.stx_uid, found.stx_gid) == (uid, gid) => {
                // A former version noted down nothing.
                if !self.was_made_for(folder, uid) {
                    self.note(folder, uid);
                }
                return Ok(false);
            }
            Ok(found) if is_ours(&found) && self.was_made_for(folder, uid) => {
                give_group(folder, gid).map_err(failed)?;
                return Ok(false);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // Who has mounted something over it may say that it may not be looked at.
            Ok(_) | Err(_) => self.remove(folder)?,
        }
        create(folder, uid, gid, || self.note(folder, uid)).map_err(failed)?;
        Ok(true)
    }

    /// Notes down for whom a folder was made. Without a note it is known by its owner and group.
    fn note(&self, folder: &Path, owner: u32) {
        let Some(path) = self.note_of(folder) else {
            return;
        };
        let text = Place::of(folder).and_then(|place| {
            let note = Note { owner, place };
            serde_json::to_vec(&note).map_err(io::Error::from)
        });
        if let Err(error) = text.and_then(|text| fs::write(&path, text)) {
            tracing::warn!(%error, path = %path.display(), "a channel's folder isn't noted down");
        }
    }

    fn was_made_for(&self, folder: &Path, owner: u32) -> bool {
        let note = self.note_of(folder).and_then(|path| fs::read(path).ok());
        let note: Option<Note> = note.and_then(|text| serde_json::from_slice(&text).ok());
        note.is_some_and(|note| {
            note.owner == owner && Place::of(folder).is_ok_and(|place| place == note.place)
        })
    }

    fn note_of(&self, folder: &Path) -> Option<PathBuf> {
        Some(self.made.join(folder.file_name()?))
    }

    /// Whether a channel's folder is there.
    pub(super) fn has(&self, folder: &Path) -> bool {
        !look(folder).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    /// Gives a channel's folder to the service's group again, if it is another's.
    pub(super) fn keep_group(&self, folder: &Path, uid: u32, gid: u32) {
        let is_another_s = look(folder).is_ok_and(|found| is_ours(&found) && found.stx_gid != gid);
        if is_another_s
            && self.was_made_for(folder, uid)
            && let Err(error) = give_group(folder, gid)
        {
            tracing::warn!(%error, path = %folder.display(), "a channel's folder isn't its service's group's");
        }
    }

    /// Removes a channel's folder. One that isn't there is no error.
    pub(super) fn remove(&self, folder: &Path) -> Result<(), ChannelError> {
        // First: what can't be removed isn't the next one's.
        if let Some(note) = self.note_of(folder)
            && let Err(error) = fs::remove_file(&note)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, path = %note.display(), "the note of a channel's folder stays");
        }
        match past_mounts(folder, || fs::rename(folder, self.place())) {
            Ok(()) => {
                self.empty();
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(ChannelError::Folder {
                operation: "remove the folder of a vsock channel,",
                path: folder.to_owned(),
                source,
            }),
        }
    }

    /// Removes folders of channels that aren't wanted, and goes on with earlier removals.
    pub(super) fn sweep(&self, wanted: &HashSet<PathBuf>) {
        let entries = match fs::read_dir(&self.base) {
            Ok(entries) => entries,
            Err(error) => {
                tracing::warn!(%error, folder = %self.base.display(), "cannot look for folders of channels");
                return;
            }
        };
        for entry in entries.flatten() {
            let path = entry.path();
            let is_channel = entry.file_name().to_str().is_some_and(is_folder_name);
            if is_channel
                && !wanted.contains(&path)
                && let Err(error) = self.remove(&path)
            {
                tracing::warn!(%error, "a folder of no channel is left");
            }
        }
        self.empty();
    }

    /// Empties `removed`, as far as the bound allows.
    fn empty(&self) {
        let mut pass = Pass {
            left: REMOVED_AT_ONCE,
            ..Pass::default()
        };
        loop {
            let before = pass.removed;
            pass.stuck = 0;
            let Ok(entries) = fs::read_dir(&self.removed) else {
                return;
            };
            for entry in entries.flatten() {
                self.remove_one(&entry.path(), &mut pass);
                if pass.left == 0 {
                    return;
                }
            }
            // Nothing there, or nothing that could be removed.
            if pass.removed == before {
                self.tell(&pass);
                return;
            }
        }
    }

    /// Tells what stays, unless it is as much as the last time.
    fn tell(&self, pass: &Pass) {
        let told = self.told_stuck.swap(pass.stuck, Ordering::Relaxed);
        if let Some((path, error)) = &pass.failure
            && pass.stuck != told
            && pass.stuck > 0
        {
            tracing::warn!(files = pass.stuck, first = %path.display(), %error, "parts of removed channels can't be removed, and are tried again");
        }
    }

    /// Removes a file, or a folder whose own folders are moved beside it.
    fn remove_one(&self, path: &Path, pass: &mut Pass) {
        let is_folder = fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
        if !is_folder {
            pass.count(path, fs::remove_file(path));
            return;
        }
        if let Err(error) = take(path) {
            tracing::debug!(%error, "a folder of a removed channel can't be taken from its owner");
        }
        let entries = match fs::read_dir(path) {
            Ok(entries) => entries,
            Err(error) => {
                pass.count(path, Err(error));
                return;
            }
        };
        for entry in entries.flatten() {
            let inner = entry.path();
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let done = past_mounts(&inner, || match is_folder {
                true => fs::rename(&inner, self.place()),
                false => fs::remove_file(&inner),
            });
            pass.count(&inner, done);
            if pass.left == 0 {
                return;
            }
        }
        pass.count(path, fs::remove_dir(path));
    }

    /// A path in `removed` that nothing has.
    fn place(&self) -> PathBuf {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.removed.join(format!("{number:x}"))
    }
}

/// What one removal has done.
#[derive(Default)]
struct Pass {
    /// How much it may still touch.
    left: usize,
    removed: usize,
    /// What couldn't be removed, and why not of one of these.
    stuck: usize,
    failure: Option<(PathBuf, io::Error)>,
}

impl Pass {
    fn count(&mut self, path: &Path, done: io::Result<()>) {
        self.left = self.left.saturating_sub(1);
        match done {
            Ok(()) => self.removed += 1,
            Err(error) => {
                self.stuck += 1;
                self.failure.get_or_insert((path.to_owned(), error));
            }
        }
    }
}

/// What is at a path, without asking a file system that may never answer.
fn look(path: &Path) -> io::Result<Statx> {
    Ok(statx(CWD, path, LOOK, StatxFlags::BASIC_STATS)?)
}

/// Whether that is a folder, and nothing that somebody has mounted over one.
fn is_ours(found: &Statx) -> bool {
    let is_folder = FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory;
    is_folder && !found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
}

/// Does something with a path, if need be after what is mounted there has been taken away.
fn past_mounts(path: &Path, act: impl Fn() -> io::Result<()>) -> io::Result<()> {
    match act() {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy && uncover(path) => act(),
        done => done,
    }
}

/// Takes away what is mounted over a path, and over that. Whether there was anything.
fn uncover(path: &Path) -> bool {
    let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    let taken = (0..MOUNTS_MAX).take_while(|_| unmount(path, flags).is_ok());
    taken.count() > 0
}

/// Makes a folder ours alone.
fn take(folder: &Path) -> io::Result<()> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    let opened = open(folder, flags, Mode::empty())?;
    // In this order: the mode of another's folder takes a capability more.
    fchown(&opened, Some(geteuid()), Some(getegid()))?;
    Ok(fchmod(&opened, Mode::from_raw_mode(0o700))?)
}

/// Gives a folder to the service's group.
fn give_group(folder: &Path, gid: u32) -> io::Result<()> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::PATH;
    let opened = open(folder, flags, Mode::empty())?;
    let found = statx(
        &opened,
        "",
        LOOK | AtFlags::EMPTY_PATH,
        StatxFlags::BASIC_STATS,
    )?;
    // Whoever has something mounted there since doesn't get it.
    if !is_ours(&found) || found.stx_gid == gid {
        return Ok(());
    }
    let group = Some(Gid::from_raw(gid));
    Ok(chownat(&opened, "", None, group, AtFlags::EMPTY_PATH)?)
}

/// Makes a folder, and has it noted down before anybody else has it.
fn create(folder: &Path, uid: u32, gid: u32, note: impl FnOnce()) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(folder)?;
    note();
    let give = || -> io::Result<()> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        let opened = open(folder, flags, Mode::empty())?;
        // In this order: the mode of another's folder takes a capability more.
        fchmod(&opened, Mode::from_raw_mode(MODE))?;
        fchown(&opened, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
        Ok(())
    };
    give().inspect_err(|_| {
        if let Err(error) = fs::remove_dir(folder) {
            tracing::debug!(%error, "a folder that could not be given away stays");
        }
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::*;

    const OURS: [&str; 2] = ["made", "removed"];

    struct Lab {
        folders: Folders,
        folder: tempfile::TempDir,
    }

    impl Lab {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let folders = Folders::new(folder.path()).unwrap();
            Self { folders, folder }
        }

        fn make(&self, name: &str) -> PathBuf {
            let path = self.folder.path().join(name);
            let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
            self.folders.make(&path, uid, gid).unwrap();
            path
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(self.folder.path()).unwrap();
            let mut names: Vec<String> = entries
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        }

        fn leftovers(&self) -> usize {
            fs::read_dir(self.folder.path().join("removed"))
                .unwrap()
                .count()
        }
    }

    #[test]
    fn a_folder_is_the_owners_and_the_services() {
        let lab = Lab::new();
        let path = lab.make("web.1");
        let found = fs::metadata(&path).unwrap();
        assert_eq!(found.mode() & 0o7777, MODE);
        assert_eq!(
            (found.uid(), found.gid()),
            (geteuid().as_raw(), getegid().as_raw())
        );
        fs::write(path.join("kept"), "").unwrap();
        let is_new = lab.folders.make(&path, found.uid(), found.gid()).unwrap();
        assert!(!is_new, "whoever couldn't open a channel in it leaves it");
        assert!(path.join("kept").exists(), "the same owner's stays");
    }

    #[test]
    fn whatever_an_owner_leaves_is_removed_and_nothing_is_followed() {
        let lab = Lab::new();
        let outside = tempfile::tempdir().unwrap();
        let precious = outside.path().join("precious");
        fs::write(&precious, "").unwrap();
        let path = lab.make("web.1");
        symlink(outside.path(), path.join("link")).unwrap();
        let mut deep = path.clone();
        for _ in 0..500 {
            deep.push("d");
        }
        fs::create_dir_all(&deep).unwrap();
        symlink("/", deep.join("root")).unwrap();
        for number in 0..100 {
            fs::write(path.join(format!("f{number}")), "").unwrap();
        }
        lab.folders.remove(&path).unwrap();
        lab.folders.remove(&path).unwrap();
        assert_eq!(lab.names(), OURS);
        assert_eq!(lab.leftovers(), 0);
        assert!(precious.exists());
    }

    /// As to the user that a VMM runs as. What is in it is that VMM's, which goes on.
    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn a_folder_that_its_owner_has_given_on_is_still_its_channel_s() {
        let lab = Lab::new();
        let path = lab.folder.path().join("web.1");
        let make = |uid, gid| lab.folders.make(&path, uid, gid).unwrap();
        assert!(make(0, 40_000));
        fs::write(path.join("vsock.sock"), "").unwrap();
        chown(&path, Some(50_000), Some(50_000)).unwrap();
        // The service has become another user meanwhile.
        assert!(!make(0, 40_001), "it is the lease's still");
        let found = fs::metadata(&path).unwrap();
        assert_eq!((found.uid(), found.gid()), (50_000, 40_001));
        // And again, with no channel to be opened.
        lab.folders.keep_group(&path, 0, 40_002);
        assert_eq!(fs::metadata(&path).unwrap().gid(), 40_002);
        lab.folders.keep_group(&path, 1, 40_003);
        assert_eq!(fs::metadata(&path).unwrap().gid(), 40_002, "another's");
        assert_eq!(found.mode() & 0o7777, MODE);
        assert!(path.join("vsock.sock").exists());
        assert!(make(1000, 40_001), "but no other owner's");
        chown(&path, Some(50_000), None).unwrap();
        let aside = lab.folder.path().join("aside");
        fs::rename(&path, &aside).unwrap();
        fs::create_dir(&path).unwrap();
        chown(&path, Some(50_000), Some(40_001)).unwrap();
        assert!(make(1000, 40_001), "nor is it another in its place");
        fs::remove_dir(&aside).unwrap();
        lab.folders.remove(&path).unwrap();
        assert_eq!(lab.names(), OURS);
        assert_eq!(fs::read_dir(&lab.folders.made).unwrap().count(), 0);
    }

    /// As one of a version that noted down nothing.
    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn a_folder_without_a_note_gets_one_while_it_is_known_whose_it_is() {
        let lab = Lab::new();
        let path = lab.folder.path().join("web.1");
        let make = |uid, gid| lab.folders.make(&path, uid, gid).unwrap();
        assert!(make(0, 40_000));
        fs::remove_file(lab.folders.made.join("web.1")).unwrap();
        assert!(!make(0, 40_000));
        chown(&path, Some(50_000), None).unwrap();
        assert!(!make(0, 40_000), "it is the lease's still");
    }

    /// In such a folder of another's, root without that capability, as the unit has it, may remove nothing.
    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn what_lies_in_a_sticky_folder_of_another_s_is_removed_without_cap_fowner() {
        let lab = Lab::new();
        let path = lab.folder.path().join("web.1");
        lab.folders.make(&path, 65_534, 65_534).unwrap();
        let inner = path.join("inner");
        fs::create_dir(&inner).unwrap();
        for folder in [&path, &inner] {
            fs::write(folder.join("file"), "").unwrap();
            chown(folder.join("file"), Some(65_534), Some(65_534)).unwrap();
            chown(folder, Some(65_534), Some(65_534)).unwrap();
            fs::set_permissions(folder, fs::Permissions::from_mode(0o3770)).unwrap();
        }
        let before = capabilities(None).unwrap();
        let mut fewer = before;
        fewer.effective.remove(CapabilitySet::FOWNER);
        set_capabilities(None, fewer).unwrap();
        fs::remove_file(path.join("file")).unwrap_err();
        lab.folders.remove(&path).unwrap();
        set_capabilities(None, before).unwrap();
        assert_eq!(lab.names(), OURS);
        assert_eq!(lab.leftovers(), 0);
    }

    /// As an owner can have them there by FUSE.
    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn what_is_mounted_in_a_folder_or_over_it_keeps_neither_it_nor_others() {
        sandwire_testlab::lab::run(|system| {
            let lab = Lab::new();
            let precious = lab.folder.path().join("precious");
            fs::create_dir(&precious).unwrap();
            fs::write(precious.join("file"), "").unwrap();
            let path = lab.make("web.1");
            fs::create_dir(path.join("inner")).unwrap();
            fs::write(path.join("file"), "").unwrap();
            fs::write(path.join("other"), "").unwrap();
            let at = |name: &str| path.join(name).display().to_string();
            let precious_is = precious.display();
            for (what, name) in [("", "inner"), ("", "inner"), ("/file", "file")] {
                system.run(&format!("mount --bind {precious_is}{what} {}", at(name)));
            }
            for _ in 0..2 {
                system.run(&format!("mount --bind {precious_is} {}", path.display()));
            }
            let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
            assert!(lab.folders.has(&path));
            assert!(lab.folders.make(&path, uid, gid).unwrap(), "made anew");
            assert!(!path.join("file").exists());
            lab.folders.remove(&path).unwrap();
            assert_eq!(lab.names(), ["made", "precious", "removed"]);
            assert_eq!(lab.leftovers(), 0);
            assert!(precious.join("file").exists());
        });
    }

    #[test]
    fn a_removal_ends_at_its_bound_also_where_nothing_can_be_removed() {
        let lab = Lab::new();
        let mut pass = Pass {
            left: 3,
            ..Pass::default()
        };
        for number in 0..5 {
            // Never there, so none can be removed.
            let path = lab.folder.path().join(format!("{number}"));
            lab.folders.remove_one(&path, &mut pass);
        }
        assert_eq!((pass.left, pass.removed, pass.stuck), (0, 0, 5));
    }

    #[test]
    fn a_large_removal_takes_several_sweeps_and_frees_the_name_at_once() {
        let lab = Lab::new();
        let path = lab.make("web.1");
        for number in 0..REMOVED_AT_ONCE + 10 {
            fs::write(path.join(format!("f{number}")), "").unwrap();
        }
        lab.folders.remove(&path).unwrap();
        lab.make("web.1");
        assert_eq!(lab.leftovers(), 1);
        lab.make("web.2");
        fs::write(lab.folder.path().join("control.sock"), "").unwrap();
        lab.folders.sweep(&[path].into());
        assert_eq!(lab.leftovers(), 0);
        assert_eq!(lab.names(), ["control.sock", "made", "removed", "web.1"]);
    }

    #[test]
    fn what_is_no_folder_makes_way() {
        let lab = Lab::new();
        let path = lab.folder.path().join("web.1");
        symlink("/etc", &path).unwrap();
        lab.make("web.1");
        assert!(fs::symlink_metadata(&path).unwrap().is_dir());
        assert!(Path::new("/etc/passwd").exists());
    }
}
