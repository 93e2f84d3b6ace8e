//! As a later plugin of a chain.

use serde_json::{Value, json};

use crate::daemon::Daemon;

fn previous() -> Value {
    json!({
        "cniVersion": "1.1.0",
        "interfaces": [
            { "name": "cni0", "mac": "02:00:00:00:00:01" },
            { "name": "eth0", "mac": "02:00:00:00:00:02", "sandbox": "/run/netns/blue", "socketPath": "/run/s" },
        ],
        "ips": [{ "interface": 1, "address": "10.1.0.5/16", "gateway": "10.1.0.1" }],
        "routes": [{ "dst": "0.0.0.0/0" }],
        "dns": { "nameservers": ["10.1.0.1"] },
        "ofSomebody": [1],
    })
}

fn later(more: &Value) -> Value {
    let mut config = json!({ "prevResult": previous(), "interface": "net1" });
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

#[test]
fn a_later_plugin_adds_an_interface_of_its_own_to_the_result() {
    let daemon = Daemon::start();
    let result: Value =
        serde_json::from_str(&daemon.run("ADD", &later(&json!({}))).unwrap()).unwrap();
    let before = previous();
    for key in ["interfaces", "ips", "routes"] {
        let (all, old) = (
            result[key].as_array().unwrap(),
            before[key].as_array().unwrap(),
        );
        assert_eq!(&all[..old.len()], old, "{key}");
    }
    assert_eq!(
        (&result["dns"], &result["ofSomebody"]),
        (&before["dns"], &before["ofSomebody"])
    );
    assert_eq!(result["interfaces"][2]["name"], "swabc-7");
    assert_eq!(result["interfaces"][3]["name"], "net1");
    assert_eq!(result["ips"][1]["interface"], 3);
    let attach = daemon.requests()[0].1["attach"].clone();
    assert_eq!(attach["interface"], "net1");
    // The default route is the chain's.
    assert_eq!(attach["routes"], json!([]));
}

#[test]
fn a_later_plugin_makes_the_routes_that_are_written() {
    let daemon = Daemon::start();
    daemon
        .run(
            "ADD",
            &later(&json!({ "routes": [{ "dst": "10.64.0.0/16" }] })),
        )
        .unwrap();
    let attach = daemon.requests()[0].1["attach"].clone();
    assert_eq!(attach["routes"], json!(["10.64.0.0/16"]));
}

#[test]
fn a_result_in_an_older_version_says_which_family_an_address_is_of() {
    let daemon = Daemon::start();
    let text = daemon
        .run("ADD", &later(&json!({ "cniVersion": "0.4.0" })))
        .unwrap();
    let result: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(result["cniVersion"], "0.4.0");
    assert_eq!(result["ips"][1]["version"], "4");
    assert_eq!(result["interfaces"][3].get("mtu"), None);
}

#[test]
fn the_place_in_the_chain_and_the_interface_must_agree() {
    let daemon = Daemon::start();
    for (config, word) in [
        (
            json!({ "prevResult": previous() }),
            "as a later plugin of a chain",
        ),
        (
            json!({ "interface": "net1" }),
            "it is for a later plugin of a chain",
        ),
        (later(&json!({ "interface": "eth0" })), "name another one"),
        (later(&json!({ "interface": "a/b" })), "must not contain"),
        (later(&json!({ "prevResult": [] })), "prevResult"),
    ] {
        let error = daemon.run("ADD", &config).unwrap_err();
        assert_eq!(error["code"], 7);
        assert!(error["details"].as_str().unwrap().contains(word), "{error}");
    }
    assert_eq!(daemon.requests(), []);
}

#[test]
fn two_of_us_in_one_chain_neither_meet_nor_collect_each_other() {
    let daemon = Daemon::start();
    let first = daemon.run("ADD", &json!({})).unwrap();
    let first: Value = serde_json::from_str(&first).unwrap();
    let both = later(&json!({ "prevResult": first }));
    daemon.run("ADD", &both).unwrap();
    assert_eq!(daemon.leases().len(), 2);

    let none = json!({ "cni.dev/valid-attachments": [] });
    daemon.run("GC", &later(&none)).unwrap();
    let left = daemon.leases();
    assert_eq!(left.len(), 1, "that of the first plugin stays");
    daemon.run("ADD", &both).unwrap();
    daemon.run("DEL", &later(&json!({}))).unwrap();
    assert_eq!(daemon.leases(), left);
}
