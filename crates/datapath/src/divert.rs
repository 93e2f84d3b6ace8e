//! Diversions: all packets of one interface on a way through two TAPs of a process, and back.
//!
//! A diversion's map and, where the kernel has TCX, the links of its programs are pinned in a folder of its own, so
//! what it does outlives the process: packets of a diversion whose TAPs are gone are dropped, or pass, as was said
//! before. A process that finds the folder takes the diversion over by writing the numbers of its own TAPs into the
//! map. Elsewhere `cls_bpf` filters on a clsact qdisc do the same, and stay with the interface.
//!
//! Whatever attaches must be called by a thread in the interface's network namespace.

use std::{
    fmt, fs,
    hash::{BuildHasher as _, Hasher as _, RandomState},
    mem::offset_of,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use aya::EbpfLoader;
use sandwire_kernel_net::{
    bpf::{self, BPF_TCX_EGRESS, BPF_TCX_INGRESS},
    interface::InterfaceIndex,
    netlink::{Request, Socket},
    tc::{self, Hook},
};

use crate::{
    Error,
    abi::Plain,
    map::Array,
    open::{Object, load_classifier},
    pins::{find_bpffs, is_in_bpffs, make_folder, remove_folder},
    sys,
};

/// Where the folders of diversions are unless somebody wants them elsewhere.
pub const FOLDER: &str = "/sys/fs/bpf/sandwire-impair";

/// Root of the file systems that the machine's first process sees.
const FIRST_ROOT: &str = "/proc/1/root";

/// Where that folder is to be reached so that what is pinned there outlives the calling process: as it is, or, where this mount
/// namespace has no bpffs there and the machine's first process has one, by way of that. `ip netns exec` covers `/sys`, and
/// a bpffs that were mounted there would go with the last process of that mount namespace.
#[must_use]
pub fn lasting(folder: &Path) -> PathBuf {
    let there = Path::new(FIRST_ROOT).join(folder.strip_prefix("/").unwrap_or(folder));
    if !is_in_bpffs(folder) && is_in_bpffs(&there) {
        there
    } else {
        folder.to_owned()
    }
}

/// Priority of our filters: before all others.
const PRIORITY: u16 = 1;
/// Handle of our filters, that nobody gets by counting.
const HANDLE: u32 = 0x5d1a;
const MAP: &str = "directions";

/// As in `divert.bpf.c`.
const FLAG_PASS: u64 = 1 << 32;
const FLAG_OPEN: u64 = 2 << 32;
const FLAG_WHEN_EMPTY: u64 = 4 << 32;

static OBJECT: Object = Object {
    name: "divert",
    bytes: aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/divert.o")),
};

/// The half of `interface` that holds what packets that come back have for a hash. Zero stands for none.
const SECRET: u64 = !0 << 32;

/// One direction as `struct direction` has it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Direction {
    way: u64,
    interface: u64,
    diverted: u64,
    returned: u64,
    dead_dropped: u64,
    dead_passed: u64,
    lost: u64,
    uncut: u64,
}

// SAFETY: eight integers of one size without padding.
unsafe impl Plain for Direction {}

/// Where the packets of one direction go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// On, as without a diversion.
    Pass,
    /// Through a TAP.
    Tap {
        /// Its number.
        tap: InterfaceIndex,
        /// Whether packets pass once it is gone; else they are dropped.
        passes_when_gone: bool,
    },
}

/// What a diversion counted in one direction since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets sent to the TAP; a super-packet counts as those that it will be cut into.
    pub diverted: u64,
    /// Packets that came back from the TAP.
    pub returned: u64,
    /// Packets dropped because the TAP was gone.
    pub dead_dropped: u64,
    /// Packets that passed because the TAP was gone.
    pub dead_passed: u64,
    /// Super-packets dropped because they would have been cut into more than 2048 packets.
    pub uncut: u64,
}

/// A program of a diversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    Divert(Hook),
    Return(Hook),
    Admit,
}

impl Program {
    const ALL: [Self; 5] = [
        Self::Divert(Hook::Ingress),
        Self::Divert(Hook::Egress),
        Self::Return(Hook::Ingress),
        Self::Return(Hook::Egress),
        Self::Admit,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Divert(Hook::Ingress) => "divert_ingress",
            Self::Divert(Hook::Egress) => "divert_egress",
            Self::Return(Hook::Ingress) => "return_ingress",
            Self::Return(Hook::Egress) => "return_egress",
            Self::Admit => "divert_admit",
        }
    }
}

