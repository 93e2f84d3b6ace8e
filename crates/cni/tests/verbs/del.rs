//! `DEL`.

use serde_json::{Value, json};

use crate::daemon::Daemon;

#[test]
fn what_was_added_is_released_under_its_own_name() {
    let daemon = Daemon::start();
    daemon.run("ADD", &json!({})).unwrap();
    let name = daemon.leases().remove(0);
    daemon.requests();
    assert_eq!(daemon.run("DEL", &json!({})).unwrap(), "");
    assert_eq!(
        daemon.requests(),
        [(format!("DELETE /v1/leases/{name}"), Value::Null)]
    );
    assert_eq!(daemon.leases(), Vec::<String>::new());
}

#[test]
fn nothing_to_release_is_success_again_and_again() {
    let daemon = Daemon::start();
    for _ in 0..3 {
        assert_eq!(daemon.run("DEL", &json!({})).unwrap(), "");
    }
}

#[test]
fn the_rest_of_the_configuration_is_in_nobodys_way() {
    let daemon = Daemon::start();
    for config in [
        json!({ "pool": null }),
        json!({ "pool": 7, "mtu": "big", "unknown": {} }),
        json!({ "runtimeConfig": [], "prevResult": "gone" }),
    ] {
        daemon.run("ADD", &json!({})).unwrap();
        assert_eq!(daemon.run("DEL", &config).unwrap(), "");
        assert_eq!(daemon.leases(), Vec::<String>::new());
    }
}

#[test]
fn the_containers_namespace_is_not_needed() {
    let daemon = Daemon::start();
    daemon.run("ADD", &json!({})).unwrap();
    let mut environment = daemon.environment("DEL");
    environment.netns = None;
    environment.arguments = Some("nonsense".into());
    daemon.run_as(&environment, &json!({})).unwrap();
    assert_eq!(daemon.leases(), Vec::<String>::new());
}

#[test]
fn a_container_that_has_not_gone_yet_leaves_its_slot_later() {
    let daemon = Daemon::start();
    let held = json!({
        "name": "x", "pool": "web", "slot": 0, "outcome": "held", "held_by": [{ "pid": 7, "command": "qemu" }]
    });
    daemon.answer("DELETE", 1, 200, held);
    assert_eq!(daemon.run("DEL", &json!({})).unwrap(), "");
}

#[test]
fn a_daemon_that_fails_is_told() {
    for (code, expected) in [("internal", 101), ("unavailable", 11), ("forbidden", 100)] {
        let daemon = Daemon::start();
        daemon.refuse("DELETE", code);
        let error = daemon.run("DEL", &json!({})).unwrap_err();
        assert_eq!(error["code"], expected, "{error}");
    }
}
