//! Handlers without a socket: what the document says is what is served, and to whom.

mod datapath;
mod documents;
mod impairment;
mod vsock;

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode},
};
use http_body_util::BodyExt;
use sandwire_slot::service::Caller;
use serde_json::{Value, json};
use tempfile::TempDir;
use tower::ServiceExt;

use super::*;
use crate::model::{self, ModelNetwork};

const ROOT: Caller = Caller {
    uid: 0,
    gid: 0,
    privileged: true,
};

struct Lab {
    app: Arc<App>,
    router: Router,
    network: Arc<ModelNetwork>,
    _folder: TempDir,
}

struct Answer {
    status: StatusCode,
    body: Value,
    text: String,
}

impl Lab {
    /// Has a pool `web` of four slots with the nft data path.
    fn new() -> Self {
        Self::with_pool(&model::pool("web", 1))
    }

    /// Has a pool `web` of four slots with the eBPF data path and two interfaces each.
    fn ebpf() -> Self {
        Self::with_pool(&model::ebpf_pool("web", 1))
    }

    fn with_pool(spec: &sandwire_api::pool::PoolSpec) -> Self {
        Self::with_channels(spec, Arc::new(sandwire_slot::channel::NoChannels))
    }

    fn with_channels(
        spec: &sandwire_api::pool::PoolSpec,
        channels: Arc<dyn sandwire_slot::channel::Channels>,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (slots, network) = model::open_with(folder.path(), channels);
        model::fill(&slots, spec);
        let app = App::new(slots, true);
        Self {
            router: router(Arc::clone(&app)),
            app,
            network,
            _folder: folder,
        }
    }

    /// The next daemon. What is done with the slots before anybody asks for anything, comes before that.
    fn restart(
        self,
        channels: Arc<dyn sandwire_slot::channel::Channels>,
        before: impl FnOnce(&Slots),
    ) -> Self {
        self.app.slots.shutdown();
        let folder = self._folder;
        drop((self.app, self.router));
        let slots = model::open_on(folder.path(), self.network.clone(), channels);
        before(&slots);
        let app = App::new(slots, true);
        Self {
            router: router(Arc::clone(&app)),
            app,
            network: self.network,
            _folder: folder,
        }
    }

    async fn call(&self, uid: u32, method: &str, path: &str, body: &Value) -> Answer {
        let body = match body {
            Value::Null => Body::empty(),
            Value::String(text) => Body::from(text.clone()),
            other => Body::from(other.to_string()),
        };
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .body(body)
            .unwrap();
        request.extensions_mut().insert(Peer(Caller {
            uid,
            gid: uid,
            privileged: uid == 0,
        }));
        let response = self.router.clone().oneshot(request).await.unwrap();
        assert!(response.headers().contains_key("x-request-id"));
        let status = response.status();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        Answer {
            status,
            body: serde_json::from_str(&text).unwrap_or_default(),
            text,
        }
    }

    async fn get(&self, uid: u32, path: &str) -> Answer {
        self.call(uid, "GET", path, &Value::Null).await
    }

    async fn acquire(&self, uid: u32, name: &str) -> Answer {
        let body = json!({"pool": "web", "name": name});
        self.call(uid, "POST", "/v1/leases", &body).await
    }
}

impl Answer {
    fn refusal(&self) -> (u16, ErrorCode) {
        let error: ApiError = serde_json::from_str(&self.text).unwrap();
        assert!(!error.message.is_empty() && !error.request_id.is_empty());
        (self.status.as_u16(), error.code)
    }

    fn names(&self) -> Vec<&str> {
        let list = self.body.as_array().unwrap();
        list.iter()
            .map(|item| item["name"].as_str().or(item["spec"]["name"].as_str()))
            .map(Option::unwrap)
            .collect()
    }
}

#[tokio::test]
async fn a_refusal_says_which_field_is_to_blame() {
    let lab = Lab::new();
    let body = json!({"pool": "web", "clone_address": "192.0.2.1"});
    let refused = lab.call(1000, "POST", "/v1/leases", &body).await;
    assert_eq!(refused.refusal(), (400, ErrorCode::InvalidRequest));
    assert_eq!(refused.body["field"], "clone_address");
    let message = refused.body["message"].as_str().unwrap();
    assert!(message.contains("clone_address = 192.0.2.1"), "{message}");
    let none = lab.get(1000, "/v1/leases/a7").await;
    assert_eq!(none.refusal(), (404, ErrorCode::NotFound));
    assert!(none.body.get("field").is_none(), "{}", none.text);
}

