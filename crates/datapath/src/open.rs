//! Loading programs, finding or making maps, and what stays under the folder of pins.

use std::{
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
};

use crate::Error;

/// How a data path is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Folder on a bpffs where pins live; see [`folder_for`]. It is made if its parent is on a bpffs.
    pub folder: PathBuf,
    /// Whether a bpffs is mounted on `/sys/fs/bpf` if none is there.
    pub mount: bool,
    /// Most interfaces of sandboxes; entry 0 is not used.
    pub nics_max: u32,
    /// Most directions that are remembered to let answers through; the oldest go first.
    pub answers_max: u32,
    /// Most prefixes of all policies together.
    pub prefixes_max: u32,
}

impl Settings {
    /// The defaults, for a folder.
    #[must_use]
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            mount: false,
            nics_max: 16_384,
            answers_max: 65_536,
            prefixes_max: 1_000_000,
        }
    }
}

/// Where the pins of an instance live unless somebody wants them elsewhere.
#[must_use]
pub fn folder_for(instance: &str) -> PathBuf {
    Path::new("/sys/fs/bpf/sandwire").join(instance)
}

/// A data path that was just opened.
#[derive(Debug)]
pub struct Opened {
    /// The data path.
    pub datapath: Datapath,
    /// Set if maps of another layout were found: the maps are new and empty, and the caller writes every
    /// policy and NIC anew from its journal, replaces the filters on host ends, and then calls
    /// [`Datapath::finish_migration`]. Until then packets go on by the old programs and maps.
    pub migrated_from: Option<PathBuf>,
}

/// Which program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Program {
    /// tc ingress of a host end.
    FromGuest,
    /// tc ingress of a TAP in a slot's namespace.
    TapToHostEnd,
    /// tc ingress of `uplink0` in a slot's namespace.
    UplinkToTap,
    /// tc ingress of an uplink.
    FromUplink,
    /// tc egress of the shared interface.
    FromHost,
    /// XDP of a host end that is a TAP.
    FromGuestXdp,
    /// XDP of an uplink.
    ToGuestXdp,
}

/// Programs and maps of one instance. Any number of threads may use it.
#[derive(Debug)]
pub struct Datapath {}

impl Datapath {
    /// Loads the programs and finds or makes the maps. Maps of the same layout are kept with all that is
    /// in them, so what the programs of an earlier process do goes on.
    ///
    /// # Errors
    /// The kernel has no eBPF or refuses it, or the folder isn't on a bpffs.
    pub fn open(settings: &Settings) -> Result<Opened, Error> {
        todo!("{settings:?}")
    }

    /// A loaded program, to be attached by a filter.
    #[must_use]
    pub fn program(&self, program: Program) -> BorrowedFd<'_> {
        todo!("{program:?}")
    }

    /// Adds the counters of old maps to those of the same NICs (pool, slot, position, clone addresses),
    /// and removes the old maps. To be called once no filter runs an old program.
    ///
    /// # Errors
    /// The old folder can't be removed.
    pub fn finish_migration(&self) -> Result<(), Error> {
        todo!()
    }

    /// Removes every pin of the instance, for clean-up. Programs that are still attached go on, except
    /// those on uplinks and the shared interface.
    ///
    /// # Errors
    /// A pin can't be removed.
    pub fn remove(folder: &Path) -> Result<(), Error> {
        todo!("{folder:?}")
    }
}
