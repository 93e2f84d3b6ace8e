//! Switches of an interface, as `ethtool -K` sets them.

use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result};

/// Turns checksum and segmentation offloads of an interface of this thread's network namespace on or off.
pub(crate) fn set(interface: &str, on: bool) -> Result<()> {
    let socket = UdpSocket::bind("127.0.0.1:0").context("open a socket for ioctls")?;
    // Checksums go last when off, since the kernel wants them for the others, and first when on.
    let mut switches = [
        TX_CHECKSUM,
        GENERIC_SEGMENTATION,
        TCP_SEGMENTATION,
        GENERIC_RECEIVE,
    ];
    if !on {
        switches.reverse();
    }
    for switch in switches {
        set_switch(&socket, interface, switch, on)
            .with_context(|| format!("set switch {switch:#x} of {interface} to {on}"))?;
    }
    Ok(())
}

fn set_switch(socket: &UdpSocket, interface: &str, switch: u32, on: bool) -> io::Result<()> {
    #[repr(C)]
    struct Value {
        command: u32,
        data: u32,
    }
    let mut value = Value {
        command: switch,
        data: on.into(),
    };
    // SAFETY: all zeros is an `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the request names an interface and points to a value of the size that the command has.
    match unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has the kernel cut what is sent on this socket into datagrams of that size.
pub(crate) fn segment_datagrams(socket: &UdpSocket, bytes: u16) -> io::Result<()> {
    let value = libc::c_int::from(bytes);
    let length = libc::socklen_t::try_from(size_of_val(&value)).map_err(io::Error::other)?;
    let value = (&raw const value).cast();
    let socket = socket.as_raw_fd();
    // SAFETY: the kernel reads an integer.
    match unsafe { libc::setsockopt(socket, libc::SOL_UDP, libc::UDP_SEGMENT, value, length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

const SIOCETHTOOL: libc::Ioctl = 0x8946;
const TX_CHECKSUM: u32 = 0x17;
const TCP_SEGMENTATION: u32 = 0x1f;
const GENERIC_SEGMENTATION: u32 = 0x24;
const GENERIC_RECEIVE: u32 = 0x2c;
