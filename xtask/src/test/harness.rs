//! Finds the tests of a tier and runs them under a deadline.
//!
//! The unit tier is plain `cargo test`. The others are the ignored tests of the same executables:
//! asked to run an ignored test by name, the standard harness only prints its reason, which names the
//! tier. Each privileged executable runs in a mount and PID namespace of its own, so that whatever
//! it started ends with it.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{
    interrupt::Group,
    results::{Results, Said},
    summary::Tally,
    tier::Tier,
    tier_of_reason,
};
use crate::{command, workspace};

/// A test executable that cargo built.
pub(super) struct Executable {
    pub(super) path: PathBuf,
    package_folder: PathBuf,
    /// Its source, from the workspace's root.
    pub(super) label: String,
}

/// Runs the tests that need nothing.
pub(crate) fn run_cargo_test(filters: &[String], deadline: Duration) -> Result<Tally> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args(["test", "--workspace", "--locked", "--no-fail-fast", "--"])
        .args(filters)
        .current_dir(workspace::root());
    run_watched(cargo, "cargo test", Instant::now() + deadline, Shown::Alone)
}

/// Runs the ignored tests that belong to a tier, of as many executables at a time as the tier has lanes.
pub(crate) fn run_ignored(tier: Tier, filters: &[String]) -> Result<Tally> {
    let selections = selections(tier, filters)?;
    let lanes = tier.lanes().min(selections.len());
    let shown = if lanes > 1 {
        Shown::Named
    } else {
        Shown::Alone
    };
    // What the build takes is not the tests' time.
    let end = Instant::now() + tier.deadline();
    let waiting = Mutex::new(selections.into_iter());
    let lane = || -> Result<Tally> {
        let mut tally = Tally::default();
        while let Some((executable, tests)) = next(&waiting) {
            let label = &executable.label;
            eprintln!("     Running {label} ({} tests)", tests.len());
            let command = in_namespaces(&executable, tier, &tests);
            tally += run_watched(command, label, end, shown)?;
        }
        Ok(tally)
    };
    thread::scope(|scope| {
        let running: Vec<_> = (0..lanes).map(|_| scope.spawn(lane)).collect();
        let mut tally = Tally::default();
        for lane in running {
            tally += lane
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(tally)
    })
}

/// Executables and those of their tests that are to run.
fn selections(tier: Tier, filters: &[String]) -> Result<Vec<(Executable, Vec<String>)>> {
    let mut selections = Vec::new();
    for executable in test_executables(&build_tests(&[])?)? {
        let selected: Vec<String> = ignored_tests(&executable)?
            .into_iter()
            .filter(|(_, of)| *of == tier)
            .map(|(name, _)| name)
            .filter(|name| filters.is_empty() || filters.iter().any(|part| name.contains(part)))
            .collect();
        if !selected.is_empty() {
            selections.push((executable, selected));
        }
    }
    // Those of few tests first: at the end, the lanes have enough of them to share.
    selections.sort_by_key(|(_, tests)| tests.len());
    Ok(selections)
}

fn next<T>(waiting: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
    waiting.next()
}

/// Builds every test executable of the workspace, and the executables that they start; returns what cargo says of each.
pub(super) fn build_tests(more: &[(&str, &str)]) -> Result<Vec<Value>> {
    let mut cargo = command::cargo([
        "test",
        "--workspace",
        "--locked",
        "--no-run",
        "--message-format",
        "json-render-diagnostics",
    ]);
    for (name, value) in more {
        cargo = cargo.env(name, value);
    }
    let text = cargo.output()?;
    text.lines()
        .map(|line| serde_json::from_str(line).context("reading what cargo built"))
        .collect()
}

/// The test executables among what cargo built.
pub(super) fn test_executables(built: &[Value]) -> Result<Vec<Executable>> {
    let mut executables = Vec::new();
    for message in built {
        let is_test = message["profile"]["test"].as_bool() == Some(true);
        if let (true, Some(path)) = (is_test, message["executable"].as_str()) {
            executables.push(Executable::from_message(message, path)?);
        }
    }
    Ok(executables)
}

impl Executable {
    fn from_message(message: &Value, path: &str) -> Result<Self> {
        let manifest = message["manifest_path"].as_str().unwrap_or_default();
        let folder = Path::new(manifest)
            .parent()
            .with_context(|| format!("cargo names no manifest for {path}"))?;
        let source = message["target"]["src_path"].as_str().unwrap_or(path);
        let source = Path::new(source);
        let label = source.strip_prefix(workspace::root()).unwrap_or(source);
        Ok(Self {
            path: path.into(),
            package_folder: folder.into(),
            label: label.display().to_string(),
        })
    }

    fn command(&self) -> Command {
        self.set_up(Command::new(&self.path))
    }

    /// What cargo sets for a test.
    fn set_up(&self, mut command: Command) -> Command {
        command
            .current_dir(&self.package_folder)
            .env("PATH", command::search_path_of_tests())
            .env("CARGO_MANIFEST_DIR", &self.package_folder);
        command
    }
}

/// The executable's ignored tests and their tiers, without running any.
fn ignored_tests(executable: &Executable) -> Result<Vec<(String, Tier)>> {
    let list = read_output(executable, &["--list", "--ignored", "--format", "terse"])?;
    let names: Vec<&str> = list
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .collect();
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let mut arguments = vec!["--exact"];
    arguments.extend(&names);
    let reasons = read_output(executable, &arguments)?;
    let mut tests = Vec::new();
    for name in names {
        let start = format!("test {name} ... ignored, ");
        let reason = reasons.lines().find_map(|line| line.strip_prefix(&start));
        let Some(tier) = reason.and_then(tier_of_reason) else {
            bail!(
                "{}: the reason why test {name} is ignored names no tier; write \
                 #[ignore = \"needs …: cargo xtask test TIER\"]",
                executable.label
            );
        };
        tests.push((name.to_owned(), tier));
    }
    Ok(tests)
}

fn read_output(executable: &Executable, arguments: &[&str]) -> Result<String> {
    let output = executable
        .command()
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("listing the tests of {}", executable.label))?;
    // Otherwise a program that crashes would pass for one without tests.
    ensure!(
        output.status.success(),
        "{} can't list its tests ({}): {}",
        executable.label,
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    String::from_utf8(output.stdout)
        .with_context(|| format!("reading the list of tests of {}", executable.label))
}

/// The command that runs tests as children of a shell that is the first process of a PID namespace.
/// The shell reaps what tests orphan; everything ends with it.
fn in_namespaces(executable: &Executable, tier: Tier, tests: &[String]) -> Command {
    let mut command = executable.set_up(Command::new("unshare"));
    command
        .args(["--mount", "--pid", "--fork", "--mount-proc", "--kill-child"])
        .args(["sh", "-c", "\"$0\" \"$@\"; exit $?"])
        .arg(&executable.path)
        .args(["--ignored", "--exact"])
        .args(tests);
    if let Some(threads) = tier.threads() {
        command.arg(format!("--test-threads={threads}"));
    }
    command
}

/// How the output of a test command is shown.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shown {
    /// As it is: nothing else runs.
    Alone,
    /// Each line behind the command's label, since others' come in between.
    Named,
}

