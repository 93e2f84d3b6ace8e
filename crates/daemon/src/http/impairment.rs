//! `/v1/leases/{name}/impairment`: bad networks for leases.

use std::sync::Arc;

use axum::extract::State;
use sandwire_api::{
    error::ErrorCode,
    impairment::{Impairment, ImpairmentCleared, LeaseImpairment},
    name::Name,
};
use sandwire_impair_host::control::{ClientError, RefusalCode};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    App, blocking,
    extract::{Json, Path, Peer, Query},
    failure::{Failure, Failures},
    leases::Owner,
};
use crate::impair::ImpairError;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(show, set, clear))
}

/// Whose lease is meant, and what becomes of packets.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Ending {
    /// Numeric user that acquired the lease, for those who may touch other users' leases.
    /// Default: the caller.
    owner_uid: Option<u32>,
    /// Whether packets under way are dropped. Default: they are let go first, and the answer comes then.
    #[serde(default)]
    #[param(required = false)]
    flush: bool,
}

/// Shows how a lease is impaired, and what became of its packets.
#[utoipa::path(
    get,
    path = "/v1/leases/{name}/impairment",
    operation_id = "show_impairment",
    tag = "leases",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    responses((status = 200, description = "Without `impairment` it is not impaired", body = LeaseImpairment), Failures)
)]
async fn show(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
) -> Result<axum::Json<LeaseImpairment>, Failure> {
    let shown = blocking(move || {
        let slots = &app.slots;
        Ok(app
            .impairments
            .show(slots, caller, owner.owner_uid, &name)?)
    });
    Ok(axum::Json(shown.await?))
}

/// Impairs all interfaces of a lease from now on, or changes how without losing a packet. Traces come with their
/// content. With the data path `xdp` the lease goes by `ebpf` meanwhile.
#[utoipa::path(
    put,
    path = "/v1/leases/{name}/impairment",
    operation_id = "set_impairment",
    tag = "leases",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    request_body = Impairment,
    responses((status = 200, description = "How it is impaired now", body = LeaseImpairment), Failures)
)]
async fn set(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
    Json(impairment): Json<Impairment>,
) -> Result<axum::Json<LeaseImpairment>, Failure> {
    let set = blocking(move || {
        let slots = &app.slots;
        Ok(app
            .impairments
            .set(slots, caller, owner.owner_uid, &name, &impairment)?)
    });
    Ok(axum::Json(set.await?))
}

/// Ends the impairment of a lease. Packets under way are let go first, in order, unless they are flushed.
#[utoipa::path(
    delete,
    path = "/v1/leases/{name}/impairment",
    operation_id = "clear_impairment",
    tag = "leases",
    params(("name" = Name, Path, description = "Name of the lease"), Ending),
    responses((status = 200, description = "What became of packets under way", body = ImpairmentCleared), Failures)
)]
async fn clear(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(ending): Query<Ending>,
) -> Result<axum::Json<ImpairmentCleared>, Failure> {
    let cleared = blocking(move || {
        let slots = &app.slots;
        let Ending { owner_uid, flush } = ending;
        Ok(app
            .impairments
            .clear(slots, caller, owner_uid, &name, flush)?)
    });
    Ok(axum::Json(cleared.await?))
}

impl From<ImpairError> for Failure {
    fn from(error: ImpairError) -> Self {
        let code = match &error {
            ImpairError::Lease(error) => error.code(),
            ImpairError::Impairment { .. } => ErrorCode::InvalidRequest,
            ImpairError::NotStarted(_) | ImpairError::Elsewhere { .. } => ErrorCode::Unavailable,
            ImpairError::Ending { .. } => ErrorCode::Conflict,
            ImpairError::Launch(_) => ErrorCode::Internal,
            ImpairError::Service(error) => code_of(error),
        };
        match error {
            ImpairError::Lease(error) => error.into(),
            error => Self::new(code, format!("cannot {error}")),
        }
    }
}

fn code_of(error: &ClientError) -> ErrorCode {
    match error {
        ClientError::Refused { code, .. } => match code {
            RefusalCode::Invalid | RefusalCode::DefaultRoute => ErrorCode::InvalidRequest,
            RefusalCode::InUse | RefusalCode::Full => ErrorCode::Conflict,
            // The lease is there, so its slot lacks the interface: the audit repairs that.
            RefusalCode::NotFound => ErrorCode::Unavailable,
            RefusalCode::Failed => ErrorCode::Internal,
        },
        ClientError::Connect { .. } => ErrorCode::Unavailable,
        ClientError::Broken { .. } | ClientError::Unexpected { .. } => ErrorCode::Internal,
    }
}
