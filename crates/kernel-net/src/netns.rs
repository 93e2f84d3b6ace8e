//! Network namespaces: made by a thread for itself, published by name as `ip netns` does.
//!
//! A namespace lives as long as something holds it: a thread inside, or its mount under
//! `/run/netns`. A thread that makes one and dies before publishing it leaves nothing behind. The
//! guard that a thread gets brings it back home; a thread that can't go home aborts the process,
//! because everything it did next would happen to the wrong network.

use std::{
    fs::{self, File},
    io,
    marker::PhantomData,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    mount::{MountPropagationFlags, UnmountFlags},
    thread::{LinkNameSpaceType, UnshareFlags},
};

use crate::{Error, capability::Required};

/// Capabilities for namespaces.
pub const REQUIRED_CAPABILITIES: Required = Required {
    operations: "netns",
    capabilities: &["CAP_SYS_ADMIN"],
    reason: "make and enter network namespaces, mount them under /run/netns",
};

/// The number by which the kernel's eBPF knows the namespace that the calling thread is in. Unlike an inode it is never
/// used again.
///
/// # Errors
/// The kernel refuses, or is older than 5.14.
pub fn cookie() -> Result<u64, Error> {
    let failed = |source| Error::system("ask for the number of", "the network namespace", source);
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::NETLINK,
        rustix::net::SocketType::RAW,
        None,
    )
    .map_err(|error| failed(error.into()))?;
    let mut found = 0_u64;
    let mut length = libc::socklen_t::try_from(size_of::<u64>()).expect("eight");
    // SAFETY: the kernel writes at most `length` bytes to `found`, which has as many.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if answer < 0 {
        return Err(failed(io::Error::last_os_error()));
    }
    Ok(found)
}

/// Where `ip netns` looks for namespaces.
pub const FOLDER: &str = "/run/netns";
const OWN: &str = "/proc/thread-self/ns/net";
/// Magic number of the file system that namespace files are on.
const NSFS_MAGIC: u64 = 0x6e73_6673;
/// Asks a namespace's file what kind of namespace it is.
const NS_GET_NSTYPE: libc::Ioctl = 0xb703;

/// The namespace that threads return to.
#[derive(Clone, Debug)]
pub struct Home(Arc<OwnedFd>);

impl Home {
    /// Remembers the namespace that the calling thread is in.
    ///
    /// # Errors
    /// It can't be opened.
    pub fn here() -> Result<Self, Error> {
        let file = File::open(OWN).map_err(|source| Error::system("open", OWN, source))?;
        Ok(Self(Arc::new(file.into())))
    }

    /// Moves the calling thread into a namespace of its own, that nobody else knows.
    ///
    /// # Errors
    /// The kernel refuses; the thread is where it was.
    pub fn unshare(&self) -> Result<Inside, Error> {
        let failed = |source: Errno| Error::system("create", "network namespace", source);
        // SAFETY: NEWNET leaves the file descriptor table shared, which is what `unshare_unsafe` warns of.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.map_err(failed)?;
        Ok(Inside::new(self))
    }

    /// Moves the calling thread into a named namespace.
    ///
    /// # Errors
    /// There is none of that name, or the kernel refuses; the thread is where it was.
    pub fn enter(&self, name: &str) -> Result<Inside, Error> {
        let failed = |source| Error::system("enter", format!("network namespace {name}"), source);
        let file = File::open(path_of(name)).map_err(failed)?;
        set_namespace(file.as_fd()).map_err(|errno| failed(errno.into()))?;
        Ok(Inside::new(self))
    }

    /// Moves the calling thread into a namespace that somebody has open.
    ///
    /// # Errors
    /// The kernel refuses; the thread is where it was.
    pub fn enter_open(&self, namespace: BorrowedFd<'_>) -> Result<Inside, Error> {
        let failed = |errno| Error::system("enter", "network namespace without a name", errno);
        set_namespace(namespace).map_err(failed)?;
        Ok(Inside::new(self))
    }
}

impl AsFd for Home {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The calling thread is away from home; dropping this brings it back.
#[derive(Debug)]
#[must_use = "dropping it returns to the home namespace at once"]
pub struct Inside {
    home: Home,
    /// A namespace belongs to a thread: the guard must not leave it.
    not_send: PhantomData<*const ()>,
}

impl Inside {
    fn new(home: &Home) -> Self {
        Self {
            home: home.clone(),
            not_send: PhantomData,
        }
    }

    /// The namespace that the thread is in, which lives at least as long as this.
    ///
    /// # Errors
    /// It can't be opened.
    pub fn open(&self) -> Result<OwnedFd, Error> {
        let file = File::open(OWN).map_err(|source| Error::system("open", OWN, source))?;
        Ok(file.into())
    }

