//! The programs, loaded as the product does it or from other objects, each time with maps of their own.

use std::{
    collections::BTreeMap,
    fs,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use crate::generator::scene;
use aya::{
    EbpfLoader,
    maps::{Map, MapData, RingBuf},
    programs::SchedClassifier,
};
use sandwire_datapath::{Datapath, Program, Settings, abi, abi::Plain, features};

/// Where bpffs is mounted in the lab.
const BPFFS: &str = "/sys/fs/bpf";

/// Programs and maps of the data path.
pub(crate) struct Programs {
    pub(crate) from_guest: OwnedFd,
    pub(crate) from_uplink: OwnedFd,
    pub(crate) from_host: OwnedFd,
    pub(crate) from_child: OwnedFd,
    pub(crate) to_child: OwnedFd,
    /// The same stages on XDP, of the product's own programs only.
    pub(crate) xdp: Option<Xdp>,
    /// Interfaces that there may be.
    pub(crate) nics_max: u32,
    /// Processors that have lines of their own.
    pub(crate) processors: u32,
    maps: BTreeMap<&'static str, MapData>,
    folder: String,
}

/// The programs on XDP.
pub(crate) struct Xdp {
    pub(crate) from_guest: OwnedFd,
    pub(crate) to_guest: OwnedFd,
}

/// `NICS_MAX` of the header, where nobody says otherwise.
const NICS_MAX: u32 = 16_384;

const MAPS: [&str; 18] = [
    "nics",
    "policies",
    "counters",
    "ledgers",
    "meters",
    "clones",
    "prefixes",
    "rule_lists",
    "group_pairs",
    "uplinks",
    "answers",
    "answers_crowd",
    "answer_shares",
    "neighbour_shares",
    "neighbour_samples",
    "noted",
    "trace",
    "xdp_nics",
];

impl Programs {
    /// Loads the product's own programs as the product does.
    ///
    /// # Errors
    /// What the product says.
    pub(crate) fn open(name: &str) -> Result<Self, String> {
        let folder = format!("{BPFFS}/{name}");
        let mut settings = Settings::new(folder.clone().into());
        settings.nics_max = 64;
        settings.answers_max = 1024;
        settings.prefixes_max = 65_536;
        let opened = Datapath::open(&settings).map_err(|error| error.to_string())?;
        let program = |program| {
            let program = opened.datapath.program(program);
            program.try_clone_to_owned().expect("a descriptor")
        };
        Ok(Self {
            from_guest: program(Program::FromGuest),
            from_uplink: program(Program::FromUplink),
            from_host: program(Program::FromHost),
            from_child: program(Program::FromChild),
            to_child: program(Program::ToChild),
            xdp: Some(Xdp {
                from_guest: program(Program::FromGuestXdp),
                to_guest: program(Program::ToGuestXdp),
            }),
            nics_max: settings.nics_max,
            processors: processors(),
            maps: maps(&format!("{folder}/v{}", abi::ABI_VERSION)),
            folder,
        })
    }

    /// Loads the product's own programs as if all processors had come after the maps were made.
    ///
    /// # Errors
    /// What the verifier says.
    pub(crate) fn before_processors(name: &str) -> Result<Self, String> {
        Self::load_for(Path::new(env!("OUT_DIR")), name, 0)
    }

    /// Loads `from_guest.o`, `to_guest.o` and `child.o` of a folder.
    ///
    /// # Errors
    /// What the verifier says.
    pub(crate) fn load(objects: &Path, name: &str) -> Result<Self, String> {
        Self::load_for(objects, name, processors())
    }

    fn load_for(objects: &Path, name: &str, processors: u32) -> Result<Self, String> {
        let folder = format!("{BPFFS}/{name}");
        fs::create_dir(&folder).map_err(|error| format!("{folder}: {error}"))?;
        let from_guest = load(
            objects,
            "from_guest.o",
            &folder,
            processors,
            &["from_guest"],
        )?;
        let to_guest = load(
            objects,
            "to_guest.o",
            &folder,
            processors,
            &["from_uplink", "from_host"],
        )?;
        let child = load(
            objects,
            "child.o",
            &folder,
            processors,
            &["from_child", "to_child"],
        )?;
        let [from_child, to_child] = child.try_into().expect("two were asked for");
        let [from_guest] = from_guest.try_into().expect("one was asked for");
        let [from_uplink, from_host] = to_guest.try_into().expect("two were asked for");
        Ok(Self {
            from_guest,
            from_uplink,
            from_host,
            from_child,
            to_child,
            xdp: None,
            nics_max: NICS_MAX,
            processors,
            maps: maps(&folder),
            folder,
        })
    }

    /// The descriptor of a map.
    pub(crate) fn map(&self, name: &str) -> BorrowedFd<'_> {
        self.maps[name].fd().as_fd()
    }

    /// The trace events.
    pub(crate) fn trace(&self) -> RingBuf<MapData> {
        let id = self.maps["trace"].info().expect("the kernel tells").id();
        let map = MapData::from_id(id).expect("it is there");
        RingBuf::try_from(Map::RingBuf(map)).expect("it is a ring buffer")
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        // The bpffs goes with the lab in any case.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Those that are there, which here are all that may be.
fn processors() -> u32 {
    u32::try_from(aya::util::nr_cpus().expect("the kernel tells")).expect("a few")
}

fn maps(folder: &str) -> BTreeMap<&'static str, MapData> {
    let open = |name| {
        let map = MapData::from_pin(format!("{folder}/{name}"));
        (name, map.expect("maps are pinned by name"))
    };
    MAPS.map(open).into()
}

fn load(
    objects: &Path,
    object: &str,
    folder: &str,
    processors: u32,
    names: &[&str],
) -> Result<Vec<OwnedFd>, String> {
    let bytes = fs::read(objects.join(object)).map_err(|error| format!("{object}: {error}"))?;
    // Linux 6.18 has both late flags of bpf_fib_lookup (table, mark).
    let fib_flags = 0x28_u32;
    let later = aya::util::nr_cpus().expect("the kernel tells") - processors as usize;
    let decisions = processors as usize * abi::DECISIONS_MAX + later * abi::DECISIONS_LATER;
    let decisions = u32::try_from(decisions).expect("a few");
    let ledgers = (processors + 1) * NICS_MAX;
    let features = features::probe().map_err(|error| error.to_string())?;
    let mut loaded = EbpfLoader::new()
        .override_global("fib_flags", &fib_flags, false)
        .override_global("processors", &processors, false)
        .override_global("credit_shift", &scene::credit_shift(), false)
        .override_global("netns_places", features.netns_places.bytes(), false)
        .default_map_pin_directory(folder)
        .map_max_entries("decisions", decisions)
        .map_max_entries("ledgers", ledgers)
        .map_max_entries("answers", 1024)
        .map_max_entries("answers_crowd", 1024)
        .map_max_entries("prefixes", 65_536)
        .map_max_entries("rule_lists", 65_536)
        .load(&bytes)
        .map_err(|error| format!("{object}: {error:?}"))?;
    let mut programs = Vec::new();
    for name in names {
        let program = loaded
            .program_mut(name)
            .ok_or(format!("{object} has no {name}"))?;
        let program: &mut SchedClassifier = program.try_into().expect("a program of tc");
        program
            .load()
            .map_err(|error| format!("{name}: {error:?}"))?;
        program
            .pin(format!("{folder}/{name}"))
            .map_err(|error| format!("{name}: {error}"))?;
        let fd = program.fd().expect("it is loaded").as_fd();
        programs.push(fd.try_clone_to_owned().expect("a descriptor"));
    }
    Ok(programs)
}
