//! `/v1/leases/{name}/taps`: the open TAPs of a lease, handed over the socket itself.
//!
//! After the answer 101 the connection carries one byte, and with it the descriptors (`SCM_RIGHTS`). The
//! daemon's copies are closed then; so the slot is in use exactly as long as the receiver, or who got them
//! from it, has them open.

use std::{
    io,
    io::IoSlice,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use sandwire_api::{
    TAPS_PROTOCOL,
    error::{ApiError, ErrorCode},
    name::Name,
    slot::NICS_MAX,
};
use tokio::{io::Interest, net::UnixStream, time::timeout};
use tracing::Instrument;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    App, blocking,
    extract::{Path, Peer, Query},
    failure::{Failure, Failures},
    leases::Owner,
};
use crate::heard::Heard;

/// How long the receiver may keep the daemon waiting: its buffer is empty, so that it never has to.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// What the descriptors travel with.
const COMPANION: &[u8] = b"\0";

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(hand_out))
}

/// Opens the TAPs of a lease and passes them to the caller. Needs `Connection: Upgrade` and `Upgrade: sandwire-fd`;
/// after the answer 101 one byte follows, with the descriptors as `SCM_RIGHTS`, in the order of the interfaces. Read
/// the answer by `recvmsg` from its beginning: the kernel may deliver the byte together with it.
#[utoipa::path(
    get,
    path = "/v1/leases/{name}/taps",
    operation_id = "open_taps",
    tag = "leases",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    responses(
        (status = 101, description = "The descriptors follow"),
        (
            status = 426,
            description = "`invalid_request`: the request doesn't ask for `Upgrade: sandwire-fd`",
            body = ApiError
        ),
        Failures
    )
)]
async fn hand_out(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
    mut request: Request,
) -> Result<Response, Failure> {
    let upgrade = request.extensions_mut().remove::<OnUpgrade>();
    let upgrade = match upgrade {
        Some(upgrade) if asks_for_taps(request.headers()) => upgrade,
        _ => {
            // Who may not see the lease learns that first.
            app.slots.lease_policy(caller, owner.owner_uid, &name)?;
            return Ok(explain());
        }
    };
    let taps = blocking(move || Ok(app.slots.open_taps(caller, owner.owner_uid, &name)?)).await?;
    tokio::spawn(
        async move {
            if let Err(error) = send(upgrade, taps).await {
                tracing::info!(%error, "the TAPs did not reach the caller");
            }
        }
        .in_current_span(),
    );
    let headers = [
        (header::CONNECTION, "upgrade"),
        (header::UPGRADE, TAPS_PROTOCOL),
    ];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers).into_response())
}

fn asks_for_taps(headers: &HeaderMap) -> bool {
    let value = headers.get(header::UPGRADE);
    value.is_some_and(|value| {
        value
            .as_bytes()
            .eq_ignore_ascii_case(TAPS_PROTOCOL.as_bytes())
    })
}

fn explain() -> Response {
    let failure = Failure::new(
        ErrorCode::InvalidRequest,
        format!(
            "open TAPs are passed over the connection itself: ask with 'Connection: Upgrade' and \
             'Upgrade: {TAPS_PROTOCOL}', and read the answer by recvmsg"
        ),
    )
    .with_status(StatusCode::UPGRADE_REQUIRED);
    ([(header::UPGRADE, TAPS_PROTOCOL)], failure).into_response()
}

/// Sends the descriptors once the answer is out. Our copies are closed in any case.
async fn send(upgrade: OnUpgrade, taps: Vec<OwnedFd>) -> io::Result<()> {
    let upgraded = upgrade.await.map_err(io::Error::other)?;
    let stream = upgraded
        .downcast::<TokioIo<Heard>>()
        .map_err(|_: Upgraded| io::Error::other("the connection is no Unix socket"))?
        .io
        .into_inner()
        .into_inner();
    let descriptors: Vec<BorrowedFd<'_>> = taps.iter().map(AsFd::as_fd).collect();
    let sending = stream.async_io(Interest::WRITABLE, || send_once(&stream, &descriptors));
    timeout(SEND_TIMEOUT, sending).await?
}

fn send_once(stream: &UnixStream, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(NICS_MAX as usize))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other(
            "more descriptors than a sandbox has interfaces",
        ));
    }
    sendmsg(
        stream,
        &[IoSlice::new(COMPANION)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}