    /// Gives the namespace that the thread is in a name, under which it stays. From then on it is
    /// visible to `ip netns`.
    ///
    /// # Errors
    /// The name is taken, or the mount fails; then no file is left.
    pub fn publish(&self, name: &str) -> Result<(), Error> {
        let failed = |source| Error::system("mount", format!("network namespace {name}"), source);
        let path = path_of(name);
        // An empty file is what a crash just before the mount left.
        match File::create_new(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && !is_mounted(name) => {}
            other => drop(other.map_err(failed)?),
        }
        rustix::mount::mount_bind(OWN, &path).map_err(|errno| {
            // The mount's failure is what counts; an empty file is found by `list`.
            let _ = fs::remove_file(&path);
            failed(errno.into())
        })
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if let Err(error) = set_namespace(self.home.as_fd()) {
            // No unwinding: whatever ran next on this thread would change a foreign network.
            eprintln_and_abort(error);
        }
    }
}

#[allow(
    clippy::print_stderr,
    reason = "the last words of a process that aborts"
)]
fn eprintln_and_abort(error: Errno) -> ! {
    eprintln!("cannot return to the host's network namespace: {error}");
    std::process::abort()
}

fn set_namespace(namespace: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::thread::move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))
}

/// Opens a network namespace by the path of its file, as `/proc/PID/ns/net` or one under [`FOLDER`].
///
/// # Errors
/// It can't be opened, or is something else.
pub fn open_file(path: &Path) -> Result<OwnedFd, Error> {
    let failed = |source| Error::system("open", named(path), source);
    // Whatever else the path leads to, opening it must not wait.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
    // SAFETY: the request has no argument, and on a file of anything else it means nothing.
    let kind = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_NSTYPE) };
    match kind == libc::CLONE_NEWNET {
        true => Ok(file),
        false => {
            let reason = "it is not a network namespace";
            Err(failed(io::Error::new(io::ErrorKind::InvalidInput, reason)))
        }
    }
}

/// Whether two open files are of the same namespace.
///
/// # Errors
/// The kernel doesn't tell.
pub fn are_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> Result<bool, Error> {
    let identity = |file| {
        let status = rustix::fs::fstat(file)
            .map_err(|errno| Error::system("look at", "network namespace", errno))?;
        Ok((status.st_dev, status.st_ino))
    };
    Ok(identity(one)? == identity(other)?)
}

fn named(path: &Path) -> String {
    format!("network namespace {}", path.display())
}

/// Path of a named namespace.
#[must_use]
pub fn path_of(name: &str) -> PathBuf {
    Path::new(FOLDER).join(name)
}

/// Makes `/run/netns` what `ip netns` expects: a shared mount, so that namespaces mounted there are
/// seen in, and can be unmounted from, the mount namespaces made later.
///
/// # Errors
/// It can't be created or mounted.
pub fn prepare_folder() -> Result<(), Error> {
    let failed = |source: io::Error| Error::system("prepare", FOLDER, source);
    fs::create_dir_all(FOLDER).map_err(failed)?;
    let share = || {
        let flags = MountPropagationFlags::SHARED | MountPropagationFlags::REC;
        rustix::mount::mount_change(FOLDER, flags)
    };
    match share() {
        Err(Errno::INVAL) => {
            rustix::mount::mount_bind_recursive(FOLDER, FOLDER)
                .map_err(|errno| failed(errno.into()))?;
            share().map_err(|errno| failed(errno.into()))
        }
        other => other.map_err(|errno| failed(errno.into())),
    }
}

/// Takes a namespace's name away. The namespace itself goes with its last user. A name without a
/// mount, or no name at all, is fine.
///
/// # Errors
/// It can't be unmounted or its file can't be removed.
pub fn remove(name: &str) -> Result<(), Error> {
    let path = path_of(name);
    let failed = |source| Error::system("remove", format!("network namespace {name}"), source);
    loop {
        // Somebody else may have mounted over it: take all of them.
        match rustix::mount::unmount(&path, UnmountFlags::DETACH) {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOENT) => break,
            Err(errno) => return Err(failed(errno.into())),
        }
    }
    match fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(failed),
    }
}

/// A file under `/run/netns`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Whether a namespace is mounted on it.
    pub is_mounted: bool,
}

/// Files under `/run/netns` whose names start with `prefix`.
///
/// # Errors
/// The folder can't be read.
pub fn list(prefix: &str) -> Result<Vec<Listed>, Error> {
    let failed = |source| Error::system("list", FOLDER, source);
    let entries = match fs::read_dir(FOLDER) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if let Ok(name) = entry.file_name().into_string()
            && name.starts_with(prefix)
        {
            let is_mounted = is_mounted(&name);
            found.push(Listed { name, is_mounted });
        }
    }
    Ok(found)
}

/// Whether a namespace is mounted under this name.
#[must_use]
pub fn is_mounted(name: &str) -> bool {
    rustix::fs::statfs(path_of(name))
        .is_ok_and(|status| u64::try_from(status.f_type).is_ok_and(|magic| magic == NSFS_MAGIC))
}
