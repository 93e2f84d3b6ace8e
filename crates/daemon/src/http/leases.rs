//! `/v1/leases`: acquiring, showing and releasing leases.

use std::sync::Arc;

use axum::{extract::State, http::StatusCode, response::Response};
use sandwire_api::{
    attach::AttachedState,
    lease::{AcquireLease, Lease, LeaseDetail, ReleaseOutcome, Released},
    name::Name,
};
use sandwire_slot::service::{Acquired, Caller};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    App, blocking, blocking_list,
    extract::{Connection, Json, Path, Peer, Query},
    failure::{Failure, Failures},
};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list, acquire))
        .routes(routes!(show, release))
        .routes(routes!(attached))
}

/// Whose lease is meant.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Owner {
    /// Numeric user that acquired the lease, for those who may touch other users' leases.
    /// Default: the caller.
    pub(super) owner_uid: Option<u32>,
}

/// Lists the leases that the caller may see: the own ones, and all those of pools that it manages.
#[utoipa::path(
    get,
    path = "/v1/leases",
    operation_id = "list_leases",
    tag = "leases",
    responses((status = 200, description = "The leases", body = Vec<Lease>), Failures)
)]
async fn list(State(app): State<Arc<App>>, Peer(caller): Peer) -> Result<Response, Failure> {
    blocking_list(move || {
        let mut leases = app.slots.leases(caller);
        for lease in &mut leases {
            lease.impairment = app.impairments.summary(lease.owner_uid, &lease.name);
        }
        Ok(leases)
    })
    .await
}

/// Acquires a slot. The same name and pool again give the same lease.
#[utoipa::path(
    post,
    path = "/v1/leases",
    operation_id = "acquire_lease",
    tag = "leases",
    request_body = AcquireLease,
    responses(
        (status = 201, description = "A new lease", body = Lease),
        (status = 200, description = "The caller holds this lease already", body = Lease),
        Failures
    )
)]
async fn acquire(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    connection: Connection,
    Json(request): Json<AcquireLease>,
) -> Result<(StatusCode, axum::Json<Lease>), Failure> {
    // A ready slot costs a lock and a row in the journal, less than a change of threads.
    connection.demand()?;
    let is_there = || connection.is_there();
    let acquired = match app.slots.acquire_now(caller, &request, &is_there)? {
        Some(acquired) => {
            keep_if_told(&app, caller, &connection, &request, &acquired);
            acquired
        }
        None => {
            blocking(move || {
                connection.demand()?;
                let is_there = || connection.is_there();
                let acquired = app.slots.acquire_while(caller, &request, &is_there)?;
                // This goes on where the caller goes and nobody takes what it comes to.
                keep_if_told(&app, caller, &connection, &request, &acquired);
                Ok(acquired)
            })
            .await?
        }
    };
    let status = if acquired.new {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok((status, axum::Json(acquired.lease)))
}

/// Has a lease end whose caller is not told the name that the daemon made up for it.
fn keep_if_told(
    app: &Arc<App>,
    caller: Caller,
    connection: &Connection,
    request: &AcquireLease,
    acquired: &Acquired,
) {
    if request.name.is_none() {
        let (app, name) = (Arc::clone(app), acquired.lease.name.clone());
        connection.undo_if_untold(move || take_back(&app, caller, &name));
    }
}

/// Ends a lease whose caller has gone without having read the name that the daemon made up for it: it can't ask again.
fn take_back(app: &App, caller: Caller, name: &Name) {
    let uid = caller.uid;
    match app.slots.release(caller, None, name) {
        Ok(_) => {
            tracing::info!(lease = %name, uid, "a lease is released that its caller was not told of")
        }
        Err(error) => {
            tracing::warn!(lease = %name, uid, %error, "a lease that its caller was not told of stays");
        }
    }
}

/// Shows a lease, with what the kernel says of its slot now.
#[utoipa::path(
    get,
    path = "/v1/leases/{name}",
    operation_id = "show_lease",
    tag = "leases",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    responses((status = 200, description = "The lease", body = LeaseDetail), Failures)
)]
async fn show(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
) -> Result<axum::Json<LeaseDetail>, Failure> {
    let detail = blocking(move || {
        let mut detail = app.slots.lease_detail(caller, owner.owner_uid, &name)?;
        let lease = &mut detail.lease;
        lease.impairment = app.impairments.summary_now(lease.owner_uid, &lease.name);
        Ok(detail)
    })
    .await?;
    Ok(axum::Json(detail))
}

/// Compares a lease's interface in somebody's namespace with how it was made.
#[utoipa::path(
    get,
    path = "/v1/leases/{name}/attached",
    operation_id = "check_attached",
    tag = "leases",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    responses((status = 200, description = "How it was made, and what is not so now", body = AttachedState), Failures)
)]
async fn attached(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
) -> Result<axum::Json<AttachedState>, Failure> {
    let state = blocking(move || Ok(app.slots.attached(caller, owner.owner_uid, &name)?)).await?;
    Ok(axum::Json(state))
}

/// Ends a lease. If a VMM still has a TAP open, the slot stays until that ends, and the answer says so.
#[utoipa::path(
    delete,
    path = "/v1/leases/{name}",
    operation_id = "release_lease",
    tag = "leases",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    responses((status = 200, description = "What the release came to", body = Released), Failures)
)]
async fn release(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
) -> Result<axum::Json<Released>, Failure> {
    let released = blocking(move || {
        let released = app.slots.release(caller, owner.owner_uid, &name)?;
        if released.outcome == ReleaseOutcome::Released {
            let lease = caller.lease_key(owner.owner_uid, &name);
            app.impairments.lease_has_ended(&lease);
        }
        Ok(released)
    })
    .await?;
    Ok(axum::Json(released))
}
