//! What TCP services are told otherwise than others: that a connection was broken off.
//!
//! A socket that is closed says "end" to its other side, whatever the reason: a service that reads to the end would take
//! half an upload for all of it. TCP alone has another word, a reset, and what hasn't arrived by then is forgotten. So each of
//! our sockets to TCP services says that when it is closed, from its beginning on, so that the end of this process says it
//! too; until a proper end has been passed on. Unix sockets and AF_VSOCK can't say it.

use std::{os::fd::AsFd, time::Duration};

use rustix::net::{AddressFamily, sockopt};

/// Has a close say that the connection was broken off.
///
/// # Errors
/// Of `setsockopt`.
pub fn reset_when_closed(socket: impl AsFd) -> rustix::io::Result<()> {
    sockopt::set_socket_linger(socket, Some(Duration::ZERO))
}

/// From now on a close says nothing more, and what was sent still arrives. Right for all sockets, and nothing to those that
/// aren't TCP's.
pub fn end_when_closed(socket: impl AsFd) {
    // It can't fail for a socket that took the contrary.
    let _ = sockopt::set_socket_linger(socket, None);
}

/// Whether the other side can be told of a reset.
#[must_use]
pub fn is_tcp(socket: impl AsFd) -> bool {
    let family = sockopt::socket_domain(socket);
    matches!(family, Ok(AddressFamily::INET | AddressFamily::INET6))
}
