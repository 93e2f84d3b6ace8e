//! TCP connections that the kernel has taken for their destinations.

use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{net::TcpStream, time::sleep};

use super::{Host, carried::Ticket};
use crate::{
    config::Protocol,
    connection::Plain,
    liveness::end_when_gone,
    pump::{Secure, prepare},
    report::Subject,
    room::Room,
    seldom::Seldom,
    wire::{Answer, Opening},
};

/// Why a connection has lost its room.
const MOST: &str = "its sender had most, and others want some";

/// Takes connections for ever.
pub(crate) async fn serve(host: Arc<Host>, listener: TcpListener, place: u16) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "a listener can't be waited for");
            return;
        }
    };
    let mut failed = Seldom::default();
    loop {
        match listener.accept().await {
            Ok((stream, source)) => {
                let host = host.clone();
                tokio::spawn(async move { relay(&host, stream, source, place).await });
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
    let found = tokio::select! {
        found = find_sender(host, place, (source, destination)) => found,
        reason = ticket.cut() => return refuse(&reason),
    };
    let sender = match found {
        Ok(sender) => sender,
        Err(reason) => return refuse(reason),
    };
    let subject = Subject {
        protocol: Protocol::Tcp,
        host: "".into(),
        sender: sender.clone(),
        source,
        destination,
        started: Instant::now(),
    };
    let Some(room) = Room::take(&host.connections, &subject.host, &sender) else {
        host.metrics.connections_limited.add(1);
        host.report.add_refused(&subject, Answer::TooMany.name());
        return refuse("its sender has too many");
    };
    host.metrics.connections_displaced.add(room.displaced);
    let cut = async || {
        tokio::select! {
            reason = ticket.cut() => reason,
            () = room.lost() => MOST.to_owned(),
        }
    };
    let opening = Opening::Tcp {
        sender: sender.to_string(),
        source,
        destination,
    };
    let secure = match open(host, (&ticket, &room), &subject, &opening).await {
        Ok(secure) => secure,
        Err((outcome, reason)) => {
            host.report.add_refused(&subject, outcome);
            return refuse(&reason);
        }
    };
    let plain = (Plain::Sender, stream);
    host.books().carry(&subject, plain, secure, cut()).await;
}

/// Opens a stream to the peer, unless the connection has to end before; else what is reported of it, and why.
async fn open(
    host: &Host,
    (ticket, room): (&Ticket<'_>, &Room),
    subject: &Subject,
    opening: &Opening,
) -> Result<Secure, (&'static str, String)> {
    let link = &host.links[ticket.via];
    let opened = tokio::select! {
        opened = link.open(opening) => opened,
        reason = ticket.cut() => return Err(("cut", reason)),
        () = room.lost() => {
            host.metrics.connections_limited.add(1);
            return Err((Answer::TooMany.name(), MOST.to_owned()));
        }
    };
    match opened {
        Ok((secure, Answer::Connected)) => Ok(secure),
        Ok((_, answer)) => Err((answer.name(), answer.name().to_owned())),
        Err(error) => {
            let (sender, destination) = (&subject.sender, &subject.destination);
            tracing::warn!(%sender, %destination, peer = %link.peer.name, %error, "a connection can't be relayed");
            Err(("peer_away", "the peer is away".to_owned()))
        }
    }
}

/// Whose a connection is, or why it is refused.
async fn find_sender(
    host: &Host,
    place: u16,
    (source, destination): (SocketAddr, SocketAddr),
) -> Result<Arc<str>, &'static str> {
    let (caller, port) = (source.ip(), source.port());
    let found = match place {
        0 => find_or_ask(host, caller).await.map_err(|TooMany| {
            host.metrics.connections_limited.add(1);
            "too many of unknown senders wait"
        })?,
        place => host
            .now()
            .sender_at(place)
            .map(|sender| sender.name.clone()),
    };
    found.ok_or_else(|| {
        tracing::warn!(%caller, port, %destination, "a connection of an unknown sender is refused");
        "its sender is unknown"
    })
}

/// There are as many connections as may wait until it is known whose they are.
struct TooMany;

/// Whose an address is. Asking the daemon takes a moment, and the connection has a descriptor meanwhile.
async fn find_or_ask(host: &Host, address: IpAddr) -> Result<Option<Arc<str>>, TooMany> {
    let known = host.senders.find(address);
    if known.is_some() {
        return Ok(known);
    }
    let room = Room::take(&host.unknown, &"".into(), &address.to_string().into()).ok_or(TooMany)?;
    tokio::select! {
        found = host.senders.ask(address) => Ok(found),
        () = room.lost() => Err(TooMany),
    }
}

/// IPv4 as IPv4, whatever kind of socket it came by.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tokio::time::timeout;

    use super::*;
    use crate::{
        config::Config,
        report::{Output, Report},
    };

    const TEXT: &str = r#"
        [tls]
        certificate = "a"
        key = "b"
        authorities = "c"
        [limits]
        openings = 2
        [egress]
        daemon = "/nowhere"
        [[peer]]
        name = "beyond"
        address = "192.0.2.1:1"
        server_name = "relay.example"
        [[redirect]]
        from = ["10.64.0.0/24"]
        to = ["198.51.100.0/24"]
        via = "beyond"
        [[redirect]]
        from = ["127.0.0.0/8"]
        to = ["127.0.0.0/8"]
        via = "beyond"
    "#;

    /// One whose daemon is never asked.
    fn host(folder: &Path) -> Host {
        let config = Config::parse(Path::new("relay.toml"), TEXT).unwrap();
        let output = Output::open(Some(&folder.join("report"))).unwrap();
        let (report, _) = Report::start(output, 8, Arc::default()).unwrap();
        let egress = config.egress.unwrap();
        Host::new(egress, Vec::new(), config.limits, Arc::default(), report)
    }

    #[tokio::test]
    async fn one_that_waits_for_the_daemon_ends_when_it_is_not_redirected_any_more() {
        let folder = tempfile::tempdir().unwrap();
        let host = host(folder.path());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (_client, (stream, source)) = (client.unwrap(), accepted.unwrap());
        let mut relaying = Box::pin(relay(&host, stream, source, 0));
        let waits = timeout(Duration::ZERO, &mut relaying).await;
        assert!(waits.is_err(), "it is refused at once");
        let mut egress = (*host.now()).clone();
        egress.redirects.clear();
        // The kernel is told when the change is done.
        tokio::select! {
            biased;
            () = &mut relaying => {}
            () = host.change(Arc::new(egress)) => panic!("it is there still"),
        }
    }

    #[tokio::test]
    async fn no_more_wait_for_the_daemon_than_may_and_one_address_leaves_others_room() {
        let folder = tempfile::tempdir().unwrap();
        let host = host(folder.path());
        let [greedy, other] = ["10.64.0.2", "10.64.0.3"].map(|text| text.parse().unwrap());
        let mut waiting = [(); 2].map(|()| Box::pin(find_or_ask(&host, greedy)));
        for one in &mut waiting {
            let waits = timeout(Duration::ZERO, one).await;
            assert!(waits.is_err());
        }
        assert!(matches!(find_or_ask(&host, greedy).await, Err(TooMany)));
        let waits = &mut Box::pin(find_or_ask(&host, other));
        assert!(timeout(Duration::ZERO, waits).await.is_err());
        let [older, newest] = &mut waiting;
        assert!(matches!(newest.await, Err(TooMany)));
        assert!(timeout(Duration::ZERO, older).await.is_err());
    }
}
