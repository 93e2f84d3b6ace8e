//! The links that hold the programs on a cgroup and on the network namespace.
//!
//! Links are pinned by name: those of a cgroup in a folder of its own, that of the namespace beside the maps. What has
//! a pin stays when the process ends.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
};

use sandwire_kernel_net::bpf::{create_link_on, open_pin, pin, update_link};

use crate::{
    Cgroup, Error,
    loading::{ALL, BoxedError, Programs, STEER, Whose, failed, refusal},
};

/// What an identity needs besides the programs that all have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    pub(crate) packets: bool,
    pub(crate) receivers: bool,
}

/// The programs of an identity, in the order in which they are attached.
pub(crate) fn names(needs: Needs) -> impl Iterator<Item = &'static str> {
    let is_needed = move |whose| match whose {
        Whose::All => true,
        Whose::Receivers => needs.receivers,
        Whose::Packets => needs.packets,
        Whose::Namespace => false,
    };
    ALL.into_iter()
        .filter(move |(_, _, whose)| is_needed(*whose))
        .map(|(name, _, _)| name)
}

impl Programs {
    /// Attaches a program to a cgroup, and pins the link.
    pub(crate) fn attach(&self, name: &str, cgroup: &Cgroup, at: &Path) -> Result<(), Error> {
        // A link of its own, beside those of others: what they refuse stays refused.
        let held = self.hold(name, cgroup.folder.as_fd(), at);
        held.map_err(|error| match refusal(&*error) {
            Some(source) => Error::NotShared {
                program: name.to_owned(),
                path: cgroup.path.clone(),
                source,
            },
            None => {
                let path = cgroup.path.display();
                failed(&format!("attach {name} to cgroup {path}"), error)
            }
        })
    }

    fn hold(&self, name: &str, target: BorrowedFd<'_>, at: &Path) -> Result<(), BoxedError> {
        let (program, attach_type) = self.get(name)?;
        let link = create_link_on(program, target, attach_type)?;
        Ok(pin(link.as_fd(), at)?)
    }

    /// Has the links in a folder run these programs, whatever they ran before; every call and packet goes by the one or the other. What
    /// has no link yet is attached to the cgroup, if that is there still; links of programs that are no more go. Every
    /// step is tried.
    pub(crate) fn renew(
        &self,
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

    /// The same on the calling thread's network namespace, for the program that steers connections.
    pub(crate) fn renew_on_namespace(&self, folder: &Path) -> Result<(), Error> {
        match self.exchange(STEER, &folder.join(STEER))? {
            Exchange::NoLink => self.attach_to_namespace(folder),
            Exchange::Done | Exchange::Gone => Ok(()),
        }
    }

    fn exchange(&self, name: &str, pin: &Path) -> Result<Exchange, Error> {
        let operation = || format!("exchange the program of {}", pin.display());
        let (program, _) = self
            .get(name)
            .map_err(|error| failed(&operation(), error))?;
        let Some(link) = open_pin(pin).map_err(|error| failed(&operation(), error))? else {
            return Ok(Exchange::NoLink);
        };
        match update_link(link.as_fd(), program) {
            Err(error) if error.raw_os_error() == Some(libc::ENOLINK) => Ok(Exchange::Gone),
            updated => updated
                .map(|()| Exchange::Done)
                .map_err(|error| failed(&operation(), error)),
        }
    }

    fn attach_to_namespace(&self, folder: &Path) -> Result<(), Error> {
        let at = folder.join(STEER);
        let attach = || -> Result<(), BoxedError> {
            let namespace = fs::File::open("/proc/thread-self/ns/net")?;
            self.hold(STEER, namespace.as_fd(), &at)
        };
        attach().map_err(|error| failed(&format!("attach {STEER} to the network namespace"), error))
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
