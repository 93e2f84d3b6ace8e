//! Network namespaces of targets: opened by file, told apart by inode, entered by a thread of its own.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    thread,
};

use rustix::{
    fs::fstatfs,
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use sandwire_kernel_net::netns;

use crate::error::Error;

const OWN: &str = "/proc/thread-self/ns/net";
/// A file of the machine's first network namespace.
pub(crate) const FIRST: &str = "/proc/1/ns/net";
/// Magic number of the file system that namespace files are on.
const NSFS_MAGIC: u64 = 0x6e73_6673;

/// A network namespace, which lives at least as long as this.
#[derive(Debug)]
pub(crate) struct Namespace {
    file: OwnedFd,
    /// No other namespace has this number while this one lives.
    pub(crate) inode: u64,
}

impl Namespace {
    /// The one of that file; that of this thread without.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self, Error> {
        let path = path.unwrap_or(Path::new(OWN));
        let open = || {
            let file = File::open(path)?;
            let status = fstatfs(&file)?;
            // The type of the magic number depends on the machine.
            if !u64::try_from(status.f_type).is_ok_and(|magic| magic == NSFS_MAGIC) {
                let text = "that is no file of a namespace";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            let inode = file.metadata()?.ino();
            Ok((file, inode))
        };
        let (file, inode) = open().map_err(|source| Error::Namespace {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            file: file.into(),
            inode,
        })
    }

    /// The machine's own, which isn't this thread's inside a sandbox.
    pub(crate) fn machines() -> Result<Self, Error> {
        Self::open(Some(Path::new(FIRST)))
    }

    /// By which it is told from every other that there was since the machine's start, if the kernel knows it.
    pub(crate) fn cookie(&self) -> Option<u64> {
        self.inside(|| Ok(netns::cookie()?)).ok()
    }

    /// Does that work on a thread inside.
    pub(crate) fn inside<T: Send>(
        &self,
        work: impl FnOnce() -> Result<T, Error> + Send,
    ) -> Result<T, Error> {
        thread::scope(|scope| {
            let work_inside = || {
                move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network))
                    .map_err(|errno| Error::Enter {
                        source: errno.into(),
                    })?;
                work()
            };
            let worker = thread::Builder::new().spawn_scoped(scope, work_inside);
            worker
                .map_err(|source| Error::Enter { source })?
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}
