//! Network namespaces by name, and threads inside them.
//!
//! A socket belongs to the namespace of the thread that opened it and stays there. So whoever needs a
//! socket in a namespace opens it in [`inside`] and uses it anywhere.

use std::{
    fs::File,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::command;

/// Where `ip netns` keeps its namespace files.
pub const NETNS_FOLDER: &str = "/run/netns";

/// Runs a closure on a thread in the network namespace of this file.
///
/// # Errors
/// If the namespace can't be entered, or the closure fails.
///
/// # Panics
/// If the closure does.
pub fn inside<T: Send>(path: &Path, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let namespace = File::open(path)
        .with_context(|| format!("open the network namespace {}", path.display()))?;
    thread::scope(|scope| {
        let worker = scope.spawn(move || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                .with_context(|| format!("enter the network namespace {}", path.display()))?;
            work()
        });
        worker
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Waits until an interface has a carrier and a queue that runs, and says whether it got there. The kernel
/// sets both going a moment after somebody has opened a TAP; what is sent before that is lost. No real
/// guest is so quick.
///
/// # Errors
/// If there is no such interface.
pub fn wait_until_up(path: &Path, interface: &str, patience: Duration) -> Result<bool> {
    let deadline = Instant::now() + patience;
    let line = format!("ip -o link show dev {interface}");
    while !run_in(path, &line)?.contains("state UP") {
        if Instant::now() > deadline {
            return Ok(false);
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(true)
}

/// Path of the namespace that `ip netns` calls by this name.
#[must_use]
pub fn path_of(name: &str) -> PathBuf {
    Path::new(NETNS_FOLDER).join(name)
}

/// A command that will run in a network namespace. Only that namespace differs: mounts stay.
#[must_use]
pub fn command_in(path: &Path, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command
        .arg(format!("--net={}", path.display()))
        .arg("--")
        .arg(program);
    command
}

/// Runs a line of words in a network namespace and returns its standard output.
///
/// # Errors
/// Also if the command ends with a status other than 0.
pub fn run_in(path: &Path, line: &str) -> Result<String> {
    let mut words = line.split_whitespace();
    let program = words.next().context("an empty command line")?;
    command::output_of(command_in(path, program).args(words))
}

/// A network namespace of a test, deleted at the end of its life.
#[derive(Debug)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Creates a namespace as `ip netns add` does, with its loopback up.
    ///
    /// # Errors
    /// If `ip` can't.
    pub fn create(name: &str) -> Result<Self> {
        command::run(&format!("ip netns add {name}"))?;
        let namespace = Self {
            name: name.to_owned(),
        };
        namespace.run("ip link set lo up")?;
        Ok(namespace)
    }

    /// Its name, for `ip netns exec`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        path_of(&self.name)
    }

    /// Runs a line of words in it and returns its standard output.
    ///
    /// # Errors
    /// Also if the command ends with a status other than 0.
    pub fn run(&self, line: &str) -> Result<String> {
        run_in(&self.path(), line)
    }

    /// Runs a closure on a thread in it.
    ///
    /// # Errors
    /// If the closure fails.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        inside(&self.path(), work)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The lab's end removes it in any case; a test that deleted it by itself is in its right.
        let _ = command::run(&format!("ip netns delete {}", self.name));
    }
}
