//! `sandwire relay`: chosen traffic leaves the host only inside TLS.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Args, Subcommand};
use sandwire_api::client::Blocking;
use sandwire_relay::{
    children::{self, NotRelayed},
    config::Config,
    keys, service,
    steering::{self, Ahead, AheadError},
};
use serde::Serialize;

use crate::{
    Context,
    failure::{Failure, Outcome},
    log,
    privilege::{self, Capability},
};

/// What to do with the relay.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Run the relay in the foreground: the host's side, the peer's side, or both.
    Serve(ServeArguments),
    /// Say whether a configuration and its certificates are right, and change nothing.
    Check(ConfigArguments),
    /// Have what is redirected steered now, also where no relay runs: it is dropped then.
    Steer(SteerArguments),
    /// Take the steering away: what was redirected leaves in the clear from then on.
    Clear,
    /// Make an authority and certificates to try the relay with.
    Keys(KeysArguments),
}

/// Command line of `sandwire relay serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "Logs go to standard error; the environment variable SANDWIRE_LOG says how much. SIGHUP has certificates and \
    configuration read again and the report's file opened again, SIGTERM ends it. What is steered to it is dropped until it is \
    started anew; `sandwire relay clear` ends that."
)]
pub(crate) struct ServeArguments {
    #[command(flatten)]
    config: ConfigArguments,
}

/// Command line of `sandwire relay steer`.
#[derive(Debug, Args)]
#[command(
    after_help = "For what starts a sender in a cgroup that is made anew each time, before it starts it: as \
    ExecStartPre=+/usr/bin/sandwire relay steer of the service's unit. Where a relay runs, it is waited for until it has steered \
    all cgroups that are there, for ten seconds; else the kernel is told what the configuration says, and what is redirected is \
    dropped until a relay runs. Needs root."
)]
pub(crate) struct SteerArguments {
    #[command(flatten)]
    config: ConfigArguments,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArguments {
    /// Its configuration.
    #[arg(long, value_name = "FILE", default_value = sandwire_relay::config::DEFAULT_PATH)]
    config: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct KeysArguments {
    /// Folder to write into; made if it isn't there.
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,

    /// DNS names, each for a certificate of its own.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,

    /// Days until the certificates expire.
    #[arg(long, value_name = "NUMBER", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
}

pub(crate) fn run(context: &Context, verb: &Verb) -> Outcome {
    match verb {
        Verb::Serve(arguments) => serve(&arguments.config.config),
        Verb::Check(arguments) => check(context, &arguments.config),
        Verb::Steer(arguments) => steer(context, &arguments.config.config),
        Verb::Clear => clear(context),
        Verb::Keys(arguments) => write_keys(context, arguments),
    }
}

#[derive(Serialize)]
struct Checked {
    ok: bool,
    /// None without a daemon that says what pools there are.
    not_relayed: Option<Vec<NotRelayed>>,
    /// Cgroups of senders that aren't there.
    missing_cgroups: Vec<PathBuf>,
    /// Why the daemon doesn't say what pools there are, where the configuration names one.
    daemon_error: Option<String>,
}

#[derive(Serialize)]
struct Written {
    files: Vec<PathBuf>,
}

fn read(path: &Path) -> Result<Config, Failure> {
    Config::read(path).map_err(|error| Failure::refused(error.to_string()))
}

fn check(context: &Context, path: &Path) -> Outcome {
    let config = read(path)?;
    service::check_credentials(&config).map_err(|error| Failure::refused(error.to_string()))?;
    let mut checked = Checked {
        ok: true,
        not_relayed: None,
        missing_cgroups: Vec::new(),
        daemon_error: None,
    };
    if let Some(egress) = &config.egress {
        steering::check_cgroups(egress).map_err(|error| Failure::refused(error.to_string()))?;
        let missing = steering::missing(egress).into_iter();
        checked.missing_cgroups = missing.map(Path::to_owned).collect();
        match egress
            .daemon
            .as_ref()
            .map(|daemon| Blocking::new(daemon).pools())
        {
            None => {}
            Some(Ok(pools)) => {
                let found = children::check(children::find(egress, &pools))
                    .map_err(|error| Failure::refused(error.to_string()))?;
                checked.not_relayed = Some(found);
            }
            Some(Err(error)) => checked.daemon_error = Some(error.to_string()),
        }
    }
    context.output.answer(&checked, |checked| {
        let notes = checked.not_relayed.iter().flatten();
        let notes: String = notes.map(|note| format!("note: {note}\n")).collect();
        let missing = checked.missing_cgroups.iter().map(|path| {
            let path = path.display();
            format!("note: there is no cgroup {path}; it is steered once it is made\n")
        });
        let daemon = checked.daemon_error.iter();
        let daemon =
            daemon.map(|error| format!("note: the daemon says nothing of leases: {error}\n"));
        format!(
            "ok\n{notes}{}{}",
            missing.collect::<String>(),
            daemon.collect::<String>()
        )
    })
}

fn serve(path: &Path) -> Outcome {
    let config = read(path)?;
    log::of_service(false);
    service::run(&config, path).map_err(|error| {
        let text = format!("cannot serve the relay: {error}");
        Failure::failed(privilege::advise(text, &error))
    })?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Serialize)]
struct Cleared {
    cleared: bool,
}

#[derive(Serialize)]
struct Steered {
    /// `relay`: the one that runs has done it; `kernel`: told by us; `cleared`: not at all.
    steered: &'static str,
}

fn steer(context: &Context, path: &Path) -> Outcome {
    let config = read(path)?;
    let ahead = steering::ahead(&config).map_err(|error| {
        let text = privilege::advise(format!("cannot steer to the relay: {error}"), &error);
        match error {
            AheadError::NoEgress => Failure::refused(text),
            _ => Failure::failed(text),
        }
    })?;
    let (steered, text) = match ahead {
        Ahead::ByRelay => ("relay", "steered by the relay that runs\n"),
        Ahead::Told => (
            "kernel",
            "steered: what is redirected is dropped until a relay runs\n",
        ),
        Ahead::Cleared => (
            "cleared",
            "note: `sandwire relay clear` has ended the steering: what is redirected leaves in the clear until the relay is started anew\n",
        ),
    };
    context
        .output
        .answer(&Steered { steered }, |_| text.to_owned())
}

fn clear(context: &Context) -> Outcome {
    privilege::require(
        Capability::NetAdmin,
        "clear the relay's steering",
        "to change nftables and routing rules",
    )?;
    steering::clear().map_err(|errors| {
        let reasons: Vec<String> = errors.iter().map(ToString::to_string).collect();
        Failure::failed(format!(
            "cannot clear the relay's steering: {}",
            reasons.join("; ")
        ))
    })?;
    context.output.answer(&Cleared { cleared: true }, |_| {
        "cleared: what was redirected leaves in the clear until the relay is started\n".to_owned()
    })
}

fn write_keys(context: &Context, arguments: &KeysArguments) -> Outcome {
    let life = Duration::from_secs(u64::from(arguments.days) * 86_400);
    let files = keys::write(&arguments.folder, &arguments.names, life)
        .map_err(|error| Failure::refused(error.to_string()))?;
    context.output.answer(&Written { files }, |written| {
        let lines = written
            .files
            .iter()
            .map(|path| format!("{}\n", path.display()));
        lines.collect()
    })
}
