//! TCP connections that the kernel has taken for their destinations.

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{net::TcpStream, time::sleep};

use super::Host;
use crate::{
    config::Protocol,
    connection::Plain,
    liveness::end_when_gone,
    pump::prepare,
    report::Subject,
    wire::{Answer, Opening},
};

/// Takes connections for ever.
pub(crate) async fn serve(host: Arc<Host>, listener: TcpListener, place: u16) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "a listener can't be waited for");
            return;
        }
    };
    loop {
        match listener.accept().await {
            Ok((stream, source)) => {
                let host = host.clone();
                tokio::spawn(async move { relay(&host, stream, source, place).await });
            }
            Err(error) => {
                // No descriptors, mostly: some are given back soon.
                tracing::warn!(%error, "a connection can't be taken");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn relay(host: &Host, stream: TcpStream, source: SocketAddr, place: u16) {
    prepare(&stream);
    let refuse = |reason: &str| {
        tracing::debug!(%source, reason, "a connection is refused");
        host.metrics.connections_refused.add(1);
    };
    let address = end_when_gone(&stream).and_then(|()| stream.local_addr());
    let Ok(destination) = address else {
        return refuse("it is gone");
    };
    let (source, destination) = (canonical(source), canonical(destination));
    let Some(ticket) = host.carried.enter(host, place, (source, destination)) else {
        return refuse("its destination isn't redirected");
    };
    let sender = match place {
        0 => host.senders.ask(source.ip()).await,
        place => host
            .now()
            .sender_at(place)
            .map(|sender| sender.name.clone()),
    };
    let Some(sender) = sender else {
        tracing::warn!(%source, %destination, "a connection of an unknown sender is refused");
        return refuse("its sender is unknown");
    };
    let link = &host.links[ticket.via];
    let subject = Subject {
        protocol: Protocol::Tcp,
        host: "".into(),
        sender: sender.clone(),
        source,
        destination,
        started: Instant::now(),
    };
    let Some(_share) = host.connections.take(&sender) else {
        host.metrics.connections_limited.add(1);
        host.report.add(&subject, Answer::TooMany.name(), (0, 0));
        return refuse("its sender has too many");
    };
    let opening = Opening::Tcp {
        sender: sender.to_string(),
        source,
        destination,
    };
    let opened = tokio::select! {
        opened = link.open(&opening) => opened,
        reason = ticket.cut() => return refuse(&reason),
    };
    let secure = match opened {
        Ok((secure, Answer::Connected)) => secure,
        Ok((_, answer)) => {
            host.report.add(&subject, answer.name(), (0, 0));
            return refuse(answer.name());
        }
        Err(error) => {
            tracing::warn!(%sender, %destination, peer = %link.peer.name, %error, "a connection can't be relayed");
            host.report.add(&subject, "peer_away", (0, 0));
            return refuse("the peer is away");
        }
    };
    let plain = (Plain::Sender, stream);
    host.books()
        .carry(&subject, plain, secure, ticket.cut())
        .await;
}

/// IPv4 as IPv4, whatever kind of socket it came by.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
