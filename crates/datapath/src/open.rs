//! Loading programs, and finding or making maps.

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicU32, AtomicU64},
    },
};

use aya::{
    EbpfLoader,
    programs::{SchedClassifier, Xdp},
};

use crate::{
    Error,
    abi::{
        self, Address, CloneValue, DECISIONS_LATER, DECISIONS_MAX, GroupPair, Meters,
        NeighbourShare, Nic, Plain as _, UplinkValue,
    },
    features::{self, Features},
    former::Former,
    ledgers::Ledgers,
    map::{Array, Table, Words},
    nic::Allocation,
    pins::{
        BPFFS, LINKS, MAPS, current, find_bpffs, make_folder, map_numbers, map_path, open_map,
        remove_folder, retire_others,
    },
    policies::Policies,
    processors::Processors,
    skb, sys,
    uplink::Wanted,
};

const PROGRAMS: &str = "programs";
/// The kernel keeps 16 bits of a class id where programs read it.
const NICS_LIMIT: u32 = 1 << 16;
/// As many lists as one policy may need at most.
const LISTS_LEAST: u32 = 1 << 17;
/// Interfaces that together may fill the table of answers within a minute and a bit: one alone can't within the five
/// minutes that an answer lives.
const ANSWERS_SHARES: u32 = 32;
/// While a lease's policy is exchanged there are two of it.
const POLICIES_PER_NIC: u32 = 2;
/// Most pairs of groups that may talk: two groups that may are two pairs, one for each direction.
pub const GROUP_PAIRS_MAX: u32 = 1 << 16;

/// Where our programs stand among others on an uplink.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Before those that are there when ours comes: they see only what isn't a sandbox's.
    #[default]
    First,
    /// Behind them: they see everything, and what they drop never reaches a sandbox.
    Last,
}

/// How a data path is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Folder on a bpffs where pins live; see [`folder_for`]. It is made if its parent is on a bpffs.
    pub folder: PathBuf,
    /// Whether a bpffs is mounted on `/sys/fs/bpf` if none is there.
    pub mount: bool,
    /// Entries for interfaces of sandboxes, at most 65,536; the first is not used.
    pub nics_max: u32,
    /// Most directions that are remembered to let answers through; those not used for longest go first.
    pub answers_max: u32,
    /// Most prefixes of all policies together.
    pub prefixes_max: u32,
    /// Where our programs stand among others on an uplink. Only with TCX; filters have a priority.
    pub order: Order,
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
            prefixes_max: 1_048_576,
            order: Order::First,
        }
    }

    fn check(&self) -> Result<(), Error> {
        let checks = [
            ("nics_max", self.nics_max, 2, NICS_LIMIT),
            ("answers_max", self.answers_max, 1, 1 << 26),
            ("prefixes_max", self.prefixes_max, 1, 1 << 26),
        ];
        for (name, value, least, most) in checks {
            if !(least..=most).contains(&value) {
                return Err(Error::Setting {
                    name,
                    value,
                    least,
                    most,
                });
            }
        }
        Ok(())
    }
}

/// Where the pins of an instance live unless somebody wants them elsewhere.
#[must_use]
pub fn folder_for(instance: &str) -> PathBuf {
    Path::new(BPFFS).join("sandwire").join(instance)
}

/// A data path that was just opened.
#[derive(Debug)]
pub struct Opened {
    /// The data path.
    pub datapath: Datapath,
    /// Set if maps of another layout or size were found, and where they are now: the maps in use are new
    /// and empty. The caller writes every policy and NIC anew from its journal, calls
    /// [`Datapath::take_into_use`], replaces the filters on host ends and the programs on uplinks, and then calls
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
    /// tc ingress of a container's interface and of the TAP beside it.
    CrossOver,
    /// tc egress of a container's interface that is a child of one of the host's.
    FromChild,
    /// tc ingress of the same.
    ToChild,
    /// tc ingress of an uplink.
    FromUplink,
    /// tc egress of the shared interface.
    FromHost,
    /// XDP of a host end that is a TAP.
    FromGuestXdp,
    /// XDP of an uplink.
    ToGuestXdp,
}

impl Program {
    const ALL: [Self; 10] = [
        Self::FromGuest,
        Self::TapToHostEnd,
        Self::UplinkToTap,
        Self::CrossOver,
        Self::FromChild,
        Self::ToChild,
        Self::FromUplink,
        Self::FromHost,
        Self::FromGuestXdp,
        Self::ToGuestXdp,
    ];

