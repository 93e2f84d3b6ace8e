//! Policies, traffic, traces and open TAPs: who may, and what comes of it.

use std::time::{Duration, Instant};

use sandwire_api::{
    drop_reason::DropReason,
    trace::{Direction, Frame, Stage, TraceLine, TracePacket, Verdict},
    traffic::{Traffic, TrafficTotal},
};
use sandwire_slot::{channel::NoChannels, plan::Plan};
use tokio::time::{sleep, timeout};

use super::*;

fn packet(number: u64) -> TracePacket {
    TracePacket {
        time: number,
        nic: 0,
        direction: Direction::Egress,
        verdict: Verdict::Drop,
        stage: Stage::Policy,
        reason: Some(DropReason::Metadata),
        target: None,
        length: 60,
        segments: 1,
        frame: Frame(vec![2; 60]),
    }
}

fn counted() -> Traffic {
    Traffic {
        egress: TrafficTotal {
            packets: 3,
            bytes: 4000,
            segments: 5,
        },
        ingress: TrafficTotal::default(),
        drops: [(DropReason::Arp, 2)].into(),
    }
}

impl Lab {
    /// The body of a running trace.
    async fn trace(&self, uid: u32, path: &str) -> (StatusCode, Body) {
        let mut request = Request::get(path).body(Body::empty()).unwrap();
        request.extensions_mut().insert(Peer(Caller {
            uid,
            gid: uid,
            privileged: uid == 0,
        }));
        let response = self.router.clone().oneshot(request).await.unwrap();
        (response.status(), response.into_body())
    }
}

