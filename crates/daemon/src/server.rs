//! Connections: accepting them, knowing who is behind them, bounding them, ending them well.
//!
//! Each connection is a task of its own, so nothing that one caller does stops the others. Each needs a place, of which there
//! are so many ([`places`](crate::places)): beyond [`CONNECTIONS_MAX`] further ones wait in the socket's queue, and a user who
//! has enough is told so. A caller that doesn't finish a request's head within [`HEAD_TIMEOUT`], or leaves a connection idle for that
//! long, is disconnected. When the daemon stops, it waits for what it does itself, and only a moment for callers that
//! don't read their answers. No request has a use for descriptors, so where the kernel can it refuses to hand any over:
//! closing one may take as long as its sender likes, in a thread that serves others too.

use std::{
    convert::Infallible,
    io,
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use axum::{Router, body::Body};
use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::geteuid;
use sandwire_slot::service::Caller;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{sleep, timeout},
};
use tower::ServiceExt;

use crate::{
    heard::Heard,
    http::{Connection, Peer, Stopping, log},
    places::{
        Admission, CONNECTIONS_MAX, CONNECTIONS_OF_USERS_MAX, CONNECTIONS_PER_USER_MAX, Place,
        Users,
    },
};

/// How long the head of a request may take, and how long a connection may be idle.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// About the most bytes of a request's head, and of a body that are taken before the request has a use for them: so much can each connection
/// of a user's take up.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// How long requests that run when the daemon stops may still take.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a caller may then take to say the rest of its request, or to read its answer.
pub(crate) const CALLER_TIMEOUT: Duration = Duration::from_secs(1);
/// How long to wait after a failed accept: what is missing, mostly descriptors, has to come free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a user gets who has too many connections, or whose like have. Written before any request is read.
const TOO_MANY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\n\
    content-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n\
    content-length: 126\r\n\r\n\
    {\"code\":\"unavailable\",\"message\":\"this user, or all together, have too many connections: close some\",\"request_id\":\"connection\"}";

/// Serves until `stop` is true, then finishes the requests that run.
pub(crate) async fn serve(listener: UnixListener, router: Router, stop: watch::Receiver<bool>) {
    let permits = usize::try_from(CONNECTIONS_MAX).expect("a small number");
    let slots = Arc::new(Semaphore::new(permits));
    let users = Arc::new(Users::default());
    loop {
        let accepted = tokio::select! {
            () = until(stop.clone()) => break,
            accepted = accept(&listener, &slots) => accepted,
        };
        let (stream, permit) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        match admit(&stream, &users) {
            Ok((caller, admission)) => {
                let place = Place::new(permit, admission);
                let (router, stop) = (router.clone(), stop.clone());
                tokio::spawn(converse(stream, caller, place, router, stop));
            }
            Err(error) => tell_of_refusal(&stream, &error),
        }
    }
    drop(listener);
    let all = timeout(STOP_TIMEOUT, slots.acquire_many(CONNECTIONS_MAX)).await;
    if all.is_err() {
        tracing::warn!("some requests did not end in {} s", STOP_TIMEOUT.as_secs());
    }
}

/// Who has too many connections can try for more as fast as it likes: the line takes its share of the log.
fn tell_of_refusal(stream: &UnixStream, error: &io::Error) {
    let uid = caller_of(stream).ok().and_then(log::user_of);
    tracing::info!(%error, uid, "turned a connection away");
}

/// Waits until the daemon is told to stop. That the one who would tell is gone means the same.
async fn until(mut stop: watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn accept(
    listener: &UnixListener,
    slots: &Arc<Semaphore>,
) -> io::Result<(UnixStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(slots)
        .acquire_owned()
        .await
        .map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

/// Finds out who connects, and turns away who has enough connections.
fn admit(stream: &UnixStream, users: &Arc<Users>) -> io::Result<(Caller, Option<Admission>)> {
    let caller = caller_of(stream)?;
    if caller.privileged {
        return Ok((caller, None));
    }
    match Users::admit(users, caller.uid) {
        Some(admission) => Ok((caller, Some(admission))),
        None => {
            // The socket's buffer is empty, so this never waits; if it fails, the end says enough.
            let _ = stream.try_write(TOO_MANY);
            Err(io::Error::other(format!(
                "user {} has {CONNECTIONS_PER_USER_MAX} connections already, or all users {CONNECTIONS_OF_USERS_MAX}",
                caller.uid
            )))
        }
    }
}

fn caller_of(stream: &UnixStream) -> io::Result<Caller> {
    let credentials = stream.peer_cred()?;
    Ok(Caller {
        uid: credentials.uid(),
        gid: credentials.gid(),
        privileged: credentials.uid() == 0 || credentials.uid() == geteuid().as_raw(),
    })
}

async fn converse(
    stream: UnixStream,
    caller: Caller,
    place: Place,
    router: Router,
    stop: watch::Receiver<bool>,
) {
    let running = Arc::new(watch::Sender::new(false));
    let runs = running.subscribe();
    let stopping = Stopping(stop.clone());
    // None if there are no more descriptors.
    let socket = stream.as_fd().try_clone_to_owned().ok();
    let asked_by = Connection::of(socket);
    let by = asked_by.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        asked_by.request_began();
        request.extensions_mut().insert(Peer(caller));
        request.extensions_mut().insert(stopping.clone());
        request.extensions_mut().insert(asked_by.clone());
        let answer = place.of(router.clone().oneshot(request));
        let run = Running::begin(&running);
        let asked_by = asked_by.clone();
        async move {
            let response: Result<axum::http::Response<Body>, Infallible> = answer.await;
            asked_by.request_answered();
            drop(run);
            response
        }
    });
    let (stream, is_lost) = Heard::new(stream);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    tokio::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = until(stop) => {
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                result = connection => result,
                () = nothing_runs(runs) => {
                    tracing::debug!(uid = caller.uid, "a caller that the stop doesn't wait for is cut off");
                    Ok(())
                }
            }
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, uid = caller.uid, "a connection broke");
    }
    if let Some(undo) = by.end(is_lost.load(Ordering::Relaxed)) {
        // A panic of it has been reported on standard error already.
        let _ = tokio::task::spawn_blocking(undo).await;
    }
}

/// Waits until no request has run for a while: what there is left is for the caller to do.
async fn nothing_runs(mut runs: watch::Receiver<bool>) {
    loop {
        // That the connection is gone means the same.
        let _ = runs.wait_for(|runs| !runs).await;
        let next = timeout(CALLER_TIMEOUT, runs.wait_for(|runs| *runs)).await;
        if !matches!(next, Ok(Ok(_))) {
            return;
        }
    }
}

/// A request that is carried out; ends when dropped.
struct Running(Arc<watch::Sender<bool>>);

impl Running {
    fn begin(running: &Arc<watch::Sender<bool>>) -> Self {
        running.send_replace(true);
        Self(Arc::clone(running))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_replace(false);
    }
}

#[cfg(test)]
mod tests;
