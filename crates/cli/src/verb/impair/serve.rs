//! `sandwire impair serve`: the impairment service, a process of its own.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, builder::RangedU64ValueParser};
use sandwire_impair_host::service::{self, Settings};

use crate::{
    detached,
    failure::{Failure, Outcome},
    log,
};

/// Command line of `sandwire impair serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "Logs go to standard error; the environment variable SANDWIRE_LOG says how much. SIGTERM ends it: packets \
    under way are let go, and every impairment ends. After any other end it takes its impairments up again when it is \
    started anew, and until then their packets are dropped, or pass with --on-death open."
)]
pub(crate) struct Arguments {
    /// Engines, each a thread.
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = RangedU64ValueParser::<usize>::new().range(1..=1024))]
    threads: usize,

    /// Interfaces at most.
    #[arg(long, value_name = "NUMBER", default_value_t = 1024)]
    targets_max: usize,

    /// Packets under way at most, per thread; further ones are dropped and counted.
    #[arg(long, value_name = "NUMBER", default_value_t = 131_072, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    packets_max: u32,

    /// Bytes of the longest frame; interfaces of a larger MTU are refused.
    #[arg(long, value_name = "BYTES", default_value_t = 2048, value_parser = clap::value_parser!(u16).range(64..=65_000))]
    frame_bytes_max: u16,

    /// Folder on a bpffs for what stays in the kernel when the service has died.
    #[arg(long, value_name = "FOLDER", default_value = sandwire_datapath::divert::FOLDER)]
    pins: PathBuf,

    /// Leave the session of whoever starts it. A file that its log is appended to begins anew at 4 MiB.
    #[arg(long)]
    detach: bool,
}

pub(super) fn run(folder: &Path, arguments: &Arguments) -> Outcome {
    log::of_service(arguments.detach);
    let failed = |reason: String| Failure::failed(format!("cannot serve impairments: {reason}"));
    if arguments.detach {
        detached::begin().map_err(|error| failed(format!("new session: {error}")))?;
    }
    let settings = Settings {
        pins: arguments.pins.clone(),
        threads: arguments.threads,
        targets_max: arguments.targets_max,
        packets_max: arguments.packets_max,
        frame_bytes_max: arguments.frame_bytes_max,
        ..Settings::new(folder.to_owned())
    };
    service::run(&settings).map_err(|error| failed(error.to_string()))?;
    Ok(ExitCode::SUCCESS)
}
