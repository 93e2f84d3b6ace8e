//! The benchmark `forward` on the kernel's way and on ours: what it sends arrives, unchanged. Not how fast.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

use std::process::Command;

use sandwire_testlab::{command, lab, sandwire};
use serde_json::Value;

/// Ways that frames go: out by a TAP, out by a veth, and back.
const PATHS: [&str; 3] = ["tap_to_tap", "tap_to_veth", "to_guest"];
/// Loads in a sample that is looked at.
const LOADS: f64 = 8.0;
/// Full packets in 64 KB.
const SEGMENTS: f64 = 44.0;

fn median(record: &Value, case: &str, metric: &str) -> f64 {
    let mut rows = record["rows"].as_array().unwrap().iter();
    let row = rows.find(|row| row["case"] == case && row["metric"] == metric);
    let row = row.unwrap_or_else(|| panic!("no {metric} of {case}: {}", record["not_run"]));
    row["median"].as_f64().unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn all_that_forward_sends_arrives_on_every_way_and_back() {
    lab::run(|_| {
        let mut bench = Command::new(sandwire::executable().unwrap());
        bench.args(["bench", "forward", "--quick", "--json"]);
        for way in ["kernel-nat", "recipe", "ebpf-host", "ebpf-netns", "xdp"] {
            bench.args(["--only", way]);
        }
        let text = command::output_of(&mut bench).unwrap();
        let record: Value = serde_json::from_str(&text).unwrap();
        for case in ["kernel_nat", "recipe", "ebpf_host", "ebpf_netns", "xdp"] {
            let segments = if case == "xdp" { SEGMENTS } else { 1.0 };
            for path in PATHS {
                for (load, frames) in [("64", 1.0), ("1514", 1.0), ("64k", segments)] {
                    let of = |kind: &str| median(&record, case, &format!("{path}_{load}_{kind}"));
                    assert_eq!(of("checked"), LOADS * frames, "{case} {path} {load}");
                    assert_eq!(of("missing"), 0.0, "{case} {path} {load}");
                    assert_eq!(of("wrong"), 0.0, "{case} {path} {load}");
                    assert!(of("cost") > 0.0, "{case} {path} {load}");
                }
            }
        }
        let ratio = &record["ratios"]["to_guest_ebpf_host_vs_recipe_64"];
        assert!(ratio.as_f64().unwrap() > 0.0, "{ratio}");
    });
}
