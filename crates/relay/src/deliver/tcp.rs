//! TCP connections for destinations.

use std::{future::pending, io, net::SocketAddr, sync::Arc, time::Instant};

use tokio::{io::AsyncWriteExt, net::TcpStream, sync::watch, time::timeout};

use super::{Caller, Destination};
use crate::{
    config::{Deliver, Protocol},
    connection::Plain,
    liveness::end_when_gone,
    pump::{Secure, prepare},
    report::Subject,
    room::Room,
    wire::{Answer, Opening},
};

/// Connects to the destination, and carries bytes until both directions have ended.
pub(super) async fn deliver(
    here: &Arc<Destination>,
    caller: &Caller,
    opening: &Opening,
    mut secure: Secure,
) {
    let Opening::Tcp {
        sender,
        source,
        destination,
    } = opening
    else {
        return;
    };
    let subject = Subject {
        protocol: Protocol::Tcp,
        host: caller.name.clone(),
        sender: sender.as_str().into(),
        source: *source,
        destination: *destination,
        started: Instant::now(),
    };
    let changes = here.deliver.subscribe();
    let outcome = connect(here, &subject).await;
    let (plain, room) = match outcome {
        Ok(connected) => connected,
        Err(answer) => {
            here.metrics.connections_refused.add(1);
            here.report.add_refused(&subject, answer.name());
            // Nobody is to have it.
            secure.reader.stop();
            if !say(here, &mut secure, answer).await {
                secure.cut();
            }
            return;
        }
    };
    if !say(here, &mut secure, Answer::Connected).await {
        here.report.add_refused(&subject, "cut");
        secure.cut();
        return;
    }
    let plain = (Plain::Destination, plain);
    let cut = async {
        tokio::select! {
            reason = until_denied(changes, *destination) => reason,
            () = room.lost() => "its sender or host had most, and others want some".to_owned(),
        }
    };
    here.books(caller).carry(&subject, plain, secure, cut).await;
}

/// Gives the host its answer, with which a refused stream ends; whether that went out. Who doesn't take it is waited for no longer
/// than anybody else who begins.
async fn say(here: &Destination, secure: &mut Secure, answer: Answer) -> bool {
    let writer = &mut secure.writer;
    let answered = async {
        writer.write_u8(answer as u8).await?;
        if answer == Answer::Connected {
            return writer.flush().await;
        }
        writer.shutdown().await
    };
    let outcome = timeout(here.limits.connect, answered).await;
    if outcome.is_err() {
        here.metrics.openings_timed_out.add(1);
    }
    matches!(outcome, Ok(Ok(())))
}

/// Waits until a new configuration doesn't allow it any more, and says so.
async fn until_denied(
    mut changes: watch::Receiver<Arc<Deliver>>,
    destination: SocketAddr,
) -> String {
    while changes.borrow_and_update().allows(destination.ip()) {
        if changes.changed().await.is_err() {
            // The relay ends, which ends whoever waits here.
            pending::<()>().await;
        }
    }
    "it may not be delivered there any more".to_owned()
}

async fn connect(here: &Destination, subject: &Subject) -> Result<(TcpStream, Room), Answer> {
    let destination = subject.destination;
    if !here.now().allows(destination.ip()) {
        return Err(Answer::Denied);
    }
    let room = Room::take(&here.connections, &subject.host, &subject.sender).ok_or_else(|| {
        here.metrics.connections_limited.add(1);
        Answer::TooMany
    })?;
    here.metrics.connections_displaced.add(room.displaced);
    let connecting = timeout(here.limits.connect, TcpStream::connect(destination));
    let connected = tokio::select! {
        connected = connecting => connected,
        () = room.lost() => {
            here.metrics.connections_limited.add(1);
            return Err(Answer::TooMany);
        }
    };
    let stream = connected
        .map_err(|_| Answer::TimedOut)?
        .map_err(|error| match error.kind() {
            io::ErrorKind::ConnectionRefused => Answer::Refused,
            io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
                Answer::Unreachable
            }
            io::ErrorKind::TimedOut => Answer::TimedOut,
            _ => Answer::Failed,
        })?;
    prepare(&stream);
    // What comes is passed on as it comes.
    let _ = stream.set_nodelay(true);
    end_when_gone(&stream).map_err(|_| Answer::Failed)?;
    Ok((stream, room))
}
