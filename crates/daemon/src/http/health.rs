//! `/healthz`: whether leases can be handed out and their packets pass.

use std::sync::Arc;

use axum::{extract::State, http::StatusCode};
use sandwire_api::health::{Health, Problem};
use sandwire_slot::service::Caller;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{App, extract::Peer};

/// What is wrong with a pool of the configuration, for who isn't root.
const UNTOLD: &str = "not as the configuration says; only root is told why";

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(show))
}

impl App {
    /// What the slot service says, and what is wrong with pools and identities of the configuration.
    pub(crate) fn health(&self) -> Health {
        let mut problems = self.problems();
        problems.extend(self.identities.problems());
        self.complete(self.slots.health(), problems)
    }

    /// The same, without the names of leases that the caller may not see, nor identities, which are root's.
    fn health_for(&self, caller: Caller) -> Health {
        let mut problems = self.problems();
        if caller.privileged {
            problems.extend(self.identities.problems());
        } else {
            for problem in &mut problems {
                // It may name the lease that is in the way.
                UNTOLD.clone_into(&mut problem.message);
            }
        }
        self.complete(self.slots.health_for(caller), problems)
    }

    fn complete(&self, mut health: Health, problems: Vec<Problem>) -> Health {
        health.version = env!("CARGO_PKG_VERSION").to_owned();
        health.problems.extend(problems);
        health.ready &= !health.problems.iter().any(|problem| problem.blocking);
        health
    }
}

/// Says whether the daemon and its data path work. For everybody who may connect; who may not see a lease isn't told its
/// name.
#[utoipa::path(
    get,
    path = "/healthz",
    operation_id = "health",
    tag = "daemon",
    responses(
        (status = 200, description = "Ready", body = Health),
        (status = 503, description = "Not ready; `problems` says why", body = Health)
    )
)]
async fn show(State(app): State<Arc<App>>, Peer(caller): Peer) -> (StatusCode, axum::Json<Health>) {
    let health = app.health_for(caller);
    let status = if health.ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, axum::Json(health))
}
