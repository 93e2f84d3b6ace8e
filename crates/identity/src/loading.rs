//! Loading the programs. The verifier takes most of a second for them, so they are loaded once and pinned, for all identities.

use std::{
    collections::BTreeMap,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya::{
    EbpfLoader,
    maps::{MapError, MapInfo},
    programs::{Program, ProgramError},
};
use sandwire_kernel_net::bpf::{open_pin, pin};

use crate::{Error, maps};

/// Name of the program on the network namespace, and of its pin.
pub(crate) const STEER: &str = "on_sk_lookup";
/// Where the programs are pinned, beside the maps, by build and maps.
const FOLDER: &str = "programs";

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/identity.o"));

/// Where a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    /// To the cgroup of each identity.
    All,
    /// To those of identities whose UDP sockets are to receive at several addresses: it is told of such sockets.
    Receivers,
    /// To those of identities that have more than TCP: it is called for each packet.
    Packets,
    /// To the network namespace.
    Namespace,
}

/// All programs of the object, in the order in which they are attached, with their attach types (`enum bpf_attach_type`,
/// include/uapi/linux/bpf.h). Those of a cgroup do nothing until the identity is active.
pub(crate) const ALL: [(&str, u32, Whose); 21] = [
    ("on_sock_create", 2, Whose::All),
    ("on_sock_release", 34, Whose::All),
    ("on_bind4", 8, Whose::All),
    ("on_bind6", 9, Whose::All),
    ("on_connect4", 10, Whose::All),
    ("on_connect6", 11, Whose::All),
    ("on_sendmsg4", 14, Whose::All),
    ("on_sendmsg6", 15, Whose::All),
    ("on_recvmsg4", 19, Whose::All),
    ("on_recvmsg6", 20, Whose::All),
    ("on_getsockname4", 31, Whose::All),
    ("on_getsockname6", 32, Whose::All),
    ("on_getpeername4", 29, Whose::All),
    ("on_getpeername6", 30, Whose::All),
    ("on_setsockopt", 22, Whose::All),
    ("on_sock_ops", 3, Whose::All),
    ("on_post_bind4", 12, Whose::Receivers),
    ("on_post_bind6", 13, Whose::Receivers),
    ("on_ingress", 0, Whose::Packets),
    ("on_egress", 1, Whose::Packets),
    (STEER, 36, Whose::Namespace),
];

pub(crate) type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// The loaded programs.
pub(crate) struct Programs(BTreeMap<&'static str, (OwnedFd, u32)>);

impl Programs {
    /// Those of this build that are pinned beside the maps, or loaded and pinned now; maps that aren't there are made. To be
    /// called by who has locked the folder.
    pub(crate) fn prepare(maps_folder: &Path) -> Result<Self, Error> {
        match Self::find(maps_folder)? {
            Some(found) => Ok(found),
            None => Self::load(maps_folder),
        }
    }

    /// Loads them, and pins them in the place of those that were pinned before.
    pub(crate) fn load(maps_folder: &Path) -> Result<Self, Error> {
        let mut loader = EbpfLoader::new();
        // Nothing is relocated against the kernel's own types.
        loader.btf(None);
        for name in maps::NAMES.into_iter().chain(maps::ADDED) {
            loader.map_pin_path(name, maps_folder.join(name));
        }
        forget(maps_folder)?;
        let loaded = loader.load(OBJECT);
        let mut loaded = loaded.map_err(|error| failed("load the programs", error))?;
        let folder = folder_of(maps_folder);
        let folder = folder.map_err(|error| failed("look at the maps", error))?;
        let created = fs::create_dir_all(&folder);
        created.map_err(|source| Error::system("create", folder.display().to_string(), source))?;
        let mut programs = BTreeMap::new();
        for (name, attach_type, _) in ALL {
            let program = loaded.program_mut(name);
            let descriptor = program
                .ok_or_else(|| NotThere.into())
                .and_then(|program| load_and_pin(program, &folder.join(name)))
                .map_err(|error| failed(&format!("load the program {name}"), error))?;
            programs.insert(name, (descriptor, attach_type));
        }
        Ok(Self(programs))
    }

    /// The pinned ones, if they are all there.
    fn find(maps_folder: &Path) -> Result<Option<Self>, Error> {
        // A map isn't there: the programs that are pinned have another one.
        let Ok(folder) = folder_of(maps_folder) else {
            return Ok(None);
        };
        let mut programs = BTreeMap::new();
        for (name, attach_type, _) in ALL {
            let found = open_pin(&folder.join(name));
            match found.map_err(|error| failed(&format!("open the program {name}"), error))? {
                Some(found) => programs.insert(name, (found, attach_type)),
                None => return Ok(None),
            };
        }
        Ok(Some(Self(programs)))
    }

    /// A program, and where it is attached.
    pub(crate) fn get(&self, name: &str) -> Result<(BorrowedFd<'_>, u32), NotThere> {
        let (program, attach_type) = self.0.get(name).ok_or(NotThere)?;
        Ok((program.as_fd(), *attach_type))
    }

    /// Loads all programs with maps of their own, which are gone afterwards.
    pub(crate) fn probe() -> Result<(), Error> {
        Self::probe_object(OBJECT)
    }

    fn probe_object(object: &[u8]) -> Result<(), Error> {
        let mut loader = EbpfLoader::new();
        loader.btf(None);
        let loaded = loader.load(object);
        let mut loaded = loaded.map_err(|error| failed("load the programs", error))?;
        for (name, program) in loaded.programs_mut() {
            load(program).map_err(|error| failed(&format!("load the program {name}"), error))?;
        }
        Ok(())
    }
}

/// Lets go of the pinned programs. Those that are attached go on.
pub(crate) fn forget(maps_folder: &Path) -> Result<(), Error> {
    let folder = maps_folder.join(FOLDER);
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::system("remove", folder.display().to_string(), error))
        }
        _ => Ok(()),
    }
}

