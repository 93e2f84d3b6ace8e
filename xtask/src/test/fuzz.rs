//! Runs the fuzz targets of `fuzz/`, each for [`SECONDS`] seconds, from the seeds that lie beside them.
//!
//! libFuzzer steers by coverage, which the stable compiler can build in: no other toolchain is needed. What it finds
//! interesting it keeps below cargo's folder, and goes on from there the next time.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread::{self, JoinHandle},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::nice;
use serde_json::Value;

use super::{
    harness::{Shown, run_watched},
    summary::Tally,
    tier::Tier,
};
use crate::{command, workspace};

/// How long each target runs; all of them take about a minute together.
const SECONDS: u32 = 5;

/// How long one input may take, in seconds: no bound on speed, but an end to what has none.
const INPUT_SECONDS_MAX: u32 = 300;

/// Memory that a target may take; none needs a tenth of it.
const MEBIBYTES_MAX: u32 = 1024;

/// What cargo-fuzz passes to the compiler for the same end, without the sanitizers, which are unstable.
const FLAGS: [&str; 5] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// The targets, which are being built with what others leave of the processors.
pub(super) struct Targets(JoinHandle<Result<Built>>);

struct Built {
    folder: PathBuf,
    /// Their names and where they are.
    targets: Vec<(String, PathBuf)>,
}

impl Targets {
    pub(super) fn begin() -> Self {
        Self(thread::spawn(|| {
            // In Linux that is the thread's own, and of what it starts.
            nice(19).context("becoming nice")?;
            let folder = workspace::metadata()?.target_directory.join("fuzz");
            let targets = build(&folder)?;
            Ok(Built { folder, targets })
        }))
    }

    fn wait(self) -> Result<Built> {
        let built = self.0.join();
        built.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Runs the targets whose names contain one of the filters, or all.
pub(super) fn run(filters: &[String], targets: Targets) -> Result<Tally> {
    eprintln!("     Building the targets, unless they are built by now");
    let Built { folder, targets } = targets.wait()?;
    // What the build takes is not the targets' time.
    let end = Instant::now() + Tier::Fuzz.deadline();
    let mut tally = Tally::default();
    for (name, path) in targets {
        if !filters.is_empty() && !filters.iter().any(|part| name.contains(part)) {
            continue;
        }
        eprintln!("     Fuzzing {name} for {SECONDS} s");
        let outcome = run_watched(fuzzer(&name, &path, &folder)?, &name, end, Shown::Alone)?;
        if outcome.failed == 0 {
            tally.passed += 1;
        }
        tally += outcome;
    }
    Ok(tally)
}

/// Builds the targets; their names and where they are.
fn build(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let host = host()?;
    let text = command::cargo([
        "build",
        "--quiet",
        "--locked",
        "--manifest-path",
        "fuzz/Cargo.toml",
        // With a target the flags are for it alone, and not for what runs at build time.
        "--target",
        &host,
        "--message-format",
        "json-render-diagnostics",
    ])
    .env("CARGO_TARGET_DIR", folder)
    .env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\u{1f}"))
    .output()?;
    let mut targets = Vec::new();
    for line in text.lines() {
        let message: Value = serde_json::from_str(line).context("reading what cargo built")?;
        let name = message["target"]["name"].as_str();
        if let (Some(name), Some(path)) = (name, message["executable"].as_str()) {
            targets.push((name.to_owned(), path.into()));
        }
    }
    targets.sort();
    ensure!(!targets.is_empty(), "cargo built no fuzz target");
    Ok(targets)
}

/// The machine's name among the compiler's targets.
fn host() -> Result<String> {
    let text = command::program("rustc", ["-vV"]).output()?;
    match text.lines().find_map(|line| line.strip_prefix("host: ")) {
        Some(host) => Ok(host.to_owned()),
        None => bail!("rustc doesn't say what machine this is"),
    }
}

/// The command that runs one target. An input that fails is left in the folder `artifacts`, and named.
fn fuzzer(name: &str, path: &Path, folder: &Path) -> Result<Command> {
    let found = folder.join("corpus").join(name);
    let artifacts = folder.join("artifacts");
    for folder in [&found, &artifacts] {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    let mut command = Command::new(path);
    command
        .arg(format!("-max_total_time={SECONDS}"))
        .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
        .arg(format!("-rss_limit_mb={MEBIBYTES_MAX}"))
        .arg(format!("-artifact_prefix={}/{name}-", artifacts.display()))
        .args(["-verbosity=0", "-print_final_stats=1"])
        .args([found, workspace::root().join("fuzz/seeds").join(name)])
        .current_dir(folder);
    Ok(command)
}
