//! The OpenAPI document, `docs/` and the handlers say the same.

use std::{collections::BTreeSet, fs};

use sandwire_api::{
    attach::AttachedState,
    drop_reason::{DropReason, DropReasonText},
    error::ApiError,
    health::Health,
    identity::Identity,
    impairment::{ImpairmentCleared, LeaseImpairment},
    lease::{Lease, LeaseDetail, LeasePolicy, Released},
    policy::{EgressRule, PolicyAction},
    pool::Pool,
    published_port::PublishedPort,
    trace::{Stage, TraceLine, Verdict},
    traffic::LeaseTraffic,
    vsock::{LeaseVsock, LeaseVsockPolicy, VsockConnection},
};
use serde::de::DeserializeOwned;

use super::{failure::status_of, *};
use crate::model::channels::ModelChannels;

/// Has every kind of thing, with captures that end at once.
fn full_lab() -> Lab {
    let channels = ModelChannels::default();
    channels
        .captures_end
        .store(true, std::sync::atomic::Ordering::Relaxed);
    let lab = Lab::with_channels(&model::ebpf_pool("web", 1), Arc::new(channels));
    model::fill(&lab.app.slots, &model::container_pool("boxes", 2));
    lab
}

/// One operation as it is called here.
struct Operation {
    id: &'static str,
    path: &'static str,
    body: Value,
    status: u16,
    /// Whether the answer is of its type.
    parses: fn(&str) -> bool,
}

