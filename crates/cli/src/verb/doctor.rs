//! `sandwire doctor`: what this host can do, what is used instead of what is missing, how to get it,
//! and which settings and rules of others would block sandboxes' traffic.
//!
//! What can hang or leave something behind is probed in a process of its own (this executable again,
//! by a hidden flag), in a network namespace that goes with it.

mod datapath;
mod features;
mod firewall;
mod host;
mod identities;
mod managers;
mod probe;
mod report;
mod uplinks;
mod vmm;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, ValueEnum};

use crate::{Context, failure::Outcome, output::wants_colour};

/// Command line of `sandwire doctor`.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit status: 0 if sandwire can work here, 2 if something essential is missing."
)]
pub(crate) struct Arguments {
    /// The daemon's configuration, whose uplinks and pools' routing tables and marks are looked at, beside those of the pools of a
    /// daemon that runs, not those of leases with a policy of their own; and cgroups of its identities. Without this flag it is
    /// /etc/sandwire/sandwire.toml, which may be missing.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Probe only this, in this process, and print what came of it.
    #[arg(long, hide = true, value_enum)]
    probe: Option<Probe>,
}

/// What is probed in a process of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Probe {
    /// Kernel features, in a throw-away network namespace.
    Features,
    /// Whether KVM runs code.
    Kvm,
    /// Whether the programs of the eBPF data path load, in throw-away namespaces.
    DataPath,
}

impl Probe {
    fn name(self) -> &'static str {
        match self {
            Self::Features => "features",
            Self::Kvm => "kvm",
            Self::DataPath => "data-path",
        }
    }
}

/// How long the daemon may take to tell its pools: it may be what is wrong.
const DAEMON_PATIENCE: Duration = Duration::from_secs(2);

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    if let Some(probe) = arguments.probe {
        return context.output.answer(&probe::here(probe), |results| {
            serde_json::to_string(results).unwrap_or_default()
        });
    }
    // A daemon that isn't there has no pools but those of the configuration.
    let pools = context.client().with_timeout(DAEMON_PATIENCE).pools();
    let report = report::examine(arguments.config.as_deref(), &pools.unwrap_or_default());
    let colour = wants_colour();
    context
        .output
        .answer(&report, |report| report.text(colour))?;
    Ok(ExitCode::from(if report.works { 0 } else { 2 }))
}
