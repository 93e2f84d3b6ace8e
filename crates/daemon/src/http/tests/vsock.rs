//! vsock channels over HTTP: whose they are, who may change what, and what is streamed.

use super::*;
use crate::model::channels::ModelChannels;

struct VsockLab {
    lab: Lab,
    service: Arc<ModelChannels>,
}

impl VsockLab {
    fn new() -> Self {
        let service = Arc::new(ModelChannels::default());
        let lab = Lab::with_channels(&model::pool("web", 1), service.clone());
        Self { lab, service }
    }

    fn restart(self, before: impl FnOnce(&Slots)) -> Self {
        let Self { lab, service } = self;
        let lab = lab.restart(service.clone(), before);
        Self { lab, service }
    }

    async fn acquire(&self, uid: u32, name: &str, vsock: &Value) -> Answer {
        let body = json!({"pool": "web", "name": name, "vsock": vsock});
        self.lab.call(uid, "POST", "/v1/leases", &body).await
    }
}

fn rule(to: &Value) -> Value {
    json!({"rules": [{"port": "1024", "to": to}]})
}

#[tokio::test]
async fn a_lease_has_a_channel_if_it_asks_for_one() {
    let VsockLab { lab, service } = &VsockLab::new();
    let plain = lab.acquire(1000, "plain").await;
    assert_eq!(plain.body["vsock"], Value::Null);
    let error = lab.get(1000, "/v1/leases/plain/vsock").await.refusal();
    assert_eq!(error, (404, ErrorCode::NotFound));

    let body = json!({"pool": "web", "name": "a", "vsock": {"cid": 7}});
    let lease = lab.call(1000, "POST", "/v1/leases", &body).await;
    assert_eq!(lease.status, StatusCode::CREATED, "{}", lease.text);
    let slot = lease.body["slot"].as_u64().unwrap();
    let socket = format!("/run/sandwire/vsock/web.{slot}/vsock.sock");
    assert_eq!(lease.body["vsock"]["socket"], socket);
    assert_eq!(lease.body["vsock"]["cid"], 7);
    let shown = lab.get(1000, "/v1/leases/a/vsock").await;
    assert_eq!(shown.body["channel"], lease.body["vsock"]);
    assert_eq!(shown.body["traffic"]["egress_bytes"], 1000);
    let detail = lab.get(1000, "/v1/leases/a").await;
    assert_eq!(detail.body["vsock_traffic"]["opened_by_guest"], 3);

    service
        .is_down
        .store(true, std::sync::atomic::Ordering::Relaxed);
    let detail = lab.get(1000, "/v1/leases/a").await;
    assert_eq!(detail.body["vsock_traffic"], Value::Null);
    let body = json!({"pool": "web", "name": "b", "vsock": {}});
    let refused = lab.call(1000, "POST", "/v1/leases", &body).await;
    assert_eq!(refused.refusal(), (503, ErrorCode::Unavailable));
    let error = lab.get(1000, "/v1/leases/b").await.refusal();
    assert_eq!(error, (404, ErrorCode::NotFound));
}

#[tokio::test]
async fn where_vsock_is_not_enabled_a_channel_is_refused_with_what_to_do() {
    let lab = Lab::new();
    let body = json!({"pool": "web", "name": "a", "vsock": {}});
    let refused = lab.call(1000, "POST", "/v1/leases", &body).await;
    assert_eq!(refused.refusal(), (422, ErrorCode::Unsupported));
    assert!(refused.text.contains("enabled = true"), "{}", refused.text);
    assert!(lab.get(0, "/v1/leases").await.names().is_empty());
}

#[tokio::test]
async fn tenants_see_their_own_channels_and_connections() {
    let lab = VsockLab::new();
    lab.acquire(1000, "a", &json!({})).await;
    lab.acquire(1001, "b", &json!({})).await;
    let lab = &lab.lab;
    for (uid, count) in [(1000, 1), (1001, 1), (1002, 2), (0, 2), (1003, 0)] {
        for path in ["/v1/vsock", "/v1/vsock/connections"] {
            let found = lab.get(uid, path).await;
            let list = found.body.as_array().unwrap();
            assert_eq!(list.len(), count, "{path} for user {uid}");
        }
    }
    for path in [
        "/v1/leases/b/vsock?owner_uid=1001",
        "/v1/leases/b/vsock/connections?owner_uid=1001",
        "/v1/leases/b/vsock/policy?owner_uid=1001",
        "/v1/leases/b/vsock/capture?owner_uid=1001",
    ] {
        let error = lab.get(1000, path).await.refusal();
        assert_eq!(error, (404, ErrorCode::NotFound), "{path}");
    }
    let found = lab
        .get(1002, "/v1/leases/b/vsock/connections?owner_uid=1001")
        .await;
    assert_eq!(found.body[0]["lease"], "b");
}

