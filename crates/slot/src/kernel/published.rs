//! Sandboxes of the eBPF data paths that have published ports.
//!
//! The host's table translates a call of such a port, and its connection tracking alone can translate
//! the answer back. Where the sandbox's packets leave by an uplink past the stack, its answers must not:
//! its entries bear a flag for that, as long as a published port leads to one of their addresses.

use std::{collections::HashSet, fs, net::IpAddr};

use sandwire_api::published_port::{Protocol, PublishPort};
use sandwire_datapath::{
    NicIndex,
    abi::{self, NicFlag},
};

use sandwire_kernel_net::{
    listener::{self, Listener, Transport},
    netlink::Socket,
};

use super::{HostState, KernelNetwork, ebpf::Ebpf, hosted::Hosted, lock};
use crate::error::NetworkError;

impl KernelNetwork {
    /// Opens the eBPF data path for a pool that needs it, and tells it of ports that were published before
    /// that. Until somebody has named any, what an earlier daemon has entered stays, also with other maps.
    pub(super) fn open_ebpf_for(
        &self,
        pool: &Hosted,
        state: &HostState,
    ) -> Result<(), NetworkError> {
        if pool.serves_ebpf() {
            self.open_ebpf()?;
            if !state.published.is_empty() {
                self.tell_published(&state.published);
            }
        }
        Ok(())
    }

    /// Tells the eBPF data path, if it is open, which sandboxes have published ports.
    pub(super) fn tell_published(&self, ports: &[(PublishPort, Vec<IpAddr>)]) {
        if let Some(ebpf) = self.ebpf.get() {
            ebpf.set_published(ports);
        }
    }
}

impl Ebpf {
    /// Says to which clone addresses published ports lead: exactly these.
    pub(super) fn set_published(&self, ports: &[(PublishPort, Vec<IpAddr>)]) {
        // Locked until the last entry is told: nobody enters what was true before.
        let mut published = lock(&self.published);
        let addresses = ports.iter().flat_map(|(_, addresses)| addresses);
        *published = addresses.copied().collect();
        for (index, nic) in self.datapath.used() {
            let is_published = clone_addresses(&nic).any(|address| published.contains(&address));
            self.datapath
                .set_flag(index, NicFlag::Published, is_published);
        }
    }

    /// Has an entry that is to become active know whether ports lead to it: it is another one than when
    /// they were published, after a repair or a move from nft.
    pub(super) fn mark_published(&self, index: NicIndex) {
        let published = lock(&self.published);
        let nic = self.datapath.nic(index);
        if clone_addresses(&nic).any(|address| published.contains(&address)) {
            self.datapath.set_flag(index, NicFlag::Published, true);
        }
    }
}

/// Clone addresses that published ports lead to, as far as entries say so.
pub(super) fn of_before(nics: &[abi::Nic]) -> HashSet<IpAddr> {
    let is_published = |nic: &&abi::Nic| nic.flags & NicFlag::Published.number() != 0;
    let published = nics.iter().filter(is_published);
    published.flat_map(clone_addresses).collect()
}

/// The first port that a user who isn't root may listen at, in the namespace of the calling thread.
pub(super) fn unprivileged_port_start() -> u16 {
    let told = fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start").ok();
    // What the kernel begins with.
    told.and_then(|text| text.trim().parse().ok())
        .unwrap_or(1024)
}

/// Who takes what comes to a port, in the namespace of the calling thread.
pub(super) fn listeners(port: &PublishPort) -> Vec<Listener> {
    let transport = match port.protocol {
        Protocol::Tcp => Transport::Tcp,
        Protocol::Udp => Transport::Udp,
    };
    let found = Socket::diagnosis()
        .and_then(|mut socket| listener::at_port(&mut socket, transport, port.host_port));
    found.unwrap_or_else(|error| {
        // A kernel without `inet_diag` is no reason to publish nothing.
        tracing::warn!(%error, "can't tell whether the host itself listens at a port that is to be published");
        Vec::new()
    })
}

fn clone_addresses(nic: &abi::Nic) -> impl Iterator<Item = IpAddr> + use<> {
    let ipv4 = abi::ipv4_of(nic.clone4).map(IpAddr::from);
    let ipv6 = (nic.has_ipv6 != 0).then(|| IpAddr::from(nic.clone6));
    ipv4.into_iter().chain(ipv6)
}
