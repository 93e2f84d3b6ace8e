//! `/v1/identities`: addresses of their own for cgroups in the host's namespace.

use std::sync::Arc;

use axum::extract::State;
use sandwire_api::{error::ErrorCode, identity::ListedIdentity};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    App, blocking,
    extract::Peer,
    failure::{Failure, Failures},
};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(list))
}

/// Lists the identities of this host, with what their sockets sent, received and were refused, and those of the configuration that
/// aren't there. Waits for no command that changes identities. For root.
#[utoipa::path(
    get,
    path = "/v1/identities",
    operation_id = "list_identities",
    tag = "identities",
    responses((status = 200, description = "The identities", body = Vec<ListedIdentity>), Failures)
)]
async fn list(
    State(app): State<Arc<App>>,
    Peer(caller): Peer,
) -> Result<axum::Json<Vec<ListedIdentity>>, Failure> {
    if !caller.privileged {
        return Err(Failure::new(
            ErrorCode::Forbidden,
            "identities are for root to see: their commands are",
        ));
    }
    let listed = blocking(move || {
        let failed = |error: sandwire_identity::Error| {
            Failure::new(
                ErrorCode::Internal,
                format!("cannot list identities: {error}"),
            )
        };
        app.identities.listed().map_err(failed)
    })
    .await?;
    Ok(axum::Json(listed))
}