#[tokio::test]
async fn asking_again_gives_the_same_lease_with_another_status() {
    let lab = Lab::new();
    let first = lab.acquire(1000, "a7").await;
    let second = lab.acquire(1000, "a7").await;
    assert_eq!(
        (first.status, second.status),
        (StatusCode::CREATED, StatusCode::OK)
    );
    assert_eq!(first.body, second.body);
    assert_eq!(first.body["owner_uid"], 1000);
}

#[tokio::test]
async fn a_tenant_sees_and_releases_its_own_leases_only() {
    let lab = Lab::new();
    let ours = lab.acquire(1000, "a").await;
    let theirs = lab.acquire(1001, "a").await;
    assert_eq!(theirs.status, StatusCode::CREATED, "{}", theirs.text);
    assert_ne!(ours.body["slot"], theirs.body["slot"]);
    lab.acquire(1001, "b").await;

    assert_eq!(lab.get(1000, "/v1/leases").await.names(), ["a"]);
    assert_eq!(lab.get(1001, "/v1/leases").await.names(), ["a", "b"]);
    let mine = lab.get(1000, "/v1/leases/a").await;
    assert_eq!(mine.body["slot"], ours.body["slot"]);
    for (method, path) in [
        ("GET", "/v1/leases/b"),
        ("GET", "/v1/leases/b?owner_uid=1001"),
        ("DELETE", "/v1/leases/b?owner_uid=1001"),
        ("DELETE", "/v1/leases/a?owner_uid=1001"),
        ("GET", "/v1/leases/a/ports?owner_uid=1001"),
    ] {
        let answer = lab.call(1000, method, path, &Value::Null).await;
        let (status, _) = answer.refusal();
        assert!(
            [403, 404].contains(&status),
            "{method} {path}: {}",
            answer.text
        );
    }
    assert_eq!(lab.get(1001, "/v1/leases").await.names(), ["a", "b"]);
}

#[tokio::test]
async fn root_and_a_pools_manager_see_and_release_all_leases() {
    let lab = Lab::new();
    for uid in [0, 1002] {
        lab.acquire(1000, "a").await;
        assert_eq!(lab.get(uid, "/v1/leases").await.names(), ["a"]);
        let path = "/v1/leases/a?owner_uid=1000";
        let answer = lab.call(uid, "DELETE", path, &Value::Null).await;
        assert_eq!(answer.body["outcome"], "released", "{}", answer.text);
        assert_eq!(lab.get(uid, "/v1/leases").await.names(), [""; 0]);
    }
}

#[tokio::test]
async fn pools_are_for_those_who_are_granted_them() {
    let lab = Lab::new();
    let size = json!({"size": 3});
    // Root, user, acquirer, manager, stranger.
    for (uid, list, show, resize) in [
        (0, 1, 200, 200),
        (1000, 1, 200, 403),
        (1001, 0, 403, 403),
        (1002, 1, 200, 200),
        (1003, 0, 404, 404),
    ] {
        assert_eq!(
            lab.get(uid, "/v1/pools").await.names().len(),
            list,
            "user {uid}"
        );
        assert_eq!(
            lab.get(uid, "/v1/pools/web").await.status,
            show,
            "user {uid}"
        );
        let answer = lab.call(uid, "PATCH", "/v1/pools/web", &size).await;
        assert_eq!(answer.status, resize, "user {uid}");
    }
    for uid in [1000, 1003] {
        let spec = serde_json::to_value(model::pool("other", 2)).unwrap();
        let answer = lab.call(uid, "POST", "/v1/pools", &spec).await;
        assert_eq!(answer.refusal(), (403, ErrorCode::Forbidden));
        let answer = lab.call(uid, "DELETE", "/v1/pools/web", &Value::Null).await;
        assert!(!answer.status.is_success());
    }
    let answer = lab.acquire(1003, "a").await;
    assert!([403, 404].contains(&answer.refusal().0));
    assert_eq!(lab.get(0, "/v1/pools").await.names(), ["web"]);
}

