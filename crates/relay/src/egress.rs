//! The host's side: what the kernel gives to our sockets goes to a peer.

mod answers;
mod carried;
pub(crate) mod tcp;
pub(crate) mod udp;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use tokio::sync::watch;

use self::carried::Carried;
use crate::{
    config::{Egress, Limits, Origin, Protocol},
    connection::Books,
    fair::{Bounds, Fair},
    metrics::Metrics,
    report::Report,
    room::Rooms,
    senders::Senders,
    transport::peer::Link,
    unread::{self, Unread},
};

/// What both protocols need.
pub(crate) struct Host {
    /// What is redirected now.
    egress: watch::Sender<Arc<Egress>>,
    pub(crate) limits: Limits,
    pub(crate) senders: Senders,
    carried: Carried,
    /// In the order of the configuration's peers, which stays.
    pub(crate) links: Vec<Arc<Link>>,
    pub(crate) connections: Rooms,
    pub(crate) flows: Arc<Fair<udp::Pair>>,
    /// TCP connections of addresses of nobody that is known, until the daemon has been asked.
    pub(crate) unknown: Rooms,
    /// Connections whose sender doesn't read.
    unread: Rooms,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) report: Report,
}

impl Host {
    pub(crate) fn new(
        egress: Egress,
        links: Vec<Arc<Link>>,
        limits: Limits,
        metrics: Arc<Metrics>,
        report: Report,
    ) -> Self {
        let egress = Arc::new(egress);
        Self {
            senders: Senders::new(egress.clone()),
            carried: Carried::default(),
            connections: Fair::new(of_senders(
                limits.connections_per_sender,
                limits.connections,
            )),
            flows: Fair::new(of_senders(limits.flows_per_sender, limits.flows)),
            unknown: Fair::new(of_senders(usize::MAX, limits.openings)),
            unread: Fair::new(unread::bounds(&limits, usize::MAX)),
            egress: watch::Sender::new(egress),
            limits,
            links,
            metrics,
            report,
        }
    }

    /// What is redirected now.
    pub(crate) fn now(&self) -> Arc<Egress> {
        self.egress.borrow().clone()
    }

    /// The same, and what takes its place.
    pub(crate) fn changes(&self) -> watch::Receiver<Arc<Egress>> {
        self.egress.subscribe()
    }

    /// Goes by another configuration from now on, with the same peers. When this is done, connections that it doesn't
    /// redirect, or to another peer, are reset.
    pub(crate) async fn change(&self, egress: Arc<Egress>) {
        self.senders.change(egress.clone());
        self.egress.send_replace(egress.clone());
        self.carried.judge_anew(&egress).await;
    }

    fn books(&self) -> Books<'_> {
        Books {
            limits: &self.limits,
            metrics: &self.metrics,
            report: &self.report,
            unread: Unread {
                of: &self.unread,
                metrics: &self.metrics,
                is_wide: None,
            },
        }
    }
}

/// Descriptors that the host's side takes if there is of everything what there may be: three for a connection in TLS.
pub(crate) fn descriptors(limits: &Limits) -> usize {
    3 * limits.connections + limits.openings + limits.answer_sockets
}

/// What this host's senders may have. There is no other host here.
fn of_senders(per_sender: usize, all: usize) -> Bounds {
    Bounds {
        per_sender,
        per_host: all,
        all,
    }
}

impl Egress {
    /// The peer for what a source sends there, if it is redirected at all. Where it came to the place of a cgroup, the
    /// source doesn't matter. An identity's address is the host's own, and `from` is about what comes in by an interface.
    fn via(
        &self,
        place: u16,
        protocol: Protocol,
        source: SocketAddr,
        destination: SocketAddr,
    ) -> Option<usize> {
        let ip = source.ip().to_canonical();
        let is_identity = place == 0 && self.is_identity(ip);
        if is_identity && destination.ip().to_canonical() == ip {
            // What it sends itself stays here, as rules have it with all that is for this host.
            return None;
        }
        let redirect = self.redirects.iter().find(|redirect| {
            let mut origins = redirect
                .senders
                .iter()
                .map(|sender| &self.senders[*sender].origin);
            let is_its = match place {
                0 if is_identity => origins.any(|origin| origin.is_identity_with(ip)),
                0 => {
                    redirect.from.iter().any(|prefix| prefix.contains(&ip))
                        || origins.any(|origin| origin.forwards(ip))
                }
                place => origins.any(|origin| origin.is_at(place)),
            };
            is_its && redirect.covers(protocol, destination)
        });
        redirect.map(|redirect| redirect.via)
    }