/// The diversion of one interface.
pub struct Diversion {
    folder: PathBuf,
    interface: InterfaceIndex,
    uses_links: bool,
    directions: Array<Direction, AtomicU64>,
    /// By [`Program::ALL`].
    programs: Vec<OwnedFd>,
}

impl fmt::Debug for Diversion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = formatter.debug_struct("Diversion");
        text.field("interface", &self.interface);
        text.field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl Diversion {
    /// Loads the programs, and finds or makes the map; whatever is attached already goes on. `uses_links` says
    /// whether the kernel has TCX, see [`crate::features::Features::tcx`].
    ///
    /// # Errors
    /// The kernel has no eBPF or refuses it, or the folder isn't on a bpffs.
    pub fn open(folder: &Path, interface: InterfaceIndex, uses_links: bool) -> Result<Self, Error> {
        find_bpffs(folder, true)?;
        remove_if_other(folder)?;
        make_folder(folder)?;
        let programs = load(folder, &OBJECT)?;
        let map = sys::open_pin(&folder.join(MAP))
            .and_then(|found| found.ok_or_else(|| std::io::ErrorKind::NotFound.into()))
            .map_err(|source| Error::system("open", format!("the map {MAP}"), source))?;
        let directions: Array<Direction, AtomicU64> = Array::new(MAP, map.as_fd())?;
        for hook in [Hook::Ingress, Hook::Egress] {
            let number = word(&directions, hook, offset_of!(Direction, interface));
            // It stays the same, for packets that are on their way.
            let secret = match number.load(Ordering::Acquire) & SECRET {
                0 => new_secret(),
                secret => secret,
            };
            number.store(secret | u64::from(interface.0), Ordering::Release);
        }
        Ok(Self {
            folder: folder.to_owned(),
            interface,
            uses_links,
            directions,
            programs,
        })
    }

    /// The interface.
    #[must_use]
    pub fn interface(&self) -> InterfaceIndex {
        self.interface
    }

    /// Where the packets of a direction go, from the next packet on. A new map has TAP 0, which there never is.
    pub fn set_way(&self, hook: Hook, way: Way) {
        let value = match way {
            Way::Pass => FLAG_PASS,
            Way::Tap {
                tap,
                passes_when_gone,
            } => u64::from(tap.0) | if passes_when_gone { FLAG_OPEN } else { 0 },
        };
        word(&self.directions, hook, offset_of!(Direction, way)).store(value, Ordering::Release);
    }

    /// Lets packets of a direction pass from the moment on when none is under way through `tap`, so that none
    /// overtakes another. `lost` is how many diverted ones will never come back: what [`Diversion::outstanding`] says
    /// when nothing is under way.
    pub fn pass_when_empty(&self, hook: Hook, tap: InterfaceIndex, lost: u64) {
        word(&self.directions, hook, offset_of!(Direction, lost)).store(lost, Ordering::Release);
        let value = u64::from(tap.0) | FLAG_PASS | FLAG_WHEN_EMPTY;
        word(&self.directions, hook, offset_of!(Direction, way)).store(value, Ordering::Release);
    }

    /// Packets of a direction that were diverted and have not come back; when packets move meanwhile, rather too many
    /// than too few. Less than nothing, as a wrapped number, where more came back than were diverted.
    #[must_use]
    pub fn outstanding(&self, hook: Hook) -> u64 {
        let read = |offset| word(&self.directions, hook, offset).load(Ordering::Acquire);
        let returned = read(offset_of!(Direction, returned));
        read(offset_of!(Direction, diverted)).wrapping_sub(returned)
    }

    /// Whether our programs are still on the interface, and it is still there. The socket is one of its namespace.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn is_attached(&self, socket: &mut Socket) -> Result<bool, Error> {
        for hook in [Hook::Ingress, Hook::Egress] {
            let is_there = if self.uses_links {
                self.has_link(hook)?
            } else {
                let place = place_of(self.interface, hook);
                let listed = tc::list(socket, self.interface, hook)?;
                listed.iter().any(|filter| filter.place == place)
            };
            if !is_there {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn has_link(&self, hook: Hook) -> Result<bool, Error> {
        let failed = |source| {
            let object = format!("the attachment to interface {}", self.interface);
            Error::system("look at", object, source)
        };
        let Some(link) = sys::open_pin(&self.folder.join(link_name(hook))).map_err(failed)? else {
            return Ok(false);
        };
        let info = sys::link_info(link.as_fd()).map_err(failed)?;
        Ok(info.ifindex == self.interface.0)
    }

    /// What was counted in a direction.
    #[must_use]
    pub fn counters(&self, hook: Hook) -> Counters {
        let found = self.directions.read(key(hook));
        Counters {
            diverted: found.diverted,
            returned: found.returned,
            dead_dropped: found.dead_dropped,
            dead_passed: found.dead_passed,
            uncut: found.uncut,
        }
    }

    /// Has the TAP of a direction take only what is diverted, and lead back what its process sends. The filters go
    /// with the TAP.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn prepare_tap(&self, hook: Hook, tap: InterfaceIndex) -> Result<(), Error> {
        let mut request = Request::new();
        tc::add_clsact(&mut request, tap);
        let filters = [
            (Hook::Ingress, Program::Return(hook)),
            (Hook::Egress, Program::Admit),
        ];
        for (place, program) in filters {
            self.filter(tap, place, program).add(&mut request);
        }
        Ok(Socket::route()?.execute(request)?)
    }

    /// Puts the programs on the interface, before those of others; replaces older ones of ours in place.
    ///
    /// # Errors
    /// The kernel refuses, or the interface is gone.
    pub fn attach(&self) -> Result<(), Error> {
        for hook in [Hook::Ingress, Hook::Egress] {
            if self.uses_links {
                self.attach_link(hook)?;
            } else {
                self.attach_filter(hook)?;
            }
        }
        Ok(())
    }

    /// Takes the programs off the interface, and the pins with them. Goes on after an error.
    ///
    /// # Errors
    /// The first refusal of the kernel. An interface that is gone is none.
    pub fn detach(&self) -> Result<(), Error> {
        let mut outcome = Ok(());
        if !self.uses_links {
            for hook in [Hook::Ingress, Hook::Egress] {
                let mut request = Request::new();
                place_of(self.interface, hook).delete(&mut request);
                let deleted = Socket::route().and_then(|mut socket| socket.execute(request));
                let is_gone = |error: &sandwire_kernel_net::Error| {
                    error.is_missing() || error.errno() == Some(libc::EINVAL)
                };
                if let Err(error) = deleted
                    && !is_gone(&error)
                {
                    outcome = outcome.and(Err(error.into()));
                }
            }
        }
        outcome.and(remove(&self.folder))
    }

    fn attach_link(&self, hook: Hook) -> Result<(), Error> {
        let object = || format!("interface {}", self.interface);
        let failed = |source| Error::system("divert the packets of", object(), source);
        let path = self.folder.join(link_name(hook));
        let program = self.program(Program::Divert(hook));
        if let Some(link) = sys::open_pin(&path).map_err(failed)? {
            let info = sys::link_info(link.as_fd()).map_err(failed)?;
            // Of a link whose interface is gone, or that somebody detached, the kernel says 0.
            if info.ifindex == self.interface.0 {
                return sys::update_link(link.as_fd(), program).map_err(failed);
            }
            fs::remove_file(&path).map_err(failed)?;
        }
        let attach_type = match hook {
            Hook::Ingress => BPF_TCX_INGRESS,
            Hook::Egress => BPF_TCX_EGRESS,
        };
        let link = bpf::create_link(program, self.interface, attach_type, sys::BPF_F_BEFORE)
            .map_err(failed)?;
        sys::pin(link.as_fd(), &path).map_err(failed)
    }

    fn attach_filter(&self, hook: Hook) -> Result<(), Error> {
        let mut socket = Socket::route()?;
        let mut request = Request::new();
        tc::add_clsact(&mut request, self.interface);
        match socket.execute(request) {
            // Ours from before, or somebody else's: it serves either way.
            Err(error) if error.is_existing() => {}
            other => other?,
        }
        let mut request = Request::new();
        self.filter(self.interface, hook, Program::Divert(hook))
            .replace(&mut request);
        Ok(socket.execute(request)?)
    }

    fn filter(&self, interface: InterfaceIndex, hook: Hook, program: Program) -> tc::Filter<'_> {
        tc::Filter {
            place: place_of(interface, hook),
            class_id: None,
            program: self.program(program),
            name: program.name(),
        }
    }

    fn program(&self, program: Program) -> BorrowedFd<'_> {
        let position = Program::ALL.iter().position(|known| *known == program);
        self.programs[position.expect("ALL has every program")].as_fd()
    }
}

