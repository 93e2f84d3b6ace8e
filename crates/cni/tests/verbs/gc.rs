//! `GC`.

use sandwire_cni::Environment;
use serde_json::{Value, json};

use crate::daemon::Daemon;

fn add(daemon: &Daemon, container: &str, config: &Value) {
    let mut environment = daemon.environment("ADD");
    environment.container_id = Some(container.into());
    daemon.run_as(&environment, config).unwrap();
}

fn valid(containers: &[&str]) -> Value {
    let list = containers.iter();
    list.map(|id| json!({ "containerID": id, "ifname": "eth0" }))
        .collect()
}

#[test]
fn leases_of_this_network_that_nobody_has_any_more_are_released() {
    let daemon = Daemon::start();
    for container in ["a", "b", "c"] {
        add(&daemon, container, &json!({}));
    }
    add(&daemon, "d", &json!({ "name": "others" }));
    daemon.add_lease("agent-7", rustix::process::geteuid().as_raw());
    let before = daemon.leases();
    // There are no variables but the verb.
    let environment = Environment {
        command: Some("GC".into()),
        ..Environment::default()
    };
    let config = json!({ "cni.dev/valid-attachments": valid(&["b"]) });
    assert_eq!(daemon.run_as(&environment, &config).unwrap(), "");
    let left = daemon.leases();
    let gone: Vec<&String> = before.iter().filter(|name| !left.contains(name)).collect();
    assert_eq!((left.len(), gone.len()), (3, 2), "{gone:?}");
    assert!(left.contains(&"agent-7".to_owned()));
    for name in gone {
        assert!(name.contains("-a-") || name.contains("-c-"), "{name}");
    }
}

#[test]
fn an_empty_list_releases_all_of_this_network_and_none_of_other_users() {
    let daemon = Daemon::start();
    add(&daemon, "a", &json!({}));
    let of_others = daemon.leases().remove(0) + "0";
    daemon.add_lease(&of_others, rustix::process::geteuid().as_raw() + 1);
    // As Go writes an empty list.
    daemon
        .run("GC", &json!({ "cni.dev/valid-attachments": null }))
        .unwrap();
    assert_eq!(daemon.leases(), [of_others]);
}

#[test]
fn the_key_of_the_first_reference_library_is_understood() {
    let daemon = Daemon::start();
    add(&daemon, "a", &json!({}));
    daemon
        .run("GC", &json!({ "cni.dev/attachments": valid(&["a"]) }))
        .unwrap();
    assert_eq!(daemon.leases().len(), 1);
}

#[test]
fn a_list_that_is_missing_or_wrong_releases_nothing() {
    let daemon = Daemon::start();
    add(&daemon, "a", &json!({}));
    for (config, code) in [
        (json!({}), 7),
        (json!({ "cni.dev/valid-attachments": {} }), 7),
        (json!({ "cni.dev/valid-attachments": [7] }), 7),
        (
            json!({ "cni.dev/valid-attachments": [{ "ifname": "eth0" }] }),
            2,
        ),
        (
            json!({ "cni.dev/valid-attachments": [{ "containerID": "a" }] }),
            7,
        ),
        (
            json!({ "cniVersion": "1.0.0", "cni.dev/valid-attachments": [] }),
            1,
        ),
    ] {
        let error = daemon.run("GC", &config).unwrap_err();
        assert_eq!(error["code"], code, "{config}: {error}");
        assert_eq!(daemon.leases().len(), 1);
    }
}

#[test]
fn one_lease_that_stays_keeps_no_other_one() {
    let daemon = Daemon::start();
    for container in ["a", "b"] {
        add(&daemon, container, &json!({}));
    }
    daemon.answer("DELETE", 1, 500, crate::daemon::refusal("internal"));
    let config = json!({ "cni.dev/valid-attachments": [] });
    let error = daemon.run("GC", &config).unwrap_err();
    assert_eq!(error["code"], 104);
    let left = daemon.leases();
    assert_eq!(left.len(), 1);
    assert!(
        error["details"].as_str().unwrap().contains(&left[0]),
        "{error}"
    );
}