#[tokio::test]
async fn an_owner_may_change_its_policy_except_towards_the_host() {
    let lab = VsockLab::new();
    lab.acquire(1000, "a", &json!({})).await;
    let lab = &lab.lab;
    let path = "/v1/leases/a/vsock/policy";
    let own = rule(&json!({"kind": "host"}));
    let set = lab.call(1000, "PUT", path, &own).await;
    assert_eq!(set.body["own"], true, "{}", set.text);
    assert_eq!(set.body["policy"]["rules"][0]["port"], "1024");
    let tcp = rule(&json!({"kind": "tcp", "address": "127.0.0.1:80"}));
    let refused = lab.call(1000, "PUT", path, &tcp).await.refusal();
    assert_eq!(refused, (403, ErrorCode::Forbidden));
    let relative = rule(&json!({"kind": "unix", "path": "x"}));
    let refused = lab.call(0, "PUT", path, &relative).await.refusal();
    assert_eq!(refused.0, 404, "root has no lease of that name");
    let path_of_1000 = "/v1/leases/a/vsock/policy?owner_uid=1000";
    let refused = lab.call(0, "PUT", path_of_1000, &relative).await.refusal();
    assert_eq!(refused, (400, ErrorCode::InvalidRequest));
    // Who manages the pool needs root to have named it; it may be the daemon's own socket.
    let refused = lab.call(1002, "PUT", path_of_1000, &tcp).await.refusal();
    assert_eq!(refused, (403, ErrorCode::Forbidden));
    let listed = rule(&json!({"kind": "unix", "path": "/run/log.sock"}));
    for (uid, policy) in [(1002, &listed), (0, &tcp)] {
        let set = lab.call(uid, "PUT", path_of_1000, policy).await;
        assert_eq!(set.status, StatusCode::OK, "{}", set.text);
    }
    let reset = lab.call(1000, "DELETE", path, &Value::Null).await;
    assert_eq!(reset.body, json!({"own": false, "policy": {"rules": []}}));
}

#[tokio::test]
async fn a_pools_policy_changes_for_all_its_leases() {
    let lab = VsockLab::new();
    lab.acquire(1000, "a", &json!({})).await;
    let lab = &lab.lab;
    let change = json!({"vsock": rule(&json!({"kind": "unix", "path": "/run/log.sock"}))});
    let changed = lab.call(1002, "PATCH", "/v1/pools/web", &change).await;
    assert_eq!(changed.status, StatusCode::OK, "{}", changed.text);
    let policy = lab.get(1000, "/v1/leases/a/vsock/policy").await;
    assert_eq!(policy.body["own"], false);
    let to = &policy.body["policy"]["rules"][0]["to"];
    assert_eq!(to["path"], "/run/log.sock");
    let change =
        json!({"vsock": rule(&json!({"kind": "unix", "path": "/run/sandwire/sandwire.sock"}))});
    let refused = lab.call(1002, "PATCH", "/v1/pools/web", &change).await;
    assert_eq!(refused.refusal(), (403, ErrorCode::Forbidden));
}

/// The answer's body of a capture of a lease of one user.
async fn capture(lab: &VsockLab) -> Body {
    lab.acquire(1000, "a", &json!({})).await;
    let lab = &lab.lab;
    let mut request = Request::builder()
        .uri("/v1/leases/a/vsock/capture?snap_bytes=96")
        .body(Body::empty())
        .unwrap();
    let caller = Caller {
        uid: 1000,
        gid: 1000,
        privileged: false,
    };
    request.extensions_mut().insert(Peer(caller));
    let response = lab.router.clone().oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    response.into_body()
}

#[tokio::test]
async fn a_capture_is_streamed_until_the_reader_goes() {
    let lab = VsockLab::new();
    let mut body = capture(&lab).await;
    let chunk = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(chunk.len(), 96);
    drop(body);
}

#[tokio::test]
async fn a_capture_ends_in_good_order_only_with_its_channel() {
    for breaks in [false, true] {
        let lab = VsockLab::new();
        lab.service.captures_end.store(true, Ordering::Relaxed);
        lab.service.captures_break.store(breaks, Ordering::Relaxed);
        let whole = capture(&lab).await.collect().await;
        assert_eq!(whole.is_err(), breaks);
    }
}

