//! `CHECK`.

use serde_json::{Value, json};

use crate::daemon::Daemon;

const PORTS: &str = r#"{ "portMappings": [{ "hostPort": 8080, "containerPort": 80, "protocol": "tcp" }],
    "bandwidth": { "egressRate": 1000000 } }"#;

fn config(daemon: &Daemon) -> Value {
    let runtime: Value = serde_json::from_str(PORTS).unwrap();
    let added = daemon
        .run("ADD", &json!({ "runtimeConfig": runtime }))
        .unwrap();
    let result: Value = serde_json::from_str(&added).unwrap();
    json!({ "runtimeConfig": runtime, "prevResult": result })
}

#[test]
fn what_is_as_it_was_added_is_well_and_says_nothing() {
    let daemon = Daemon::start();
    let config = config(&daemon);
    assert_eq!(daemon.run("CHECK", &config).unwrap(), "");
}

#[test]
fn routes_that_a_later_plugin_made_are_no_difference() {
    let daemon = Daemon::start();
    let mut config = config(&daemon);
    config["prevResult"]["routes"] = json!([{ "dst": "10.0.0.0/8", "gw": "10.64.0.1" }]);
    let ips = config["prevResult"]["ips"].as_array_mut().unwrap();
    ips.push(json!({ "interface": 0, "address": "10.9.0.1/24" }));
    assert_eq!(daemon.run("CHECK", &config).unwrap(), "");
}

#[test]
fn each_difference_is_named() {
    let daemon = Daemon::start();
    let sound = config(&daemon);
    let with = |pointer: &str, value: Value| {
        let mut changed = sound.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        changed
    };
    for (config, code, word) in [
        (
            with("/prevResult/interfaces/1/mac", json!("02:00:00:00:00:99")),
            103,
            "02:00:00:00:00:99",
        ),
        (
            with("/prevResult/ips/0/address", json!("10.64.0.10/32")),
            103,
            "10.64.0.10/32",
        ),
        (
            with("/runtimeConfig/portMappings/0/hostPort", json!(9090)),
            103,
            "tcp port 9090",
        ),
        (
            with("/runtimeConfig/bandwidth/egressRate", json!(2_000_000)),
            103,
            "limit of egress",
        ),
        (
            with("/prevResult/interfaces/1/name", json!("eth9")),
            7,
            "no interface eth0",
        ),
        (
            with("/prevResult/interfaces/1/sandbox", json!("")),
            7,
            "no interface eth0",
        ),
        (with("/prevResult", json!({})), 7, "no interface eth0"),
        (with("/prevResult", Value::Null), 7, "CHECK needs it"),
    ] {
        let error = daemon.run("CHECK", &config).unwrap_err();
        assert_eq!(error["code"], code, "{error}");
        assert!(error["details"].as_str().unwrap().contains(word), "{error}");
    }
}

/// The daemon finds a defect of the interface.
fn with_defect(daemon: &Daemon, problem: &str) {
    let lease = daemon.leases().remove(0);
    let defect = json!({ "object": "interface eth0", "problem": problem, "action": "reported" });
    let attached = json!({
        "netns": daemon.netns(), "interface": "eth0", "mac": "06:00:0a:40:00:09", "mtu": 1500,
        "host_interface": "swabc-7", "device": "veth", "gateway_mac": "02:73:77:00:00:01",
        "routes": [{ "destination": "0.0.0.0/0", "gateway": "169.254.1.1" }],
        "addresses": [
            { "address": "10.64.0.9/32", "gateway": "169.254.1.1" },
            { "address": "fd00:c10e::9/128", "gateway": "fe80::1" },
        ],
    });
    let state = json!({ "attached": attached, "defects": [defect] });
    daemon.answer(&format!("GET /v1/leases/{lease}/attached"), 1, 200, state);
}

#[test]
fn what_the_daemon_finds_in_the_kernel_is_told() {
    let daemon = Daemon::start();
    let config = config(&daemon);
    for problem in [
        "it is gone",
        "the route to 0.0.0.0/0 is gone",
        "its MTU is 1400, not 1500",
    ] {
        with_defect(&daemon, problem);
        let error = daemon.run("CHECK", &config).unwrap_err();
        assert_eq!(error["code"], 103);
        assert_eq!(error["details"], format!("interface eth0: {problem}"));
    }
}

#[test]
fn what_a_later_plugin_changed_is_no_difference() {
    let daemon = Daemon::start();
    let mut config = config(&daemon);
    config["prevResult"]["routes"] = json!([{ "dst": "10.0.0.0/8" }]);
    config["prevResult"]["interfaces"][1]["mtu"] = 1400.into();
    for problem in [
        "the route to 0.0.0.0/0 is gone",
        "its MTU is 1400, not 1500",
    ] {
        with_defect(&daemon, problem);
        assert_eq!(daemon.run("CHECK", &config).unwrap(), "");
    }
}

#[test]
fn a_container_without_a_lease_is_unknown() {
    let daemon = Daemon::start();
    let config = config(&daemon);
    daemon.run("DEL", &config).unwrap();
    let error = daemon.run("CHECK", &config).unwrap_err();
    assert_eq!(error["code"], 3, "{error}");
}

#[test]
fn a_later_plugin_checks_its_own_interface() {
    let daemon = Daemon::start();
    let before = json!({ "interfaces": [{ "name": "eth0", "sandbox": "/run/netns/x" }] });
    let mut config = json!({ "interface": "net1", "prevResult": before });
    let result = daemon.run("ADD", &config).unwrap();
    config["prevResult"] = serde_json::from_str(&result).unwrap();
    assert_eq!(daemon.run("CHECK", &config).unwrap(), "");
}
