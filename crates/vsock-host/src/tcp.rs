//! What sockets to TCP services need otherwise than others: to tell that a connection was broken off, and a bound for what they
//! hold.
//!
//! A socket that is closed says "end" to its other side, whatever the reason: a service that reads to the end would take
//! half an upload for all of it. TCP alone has another word, a reset, and what hasn't arrived by then is forgotten. So each of
//! our sockets to TCP services says that when it is closed, from its beginning on, so that the end of this process says it
//! too; until a proper end has been passed on. Unix sockets and AF_VSOCK can't say it.
//!
//! TCP sizes a socket's buffer by itself, up to megabytes, so that what is under way to a distant service fits in. A service that
//! doesn't read has that filled too, for each connection. So what is under way may be as much as TCP likes, and what
//! isn't sent yet is bounded ([`bound_unsent`]): beyond, nothing is taken, as where a Unix socket is full.

use std::{io, os::fd::AsFd, time::Duration};

use rustix::net::sockopt;
use socket2::SockRef;

/// What a socket may hold unsent at first.
pub const UNSENT_BYTES: u32 = 128 * 1024;

/// Has a socket take no more while it holds that many bytes that it couldn't send; one write may go beyond that by a packet of 64
/// KiB.
///
/// # Errors
/// Of `setsockopt`.
pub fn bound_unsent(socket: impl AsFd, bytes: u32) -> io::Result<()> {
    SockRef::from(&socket).set_tcp_notsent_lowat(bytes)
}

/// Has a close say that the connection was broken off.
///
/// # Errors
/// Of `setsockopt`.
pub fn reset_when_closed(socket: impl AsFd) -> rustix::io::Result<()> {
    sockopt::set_socket_linger(socket, Some(Duration::ZERO))
}

/// From now on a close says nothing more, and what was sent still arrives; unless the service has sent what nobody has read:
/// the kernel resets then, whoever closes so. Right for all sockets, and nothing to those that
/// aren't TCP's.
pub fn end_when_closed(socket: impl AsFd) {
    // It can't fail for a socket that took the contrary.
    let _ = sockopt::set_socket_linger(socket, None);
}