    /// Its name in listings.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::FromGuest => "from_guest",
            Self::TapToHostEnd => "tap_to_host_end",
            Self::UplinkToTap => "uplink_to_tap",
            Self::CrossOver => "cross_over",
            Self::FromChild => "from_child",
            Self::ToChild => "to_child",
            Self::FromUplink => "from_uplink",
            Self::FromHost => "from_host",
            Self::FromGuestXdp => "from_guest_xdp",
            Self::ToGuestXdp => "to_guest_xdp",
        }
    }

    fn position(self) -> usize {
        self as usize
    }
}

macro_rules! object {
    ($name:literal) => {
        Object {
            name: $name,
            bytes: aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/", $name, ".o")),
        }
    };
}

/// A compiled C file.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) name: &'static str,
    pub(crate) bytes: &'static [u8],
}

pub(crate) static OBJECTS: [Object; 7] = [
    object!("from_guest"),
    object!("to_guest"),
    object!("slot"),
    object!("container"),
    object!("child"),
    object!("from_guest_xdp"),
    object!("to_guest_xdp"),
];

/// Programs and maps of one instance. Any number of threads may use it.
#[derive(Debug)]
pub struct Datapath {
    pub(crate) folder: PathBuf,
    pub(crate) order: Order,
    pub(crate) features: Features,
    shares_answers: bool,
    /// By [`Program::position`].
    programs: Vec<OwnedFd>,
    /// Numbers of the maps that programs share.
    pub(crate) maps: BTreeSet<u32>,
    pub(crate) nics: Array<Nic, AtomicU32>,
    pub(crate) counters: Array<abi::Counters, AtomicU64>,
    pub(crate) ledgers: Ledgers,
    pub(crate) trace_lost: Words<AtomicU64>,
    pub(crate) meters: Table<u32, Meters>,
    pub(crate) neighbour_shares: Table<u32, NeighbourShare>,
    pub(crate) clones: Table<Address, CloneValue>,
    pub(crate) group_pairs: Table<GroupPair, u8>,
    pub(crate) uplinks: Table<u32, UplinkValue>,
    pub(crate) xdp_nics: Table<u32, u32>,
    pub(crate) policies: Policies,
    pub(crate) allocation: Mutex<Allocation>,
    pub(crate) wanted: Mutex<Wanted>,
}

impl Datapath {
    /// Loads the programs and finds or makes the maps. Maps of the same layout and sizes are kept with all
    /// that is in them, so what the programs of an earlier process do goes on.
    ///
    /// # Errors
    /// The kernel has no eBPF or refuses it, or the folder isn't on a bpffs.
    pub fn open(settings: &Settings) -> Result<Opened, Error> {
        settings.check()?;
        let features = features::probe()?;
        features::check_filters()?;
        let folder = &settings.folder;
        find_bpffs(folder, settings.mount)?;
        let sizes = sizes(settings)?;
        let retired = retire_others(folder, &sizes)?;
        for made in [folder.join(LINKS), current(folder).join(PROGRAMS)] {
            make_folder(&made)?;
        }
        let former = retired
            .last
            .and_then(|last| Former::take_over(folder, &last, &sizes));
        let programs = load(folder, &sizes, features, &OBJECTS)?;
        let nics: Array<Nic, AtomicU32> = Array::new("nics", open_map(folder, "nics")?.as_fd())?;
        if let Some(former) = &former {
            former.carry_leases(&nics);
        }
        let states = (0..nics.entries()).map(|index| {
            let state = nics.field(index, std::mem::offset_of!(Nic, state));
            state.load(std::sync::atomic::Ordering::Acquire)
        });
        let kept = former.iter().flat_map(|former| former.slots.clone());
        let allocation = Mutex::new(Allocation::new(states, kept.collect()));
        let ledgers = Ledgers::new(open_map(folder, "ledgers")?.as_fd(), nics.entries())?;
        let datapath = Self {
            folder: folder.clone(),
            order: settings.order,
            features,
            shares_answers: former.is_some(),
            programs,
            maps: map_numbers(folder)?,
            nics,
            counters: Array::new("counters", open_map(folder, "counters")?.as_fd())?,
            ledgers,
            trace_lost: Words::new("trace_lost", open_map(folder, "trace_lost")?.as_fd())?,
            meters: Table::new("meters", open_map(folder, "meters")?)?,
            neighbour_shares: Table::new(
                "neighbour_shares",
                open_map(folder, "neighbour_shares")?,
            )?,
            clones: Table::new("clones", open_map(folder, "clones")?)?,
            group_pairs: Table::new("group_pairs", open_map(folder, "group_pairs")?)?,
            uplinks: Table::new("uplinks", open_map(folder, "uplinks")?)?,
            xdp_nics: Table::new("xdp_nics", open_map(folder, "xdp_nics")?)?,
            policies: Policies::new(
                Array::new("policies", open_map(folder, "policies")?.as_fd())?,
                Table::new("prefixes", open_map(folder, "prefixes")?)?,
                Table::new("rule_lists", open_map(folder, "rule_lists")?)?,
            )?,
            allocation,
            wanted: Mutex::default(),
        };
        datapath.begin_overlooked_ledgers();
        Ok(Opened {
            datapath,
            migrated_from: retired.any,
        })
    }