/// The programs, in the order of [`Program::ALL`]; their map is the one in the folder, and is made where there is none.
pub(crate) fn load(folder: &Path, object: &Object) -> Result<Vec<OwnedFd>, Error> {
    let failed = |source| Error::Load {
        object: object.name,
        source,
    };
    let mut loader = EbpfLoader::new();
    // Nothing is relocated against the kernel's own types.
    loader.btf(None);
    loader.map_pin_path(MAP, folder.join(MAP));
    let mut loaded = loader
        .load(object.bytes)
        .map_err(|error| failed(error.into()))?;
    let load = |program: Program| {
        let found = loaded.program_mut(program.name());
        let Some(aya::programs::Program::SchedClassifier(found)) = found else {
            return Err(failed(format!("it has no {}", program.name()).into()));
        };
        load_classifier(found).map_err(failed)
    };
    Program::ALL.into_iter().map(load).collect()
}

/// Removes what a diversion has pinned: its programs leave the interface, whatever namespace that is in, unless they
/// are filters, which stay with it and let all packets pass. A folder that isn't there is removed already.
///
/// # Errors
/// The kernel refuses.
pub fn remove(folder: &Path) -> Result<(), Error> {
    if !folder.exists() {
        return Ok(());
    }
    let failed = |source| Error::system("remove", folder.display().to_string(), source);
    pass_all(folder)?;
    for hook in [Hook::Ingress, Hook::Egress] {
        // Without that the program stays until the kernel gets round to the link's end.
        if let Some(link) = sys::open_pin(&folder.join(link_name(hook))).map_err(failed)? {
            sys::detach_link(link.as_fd()).map_err(failed)?;
        }
    }
    remove_folder(folder)?;
    if let Some(parent) = folder.parent() {
        // Unless there are other diversions.
        let _ = fs::remove_dir(parent);
    }
    Ok(())
}

