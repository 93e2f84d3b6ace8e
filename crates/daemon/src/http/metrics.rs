//! `/metrics`: figures for Prometheus, in the OpenMetrics text format. `docs/metrics.md` lists them.
//!
//! What the slot service counts is read at each scrape; only the figures about the API itself are
//! kept here.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::State,
    http::{Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet, text::encode},
    metrics::{
        MetricType,
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
        info::Info,
    },
    registry::{Registry, Unit},
};
use sandwire_api::{error::ErrorCode, pool::SlotCounts};
use sandwire_slot::service::{self, Counters};
use utoipa_axum::{router::OpenApiRouter, routes};

mod channels;
mod identities;
mod impairments;
mod leases;

pub(super) use self::{channels::ChannelTotals, leases::LeaseTotals};
use super::{App, blocking, extract::Peer, failure::Failure};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(show))
}

/// Figures about the API itself.
pub(crate) struct Traffic {
    requests: Family<RequestLabels, Counter>,
    seconds: Family<RouteLabels, Histogram, fn() -> Histogram>,
}

impl Default for Traffic {
    fn default() -> Self {
        Self {
            requests: Family::default(),
            seconds: Family::new_with_constructor(latencies),
        }
    }
}

impl Traffic {
    pub(super) fn count(
        &self,
        method: &Method,
        route: &str,
        status: StatusCode,
        duration: Duration,
    ) {
        let method = known(method);
        let route = route.to_owned();
        self.requests
            .get_or_create(&RequestLabels {
                method,
                route: route.clone(),
                status: status.as_u16(),
            })
            .inc();
        self.seconds
            .get_or_create(&RouteLabels { method, route })
            .observe(duration.as_secs_f64());
    }

    fn register(&self, registry: &mut Registry) {
        registry.register("http_requests", "Requests answered", self.requests.clone());
        registry.register_with_unit(
            "http_request_duration",
            "Time from a request's head to its answer",
            Unit::Seconds,
            self.seconds.clone(),
        );
    }
}

/// From 50 µs, what an acquire costs at best, to 1.6 s.
fn latencies() -> Histogram {
    Histogram::new(exponential_buckets(50e-6, 2.0, 16))
}