    /// A loaded program, to be attached by a filter.
    #[must_use]
    pub fn program(&self, program: Program) -> BorrowedFd<'_> {
        self.programs[program.position()].as_fd()
    }

    /// Whether the maps were made anew, and what was remembered of calls is the same for old and new programs.
    #[must_use]
    pub fn shares_answers(&self) -> bool {
        self.shares_answers
    }

    /// Where our programs stand among others on an uplink.
    #[must_use]
    pub fn order(&self) -> Order {
        self.order
    }

    /// What this kernel's eBPF can do.
    #[must_use]
    pub fn features(&self) -> Features {
        self.features
    }

    /// Removes every pin of an instance, for clean-up. Filters go on, and programs of uplinks and the shared
    /// interface are detached. A folder that isn't there is removed already.
    ///
    /// # Errors
    /// A pin can't be removed.
    pub fn remove(folder: &Path) -> Result<(), Error> {
        if !folder.exists() {
            return Ok(());
        }
        remove_folder(folder)
    }
}

/// Sizes of maps that the settings and the machine decide.
pub(crate) fn sizes(settings: &Settings) -> Result<Vec<(&'static str, u32)>, Error> {
    let nics = settings.nics_max;
    let Processors { here, later } = Processors::count()?;
    let decisions = (here as usize * DECISIONS_MAX + later as usize * DECISIONS_LATER) as u64;
    let decisions = u32::try_from(decisions).unwrap_or(u32::MAX);
    // One more line of each than there are processors is the daemon's.
    let ledgers = u32::try_from((u64::from(here) + 1) * u64::from(nics)).unwrap_or(u32::MAX);
    Ok(vec![
        ("decisions", decisions),
        ("ledgers", ledgers),
        ("nics", nics),
        ("policies", nics * POLICIES_PER_NIC),
        ("counters", nics),
        ("meters", nics),
        ("trace_shares", nics),
        ("trace_lost", nics),
        ("clones", nics * 2),
        ("xdp_nics", nics),
        ("prefixes", settings.prefixes_max),
        // Prefixes with the same rules share a list, and the table takes 16 bytes per entry at once.
        ("rule_lists", (settings.prefixes_max / 4).max(LISTS_LEAST)),
        ("group_pairs", GROUP_PAIRS_MAX),
        ("answers", settings.answers_max),
        ("answers_crowd", settings.answers_max),
        ("answer_shares", nics),
        ("neighbour_shares", nics),
        ("neighbour_samples", nics),
    ])
}

/// Entries that a map is to have; zero if they are not decided here.
fn entries_of(sizes: &[(&str, u32)], map: &str) -> u32 {
    let found = sizes.iter().find(|(name, _)| *name == map);
    found.map_or(0, |(_, entries)| *entries)
}

/// What one interface may enter of the answers in the time that the programs count in, a minute and a bit.
fn answers_share(sizes: &[(&str, u32)]) -> u32 {
    (entries_of(sizes, "answers") / ANSWERS_SHARES).max(1)
}

/// How many processors have lines of their own in maps of these sizes.
fn processors(sizes: &[(&str, u32)]) -> u32 {
    (entries_of(sizes, "ledgers") / entries_of(sizes, "nics").max(1)).saturating_sub(1)
}

/// By how many powers of two less than a limit's burst one processor pays ahead: all of them together at most the
/// sixteenth part of it.
fn credit_shift(processors: u32) -> u32 {
    4 + processors.next_power_of_two().trailing_zeros()
}

