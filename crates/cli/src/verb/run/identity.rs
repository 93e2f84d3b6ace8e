//! A command in the host's network namespace, in a cgroup that has an identity: no namespace, no daemon.
//!
//! The cgroup is made for the command, and goes with it: what the command has left running is killed. If we are killed
//! ourselves, the command goes on; once it has ended, the next `run --no-netns` or `identity` takes away what is left.

use std::{
    ffi::OsString,
    io::ErrorKind,
    os::fd::AsFd,
    path::PathBuf,
    process::{self, ExitCode, Stdio},
};

use clap::Args;
use rustix::process::Pid;
use sandwire_api::name::Name;
use sandwire_identity::{Error, Identities, Identity, OwnCgroup};
use sandwire_kernel_net::process::{join_cgroup, unblock_signals};
use serde_json::json;

use super::supervise;
use crate::{
    Context,
    failure::{Failure, Outcome},
    output::note,
    verb::identity::{FolderArguments, Options, failure},
};

/// Options of `sandwire run --no-netns`.
#[derive(Debug, Args)]
#[command(next_help_heading = "With --no-netns")]
pub(super) struct WithoutNamespace {
    #[command(flatten)]
    options: Options,

    /// Folder of the cgroup to make the command's own below [default: the cgroup that this process is in].
    #[arg(long, value_name = "CGROUP")]
    cgroup: Option<PathBuf>,

    #[command(flatten)]
    folder: FolderArguments,
}

/// What to run.
pub(super) struct Command<'a> {
    pub(super) program: &'a OsString,
    pub(super) rest: &'a [OsString],
    /// The program in messages.
    pub(super) shown: &'a str,
}

impl WithoutNamespace {
    /// Whether none was given, but for where the pins are.
    pub(super) fn is_empty(&self) -> bool {
        self.options.is_empty() && self.cgroup.is_none()
    }
}

pub(super) fn run(
    context: &Context,
    arguments: &WithoutNamespace,
    name: Option<&Name>,
    command: &Command<'_>,
) -> Outcome {
    let shown = command.shown;
    let operation = format!("run {shown}");
    let identities = arguments.folder.open(&operation)?;
    let signals = supervise::Signals::block().map_err(|error| {
        Failure::failed(format!("cannot run {shown}: cannot catch signals: {error}"))
    })?;
    let held = Held::take(identities, arguments, name, &operation)?;
    let child = held.start(context, command)?;
    let end = supervise::wait(&signals, child);
    let (identity, ended) = held.end();
    let end = end.map_err(|error| Failure::failed(format!("cannot wait for {shown}: {error}")))?;
    if let Err(error) = &ended {
        note(&format!("cannot end identity {}: {error}", identity.name));
    }
    if context.output.json {
        let report = json!({
            "identity": ended.as_ref().unwrap_or(&identity),
            "exit_status": end.exit_status(),
            "signal": end.signal(),
        });
        context.output.answer(&report, |_| String::new())?;
    }
    Ok(ExitCode::from(end.exit_status()))
}

/// A cgroup with an identity; both end with this value.
struct Held {
    identities: Identities,
    identity: Identity,
    cgroup: OwnCgroup,
    has_ended: bool,
}

impl Held {
    fn take(
        identities: Identities,
        arguments: &WithoutNamespace,
        name: Option<&Name>,
        operation: &str,
    ) -> Result<Self, Failure> {
        let name = match name {
            Some(name) => name.clone(),
            None => format!("run-{}", process::id())
                .parse()
                .map_err(|error| Failure::failed(format!("cannot {operation}: {error}")))?,
        };
        // Killed commands leave identities whose cgroups a new one may be named like.
        identities.repair().map_err(failure(operation))?;
        let cgroup = OwnCgroup::create(arguments.cgroup.as_deref(), name.as_str())
            .map_err(failure(operation))?;
        let new = arguments.options.new_identity(
            cgroup.path().to_owned(),
            Some(name),
            true,
            operation,
        )?;
        let identity = identities.add(&new).map_err(failure(operation))?;
        Ok(Self {
            identities,
            identity,
            cgroup,
            has_ended: false,
        })
    }

    fn start(&self, context: &Context, wanted: &Command<'_>) -> Result<Pid, Failure> {
        let shown = wanted.shown;
        let mut command = process::Command::new(wanted.program);
        command.args(wanted.rest).envs(environment(&self.identity));
        if context.output.json {
            let stderr = std::io::stderr().as_fd().try_clone_to_owned();
            command.stdout(stderr.map_or_else(|_| Stdio::null(), Stdio::from));
        }
        let entrance = self.cgroup.entrance();
        join_cgroup(
            &mut command,
            entrance.map_err(failure(&format!("run {shown}")))?,
        );
        unblock_signals(&mut command);
        let child = command.spawn().map_err(|source| Failure {
            // As env, nohup and timeout do, so that a script can tell it from the command's own end.
            exit_status: if source.kind() == ErrorKind::NotFound {
                127
            } else {
                126
            },
            ..Failure::refused(format!("cannot run {shown}: {source}"))
        })?;
        Pid::from_raw(child.id().cast_signed()).ok_or_else(|| {
            Failure::failed(format!("cannot run {shown}: the kernel gave it no number"))
        })
    }

    /// Ends all of it; returns the identity as it was, and as it was in the end.
    fn end(mut self) -> (Identity, Result<Identity, Error>) {
        let ended = self.finish();
        (self.identity.clone(), ended)
    }

    fn finish(&mut self) -> Result<Identity, Error> {
        self.has_ended = true;
        let killed = self.cgroup.kill();
        // By its cgroup: the name may be another's by now.
        let cgroup = self.identity.cgroup.to_string_lossy();
        let removed = self.identities.remove(&cgroup);
        killed.and(removed)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.has_ended
            && let Err(error) = self.finish()
        {
            note(&format!(
                "cannot end identity {}: {error}",
                self.identity.name
            ));
        }
    }
}

/// What the command is told.
fn environment(identity: &Identity) -> [(&'static str, String); 3] {
    let addresses: Vec<String> = identity.addresses.iter().map(ToString::to_string).collect();
    [
        ("SANDWIRE_IDENTITY", identity.name.to_string()),
        ("SANDWIRE_CGROUP", identity.cgroup.display().to_string()),
        ("SANDWIRE_ADDRESSES", addresses.join(" ")),
    ]
}
