//! `cargo xtask demo`: the main job, for real, on any Debian machine with a Rust toolchain.
//!
//! Outside, it installs and builds what is missing, fetches a kernel for the guest, and starts itself
//! once more in private namespaces; [`story`] is what happens there. Afterwards it compares the
//! machine's own network with what it was before: nothing of the demo ever touches it.

mod clone;
mod guest;
mod story;

use std::{
    io::IsTerminal,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use sandwire_testlab::{command as tools, guest::kernel::Kernel, lab, snapshot::Snapshot};

use crate::{command, packages, workspace};

/// Shows clones of one microVM snapshot, each reachable at its own address.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Clones to restore.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=200))]
    clones: u16,
    /// What runs the guests.
    #[arg(long, value_enum, default_value_t = guest::Kind::Qemu)]
    vmm: guest::Kind,
    /// Kind of slot.
    #[arg(long, value_enum, default_value_t = SlotKind::Netns)]
    kind: SlotKind,
    /// Kernel for Firecracker, an ELF image or one packed with xz.
    #[arg(long, value_name = "FILE", env = "SANDWIRE_FIRECRACKER_KERNEL")]
    kernel: Option<PathBuf>,
    /// The built executable: set when the demo starts itself in its namespaces.
    #[arg(long, hide = true, value_name = "EXECUTABLE")]
    inside: Option<PathBuf>,
}

/// Kinds of slot, as the product names them.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum SlotKind {
    /// A network namespace with a TAP of the snapshot's own name.
    Netns,
    /// A TAP in the host's namespace.
    Host,
}

impl SlotKind {
    /// Its name on the command line and in the product.
    fn name(self) -> &'static str {
        match self {
            Self::Netns => "netns",
            Self::Host => "host",
        }
    }

    /// The data path that the demo shows it with.
    fn data_path(self) -> &'static str {
        match self {
            Self::Netns => "nft",
            Self::Host => "ebpf",
        }
    }
}

/// Runs `cargo xtask demo`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    if let Some(executable) = &arguments.inside {
        story::tell(arguments, executable)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(obstacle) = obstacle(arguments) {
        eprintln!("error: {obstacle}");
        return Ok(ExitCode::from(1));
    }
    packages::ensure()?;
    command::cargo(["build", "--package", "sandwire-cli"]).run()?;
    let executable = workspace::metadata()?
        .target_directory
        .join("debug/sandwire");
    if arguments.vmm == guest::Kind::Qemu {
        // Now, since the namespaces have no way to the world.
        waiting("fetching a kernel for the guest (once)", Kernel::fetch)?;
    }
    let started = Instant::now();
    let before = Snapshot::take()?;
    let own = std::env::current_exe().context("find this executable")?;
    let mut inner = lab::isolated(&own);
    inner
        .args(["demo", "--clones", &arguments.clones.to_string()])
        .args(["--vmm", arguments.vmm.name()])
        .args(["--kind", arguments.kind.name()])
        .arg("--inside")
        .arg(&executable);
    if let Some(kernel) = &arguments.kernel {
        inner.arg("--kernel").arg(kernel);
    }
    let status = inner.status().context("start the demo's namespaces")?;
    before
        .wait_unchanged(Duration::from_secs(10))
        .context("the machine is not as it was")?;
    if !status.success() {
        eprintln!("The demo failed ({status}). The machine is as it was.");
        return Ok(ExitCode::from(2));
    }
    println!(
        "The machine is as it was: its interfaces, addresses, routes, rules, nftables, namespaces, \
         mounts and pinned BPF objects were compared ({:.0} s).",
        started.elapsed().as_secs_f64()
    );
    Ok(ExitCode::SUCCESS)
}

/// Why the demo can't be shown as asked.
fn obstacle(arguments: &Arguments) -> Option<String> {
    if !command::is_root() {
        return Some(
            "the demo makes namespaces and needs root: sudo -E cargo xtask demo".to_owned(),
        );
    }
    if arguments.vmm == guest::Kind::Firecracker {
        if !tools::is_on_path("firecracker") {
            return Some(
                "firecracker is not on the PATH: install it from its releases page, or leave \
                 --vmm out to use QEMU"
                    .to_owned(),
            );
        }
        if arguments.kernel.is_none() {
            return Some(
                "Firecracker needs a kernel: name one with --kernel FILE or in \
                 SANDWIRE_FIRECRACKER_KERNEL"
                    .to_owned(),
            );
        }
    }
    None
}

/// Does something that takes a while, with a spinner if somebody watches.
fn waiting<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    if !std::io::stderr().is_terminal() {
        return work();
    }
    let style =
        ProgressStyle::with_template("{spinner} {msg} {elapsed}").context("draw a progress bar")?;
    let spinner = ProgressBar::new_spinner()
        .with_style(style)
        .with_message(what.to_owned());
    spinner.enable_steady_tick(Duration::from_millis(100));
    let result = work();
    spinner.finish_and_clear();
    result
}
