//! `/v1/openapi.json`: the description of the API, made from the handlers themselves.

use std::sync::Arc;

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use sandwire_api::{
    error::ApiError,
    impairment::{
        BitRate, Checksum, Distribution, LossKind, Order, PacketRange, Percent, Ports, QueueKind,
        QueueLimit, TimeSpan,
    },
};
use utoipa::OpenApi;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::App;

/// The frame of the document; paths come from the handlers.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "sandwire",
        description = "Networks for sandboxes on one host. Served on a Unix socket; the \
                       credentials of the connecting process say who asks. Every answer with a \
                       status of 400 or more, except of /healthz, has an ApiError as its body."
    ),
    // Those of an impairment's tables are named by schemas that are written by hand.
    components(schemas(
        ApiError,
        BitRate,
        Checksum,
        Distribution,
        LossKind,
        Order,
        PacketRange,
        Percent,
        Ports,
        QueueKind,
        QueueLimit,
        TimeSpan
    )),
    tags(
        (name = "pools", description = "Slots of one kind, kept ready"),
        (name = "leases", description = "Who holds which slot"),
        (name = "vsock", description = "vsock channels of leases"),
        (name = "ports", description = "Host ports that lead to leases"),
        (name = "identities", description = "Addresses of their own for cgroups in the host's namespace"),
        (name = "daemon", description = "The daemon itself")
    )
)]
struct Frame;

pub(super) fn document() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::with_openapi(Frame::openapi())
}

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(show))
}

/// This document.
#[utoipa::path(
    get,
    path = "/v1/openapi.json",
    operation_id = "openapi",
    tag = "daemon",
    responses((
        status = 200,
        description = "An OpenAPI document",
        body = serde_json::Value,
        content_type = "application/json"
    ))
)]
async fn show(State(app): State<Arc<App>>) -> Response {
    (
        [(header::CONTENT_TYPE, "application/json")],
        app.openapi.clone(),
    )
        .into_response()
}
