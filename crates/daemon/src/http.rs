//! The HTTP API: one file per resource.
//!
//! A request comes from [`crate::server`] with its [`Peer`]; the layer [`answer`] gives it a number,
//! a span and a place in the metrics; a handler checks who may do that, calls the slot service, and
//! answers. Handlers hold no logic of networks. Paths, methods and the OpenAPI document come from the
//! same annotations ([`api`]), so what is described is what is served.

mod extract;
mod failure;
mod health;
mod identities;
mod impairment;
mod leases;
pub(crate) mod log;
mod metrics;
mod openapi;
mod policy;
mod pools;
mod ports;
mod stream;
mod taps;
#[cfg(test)]
mod tests;
mod trace;
mod traffic;
mod vsock;

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use axum::{
    Router,
    extract::{MatchedPath, Request, State},
    http::{HeaderName, HeaderValue, Method, Uri, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
};
use sandwire_api::{
    error::{ApiError, ErrorCode},
    health::Problem,
};
use sandwire_slot::service::Slots;
use serde::Serialize;
use tracing::Instrument;
use utoipa_axum::router::OpenApiRouter;

pub(crate) use self::extract::{Connection, Peer, Stopping};
use self::{
    failure::Failure,
    metrics::{ChannelTotals, LeaseTotals, Traffic},
    trace::Traces,
};
use crate::{identities::HostIdentities, impair::Impairments, places::Place};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What handlers share.
pub(crate) struct App {
    /// The slot service.
    pub(crate) slots: Arc<Slots>,
    /// Figures about the API itself.
    traffic: Traffic,
    /// What leases have sent and received.
    totals: LeaseTotals,
    /// What their vsock channels have.
    channel_totals: ChannelTotals,
    /// The way to the impairment service.
    pub(crate) impairments: Arc<Impairments>,
    /// Identities without a namespace.
    pub(crate) identities: Arc<HostIdentities>,
    /// Traces that run.
    pub(crate) traces: Arc<Traces>,
    /// What is wrong with the pools of the configuration.
    problems: RwLock<Vec<Problem>>,
    /// The API's description, as it is served.
    openapi: String,
    /// Random, so that numbers of two runs of the daemon differ in the log.
    run: u32,
    requests: AtomicU64,
    /// Pools that had no slot to give.
    empty_pools: log::EmptyPools,
}

impl App {
    /// Without an impairment service of its own.
    #[cfg(test)]
    pub(crate) fn new(slots: Arc<Slots>, metrics_per_lease: bool) -> Arc<Self> {
        let nowhere = Impairments::new(
            "/nonexistent/sandwire-impair".into(),
            false,
            &"default".parse().expect("it is a name"),
        );
        let nobody = HostIdentities::new(
            "/nonexistent/sandwire-identity".as_ref(),
            "default".parse().expect("it is a name"),
        );
        Self::with_services(slots, metrics_per_lease, nowhere, nobody)
    }

    /// `metrics_per_lease` says whether `/metrics` has figures of each lease, beside the pools' sums.
    pub(crate) fn with_services(
        slots: Arc<Slots>,
        metrics_per_lease: bool,
        impairments: Impairments,
        identities: HostIdentities,
    ) -> Arc<Self> {
        let openapi = api()
            .into_openapi()
            .to_pretty_json()
            .expect("the document has string keys only");
        let [a, b, c, d, ..] = RandomState::new().build_hasher().finish().to_be_bytes();
        Arc::new(Self {
            totals: LeaseTotals::new(metrics_per_lease),
            channel_totals: ChannelTotals::new(metrics_per_lease),
            slots,
            traffic: Traffic::default(),
            impairments: Arc::new(impairments),
            identities: Arc::new(identities),
            traces: Arc::default(),
            problems: RwLock::default(),
            openapi,
            run: u32::from_be_bytes([a, b, c, d]),
            requests: AtomicU64::new(1),
            empty_pools: log::EmptyPools::default(),
        })
    }

    /// What is wrong with the pools of the configuration.
    pub(crate) fn problems(&self) -> Vec<Problem> {
        self.problems
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Replaces what is wrong with the pools of the configuration.
    pub(crate) fn set_problems(&self, problems: Vec<Problem>) {
        *self
            .problems
            .write()
            .unwrap_or_else(PoisonError::into_inner) = problems;
    }

    fn next_request_id(&self) -> String {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        format!("{:08x}-{number}", self.run)
    }
}

/// Everything that is served.
pub(crate) fn router(app: Arc<App>) -> Router {
    let (router, _) = api().split_for_parts();
    router
        .fallback(unknown_path)
        .method_not_allowed_fallback(unknown_method)
        .layer(from_fn_with_state(Arc::clone(&app), answer))
        .with_state(app)
}

/// Routes and description of every operation.
fn api() -> OpenApiRouter<Arc<App>> {
    openapi::document()
        .merge(pools::routes())
        .merge(leases::routes())
        .merge(policy::routes())
        .merge(impairment::routes())
        .merge(traffic::routes())
        .merge(trace::routes())
        .merge(vsock::routes())
        .merge(taps::routes())
        .merge(ports::routes())
        .merge(identities::routes())
        .merge(health::routes())
        .merge(metrics::routes())
        .merge(openapi::routes())
}

async fn unknown_path(uri: Uri) -> Failure {
    Failure::new(
        ErrorCode::NotFound,
        format!(
            "there is no path {}: GET /v1/openapi.json lists all",
            uri.path()
        ),
    )
}

async fn unknown_method(method: Method, uri: Uri) -> Failure {
    Failure::new(
        ErrorCode::InvalidRequest,
        format!("{} has no method {method}", uri.path()),
    )
    .with_status(axum::http::StatusCode::METHOD_NOT_ALLOWED)
}

/// Numbers, logs and counts a request, and writes the body of an error.
async fn answer(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = app.next_request_id();
    let method = request.method().clone();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let caller = request.extensions().get::<Peer>().map(|peer| peer.0);
    let path = log::beginning(request.uri().path());
    let method_said = log::beginning(method.as_str());
    let uid = caller.map(|caller| caller.uid);
    let span = tracing::info_span!("request", %id, method = method_said, path, uid);

    let mut response = next.run(request).instrument(span.clone()).await;
    let failure = response.extensions_mut().remove::<Failure>();
    if let Some(failure) = failure {
        span.in_scope(|| log::log(&failure, caller, &app.empty_pools));
        response = error_response(response, failure, &id);
    }
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    let route = route.as_ref().map_or("unknown", MatchedPath::as_str);
    app.traffic
        .count(&method, route, response.status(), started.elapsed());
    response
}

/// Keeps the headers that the answer has, such as `Allow`.
fn error_response(bare: Response, failure: Failure, id: &str) -> Response {
    let (mut parts, _) = bare.into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    parts.headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    if matches!(failure.code, ErrorCode::PoolEmpty | ErrorCode::Unavailable) {
        parts
            .headers
            .insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    let error = ApiError {
        code: failure.code,
        message: failure.message,
        field: failure.field.map(str::to_owned),
        request_id: id.to_owned(),
    };
    let body = serde_json::to_vec(&error).expect("an error has string keys only");
    (parts, body).into_response()
}

/// Has a list of all that there is of something made and written, which takes long where there are ten thousand, away from
/// the threads that serve connections: each would keep acquires waiting for so long.
async fn blocking_list<T: Serialize>(
    list: impl FnOnce() -> Result<Vec<T>, Failure> + Send + 'static,
) -> Result<Response, Failure> {
    blocking(move || Ok(axum::Json(list()?).into_response())).await
}

/// Runs a call that may wait for the kernel, away from the threads that serve connections. Once begun it is carried out,
/// whether or not the caller waits for it, and takes the place of a connection for so long.
async fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let span = tracing::Span::current();
    let place = Place::of_request();
    let call = move || {
        let result = span.in_scope(call);
        drop(place);
        result
    };
    match tokio::task::spawn_blocking(call).await {
        Ok(result) => result,
        Err(error) => Err(Failure::new(
            ErrorCode::Internal,
            format!("the request ended early: {error}"),
        )),
    }
}
