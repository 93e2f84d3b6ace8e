//! A server for datagrams that answers from the address that was called, as whoever called expects it.
//!
//! A socket on the wildcard address left to itself answers from whatever address the kernel's route back prefers,
//! which on a host with several isn't the one that was called. Here the kernel tells with each datagram which
//! that was (`IP_PKTINFO`, `IPV6_RECVPKTINFO`), and is told it again with the answer.

use std::{
    io::{IoSlice, IoSliceMut},
    net::{SocketAddr, SocketAddrV6, UdpSocket},
    os::fd::AsRawFd,
    thread,
};

use anyhow::{Context, Result};
use nix::{
    cmsg_space, libc,
    sys::socket::{
        ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg,
        setsockopt, sockopt,
    },
};

/// Receives on a UDP port of all addresses of the calling thread's namespace, IPv4 and IPv6, and
/// answers each packet from the address and port that it came to, until the process ends.
///
/// # Errors
/// If the port can't be had.
pub fn serve_udp(port: u16, answer: fn(&[u8], SocketAddr) -> Vec<u8>) -> Result<()> {
    let wildcard = super::wildcard();
    let socket = UdpSocket::bind((wildcard, port)).with_context(|| format!("receive on {port}"))?;
    let told = if wildcard.is_ipv6() {
        setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)
    } else {
        setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)
    };
    told.with_context(|| format!("have the called addresses told on {port}"))?;
    thread::spawn(move || {
        let mut packet = vec![0; 64 * 1024];
        // ICMP errors for earlier answers come back as errors here; they end nothing.
        loop {
            if let Some((length, caller, called)) = receive(&socket, &mut packet) {
                called.send(&socket, &answer(&packet[..length], caller), caller);
            }
        }
    });
    Ok(())
}

/// The address that a datagram came to. IPv4's are mapped ones on a socket of IPv6.
enum Called {
    Ipv4(libc::in_pktinfo),
    Ipv6(libc::in6_pktinfo),
}

impl Called {
    /// Sends an answer from it, by whatever way the routes say. One that can't be sent is lost, as by a network.
    fn send(&self, socket: &UdpSocket, bytes: &[u8], caller: SocketAddr) {
        let from = match self {
            Self::Ipv4(called) => ControlMessage::Ipv4PacketInfo(called),
            Self::Ipv6(called) => ControlMessage::Ipv6PacketInfo(called),
        };
        let _ = sendmsg(
            socket.as_raw_fd(),
            &[IoSlice::new(bytes)],
            &[from],
            MsgFlags::empty(),
            Some(&SockaddrStorage::from(caller)),
        );
    }
}

/// Length, who called and what was called of the next datagram; nothing if the call ended with an error.
fn receive(socket: &UdpSocket, packet: &mut [u8]) -> Option<(usize, SocketAddr, Called)> {
    let mut control = cmsg_space!(libc::in6_pktinfo);
    let mut parts = [IoSliceMut::new(packet)];
    let message = recvmsg::<SockaddrStorage>(
        socket.as_raw_fd(),
        &mut parts,
        Some(&mut control),
        MsgFlags::empty(),
    )
    .ok()?;
    let called = message.cmsgs().ok()?.find_map(|told| match told {
        ControlMessageOwned::Ipv4PacketInfo(told) => Some(Called::Ipv4(libc::in_pktinfo {
            ipi_ifindex: 0,
            ipi_spec_dst: told.ipi_addr,
            ipi_addr: told.ipi_addr,
        })),
        ControlMessageOwned::Ipv6PacketInfo(told) => Some(Called::Ipv6(libc::in6_pktinfo {
            ipi6_ifindex: 0,
            ipi6_addr: told.ipi6_addr,
        })),
        _ => None,
    })?;
    Some((message.bytes, caller(message.address?)?, called))
}

fn caller(address: SockaddrStorage) -> Option<SocketAddr> {
    if let Some(address) = address.as_sockaddr_in() {
        return Some(SocketAddr::new(address.ip().into(), address.port()));
    }
    let address = address.as_sockaddr_in6()?;
    Some(SocketAddr::V6(SocketAddrV6::new(
        address.ip(),
        address.port(),
        address.flowinfo(),
        address.scope_id(),
    )))
}

#[cfg(test)]
mod tests {
    use std::{net::IpAddr, time::Duration};

    use super::*;
    use crate::{
        host::{serve_tcp, wait_for_server},
        lab,
    };

    const PATIENCE: Duration = Duration::from_secs(30);

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn the_called_address_answers_and_not_the_one_that_routes_prefer() {
        lab::run(|lab| {
            lab.run("ip address add 198.51.100.1/32 dev lo");
            lab.run("ip address add 2001:db8:2::1/128 dev lo nodad");
            serve_tcp(7, |_| Ok(())).unwrap();
            serve_udp(7, |packet, _| packet.to_vec()).unwrap();
            for (caller, called) in [
                ("127.0.0.1", "127.0.0.1"),
                ("127.0.0.1", "198.51.100.1"),
                ("::1", "::1"),
                ("::1", "2001:db8:2::1"),
            ] {
                let [caller, called]: [IpAddr; 2] = [caller, called].map(|ip| ip.parse().unwrap());
                // The kernel adds an address's own route of IPv6 a moment later.
                wait_for_server(SocketAddr::new(called, 7), PATIENCE).unwrap();
                let socket = UdpSocket::bind((caller, 0)).unwrap();
                socket.set_read_timeout(Some(PATIENCE)).unwrap();
                socket.send_to(b"abc", (called, 7)).unwrap();
                let mut answer = [0; 16];
                let (length, from) = socket.recv_from(&mut answer).unwrap();
                assert_eq!(
                    (&answer[..length], from),
                    (&b"abc"[..], SocketAddr::new(called, 7))
                );
            }
        });
    }
}
