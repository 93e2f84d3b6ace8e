//! Sockets that take, or answer from, addresses that aren't this host's (`IP_TRANSPARENT`).

use std::{
    io, mem,
    net::{SocketAddr, TcpListener, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
};

use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, listen, socket_with,
    sockopt::{set_ipv6_v6only, set_socket_reuseaddr},
};

use crate::{Error, capability::Required};

/// Capabilities for such sockets.
pub const REQUIRED_CAPABILITIES: Required = Required {
    operations: "transparent sockets",
    capabilities: &["CAP_NET_ADMIN"],
    reason: "take packets for, and answer from, addresses of others",
};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// What is going to be a listener that is given connections to any address. It has its own address already, and is given
/// nothing yet.
#[derive(Debug)]
pub struct BoundTcp {
    socket: OwnedFd,
    address: SocketAddr,
}

impl BoundTcp {
    /// Takes the address.
    ///
    /// # Errors
    /// Somebody listens there, or the capability is missing.
    pub fn new(address: SocketAddr, mark: u32) -> Result<Self, Error> {
        // A restart finds connections of the one before.
        let socket = open(address, SocketType::STREAM, mark, Sharing::Allowed)
            .map_err(|source| Error::system("open", listener(address), source))?;
        Ok(Self { socket, address })
    }

    /// Its own address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Is given connections from now on.
    ///
    /// # Errors
    /// Somebody listens there meanwhile.
    pub fn listen(self) -> Result<TcpListener, Error> {
        listen(&self.socket, BACKLOG)
            .map_err(|source| Error::system("open", listener(self.address), source))?;
        Ok(self.socket.into())
    }
}

fn listener(address: SocketAddr) -> String {
    format!("transparent TCP listener {address}")
}

/// A socket that is given datagrams for any address, and told which
/// ([`crate::datagrams::Receiver`] reads it). Nobody else can have its own address besides, and with it what comes.
///
/// # Errors
/// The address is taken, or the capability is missing.
pub fn udp_listener(address: SocketAddr) -> Result<UdpSocket, Error> {
    let listener = || -> io::Result<OwnedFd> {
        let socket = open(address, SocketType::DGRAM, 0, Sharing::Refused)?;
        match address {
            SocketAddr::V4(_) => set(&socket, libc::SOL_IP, libc::IP_RECVORIGDSTADDR, 1)?,
            SocketAddr::V6(_) => set(&socket, libc::SOL_IPV6, libc::IPV6_RECVORIGDSTADDR, 1)?,
        }
        Ok(socket)
    };
    let object = format!("transparent UDP socket {address}");
    Ok(listener()
        .map_err(|source| Error::system("open", object, source))?
        .into())
}

/// A socket that sends datagrams from an address that isn't this host's, with this mark. A service that listens there, and
/// shares its address, may be there besides.
///
/// # Errors
/// The capability is missing, or there are no more descriptors.
pub fn udp_sender(from: SocketAddr, mark: u32) -> Result<UdpSocket, Error> {
    let object = format!("transparent UDP socket {from}");
    Ok(open(from, SocketType::DGRAM, mark, Sharing::Allowed)
        .map_err(|source| Error::system("open", object, source))?
        .into())
}

/// Whether others may bind an address that a socket has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    /// Those that allow it, too. Where datagrams are received that means whoever was the last to bind it gets them.
    Allowed,
    /// Nobody.
    Refused,
}

fn open(address: SocketAddr, kind: SocketType, mark: u32, sharing: Sharing) -> io::Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, kind, flags, None)?;
    set_socket_reuseaddr(&socket, sharing == Sharing::Allowed)?;
    match address {
        SocketAddr::V4(_) => set(&socket, libc::SOL_IP, libc::IP_TRANSPARENT, 1)?,
        SocketAddr::V6(_) => {
            set_ipv6_v6only(&socket, true)?;
            set(&socket, libc::SOL_IPV6, libc::IPV6_TRANSPARENT, 1)?;
        }
    }
    if mark != 0 {
        let mark = mark.cast_signed();
        set(&socket, libc::SOL_SOCKET, libc::SO_MARK, mark)?;
    }
    bind(&socket, &address)?;
    Ok(socket)
}

/// Sets an option that rustix doesn't have.
fn set(
    socket: &OwnedFd,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let length = libc::socklen_t::try_from(mem::size_of_val(&value)).expect("four bytes");
    // SAFETY: the kernel reads one `int` behind the pointer, which lives until the call returns.
    let outcome = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            length,
        )
    };
    if outcome == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}
