//! Opening a queue, and finding out what it is: the calls that the kernel has for TAPs alone.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::{HEADER_BYTES_MAX, TapError};

/// How a queue is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// As one of several.
    pub multi_queue: bool,
    /// With a virtio-net header before each frame, which a [`Tap`](super::Tap) takes off again.
    pub vnet_header: bool,
}

/// Opens a queue of a TAP in this thread's network namespace. If there is none by that name it is made, down, and goes
/// with its last queue.
///
/// # Errors
///
/// If the kernel doesn't allow it, or the name is that of another kind of interface.
pub fn open(name: &str, options: Options) -> Result<OwnedFd, TapError> {
    let mut request = interface_request(name).ok_or_else(|| TapError::Name {
        name: name.to_owned(),
    })?;
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .map_err(failed("open /dev/net/tun for", name))?;
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI;
    if options.multi_queue {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    if options.vnet_header {
        flags |= libc::IFF_VNET_HDR;
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).expect("TUN flags fit a short");
    #[expect(unsafe_code, reason = "there is no safe call for it")]
    // SAFETY: TUNSETIFF reads and writes one ifreq through the pointer, which outlives the call.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    check(result).map_err(failed("open", name))?;
    Ok(device.into())
}

/// Makes a queue ready for the engine: no waiting, and offloads only for who takes large packets. Bytes of the header
/// before each frame.
pub(super) fn prepare(queue: &OwnedFd, name: &str, large_packets: bool) -> Result<usize, TapError> {
    let header_bytes = header_bytes(queue, name)?;
    if large_packets && header_bytes == 0 {
        return Err(TapError::Kind {
            name: name.to_owned(),
            reason: "its frames say nothing of their offloads",
            flags: "IFF_VNET_HDR",
        });
    }
    if !large_packets {
        set_offloads(queue, 0).map_err(failed("turn off the offloads of", name))?;
    } else if set_offloads(queue, TCP_OFFLOADS | UDP_OFFLOADS).is_err() {
        // Kernels before 6.2 know none for UDP.
        set_offloads(queue, TCP_OFFLOADS).map_err(failed("turn on the offloads of", name))?;
    }
    fcntl_getfl(queue)
        .and_then(|flags| fcntl_setfl(queue, flags | OFlags::NONBLOCK))
        .map_err(|errno| failed("stop waiting for", name)(errno.into()))?;
    Ok(header_bytes)
}

fn set_offloads(queue: &OwnedFd, offloads: libc::c_uint) -> io::Result<()> {
    #[expect(unsafe_code, reason = "there is no safe call for it")]
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    let result = unsafe {
        libc::ioctl(
            queue.as_raw_fd(),
            libc::TUNSETOFFLOAD,
            libc::c_ulong::from(offloads),
        )
    };
    check(result)
}

fn header_bytes(queue: &OwnedFd, name: &str) -> Result<usize, TapError> {
    let wrong = |reason| TapError::Kind {
        name: name.to_owned(),
        reason,
        flags: "IFF_TAP and IFF_NO_PI",
    };
    let mut request = interface_request("").ok_or_else(|| wrong("it has no name"))?;
    #[expect(unsafe_code, reason = "there is no safe call for it")]
    // SAFETY: TUNGETIFF writes one ifreq through the pointer, which outlives the call.
    let result = unsafe { libc::ioctl(queue.as_raw_fd(), libc::TUNGETIFF, &raw mut request) };
    check(result).map_err(failed("ask about", name))?;
    #[expect(unsafe_code, reason = "a union of C")]
    // SAFETY: TUNGETIFF fills the flags.
    let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
    if flags & libc::IFF_TAP == 0 {
        return Err(wrong("it is a TUN, without Ethernet headers"));
    }
    // Whether it has IFF_NO_PI can't be told: IFF_NOFILTER, which any queue without a filter has, is the same bit.
    if flags & libc::IFF_VNET_HDR == 0 {
        return Ok(0);
    }
    let mut bytes: libc::c_int = 0;
    #[expect(unsafe_code, reason = "there is no safe call for it")]
    // SAFETY: TUNGETVNETHDRSZ writes one int through the pointer, which outlives the call.
    let result = unsafe { libc::ioctl(queue.as_raw_fd(), libc::TUNGETVNETHDRSZ, &raw mut bytes) };
    check(result).map_err(failed("ask about", name))?;
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    if bytes > HEADER_BYTES_MAX {
        return Err(wrong("frames begin with an unknown header"));
    }
    Ok(bytes)
}

fn failed(operation: &'static str, name: &str) -> impl FnOnce(io::Error) -> TapError {
    let name = name.to_owned();
    move |source| TapError::System {
        operation,
        name,
        source,
    }
}

/// A request about the interface of that name; `None` if there can be none.
fn interface_request(name: &str) -> Option<libc::ifreq> {
    #[expect(unsafe_code, reason = "a structure of C")]
    // SAFETY: all-zero bytes are a valid ifreq: an empty name and a union of integers and addresses.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() || name.contains('\0') {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    Some(request)
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

const TCP_OFFLOADS: libc::c_uint =
    libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
/// `TUN_F_USO4` and `TUN_F_USO6` (`linux/if_tun.h`, Linux 6.2).
const UDP_OFFLOADS: libc::c_uint = 0x20 | 0x40;
