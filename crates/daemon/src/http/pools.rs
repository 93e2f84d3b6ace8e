//! `/v1/pools`: pools, their sizes and figures.

use std::sync::Arc;

use axum::{extract::State, http::StatusCode, response::Response};
use sandwire_api::{
    error::ErrorCode,
    name::Name,
    pool::{AccessVerb, ChangePool, Pool, PoolSpec},
    slot::DataPath,
};
use sandwire_slot::{
    error::ServiceError,
    service::{Caller, PoolView, Slots},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    App, blocking, blocking_list,
    extract::{Json, Path, Peer},
    failure::{Failure, Failures},
};
use crate::access;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(show, change, delete))
}

/// Lists the pools that the caller may see.
#[utoipa::path(
    get,
    path = "/v1/pools",
    operation_id = "list_pools",
    tag = "pools",
    responses((status = 200, description = "The pools, by name", body = Vec<Pool>), Failures)
)]
async fn list(State(app): State<Arc<App>>, Peer(caller): Peer) -> Result<Response, Failure> {
    blocking_list(move || {
        let mut pools = app.slots.pool_views();
        // What the caller may not see costs no copy.
        pools.retain(|pool| access::may_see(caller, pool.spec()));
        Ok(pools.iter().map(PoolView::to_api).collect())
    })
    .await
}

/// Creates a pool; it fills in the background. For root.
#[utoipa::path(
    post,
    path = "/v1/pools",
    operation_id = "create_pool",
    tag = "pools",
    request_body = PoolSpec,
    responses((status = 201, description = "The new pool", body = Pool), Failures)
)]
async fn create(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Json(spec): Json<PoolSpec>,
) -> Result<(StatusCode, axum::Json<Pool>), Failure> {
    if !caller.privileged {
        return Err(Failure::new(
            ErrorCode::Forbidden,
            format!("user {} may not create pools: only root may", caller.uid),
        ));
    }
    let pool = blocking(move || Ok(app.slots.create_pool(&spec)?)).await?;
    Ok((StatusCode::CREATED, axum::Json(pool)))
}

/// Shows a pool.
#[utoipa::path(
    get,
    path = "/v1/pools/{pool}",
    operation_id = "show_pool",
    tag = "pools",
    params(("pool" = Name, Path, description = "Name of the pool")),
    responses((status = 200, description = "The pool", body = Pool), Failures)
)]
async fn show(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
) -> Result<axum::Json<Pool>, Failure> {
    let pool = known_pool(&app, caller, &name)?;
    if access::may_see(caller, pool.spec()) {
        Ok(axum::Json(pool.to_api()))
    } else {
        Err(forbidden(caller, "see", &name))
    }
}

/// Changes a pool: its size, its policies, its data path, who may use it. What is absent stays as it is. The parts are done one by
/// one: access and rest, data path, policy (towards `nft`: policy, data path), vsock, size; the first that fails ends it.
#[utoipa::path(
    patch,
    path = "/v1/pools/{pool}",
    operation_id = "change_pool",
    tag = "pools",
    params(("pool" = Name, Path, description = "Name of the pool")),
    request_body = ChangePool,
    responses((status = 200, description = "The pool as it is now", body = Pool), Failures)
)]
async fn change(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Json(change): Json<ChangePool>,
) -> Result<axum::Json<Pool>, Failure> {
    check_managed(&app, caller, &name, "change")?;
    if change == ChangePool::default() {
        return Err(Failure::new(
            ErrorCode::InvalidRequest,
            "body: nothing to change: give size, policy, vsock, data_path, access or \
             quarantine_seconds",
        ));
    }
    let pool = blocking(move || Ok(apply(&app.slots, caller, &name, change)?)).await?;
    Ok(axum::Json(pool))
}

fn apply(
    slots: &Slots,
    caller: Caller,
    name: &Name,
    change: ChangePool,
) -> Result<Pool, ServiceError> {
    if change.access.is_some() || change.quarantine_seconds.is_some() {
        slots.set_pool_use(caller, name, change.access, change.quarantine_seconds)?;
    }
    let mut policy = change.policy;
    // Policies change in the eBPF data paths only: before leaving them, or after coming there.
    if change.data_path == Some(DataPath::Nft)
        && let Some(policy) = policy.take()
    {
        slots.set_pool_policy(caller, name, policy)?;
    }
    if let Some(data_path) = change.data_path {
        slots.move_pool_by(caller, name, data_path)?;
    }
    if let Some(policy) = policy {
        slots.set_pool_policy(caller, name, policy)?;
    }
    if let Some(policy) = change.vsock {
        slots.set_pool_vsock(caller, name, policy)?;
    }
    if let Some(size) = change.size {
        slots.resize_pool_by(caller, name, size)?;
    }
    slots.pool(name)
}

/// Deletes a pool that has no leases, with its slots.
#[utoipa::path(
    delete,
    path = "/v1/pools/{pool}",
    operation_id = "delete_pool",
    tag = "pools",
    params(("pool" = Name, Path, description = "Name of the pool")),
    responses((status = 204, description = "The pool is deleted"), Failures)
)]
async fn delete(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
) -> Result<StatusCode, Failure> {
    check_managed(&app, caller, &name, "delete")?;
    blocking(move || Ok(app.slots.delete_pool_by(caller, &name)?)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The pool, unless the caller may not even know that it exists.
fn known_pool(app: &App, caller: Caller, name: &Name) -> Result<PoolView, Failure> {
    let pool = app.slots.pool_view(name)?;
    if access::may_know(caller, pool.spec()) {
        Ok(pool)
    } else {
        Err(Failure::no_pool(name))
    }
}

fn check_managed(app: &App, caller: Caller, name: &Name, verb: &str) -> Result<(), Failure> {
    let pool = known_pool(app, caller, name)?;
    if caller.may(AccessVerb::Manage, pool.spec()) {
        Ok(())
    } else {
        Err(forbidden(caller, verb, name))
    }
}

fn forbidden(caller: Caller, verb: &str, pool: &Name) -> Failure {
    Failure::new(
        ErrorCode::Forbidden,
        format!(
            "user {} may not {verb} pool {pool}: its access rules don't grant that",
            caller.uid
        ),
    )
}