/// Callers may invent methods; the number of time series must not grow with that.
fn known(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        _ => "other",
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: &'static str,
    route: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    method: &'static str,
    route: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolLabels {
    pool: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    pool: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabels {
    code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VersionLabels {
    version: &'static str,
    instance: String,
}

/// Figures for Prometheus. For everybody who may connect; those that name a lease or an identity for root alone.
#[utoipa::path(
    get,
    path = "/metrics",
    operation_id = "metrics",
    tag = "daemon",
    responses((
        status = 200,
        description = "Metrics in the OpenMetrics text format",
        body = String,
        content_type = "application/openmetrics-text"
    ))
)]
async fn show(State(app): State<Arc<App>>, Peer(caller): Peer) -> Result<Response, Failure> {
    // The service for vsock is asked too.
    let text = blocking(move || {
        let mut text = String::new();
        encode(&mut text, &registry(&app, caller.privileged)).map_err(|error| {
            Failure::new(
                ErrorCode::Internal,
                format!("cannot write metrics: {error}"),
            )
        })?;
        Ok(text)
    })
    .await?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

/// Everything that is measured, as it is now; with what single leases and identities do, whose names nobody else may
/// learn, if it is for root.
fn registry(app: &App, for_root: bool) -> Registry {
    let mut registry = Registry::with_prefix("sandwire");
    register_daemon(app, &mut registry);
    register_pools(app, &mut registry);
    app.totals.register(&app.slots, for_root, &mut registry);
    app.channel_totals
        .register(&app.slots, for_root, &mut registry);
    if for_root && app.totals.is_per_lease() {
        impairments::register(&app.impairments, &mut registry);
    }
    if for_root {
        identities::register(&app.identities, &mut registry);
    }
    register_work(&app.slots.counters(), &mut registry);
    app.traffic.register(&mut registry);
    registry
}

fn register_daemon(app: &App, registry: &mut Registry) {
    let health = app.health();
    let ready = Gauge::<i64>::default();
    ready.set(health.ready.into());
    registry.register("ready", "1 if /healthz says ready, else 0", ready);
    let problems = Gauge::<i64>::default();
    problems.set(i64::try_from(health.problems.len()).unwrap_or(i64::MAX));
    registry.register("problems", "Problems that /healthz lists", problems);
    let ports = Gauge::<i64>::default();
    let count = app.slots.published_ports_count();
    ports.set(i64::try_from(count).unwrap_or(i64::MAX));
    registry.register("published_ports", "Published ports of all leases", ports);
    let labels = VersionLabels {
        version: env!("CARGO_PKG_VERSION"),
        instance: health.instance,
    };
    registry.register(
        "daemon",
        "The daemon's version and instance",
        Info::new(labels),
    );
}

fn register_pools(app: &App, registry: &mut Registry) {
    let slots = Family::<StateLabels, Gauge>::default();
    let size = Family::<PoolLabels, Gauge>::default();
    let room = Family::<PoolLabels, Gauge>::default();
    let failing = Family::<PoolLabels, Gauge>::default();
    for pool in app.slots.pool_views() {
        let name = pool.spec().name.to_string();
        for (state, count) in by_state(pool.slots) {
            let labels = StateLabels {
                pool: name.clone(),
                state,
            };
            slots.get_or_create(&labels).set(count.into());
        }
        let labels = PoolLabels { pool: name };
        size.get_or_create(&labels).set(pool.size.into());
        room.get_or_create(&labels).set(pool.slots_max().into());
        failing
            .get_or_create(&labels)
            .set(pool.last_error.is_some().into());
    }
    registry.register("pool_slots", "Slots of a pool in a state", slots);
    registry.register("pool_size_slots", "Slots that a pool keeps ready", size);
    registry.register(
        "pool_room_slots",
        "Slots that a pool's address plan has room for",
        room,
    );
    registry.register(
        "pool_failing",
        "1 if a pool can't be filled at the moment, else 0",
        failing,
    );
}

fn by_state(slots: SlotCounts) -> [(&'static str, u32); 6] {
    [
        ("ready", slots.ready),
        ("building", slots.building),
        ("leased", slots.leased),
        ("held", slots.held),
        ("tearing_down", slots.tearing_down),
        ("quarantined", slots.quarantined),
    ]
}

/// What the slot service has done since the daemon's start.
fn register_work(counters: &Counters, registry: &mut Registry) {
    register_events(counters, registry);
    let refused = Family::<CodeLabels, Counter>::default();
    for (code, count) in &counters.acquires_refused {
        let code = code.as_str();
        refused.get_or_create(&CodeLabels { code }).inc_by(*count);
    }
    registry.register(
        "acquires_refused",
        "Requests for leases that got an error",
        refused,
    );
    register_durations(counters, registry);
}

fn register_events(counters: &Counters, registry: &mut Registry) {
    for (name, help, value) in [
        ("acquires", "Leases handed out", counters.acquires),
        (
            "releases",
            "Leases ended, also by their time to live",
            counters.releases,
        ),
        (
            "releases_held",
            "Releases that found a VMM still running, also by the time to live",
            counters.releases_held,
        ),
        (
            "expiries",
            "Leases whose time to live was over, also where a VMM still runs",
            counters.expiries,
        ),
        ("builds", "Slots built", counters.builds),
        (
            "builds_failed",
            "Slots that could not be built",
            counters.builds_failed,
        ),
        ("tear_downs", "Slots torn down", counters.tear_downs),
        (
            "tear_downs_failed",
            "Tear-downs that failed and were tried again",
            counters.tear_downs_failed,
        ),
        (
            "inspections",
            "Slots looked at by the audit",
            counters.inspections,
        ),
        (
            "defects_found",
            "Defects found in slots and on the host",
            counters.defects_found,
        ),
        (
            "defects_repaired",
            "Of these, repaired",
            counters.defects_repaired,
        ),
        (
            "journal_failures",
            "Writes of the journal that failed",
            counters.journal_failures,
        ),
    ] {
        registry.register(name, help, ConstCounter::new(value));
    }
}

fn register_durations(counters: &Counters, registry: &mut Registry) {
    for (name, help, histogram) in [
        (
            "acquire_duration",
            "Time to hand out a lease, journal included",
            &counters.acquire_seconds,
        ),
        (
            "build_duration",
            "Time to build a slot",
            &counters.build_seconds,
        ),
        (
            "tear_down_batch_duration",
            "Time to tear down a batch of slots",
            &counters.tear_down_batch_seconds,
        ),
    ] {
        registry.register_with_unit(name, help, Unit::Seconds, Durations(histogram.clone()));
    }
}

/// A histogram that the slot service has counted.
#[derive(Debug)]
struct Durations(service::Histogram);

impl EncodeMetric for Durations {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let bounds = service::Histogram::BOUNDS_SECONDS
            .into_iter()
            .chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(self.0.counts).collect();
        encoder.encode_histogram::<NoLabelSet>(self.0.sum_seconds, self.0.count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}
