//! What the doctor says where it lacks rights that the daemon would lack too.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::process::{Command, Output};

use sandwire_testlab::{
    lab,
    sandwire::{self, Daemon},
};
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

/// What it tells where the daemon's configuration is this.
fn of_configuration(text: &str) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    std::fs::write(&path, text).unwrap();
    let output = doctor("+all", &["--json", "--config", path.to_str().unwrap()]);
    serde_json::from_slice(&output.stdout).unwrap()
}

const TABLE_OF_ITS_OWN: &str = r#"
[[pool]]
name = "web"
guest.ipv6 = ""
addresses = { plan = "prefix", ipv4 = "10.64.0.0/16" }
policy = { route_table = 1000 }
"#;

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_configuration_that_is_wrong_is_told_where() {
    lab::run(|_| {
        let report = of_configuration("audit_secs = 3");
        let warning = &report["warnings"][0];
        assert_eq!(warning["subject"], "configuration");
        let problem = warning["problem"].as_str().unwrap();
        assert!(
            problem.contains("mine.toml:1:1: unknown field `audit_secs`"),
            "{problem}"
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn every_uplink_is_judged_by_its_own_settings_and_rules() {
    lab::run(|lab| {
        for (name, address) in [
            ("up0", "192.0.2"),
            ("up1", "198.51.100"),
            ("up2", "203.0.113"),
        ] {
            lab.run(&format!("ip link add {name} type bridge"));
            lab.run(&format!("ip link set {name} up"));
            lab.run(&format!("ip addr add {address}.2/24 dev {name}"));
        }
        lab.run(
            "ip route add default nexthop via 192.0.2.1 dev up0 nexthop via 198.51.100.1 dev up1",
        );
        lab.run("ip -6 route add default via fe80::1 dev up1 proto ra");
        // Only sandboxes of a pool with that table leave by this one.
        lab.run("ip route add default via 203.0.113.1 dev up2 table 1000");
        lab.run("sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.up1.forwarding=0");
        lab.run("sysctl -qw net.ipv6.conf.all.forwarding=1 net.ipv6.conf.up1.accept_ra=1");
        lab.run("sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.up0.rp_filter=0");
        lab.run("sysctl -qw net.ipv4.conf.up1.rp_filter=1");
        lab.run("iptables -A FORWARD -i up0 -j ACCEPT");
        lab.run("iptables -A FORWARD -j REJECT");
        let report = of_configuration(TABLE_OF_ITS_OWN);
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
        let (all, but_first) = (json!(["up0", "up1", "up2"]), json!(["up1", "up2"]));
        let expected = [
            ("from sandboxes to the uplink", &all),
            ("from the uplink to sandboxes", &but_first),
        ];
        assert_eq!(blocked.len(), expected.len(), "{blocked:#?}");
        for ((problem, uplinks), (direction, of)) in blocked.into_iter().zip(expected) {
            assert!(problem.contains(direction), "{problem}");
            assert_eq!(uplinks, of, "{problem}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_uplink_of_a_table_is_judged_once_a_pool_of_the_daemon_is_routed_by_it() {
    lab::run(|lab| {
        for (uplink, network, table) in [("up2", "203.0.113", 1000), ("up3", "198.51.100", 1001)] {
            lab.run(&format!("ip link add {uplink} type bridge"));
            lab.run(&format!("ip link set {uplink} up"));
            lab.run(&format!("ip addr add {network}.2/24 dev {uplink}"));
            lab.run(&format!(
                "ip route add default via {network}.1 dev {uplink} table {table}"
            ));
        }
        lab.run("ip rule add fwmark 0x10/0xf0 table 1001");
        lab.run("iptables -A FORWARD -j REJECT");
        let folder = lab.folder().join("daemon");
        std::fs::create_dir(&folder).unwrap();
        let executable = sandwire::executable().unwrap();
        let daemon = Daemon::start(&executable, &folder, "instance = \"lab\"\n").unwrap();
        let uplinks = || daemon.json("doctor").unwrap()["firewall"][0]["uplinks"].clone();
        assert_eq!(uplinks(), json!([]));
        let create = |name: &str, prefix: &str, policy: Value| {
            let pool = json!({
                "name": name, "kind": "host", "data_path": "ebpf", "size": 1, "guest": {"ipv6": ""},
                "addresses": {"plan": "prefix", "ipv4": prefix}, "policy": policy,
            });
            daemon.create_pool(&pool).unwrap();
        };
        create("web", "10.64.0.0/24", json!({"route_table": 1000}));
        assert_eq!(uplinks(), json!(["up2"]));
        create("marked", "10.64.1.0/24", json!({"route_mark": 0x13}));
        assert_eq!(uplinks(), json!(["up2", "up3"]));
    });
}
