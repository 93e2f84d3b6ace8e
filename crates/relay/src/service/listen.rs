//! Sockets at which the peer's side listens.

use std::{
    io,
    net::{SocketAddr, TcpListener, UdpSocket},
    os::fd::OwnedFd,
};

use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, listen, socket_with,
    sockopt::{set_ipv6_v6only, set_socket_reuseaddr},
};

use super::{ServiceError, failed};
use crate::transport::with_room;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// Listens at all addresses of `listen`, by TCP and by UDP.
pub(super) fn open_all(
    addresses: &[SocketAddr],
) -> Result<Vec<(TcpListener, UdpSocket)>, ServiceError> {
    let open = |address: &SocketAddr| {
        let is_only_ipv6 = is_only_ipv6(*address, addresses);
        let tcp =
            tcp(*address, is_only_ipv6).map_err(failed(format!("listen at {address} by TCP")))?;
        let udp =
            udp(*address, is_only_ipv6).map_err(failed(format!("listen at {address} by UDP")))?;
        Ok((tcp, udp))
    };
    addresses.iter().map(open).collect()
}

/// Whether a socket with an address takes nothing of IPv4: `[::]` does where that is left to the kernel, and then no other
/// one can have the port for IPv4.
fn is_only_ipv6(address: SocketAddr, all: &[SocketAddr]) -> bool {
    let is_beside = |other: &SocketAddr| other.is_ipv4() && other.port() == address.port();
    address.is_ipv6() && all.iter().any(is_beside)
}

fn tcp(address: SocketAddr, is_only_ipv6: bool) -> io::Result<TcpListener> {
    let socket = socket(address, SocketType::STREAM, is_only_ipv6)?;
    // A restart finds connections of the one before.
    set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn udp(address: SocketAddr, is_only_ipv6: bool) -> io::Result<UdpSocket> {
    let socket = socket(address, SocketType::DGRAM, is_only_ipv6)?;
    bind(&socket, &address)?;
    Ok(with_room(socket.into()))
}

fn socket(address: SocketAddr, kind: SocketType, is_only_ipv6: bool) -> io::Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, kind, flags, None)?;
    if is_only_ipv6 {
        set_ipv6_v6only(&socket, true)?;
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        net::{Ipv4Addr, Ipv6Addr, TcpStream},
    };

    use super::*;

    #[test]
    fn a_socket_is_for_ipv6_alone_where_another_one_has_its_port_for_ipv4() {
        let address = |text: &str| -> SocketAddr { text.parse().unwrap() };
        let all = ["0.0.0.0:4433", "[::]:4433", "[::]:4434"].map(address);
        let only = all.map(|one| is_only_ipv6(one, &all));
        assert_eq!(only, [false, true, false]);
    }

    #[test]
    fn both_versions_are_listened_at_with_one_port() {
        // Of UDP somebody may have just that port.
        let mut attempts = (0..20).map(|_| {
            let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
            let port = tcp(any, false).unwrap().local_addr().unwrap().port();
            let all = [
                SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)),
                SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)),
            ];
            Some((port, all, open_all(&all).ok()?))
        });
        let (port, all, sockets) = attempts.find_map(|attempt| attempt).unwrap();
        assert_eq!(sockets.len(), 2);
        for (tcp, to) in sockets.iter().map(|(tcp, _)| tcp).zip([
            (Ipv4Addr::LOCALHOST, port).into(),
            SocketAddr::from((Ipv6Addr::LOCALHOST, port)),
        ]) {
            let mut caller = TcpStream::connect(to).unwrap();
            tcp.set_nonblocking(false).unwrap();
            drop(tcp.accept().unwrap());
            assert_eq!(caller.read(&mut [0]).unwrap(), 0);
        }
        // Alone it is for both.
        drop(sockets);
        let alone = open_all(&all[1..]).unwrap();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        drop(alone);
    }
}