    fn is_identity(&self, ip: IpAddr) -> bool {
        let found = self.sender_of(ip);
        found.is_some_and(|sender| matches!(sender.origin, Origin::Identity(_)))
    }
}

impl Origin {
    fn is_at(&self, wanted: u16) -> bool {
        matches!(self, Self::Cgroup { place, .. } if *place == wanted)
    }

    /// Whether what comes in from that address is this sender's.
    fn forwards(&self, address: IpAddr) -> bool {
        matches!(self, Self::Forwarded(_)) && self.has(address)
    }

    fn is_identity_with(&self, address: IpAddr) -> bool {
        matches!(self, Self::Identity(_)) && self.has(address)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;

    const TEXT: &str = r#"
        [tls]
        certificate = "a"
        key = "b"
        authorities = "c"
        [egress]
        [[peer]]
        name = "one"
        address = "192.0.2.1:1"
        server_name = "one.example"
        [[peer]]
        name = "two"
        address = "192.0.2.2:1"
        server_name = "two.example"
        [[sender]]
        name = "web"
        identity = ["10.64.0.5", "10.65.0.0/24"]
        [[sender]]
        name = "vm"
        addresses = ["10.65.0.7", "10.64.0.0/24"]
        [[redirect]]
        from = ["10.64.0.0/10"]
        senders = ["vm"]
        to = ["198.51.100.0/24"]
        via = "one"
        [[redirect]]
        senders = ["web"]
        to = ["198.51.100.7"]
        via = "two"
    "#;

    fn peer(source: &str, destination: &str) -> Option<usize> {
        peer_by(TEXT, source, destination)
    }

    fn peer_by(text: &str, source: &str, destination: &str) -> Option<usize> {
        let egress = Config::parse(Path::new("relay.toml"), text).unwrap().egress;
        let [source, destination] =
            [source, destination].map(|ip| SocketAddr::new(ip.parse().unwrap(), 80));
        egress.unwrap().via(0, Protocol::Tcp, source, destination)
    }

    #[test]
    fn what_an_identity_sends_itself_is_nobodys() {
        let text = TEXT.replace("198.51.100.7", "0.0.0.0/0");
        let egress = Config::parse(Path::new("relay.toml"), &text)
            .unwrap()
            .egress;
        let via = |destination: &str| {
            let [source, destination] =
                ["10.64.0.5", destination].map(|ip| SocketAddr::new(ip.parse().unwrap(), 80));
            egress
                .as_ref()
                .unwrap()
                .via(0, Protocol::Udp, source, destination)
        };
        assert_eq!(via("10.64.0.5"), None);
        assert_eq!(via("127.0.0.1"), None);
        assert_eq!(via("198.51.100.7"), Some(1));
    }

    #[test]
    fn an_identity_goes_by_the_redirects_that_name_it() {
        let (one, two) = (Some(0), Some(1));
        for identity in ["10.64.0.5", "10.65.0.1"] {
            assert_eq!(peer(identity, "198.51.100.7"), two, "{identity}");
            assert_eq!(peer(identity, "198.51.100.8"), None, "{identity}");
        }
        // One has another address of the same prefix, and one an address that is its own in the identity's.
        for sandbox in ["10.64.0.6", "10.65.0.7", "10.66.0.1"] {
            assert_eq!(peer(sandbox, "198.51.100.7"), one, "{sandbox}");
        }
    }

    #[test]
    fn what_comes_in_is_no_identity_s() {
        let [start, first, second] = TEXT.split("[[redirect]]").collect::<Vec<_>>()[..] else {
            unreachable!("it has two");
        };
        let turned = [start, second, first].join("[[redirect]]");
        let sandbox = peer_by(&turned, "10.65.0.7", "198.51.100.7");
        assert_eq!(sandbox, Some(0), "its address is in the identity's prefix");
        assert_eq!(peer_by(&turned, "10.65.0.1", "198.51.100.7"), Some(1));
    }
}