/// Nobody will be responsible for what is still attached.
fn pass_all(folder: &Path) -> Result<(), Error> {
    let failed = |source| Error::system("write", format!("the map {MAP}"), source);
    let Some(map) = sys::open_pin(&folder.join(MAP)).map_err(failed)? else {
        return Ok(());
    };
    // Of another version's it isn't known where that is said.
    if !is_own_map(&map).map_err(failed)? {
        return Ok(());
    }
    let directions: Array<Direction, AtomicU64> = Array::new(MAP, map.as_fd())?;
    for hook in [Hook::Ingress, Hook::Egress] {
        word(&directions, hook, offset_of!(Direction, way)).store(FLAG_PASS, Ordering::Release);
    }
    Ok(())
}

fn is_own_map(map: &OwnedFd) -> std::io::Result<bool> {
    let info = sys::map_info(map.as_fd())?;
    Ok(info.value_size as usize == size_of::<Direction>())
}

/// Removes what another version of ours has left, whose map these programs can't use. Its packets pass until ours are
/// attached.
fn remove_if_other(folder: &Path) -> Result<(), Error> {
    let failed = |source| Error::system("look at", format!("the map {MAP}"), source);
    let Some(map) = sys::open_pin(&folder.join(MAP)).map_err(failed)? else {
        return Ok(());
    };
    if is_own_map(&map).map_err(failed)? {
        return Ok(());
    }
    remove(folder)
}

/// Random, and nowhere told: the standard library seeds each of its hashers by the kernel's random numbers.
fn new_secret() -> u64 {
    (RandomState::new().build_hasher().finish() & SECRET) | (1 << 32)
}

fn word(directions: &Array<Direction, AtomicU64>, hook: Hook, offset: usize) -> &AtomicU64 {
    directions.word(key(hook), offset)
}

fn key(hook: Hook) -> u32 {
    match hook {
        Hook::Ingress => 0,
        Hook::Egress => 1,
    }
}

fn link_name(hook: Hook) -> &'static str {
    match hook {
        Hook::Ingress => "ingress",
        Hook::Egress => "egress",
    }
}

fn place_of(interface: InterfaceIndex, hook: Hook) -> tc::Place {
    tc::Place {
        interface,
        hook,
        priority: PRIORITY,
        handle: HANDLE,
    }
}
