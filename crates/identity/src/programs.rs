//! Loading the programs, and the links that hold them on a cgroup and on the network namespace.
//!
//! Links are pinned by name: those of a cgroup in a folder of its own, that of the namespace beside the maps. What has
//! a pin stays when the process ends.

use std::{fs, io, os::fd::AsFd, path::Path};

use aya::{
    Ebpf, EbpfLoader,
    programs::{CgroupAttachMode, CgroupSockopt, Program, ProgramError, links::FdLink},
};
use sandwire_kernel_net::bpf::{
    BPF_CGROUP_SETSOCKOPT, create_cgroup_link, open_pin, pin, update_link,
};

use crate::{Cgroup, Error, maps};

/// Name of the program on the network namespace, and of its pin.
const STEER: &str = "on_sk_lookup";

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/identity.o"));

/// Programs of a cgroup, in the order in which they are attached. All do nothing until the identity is active.
const NAMES: [&str; 16] = [
    "on_sock_create",
    "on_sock_release",
    "on_bind4",
    "on_bind6",
    "on_connect4",
    "on_connect6",
    "on_sendmsg4",
    "on_sendmsg6",
    "on_recvmsg4",
    "on_recvmsg6",
    "on_getsockname4",
    "on_getsockname6",
    "on_getpeername4",
    "on_getpeername6",
    "on_setsockopt",
    "on_sock_ops",
];
/// Programs that are called for each packet.
const PACKET_NAMES: [&str; 2] = ["on_ingress", "on_egress"];
/// Programs that are told of UDP sockets which are to receive at several addresses.
const RECEIVER_NAMES: [&str; 2] = ["on_post_bind4", "on_post_bind6"];

/// What an identity needs besides the programs that all have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    pub(crate) packets: bool,
    pub(crate) receivers: bool,
}

/// The programs of an identity.
pub(crate) fn names(needs: Needs) -> impl Iterator<Item = &'static str> {
    let of_packets = PACKET_NAMES.into_iter().filter(move |_| needs.packets);
    let of_receivers = RECEIVER_NAMES.into_iter().filter(move |_| needs.receivers);
    NAMES.into_iter().chain(of_receivers).chain(of_packets)
}

/// The loaded programs.
pub(crate) struct Programs(Ebpf);

impl Programs {
    /// Loads all programs; maps are those in the folder, and are made where they aren't there.
    pub(crate) fn load(maps_folder: &Path) -> Result<Self, Error> {
        let mut loader = EbpfLoader::new();
        // Nothing is relocated against the kernel's own types.
        loader.btf(None);
        for name in maps::NAMES.into_iter().chain(maps::ADDED) {
            loader.map_pin_path(name, maps_folder.join(name));
        }
        let mut loaded = loader
            .load(OBJECT)
            .map_err(|error| failed("load the programs", error))?;
        for (name, program) in loaded.programs_mut() {
            load(program).map_err(|error| failed(&format!("load the program {name}"), error))?;
        }
        Ok(Self(loaded))
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

    /// Attaches a program to a cgroup, and pins the link.
    pub(crate) fn attach(&mut self, name: &str, cgroup: &Cgroup, pin: &Path) -> Result<(), Error> {
        let operation = || format!("attach {name} to cgroup {}", cgroup.path.display());
        let program = self.0.program_mut(name);
        let program = program.ok_or_else(|| failed(&operation(), NotThere))?;
        if let Program::CgroupSockopt(program) = program {
            let attached = attach_to_options(program, cgroup, pin);
            return attached.map_err(|error| failed(&operation(), error));
        }
        let link = link(program, cgroup).map_err(|error| failed(&operation(), error))?;
        link.pin(pin).map_err(|error| failed(&operation(), error))?;
        Ok(())
    }

    /// Has the links in a folder run these programs, whatever they ran before; every call and packet goes by the one or the other. What
    /// has no link yet is attached to the cgroup, if that is there still; links of programs that are no more go. Every
    /// step is tried.
    pub(crate) fn renew(
        &mut self,
        folder: &Path,
        cgroup: Option<&Cgroup>,
        needs: Needs,
    ) -> Result<(), Error> {
        let mut outcome = Ok(());
        for name in names(needs) {
            let pin = folder.join(name);
            let renewed = self.exchange(name, &pin).and_then(|done| match cgroup {
                Some(cgroup) if done == Exchange::NoLink => self.attach(name, cgroup, &pin),
                _ => Ok(()),
            });
            outcome = outcome.and(renewed);
        }
        outcome.and(remove_others(folder, needs))
    }

    /// The same on the network namespace.
    pub(crate) fn renew_on_namespace(&mut self, folder: &Path) -> Result<(), Error> {
        match self.exchange(STEER, &folder.join(STEER))? {
            Exchange::NoLink => self.attach_to_namespace(folder),
            Exchange::Done | Exchange::Gone => Ok(()),
        }
    }

    fn exchange(&self, name: &str, pin: &Path) -> Result<Exchange, Error> {
        let operation = || format!("exchange the program of {}", pin.display());
        let program = self.0.program(name);
        let program = program.ok_or_else(|| failed(&operation(), NotThere))?;
        let program = program.fd().map_err(|error| failed(&operation(), error))?;
        let Some(link) = open_pin(pin).map_err(|error| failed(&operation(), error))? else {
            return Ok(Exchange::NoLink);
        };
        match update_link(link.as_fd(), program.as_fd()) {
            Err(error) if error.raw_os_error() == Some(libc::ENOLINK) => Ok(Exchange::Gone),
            updated => updated
                .map(|()| Exchange::Done)
                .map_err(|error| failed(&operation(), error)),
        }
    }

    /// Attaches the program that steers connections to the calling thread's network namespace, unless that was done.
    pub(crate) fn attach_to_namespace(&mut self, folder: &Path) -> Result<(), Error> {
        const OPERATION: &str = "attach on_sk_lookup to the network namespace";
        let pin = folder.join(STEER);
        if pin.exists() {
            return Ok(());
        }
        let Some(Program::SkLookup(program)) = self.0.program_mut(STEER) else {
            return Err(failed(OPERATION, NotThere));
        };
        let mut attach = || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            let namespace = fs::File::open("/proc/thread-self/ns/net")?;
            let id = program.attach(namespace)?;
            let link: FdLink = program.take_link(id)?.into();
            link.pin(&pin)?;
            Ok(())
        };
        attach().map_err(|error| failed(OPERATION, error))
    }
}

