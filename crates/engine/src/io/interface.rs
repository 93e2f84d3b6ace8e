//! A network interface, found by its name in the calling thread's network namespace, and what keeps an app off it.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd};

use rustix::net::netdevice;
use thiserror::Error;

use crate::pool::PoolLimits;

/// An interface by the number that it keeps when it is renamed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name when it was looked up.
    pub name: String,
    /// Its number.
    pub index: u32,
    /// Bytes of the longest IP packet that it takes, when it was looked up.
    pub mtu: u32,
}

/// Why an app for an interface did not start.
#[derive(Debug, Error)]
pub enum EdgeError {
    /// Nothing by that name here.
    #[error(
        "open interface {name}: this network namespace has none of that name; `ip link` lists those that it has"
    )]
    NoInterface {
        /// The name.
        name: String,
    },
    /// Its frames have no Ethernet header.
    #[error("open interface {name}: it carries no Ethernet frames (hardware type {kind})")]
    NotEthernet {
        /// The name.
        name: String,
        /// The kernel's `ARPHRD_` number.
        kind: u16,
    },
    /// Its frames don't fit.
    #[error(
        "open interface {name}: its MTU of {mtu} makes frames of up to {frame_bytes} bytes, and the engine's packets hold \
         {frame_bytes_max}; lower the MTU or raise `PoolLimits::frame_bytes_max`"
    )]
    Mtu {
        /// The name.
        name: String,
        /// The interface's MTU.
        mtu: u32,
        /// With Ethernet header and a VLAN tag.
        frame_bytes: u32,
        /// The pool's limit.
        frame_bytes_max: u16,
    },
    /// Not allowed.
    #[error("open interface {name}: {step}: not permitted; this needs the capability {capability}")]
    NotPermitted {
        /// The name.
        name: String,
        /// What was being done.
        step: &'static str,
        /// Which capability the user lacks.
        capability: &'static str,
    },
    /// The kernel said no.
    #[error("open interface {name}: {step}")]
    Kernel {
        /// The name.
        name: String,
        /// What was being done.
        step: &'static str,
        /// Why not.
        source: io::Error,
    },
}

impl EdgeError {
    /// What the kernel said about a step that needs CAP_NET_RAW.
    pub(super) fn of_step(name: &str, step: &'static str, source: io::Error) -> Self {
        let name = name.to_owned();
        if source.raw_os_error() == Some(libc::EPERM) {
            return Self::NotPermitted {
                name,
                step,
                capability: "CAP_NET_RAW",
            };
        }
        Self::Kernel { name, step, source }
    }
}

impl Interface {
    /// The interface of that name, as the network namespace of `socket` has it.
    ///
    /// # Errors
    /// If there is none.
    pub fn find(socket: impl AsFd, name: &str) -> Result<Self, EdgeError> {
        let Ok(index) = netdevice::name_to_index(&socket, name) else {
            let name = name.to_owned();
            return Err(EdgeError::NoInterface { name });
        };
        let mtu = mtu_of(socket, name)
            .map_err(|source| EdgeError::of_step(name, "ask for the MTU", source))?;
        Ok(Self {
            name: name.to_owned(),
            index,
            mtu,
        })
    }

    /// Bytes of the longest of its frames, with one VLAN tag.
    #[must_use]
    pub fn frame_bytes(&self) -> usize {
        self.mtu.saturating_add(HEADER_BYTES) as usize
    }

    /// Whether the longest of its frames, with one VLAN tag, fits an engine's packets.
    ///
    /// # Errors
    /// If it doesn't.
    pub fn check_frames(&self, limits: PoolLimits) -> Result<(), EdgeError> {
        let frame_bytes = self.mtu.saturating_add(HEADER_BYTES);
        if frame_bytes <= u32::from(limits.frame_bytes_max) {
            return Ok(());
        }
        Err(EdgeError::Mtu {
            name: self.name.clone(),
            mtu: self.mtu,
            frame_bytes,
            frame_bytes_max: limits.frame_bytes_max,
        })
    }
}

#[expect(unsafe_code, reason = "no safe wrapper of this ioctl")]
fn mtu_of(socket: impl AsFd, name: &str) -> io::Result<u32> {
    // SAFETY: an `ifreq` is bytes and a union of integers, pointers and structures of such: all zeros is one.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open while it is borrowed; the kernel reads the name, which ends in a zero, and writes
    // within the structure.
    if unsafe { libc::ioctl(socket, libc::SIOCGIFMTU, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: SIOCGIFMTU has filled this member; every bit pattern is an integer.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    Ok(u32::try_from(mtu).unwrap_or(0))
}

/// Ethernet header and one VLAN tag.
const HEADER_BYTES: u32 = 18;