#[tokio::test]
async fn who_may_use_a_pool_is_for_root_to_change_and_for_all_leases_to_outlive() {
    let lab = Lab::new();
    lab.acquire(1000, "a").await;
    let path = "/v1/pools/web";
    let nobody = json!({"access": [], "size": 1});
    let answer = lab.call(1002, "PATCH", path, &nobody).await;
    assert_eq!(answer.refusal(), (403, ErrorCode::Forbidden));
    assert_ne!(lab.get(0, path).await.body["spec"]["size"], 1);
    let rest = json!({"quarantine_seconds": 77});
    assert_eq!(lab.call(1002, "PATCH", path, &rest).await.status, 200);
    assert_eq!(lab.call(0, "PATCH", path, &nobody).await.status, 200);
    let spec = &lab.get(0, path).await.body["spec"];
    assert_eq!(
        (&spec["access"], &spec["quarantine_seconds"], &spec["size"]),
        (&json!([]), &json!(77), &json!(1))
    );
    assert!(!lab.acquire(1000, "b").await.status.is_success());
    assert_eq!(lab.call(1002, "PATCH", path, &rest).await.status, 404);
    assert_eq!(lab.get(1000, "/v1/leases").await.names(), ["a"]);
}

#[tokio::test]
async fn a_held_slot_is_told_with_its_holder() {
    let lab = Lab::new();
    lab.acquire(1000, "a").await;
    *lab.network.is_held.lock().unwrap() = true;
    let answer = lab.call(1000, "DELETE", "/v1/leases/a", &Value::Null).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.body["outcome"], "held");
    assert_eq!(answer.body["held_by"][0]["command"], "firecracker");
}

#[tokio::test]
async fn bad_input_is_refused_with_its_place_and_changes_nothing() {
    let lab = Lab::new();
    for (method, path, body, status, words) in [
        ("POST", "/v1/leases", "{\"pool\":", 400, "line 1 column 8"),
        ("POST", "/v1/leases", "{\n\"pol\": 1}", 400, "line 2"),
        ("POST", "/v1/leases", "", 400, "EOF"),
        (
            "POST",
            "/v1/leases",
            "{\"pool\":\"../x\"}",
            400,
            "not a valid name",
        ),
        ("POST", "/v1/leases", "{\"pool\":\"absent\"}", 404, "absent"),
        ("POST", "/v1/pools", "{\"name\":\"x\"}", 400, "addresses"),
        ("GET", "/v1/leases/none", "", 404, "none"),
        ("DELETE", "/v1/leases/none", "", 404, "none"),
        ("GET", "/v1/leases/A", "", 400, "not a valid name"),
        ("GET", "/v1/leases/a?owner=1", "", 400, "owner"),
        ("GET", "/v1/leases/a?owner_uid=x", "", 400, "owner_uid"),
        ("DELETE", "/v1/leases/a/ports/sctp/80", "", 400, "sctp"),
        ("DELETE", "/v1/leases/a/ports/tcp/70000", "", 400, "70000"),
        ("GET", "/v1/pools/none", "", 404, "none"),
        ("PATCH", "/v1/pools/web", "{\"size\":-1}", 400, "line 1"),
        ("GET", "/v2", "", 404, "/v2"),
        ("GET", "/", "", 404, "openapi.json"),
        ("PUT", "/v1/pools", "", 405, "PUT"),
        ("BREW", "/healthz", "", 405, "BREW"),
    ] {
        let body = Value::String(body.to_owned());
        let answer = lab.call(0, method, path, &body).await;
        let (got, _) = answer.refusal();
        assert_eq!(got, status, "{method} {path}: {}", answer.text);
        assert!(
            answer.text.contains(words),
            "{method} {path}: {}",
            answer.text
        );
    }
    assert_eq!(lab.get(0, "/v1/leases").await.names(), [""; 0]);
    assert_eq!(lab.get(0, "/v1/pools").await.names(), ["web"]);
}

#[tokio::test]
async fn a_body_at_the_limit_is_read_and_one_beyond_is_not() {
    let lab = Lab::new();
    for (uid, size, status) in [
        (1000, extract::BODY_BYTES_MAX, 400),
        (1000, extract::BODY_BYTES_MAX + 1, 413),
        (0, extract::BODY_BYTES_MAX + 1, 400),
        (0, extract::BODY_BYTES_MAX_ROOT, 400),
        (0, extract::BODY_BYTES_MAX_ROOT + 1, 413),
        (0, 10 << 20, 413),
    ] {
        let body = Value::String(" ".repeat(size));
        let answer = lab.call(uid, "POST", "/v1/leases", &body).await;
        assert_eq!(
            answer.refusal(),
            (status, ErrorCode::InvalidRequest),
            "{size}"
        );
    }
}

