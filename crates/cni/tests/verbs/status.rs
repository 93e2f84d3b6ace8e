//! `STATUS` and `VERSION`.

use sandwire_cni::Environment;
use serde_json::{Value, json};

use crate::daemon::{Daemon, health_with, pool, run};

#[test]
fn a_daemon_with_a_pool_that_has_slots_is_well() {
    let daemon = Daemon::start();
    let environment = Environment {
        command: Some("STATUS".into()),
        ..Environment::default()
    };
    assert_eq!(daemon.run_as(&environment, &json!({})).unwrap(), "");
}

#[test]
fn what_keeps_an_add_from_succeeding_is_told() {
    let pool_with = |pointer: &str, value: Value| {
        let mut pool = pool();
        pool["slots"]["ready"] = 0.into();
        *pool.pointer_mut(pointer).unwrap() = value;
        pool
    };
    let refilling = pool_with("/slots/building", json!(2));
    let mut failing = refilling.clone();
    failing["last_error"] = json!("no such uplink");
    let mut without_size = refilling.clone();
    without_size["spec"]["size"] = 0.into();
    let mut of_microvms = pool();
    of_microvms["spec"]["kind"] = "netns".into();
    for (request, status, body, code, word) in [
        (
            "GET /v1/pools",
            200,
            of_microvms,
            Some(50),
            "kind `container`",
        ),
        ("GET /v1/pools", 200, refilling, None, ""),
        ("GET /v1/pools", 200, failing, Some(50), "no such uplink"),
        (
            "GET /v1/pools",
            200,
            without_size,
            Some(50),
            "give it a size",
        ),
        (
            "GET /v1/pools",
            200,
            pool_with("/slots/leased", json!(200)),
            None,
            "",
        ),
        (
            "GET /v1/pools",
            404,
            crate::daemon::refusal("not_found"),
            Some(50),
            "no pool web",
        ),
        (
            "GET /v1/pools",
            403,
            crate::daemon::refusal("forbidden"),
            Some(50),
            "forbidden",
        ),
        (
            "GET /healthz",
            503,
            health_with(&["pool web"]),
            Some(51),
            "its uplink is gone",
        ),
        (
            "GET /healthz",
            503,
            health_with(&["pool other", "host"]),
            Some(51),
            "host: its uplink is gone",
        ),
    ] {
        let daemon = Daemon::start();
        daemon.answer(request, 1, status, body);
        let outcome = daemon.run("STATUS", &json!({}));
        let found = outcome
            .as_ref()
            .err()
            .map(|error| error["code"].as_u64().unwrap());
        assert_eq!(found, code, "{outcome:?}");
        if let Err(error) = outcome {
            assert!(error["details"].as_str().unwrap().contains(word), "{error}");
        }
    }
    let daemon = Daemon::start();
    let gone = json!({ "socket": daemon.folder_path("none") });
    let error = daemon.run("STATUS", &gone).unwrap_err();
    assert_eq!(error["code"], 50, "{error}");
    let older = daemon
        .run("STATUS", &json!({ "cniVersion": "0.4.0" }))
        .unwrap_err();
    assert_eq!(older["code"], 1, "{older}");
}

#[test]
fn what_is_wrong_with_another_pool_is_no_matter_of_this_ones() {
    for other in ["pool other", "pool web2"] {
        let daemon = Daemon::start();
        daemon.answer("GET /healthz", 1, 503, health_with(&[other]));
        assert_eq!(daemon.run("STATUS", &json!({})).unwrap(), "", "{other}");
    }
}

#[test]
fn the_version_is_told_whatever_version_asks() {
    let environment = Environment {
        command: Some("VERSION".into()),
        ..Environment::default()
    };
    for (input, version) in [
        ("", "1.1.0"),
        ("{}", "1.1.0"),
        (r#"{"cniVersion": "0.4.0"}"#, "0.4.0"),
        (r#"{"cniVersion": "9.9.9"}"#, "9.9.9"),
    ] {
        let text = run(&environment, input.as_bytes()).unwrap();
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            answer,
            json!({ "cniVersion": version, "supportedVersions": ["0.4.0", "1.0.0", "1.1.0"] })
        );
    }
    let error = run(&environment, b"{").unwrap_err();
    assert_eq!(error["code"], 6);
}
