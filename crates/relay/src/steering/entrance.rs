//! Where packets are given to us: a port of the loopback for all senders with addresses, and one for each cgroup.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use sandwire_kernel_net::nft;

use super::{MARK_PASS, MARK_STEP};
use crate::config::Egress;

/// A pair of sockets, TCP and UDP of both versions, to which packets are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entrance {
    /// Zero where senders are known by address; else the place of the cgroup whose alone it is.
    pub(crate) place: u16,
    /// Port on the loopback.
    pub(super) port: u16,
    /// Mark of its packets.
    pub(super) mark: u32,
}

impl Entrance {
    /// Mark of what its TCP sockets send to processes of this host, by which that is told from other packets on the
    /// loopback.
    pub(crate) fn answers_mark(self) -> u32 {
        if self.place == 0 { 0 } else { MARK_PASS }
    }

    /// Where its sockets listen.
    pub(crate) fn addresses(self) -> [SocketAddr; 2] {
        [
            IpAddr::from(Ipv4Addr::LOCALHOST),
            Ipv6Addr::LOCALHOST.into(),
        ]
        .map(|ip| SocketAddr::new(ip, self.port))
    }
}

/// The entrances of a configuration: one for all senders with addresses, and one for each cgroup in the file's order.
pub(crate) fn entrances(egress: &Egress) -> Vec<Entrance> {
    let cgroups = egress.cgroups().map(|(_, place)| place);
    std::iter::once(0)
        .chain(cgroups)
        .map(|place| Entrance {
            place,
            port: egress.listen_port + place,
            mark: nft::RELAY_MARK_FIRST + u32::from(place) * MARK_STEP,
        })
        .collect()
}
