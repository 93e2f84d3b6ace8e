//! What it takes to add and to remove an identity by the command that users have, beside few and beside many, and to be
//! rid of many whose cgroups are gone.

use std::{
    env, fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use sandwire_identity::OwnCgroup;

use super::{Extent, place};
use crate::{progress::Step, record::Record};

/// Where the identities are pinned.
const PINS: &str = "/sys/fs/bpf/bench-identity-life";
const NETWORK: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 0);
const FEW: u32 = 10;
/// Identities that are added, and then removed, beside the others.
const SAMPLES: u32 = 20;
/// How long the kernel may take to let go of cgroups.
const PATIENCE: Duration = Duration::from_secs(60);

fn many(extent: &Extent) -> u32 {
    if extent.is_quick() { 100 } else { 1000 }
}

pub(super) fn measure(extent: &Extent, record: &mut Record) -> Result<()> {
    let host = Host::create()?;
    let many = many(extent);
    let firsts = if extent.is_quick() { 1 } else { 5 };
    let step = Step::begin("identities come and go", many + SAMPLES);
    for _ in 0..firsts {
        record.add("first", "identity_add", "ms", &[host.add(1)?]);
        record.add("last", "identity_remove", "ms", &[host.remove(1)?]);
    }
    let mut there = 0;
    for others in [FEW, many] {
        while there < others {
            there += 1;
            host.add(there)?;
            step.at(there);
        }
        let case = format!("beside_{others}");
        for number in others + 1..=others + SAMPLES {
            record.add(&case, "identity_add", "ms", &[host.add(number)?]);
        }
        for number in others + 1..=others + SAMPLES {
            record.add(&case, "identity_remove", "ms", &[host.remove(number)?]);
        }
    }
    let lost = host.lose(many)?;
    record.add(&format!("lost_{many}"), "identity_list", "ms", &[lost]);
    Ok(())
}

/// The private host itself, with cgroups.
struct Host {
    cgroup: OwnCgroup,
}

impl Host {
    fn create() -> Result<Self> {
        let cgroup = place::own_cgroup()?;
        Ok(Self { cgroup })
    }

    fn path(&self, number: u32) -> PathBuf {
        self.cgroup.path().join(format!("c{number}"))
    }

    /// Makes a cgroup, and adds its identity; how long the latter takes, in milliseconds.
    fn add(&self, number: u32) -> Result<f64> {
        let cgroup = self.path(number);
        fs::create_dir(&cgroup).with_context(|| format!("cannot make {}", cgroup.display()))?;
        let address = Ipv4Addr::from_bits(NETWORK.to_bits() + number).to_string();
        let mut command = command("add")?;
        command.arg(&cgroup).args(["--address", &address]);
        Ok(run(&mut command)?.0)
    }

    fn remove(&self, number: u32) -> Result<f64> {
        let cgroup = self.path(number);
        let mut command = command("remove")?;
        let (milliseconds, _) = run(command.arg(&cgroup))?;
        remove_cgroup(&cgroup)?;
        Ok(milliseconds)
    }

    /// Removes the cgroups of all that are there; how long lists take until none has any of them, in milliseconds.
    fn lose(&self, count: u32) -> Result<f64> {
        for number in 1..=count {
            remove_cgroup(&self.path(number))?;
        }
        let started = Instant::now();
        let mut taken = 0.0;
        loop {
            let (milliseconds, said) = run(&mut command("list")?)?;
            taken += milliseconds;
            if said.is_empty() {
                return Ok(taken);
            }
            ensure!(
                started.elapsed() < PATIENCE,
                "identities whose cgroups are gone are still there: {said}"
            );
        }
    }
}

fn remove_cgroup(path: &Path) -> Result<()> {
    fs::remove_dir(path).with_context(|| format!("cannot remove {}", path.display()))
}

/// The command of this executable.
fn command(verb: &str) -> Result<Command> {
    let executable = env::current_exe().context("cannot find this executable")?;
    let mut command = Command::new(executable);
    command.args(["identity", verb, "--identity-folder", PINS]);
    Ok(command)
}

/// Runs a command; how long it takes, in milliseconds, and what it says.
fn run(command: &mut Command) -> Result<(f64, String)> {
    let started = Instant::now();
    let output = command.output().context("cannot start a command")?;
    let milliseconds = started.elapsed().as_secs_f64() * 1000.0;
    ensure!(
        output.status.success(),
        "{command:?} fails: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok((
        milliseconds,
        String::from_utf8_lossy(&output.stdout).into_owned(),
    ))
}
