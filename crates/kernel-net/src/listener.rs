//! Who takes what comes to a port: TCP sockets that listen, and UDP sockets, be they connected to somebody.
//!
//! The kernel is asked by `sock_diag`, which binds nothing: a trial would be in the way of a service that just starts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{
    Error,
    netlink::{Reply, Socket},
    number::octet,
};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const TCP_ESTABLISHED: u32 = 1;
const TCP_CLOSE: u32 = 7;
const TCP_LISTEN: u32 = 10;
const INET_DIAG_SKV6ONLY: u16 = 11;
/// `struct inet_diag_msg`.
const ANSWER: usize = 72;

/// Which sockets are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP sockets that listen.
    Tcp,
    /// UDP sockets. Of one that is connected only its peer's datagrams are, but nothing says that these are answers: after
    /// some silence the kernel's connection tracking takes the next for a call.
    Udp,
}

/// A socket that takes what comes from elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// What it is bound to; IPv4 that was written as IPv6 is IPv4.
    pub address: IpAddr,
    /// Whether it takes IPv4, too: it may although it is bound to `::`.
    pub takes_ipv4: bool,
}

/// All sockets at a port, in the namespace of the [`Socket::diagnosis`].
///
/// # Errors
/// The kernel refuses, or has no `inet_diag`.
pub fn at_port(
    socket: &mut Socket,
    transport: Transport,
    port: u16,
) -> Result<Vec<Listener>, Error> {
    let mut found = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let label = ("list", "listening sockets");
        let request = request(octet(family), transport, port);
        found.extend(socket.query(
            SOCK_DIAG_BY_FAMILY,
            true,
            label,
            |message| message.raw(&request),
            |reply| read(&reply, port),
        )?);
    }
    Ok(found)
}

/// `struct inet_diag_req_v2`.
fn request(family: u8, transport: Transport, port: u16) -> [u8; 56] {
    let (protocol, states) = match transport {
        Transport::Tcp => (libc::IPPROTO_TCP, 1 << TCP_LISTEN),
        Transport::Udp => (libc::IPPROTO_UDP, 1 << TCP_CLOSE | 1 << TCP_ESTABLISHED),
    };
    let mut request = [0; 56];
    (request[0], request[1]) = (family, octet(protocol));
    request[4..8].copy_from_slice(&u32::to_ne_bytes(states));
    request[8..10].copy_from_slice(&port.to_be_bytes());
    request
}

fn read(reply: &Reply<'_>, port: u16) -> Option<Listener> {
    let family = *reply.payload.first()?;
    let found = u16::from_be_bytes(*reply.payload.get(4..)?.first_chunk()?);
    let source = reply.payload.get(8..24)?;
    if found != port {
        return None;
    }
    if family == octet(libc::AF_INET) {
        let address = Ipv4Addr::from(*source.first_chunk::<4>()?);
        return Some(Listener {
            address: address.into(),
            takes_ipv4: true,
        });
    }
    let bound = Ipv6Addr::from(*source.first_chunk::<16>()?);
    let only_ipv6 = reply.attributes(ANSWER).find(INET_DIAG_SKV6ONLY);
    let address = bound.to_canonical();
    let may_take = bound.is_unspecified() && only_ipv6.is_none_or(|only| only.first() == Some(&0));
    Some(Listener {
        address,
        takes_ipv4: address.is_ipv4() || may_take,
    })
}
