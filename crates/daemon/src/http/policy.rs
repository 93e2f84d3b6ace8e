//! `/v1/leases/{name}/policy`: what a lease may reach, changed while it runs.

use std::sync::Arc;

use axum::extract::State;
use sandwire_api::{lease::LeasePolicy, name::Name, pool::PolicySpec};
use sandwire_slot::service::Caller;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    App, blocking,
    extract::{Json, Path, Peer, Query},
    failure::{Failure, Failures},
    leases::Owner,
};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(show, set, reset))
}

/// Shows what a lease may reach.
#[utoipa::path(
    get,
    path = "/v1/leases/{name}/policy",
    operation_id = "show_policy",
    tag = "leases",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    responses((status = 200, description = "The policy", body = LeasePolicy), Failures)
)]
async fn show(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
) -> Result<axum::Json<LeasePolicy>, Failure> {
    let policy = app.slots.lease_policy(caller, owner.owner_uid, &name)?;
    Ok(axum::Json(policy))
}

/// Gives a lease a policy of its own: at once, as a whole, and for connections that exist as well. For who may
/// manage the pool. Only in the eBPF data paths.
#[utoipa::path(
    put,
    path = "/v1/leases/{name}/policy",
    operation_id = "set_policy",
    tag = "leases",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    request_body = PolicySpec,
    responses((status = 200, description = "The policy that it has now", body = LeasePolicy), Failures)
)]
async fn set(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
    Json(policy): Json<PolicySpec>,
) -> Result<axum::Json<LeasePolicy>, Failure> {
    change(app, caller, owner, name, Some(policy)).await
}

/// Gives a lease its pool's policy again, at once. For who may manage the pool.
#[utoipa::path(
    delete,
    path = "/v1/leases/{name}/policy",
    operation_id = "reset_policy",
    tag = "leases",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    responses((status = 200, description = "The policy that it has now", body = LeasePolicy), Failures)
)]
async fn reset(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
) -> Result<axum::Json<LeasePolicy>, Failure> {
    change(app, caller, owner, name, None).await
}

async fn change(
    app: Arc<App>,
    caller: Caller,
    owner: Owner,
    name: Name,
    policy: Option<PolicySpec>,
) -> Result<axum::Json<LeasePolicy>, Failure> {
    let changed = blocking(move || {
        Ok(app
            .slots
            .set_policy(caller, owner.owner_uid, &name, policy)?)
    });
    Ok(axum::Json(changed.await?))
}
