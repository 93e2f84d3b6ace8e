//! Wrong variables and configurations: each error has the specification's code, and names what is wrong.

use std::{ffi::OsString, os::unix::ffi::OsStringExt};

use sandwire_cni::Environment;
use serde_json::{Value, json};

use crate::daemon::{Daemon, run};

#[test]
fn wrong_variables_are_named() {
    let daemon = Daemon::start();
    let set = |change: fn(&mut Environment)| {
        let mut environment = daemon.environment("ADD");
        change(&mut environment);
        environment
    };
    for (environment, word) in [
        (
            set(|all| all.command = None),
            "CNI_COMMAND: it is missing; a container runtime",
        ),
        (
            set(|all| all.command = Some("".into())),
            "CNI_COMMAND: it is missing",
        ),
        (
            set(|all| all.command = Some("add".into())),
            "CNI_COMMAND: \"add\" is none of ADD",
        ),
        (
            set(|all| all.container_id = None),
            "CNI_CONTAINERID: it is missing",
        ),
        (
            set(|all| all.container_id = Some("".into())),
            "CNI_CONTAINERID: it is missing",
        ),
        (
            set(|all| all.container_id = Some("../x".into())),
            "CNI_CONTAINERID: \"../x\"",
        ),
        (
            set(|all| all.container_id = Some("-x".into())),
            "CNI_CONTAINERID",
        ),
        (
            set(|all| all.container_id = Some(OsString::from_vec(vec![0xff]))),
            "CNI_CONTAINERID: \"\u{fffd}\" is no UTF-8",
        ),
        (set(|all| all.interface = None), "CNI_IFNAME: it is missing"),
        (
            set(|all| all.interface = Some("eth0/1".into())),
            "CNI_IFNAME",
        ),
        (set(|all| all.interface = Some("..".into())), "CNI_IFNAME"),
        (
            set(|all| all.interface = Some("sixteen-letters-".into())),
            "CNI_IFNAME",
        ),
        (set(|all| all.netns = None), "CNI_NETNS: it is missing"),
        (
            set(|all| all.netns = Some("netns/blue".into())),
            "CNI_NETNS",
        ),
        (
            set(|all| all.netns = Some("/proc/self/ns/net".into())),
            "means the same to the daemon",
        ),
        (
            set(|all| all.arguments = Some("IP".into())),
            "CNI_ARGS: \"IP\": it is no KEY=VALUE",
        ),
        (
            set(|all| all.arguments = Some("IP=x".into())),
            "is no IP address",
        ),
        (
            set(|all| all.arguments = Some("MAC=1".into())),
            "is not an Ethernet address",
        ),
        (
            set(|all| all.arguments = Some("FOO=1".into())),
            "no such key is known",
        ),
        (
            set(|all| all.arguments = Some("IgnoreUnknown=0;FOO=1".into())),
            "FOO=1",
        ),
    ] {
        let error = daemon.run_as(&environment, &json!({})).unwrap_err();
        assert_eq!(error["code"], 4, "{error}");
        let details = error["details"].as_str().unwrap();
        assert!(details.contains(word), "{word:?} is not in {details:?}");
    }
    assert_eq!(daemon.requests(), []);
}

