//! Somebody deletes a slot's objects under the daemon: it is seen, reported, repaired or retired.
//!
//! Each test breaks one object with `ip` or `nft`, as an operator's slip or another program would, and
//! waits for the audit. The judge is traffic (`ping` to the slot's clone address, which the slot's own
//! stack doesn't answer but its fake guest does) and `ip`/`nft` themselves.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{
    command,
    fake_guest::FakeGuest,
    lab::{self, Lab},
    sandwire,
};
use serde_json::Value;

const CONFIG: &str = r#"
instance = "damage"
audit_seconds = 1
[[pool]]
name = "web"
size = 2
data_path = "nft"
addresses = { plan = "prefix", ipv4 = "10.64.0.0/24", ipv6 = "fd00:c10e::/64" }
"#;
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_deleted_table_of_a_leased_slot_is_written_again() {
    lab::run(|lab| {
        let (daemon, lease) = leased(lab);
        let netns = lease["netns_name"].as_str().unwrap();
        let _guest = guest(&lease);
        lab.run(&format!(
            "ip netns exec {netns} nft delete table inet sandwire"
        ));
        wait_until("the clone answers again", || answers(&lease));
        wait_until("the repair is reported", || {
            daemon.log().contains("nft table")
        });
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_deleted_veth_of_a_leased_slot_is_made_again() {
    lab::run(|lab| {
        let (_daemon, lease) = leased(lab);
        let netns = lease["netns_name"].as_str().unwrap();
        let _guest = guest(&lease);
        // It is gone when this returns, so that only another one can carry an answer.
        lab.run(&format!("ip -n {netns} link delete uplink0"));
        wait_until("the clone answers again", || answers(&lease));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_deleted_tap_of_a_leased_slot_is_made_again() {
    lab::run(|lab| {
        let (daemon, lease) = leased(lab);
        let netns = lease["netns_name"].as_str().unwrap();
        lab.run(&format!("ip -n {netns} link delete vmtap0"));
        wait_until("the TAP is there again", || {
            daemon.json("show a").unwrap()["taps"][0]["used"] == "unused"
        });
        let _guest = guest(&lease);
        wait_until("the clone answers", || answers(&lease));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_tap_that_a_vmm_made_for_itself_is_noticed() {
    lab::run(|lab| {
        let (daemon, lease) = leased(lab);
        let netns = lease["netns_name"].as_str().unwrap();
        // What Firecracker does as root when it finds no TAP: it makes one of that name.
        // The audit may be quicker and make one of its own in between: then once more.
        wait_until("the TAP is seen to be foreign", || {
            let _ = command::shell(&format!(
                "ip -n {netns} link delete vmtap0; ip -n {netns} tuntap add name vmtap0 mode tap"
            ));
            let shown = daemon.json("show a").unwrap();
            shown["taps"][0]["used"] == "foreign" && shown["defects"] != serde_json::json!([])
        });
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lost_namespace_of_a_lease_is_reported_and_the_lease_can_be_released() {
    lab::run(|lab| {
        let (daemon, lease) = leased(lab);
        let netns = lease["netns_name"].as_str().unwrap();
        lab.run(&format!("ip netns delete {netns}"));
        wait_until("the defect is shown", || {
            let shown = daemon.json("show a").unwrap();
            shown["defects"]
                .as_array()
                .is_some_and(|defects| !defects.is_empty())
        });
        let released = daemon.json("release a").unwrap();
        assert_eq!(released["released"][0]["outcome"], "released", "{released}");
        assert_eq!(daemon.json("list").unwrap(), serde_json::json!([]));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_damaged_ready_slot_is_retired_and_never_handed_out() {
    lab::run(|lab| {
        let executable = sandwire::executable().unwrap();
        let daemon = sandwire::Daemon::start(&executable, lab.folder(), CONFIG).unwrap();
        daemon.wait_pool("web", 2, PATIENCE).unwrap();
        for netns in namespaces() {
            lab.run(&format!("ip netns exec {netns} nft flush ruleset"));
        }
        wait_until("the damage is seen", || daemon.log().contains("retired"));
        daemon.wait_pool("web", 2, PATIENCE).unwrap();
        wait_until("every ready slot is sound", || {
            // A namespace may go while we look: the daemon is still replacing the damaged ones.
            let sound = |netns: &String| {
                command::run(&format!("ip netns exec {netns} nft list tables"))
                    .is_ok_and(|tables| tables.contains("inet sandwire"))
            };
            let namespaces = namespaces();
            namespaces.len() == 2 && namespaces.iter().all(sound)
        });
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_hosts_table_is_written_again_and_denies_again() {
    lab::run(|lab| {
        let (_daemon, _lease) = leased(lab);
        let table = || lab.run("nft list tables");
        assert!(table().contains("inet sandwire-damage"), "{}", table());
        lab.run("nft flush ruleset");
        wait_until("the host's table is there again", || {
            table().contains("inet sandwire-damage")
        });
    });
}

/// Whoever sets up a firewall anew flushes everybody's tables, and may do so again and again.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_flushed_table_is_not_missing_until_the_next_inspection() {
    const ROUNDS: u32 = 6;
    // The host is inspected every ten seconds at the latest.
    const INSPECTED_EVERY: Duration = Duration::from_secs(10);
    lab::run(|lab| {
        let config = CONFIG.replace("audit_seconds = 1", "audit_seconds = 86400");
        let (_daemon, _lease) = leased_with(lab, &config);
        let begun = Instant::now();
        for round in 0..ROUNDS {
            lab.run("nft flush ruleset");
            wait_until(&format!("the table is there again, round {round}"), || {
                lab.run("nft list tables").contains("inet sandwire-damage")
            });
        }
        assert!(begun.elapsed() < INSPECTED_EVERY * (ROUNDS - 1));
    });
}

fn leased(lab: &Lab) -> (sandwire::Daemon, Value) {
    leased_with(lab, CONFIG)
}

fn leased_with(lab: &Lab, config: &str) -> (sandwire::Daemon, Value) {
    let executable = sandwire::executable().unwrap();
    let daemon = sandwire::Daemon::start(&executable, lab.folder(), config).unwrap();
    daemon.wait_pool("web", 1, PATIENCE).unwrap();
    let lease = daemon.json("acquire web a").unwrap();
    (daemon, lease)
}

fn guest(lease: &Value) -> FakeGuest {
    let netns = Path::new(lease["netns"].as_str().unwrap());
    FakeGuest::attach(netns, lease["nics"][0]["tap"].as_str().unwrap()).unwrap()
}

fn answers(lease: &Value) -> bool {
    ["ipv4", "ipv6"].iter().all(|family| {
        let address = lease["nics"][0][family]["clone_address"].as_str().unwrap();
        command::run(&format!("ping -c 1 -W 1 {address}")).is_ok()
    })
}

fn namespaces() -> Vec<String> {
    let mut names: Vec<String> = Path::new("/run/netns")
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("sandwire."))
        .collect();
    names.sort();
    names
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(
            Instant::now() < deadline,
            "after {PATIENCE:?} still not so: {what}"
        );
        thread::sleep(Duration::from_millis(50));
    }
}
