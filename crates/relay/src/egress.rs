//! The host's side: what the kernel gives to our sockets goes to a peer.

pub(crate) mod tcp;
pub(crate) mod udp;

use std::{net::SocketAddr, sync::Arc};

use crate::{
    config::{Egress, Limits, Protocol},
    connection::Books,
    metrics::Metrics,
    report::Report,
    senders::{Quota, Senders},
    steering::Entrance,
    transport::peer::Link,
};

/// What both protocols need.
pub(crate) struct Host {
    pub(crate) egress: Egress,
    pub(crate) limits: Limits,
    pub(crate) senders: Senders,
    pub(crate) links: Vec<Arc<Link>>,
    pub(crate) connections: Arc<Quota>,
    pub(crate) flows: Arc<Quota>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) report: Report,
}

impl Host {
    fn books(&self) -> Books<'_> {
        Books {
            limits: &self.limits,
            metrics: &self.metrics,
            report: &self.report,
        }
    }

    /// The peer for what a source sends there, if it is redirected at all.
    fn via(
        &self,
        entrance: Entrance,
        protocol: Protocol,
        source: SocketAddr,
        destination: SocketAddr,
    ) -> Option<usize> {
        let ip = source.ip().to_canonical();
        let redirect = self.egress.redirects.iter().find(|redirect| {
            let is_its = match entrance.sender {
                Some(sender) => redirect.senders.contains(&sender),
                None => {
                    let of_senders = redirect.senders.iter();
                    redirect.from.iter().any(|prefix| prefix.contains(&ip))
                        || of_senders
                            .map(|sender| &self.egress.senders[*sender].origin)
                            .any(|origin| origin.has(ip))
                }
            };
            is_its && redirect.covers(protocol, destination)
        });
        redirect.map(|redirect| redirect.via)
    }

    /// The sender's name, where the entrance alone says it.
    fn sender_of(&self, entrance: Entrance) -> Option<Arc<str>> {
        let sender = entrance.sender?;
        Some(self.egress.senders[sender].name.as_str().into())
    }
}
