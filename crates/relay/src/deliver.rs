//! The peer's side: what hosts send is delivered by ordinary sockets, where that is allowed, and reported.

mod ports;
mod tcp;
mod udp;

use std::{
    future::pending,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rustls::pki_types::CertificateDer;
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    sync::watch,
    time::{sleep, timeout},
};

use crate::{
    config::{Deliver, Limits},
    connection::Books,
    credentials::{Life, Store, name_of},
    egress::udp::describe,
    fair::{Bounds, Fair},
    metrics::Metrics,
    openings::{Openings, Place},
    pump::{Secure, SecureReader, SecureWriter},
    report::Report,
    room::Rooms,
    seldom::Seldom,
    senders::{Quota, Share},
    transport::{
        TransportError, accept_tls,
        channel::{self, Incoming, Outgoing},
        end_when_silent, quic_chain, quic_transport, read_opening, socket_of,
    },
    unread::{self, Unread, WIDE_CHANNELS},
    wire::{Answer, Opening},
};

pub(crate) use self::ports::Ports;

/// Channels for datagrams that a host may have, each with memory of its own. One is enough; who is killed again and again
/// leaves some behind that haven't been missed yet.
pub(crate) const CHANNELS_MAX: usize = 128;

/// How often a channel looks whether it may have more room.
const WIDE_PAUSE: Duration = Duration::from_secs(1);

/// Streams of QUIC that a host may have: each is a TCP connection, one that is told that it is one too many, or one that
/// hasn't begun.
pub(crate) fn streams_max(limits: &Limits) -> usize {
    limits.connections_per_host + limits.openings
}

/// TCP connections that hosts may have in a process with so many descriptors: each takes three in TLS. The rest is for
/// sockets for datagrams, and for what hasn't begun.
pub(crate) fn connections(limits: &Limits, descriptors: usize) -> Bounds {
    Bounds {
        per_sender: limits.connections_per_sender,
        per_host: limits.connections_per_host,
        all: descriptors / 4,
    }
}

/// Flows that hosts may have, of which none has to leave others any.
pub(crate) fn flows(limits: &Limits) -> Bounds {
    Bounds {
        per_sender: limits.flows_per_sender,
        per_host: limits.flows_per_host,
        all: usize::MAX,
    }
}

/// Connections whose destination doesn't read.
pub(crate) fn unread(limits: &Limits) -> Bounds {
    unread::bounds(limits, unread::parts_of_host(limits))
}

/// What all connections need.
pub(crate) struct Destination {
    /// Where it may deliver now, and for whom.
    pub(crate) deliver: watch::Sender<Arc<Deliver>>,
    pub(crate) limits: Limits,
    pub(crate) store: Store,
    pub(crate) connections: Rooms,
    pub(crate) flows: Arc<Fair<udp::FlowKey>>,
    pub(crate) channels: Arc<Quota>,
    /// Streams of QUIC that each host has, from their first byte on: each has memory of its own before it is anything else.
    pub(crate) streams: Arc<Quota>,
    pub(crate) unread: Rooms,
    /// Channels of QUIC of each host in which there is room for all that may be unread.
    pub(crate) wide: Arc<Quota>,
    pub(crate) ports: Ports,
    pub(crate) openings: Arc<Openings>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) report: Report,
}

impl Destination {
    /// Where it may deliver now, and for whom.
    fn now(&self) -> Arc<Deliver> {
        self.deliver.borrow().clone()
    }

    fn books<'a>(&'a self, caller: &'a Caller) -> Books<'a> {
        Books {
            limits: &self.limits,
            metrics: &self.metrics,
            report: &self.report,
            unread: Unread {
                of: &self.unread,
                metrics: &self.metrics,
                is_wide: Some(&caller.is_wide),
            },
        }
    }

