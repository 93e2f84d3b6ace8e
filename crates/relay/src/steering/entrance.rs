//! Where packets are given to us: a port of the loopback for all senders with addresses, and one for each cgroup.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use sandwire_kernel_net::nft;

use super::MARK_STEP;
use crate::config::{Egress, Origin};

/// A pair of sockets, TCP and UDP of both versions, to which packets are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entrance {
    /// Port on the loopback.
    pub(crate) port: u16,
    /// Mark of its packets.
    pub(super) mark: u32,
    /// The sender whose alone it is, by its place; without one, senders are known by address.
    pub(crate) sender: Option<usize>,
}

impl Entrance {
    /// Where its sockets listen.
    pub(crate) fn addresses(self) -> [SocketAddr; 2] {
        [
            IpAddr::from(Ipv4Addr::LOCALHOST),
            Ipv6Addr::LOCALHOST.into(),
        ]
        .map(|ip| SocketAddr::new(ip, self.port))
    }
}

/// The entrances of a configuration: one for all senders with addresses, and one for each cgroup.
pub(crate) fn entrances(egress: &Egress) -> Vec<Entrance> {
    let cgroups = egress.senders.iter().enumerate();
    let cgroups = cgroups.filter(|(_, sender)| matches!(sender.origin, Origin::Cgroup(_)));
    std::iter::once(None)
        .chain(cgroups.map(|(index, _)| Some(index)))
        .zip(0_u16..)
        .map(|(sender, number)| Entrance {
            port: egress.listen_port + number,
            mark: nft::RELAY_MARK_FIRST + u32::from(number) * MARK_STEP,
            sender,
        })
        .collect()
}