/// What came of exchanging a link's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exchange {
    Done,
    /// What it was attached to is gone.
    Gone,
    /// Nothing is pinned there.
    NoLink,
}

/// Takes the program off the network namespace.
pub(crate) fn detach_from_namespace(folder: &Path) -> Result<(), Error> {
    remove_file(&folder.join(STEER))
}

/// Takes all programs of a cgroup off it, by removing the folder of their pins.
pub(crate) fn detach(folder: &Path) -> Result<(), Error> {
    let failed = |source| Error::system("remove", folder.display().to_string(), source);
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
        _ => Ok(()),
    }
}

/// Removes pins of links that this build doesn't make.
fn remove_others(folder: &Path, needs: Needs) -> Result<(), Error> {
    let failed = |source| Error::system("list", folder.display().to_string(), source);
    let mut outcome = Ok(());
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        if !names(needs).any(|known| name == known) {
            outcome = outcome.and(remove_file(&entry.path()));
        }
    }
    outcome
}

pub(crate) fn remove_file(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::system("remove", path.display().to_string(), error))
        }
        _ => Ok(()),
    }
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

/// A link of its own, beside those of others: what they refuse stays refused.
fn link(program: &mut Program, cgroup: &Cgroup) -> Result<FdLink, ProgramError> {
    let folder = &cgroup.folder;
    let mode = CgroupAttachMode::Single;
    let made = match program {
        Program::CgroupSock(program) => {
            let id = program.attach(folder, mode)?;
            program.take_link(id)?.try_into()
        }
        Program::CgroupSockAddr(program) => {
            let id = program.attach(folder, mode)?;
            program.take_link(id)?.try_into()
        }
        Program::CgroupSkb(program) => {
            use aya::programs::CgroupSkbAttachType::{Egress, Ingress};
            let is_egress = matches!(program.expected_attach_type(), Some(Egress));
            let kind = if is_egress { Egress } else { Ingress };
            let id = program.attach(folder, kind, mode)?;
            program.take_link(id)?.try_into()
        }
        Program::SockOps(program) => {
            let id = program.attach(folder, mode)?;
            program.take_link(id)?.try_into()
        }
        _ => return Err(ProgramError::UnexpectedProgramType),
    };
    made.map_err(|_| ProgramError::UnexpectedProgramType)
}

/// The same for a kind of program whose links aya can't pin.
fn attach_to_options(
    program: &CgroupSockopt,
    cgroup: &Cgroup,
    at: &Path,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let program = program.fd()?;
    let link = create_cgroup_link(
        program.as_fd(),
        cgroup.folder.as_fd(),
        BPF_CGROUP_SETSOCKOPT,
    )?;
    Ok(pin(link.as_fd(), at)?)
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
fn refusal(error: &(dyn std::error::Error + 'static)) -> Option<io::Error> {
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