    fn caller(&self, chain: &[CertificateDer<'static>], address: SocketAddr, life: Life) -> Caller {
        Caller {
            name: name_of(chain, &self.now().clients).into(),
            address,
            life,
            is_wide: Arc::default(),
        }
    }

    fn channel_of(&self, caller: &Caller) -> Result<Share, TransportError> {
        let share = self.channels.take(&caller.name);
        share.ok_or_else(|| TransportError::TooMany {
            host: caller.name.clone(),
            most: CHANNELS_MAX,
        })
    }
}

/// A host that is connected.
#[derive(Clone)]
struct Caller {
    name: Arc<str>,
    address: SocketAddr,
    life: Life,
    /// Whether its channel of QUIC has room for all that it may have unread.
    is_wide: Arc<AtomicBool>,
}

/// Takes TLS connections for ever.
pub(crate) async fn serve_tls(destination: Arc<Destination>, listener: TcpListener) {
    let mut failed = Seldom::default();
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let destination = destination.clone();
                let place = destination.openings.take();
                tokio::spawn(async move {
                    let outcome = take_tls(&destination, stream, from, place).await;
                    note(&destination, from, outcome);
                });
            }
            Err(error) => {
                // No descriptors, mostly: some are given back soon.
                if let Some(left_out) = failed.is_due(Instant::now()) {
                    tracing::warn!(%error, left_out, "a connection can't be taken");
                }
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn note(destination: &Destination, from: SocketAddr, outcome: Result<(), TransportError>) {
    let Err(error) = outcome else { return };
    let metrics = &destination.metrics;
    metrics.sessions_failed.add(1);
    match error {
        // Somebody who has no certificate can have any number of them; they are counted.
        TransportError::Displaced => tracing::debug!(%from, %error, "a connection is refused"),
        _ => {
            let (caller, port) = (from.ip().to_canonical(), from.port());
            tracing::warn!(%caller, port, %error, "a connection is refused");
        }
    }
    if matches!(error, TransportError::TimedOut(_)) {
        metrics.openings_timed_out.add(1);
    }
}

async fn take_tls(
    destination: &Arc<Destination>,
    stream: TcpStream,
    from: SocketAddr,
    place: Place,
) -> Result<(), TransportError> {
    let begin = async {
        let (mut stream, life, chain) =
            accept_tls(stream, from, &destination.store, &destination.limits).await?;
        destination.metrics.sessions.add(1);
        let opening = read_opening(&mut stream, from, &destination.limits).await?;
        Ok((stream, destination.caller(&chain, from, life), opening))
    };
    let (mut stream, caller, opening) = place.hold(begin).await?;
    match opening {
        Opening::Tcp { .. } => {
            let tcp = socket_of(&stream);
            let (reader, writer) = tokio::io::split(stream);
            let secure = Secure {
                reader: SecureReader::Tls(reader),
                writer: SecureWriter::Tls(writer),
                life: Some(caller.life.clone()),
                tcp,
                quic: None,
            };
            tcp::deliver(destination, &caller, &opening, secure).await;
        }
        Opening::Datagrams => {
            let _share = destination.channel_of(&caller)?;
            end_when_silent(&stream, from)?;
            // Whoever doesn't read it isn't sent anything else either.
            let accepted = async {
                stream.write_u8(Answer::Connected as u8).await?;
                stream.flush().await
            };
            if accepted.await.is_err() {
                return Ok(());
            }
            let (outgoing, incoming) =
                channel::over_tls(stream, destination.limits.datagram_queue_bytes);
            deliver_datagrams(destination, &caller, outgoing, incoming).await;
        }
    }
    Ok(())
}

/// Takes QUIC connections for ever.
pub(crate) async fn serve_quic(destination: Arc<Destination>, endpoint: quinn::Endpoint) {
    while let Some(incoming) = endpoint.accept().await {
        // An address in a packet may be anybody's. Once many ask, who does has to show that it hears us.
        if !incoming.remote_address_validated() && destination.openings.is_busy() {
            // There always is a first time to ask.
            let _ = incoming.retry();
            continue;
        }
        let destination = destination.clone();
        let place = destination.openings.take();
        let from = incoming.remote_address();
        tokio::spawn(async move {
            let outcome = take_quic(&destination, incoming, place).await;
            note(&destination, from, outcome);
        });
    }
}

async fn take_quic(
    destination: &Arc<Destination>,
    incoming: quinn::Incoming,
    place: Place,
) -> Result<(), TransportError> {
    let from = incoming.remote_address();
    let failed = |reason: String| TransportError::Quic {
        operation: "take a QUIC connection from",
        address: from,
        reason,
    };
    let credentials = destination.store.current()?;
    let mut config = quinn::ServerConfig::with_crypto(credentials.quic_server.clone());
    let streams = streams_max(&destination.limits);
    let transport = quic_transport(&destination.limits, streams, 0);
    config.transport_config(Arc::new(transport));
    let connecting = incoming
        .accept_with(Arc::new(config))
        .map_err(|error| failed(error.to_string()))?;
    let begin = async {
        timeout(destination.limits.connect, connecting)
            .await
            .map_err(|_| TransportError::TimedOut(from))?
            .map_err(|error| failed(error.to_string()))
    };
    let connection = place.hold(begin).await?;
    destination.metrics.sessions.add(1);
    let chain = quic_chain(&connection);
    let life = Life::of_client(&destination.store, &credentials, &chain);
    let caller = destination.caller(&chain, from, life);
    let _share = destination.channel_of(&caller).inspect_err(|error| {
        let reason = error.to_string();
        connection.close(quinn::VarInt::from_u32(0), reason.as_bytes());
    })?;
    tracing::info!(host = %caller.name, %from, "a host is connected");
    let streams = accept_streams(destination, &caller, &connection);
    let outgoing = Outgoing::Quic(connection.clone());
    let incoming = Incoming::Quic(connection.clone());
    // Both notice when the connection has ended; that of datagrams, which says why, decides.
    let datagrams = async {
        let _channel = Channel(&connection);
        deliver_datagrams(destination, &caller, outgoing, incoming).await;
    };
    tokio::select! {
        // No stream is to be there before its channel is wide, if it may be.
        biased;
        () = widen(destination, &caller, &connection) => {}
        _ = async { tokio::join!(streams, datagrams) } => {}
    }
    Ok(())
}

/// A channel of QUIC. It is closed when this goes, also by a panic: its streams ask nobody else whether its certificate holds.
struct Channel<'a>(&'a quinn::Connection);

impl Drop for Channel<'_> {
    fn drop(&mut self) {
        self.0.close(quinn::VarInt::from_u32(0), b"");
    }
}

