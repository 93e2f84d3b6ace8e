//! The folder of pins: what is where in it, and what is moved aside.
//!
//! ```text
//! /sys/fs/bpf/sandwire/INSTANCE/
//!   v1/            maps of this layout, by name
//!   v1/programs/   the programs of the last start
//!   v1/unused/     only while no packet goes by these maps, but by older ones
//!   links/         attachments on uplinks and the shared interface
//!   old-N-v1/      maps that packets went by before, of another size or (by its number) layout, until finish_migration
//!   done-N-v1/     maps of which nothing is needed any more, while they are removed
//!   new/           what becomes `v1`, with `unused` in it, in one step
//! ```

use std::{
    collections::BTreeSet,
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
};

use rustix::mount::{MountFlags, mount};

use crate::{
    Error,
    abi::{self, ABI_VERSION, Address, CloneValue, GroupPair, Meters, Nic, UplinkValue},
    sys,
};

pub(crate) const BPFFS: &str = "/sys/fs/bpf";
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;
const FOLDER_MODE: u32 = 0o700;
/// Folder of links.
pub(crate) const LINKS: &str = "links";
/// Begins the names of folders of maps that can't be used.
const OLD: &str = "old-";
/// Begins the names of those of which nothing is needed any more.
pub(crate) const DONE: &str = "done-";
/// Is in a folder of maps that no packet goes by yet.
pub(crate) const UNUSED: &str = "unused";
/// Where such a folder is made.
const NEW: &str = "new";

/// All maps that are shared, with the sizes of keys and values.
pub(crate) const MAPS: [(&str, usize, usize); 21] = [
    ("nics", 4, size_of::<Nic>()),
    ("policies", 4, size_of::<abi::Policy>()),
    ("counters", 4, size_of::<abi::Counters>()),
    ("ledgers", 4, size_of::<abi::Ledger>()),
    ("meters", 4, size_of::<Meters>()),
    ("clones", size_of::<Address>(), size_of::<CloneValue>()),
    (
        "prefixes",
        size_of::<abi::PrefixKey>(),
        size_of::<abi::PrefixValue>(),
    ),
    ("rule_lists", 4, size_of::<abi::RuleList>()),
    ("group_pairs", size_of::<GroupPair>(), 1),
    ("uplinks", 4, size_of::<UplinkValue>()),
    (
        "answers",
        size_of::<abi::AnswerKey>(),
        size_of::<abi::AnswerValue>(),
    ),
    (
        "answers_crowd",
        size_of::<abi::AnswerKey>(),
        size_of::<abi::AnswerValue>(),
    ),
    ("answer_shares", 4, size_of::<u64>()),
    ("neighbour_shares", 4, size_of::<abi::NeighbourShare>()),
    ("neighbour_samples", 4, size_of::<abi::NeighbourSamples>()),
    ("noted", 4, size_of::<abi::Noted>()),
    ("decisions", 4, size_of::<abi::Decision>()),
    ("trace", 0, 0),
    ("trace_shares", 4, size_of::<u64>()),
    ("trace_lost", 4, size_of::<u64>()),
    ("xdp_nics", 4, 4),
];

