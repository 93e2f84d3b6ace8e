//! What published ports need beside the host's table, which translates the calls.
//!
//! Its connection tracking alone can translate the answers back. Where the packets of a sandbox of the eBPF data paths
//! leave by an uplink past the stack, its answers must not: its entries bear a flag for that, as long as a published port
//! leads to one of their addresses.
//!
//! The kernel asks the table for the first packet of a connection alone. By UDP one lasts for as long as its caller goes on,
//! so those who have called a port already are forgotten when it is published.

use std::{
    collections::{HashMap, HashSet},
    fs,
    net::{IpAddr, SocketAddr},
};

use sandwire_api::published_port::{Protocol, PublishPort};
use sandwire_datapath::{
    NicIndex,
    abi::{self, NicFlag},
};

use sandwire_kernel_net::{
    address,
    conntrack::{self, Datagrams},
    listener::{self, Listener, Transport},
    netlink::Socket,
};

use super::{HostState, KernelNetwork, ebpf::Ebpf, hosted::Hosted, lock};
use crate::error::NetworkError;

/// What was asked for, and the clone addresses that it leads to.
type Published = (PublishPort, Vec<IpAddr>);

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
    pub(super) fn tell_published(&self, ports: &[Published]) {
        if let Some(ebpf) = self.ebpf.get() {
            ebpf.set_published(ports);
        }
    }

    /// Has who goes on calling UDP ports that were not published before be led there, too.
    pub(super) fn redirect_datagrams(&self, before: &[Published], ports: &[Published]) {
        let new = new_datagram_ports(before, ports);
        if new.is_empty() {
            return;
        }
        let host_ports = new.keys().copied().collect();
        let forgotten = self.with_worker(|worker| {
            let listed = address::list(&mut worker.route)?.into_iter();
            let own: HashSet<IpAddr> = listed.map(|listed| listed.address.addr()).collect();
            let is_stale = |flow: &Datagrams| {
                let called = flow.called.ip();
                own.contains(&called)
                    && !called.is_loopback()
                    && new
                        .get(&flow.called.port())
                        .is_some_and(|of| of.iter().any(|port| is_led_elsewhere(flow, port)))
            };
            Ok(conntrack::forget_datagrams(
                &mut worker.netfilter,
                &host_ports,
                is_stale,
            )?)
        });
        if let Err(error) = forgotten {
            tracing::warn!(%error, "who goes on calling a UDP port from before it was published may not reach it");
        }
    }
}

/// UDP ports that were not published before in the same way, by their number on the host. There may be thousands, and
/// as many flows that each is looked up for.
fn new_datagram_ports<'ports>(
    before: &[Published],
    ports: &'ports [Published],
) -> HashMap<u16, Vec<&'ports Published>> {
    let takes_datagrams = |port: &&Published| port.0.protocol == Protocol::Udp;
    let before: HashSet<&Published> = before.iter().filter(takes_datagrams).collect();
    let mut new: HashMap<u16, Vec<&Published>> = HashMap::new();
    for port in ports.iter().filter(takes_datagrams) {
        if !before.contains(port) {
            new.entry(port.0.host_port).or_default().push(port);
        }
    }
    new
}

/// Whether a flow calls this published port and doesn't come where that leads.
fn is_led_elsewhere(flow: &Datagrams, (port, clones): &Published) -> bool {
    let called = flow.called.ip();
    let is_called = flow.called.port() == port.host_port
        && port.host_address.is_none_or(|address| address == called);
    let leads_elsewhere = |clone: &IpAddr| {
        clone.is_ipv4() == called.is_ipv4()
            && SocketAddr::new(*clone, port.clone_port) != flow.answering
    };
    is_called && clones.iter().any(leads_elsewhere)
}

impl Ebpf {
    /// Says to which clone addresses published ports lead: exactly these.
    pub(super) fn set_published(&self, ports: &[Published]) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_udp_ports_that_were_not_published_in_the_same_way_are_new() {
        let port = |protocol: &str, host_port: u16| -> PublishPort {
            let spec =
                format!(r#"{{"protocol":"{protocol}","host_port":{host_port},"clone_port":514}}"#);
            serde_json::from_str(&spec).unwrap()
        };
        let [first, second]: [Vec<IpAddr>; 2] =
            ["10.64.0.8", "10.64.0.9"].map(|clone| vec![clone.parse().unwrap()]);
        let before = [
            (port("udp", 5140), first.clone()),
            (port("udp", 5141), first.clone()),
            (port("tcp", 5142), first.clone()),
        ];
        let ports = [
            (port("udp", 5140), first.clone()),
            // Led elsewhere than before.
            (port("udp", 5141), second.clone()),
            (port("tcp", 5143), second.clone()),
            (port("udp", 5144), second),
        ];
        let new = new_datagram_ports(&before, &ports);
        assert_eq!(
            new,
            HashMap::from([(5141, vec![&ports[1]]), (5144, vec![&ports[3]])])
        );
        assert!(new_datagram_ports(&ports, &ports).is_empty());
    }

    #[test]
    fn only_who_calls_the_port_and_is_not_led_there_is_led_elsewhere() {
        let port: PublishPort =
            serde_json::from_str(r#"{"protocol":"udp","host_port":5140,"clone_port":514}"#)
                .unwrap();
        let of_address = PublishPort {
            host_address: Some([192, 0, 2, 1].into()),
            ..port.clone()
        };
        let clones = ["10.64.0.9", "fd00:c10e::9"].map(|clone| clone.parse().unwrap());
        for (called, answering, expected) in [
            ("192.0.2.1:5140", "192.0.2.1:5140", [true, true]),
            ("192.0.2.1:5140", "10.64.0.8:514", [true, true]),
            ("192.0.2.1:5140", "10.64.0.9:515", [true, true]),
            ("192.0.2.1:5140", "10.64.0.9:514", [false, false]),
            ("192.0.2.1:514", "192.0.2.1:514", [false, false]),
            ("192.0.2.2:5140", "192.0.2.2:5140", [true, false]),
            ("[2001:db8::1]:5140", "[2001:db8::1]:5140", [true, false]),
            ("[2001:db8::1]:5140", "[fd00:c10e::9]:514", [false, false]),
        ] {
            let flow = Datagrams {
                called: called.parse().unwrap(),
                answering: answering.parse().unwrap(),
            };
            let found = [&port, &of_address]
                .map(|port| is_led_elsewhere(&flow, &(port.clone(), clones.to_vec())));
            assert_eq!(found, expected, "{flow:?}");
        }
    }
}
