//! TAP interfaces that outlive their creator.
//!
//! A TAP belongs to the network namespace of the thread that calls. The kernel gives a single-queue TAP
//! to one process at a time, and that is the VMM: whoever makes one lets go of it.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
};

use rustix::process::geteuid;

use crate::{Error, capability::Required, interface::InterfaceIndex};

/// Capabilities for TAPs.
pub const REQUIRED_CAPABILITIES: Required = Required {
    operations: "tap",
    capabilities: &["CAP_NET_ADMIN"],
    reason: "create persistent TAPs, give them an owner, open those of other users",
};

const DEVICE: &str = "/dev/net/tun";
const NAME_LENGTH_MAX: usize = libc::IFNAMSIZ - 1;

/// How a TAP is made and opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Whether frames carry virtio-net headers.
    pub vnet_header: bool,
    /// Whether several queues may be open.
    pub multi_queue: bool,
    /// User that may open it without privileges. Where neither user nor group is named, nobody but this process's user may.
    pub owner: Option<u32>,
    /// Group that may open it without privileges.
    pub group: Option<u32>,
}

impl Options {
    /// A TAP of nobody's could be had by everybody who can open `/dev/net/tun`, which any user can (`tun_not_capable`).
    fn owner_to_set(self) -> Option<u32> {
        match self.group {
            None => Some(self.owner.unwrap_or_else(|| geteuid().as_raw())),
            Some(_) => self.owner,
        }
    }
}

/// Creates a TAP that stays, with the given number in the namespace.
///
/// # Errors
/// The kernel refuses; the TAP is then not there.
pub fn create(name: &str, index: Option<InterfaceIndex>, options: Options) -> Result<(), Error> {
    let device = create_transient(name, index, options)?;
    device.make_persistent()
}

/// Creates a TAP that goes with the result, or with this process, unless [`Opened::make_persistent`] is
/// called: what a crash leaves half made is not there.
///
/// # Errors
/// An interface of that name is there ([`Error::is_existing`]), and stays as it is; or the kernel refuses, and the TAP is not there.
pub fn create_transient(
    name: &str,
    index: Option<InterfaceIndex>,
    options: Options,
) -> Result<Opened, Error> {
    let failed = |source| Error::system("create", format!("tap {name}"), source);
    let device = open_device().map_err(failed)?;
    if let Some(index) = index {
        let index = libc::c_int::try_from(index.0).expect("interface numbers are positive");
        // SAFETY: TUNSETIFINDEX reads one int through the pointer, which outlives the call.
        check(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFINDEX, &raw const index) })
            .map_err(failed)?;
    }
    attach(&device, name, options, libc::IFF_TUN_EXCL).map_err(|error| {
        // By EBUSY the kernel says that there is an interface of that name (`tun_set_iff`), as by EEXIST elsewhere.
        failed(match error.raw_os_error() {
            Some(libc::EBUSY) => io::Error::from_raw_os_error(libc::EEXIST),
            _ => error,
        })
    })?;
    if let Some(owner) = options.owner_to_set() {
        match set_number(&device, libc::TUNSETOWNER, owner) {
            // A user namespace that doesn't know this user, of which nobody has asked for one.
            Err(error) if options.owner.is_none() && error.raw_os_error() == Some(libc::EINVAL) => {
            }
            set => set.map_err(failed)?,
        }
    }
    if let Some(group) = options.group {
        set_number(&device, libc::TUNSETGROUP, group).map_err(failed)?;
    }
    Ok(Opened(device))
}

/// A TAP that this process has open. Dropping it gives it up.
#[derive(Debug)]
pub struct Opened(File);

impl Opened {
    /// The open device, to read and write frames.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.0
    }

    /// Lets the interface stay when nobody has it open.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn make_persistent(&self) -> Result<(), Error> {
        set_number(&self.0, libc::TUNSETPERSIST, 1)
            .map_err(|source| Error::system("make persistent", "tap", source))
    }

    /// Says whether the interface has a carrier, which it otherwise has for as long as it is open. An
    /// interface that is raised without one is no event for IPv6.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set_carrier(&self, has_carrier: bool) -> Result<(), Error> {
        let carrier = libc::c_int::from(has_carrier);
        // SAFETY: TUNSETCARRIER reads one int through the pointer, which outlives the call.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TUNSETCARRIER, &raw const carrier) })
            .map_err(|source| Error::system("set the carrier of", "tap", source))
    }
}

