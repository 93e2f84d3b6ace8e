//! `sandwire vsock serve`: the service for vsock, a process of its own.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, ValueEnum};
use sandwire_vsock_host::service::{self, Seccomp, Settings};

use crate::{
    detached,
    failure::{Failure, Outcome},
    log, privilege,
};

/// Command line of `sandwire vsock serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "Logs go to standard error; the environment variable SANDWIRE_LOG says how much. It remembers its \
    channels in the folder, and serves them again when it is started anew."
)]
pub(crate) struct Arguments {
    /// Folder of its control socket and of what it remembers.
    #[arg(long, default_value = "/run/sandwire/vsock", value_name = "FOLDER")]
    folder: PathBuf,

    /// Worker threads [default: as many as processors, up to 4].
    #[arg(long, value_name = "NUMBER")]
    threads: Option<usize>,

    /// Numeric user and group to become after the start, as 990:990. Without it, it stays who it is.
    #[arg(long, value_name = "UID:GID", value_parser = user_and_group)]
    user: Option<(u32, u32)>,

    /// Microseconds that a worker looks for work before it sleeps: less latency for a busy processor.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0)]
    busy_poll_us: u64,

    /// Bytes that may be buffered for all guests together [default: 2 GiB].
    #[arg(long, value_name = "BYTES")]
    total_bytes: Option<u64>,

    /// What becomes of system calls that it has no use for.
    #[arg(long, value_enum, default_value_t = Filter::Refuse)]
    seccomp: Filter,

    /// Leave the session of whoever starts it. A file that its log is appended to begins anew at 4 MiB.
    #[arg(long)]
    detach: bool,
}

/// [`Seccomp`], as it is written.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Filter {
    /// They are allowed.
    Off,
    /// They fail.
    Refuse,
    /// They end the process.
    Kill,
}

pub(crate) fn run(arguments: &Arguments) -> Outcome {
    log::of_service(arguments.detach);
    let failed = |reason: String| Failure::failed(format!("cannot serve vsock: {reason}"));
    if arguments.detach {
        detached::begin().map_err(|error| failed(format!("new session: {error}")))?;
    }
    let usual = Settings::new(arguments.folder.clone());
    let settings = Settings {
        threads: arguments.threads,
        user: arguments.user,
        busy_poll: Duration::from_micros(arguments.busy_poll_us),
        total_bytes: arguments.total_bytes.unwrap_or(usual.total_bytes),
        seccomp: match arguments.seccomp {
            Filter::Off => Seccomp::Off,
            Filter::Refuse => Seccomp::Refuse,
            Filter::Kill => Seccomp::Kill,
        },
        ..usual
    };
    service::run(&settings)
        .map_err(|error| failed(privilege::advise(error.to_string(), &error)))?;
    Ok(ExitCode::SUCCESS)
}

fn user_and_group(text: &str) -> Result<(u32, u32), String> {
    let parse = || {
        let (user, group) = text.split_once(':')?;
        Some((user.parse().ok()?, group.parse().ok()?))
    };
    parse().ok_or_else(|| format!("'{text}' is no numeric user and group: write them as 990:990"))
}