/// Every operation, in an order in which each succeeds.
fn operations() -> Vec<Operation> {
    let spec = serde_json::to_value(model::pool("extra", 9)).unwrap();
    let acquire = json!({"pool": "web", "name": "a7", "ttl_seconds": 60, "vsock": {}});
    let attach = json!({"pool": "boxes", "name": "b1", "attach": {"netns": "/run/netns/blue"}});
    let port = json!({"protocol": "tcp", "host_port": 8080, "clone_port": 80});
    let operation = |id, path, body, status, parses| Operation {
        id,
        path,
        body,
        status,
        parses,
    };
    let none = Value::Null;
    vec![
        operation("create_pool", "/v1/pools", spec, 201, is::<Pool>),
        operation(
            "list_pools",
            "/v1/pools",
            none.clone(),
            200,
            is::<Vec<Pool>>,
        ),
        operation(
            "show_pool",
            "/v1/pools/extra",
            none.clone(),
            200,
            is::<Pool>,
        ),
        operation(
            "change_pool",
            "/v1/pools/extra",
            json!({"size": 1}),
            200,
            is::<Pool>,
        ),
        operation(
            "delete_pool",
            "/v1/pools/extra",
            none.clone(),
            204,
            str::is_empty,
        ),
        operation("acquire_lease", "/v1/leases", acquire, 201, is::<Lease>),
        operation(
            "list_leases",
            "/v1/leases",
            none.clone(),
            200,
            is::<Vec<Lease>>,
        ),
        operation(
            "show_lease",
            "/v1/leases/a7",
            none.clone(),
            200,
            is::<LeaseDetail>,
        ),
        operation(
            "show_policy",
            "/v1/leases/a7/policy",
            none.clone(),
            200,
            is::<LeasePolicy>,
        ),
        operation(
            "set_policy",
            "/v1/leases/a7/policy",
            json!({"clone_to_clone": true}),
            200,
            is::<LeasePolicy>,
        ),
        operation(
            "reset_policy",
            "/v1/leases/a7/policy",
            none.clone(),
            200,
            is::<LeasePolicy>,
        ),
        operation(
            "list_vsock_channels",
            "/v1/vsock",
            none.clone(),
            200,
            is::<Vec<LeaseVsock>>,
        ),
        operation(
            "list_vsock_connections",
            "/v1/vsock/connections",
            none.clone(),
            200,
            is::<Vec<VsockConnection>>,
        ),
        operation(
            "show_vsock_channel",
            "/v1/leases/a7/vsock",
            none.clone(),
            200,
            is::<LeaseVsock>,
        ),
        operation(
            "list_lease_vsock_connections",
            "/v1/leases/a7/vsock/connections",
            none.clone(),
            200,
            is::<Vec<VsockConnection>>,
        ),
        operation(
            "show_vsock_policy",
            "/v1/leases/a7/vsock/policy",
            none.clone(),
            200,
            is::<LeaseVsockPolicy>,
        ),
        operation(
            "set_vsock_policy",
            "/v1/leases/a7/vsock/policy",
            json!({"rules": [{"port": "1024", "to": {"kind": "host"}}]}),
            200,
            is::<LeaseVsockPolicy>,
        ),
        operation(
            "add_vsock_rule",
            "/v1/leases/a7/vsock/policy",
            json!({"port": "1025", "to": {"kind": "host"}}),
            200,
            is::<LeaseVsockPolicy>,
        ),
        operation(
            "reset_vsock_policy",
            "/v1/leases/a7/vsock/policy",
            none.clone(),
            200,
            is::<LeaseVsockPolicy>,
        ),
        operation(
            "capture_vsock",
            "/v1/leases/a7/vsock/capture",
            none.clone(),
            200,
            |bytes| !bytes.is_empty(),
        ),
        operation(
            "list_identities",
            "/v1/identities",
            none.clone(),
            200,
            is::<Vec<Identity>>,
        ),
        // Where no service for it runs.
        operation(
            "set_impairment",
            "/v1/leases/a7/impairment",
            json!({"rule": [{"delay": "50ms"}]}),
            503,
            is::<ApiError>,
        ),
        operation(
            "show_impairment",
            "/v1/leases/a7/impairment",
            none.clone(),
            200,
            is::<LeaseImpairment>,
        ),
        operation(
            "clear_impairment",
            "/v1/leases/a7/impairment",
            none.clone(),
            200,
            is::<ImpairmentCleared>,
        ),
        operation(
            "list_traffic",
            "/v1/traffic",
            none.clone(),
            200,
            is::<Vec<LeaseTraffic>>,
        ),
        operation(
            "list_drop_reasons",
            "/v1/drop-reasons",
            none.clone(),
            200,
            is::<Vec<DropReasonText>>,
        ),
        operation(
            "trace_lease",
            "/v1/leases/a7/trace",
            none.clone(),
            200,
            |text| text.lines().all(is::<TraceLine>),
        ),
        operation(
            "open_taps",
            "/v1/leases/a7/taps",
            none.clone(),
            426,
            is::<ApiError>,
        ),
        operation(
            "publish_port",
            "/v1/leases/a7/ports",
            port,
            201,
            is::<PublishedPort>,
        ),
        operation(
            "list_lease_ports",
            "/v1/leases/a7/ports",
            none.clone(),
            200,
            is::<Vec<PublishedPort>>,
        ),
        operation(
            "list_ports",
            "/v1/ports",
            none.clone(),
            200,
            is::<Vec<PublishedPort>>,
        ),
        operation(
            "withdraw_port",
            "/v1/leases/a7/ports/tcp/8080",
            none.clone(),
            204,
            str::is_empty,
        ),
        operation(
            "release_lease",
            "/v1/leases/a7",
            none.clone(),
            200,
            is::<Released>,
        ),
        operation("acquire_lease", "/v1/leases", attach, 201, is::<Lease>),
        operation(
            "check_attached",
            "/v1/leases/b1/attached",
            none.clone(),
            200,
            is::<AttachedState>,
        ),
        operation("health", "/healthz", none.clone(), 200, is::<Health>),
        operation("metrics", "/metrics", none.clone(), 200, |text| {
            text.ends_with("# EOF\n")
        }),
        operation("openapi", "/v1/openapi.json", none, 200, is::<Value>),
    ]
}

fn is<T: DeserializeOwned>(text: &str) -> bool {
    serde_json::from_str::<T>(text).is_ok()
}

