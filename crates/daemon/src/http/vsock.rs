//! `/v1/vsock` and `/v1/leases/{name}/vsock`: channels of leases, their connections, policies and packets.

use std::{os::fd::OwnedFd, sync::Arc};

use axum::{
    body::Body,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use hyper::body::Bytes;
use sandwire_api::{
    error::ErrorCode,
    name::Name,
    vsock::{LeaseVsock, LeaseVsockPolicy, VsockConnection, VsockPolicy, VsockRule},
};
use sandwire_slot::{channel::Capture, service::Caller};
use serde::Deserialize;
use tokio::{io::AsyncReadExt, net::unix::pipe, sync::mpsc};
use utoipa::IntoParams;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    App, blocking, blocking_list,
    extract::{Json, Path, Peer, Query},
    failure::{Failure, Failures},
    leases::Owner,
    stream::Chunks,
};

/// Bytes of each packet that a capture keeps unless told otherwise: all of the largest packet.
const SNAP_BYTES_DEFAULT: u32 = 65_536;
/// Bytes that are read of a capture at a time.
const CHUNK_BYTES: usize = 64 * 1024;
/// Chunks that wait for the reader.
const CHUNKS_MAX: usize = 4;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(connections))
        .routes(routes!(show))
        .routes(routes!(lease_connections))
        .routes(routes!(show_policy, set_policy, add_rule, reset_policy))
        .routes(routes!(capture))
}

/// Lists the vsock channels of the leases that the caller may see: the own ones, and all those of pools that it
/// manages.
#[utoipa::path(
    get,
    path = "/v1/vsock",
    operation_id = "list_vsock_channels",
    tag = "vsock",
    responses((status = 200, description = "The channels", body = Vec<LeaseVsock>), Failures)
)]
async fn list(State(app): State<Arc<App>>, Peer(caller): Peer) -> Result<Response, Failure> {
    blocking_list(move || Ok(app.slots.channels(caller))).await
}

/// Lists the connections of the channels that the caller may see.
#[utoipa::path(
    get,
    path = "/v1/vsock/connections",
    operation_id = "list_vsock_connections",
    tag = "vsock",
    responses((status = 200, description = "The connections", body = Vec<VsockConnection>), Failures)
)]
async fn connections(State(app): State<Arc<App>>, Peer(caller): Peer) -> Result<Response, Failure> {
    blocking_list(move || Ok(app.slots.channel_connections(caller, None)?)).await
}

/// Shows a lease's vsock channel with its counters.
#[utoipa::path(
    get,
    path = "/v1/leases/{name}/vsock",
    operation_id = "show_vsock_channel",
    tag = "vsock",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    responses((status = 200, description = "The channel", body = LeaseVsock), Failures)
)]
async fn show(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
) -> Result<axum::Json<LeaseVsock>, Failure> {
    let channel = blocking(move || Ok(app.slots.channel(caller, owner.owner_uid, &name)?)).await?;
    Ok(axum::Json(channel))
}

/// Lists the connections of a lease's channel.
#[utoipa::path(
    get,
    path = "/v1/leases/{name}/vsock/connections",
    operation_id = "list_lease_vsock_connections",
    tag = "vsock",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    responses((status = 200, description = "The connections", body = Vec<VsockConnection>), Failures)
)]
async fn lease_connections(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
) -> Result<axum::Json<Vec<VsockConnection>>, Failure> {
    let found = blocking(move || {
        let of = Some((owner.owner_uid, &name));
        Ok(app.slots.channel_connections(caller, of)?)
    });
    Ok(axum::Json(found.await?))
}

/// Shows what a lease's guest may reach by vsock.
#[utoipa::path(
    get,
    path = "/v1/leases/{name}/vsock/policy",
    operation_id = "show_vsock_policy",
    tag = "vsock",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    responses((status = 200, description = "The policy", body = LeaseVsockPolicy), Failures)
)]
async fn show_policy(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
) -> Result<axum::Json<LeaseVsockPolicy>, Failure> {
    let policy = app.slots.channel_policy(caller, owner.owner_uid, &name)?;
    Ok(axum::Json(policy))
}

/// Gives a lease's channel a policy of its own: at once, as a whole, and connections that it no longer allows are
/// reset, but for those of a `hybrid` guest to sockets that the lease's owner makes. Rules that lead to services of the host or to other owners' sandboxes are for who may manage the pool.
#[utoipa::path(
    put,
    path = "/v1/leases/{name}/vsock/policy",
    operation_id = "set_vsock_policy",
    tag = "vsock",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    request_body = VsockPolicy,
    responses((status = 200, description = "The policy that it has now", body = LeaseVsockPolicy), Failures)
)]
async fn set_policy(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
    Json(policy): Json<VsockPolicy>,
) -> Result<axum::Json<LeaseVsockPolicy>, Failure> {
    change_policy(app, caller, owner, name, Some(policy)).await
}

