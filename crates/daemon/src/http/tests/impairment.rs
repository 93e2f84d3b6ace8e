//! Impairments of leases, as far as they are refused: what is carried out needs interfaces.

use super::*;

const PATH: &str = "/v1/leases/a/impairment";

fn delay() -> Value {
    json!({"rule": [{"delay": "50ms"}]})
}

#[tokio::test]
async fn another_users_lease_is_not_impaired_shown_or_cleared() {
    let lab = Lab::new();
    lab.acquire(1000, "a").await;
    let not_found = (404, ErrorCode::NotFound);
    let of_owner = format!("{PATH}?owner_uid=1000");
    for path in [PATH, of_owner.as_str()] {
        for method in ["GET", "PUT", "DELETE"] {
            let answer = lab.call(1001, method, path, &delay()).await;
            assert_eq!(answer.refusal(), not_found, "{method} {path}");
        }
    }
    let shown = lab.get(1000, PATH).await;
    let expected = json!({"lease": "a", "owner_uid": 1000, "interfaces": []});
    assert_eq!((shown.status, shown.body), (StatusCode::OK, expected));
    let cleared = lab.call(0, "DELETE", &of_owner, &Value::Null).await;
    assert_eq!(cleared.body["was_impaired"], false, "{}", cleared.text);
}

#[tokio::test]
async fn what_cannot_be_is_refused_before_a_service_is_asked() {
    let lab = Lab::new();
    lab.acquire(1000, "a").await;
    for body in [
        json!({"rule": [{"delay": "50 parsecs"}]}),
        json!({"rule": [{"delai": "50ms"}]}),
        json!({"rule": [{"preset": "no-such-network"}]}),
    ] {
        let answer = lab.call(1000, "PUT", PATH, &body).await;
        assert_eq!(answer.refusal(), (400, ErrorCode::InvalidRequest), "{body}");
    }
    // There is none, and under a service manager it isn't the daemon's to start it.
    let answer = lab.call(1000, "PUT", PATH, &delay()).await;
    assert_eq!(answer.refusal(), (503, ErrorCode::Unavailable));
    assert!(answer.text.contains("systemctl start sandwire-impair"));
}

#[tokio::test]
async fn a_release_that_ends_nothing_leaves_the_lease_impaired() {
    let lab = Lab::new();
    lab.acquire(1000, "a").await;
    let key = sandwire_slot::lease::LeaseKey {
        owner_uid: 1000,
        name: "a".parse().unwrap(),
    };
    let impairment = "delay 50ms".parse().unwrap();
    lab.app.impairments.note(key, &impairment);
    let of_owner = "/v1/leases/a?owner_uid=1000";
    let answer = lab.call(1001, "DELETE", of_owner, &Value::Null).await;
    assert_eq!(answer.refusal(), (404, ErrorCode::NotFound));
    let summary =
        || async { lab.get(1000, "/v1/leases").await.body[0]["impairment"]["summary"].clone() };
    assert_eq!(summary().await, "delay 50ms", "it isn't the caller's");
    *lab.network.is_held.lock().unwrap() = true;
    let answer = lab.call(1000, "DELETE", of_owner, &Value::Null).await;
    assert_eq!(answer.body["outcome"], "held", "{}", answer.text);
    assert_eq!(summary().await, "delay 50ms", "its VMM runs");
}