pub(crate) fn load(
    folder: &Path,
    sizes: &[(&str, u32)],
    features: Features,
    objects: &[Object],
) -> Result<Vec<OwnedFd>, Error> {
    let mut loader = EbpfLoader::new();
    // Nothing is relocated against the kernel's own types.
    loader.btf(None);
    for (name, _, _) in MAPS {
        loader.map_pin_path(name, map_path(folder, name));
    }
    for (name, size) in sizes {
        loader.map_max_entries(name, *size);
    }
    // A program that has no use for one of these doesn't declare it.
    loader.override_global("fib_flags", &features.fib_flags, false);
    loader.override_global("skb_places", features.skb_places.bytes(), false);
    loader.override_global("netns_places", features.netns_places.bytes(), false);
    let has_skb_cast = u8::from(features.skb_cast.is_some());
    loader.override_global("has_skb_cast", &has_skb_cast, false);
    let answers_share = answers_share(sizes);
    loader.override_global("answers_share", &answers_share, false);
    let nics_max = entries_of(sizes, "nics");
    loader.override_global("nics_max", &nics_max, false);
    let processors = processors(sizes);
    loader.override_global("processors", &processors, false);
    let credit_shift = credit_shift(processors);
    loader.override_global("credit_shift", &credit_shift, false);
    let mut programs = Vec::new();
    for object in objects {
        programs.extend(load_object(&mut loader, object, features.skb_cast)?);
    }
    let in_order = Program::ALL.map(|program| {
        let position = programs.iter().position(|(found, _)| *found == program);
        let (_, descriptor) = programs.swap_remove(position.expect("each is in an object"));
        descriptor
    });
    for (program, descriptor) in Program::ALL.into_iter().zip(&in_order) {
        pin_program(folder, program, descriptor.as_fd())?;
    }
    Ok(in_order.into())
}

fn load_object(
    loader: &mut EbpfLoader<'_>,
    object: &Object,
    skb_cast: Option<u32>,
) -> Result<Vec<(Program, OwnedFd)>, Error> {
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| Error::Load {
        object: object.name,
        source,
    };
    let mut loaded = loader
        .load(&skb::with_cast(object.bytes, skb_cast))
        .map_err(|error| failed(error.into()))?;
    let mut programs = Vec::new();
    for program in Program::ALL {
        let Some(found) = loaded.program_mut(program.name()) else {
            continue;
        };
        let descriptor = match found {
            aya::programs::Program::Xdp(found) => load_xdp(found),
            aya::programs::Program::SchedClassifier(found) => load_classifier(found),
            _ => continue,
        };
        programs.push((program, descriptor.map_err(failed)?));
    }
    Ok(programs)
}

pub(crate) type Loaded = Result<OwnedFd, Box<dyn std::error::Error + Send + Sync>>;

fn load_xdp(program: &mut Xdp) -> Loaded {
    program.load()?;
    Ok(program.fd()?.as_fd().try_clone_to_owned()?)
}

pub(crate) fn load_classifier(program: &mut SchedClassifier) -> Loaded {
    program.load()?;
    Ok(program.fd()?.as_fd().try_clone_to_owned()?)
}

/// Pins a program under its name, in the place of an older one.
fn pin_program(folder: &Path, program: Program, descriptor: BorrowedFd<'_>) -> Result<(), Error> {
    let path = current(folder).join(PROGRAMS).join(program.name());
    // Names on a bpffs have no dots.
    let new = path.with_file_name(format!("{}-new", program.name()));
    let pin = || {
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        sys::pin(descriptor, &new)?;
        fs::rename(&new, &path)
    };
    pin().map_err(|source| Error::system("pin", format!("the program {}", program.name()), source))
}

#[cfg(test)]
mod tests {
    use super::{Processors, Settings, credit_shift, processors, sizes};

    #[test]
    fn all_processors_pay_a_sixteenth_of_a_burst_ahead_at_most() {
        for (processors, shift) in [(1_u32, 4), (2, 5), (3, 6), (4, 6), (128, 11), (129, 12)] {
            assert_eq!(credit_shift(processors), shift);
            assert!(processors * 16 <= 1 << shift);
        }
    }

    #[test]
    fn sizes_tell_who_has_lines() {
        let sizes = sizes(&Settings::new("/nowhere".into())).unwrap();
        let here = Processors::count().unwrap().here;
        assert_eq!(processors(&sizes), here);
    }
}
