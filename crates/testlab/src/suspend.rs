//! Stops a program as Ctrl-Z does, and knows when it stands.
//!
//! SIGSTOP doesn't stop a program at once: the kernel wakes one of its threads, and only when that one runs
//! are the others asked to stop. On a busy machine they go on until then, and carry out what a test
//! believes that nobody hears.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

const PATIENCE: Duration = Duration::from_secs(30);

/// A program none of whose threads runs. It goes on when this is dropped.
#[derive(Debug)]
pub struct Suspended(Pid);

impl Suspended {
    /// Stops a program and waits until every thread of it stands.
    ///
    /// # Errors
    /// If there is no such program, or one of its threads still runs after half a minute.
    pub fn new(program: Pid) -> Result<Self> {
        kill_process(program, Signal::STOP).context("suspend a program")?;
        let suspended = Self(program);
        let deadline = Instant::now() + PATIENCE;
        while !stands(program)? {
            ensure!(
                Instant::now() < deadline,
                "process {program} still runs {PATIENCE:?} after SIGSTOP"
            );
            thread::sleep(Duration::from_millis(1));
        }
        Ok(suspended)
    }
}

impl Drop for Suspended {
    fn drop(&mut self) {
        // Somebody else may have ended it.
        let _ = kill_process(self.0, Signal::CONT);
    }
}

fn stands(program: Pid) -> Result<bool> {
    let threads = format!("/proc/{program}/task");
    for thread in fs::read_dir(&threads).with_context(|| format!("read {threads}"))? {
        let stat = thread?.path().join("stat");
        // A thread that ended since has no file any more.
        let Ok(stat) = fs::read_to_string(stat) else {
            continue;
        };
        if !is_stopped(&stat) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a line of `/proc/PID/task/TID/stat` is of a thread that a signal has stopped (proc_pid_stat(5)).
/// The name before the state may hold anything, also parentheses.
fn is_stopped(stat: &str) -> bool {
    stat.rsplit_once(')')
        .is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_name_with_a_parenthesis_is_not_the_state() {
        assert!(is_stopped("7 (a) R) T 1 7 7 0"));
        assert!(!is_stopped("7 (a) T) S 1 7 7 0"));
    }

    #[test]
    fn a_program_stands_until_it_may_go_on() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let suspended = Suspended::new(pid).unwrap();
        assert!(stands(pid).unwrap());
        drop(suspended);
        let deadline = Instant::now() + PATIENCE;
        while stands(pid).unwrap() {
            assert!(Instant::now() < deadline);
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
