//! Real guests in the benchmarks: that they boot and take part, not how fast.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

use std::process::Command;

use sandwire_testlab::{command, lab, sandwire};
use serde_json::Value;

/// The record of the shortest run of a suite whose guests are on plain TAPs of the kernel's.
fn record_of(suite: &str, more: &str) -> Value {
    let mut bench = Command::new(sandwire::executable().unwrap());
    bench
        .args(["bench", suite, "--quick", "--json", "--only", "kernel"])
        .args(more.split_whitespace());
    serde_json::from_str(&command::output_of(&mut bench).unwrap()).unwrap()
}

fn median(record: &Value, case: &str, metric: &str) -> f64 {
    let mut rows = record["rows"].as_array().unwrap().iter();
    let row = rows.find(|row| row["case"] == case && row["metric"] == metric);
    let row = row.unwrap_or_else(|| panic!("no {metric} of {case}: {}", record["not_run"]));
    row["median"].as_f64().unwrap()
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn real_guests_answer_and_receive_in_clones() {
    lab::run(|_| {
        let few = "--slots 2 --endpoints 2 --active 2 --linux-max 2 --client beyond";
        let short = "--ping-seconds 1 --throughput-seconds 1 --probes 20";
        let record = record_of("clones", &format!("{few} {short}"));
        assert!(median(&record, "basic", "beyond_2_linux_ping_p50") > 0.0);
        assert!(median(&record, "basic", "beyond_2_linux_throughput_min") > 0.0);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn a_real_guest_sends_in_stream() {
    lab::run(|_| {
        let record = record_of("stream", "--seconds 1 --runs 1 --receiver socket");
        assert!(median(&record, "kernel_linux", "tcp_64_throughput") > 0.0);
        assert!(median(&record, "kernel_linux", "tcp_16k_throughput") > 0.0);
    });
}