/// Lines that come until there are so many.
async fn lines(body: &mut Body, count: usize) -> Vec<TraceLine> {
    let mut text = String::new();
    let read = async {
        while text.lines().count() < count {
            let Some(frame) = body.frame().await else {
                break;
            };
            let data = frame.unwrap().into_data().unwrap();
            text.push_str(std::str::from_utf8(&data).unwrap());
        }
    };
    timeout(Duration::from_secs(60), read).await.unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[tokio::test]
async fn a_policy_is_seen_by_the_holder_and_set_by_the_pools_manager() {
    let lab = Lab::ebpf();
    lab.acquire(1000, "a").await;
    let path = "/v1/leases/a/policy";
    let shown = lab.get(1000, path).await;
    assert_eq!(shown.body["own"], false);
    assert_eq!(shown.body["policy"]["uplink"], "masquerade");

    let policy = json!({"egress": {"default": "deny"}, "limits": {"egress": {"bits_per_second": 1_000_000}}});
    let refused = lab.call(1000, "PUT", path, &policy).await;
    assert_eq!(refused.refusal(), (403, ErrorCode::Forbidden));
    let stranger = lab
        .call(1003, "PUT", "/v1/leases/a/policy?owner_uid=1000", &policy)
        .await;
    assert_eq!(stranger.refusal(), (404, ErrorCode::NotFound));

    let managed = "/v1/leases/a/policy?owner_uid=1000";
    let set = lab.call(1002, "PUT", managed, &policy).await;
    assert_eq!(
        (set.status, &set.body["own"]),
        (StatusCode::OK, &json!(true)),
        "{}",
        set.text
    );
    let detail = lab.get(1000, "/v1/leases/a").await;
    assert_eq!(detail.body["policy"]["egress"]["default"], "deny");
    assert_eq!(detail.body["has_own_policy"], true);
    assert_eq!(detail.body["data_path"], "ebpf");
    let rows = lab.get(1000, "/v1/traffic").await;
    assert_eq!(
        rows.body[0]["limits"]["egress"]["bits_per_second"],
        1_000_000
    );

    let reset = lab.call(1002, "DELETE", managed, &Value::Null).await;
    assert_eq!(reset.body["own"], false);
    assert_eq!(
        lab.get(1000, path).await.body["policy"]["egress"]["default"],
        "allow"
    );
}

#[tokio::test]
async fn a_wrong_policy_changes_nothing() {
    let lab = Lab::ebpf();
    lab.acquire(0, "a").await;
    let path = "/v1/leases/a/policy";
    for (policy, status) in [
        (json!({"egres": {}}), 400),
        (
            json!({"egress": {"rules": [{"action": "deny", "prefixes": ["10.0.0.0/40"]}]}}),
            400,
        ),
        (json!({"limits": {"egress": {"bits_per_second": 1}}}), 400),
        (json!({"host_services": ["tcp/0"]}), 400),
    ] {
        let answer = lab.call(0, "PUT", path, &policy).await;
        assert_eq!(answer.refusal().0, status, "{policy}: {}", answer.text);
        assert_eq!(lab.get(0, path).await.body["own"], false);
    }
    let plain = Lab::new();
    plain.acquire(0, "a").await;
    let answer = plain.call(0, "PUT", path, &json!({})).await;
    assert_eq!(answer.refusal(), (422, ErrorCode::Unsupported));
}

#[tokio::test]
async fn a_pool_changes_its_policy_data_path_and_size() {
    let lab = Lab::new();
    lab.acquire(1000, "a").await;
    let path = "/v1/pools/web";
    let nothing = lab.call(0, "PATCH", path, &json!({})).await;
    assert_eq!(nothing.refusal(), (400, ErrorCode::InvalidRequest));
    let change =
        json!({"data_path": "ebpf", "policy": {"clone_to_clone": true, "group": "g"}, "size": 2});
    let stranger = lab.call(1000, "PATCH", path, &change).await;
    assert_eq!(stranger.refusal(), (403, ErrorCode::Forbidden));
    // Who manages the pool may change all of it but whose sandboxes they are among.
    let manager = lab.call(1002, "PATCH", path, &change).await;
    assert_eq!(manager.refusal(), (403, ErrorCode::Forbidden));
    let without = json!({"policy": {"clone_to_clone": false}});
    let changed = lab.call(1002, "PATCH", path, &without).await;
    assert_eq!(changed.status, StatusCode::OK, "{}", changed.text);
    let changed = lab.call(0, "PATCH", path, &change).await;
    assert_eq!(changed.status, StatusCode::OK, "{}", changed.text);
    let spec = &changed.body["spec"];
    assert_eq!(
        (&spec["data_path"], &spec["policy"]["group"], &spec["size"]),
        (&json!("ebpf"), &json!("g"), &json!(2))
    );
    let policy = lab.get(1000, "/v1/leases/a/policy").await;
    assert_eq!(policy.body["policy"]["clone_to_clone"], true);
    let back = lab
        .call(0, "PATCH", path, &json!({"data_path": "nft"}))
        .await;
    assert!(
        !back.status.is_success(),
        "nft has no groups: {}",
        back.text
    );
    assert_eq!(lab.get(0, path).await.body["spec"]["data_path"], "ebpf");
    let change = json!({"data_path": "nft", "policy": {}});
    // The first move may still be under way.
    let settled = async {
        loop {
            let back = lab.call(0, "PATCH", path, &change).await;
            if back.status != StatusCode::CONFLICT {
                break back;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    let back = timeout(Duration::from_secs(60), settled).await.unwrap();
    assert_eq!(back.status, StatusCode::OK, "{}", back.text);
    assert_eq!(back.body["spec"]["policy"]["group"], Value::Null);
}

#[tokio::test]
async fn traffic_is_told_to_whom_the_lease_is_told() {
    let lab = Lab::ebpf();
    *lab.network.traffic.lock().unwrap() = counted();
    lab.acquire(1000, "a").await;
    lab.acquire(1001, "b").await;
    for (uid, names) in [
        (1000, &["a"][..]),
        (1001, &["b"]),
        (1002, &["a", "b"]),
        (1003, &[]),
    ] {
        let answer = lab.get(uid, "/v1/traffic").await;
        assert_eq!(answer.names(), names, "user {uid}");
    }
    let row = lab.get(1000, "/v1/traffic").await.body[0].clone();
    assert_eq!(row["traffic"]["egress"]["segments"], 5);
    assert_eq!(row["traffic"]["drops"], json!({"arp": 2}));
    let detail = lab.get(1000, "/v1/leases/a").await;
    assert_eq!(detail.body["traffic"]["egress"]["bytes"], 4000);
    let reasons = lab.get(1003, "/v1/drop-reasons").await;
    assert_eq!(
        reasons.body.as_array().unwrap().len(),
        DropReason::ALL.len()
    );
}

#[tokio::test]
async fn metrics_sum_over_a_pool_and_outlast_its_leases() {
    let lab = Lab::ebpf();
    lab.acquire(1000, "a").await;
    lab.acquire(1000, "b").await;
    *lab.network.traffic.lock().unwrap() = counted();
    let text = lab.get(0, "/metrics").await.text;
    for line in [
        "sandwire_pool_packets_total{pool=\"web\",direction=\"egress\"} 6\n",
        "sandwire_pool_bytes_total{pool=\"web\",direction=\"egress\"} 8000\n",
        "sandwire_pool_segments_total{pool=\"web\",direction=\"egress\"} 10\n",
        "sandwire_pool_drops_total{pool=\"web\",reason=\"arp\"} 4\n",
        "sandwire_lease_packets_total{pool=\"web\",owner=\"1000\",lease=\"a\",direction=\"egress\"} 3\n",
        "sandwire_lease_drops_total{pool=\"web\",owner=\"1000\",lease=\"b\",reason=\"arp\"} 2\n",
    ] {
        assert!(text.contains(line), "no {line} in\n{text}");
    }
    // Names of leases are for nobody but root, not even for their owner among all the others'.
    let text = lab.get(1000, "/metrics").await.text;
    assert!(text.contains("sandwire_pool_packets_total{pool=\"web\",direction=\"egress\"} 6\n"));
    assert!(!text.contains("lease="), "{text}");
    // Whatever happens to leases, and looked at or not in between.
    lab.call(1000, "DELETE", "/v1/leases/a", &Value::Null).await;
    let text = lab.get(0, "/metrics").await.text;
    assert!(text.contains("sandwire_pool_packets_total{pool=\"web\",direction=\"egress\"} 6\n"));
    assert!(!text.contains("lease=\"a\""));
    lab.acquire(1000, "c").await;
    lab.call(1000, "DELETE", "/v1/leases/c", &Value::Null).await;
    let text = lab.get(0, "/metrics").await.text;
    assert!(
        text.contains("sandwire_pool_packets_total{pool=\"web\",direction=\"egress\"} 9\n"),
        "{text}"
    );
}

/// Whoever sees a counter go down takes all that it shows then for new.
#[tokio::test]
async fn sums_of_a_pool_begin_anew_with_the_daemon_while_its_leases_go_on() {
    let lab = Lab::ebpf();
    lab.acquire(1000, "a").await;
    *lab.network.traffic.lock().unwrap() = counted();
    let next = lab.restart(Arc::new(NoChannels), |_| {});
    let has = |text: &str, packets: u32, drops: Option<u32>| {
        let line = "sandwire_pool_packets_total{pool=\"web\",direction=\"egress\"}";
        assert!(text.contains(&format!("{line} {packets}\n")), "{text}");
        let line = "sandwire_pool_drops_total{pool=\"web\",reason=\"arp\"}";
        match drops {
            Some(drops) => assert!(text.contains(&format!("{line} {drops}\n")), "{text}"),
            None => assert!(!text.contains(line), "{text}"),
        }
    };
    let text = next.get(0, "/metrics").await.text;
    has(&text, 0, None);
    let line = "sandwire_lease_packets_total{pool=\"web\",owner=\"1000\",lease=\"a\",direction=\"egress\"} 3\n";
    assert!(text.contains(line), "{text}");

    let mut more = counted();
    more.add(&counted());
    *next.network.traffic.lock().unwrap() = more;
    has(&next.get(0, "/metrics").await.text, 3, Some(2));
    next.call(1000, "DELETE", "/v1/leases/a", &Value::Null)
        .await;
    has(&next.get(0, "/metrics").await.text, 3, Some(2));
    // All of it is new.
    next.acquire(1000, "b").await;
    has(&next.get(0, "/metrics").await.text, 9, Some(6));
}

/// A start that makes maps anew has counters at zero until nothing goes by the maps of before.
#[tokio::test]
async fn what_maps_of_before_have_counted_is_not_new() {
    let lab = Lab::ebpf();
    lab.acquire(1000, "a").await;
    *lab.network.traffic.lock().unwrap() = counted();
    let next = lab.restart(Arc::new(NoChannels), |_| {});
    let spec = model::ebpf_pool("web", 1);
    let instance = "test".parse().unwrap();
    let number = Plan::new(&instance, &spec).unwrap().number;
    let before = &next.network.before;
    before.lock().unwrap().insert(number, counted());
    let begun = Instant::now();
    while !before.lock().unwrap().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60), "nobody takes it");
        sleep(Duration::from_millis(1)).await;
    }
    let text = next.get(0, "/metrics").await.text;
    for line in [
        "sandwire_pool_packets_total{pool=\"web\",direction=\"egress\"} 0\n",
        "sandwire_lease_packets_total{pool=\"web\",owner=\"1000\",lease=\"a\",direction=\"egress\"} 6\n",
    ] {
        assert!(text.contains(line), "no {line} in\n{text}");
    }
}

#[tokio::test]
async fn a_pool_that_is_deleted_is_no_longer_told_of_and_the_next_of_its_name_begins_anew() {
    let lab = Lab::ebpf();
    lab.acquire(0, "a").await;
    *lab.network.traffic.lock().unwrap() = counted();
    let release = |name: &'static str| lab.app.slots.release(ROOT, None, &name.parse().unwrap());
    release("a").unwrap();
    let line = "sandwire_pool_packets_total{pool=\"web\",direction=\"egress\"} ";
    let text = lab.get(0, "/metrics").await.text;
    assert!(text.contains(&format!("{line}3\n")), "{text}");
    let pool = "web".parse().unwrap();
    lab.app.slots.delete_pool(&pool).unwrap();
    // Nobody looks before the next is there.
    model::fill(&lab.app.slots, &model::ebpf_pool("web", 1));
    lab.acquire(0, "b").await;
    *lab.network.traffic.lock().unwrap() = Traffic::default();
    let text = lab.get(0, "/metrics").await.text;
    assert!(text.contains(&format!("{line}0\n")), "{text}");
    release("b").unwrap();
    lab.app.slots.delete_pool(&pool).unwrap();
    let text = lab.get(0, "/metrics").await.text;
    assert!(!text.contains(line), "{text}");
}

/// Its time may be over, or its sandbox have ended, while no daemon was there.
#[tokio::test]
async fn what_a_lease_had_sent_that_ends_at_the_start_is_not_new() {
    let lab = Lab::ebpf();
    lab.acquire(0, "a").await;
    *lab.network.traffic.lock().unwrap() = counted();
    let next = lab.restart(Arc::new(NoChannels), |slots| {
        let name = "a".parse().unwrap();
        slots.release(ROOT, None, &name).unwrap();
    });
    let text = next.get(0, "/metrics").await.text;
    let line = "sandwire_pool_packets_total{pool=\"web\",direction=\"egress\"} 0\n";
    assert!(text.contains(line), "{text}");
    next.acquire(1000, "a").await;
    let text = next.get(0, "/metrics").await.text;
    let line = "sandwire_pool_packets_total{pool=\"web\",direction=\"egress\"} 3\n";
    assert!(text.contains(line), "{text}");
}

#[tokio::test]
async fn a_trace_tells_of_each_packet_until_the_lease_ends() {
    let lab = Lab::ebpf();
    lab.acquire(1000, "a").await;
    lab.acquire(1001, "b").await;
    let (status, mut body) = lab.trace(1000, "/v1/leases/a/trace").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(lines(&mut body, 1).await, [TraceLine::Begin]);
    assert_eq!(
        lab.network.send(&packet(1)),
        1,
        "only the slot that is watched"
    );
    lab.network.send(&packet(2));
    let expected = [packet(1), packet(2)].map(TraceLine::Packet);
    assert_eq!(lines(&mut body, 2).await, expected);
    lab.call(1000, "DELETE", "/v1/leases/a", &Value::Null).await;
    let last = lines(&mut body, 1).await;
    assert!(matches!(last[..], [TraceLine::End { .. }]), "{last:?}");
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn a_trace_is_for_those_who_may_see_the_lease_and_its_data_path() {
    let lab = Lab::ebpf();
    lab.acquire(1000, "a").await;
    for (uid, path) in [
        (1001, "/v1/leases/a/trace"),
        (1001, "/v1/leases/a/trace?owner_uid=1000"),
        (1001, "/v1/leases/a/taps?owner_uid=1000"),
        (0, "/v1/leases/none/trace"),
    ] {
        let answer = lab.get(uid, path).await;
        assert!([403, 404].contains(&answer.refusal().0), "{uid} {path}");
    }
    let plain = Lab::new();
    plain.acquire(1000, "a").await;
    let answer = plain.get(1000, "/v1/leases/a/trace").await;
    assert!([409, 422].contains(&answer.refusal().0), "{}", answer.text);
}

#[tokio::test]
async fn a_slow_reader_is_told_how_much_it_missed_and_holds_nobody_up() {
    let lab = Lab::ebpf();
    lab.acquire(1000, "a").await;
    let (_, mut body) = lab.trace(1000, "/v1/leases/a/trace").await;
    assert_eq!(lines(&mut body, 1).await, [TraceLine::Begin]);
    let sent: u64 = 20_000;
    for number in 0..sent {
        lab.network.send(&packet(number));
    }
    // Long enough for the queues to overflow while nobody reads.
    sleep(Duration::from_millis(500)).await;
    assert_eq!(lab.get(1000, "/v1/leases/a").await.status, StatusCode::OK);
    let (mut seen, mut lost) = (0, 0);
    while seen + lost < sent {
        for line in lines(&mut body, 1).await {
            match line {
                TraceLine::Packet(_) => seen += 1,
                TraceLine::Lost { count } => lost += count,
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(seen + lost, sent);
    assert!(lost > 0 && seen > 0, "{seen} seen, {lost} lost");
}

#[tokio::test]
async fn traces_are_bounded_and_end_with_their_reader_or_the_daemon() {
    let lab = Lab::ebpf();
    lab.acquire(1000, "a").await;
    let mut bodies = Vec::new();
    loop {
        let (status, body) = lab.trace(1000, "/v1/leases/a/trace").await;
        if status != StatusCode::OK {
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
            break;
        }
        bodies.push(body);
        assert!(bodies.len() < 100, "no bound");
    }
    let bound = bodies.len();
    bodies.clear();
    // Their threads notice by and by.
    let again = async {
        loop {
            let (status, body) = lab.trace(1000, "/v1/leases/a/trace").await;
            if status == StatusCode::OK {
                break body;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    let mut body = timeout(Duration::from_secs(60), again).await.unwrap();
    assert!(bound >= 1);
    lab.app.traces.stop();
    let seen = lines(&mut body, 2).await;
    assert!(
        matches!(&seen[1], TraceLine::End { reason } if reason.contains("stopping")),
        "{seen:?}"
    );
}

#[tokio::test]
async fn taps_without_an_upgrade_are_explained() {
    let lab = Lab::ebpf();
    lab.acquire(1000, "a").await;
    let answer = lab.get(1000, "/v1/leases/a/taps").await;
    assert_eq!(answer.refusal(), (426, ErrorCode::InvalidRequest));
    assert!(answer.text.contains("sandwire-fd"), "{}", answer.text);
    assert!(lab.network.guests.lock().unwrap().is_empty());
}