#[test]
fn wrong_keys_are_named_with_their_values() {
    let daemon = Daemon::start();
    let runtime = |value: Value| json!({ "runtimeConfig": value });
    let port = |value: Value| runtime(json!({ "portMappings": [value] }));
    for (config, code, word) in [
        (json!({ "cniVersion": "0.3.1" }), 1, "0.4.0, 1.0.0, 1.1.0"),
        (json!({ "cniVersion": null }), 1, "0.1.0"),
        (json!({ "cniVersion": 1 }), 7, "cniVersion: 1 is not a text"),
        (json!({ "name": null }), 7, "name: it must start"),
        (json!({ "name": "a/b" }), 7, "name: it must start"),
        (json!({ "pool": null }), 7, "pool: it is missing"),
        (
            json!({ "pool": "Web" }),
            7,
            "pool: 'Web' is not a valid name",
        ),
        (
            json!({ "socket": "run/s" }),
            7,
            "socket: it must be an absolute path",
        ),
        (
            json!({ "mtu": "1500" }),
            7,
            "mtu: \"1500\" is not a whole number",
        ),
        (json!({ "mtu": -1 }), 7, "mtu: -1 is not a whole number"),
        (
            json!({ "bridge": "cni0" }),
            2,
            "bridge = \"cni0\": this plugin has no such key",
        ),
        (json!({ "isGateway": true }), 2, "isGateway = true"),
        (
            json!({ "ipMasq": true }),
            2,
            "ipMasq = true: the pool's policy decides",
        ),
        (
            json!({ "ipam": { "type": "host-local" } }),
            2,
            "ipam.type = \"host-local\"",
        ),
        (json!({ "ipam": [] }), 7, "ipam: [] is not an object"),
        (
            json!({ "dns": { "nameserver": [] } }),
            2,
            "dns.nameserver = []",
        ),
        (
            json!({ "dns": { "search": [1] } }),
            7,
            "dns.search[0]: 1 is not a text",
        ),
        (
            json!({ "routes": [{ "gw": "10.0.0.1" }] }),
            7,
            "routes[0].dst: it is missing",
        ),
        (
            json!({ "routes": [{ "dst": "10.0.0.1/8" }] }),
            7,
            "it is 10.0.0.0/8",
        ),
        (
            json!({ "routes": [{ "dst": "::/0", "gw": "::1" }] }),
            2,
            "routes[0].gw = \"::1\"",
        ),
        (json!({ "routes": {} }), 7, "routes: {} is not a list"),
        (
            json!({ "policy": { "speed": 1 } }),
            7,
            "policy: unknown field `speed`",
        ),
        (
            json!({ "args": { "cni": { "ips": ["x"] } } }),
            7,
            "args.cni.ips: \"x\" is no IP address",
        ),
        (
            runtime(json!({ "aliases": ["a"] })),
            2,
            "runtimeConfig.aliases = [\"a\"]",
        ),
        (
            runtime(json!({ "mac": "1:2" })),
            7,
            "runtimeConfig.mac: '1:2' is not an Ethernet address",
        ),
        (runtime(json!({ "ips": [7] })), 7, "runtimeConfig.ips[0]"),
        (
            runtime(json!({ "bandwidth": { "rate": 1 } })),
            2,
            "runtimeConfig.bandwidth.rate = 1",
        ),
        (
            runtime(
                json!({ "portMappings": [{ "hostPort": 1, "HostPort": 2, "containerPort": 3 }] }),
            ),
            2,
            "runtimeConfig.portMappings[0].HostPort = 2",
        ),
        (
            runtime(json!({ "bandwidth": { "egressBurst": 9 } })),
            7,
            "runtimeConfig.bandwidth.egressRate: it is missing",
        ),
        (
            runtime(json!({ "ipRanges": [{}] })),
            7,
            "runtimeConfig.ipRanges[0]",
        ),
        (
            runtime(json!({ "ipRanges": [[{ "gateway": "10.0.0.1" }]] })),
            7,
            "runtimeConfig.ipRanges[0][0].subnet: it is missing",
        ),
        (
            runtime(json!({ "dns": { "nameservers": [] } })),
            2,
            "runtimeConfig.dns.nameservers",
        ),
        (
            port(json!({ "hostPort": 80 })),
            7,
            "runtimeConfig.portMappings[0].containerPort",
        ),
        (
            port(json!({ "containerPort": 80, "hostPort": 0 })),
            7,
            "portMappings[0].hostPort",
        ),
        (
            port(json!({ "containerPort": 80, "hostPort": 70_000 })),
            7,
            "hostPort: 70000 is not",
        ),
        (
            port(json!({ "containerPort": 80, "hostPort": 80, "protocol": "sctp" })),
            2,
            "portMappings[0].protocol = \"sctp\"",
        ),
        (
            port(json!({ "containerPort": 1, "hostPort": 1, "hostIP": "x" })),
            7,
            "hostIP: it is no IP address",
        ),
        (
            port(json!({ "containerPort": 1, "hostPort": 1, "range": 2 })),
            2,
            "portMappings[0].range = 2",
        ),
    ] {
        let error = daemon.run("ADD", &config).unwrap_err();
        assert_eq!(error["code"], code, "{config}: {error}");
        let details = error["details"].as_str().unwrap();
        assert!(details.contains(word), "{word:?} is not in {details:?}");
        assert!(!details.starts_with('.'), "{details:?}");
    }
    assert_eq!(daemon.requests(), []);
}

#[test]
fn an_error_is_told_in_the_version_asked_for() {
    let daemon = Daemon::start();
    let error = daemon
        .run("ADD", &json!({ "cniVersion": "0.4.0", "mtu": true }))
        .unwrap_err();
    assert_eq!(error["cniVersion"], "0.4.0");
}

#[test]
fn what_is_no_configuration_is_undecodable() {
    let daemon = Daemon::start();
    let environment = daemon.environment("ADD");
    let long = vec![b' '; usize::try_from(sandwire_cni::INPUT_BYTES_MAX).unwrap() + 1];
    let deep = "[".repeat(100_000);
    for input in [
        b"".as_slice(),
        b"{",
        b"[]",
        b"7",
        b"\xff",
        deep.as_bytes(),
        &long,
    ] {
        let error = run(&environment, input).unwrap_err();
        assert_eq!(error["code"], 6, "{error}");
    }
}

#[test]
fn input_that_fails_is_an_io_failure() {
    struct Broken;
    impl std::io::Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("broken"))
        }
    }
    let daemon = Daemon::start();
    let mut output = Vec::new();
    assert!(!sandwire_cni::run(
        &daemon.environment("ADD"),
        Broken,
        &mut output
    ));
    let error: Value = serde_json::from_slice(&output).unwrap();
    assert_eq!(error["code"], 5);
}