#[tokio::test]
async fn a_wrong_method_names_the_right_ones() {
    let lab = Lab::new();
    let mut request = Request::put("/v1/pools").body(Body::empty()).unwrap();
    request.extensions_mut().insert(Peer(Caller {
        uid: 0,
        gid: 0,
        privileged: true,
    }));
    let response = lab.router.clone().oneshot(request).await.unwrap();
    let allowed = response.headers()["allow"].to_str().unwrap();
    assert!(
        allowed.contains("GET") && allowed.contains("POST"),
        "{allowed}"
    );
}

#[tokio::test]
async fn a_pool_of_the_configuration_that_is_missing_keeps_the_daemon_from_being_ready() {
    let lab = Lab::new();
    assert_eq!(lab.get(1003, "/healthz").await.status, StatusCode::OK);
    let mut problem = Problem {
        subject: "pool x".to_owned(),
        message: "in the way".to_owned(),
        blocking: true,
    };
    lab.app.set_problems(vec![problem.clone()]);
    let answer = lab.get(1003, "/healthz").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.body["problems"][0]["subject"], "pool x");
    problem.blocking = false;
    lab.app.set_problems(vec![problem]);
    assert_eq!(lab.get(1003, "/healthz").await.status, StatusCode::OK);
}

#[tokio::test]
async fn which_lease_is_in_the_way_of_the_configuration_is_told_to_root_alone() {
    let lab = Lab::ebpf();
    lab.acquire(1001, "secret").await;
    let path = "/v1/leases/secret/policy?owner_uid=1001";
    let set = lab.call(0, "PUT", path, &json!({"route_mark": 7})).await;
    assert_eq!(set.status, StatusCode::OK, "{}", set.text);
    let mut web = model::ebpf_pool("web", 1);
    web.policy.uplink = sandwire_api::pool::UplinkPolicy::Deny;
    crate::run::ensure_pools(&lab.app, &[web]);
    for (uid, is_told) in [(0, true), (1000, false), (1003, false)] {
        let answer = lab.get(uid, "/healthz").await;
        let problem = &answer.body["problems"][0];
        assert_eq!(problem["subject"], "pool web", "user {uid}");
        assert_eq!(problem["blocking"], false, "user {uid}");
        assert_eq!(answer.text.contains("secret"), is_told, "{}", answer.text);
    }
}

#[tokio::test]
async fn an_identity_of_the_configuration_that_cannot_be_is_told_to_root_alone() {
    let lab = Lab::new();
    let text = "[[identity]]\nname = \"secret\"\ncgroup = \"/proc\"\naddresses = [\"10.0.0.5\"]\n";
    let config = crate::config::Config::parse(text, "s.toml".as_ref()).unwrap();
    lab.app.identities.declare(config.identities);
    lab.app.identities.look_at_declared();
    for (uid, is_told) in [(0, true), (1000, false)] {
        let answer = lab.get(uid, "/healthz").await;
        assert_eq!(answer.status, StatusCode::OK, "leases don't need it");
        for words in ["identity secret", "not in a cgroup v2"] {
            assert_eq!(answer.text.contains(words), is_told, "{}", answer.text);
        }
    }
    lab.app.identities.declare(Vec::new());
    lab.app.identities.look_at_declared();
    assert!(!lab.get(0, "/healthz").await.text.contains("secret"));
}

#[tokio::test]
async fn metrics_count_requests_by_route_and_not_by_what_callers_make_up() {
    let lab = Lab::new();
    for name in ["a", "b", "c"] {
        lab.get(0, &format!("/v1/leases/{name}")).await;
        lab.call(0, &name.to_uppercase(), "/nowhere", &Value::Null)
            .await;
    }
    let text = lab.get(0, "/metrics").await.text;
    for line in [
        "sandwire_ready 1\n",
        "sandwire_pool_slots{pool=\"web\",state=\"ready\"} 4\n",
        "sandwire_http_requests_total{method=\"GET\",route=\"/v1/leases/{name}\",status=\"404\"} 3\n",
        "sandwire_http_requests_total{method=\"other\",route=\"unknown\",status=\"404\"} 3\n",
        "sandwire_build_duration_seconds_bucket{le=\"+Inf\"} 4\n",
        "# EOF\n",
    ] {
        assert!(text.contains(line), "no {line} in\n{text}");
    }
}
