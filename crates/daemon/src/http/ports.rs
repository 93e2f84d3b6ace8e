//! `/v1/ports` and `/v1/leases/{name}/ports`: host ports that lead to leases.

use std::{net::IpAddr, sync::Arc};

use axum::{extract::State, http::StatusCode, response::Response};
use sandwire_api::{
    name::Name,
    published_port::{Protocol, PublishPort, PublishedPort},
};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    App, blocking, blocking_list,
    extract::{Json, Path, Peer, Query},
    failure::{Failure, Failures},
    leases::Owner,
};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list_all))
        .routes(routes!(list, publish))
        .routes(routes!(withdraw))
}

/// Which published port is meant.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Which {
    /// Numeric user that acquired the lease. Default: the caller.
    owner_uid: Option<u32>,
    /// Address of the host that the port was published with. Default: none.
    #[param(value_type = Option<String>)]
    host_address: Option<IpAddr>,
}

/// Whose lease it is, and what may be done to the host.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct How {
    /// Numeric user that acquired the lease. Default: the caller.
    owner_uid: Option<u32>,
    /// Publish the port also where the host itself listens, whose service nobody elsewhere reaches any more. For root.
    #[serde(default)]
    hide_host_service: bool,
}

/// Lists the published ports of all leases that the caller may see.
#[utoipa::path(
    get,
    path = "/v1/ports",
    operation_id = "list_ports",
    tag = "ports",
    responses((status = 200, description = "The published ports", body = Vec<PublishedPort>), Failures)
)]
async fn list_all(State(app): State<Arc<App>>, Peer(caller): Peer) -> Result<Response, Failure> {
    blocking_list(move || Ok(app.slots.published_ports(caller))).await
}

/// Lists the published ports of a lease.
#[utoipa::path(
    get,
    path = "/v1/leases/{name}/ports",
    operation_id = "list_lease_ports",
    tag = "ports",
    params(("name" = Name, Path, description = "Name of the lease"), Owner),
    responses((status = 200, description = "The published ports", body = Vec<PublishedPort>), Failures)
)]
async fn list(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(owner): Query<Owner>,
) -> Result<axum::Json<Vec<PublishedPort>>, Failure> {
    let ports = app.slots.lease_ports(caller, owner.owner_uid, &name)?;
    Ok(axum::Json(ports))
}

/// Publishes a host port to a lease.
#[utoipa::path(
    post,
    path = "/v1/leases/{name}/ports",
    operation_id = "publish_port",
    tag = "ports",
    params(("name" = Name, Path, description = "Name of the lease"), How),
    request_body = PublishPort,
    responses((status = 201, description = "The published port", body = PublishedPort), Failures)
)]
async fn publish(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path(name): Path<Name>,
    Query(how): Query<How>,
    Json(port): Json<PublishPort>,
) -> Result<(StatusCode, axum::Json<PublishedPort>), Failure> {
    let published = blocking(move || {
        let (owner, hide) = (how.owner_uid, how.hide_host_service);
        // One that has come since the last look.
        app.identities.spare(&app.slots);
        Ok(app.slots.publish(caller, owner, &name, &port, hide)?)
    })
    .await?;
    Ok((StatusCode::CREATED, axum::Json(published)))
}

/// Withdraws a published host port.
#[utoipa::path(
    delete,
    path = "/v1/leases/{name}/ports/{protocol}/{host_port}",
    operation_id = "withdraw_port",
    tag = "ports",
    params(
        ("name" = Name, Path, description = "Name of the lease"),
        ("protocol" = Protocol, Path, description = "Transport protocol"),
        ("host_port" = u16, Path, description = "Port on the host"),
        Which
    ),
    responses((status = 204, description = "The port is withdrawn"), Failures)
)]
async fn withdraw(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
    Path((name, protocol, host_port)): Path<(Name, Protocol, u16)>,
    Query(which): Query<Which>,
) -> Result<StatusCode, Failure> {
    blocking(move || {
        let address = which.host_address;
        Ok(app
            .slots
            .withdraw(caller, which.owner_uid, &name, protocol, host_port, address)?)
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}
