//! `/v1/traffic` and `/v1/drop-reasons`: what leases have sent, received and lost, and why.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use sandwire_api::{
    drop_reason::{DropReason, DropReasonText},
    traffic::LeaseTraffic,
};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    App, blocking_list,
    extract::Peer,
    failure::{Failure, Failures},
};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(reasons))
}

/// Lists the traffic of the leases that the caller may see: the own ones, and all those of pools that it manages.
#[utoipa::path(
    get,
    path = "/v1/traffic",
    operation_id = "list_traffic",
    tag = "leases",
    responses((status = 200, description = "The leases' traffic", body = Vec<LeaseTraffic>), Failures)
)]
async fn list(State(app): State<Arc<App>>, Peer(caller): Peer) -> Result<Response, Failure> {
    blocking_list(move || {
        // Counters are read from memory that the kernel shares.
        let mut leases = app.slots.traffic(caller);
        for lease in &mut leases {
            lease.impairment = app.impairments.summary(lease.owner_uid, &lease.name);
        }
        Ok(leases)
    })
    .await
}

/// Lists why packets are dropped, with what each reason means. For everybody who may connect.
#[utoipa::path(
    get,
    path = "/v1/drop-reasons",
    operation_id = "list_drop_reasons",
    tag = "daemon",
    responses((status = 200, description = "The reasons", body = Vec<DropReasonText>))
)]
async fn reasons() -> axum::Json<Vec<DropReasonText>> {
    axum::Json(DropReason::explained())
}