/// Whether the maps of this layout have the sizes that are wanted.
fn fits(folder: &Path, sizes: &[(&str, u32)]) -> Result<bool, Error> {
    for (name, _, _) in MAPS {
        let failed = |source| Error::system("look at", format!("the map {name}"), source);
        let Some(map) = sys::open_pin(&map_path(folder, name)).map_err(failed)? else {
            continue;
        };
        if !has_form(name, map.as_fd(), sizes).map_err(failed)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a map has the sizes that are wanted of the one of this name.
pub(crate) fn has_form(name: &str, map: BorrowedFd<'_>, sizes: &[(&str, u32)]) -> io::Result<bool> {
    let info = sys::map_info(map)?;
    let wanted = sizes.iter().find(|(other, _)| *other == name);
    let is_as_large = wanted.is_none_or(|(_, size)| info.max_entries == *size);
    let found = (info.key_size as usize, info.value_size as usize);
    let is_alike = MAPS
        .iter()
        .any(|(other, key_size, value_size)| *other == name && found == (*key_size, *value_size));
    Ok(is_as_large && is_alike)
}

/// Where the maps of this layout are.
pub(crate) fn current(folder: &Path) -> PathBuf {
    folder.join(format!("v{ABI_VERSION}"))
}

/// Where a map of this layout is.
pub(crate) fn map_path(folder: &Path, name: &str) -> PathBuf {
    current(folder).join(name)
}

/// Opens a map of this layout.
pub(crate) fn open_map(folder: &Path, name: &'static str) -> Result<OwnedFd, Error> {
    let failed = |source| Error::system("open", format!("the map {name}"), source);
    let found = sys::open_pin(&map_path(folder, name)).map_err(failed)?;
    found.ok_or_else(|| failed(io::Error::from(io::ErrorKind::NotFound)))
}

/// The kernel's numbers of the maps that are shared.
pub(crate) fn map_numbers(folder: &Path) -> Result<BTreeSet<u32>, Error> {
    let number = |(name, _, _)| {
        let info = sys::map_info(open_map(folder, name)?.as_fd());
        let info =
            info.map_err(|source| Error::system("look at", format!("the map {name}"), source));
        Ok(info?.id)
    };
    MAPS.into_iter().map(number).collect()
}

/// Whether a folder is, or would be, in a bpffs.
pub(crate) fn is_in_bpffs(folder: &Path) -> bool {
    // Of the nearest that is there, in one question: between two it may go.
    let mut found = folder.ancestors().map(rustix::fs::statfs);
    let found = found.find_map(Result::ok);
    // The type of the magic number depends on the machine.
    let kind = found.and_then(|found| u64::try_from(found.f_type).ok());
    kind.is_some_and(|kind| kind & 0xffff_ffff == BPF_FS_MAGIC)
}

/// Sees to it that the folder is, or will be, in a bpffs.
pub(crate) fn find_bpffs(folder: &Path, may_mount: bool) -> Result<(), Error> {
    if is_in_bpffs(folder) {
        return Ok(());
    }
    let refused = |remedy| Error::NoBpffs {
        folder: folder.to_owned(),
        remedy,
    };
    if !folder.starts_with(BPFFS) {
        return Err(refused(
            "name a folder below /sys/fs/bpf, or mount a bpffs there (mount -t bpf)",
        ));
    }
    if !may_mount {
        return Err(refused("mount one: mount -t bpf bpf /sys/fs/bpf"));
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("bpf", BPFFS, "bpf", flags, Some(c"mode=0700"))
        .map_err(|error| Error::system("mount a bpffs on", BPFFS, error.into()))
}

/// Makes a folder, with those above it.
pub(crate) fn make_folder(folder: &Path) -> Result<(), Error> {
    let make = || {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(FOLDER_MODE)
            .create(folder)
    };
    // The one above may have been empty, and be removed by whoever used it last before there is something in it.
    make()
        .or_else(|_| make())
        .map_err(|source| Error::system("create", folder.display().to_string(), source))
}

/// Removes a folder with all pins in it.
pub(crate) fn remove_folder(folder: &Path) -> Result<(), Error> {
    let failed = |source| Error::system("remove", folder.display().to_string(), source);
    fs::remove_dir_all(folder).map_err(failed)
}

/// Maps that were moved aside.
pub(crate) struct Retired {
    /// Where old maps are.
    pub(crate) any: Option<PathBuf>,
    /// The last ones that packets went by, if they are of this version.
    pub(crate) last: Option<PathBuf>,
}

/// Moves maps aside that can't be used: of another version, of other sizes, or of a migration that was
/// cut off. Those that no packet went by yet are thrown away: what a start wrote that failed early must not pass
/// for what was known before.
pub(crate) fn retire_others(folder: &Path, sizes: &[(&str, u32)]) -> Result<Retired, Error> {
    let is_cut_off = !old_folders(folder)?.is_empty();
    for version in versions(folder)? {
        if is_cut_off && version.join(UNUSED).exists() {
            move_aside(folder, &version, DONE)?;
        }
    }
    if let Err(error) = remove_done(folder) {
        tracing::warn!(%error, "what is left of old maps can't be removed");
    }
    let current = current(folder);
    if current.exists() && (is_cut_off || !fits(folder, sizes)?) {
        move_aside(folder, &current, OLD)?;
    }
    for other in versions(folder)? {
        if other != current {
            move_aside(folder, &other, OLD)?;
        }
    }
    let any = old_folders(folder)?.pop();
    if any.is_some() && !current.exists() {
        make_unused(folder)?;
    }
    let last = any
        .clone()
        .filter(|maps| version_of(maps) == version_of(&current));
    Ok(Retired { any, last })
}

/// Makes the folder for maps that no packet goes by yet.
fn make_unused(folder: &Path) -> Result<(), Error> {
    let (new, current) = (folder.join(NEW), current(folder));
    make_folder(&new.join(UNUSED))?;
    fs::rename(&new, &current)
        .map_err(|source| Error::system("create", current.display().to_string(), source))
}

/// The version of a folder of maps, as it is written in its name.
fn version_of(maps: &Path) -> Option<&str> {
    maps.file_name()?.to_str()?.rsplit('-').next()
}

/// Gives a folder another name, in one step: this, a number above all that there are, and its version. Returns where it
/// is then.
pub(crate) fn move_aside(folder: &Path, maps: &Path, name: &str) -> Result<PathBuf, Error> {
    let failed = |source| Error::system("move aside", maps.display().to_string(), source);
    let others = folders(folder, |other| other.starts_with(name))?;
    let number = others.iter().map(|other| number_of(other)).max();
    let number = number.unwrap_or(0).saturating_add(1);
    let version = version_of(maps).unwrap_or_default();
    let aside = folder.join(format!("{name}{number}-{version}"));
    fs::rename(maps, &aside).map_err(failed)?;
    Ok(aside)
}

/// The number that [`move_aside`] gave a folder.
fn number_of(aside: &Path) -> u32 {
    let name = aside.file_name().and_then(|name| name.to_str());
    let number = name.and_then(|name| name.split('-').nth(1)?.parse().ok());
    number.unwrap_or(0)
}

/// Removes maps of which nothing is needed any more.
pub(crate) fn remove_done(folder: &Path) -> Result<(), Error> {
    let done = folders(folder, |name| name.starts_with(DONE))?;
    done.iter().try_for_each(|done| remove_folder(done))
}

fn versions(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    folders(folder, |name| {
        let number = name.strip_prefix('v');
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    })
}

/// Folders of maps that can't be used, in the order in which they were in use.
pub(crate) fn old_folders(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    folders(folder, |name| name.starts_with(OLD))
}

/// Those of them that are of this version.
pub(crate) fn old_folders_alike(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let current = current(folder);
    let mut found = old_folders(folder)?;
    found.retain(|maps| version_of(maps) == version_of(&current));
    Ok(found)
}

fn folders(folder: &Path, is_meant: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>, Error> {
    let failed = |source| Error::system("list", folder.display().to_string(), source);
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if is_meant(&entry.file_name().to_string_lossy()) {
            found.push(entry.path());
        }
    }
    found.sort();
    found.sort_by_key(|path| number_of(path));
    Ok(found)
}
