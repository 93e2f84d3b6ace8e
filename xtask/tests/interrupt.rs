//! What becomes of running tests when `cargo xtask test` is ended.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    process::{Command, Stdio},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open},
};

/// Starts tests, of a cargo that never ends and has a child, and sends the signal to `xtask` alone, as `kill` does and as a terminal
/// does whose group the tests aren't in.
fn ends_all_with(signal: Signal, status: i32) {
    let folder = tempfile::tempdir().unwrap();
    let cargo = folder.path().join("cargo");
    fs::write(
        &cargo,
        "#!/bin/sh\nsleep 1000 &\necho pids $$ $!\nsleep 1000\n",
    )
    .unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    let mut xtask = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["test", "unit", "--no-setup"])
        .env("CARGO", &cargo)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(xtask.stdout.take().unwrap()).lines();
    let pids: Vec<Pid> = lines
        .map(Result::unwrap)
        .find_map(|line| line.strip_prefix("pids ").map(str::to_owned))
        .unwrap()
        .split_whitespace()
        .map(|pid| Pid::from_raw(pid.parse().unwrap()).unwrap())
        .collect();
    let fds: Vec<_> = pids
        .iter()
        .map(|pid| pidfd_open(*pid, PidfdFlags::empty()).unwrap())
        .collect();
    kill_process(Pid::from_child(&xtask), signal).unwrap();
    let ended = xtask.wait().unwrap();
    // Readable once the process has ended.
    let patience = Timespec {
        tv_sec: 30,
        tv_nsec: 0,
    };
    let gone: Vec<bool> = fds
        .iter()
        .map(|fd| poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&patience)).unwrap() == 1)
        .collect();
    if gone.contains(&false) {
        let _ = kill_process_group(pids[0], Signal::KILL);
    }
    assert_eq!(gone, [true, true], "the command and its child have ended");
    assert_eq!(ended.code(), Some(status));
}

#[test]
fn ctrl_c_ends_the_tests_that_run() {
    ends_all_with(Signal::INT, 130);
}

#[test]
fn a_termination_ends_the_tests_that_run() {
    ends_all_with(Signal::TERM, 143);
}
