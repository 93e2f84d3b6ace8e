//! `ADD`.

use serde_json::{Value, json};

use crate::daemon::{Daemon, pool, refusal, run};

fn add(daemon: &Daemon, more: &Value) -> Value {
    let text = daemon.run("ADD", more).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The body of the request for a lease.
fn asked(daemon: &Daemon) -> Value {
    let requests = daemon.requests();
    let found = requests.iter().find(|(head, _)| head == "POST /v1/leases");
    found.unwrap().1.clone()
}

#[test]
fn a_result_has_the_form_of_the_version_that_was_asked_for() {
    let daemon = Daemon::start();
    let netns = daemon.netns();
    for (version, mtu, families) in [
        ("0.4.0", None, Some(["4", "6"])),
        ("1.0.0", None, None),
        ("1.1.0", Some(1500), None),
    ] {
        let result = add(&daemon, &json!({ "cniVersion": version }));
        let mut inside = json!({ "name": "eth0", "mac": "06:00:0a:40:00:09", "sandbox": netns });
        if let Some(mtu) = mtu {
            inside["mtu"] = mtu.into();
        }
        let mut ips = json!([
            { "interface": 1, "address": "10.64.0.9/32", "gateway": "169.254.1.1" },
            { "interface": 1, "address": "fd00:c10e::9/128", "gateway": "fe80::1" },
        ]);
        for (index, family) in families.iter().flatten().enumerate() {
            ips[index]["version"] = (*family).into();
        }
        let expected = json!({
            "cniVersion": version,
            "interfaces": [{ "name": "swabc-7" }, inside],
            "ips": ips,
            "routes": [
                { "dst": "0.0.0.0/0", "gw": "169.254.1.1" },
                { "dst": "::/0", "gw": "fe80::1" },
            ],
            "dns": {},
        });
        assert_eq!(result, expected);
        daemon
            .run("DEL", &json!({ "cniVersion": version }))
            .unwrap();
    }
}

#[test]
fn a_plain_network_asks_for_the_containers_interface_and_nothing_else() {
    let daemon = Daemon::start();
    add(&daemon, &json!({}));
    let mut asked = asked(&daemon);
    let name = asked["name"].take();
    assert!(name.as_str().unwrap().starts_with("cni-"), "{name}");
    assert_eq!(
        asked,
        json!({
            "pool": "web",
            "name": null,
            "clone_address": null,
            "ttl_seconds": null,
            "policy": null,
            "process": false,
            "vsock": null,
            "attach": {
                "netns": daemon.netns(), "interface": "eth0", "mtu": null, "mac": null, "routes": null
            },
        })
    );
}

#[test]
fn a_guest_on_a_tap_is_told_of_as_the_plugin_for_firecracker_does() {
    let daemon = Daemon::start();
    let netns = json!(daemon.netns());
    let result = add(
        &daemon,
        &json!({ "tap": { "name": "tap0", "owner_uid": 1000 } }),
    );
    let wanted = json!({ "name": "tap0", "owner_uid": 1000 });
    assert_eq!(asked(&daemon)["attach"]["tap"], wanted);
    let told = result["interfaces"].as_array().unwrap();
    let tap = json!({ "name": "tap0", "mac": "02:73:77:00:00:01", "sandbox": netns });
    assert_eq!((told.len(), &told[2]), (4, &tap));
    // The guest's own: by the name of the TAP, in the "sandbox" that the container's id is.
    assert_eq!(told[3]["name"], "tap0");
    assert_eq!(told[3]["mac"], told[1]["mac"]);
    assert_ne!(told[3]["sandbox"], netns);
    let owners: Vec<_> = result["ips"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| &one["interface"])
        .collect();
    assert_eq!(owners, [&json!(1), &json!(1), &json!(3), &json!(3)]);
    for wrong in [
        json!("tap 0"),
        json!(7),
        json!({ "name": "tap0", "queues": 2 }),
    ] {
        let error = daemon.run("ADD", &json!({ "tap": wrong })).unwrap_err();
        assert_eq!(error["code"], 7, "{error}");
    }
}

#[test]
fn everything_that_can_be_asked_for_reaches_the_daemon() {
    let daemon = Daemon::start();
    let result = add(
        &daemon,
        &json!({
            "cniVersions": ["1.0.0", "1.1.0"],
            "capabilities": { "portMappings": true },
            "disableCheck": false,
            "mtu": 1400,
            "routes": [{ "dst": "10.0.0.0/8" }, { "dst": "::/0" }],
            "dns": { "nameservers": ["10.0.0.53"], "domain": "a.example", "options": ["ndots:1"] },
            "args": { "podman_labels": { "x": "y" }, "cni": { "ips": ["10.64.0.77"], "labels": [] } },
            "ipam": {},
            "runtimeConfig": {
                "portMappings": [
                    { "hostPort": 8080, "containerPort": 80, "protocol": "TCP", "hostIP": "" },
                    { "hostPort": 53, "containerPort": 5353, "protocol": "udp", "hostIP": "198.18.0.1" },
                ],
                "bandwidth": { "ingressRate": 2_000_000, "ingressBurst": 4_294_967_295_u64, "egressRate": 0 },
                "ipRanges": [[{ "subnet": "10.64.0.0/16" }], [{ "subnet": "fd00:c10e::/64" }]],
                "ips": ["10.64.0.9/24", "fd00:c10e::9"],
                "mac": "06:11:22:33:44:55",
                "dns": { "servers": ["10.0.0.54"], "searches": ["b.example"] },
            },
        }),
    );
    let dns = json!({
        "nameservers": ["10.0.0.54"], "domain": "a.example", "search": ["b.example"], "options": ["ndots:1"]
    });
    assert_eq!(result["dns"], dns);
    let requests = daemon.requests();
    let heads: Vec<&str> = requests.iter().map(|(head, _)| head.as_str()).collect();
    assert_eq!(heads[..2], ["GET /v1/pools/web", "POST /v1/leases"]);
    let lease = &requests[1].1;
    assert_eq!(
        lease["attach"],
        json!({
            "netns": daemon.netns(), "interface": "eth0", "mtu": 1400, "mac": "06:11:22:33:44:55",
            "routes": ["10.0.0.0/8", "::/0"],
        })
    );
    assert_eq!(lease["clone_address"], "10.64.0.9");
    // The pool's policy with the limits; a burst is told in bits.
    assert_eq!(lease["policy"]["group"], "blue");
    let ingress = json!({
        "bits_per_second": 2_000_000, "burst_bytes": 536_870_911,
        "packets_per_second": null, "burst_packets": null,
    });
    assert_eq!(lease["policy"]["limits"]["ingress"], ingress);
    let egress = &lease["policy"]["limits"]["egress"];
    assert_eq!(egress["bits_per_second"], Value::Null);
    let ports: Vec<&Value> = requests[2..].iter().map(|(_, body)| body).collect();
    assert_eq!(
        ports,
        [
            &json!({ "protocol": "tcp", "host_address": null, "host_port": 8080, "clone_port": 80, "nic": 0 }),
            &json!({
                "protocol": "udp", "host_address": "198.18.0.1", "host_port": 53, "clone_port": 5353, "nic": 0
            }),
        ]
    );
}

/// containerd's library has no names for JSON in its types, so Go writes those of the fields; and the same burst whatever
/// the rate.
#[test]
fn what_containerd_passes_is_understood() {
    let daemon = Daemon::start();
    let result = add(
        &daemon,
        &json!({
            "runtimeConfig": {
                "portMappings": [
                    { "HostPort": 8080, "ContainerPort": 80, "Protocol": "tcp", "HostIP": "" },
                ],
                "bandwidth": {
                    "IngressRate": 1_000_000, "IngressBurst": 4_294_967_295_u64, "EgressRate": 0, "EgressBurst": 0,
                },
                "ipRanges": [[{ "Subnet": "10.64.0.0/16", "RangeStart": "", "RangeEnd": "", "Gateway": "" }]],
                "dns": { "Servers": ["10.96.0.10"], "Searches": ["svc.cluster.local"], "Options": null },
            },
        }),
    );
    let dns = json!({ "nameservers": ["10.96.0.10"], "search": ["svc.cluster.local"] });
    assert_eq!(result["dns"], dns);
    let requests = daemon.requests();
    let limits = &requests[1].1["policy"]["limits"];
    assert_eq!(limits["ingress"]["bits_per_second"], 1_000_000);
    // What the rate carries in an hour.
    assert_eq!(limits["ingress"]["burst_bytes"], 450_000_000);
    assert_eq!(limits["egress"]["burst_bytes"], Value::Null);
    let port = &requests[2].1;
    assert_eq!(
        (&port["host_port"], &port["clone_port"]),
        (&json!(8080), &json!(80))
    );
}

#[test]
fn a_policy_of_the_network_is_the_leases_own_and_limits_are_added_to_it() {
    let daemon = Daemon::start();
    let policy = json!({ "group": "green", "uplink": "deny", "limits": { "egress": { "bits_per_second": 9000 } } });
    add(&daemon, &json!({ "policy": policy }));
    let asked = asked(&daemon);
    assert_eq!(asked["policy"]["uplink"], "deny");
    assert_eq!(asked["policy"]["limits"]["egress"]["bits_per_second"], 9000);

    daemon.run("DEL", &json!({})).unwrap();
    daemon.requests();
    let bandwidth = json!({ "bandwidth": { "egressRate": 10_000 } });
    add(
        &daemon,
        &json!({ "policy": policy, "runtimeConfig": bandwidth }),
    );
    let requests = daemon.requests();
    assert_eq!(
        requests.len(),
        1,
        "the pool's policy is of no use: {requests:?}"
    );
    let policy = &requests[0].1["policy"];
    assert_eq!(policy["group"], "green");
    assert_eq!(policy["limits"]["egress"]["bits_per_second"], 10_000);
}

/// One direction's rate says nothing of the other, nor of packets.
#[test]
fn a_bandwidth_leaves_the_limits_that_it_does_not_name() {
    let daemon = Daemon::start();
    let mut config = json!({
        "policy": { "limits": {
            "egress": { "bits_per_second": 9000, "burst_bytes": 3000, "packets_per_second": 50 },
            "ingress": { "bits_per_second": 8000, "burst_bytes": 4000, "packets_per_second": 70 },
        } },
        "runtimeConfig": { "bandwidth": { "ingressRate": 1_000_000 } },
    });
    config["prevResult"] = add(&daemon, &config);
    let limits = &asked(&daemon)["policy"]["limits"];
    let egress = json!({
        "bits_per_second": 9000, "burst_bytes": 3000, "packets_per_second": 50, "burst_packets": null,
    });
    assert_eq!(limits["egress"], egress);
    // The burst belonged to the other rate.
    let ingress = json!({
        "bits_per_second": 1_000_000, "burst_bytes": null, "packets_per_second": 70, "burst_packets": null,
    });
    assert_eq!(limits["ingress"], ingress);
    assert_eq!(daemon.run("CHECK", &config).unwrap(), "");
}

/// The daemon takes no burst that is shorter than an Ethernet frame.
#[test]
fn a_burst_shorter_than_a_packet_is_raised_to_one() {
    let daemon = Daemon::start();
    let bandwidth = json!({
        "ingressRate": 1_000_000, "ingressBurst": 1, "egressRate": 1_000_000, "egressBurst": 12_120,
    });
    let mut config = json!({ "runtimeConfig": { "bandwidth": bandwidth } });
    config["prevResult"] = add(&daemon, &config);
    let requests = daemon.requests();
    let limits = &requests[1].1["policy"]["limits"];
    assert_eq!(limits["ingress"]["burst_bytes"], 1514);
    assert_eq!(limits["egress"]["burst_bytes"], 1515);
    assert_eq!(daemon.run("CHECK", &config).unwrap(), "");
}

#[test]
fn addresses_come_by_capability_else_by_args_else_by_variable() {
    let daemon = Daemon::start();
    let by_capability = json!({ "runtimeConfig": { "ips": ["10.64.0.9"] }, "args": { "cni": { "ips": ["10.64.0.1"] } } });
    let by_args = json!({ "args": { "cni": { "ips": ["fd00:c10e::9/64"] } } });
    let by_variable = json!({ "runtimeConfig": { "ips": null } });
    for (config, expected) in [
        (by_capability, "10.64.0.9"),
        (by_args, "fd00:c10e::9"),
        (by_variable, "10.64.0.9"),
    ] {
        let mut environment = daemon.environment("ADD");
        let arguments = "IgnoreUnknown=1;K8S_POD_NAME=a;IP=10.64.0.9/24;MAC=06:00:00:00:00:01";
        environment.arguments = Some(arguments.into());
        daemon.run_as(&environment, &config).unwrap();
        let asked = asked(&daemon);
        assert_eq!(asked["clone_address"], expected);
        assert_eq!(asked["attach"]["mac"], "06:00:00:00:00:01");
        daemon.run("DEL", &config).unwrap();
    }
}

#[test]
fn adding_twice_is_refused_and_what_was_added_stays() {
    let daemon = Daemon::start();
    add(&daemon, &json!({}));
    let error = daemon.run("ADD", &json!({})).unwrap_err();
    assert_eq!(error["code"], 102);
    assert!(
        error["details"]
            .as_str()
            .unwrap()
            .contains("a DEL has to come first")
    );
    assert_eq!(daemon.leases().len(), 1);
}

#[test]
fn two_interfaces_of_one_container_have_a_lease_each() {
    let daemon = Daemon::start();
    add(&daemon, &json!({}));
    let mut second = daemon.environment("ADD");
    second.interface = Some("eth1".into());
    daemon.run_as(&second, &json!({})).unwrap();
    add(&daemon, &json!({ "name": "others" }));
    assert_eq!(daemon.leases().len(), 3);
}

#[test]
fn what_fails_after_the_slot_was_taken_gives_it_back() {
    let ports =
        json!({ "portMappings": [{ "hostPort": 80, "containerPort": 80, "protocol": "tcp" }] });
    let ips = json!({ "ips": ["10.64.0.9", "fd00:c10e::a"] });
    for (config, code, word) in [(ports, 100, "conflict"), (ips, 7, "fd00:c10e::a")] {
        let daemon = Daemon::start();
        daemon.refuse("POST /v1/leases/", "conflict");
        let error = daemon
            .run("ADD", &json!({ "runtimeConfig": config }))
            .unwrap_err();
        assert_eq!(error["code"], code);
        assert!(error["details"].as_str().unwrap().contains(word), "{error}");
        assert_eq!(daemon.leases(), Vec::<String>::new());
    }
}

#[test]
fn a_pool_that_is_being_refilled_is_waited_for() {
    let daemon = Daemon::start();
    daemon.answer("POST /v1/leases", 3, 503, refusal("pool_empty"));
    add(&daemon, &json!({}));
    assert_eq!(daemon.requests().len(), 4);
}

#[test]
fn a_daemon_of_an_older_version_is_told_apart_and_keeps_nothing() {
    let daemon = Daemon::start();
    let lease = json!({
        "name": "x", "pool": "web", "slot": 0, "owner_uid": 0, "state": "active", "acquired_at": 1,
        "expires_at": null, "netns": null, "netns_name": null, "nics": [],
    });
    daemon.answer("POST /v1/leases", 1, 201, lease);
    let error = daemon.run("ADD", &json!({})).unwrap_err();
    assert_eq!(error["code"], 101);
    let requests = daemon.requests();
    assert!(
        requests
            .last()
            .unwrap()
            .0
            .starts_with("DELETE /v1/leases/cni-")
    );
}

#[test]
fn codes_of_the_daemon_become_codes_of_the_specification() {
    for (code, expected) in [
        ("invalid_request", 7),
        ("not_found", 7),
        ("unsupported", 7),
        ("forbidden", 100),
        ("conflict", 100),
        ("pool_exhausted", 100),
        ("internal", 101),
        ("unavailable", 11),
    ] {
        let daemon = Daemon::start();
        daemon.refuse("POST /v1/leases", code);
        let error = daemon.run("ADD", &json!({})).unwrap_err();
        assert_eq!(error["code"], expected, "{error}");
        assert!(error["details"].as_str().unwrap().contains(code), "{error}");
    }
}

#[test]
fn a_daemon_that_is_down_is_to_be_asked_again_later() {
    let daemon = Daemon::start();
    let gone = json!({ "socket": daemon.folder_path("none") });
    for command in ["ADD", "DEL"] {
        let error = daemon.run(command, &gone).unwrap_err();
        assert_eq!(error["code"], 11, "{command}: {error}");
        assert!(
            error["details"]
                .as_str()
                .unwrap()
                .contains("is the daemon running?")
        );
    }
}

#[test]
fn a_namespace_that_is_gone_is_an_unknown_container() {
    let daemon = Daemon::start();
    let mut environment = daemon.environment("ADD");
    environment.netns = Some(daemon.folder_path("none").into());
    let error = daemon.run_as(&environment, &json!({})).unwrap_err();
    assert_eq!(error["code"], 3);
    assert_eq!(daemon.requests(), []);
}

#[test]
fn ranges_that_the_pool_does_not_keep_to_are_refused_before_a_slot_is_taken() {
    let range = |more: Value| json!({ "runtimeConfig": { "ipRanges": [[more]] } });
    let daemon = Daemon::start();
    for (config, fits) in [
        (range(json!({ "subnet": "10.64.0.0/24" })), true),
        (
            range(
                json!({ "subnet": "10.64.0.0/24", "rangeStart": "10.64.0.2", "rangeEnd": "10.64.0.254" }),
            ),
            true,
        ),
        (
            range(json!({ "subnet": "10.64.0.0/24", "rangeStart": "10.64.0.3" })),
            false,
        ),
        (
            range(json!({ "subnet": "10.64.0.0/24", "rangeEnd": "10.64.0.99" })),
            false,
        ),
        (
            range(json!({ "subnet": "fd00:c10e::/64", "rangeStart": "fd00:c10e::2" })),
            true,
        ),
        (
            range(json!({ "subnet": "fd00:c10e::/64", "rangeStart": "fd00:c10e::3" })),
            false,
        ),
        (range(json!({ "subnet": "10.64.0.0/25" })), false),
        (range(json!({ "subnet": "10.65.0.0/16" })), false),
    ] {
        let outcome = daemon.run("ADD", &config);
        assert_eq!(outcome.is_ok(), fits, "{config}: {outcome:?}");
        if let Err(error) = outcome {
            assert_eq!(error["code"], 7);
            assert!(
                error["details"].as_str().unwrap().contains("10.64.0.0/24"),
                "{error}"
            );
            assert_eq!(daemon.leases(), Vec::<String>::new());
        }
        daemon.run("DEL", &config).unwrap();
    }
    let other_plan = json!({ "plan": "firecracker_clones" });
    let mut pool = pool();
    pool["spec"]["addresses"] = other_plan;
    daemon.answer("GET /v1/pools/web", 1, 200, pool);
    daemon
        .run("ADD", &range(json!({ "subnet": "10.64.0.0/24" })))
        .unwrap_err();
}

#[test]
fn an_answer_that_nobody_reads_is_a_failure() {
    struct Gone;
    impl std::io::Write for Gone {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let daemon = Daemon::start();
    let config = daemon.config(&json!({})).to_string();
    assert!(!sandwire_cni::run(
        &daemon.environment("ADD"),
        config.as_bytes(),
        Gone
    ));
    // The runtime's `DEL` finds what it has never heard of.
    run(&daemon.environment("DEL"), config.as_bytes()).unwrap();
    assert_eq!(daemon.leases(), Vec::<String>::new());
}
