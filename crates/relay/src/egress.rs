//! The host's side: what the kernel gives to our sockets goes to a peer.

mod carried;
pub(crate) mod tcp;
pub(crate) mod udp;

use std::{net::SocketAddr, sync::Arc};

use tokio::sync::watch;

use self::carried::Carried;
use crate::{
    config::{Egress, Limits, Origin, Protocol, Sender},
    connection::Books,
    metrics::Metrics,
    report::Report,
    senders::{Quota, Senders},
    transport::peer::Link,
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
    pub(crate) connections: Arc<Quota>,
    pub(crate) flows: Arc<Quota>,
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
        Self {
            senders: Senders::new(&egress),
            carried: Carried::default(),
            connections: Quota::new(limits.connections_per_sender),
            flows: Quota::new(limits.flows_per_sender),
            egress: watch::Sender::new(egress.into()),
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
        self.senders.change(&egress);
        self.egress.send_replace(egress.clone());
        self.carried.judge_anew(&egress).await;
    }

    fn books(&self) -> Books<'_> {
        Books {
            limits: &self.limits,
            metrics: &self.metrics,
            report: &self.report,
        }
    }
}

impl Egress {
    /// The peer for what a source sends there, if it is redirected at all. Where it came to the place of a cgroup, the
    /// source doesn't matter.
    fn via(
        &self,
        place: u16,
        protocol: Protocol,
        source: SocketAddr,
        destination: SocketAddr,
    ) -> Option<usize> {
        let ip = source.ip().to_canonical();
        let redirect = self.redirects.iter().find(|redirect| {
            let mut origins = redirect
                .senders
                .iter()
                .map(|sender| &self.senders[*sender].origin);
            let is_its = match place {
                0 => {
                    redirect.from.iter().any(|prefix| prefix.contains(&ip))
                        || origins.any(|origin| origin.has(ip))
                }
                place => origins.any(|origin| origin.is_at(place)),
            };
            is_its && redirect.covers(protocol, destination)
        });
        redirect.map(|redirect| redirect.via)
    }

    /// The sender whose cgroup has that place.
    fn sender_at(&self, place: u16) -> Option<&Sender> {
        self.senders
            .iter()
            .find(|sender| sender.origin.is_at(place))
    }
}

impl Origin {
    fn is_at(&self, wanted: u16) -> bool {
        matches!(self, Self::Cgroup { place, .. } if *place == wanted)
    }
}