/// Path, method and description of every operation of the document.
fn described(document: &Value) -> Vec<(String, String, Value)> {
    let paths = document["paths"].as_object().unwrap();
    paths
        .iter()
        .flat_map(|(path, methods)| {
            methods
                .as_object()
                .unwrap()
                .iter()
                .map(|(method, operation)| (path.clone(), method.to_uppercase(), operation.clone()))
        })
        .collect()
}

/// Whether a path has the form of a path of the document, such as `/v1/pools/{pool}`.
fn matches(template: &str, path: &str) -> bool {
    let (template, path): (Vec<_>, Vec<_>) =
        (template.split('/').collect(), path.split('/').collect());
    template.len() == path.len()
        && template
            .iter()
            .zip(path)
            .all(|(left, right)| left.starts_with('{') || *left == right)
}

#[tokio::test]
async fn every_described_operation_is_served_and_answers_as_described() {
    let lab = full_lab();
    *lab.network.is_trace_broken.lock().unwrap() = true;
    let document = lab.get(0, "/v1/openapi.json").await.body;
    let described = described(&document);
    let mut called = BTreeSet::new();
    for operation in operations() {
        let (template, method, description) = described
            .iter()
            .find(|(_, _, description)| description["operationId"] == operation.id)
            .unwrap_or_else(|| panic!("{} is not described", operation.id));
        assert!(
            matches(template, operation.path),
            "{template} {}",
            operation.path
        );
        let answer = lab.call(0, method, operation.path, &operation.body).await;
        assert_eq!(
            answer.status, operation.status,
            "{}: {}",
            operation.id, answer.text
        );
        let response = &description["responses"][answer.status.as_str()];
        assert!(
            response.is_object(),
            "{} does not list {}",
            operation.id,
            answer.status
        );
        assert_eq!(
            response["content"].is_object(),
            !answer.text.is_empty(),
            "{}",
            operation.id
        );
        assert!(
            (operation.parses)(&answer.text),
            "{}: {}",
            operation.id,
            answer.text
        );
        called.insert(operation.id.to_owned());
    }
    let all: BTreeSet<String> = described
        .iter()
        .map(|(_, _, description)| description["operationId"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(all, called);
}

#[tokio::test]
async fn every_described_operation_lists_the_errors_that_it_gives() {
    let lab = Lab::ebpf();
    *lab.network.is_trace_broken.lock().unwrap() = true;
    let document = lab.get(0, "/v1/openapi.json").await.body;
    for operation in operations()
        .iter()
        .filter(|operation| operation.path.starts_with("/v1/"))
    {
        let (_, method, description) = described(&document)
            .into_iter()
            .find(|(_, _, description)| description["operationId"] == operation.id)
            .unwrap();
        if operation.id == "openapi" {
            continue;
        }
        // A stranger, a name that is no name, a name of nothing.
        for (uid, path) in [
            (1003, operation.path.to_owned()),
            (
                0,
                operation.path.replace("a7", "A7").replace("extra", "Extra"),
            ),
            (
                0,
                operation
                    .path
                    .replace("a7", "none")
                    .replace("extra", "none"),
            ),
        ] {
            let answer = lab.call(uid, &method, &path, &operation.body).await;
            if answer.status.is_success() {
                continue;
            }
            let (status, code) = answer.refusal();
            let response = &description["responses"][status.to_string()];
            let words = response["description"].as_str().unwrap_or_default();
            assert!(
                words.contains(code.as_str()),
                "{} {status} {code:?}",
                operation.id
            );
            let schema = &response["content"]["application/json"]["schema"]["$ref"];
            assert_eq!(schema, "#/components/schemas/ApiError");
        }
    }
}

#[tokio::test]
async fn every_error_code_is_described() {
    let lab = Lab::new();
    let document = lab.get(0, "/v1/openapi.json").await.body;
    let listed = &document["components"]["schemas"]["ErrorCode"];
    let page = page("api.md");
    let responses = &document["paths"]["/v1/leases"]["post"]["responses"];
    for code in ErrorCode::ALL {
        let word = code.as_str();
        assert!(
            listed.to_string().contains(&format!("\"{word}\"")),
            "{word}"
        );
        let status = status_of(code);
        assert!(
            page.contains(&format!("| `{word}` | {}", status.as_u16())),
            "{word}"
        );
        let response = responses[status.as_str()]["description"].as_str().unwrap();
        assert!(response.contains(&format!("`{word}`")), "{word}");
    }
}

#[tokio::test]
async fn every_reference_of_the_document_leads_somewhere() {
    let lab = Lab::new();
    let answer = lab.get(0, "/v1/openapi.json").await;
    let schemas = answer.body["components"]["schemas"].as_object().unwrap();
    let references: BTreeSet<&str> = answer
        .text
        .split('"')
        .filter_map(|part| part.strip_prefix("#/components/schemas/"))
        .collect();
    assert!(references.contains("PoolSpec"));
    for name in references {
        assert!(schemas.contains_key(name), "{name} is not described");
    }
}

#[tokio::test]
async fn the_pages_name_every_operation_metric_and_key() {
    let lab = full_lab();
    let body = json!({"pool": "web", "name": "a", "vsock": {}});
    lab.call(0, "POST", "/v1/leases", &body).await;
    let document = lab.get(0, "/v1/openapi.json").await.body;
    let api = page("api.md");
    for (path, method, _) in described(&document) {
        assert!(
            api.contains(&format!("| `{method} {path}` |")),
            "{method} {path}"
        );
    }

    let metrics = page("metrics.md");
    let text = lab.get(0, "/metrics").await.text;
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        assert!(
            metrics.contains(&format!("| `{name}{suffix}` | {kind} |")),
            "{line}"
        );
    }

    let configure = page("configure.md");
    let mut spec = model::pool("x", 1);
    spec.policy.egress.rules = vec![EgressRule {
        action: PolicyAction::Deny,
        prefixes: Vec::new(),
        ports: Vec::new(),
    }];
    for key in keys(&serde_json::to_value(spec).unwrap()) {
        assert!(configure.contains(&format!("`{key}`")), "{key}");
    }
}

/// Names of all fields, at any depth.
fn keys(value: &Value) -> Vec<String> {
    match value {
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(name, value)| [vec![name.clone()], keys(value)].concat())
            .filter(|name| {
                ![
                    "access",
                    "addresses",
                    "guest",
                    "policy",
                    "tap",
                    "egress",
                    "ingress",
                    "limits",
                ]
                .contains(&name.as_str())
            })
            .collect(),
        Value::Array(items) => items.iter().flat_map(keys).collect(),
        _ => Vec::new(),
    }
}

fn page(name: &str) -> String {
    fs::read_to_string(format!("{}/../../docs/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

#[test]
fn the_page_of_drop_reasons_has_each_with_its_meaning_and_no_other() {
    let page = page("drop-reasons.md");
    let rows: Vec<&str> = page
        .lines()
        .filter(|line| line.starts_with("| `"))
        .collect();
    let expected: Vec<String> = DropReason::ALL
        .iter()
        .map(|reason| format!("| `{}` | {} |", reason.name(), reason.text()))
        .collect();
    for (row, expected) in rows.iter().zip(&expected) {
        assert!(
            row.starts_with(expected.as_str()),
            "{row}\nmust begin\n{expected}"
        );
    }
    assert_eq!(rows.len(), expected.len());
}

#[test]
fn the_page_of_traces_has_each_verdict_and_stage() {
    let page = page("trace.md");
    let verdicts = Verdict::ALL.iter().map(|verdict| verdict.as_str());
    let stages = Stage::ALL.iter().map(|stage| stage.as_str());
    for word in verdicts.chain(stages) {
        assert!(page.contains(&format!("\n| `{word}` | ")), "{word}");
    }
}
