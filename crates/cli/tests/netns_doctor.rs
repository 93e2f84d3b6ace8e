//! What the doctor says where it lacks rights that the daemon would lack too.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::process::{Command, Output};

use sandwire_testlab::{lab, sandwire};
use serde_json::{Value, json};

/// The doctor as root of a container that was given no more than these.
fn doctor(capabilities: &str, arguments: &[&str]) -> Output {
    Command::new("setpriv")
        .args(["--inh-caps=-all", "--bounding-set", capabilities])
        .arg(sandwire::executable().unwrap())
        .arg("doctor")
        .args(arguments)
        .output()
        .unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn root_without_the_rights_to_make_a_slot_is_told_that_nothing_works() {
    lab::run(|_| {
        for (capabilities, missing) in [
            // What docker gives.
            (
                "-all,+chown,+dac_override,+setuid,+setgid,+net_bind_service,+net_raw",
                "network namespaces",
            ),
            ("+all,-net_admin", "TUN/TAP"),
        ] {
            let output = doctor(capabilities, &["--json"]);
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            let findings = report["findings"].as_array().unwrap();
            let found = findings
                .iter()
                .find(|finding| finding["name"] == missing)
                .unwrap();
            assert_eq!(found["found"], false, "{found:#}");
            assert_eq!(report["works"], false, "{capabilities}");
            assert_eq!(output.status.code(), Some(2), "{capabilities}");
            let text = String::from_utf8(doctor(capabilities, &[]).stdout).unwrap();
            assert!(!text.contains("run this as root"), "{text}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn every_uplink_is_judged_by_its_own_settings_and_rules() {
    lab::run(|lab| {
        for (name, address) in [("up0", "192.0.2"), ("up1", "198.51.100")] {
            lab.run(&format!("ip link add {name} type bridge"));
            lab.run(&format!("ip link set {name} up"));
            lab.run(&format!("ip addr add {address}.2/24 dev {name}"));
        }
        lab.run(
            "ip route add default nexthop via 192.0.2.1 dev up0 nexthop via 198.51.100.1 dev up1",
        );
        lab.run("ip -6 route add default via fe80::1 dev up1 proto ra");
        lab.run("sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.up1.forwarding=0");
        lab.run("sysctl -qw net.ipv6.conf.all.forwarding=1 net.ipv6.conf.up1.accept_ra=1");
        lab.run("sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.up0.rp_filter=0");
        lab.run("sysctl -qw net.ipv4.conf.up1.rp_filter=1");
        lab.run("iptables -A FORWARD -i up0 -j ACCEPT");
        lab.run("iptables -A FORWARD -j REJECT");
        let output = doctor("+all", &["--json"]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let warned: Vec<&str> = report["warnings"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|warning| warning["subject"].as_str())
            .filter(|subject| subject.starts_with("net."))
            .collect();
        assert_eq!(
            warned,
            [
                "net.ipv4.conf.up1.forwarding",
                "net.ipv6.conf.up1.accept_ra",
                "net.ipv4.conf.up1.rp_filter"
            ],
            "{report:#}"
        );
        let blocked: Vec<(&str, &Value)> = report["firewall"]
            .as_array()
            .unwrap()
            .iter()
            .map(|obstacle| (obstacle["problem"].as_str().unwrap(), &obstacle["uplinks"]))
            .collect();
        let (both, second) = (json!(["up0", "up1"]), json!(["up1"]));
        let expected = [
            ("from sandboxes to the uplink", &both),
            ("from the uplink to sandboxes", &second),
        ];
        assert_eq!(blocked.len(), expected.len(), "{blocked:#?}");
        for ((problem, uplinks), (direction, of)) in blocked.into_iter().zip(expected) {
            assert!(problem.contains(direction), "{problem}");
            assert_eq!(uplinks, of, "{problem}");
        }
    });
}
