//! What the doctor says where it lacks rights that the daemon would lack too.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::process::{Command, Output};

use sandwire_testlab::{lab, sandwire};
use serde_json::Value;

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