/// Features of its side that a virtio driver accepts: complete or partial checksums, and TCP and UDP
/// packets larger than the interface's MTU. A guest that accepted them is handed packets as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// It finishes checksums itself.
    pub checksum: bool,
    /// It takes TCP packets that are to be segmented. Needs `checksum`.
    pub segmentation: bool,
}

impl Opened {
    /// Says which features the reader has, as a VMM does after the guest's driver has negotiated.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set_offloads(&self, offloads: Offloads) -> Result<(), Error> {
        let mut features = 0;
        if offloads.checksum {
            features |= libc::TUN_F_CSUM;
        }
        if offloads.segmentation {
            features |= libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
        }
        set_number(&self.0, libc::TUNSETOFFLOAD, features)
            .map_err(|source| Error::system("set the offloads of", "tap", source))
    }
}

impl From<Opened> for OwnedFd {
    /// The open device, to be handed to another process.
    fn from(opened: Opened) -> Self {
        opened.0.into()
    }
}

/// Opens an existing TAP as a VMM does. `None` if another process has it open; for a multi-queue TAP
/// that is told by [`crate::interface::Tun::queues`] instead.
///
/// # Errors
/// The TAP is another kind of interface, or the kernel refuses. An interface that did not exist is
/// made and disappears again when the result is dropped.
pub fn open(name: &str, options: Options) -> Result<Option<Opened>, Error> {
    let failed = |source| Error::system("open", format!("tap {name}"), source);
    let device = open_device().map_err(failed)?;
    match attach(&device, name, options, 0) {
        Ok(()) => Ok(Some(Opened(device))),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

/// Like [`open`], but refuses a TAP that isn't persistent: one that did not exist was just made by the
/// attempt, and is gone again when this returns.
///
/// # Errors
/// As of [`open`], or there is no such TAP.
pub fn open_existing(name: &str, options: Options) -> Result<Option<Opened>, Error> {
    let Some(opened) = open(name, options)? else {
        return Ok(None);
    };
    let failed = |source| Error::system("open", format!("tap {name}"), source);
    // SAFETY: all-zero bytes are a valid ifreq: an empty name and a union of integers and addresses.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // SAFETY: TUNGETIFF writes one ifreq through the pointer, which outlives the call.
    check(unsafe { libc::ioctl(opened.0.as_raw_fd(), libc::TUNGETIFF, &raw mut request) })
        .map_err(failed)?;
    // SAFETY: TUNGETIFF sets the flags, and any bytes are a value of them.
    let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
    if flags & libc::IFF_PERSIST == 0 {
        return Err(failed(io::Error::from_raw_os_error(libc::ENODEV)));
    }
    Ok(Some(opened))
}

fn open_device() -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(DEVICE)
}

/// `mode` adds to the flags.
fn attach(device: &File, name: &str, options: Options, mode: libc::c_int) -> io::Result<()> {
    if name.is_empty() || name.len() > NAME_LENGTH_MAX {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | mode;
    if options.vnet_header {
        flags |= libc::IFF_VNET_HDR;
    }
    if options.multi_queue {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    // SAFETY: all-zero bytes are a valid ifreq: an empty name and a union of integers and addresses.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    // All 16 bits are flags; the highest is IFF_TUN_EXCL.
    let flags = u16::try_from(flags).expect("TUN flags fit 16 bits");
    request.ifr_ifru.ifru_flags = libc::c_short::from_ne_bytes(flags.to_ne_bytes());
    // SAFETY: TUNSETIFF reads and writes one ifreq through the pointer, which outlives the call.
    check(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })
}

fn set_number(device: &File, request: libc::Ioctl, value: u32) -> io::Result<()> {
    let value = libc::c_ulong::from(value);
    // SAFETY: these TUN requests take their argument as a number, not as a pointer.
    check(unsafe { libc::ioctl(device.as_raw_fd(), request, value) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