impl Shown {
    fn print(self, label: &str, line: &str) {
        match self {
            Self::Alone => println!("{line}"),
            Self::Named if line.is_empty() => {}
            Self::Named => println!("{label}: {line}"),
        }
    }
}

/// Runs a test command, shows its output, counts its results, and ends it at the deadline.
pub(super) fn run_watched(
    mut command: Command,
    label: &str,
    end: Instant,
    shown: Shown,
) -> Result<Tally> {
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut group = Group::start(&mut command).with_context(|| format!("starting {label}"))?;
    let lines = lines_of(group.leader());
    let (mut tally, mut results) = (Tally::default(), Results::default());
    loop {
        match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                shown.print(label, &line);
                match results.read(&line) {
                    Some(Said::Result(counts)) => tally += counts,
                    Some(Said::Failed(name)) => tally.failures.push(format!("{label}: {name}")),
                    Some(Said::Why(name, why)) => tally.explain(&format!("{label}: {name}"), &why),
                    None => {}
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                tally.fail(format!(
                    "{label}: still running at the tier's deadline; ended"
                ));
                group.kill()?;
                break;
            }
        }
    }
    let status = group
        .wait()
        .with_context(|| format!("waiting for {label}"))?;
    if !status.success() && tally.failed == 0 {
        tally.fail(format!("{label}: {status}"));
    }
    if results.are_awaited() && tally.failed == 0 {
        tally.fail(format!("{label}: ended before its tests did"));
    }
    Ok(tally)
}

fn lines_of(child: &mut Child) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    if let Some(output) = child.stdout.take() {
        thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                // A guest's console ends lines as terminals do.
                let line = String::from_utf8_lossy(&line)
                    .trim_end_matches('\r')
                    .to_owned();
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
    }
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    #[test]
    fn a_program_that_cannot_list_its_tests_is_not_one_without_tests() {
        // It knows no option `--list`, says so, and ends badly.
        let executable = Executable {
            path: "ls".into(),
            package_folder: "/".into(),
            label: "tests/broken.rs".to_owned(),
        };
        let error = ignored_tests(&executable).unwrap_err().to_string();
        assert!(error.starts_with("tests/broken.rs can't list"), "{error}");
        assert!(error.contains("--list"), "what it said: {error}");
    }

    #[test]
    fn results_of_several_executables_add_up() {
        let script = "echo 'running 2 tests'
                      echo 'test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured'
                      echo 'running 3 tests'
                      echo 'test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured'";
        let tally = run_watched(shell(script), "script", soon(), Shown::Alone).unwrap();
        assert_eq!((tally.passed, tally.failed), (5, 0));
    }

    #[test]
    fn a_test_program_that_crashes_counts_as_failed() {
        let tally = run_watched(shell("kill -9 $$"), "script", soon(), Shown::Alone).unwrap();
        assert_eq!((tally.passed, tally.failed), (0, 1));
    }

    /// As a guest does whose kernel panics: QEMU ends well.
    #[test]
    fn a_test_program_that_ends_well_without_a_result_counts_as_failed() {
        let script = "echo 'running 2 tests'; echo 'test a ... ok'";
        let tally = run_watched(shell(script), "script", soon(), Shown::Alone).unwrap();
        assert_eq!((tally.passed, tally.failed), (0, 1));
    }

    #[test]
    fn a_program_that_has_no_tests_to_tell_of_may_end_well() {
        let tally = run_watched(shell("echo done"), "script", soon(), Shown::Alone).unwrap();
        assert_eq!((tally.passed, tally.failed), (0, 0));
    }

    #[test]
    fn a_test_program_that_hangs_is_ended_and_counts_as_failed() {
        let started = Instant::now();
        let end = started + Duration::from_millis(100);
        let tally = run_watched(shell("sleep 60"), "script", end, Shown::Alone).unwrap();
        assert_eq!((tally.passed, tally.failed), (0, 1));
        assert!(started.elapsed() < Duration::from_secs(30));
    }
}