#[tokio::test]
async fn a_capture_that_the_daemon_ends_is_broken_off() {
    let lab = VsockLab::new();
    let body = capture(&lab).await;
    lab.lab.app.traces.stop();
    assert!(body.collect().await.is_err());
}

#[tokio::test]
async fn sums_of_channels_begin_anew_with_the_daemon_and_what_there_is_is_told() {
    let lab = VsockLab::new();
    lab.acquire(1000, "a", &json!({})).await;
    let next = lab.restart(|_| {});
    let text = next.lab.get(0, "/metrics").await.text;
    for line in [
        "sandwire_vsock_bytes_total{pool=\"web\",class=\"guest_to_host\",direction=\"egress\"} 0",
        "sandwire_vsock_opened_total{pool=\"web\",class=\"guest_to_host\",by=\"guest\"} 0",
        "sandwire_vsock_connections{pool=\"web\",class=\"guest_to_host\"} 1",
        "sandwire_lease_vsock_bytes_total{pool=\"web\",owner=\"1000\",lease=\"a\",class=\"guest_to_host\",direction=\"egress\"} 1000",
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
}

#[tokio::test]
async fn what_a_channel_had_carried_that_is_closed_at_the_start_is_not_new() {
    let lab = VsockLab::new();
    lab.acquire(0, "a", &json!({})).await;
    lab.acquire(0, "b", &json!({})).await;
    let next = lab.restart(|slots| {
        let name = "a".parse().unwrap();
        slots.release(ROOT, None, &name).unwrap();
    });
    let line =
        "sandwire_vsock_bytes_total{pool=\"web\",class=\"guest_to_host\",direction=\"egress\"}";
    let text = next.lab.get(0, "/metrics").await.text;
    assert!(text.contains(&format!("{line} 0\n")), "{text}");
    // All that another lease by this name has carried is.
    next.acquire(0, "a", &json!({})).await;
    let text = next.lab.get(0, "/metrics").await.text;
    assert!(text.contains(&format!("{line} 1000\n")), "{text}");
}

#[tokio::test]
async fn a_lease_is_not_taken_for_one_of_before_by_its_name() {
    let lab = VsockLab::new();
    lab.acquire(0, "a", &json!({})).await;
    let set_down = |service: &ModelChannels, is_down| {
        service
            .is_down
            .store(is_down, std::sync::atomic::Ordering::Relaxed);
    };
    set_down(&lab.service, true);
    // Nobody can tell what its channel had carried.
    let next = lab.restart(|slots| {
        let name = "a".parse().unwrap();
        slots.release(ROOT, None, &name).unwrap();
    });
    set_down(&next.service, false);
    let acquired = next.acquire(0, "a", &json!({})).await;
    assert_eq!(acquired.status, StatusCode::CREATED, "{}", acquired.text);
    let text = next.lab.get(0, "/metrics").await.text;
    let line = "sandwire_vsock_bytes_total{pool=\"web\",class=\"guest_to_host\",direction=\"egress\"} 1000\n";
    assert!(text.contains(line), "{text}");
}

#[tokio::test]
async fn metrics_have_the_channels_of_pools_and_leases() {
    let lab = VsockLab::new();
    let before = lab.lab.get(0, "/metrics").await.text;
    assert!(!before.contains("vsock"), "without channels no figures");
    lab.acquire(1000, "a", &json!({})).await;
    lab.acquire(1000, "b", &json!({})).await;
    let text = lab.lab.get(0, "/metrics").await.text;
    for line in [
        "sandwire_vsock_bytes_total{pool=\"web\",class=\"guest_to_host\",direction=\"egress\"} 2000",
        "sandwire_vsock_refused_total{pool=\"web\",reason=\"policy\"} 4",
        "sandwire_vsock_opened_total{pool=\"web\",class=\"guest_to_host\",by=\"guest\"} 6",
        "sandwire_vsock_connections{pool=\"web\",class=\"guest_to_host\"} 2",
        "sandwire_lease_vsock_bytes_total{pool=\"web\",owner=\"1000\",lease=\"a\",class=\"guest_to_host\",direction=\"egress\"} 1000",
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
    lab.lab
        .call(1000, "DELETE", "/v1/leases/b", &Value::Null)
        .await;
    let text = lab.lab.get(0, "/metrics").await.text;
    assert!(text.contains(
        "sandwire_vsock_bytes_total{pool=\"web\",class=\"guest_to_host\",direction=\"egress\"} 2000"
    ));
    assert!(text.contains("sandwire_vsock_connections{pool=\"web\",class=\"guest_to_host\"} 1"));
}