/// Gives a channel room for all that a host may have unread, for as long as it lasts. A host that has such channels waits until one
/// has ended: in any number of them it would have any number of bytes. Until then nothing may be unread.
async fn widen(destination: &Destination, caller: &Caller, connection: &quinn::Connection) {
    let mut share = destination.wide.take(&caller.name);
    if share.is_none() {
        tracing::warn!(
            host = %caller.name, from = %caller.address,
            "a host has {WIDE_CHANNELS} other channels: in this one, connections that aren't read as fast as they come are reset \
             until one of those has ended; give each host a certificate with a name of its own"
        );
    }
    let _share = loop {
        match share {
            Some(share) => break share,
            None => sleep(WIDE_PAUSE).await,
        }
        share = destination.wide.take(&caller.name);
    };
    let limits = &destination.limits;
    let window = unread::connection_window(limits, unread::parts_of_host(limits));
    connection.set_receive_window(window);
    caller.is_wide.store(true, Ordering::Relaxed);
    pending().await
}

async fn accept_streams(
    destination: &Arc<Destination>,
    caller: &Caller,
    connection: &quinn::Connection,
) {
    while let Ok((mut writer, mut reader)) = connection.accept_bi().await {
        let Some(share) = destination.streams.take(&caller.name) else {
            destination.metrics.connections_refused.add(1);
            destination.metrics.connections_limited.add(1);
            // It can't have ended. What came by it goes with the reader.
            let _ = writer.reset(quinn::VarInt::from_u32(1));
            continue;
        };
        let (destination, caller) = (destination.clone(), caller.clone());
        let connection = connection.clone();
        tokio::spawn(async move {
            let _share = share;
            match read_opening(&mut reader, caller.address, &destination.limits).await {
                Ok(opening @ Opening::Tcp { .. }) => {
                    let secure = Secure {
                        reader: SecureReader::Quic(reader),
                        writer: SecureWriter::Quic(writer),
                        life: None,
                        tcp: None,
                        quic: Some(connection),
                    };
                    tcp::deliver(&destination, &caller, &opening, secure).await;
                }
                Err(TransportError::TimedOut(_)) => destination.metrics.openings_timed_out.add(1),
                // The host has given it up, as for another sender's sake, or is gone.
                Err(TransportError::Io { source, .. }) if is_over(&source) => {}
                // Datagrams have a way of their own in QUIC.
                _ => destination.metrics.malformed.add(1),
            }
        });
    }
}

