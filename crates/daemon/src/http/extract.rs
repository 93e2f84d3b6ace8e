//! What handlers take from a request: the caller, the path, the query, the body. All refuse with a
//! [`Failure`], and a body is never held beyond its limit.

use std::{
    future::pending,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts, Request},
    http::{StatusCode, header, request::Parts},
};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandwire_api::error::ErrorCode;
use sandwire_slot::service::Caller;
use serde::de::DeserializeOwned;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use super::failure::Failure;
use crate::server::CALLER_TIMEOUT;

/// Largest body that is read.
pub(crate) const BODY_BYTES_MAX: usize = 1 << 20;
/// Largest body that is read of root: a policy of 100,000 prefixes is several times as long.
pub(crate) const BODY_BYTES_MAX_ROOT: usize = 8 << 20;
/// How much of a body that is too large is taken and thrown away, so that a caller that writes all
/// before it reads gets to see the refusal.
const DISCARDED_BYTES_MAX: usize = 16 << 20;
/// How long a body may take.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Who is on the other end of the connection. Put into each request by the server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) Caller);

impl<S: Sync> FromRequestParts<S> for Peer {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        parts.extensions.get::<Self>().copied().ok_or_else(|| {
            Failure::new(
                ErrorCode::Internal,
                "the connection came without credentials",
            )
        })
    }
}

/// The connection that the request came by. Put into each request by the server.
#[derive(Clone, Default)]
pub(crate) struct Connection {
    socket: Option<Arc<OwnedFd>>,
    untold: Arc<Mutex<Untold>>,
}

/// How a connection stands with its last request.
#[derive(Default)]
struct Untold {
    undo: Option<Undo>,
    /// It has no answer yet.
    is_asked: bool,
    /// Nobody will be told anything any more.
    is_over: bool,
}

/// Undoes what an answer would have told of.
pub(crate) type Undo = Box<dyn FnOnce() + Send>;

impl Connection {
    /// One whose socket is this, if that is known.
    pub(crate) fn of(socket: Option<OwnedFd>) -> Self {
        Self {
            socket: socket.map(Arc::new),
            untold: Arc::default(),
        }
    }

    /// What is to be undone if the caller goes without having read its answer to the end: nobody else would know of it.
    /// Where it has gone already it is done at once.
    pub(super) fn undo_if_untold(&self, undo: impl FnOnce() + Send + 'static) {
        let mut untold = self.lock_untold();
        if untold.is_over {
            drop(untold);
            undo();
        } else {
            untold.undo = Some(Box::new(undo));
        }
    }

    /// A request has come. Who asks for more has read what it was told.
    pub(crate) fn request_began(&self) {
        *self.lock_untold() = Untold {
            is_asked: true,
            ..Untold::default()
        };
    }

    /// The request has its answer, which is to be written.
    pub(crate) fn request_answered(&self) {
        self.lock_untold().is_asked = false;
    }

    /// The connection is over. Returns what is to be undone: if there was no answer, or it was lost on its way.
    pub(crate) fn end(&self, is_lost: bool) -> Option<Undo> {
        let mut untold = self.lock_untold();
        untold.is_over = true;
        let is_untold = is_lost || untold.is_asked;
        untold.undo.take().filter(|_| is_untold)
    }

    fn lock_untold(&self) -> MutexGuard<'_, Untold> {
        self.untold.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses to give anything to a caller that has gone: it was killed while the daemon stood still, say. Nobody would
    /// know that it is there.
    pub(super) fn demand(&self) -> Result<(), Failure> {
        if self.is_there() {
            return Ok(());
        }
        Err(Failure::new(
            ErrorCode::Unavailable,
            "the caller has gone before its request was carried out",
        ))
    }

    /// Whether the caller still has its end. One that can't be asked is taken to be there.
    pub(super) fn is_there(&self) -> bool {
        let Some(connection) = &self.socket else {
            return true;
        };
        let mut asked = [PollFd::new(connection, PollFlags::empty())];
        let _ = poll(&mut asked, Some(&Timespec::default()));
        !asked[0].revents().contains(PollFlags::HUP)
    }
}

impl<S: Sync> FromRequestParts<S> for Connection {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        Ok(parts.extensions.get().cloned().unwrap_or_default())
    }
}

/// Whether the daemon stops. Put into each request by the server.
#[derive(Clone, Debug)]
pub(crate) struct Stopping(pub(crate) watch::Receiver<bool>);

