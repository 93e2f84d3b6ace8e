//! Runs some tests of the `netns` tier on an emulated machine with 64-bit ARM.
//!
//! All tests are built for it, each program of them boots a machine of its own. What the emulator can't do in a test's time
//! is left out; and it shows nothing of the order in which a real processor may do things.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result};
use sandwire_testlab::guest::arm::{Job, Machine};
use serde_json::Value;

use super::{
    REASON_ENDING,
    harness::{self, Executable},
    summary::Tally,
    tier::Tier,
};
use crate::command;

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// What makes cargo build for ARM.
const VARIABLES: [(&str, &str); 3] = [
    ("CARGO_BUILD_TARGET", TARGET),
    ("CC_aarch64_unknown_linux_gnu", "aarch64-linux-gnu-gcc"),
    (
        "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
        "aarch64-linux-gnu-gcc",
    ),
];

/// What runs: the source of a test program, and parts of the names of its tests (all of them if there is none). The programs of
/// the data paths and of identities are loaded by these, and carry traffic. More would take hours.
const CHOSEN: &[(&str, &[&str])] = &[
    (
        "crates/datapath/tests/offload.rs",
        // Not `faults`, which compile programs.
        &[
            "crowding::",
            "flows::",
            "forged::",
            "linear::",
            "offloads",
            "frames",
            "talk",
        ],
    ),
    (
        "crates/identity/tests/netns_identities.rs",
        &["programs_are_exchanged"],
    ),
    ("crates/identity/tests/netns_receivers.rs", &[]),
    ("crates/identity/tests/netns_sockets.rs", &[]),
    (
        "crates/slot/tests/kernel_ebpf/main.rs",
        &[
            "without_trace",
            "a_slot_moves",
            "a_policy_changes",
            "switch::",
        ],
    ),
];

/// What tests start.
const PROGRAMS: [&str; 3] = ["sandwire", "lab-traffic", "lab-vsock"];

/// Why Rust can't build for ARM here, if it can't.
pub(super) fn missing_target() -> Option<String> {
    let missing = format!("`rustup target add {TARGET}` installs what Rust needs");
    let arguments = ["--print", "target-libdir", "--target", TARGET];
    let folder = command::program("rustc", arguments).output().ok();
    let is_there = folder.is_some_and(|folder| Path::new(folder.trim()).is_dir());
    (!is_there).then_some(missing)
}

/// Runs the tests.
pub(super) fn run(filters: &[String]) -> Result<Tally> {
    let machine = Machine::fetch()?;
    let built = harness::build_tests(&VARIABLES)?;
    let executables = harness::test_executables(&built)?;
    let beside = programs(&built)?;
    // What the build takes is not the tests' time.
    let end = Instant::now() + Tier::Arm.deadline();
    let mut tally = Tally::default();
    for (source, parts) in CHOSEN {
        let executable = executables
            .iter()
            .find(|executable| executable.label == *source)
            .with_context(|| format!("cargo built no tests of {source}"))?;
        let mut ran = run_program(&machine, executable, &script(parts, filters), &beside, end)?;
        if ran.passed + ran.failed == 0 && filters.is_empty() {
            ran.fail(format!("{source}: no test ran on ARM"));
        }
        tally += ran;
    }
    Ok(tally)
}

fn run_program(
    machine: &Machine,
    executable: &Executable,
    script: &str,
    beside: &[PathBuf],
    end: Instant,
) -> Result<Tally> {
    let folder = tempfile::tempdir().context("making a temporary folder")?;
    let job = Job {
        script,
        program: &executable.path,
        beside,
    };
    eprintln!("     Running {} on ARM", executable.label);
    let command = machine.command(folder.path(), &job)?;
    harness::run_watched(command, &executable.label, end, harness::Shown::Alone)
}

/// Runs the program's tests of `netns` whose names contain any of these parts; the user's come in place of ours. Which tier
/// a test belongs to only the program can say, so it is asked in the machine.
fn script(parts: &[&str], filters: &[String]) -> String {
    let parts = parts.iter().map(|part| (*part).to_owned());
    let parts: Vec<String> = if filters.is_empty() {
        parts.collect()
    } else {
        filters.to_vec()
    };
    let any: String = if parts.is_empty() {
        " -e ''".to_owned()
    } else {
        parts.iter().map(|part| format!(" -e '{part}'")).collect()
    };
    let ending = format!("{REASON_ENDING}{}", Tier::Netns.name());
    // The empty name is no test's: with no name at all, all would run.
    format!(
        "names=$(\"$1\" --list --ignored --format terse | sed -n 's/: test$//p')\n\
         ours=$(\"$1\" --exact '' $names | sed -n 's/^test \\(.*\\) \\.\\.\\. ignored, .*{ending}$/\\1/p' | grep -F{any})\n\
         exec \"$1\" --ignored --test-threads=1 --exact '' $ours\n"
    )
}

/// Where the programs are that tests start.
fn programs(built: &[Value]) -> Result<Vec<PathBuf>> {
    let path = |name: &str| {
        let is_it = |message: &&Value| {
            message["target"]["name"] == name
                && message["target"]["kind"][0] == "bin"
                && message["profile"]["test"] == false
        };
        let path = built.iter().find(is_it)?["executable"].as_str()?;
        Some(PathBuf::from(path))
    };
    PROGRAMS
        .into_iter()
        .map(|name| path(name).with_context(|| format!("cargo built no program {name}")))
        .collect()
}
