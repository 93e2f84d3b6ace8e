//! `sandwire daemon`: the daemon in the foreground.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;

use crate::{
    failure::{Failure, Outcome},
    log, privilege,
};

/// Command line of `sandwire daemon`.
#[derive(Debug, Args)]
#[command(
    after_help = "Logs go to standard error; the environment variable SANDWIRE_LOG says how much. Where it \
    listens is said by the configuration, not by --socket."
)]
pub(crate) struct Arguments {
    /// Configuration. Without this flag it is /etc/sandwire/sandwire.toml, which may be missing.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Outcome {
    log::of_service(false);
    match sandwire_daemon::run(arguments.config.as_deref()) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            let message = privilege::advise(format!("cannot run the daemon: {error}"), &error);
            Err(if error.is_refusal() {
                Failure::refused(message)
            } else {
                Failure::failed(message)
            })
        }
    }
}