/// Whether a stream was reset, or its connection is no more.
fn is_over(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::NotConnected
    )
}

async fn deliver_datagrams(
    destination: &Arc<Destination>,
    caller: &Caller,
    outgoing: Outgoing,
    incoming: Incoming,
) {
    let reason = tokio::select! {
        outcome = udp::deliver(destination, caller, outgoing, incoming) => describe(&outcome),
        reason = caller.life.clone().end() => reason,
    };
    tracing::info!(host = %caller.name, from = %caller.address, %reason, "a host's channel has ended");
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{
        config::Config,
        egress,
        privileges::{DESCRIPTORS, beside},
        room::Room,
    };

    const TEXT: &str = r#"
        [tls]
        certificate = "a"
        key = "b"
        authorities = "c"
        [deliver]
        listen = ["127.0.0.1:1"]
        clients = ["a.example"]
        allow = ["198.51.100.0/24"]
    "#;

    #[test]
    fn a_host_and_a_peer_in_one_process_have_descriptors_for_all_that_both_may_have() {
        let limits = Config::parse(Path::new("relay.toml"), TEXT).unwrap().limits;
        let descriptors = usize::try_from(DESCRIPTORS).unwrap();
        let of_host = egress::descriptors(&limits);
        let connections = connections(&limits, beside(descriptors, of_host)).all;
        // Half of the usual range of ports is for datagrams.
        let of_peer = 3 * connections + limits.openings + 14_116;
        assert!(of_host + of_peer < descriptors, "{of_host} and {of_peer}");
        assert!(connections > limits.connections_per_host);
        assert_eq!(beside(1000, 5000), 250);
    }

    #[test]
    fn hosts_that_take_what_they_may_leave_others_connections_and_the_relay_descriptors() {
        let limits = Config::parse(Path::new("relay.toml"), TEXT).unwrap().limits;
        let descriptors = usize::try_from(DESCRIPTORS).unwrap();
        let connections = Fair::new(connections(&limits, descriptors));
        let mut open = Vec::new();
        let mut taken = 0;
        for host in ["a", "b", "c", "d"] {
            for number in 0..limits.connections_per_host {
                let sender = format!("sender {}", number % 64);
                let Some(room) = Room::take(&connections, &host.into(), &sender.into()) else {
                    break;
                };
                taken += 1 - usize::try_from(room.displaced).unwrap();
                open.push(room);
            }
        }
        assert!(taken > 2 * limits.connections_per_host - 64, "{taken}");
        assert!(3 * taken + limits.openings < descriptors, "{taken}");
        assert!(Room::take(&connections, &"few".into(), &"one".into()).is_some());
    }
}