impl Stopping {
    /// Waits until the daemon has waited for a caller that should say something as long as it does when it stops.
    async fn patience_is_over(stopping: Option<Self>) {
        let Some(Self(mut stopping)) = stopping else {
            return pending().await;
        };
        // That the one who would tell is gone means the same.
        let _ = stopping.wait_for(|stops| *stops).await;
        sleep(CALLER_TIMEOUT).await;
    }
}

/// Parameters of the path.
pub(crate) struct Path<T>(pub(crate) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        match axum::extract::Path::from_request_parts(parts, state).await {
            Ok(axum::extract::Path(value)) => Ok(Self(value)),
            Err(rejection) => Err(Failure::new(
                ErrorCode::InvalidRequest,
                format!("path {}: {}", parts.uri.path(), rejection.body_text()),
            )),
        }
    }
}

/// Parameters of the query.
pub(crate) struct Query<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        match axum::extract::Query::from_request_parts(parts, state).await {
            Ok(axum::extract::Query(value)) => Ok(Self(value)),
            Err(rejection) => Err(Failure::new(
                ErrorCode::InvalidRequest,
                format!("query: {}", rejection.body_text()),
            )),
        }
    }
}

/// A JSON body. The content type isn't looked at: the path says what is expected.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        let stopping = request.extensions().get::<Stopping>().cloned();
        let body = tokio::select! {
            body = timeout(BODY_TIMEOUT, read(request)) => body.map_err(|_| took_too_long())??,
            () = Stopping::patience_is_over(stopping) => return Err(stops()),
        };
        serde_json::from_slice(&body)
            .map(Self)
            .map_err(|error| Failure::new(ErrorCode::InvalidRequest, format!("body: {error}")))
    }
}

async fn read(request: Request) -> Result<Bytes, Failure> {
    let length = request
        .headers()
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    let peer = request.extensions().get::<Peer>();
    let most = if peer.is_some_and(|Peer(caller)| caller.privileged) {
        BODY_BYTES_MAX_ROOT
    } else {
        BODY_BYTES_MAX
    };
    let waits_for_permission = request.headers().contains_key(header::EXPECT);
    let body = request.into_body();
    if length.is_some_and(|length| length > most as u64) {
        if !waits_for_permission {
            discard(body).await;
        }
        return Err(too_large(most));
    }
    match Limited::new(body, most).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(too_large(most)),
        Err(error) => Err(Failure::new(
            ErrorCode::InvalidRequest,
            format!("the body can't be read: {error}"),
        )),
    }
}

async fn discard(body: Body) {
    let mut body = Limited::new(body, DISCARDED_BYTES_MAX);
    while let Some(Ok(_)) = body.frame().await {}
}

fn too_large(most: usize) -> Failure {
    Failure::new(
        ErrorCode::InvalidRequest,
        format!("the body is larger than {most} bytes"),
    )
    .with_status(StatusCode::PAYLOAD_TOO_LARGE)
}

fn stops() -> Failure {
    Failure::new(
        ErrorCode::Unavailable,
        "the daemon is stopping, and the body is not there: try again when it is back",
    )
}

fn took_too_long() -> Failure {
    Failure::new(
        ErrorCode::InvalidRequest,
        format!("the body took longer than {} s", BODY_TIMEOUT.as_secs()),
    )
    .with_status(StatusCode::REQUEST_TIMEOUT)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A connection with a request, what is to be undone of which notes that it was.
    fn asked() -> (Connection, impl FnOnce() + Send + 'static, Arc<AtomicBool>) {
        let connection = Connection::default();
        connection.request_began();
        let is_undone = Arc::new(AtomicBool::new(false));
        let notes = Arc::clone(&is_undone);
        (
            connection,
            move || notes.store(true, Ordering::Relaxed),
            is_undone,
        )
    }

    #[test]
    fn what_the_caller_is_not_told_of_is_undone_whenever_it_went() {
        // While it was being done, which goes on.
        let (connection, undo, is_undone) = asked();
        assert!(connection.end(false).is_none());
        connection.undo_if_untold(undo);
        assert!(is_undone.load(Ordering::Relaxed));

        // When it was done, and before there was an answer.
        let (connection, undo, _) = asked();
        connection.undo_if_untold(undo);
        assert!(connection.end(false).is_some());

        for is_lost in [false, true] {
            let (connection, undo, is_undone) = asked();
            connection.undo_if_untold(undo);
            connection.request_answered();
            assert_eq!(connection.end(is_lost).is_some(), is_lost);
            assert!(!is_undone.load(Ordering::Relaxed));
        }

        let (connection, undo, _) = asked();
        connection.undo_if_untold(undo);
        connection.request_answered();
        connection.request_began();
        assert!(connection.end(true).is_none(), "who asks on has read it");
    }
}