/// Adds a rule to what a lease's guest may reach by vsock, at once; the policy is the lease's own from then on. Rules
/// that lead to services of the host or to other owners' sandboxes are for who may manage the pool.
#[utoipa::path(
    post,
    path = "/v1/leases/{name}/vsock/policy",
    operation_id = "add_vsock_rule",
    tag = "vsock",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    request_body = VsockRule,
    responses((status = 200, description = "The policy that it has now", body = LeaseVsockPolicy), Failures)
)]
async fn add_rule(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
    Json(rule): Json<VsockRule>,
) -> Result<axum::Json<LeaseVsockPolicy>, Failure> {
    let changed = blocking(move || {
        let slots = &app.slots;
        Ok(slots.add_channel_rule(caller, owner.owner_uid, &name, rule)?)
    });
    Ok(axum::Json(changed.await?))
}

/// Gives a lease's channel its pool's policy again, at once.
#[utoipa::path(
    delete,
    path = "/v1/leases/{name}/vsock/policy",
    operation_id = "reset_vsock_policy",
    tag = "vsock",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    responses((status = 200, description = "The policy that it has now", body = LeaseVsockPolicy), Failures)
)]
async fn reset_policy(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
) -> Result<axum::Json<LeaseVsockPolicy>, Failure> {
    change_policy(app, caller, owner, name, None).await
}

async fn change_policy(
    app: Arc<App>,
    caller: Caller,
    owner: Owner,
    name: Name,
    policy: Option<VsockPolicy>,
) -> Result<axum::Json<LeaseVsockPolicy>, Failure> {
    let changed = blocking(move || {
        let slots = &app.slots;
        Ok(slots.set_channel_policy(caller, owner.owner_uid, &name, policy)?)
    });
    Ok(axum::Json(changed.await?))
}

/// How much of each packet a capture keeps.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct CaptureQuery {
    /// Numeric user that acquired the lease, for those who may touch other users' leases.
    /// Default: the caller.
    owner_uid: Option<u32>,
    /// Bytes of payload that are kept of each packet. Default: all.
    snap_bytes: Option<u32>,
}

/// Captures the packets of a lease's channel: a pcap file (LINKTYPE_VSOCK), until the connection is closed or the
/// lease ends. Who reads slowly loses packets, which the channel's `capture_dropped_packets` counts, and holds up nobody.
/// An answer that breaks off in place of an end says that the service or the daemon has ended.
#[utoipa::path(
    get,
    path = "/v1/leases/{name}/vsock/capture",
    operation_id = "capture_vsock",
    tag = "vsock",
    params(("name" = Name, Path, description = "Name of the lease"), CaptureQuery),
    responses(
        (
            status = 200,
            description = "A pcap file",
            body = [u8],
            content_type = "application/vnd.tcpdump.pcap"
        ),
        Failures
    )
)]
async fn capture(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(query): Query<CaptureQuery>,
) -> Result<Response, Failure> {
    let admission = app.traces.admit(caller)?;
    let traces = Arc::clone(&app.traces);
    let snap_bytes = query.snap_bytes.unwrap_or(SNAP_BYTES_DEFAULT);
    let capture = blocking(move || {
        let slots = &app.slots;
        Ok(slots.capture_channel(caller, query.owner_uid, &name, snap_bytes)?)
    })
    .await?;
    let Capture { bytes, hold } = capture;
    let reader = readable(bytes)?;
    let (sender, chunks) = mpsc::channel(CHUNKS_MAX);
    tokio::spawn(async move {
        let _admission = admission;
        let ended = tokio::select! {
            read = copy(reader, &sender) => read && has_ended(hold).await,
            // The reader went away, while no packet came.
            () = sender.closed() => return,
            () = traces.stopped() => false,
        };
        if !ended {
            // Unless the reader is gone as well.
            let _ = sender.send(Err(BrokenOff)).await;
        }
    });
    let kind = "application/vnd.tcpdump.pcap";
    let body = Body::new(Chunks(chunks));
    Ok(([(header::CONTENT_TYPE, kind)], body).into_response())
}

fn readable(bytes: OwnedFd) -> Result<pipe::Receiver, Failure> {
    pipe::Receiver::from_owned_fd(bytes).map_err(|error| {
        let message = format!("cannot read the capture: {error}");
        Failure::new(ErrorCode::Internal, message)
    })
}

/// The service or the daemon ends before the channel does.
#[derive(Debug, thiserror::Error)]
#[error("the capture is broken off")]
struct BrokenOff;

async fn has_ended(hold: Box<dyn FnMut() -> bool + Send>) -> bool {
    // It may wait.
    let asked = tokio::task::spawn_blocking(hold).await;
    asked.unwrap_or(false)
}

/// Copies to the end. Whether it came that far.
async fn copy(mut from: pipe::Receiver, to: &mpsc::Sender<Result<Bytes, BrokenOff>>) -> bool {
    loop {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        match from.read_buf(&mut chunk).await {
            Ok(0) => return true,
            Ok(_) if to.send(Ok(Bytes::from(chunk))).await.is_ok() => {}
            Ok(_) => return false,
            Err(error) => {
                tracing::debug!(%error, "a capture broke");
                return false;
            }
        }
    }
}