/// Where the programs of this build with these very maps are pinned. The kernel gives no number of a map twice.
fn folder_of(maps_folder: &Path) -> Result<PathBuf, MapError> {
    let mut hasher = DefaultHasher::new();
    OBJECT.hash(&mut hasher);
    for name in maps::NAMES.into_iter().chain(maps::ADDED) {
        let map = MapInfo::from_pin(maps_folder.join(name))?;
        map.id().hash(&mut hasher);
    }
    let folder = format!("{:016x}", hasher.finish());
    Ok(maps_folder.join(FOLDER).join(folder))
}

fn load_and_pin(program: &mut Program, at: &Path) -> Result<OwnedFd, BoxedError> {
    load(program)?;
    let descriptor = program.fd()?.as_fd().try_clone_to_owned()?;
    pin(descriptor.as_fd(), at)?;
    Ok(descriptor)
}

fn load(program: &mut Program) -> Result<(), ProgramError> {
    match program {
        Program::CgroupSock(program) => program.load(),
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSockopt(program) => program.load(),
        Program::CgroupSkb(program) => program.load(),
        Program::SockOps(program) => program.load(),
        Program::SkLookup(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the object doesn't have it")]
pub(crate) struct NotThere;

pub(crate) fn failed(
    operation: &str,
    error: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> Error {
    let error = error.into();
    if let Some(source) = refusal(&*error) {
        return Error::Forbidden {
            operation: operation.to_owned(),
            source,
        };
    }
    Error::Program {
        operation: operation.to_owned(),
        source: chain(&*error).into(),
    }
}

/// The kernel's EPERM somewhere below.
pub(crate) fn refusal(error: &(dyn std::error::Error + 'static)) -> Option<io::Error> {
    let mut current = Some(error);
    while let Some(found) = current {
        if let Some(system) = found.downcast_ref::<io::Error>()
            && system.raw_os_error() == Some(libc::EPERM)
        {
            return Some(io::Error::from_raw_os_error(libc::EPERM));
        }
        current = found.source();
    }
    None
}

/// The error with its causes: aya keeps the kernel's answer to itself.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut current = error.source();
    while let Some(found) = current {
        let cause = found.to_string();
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
        current = found.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use sandwire_bpf_compiler::Compiler;
    use sandwire_testlab::lab;

    use super::Programs;

    /// The verifier judges what a compiler makes of the programs, and the next Debian has another one.
    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn the_kernel_takes_what_every_clang_makes_of_the_programs() {
        lab::run(|_| {
            let compilers = Compiler::versions();
            assert!(!compilers.is_empty(), "no clang-14, clang-19 or other");
            let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("bpf");
            let headers = format!("-I{}", sources.display());
            for compiler in compilers {
                let objects = tempfile::tempdir().unwrap();
                compiler
                    .compile_all(&sources, objects.path(), &[&headers])
                    .unwrap();
                let object = fs::read(objects.path().join("identity.o")).unwrap();
                let probed = Programs::probe_object(&object);
                probed.unwrap_or_else(|error| panic!("{}: {error:?}", compiler.name()));
            }
        });
    }
}
