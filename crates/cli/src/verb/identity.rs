//! `sandwire identity`: addresses of their own for the sockets of a cgroup, without a namespace.
//!
//! What there is is in the kernel, and every call first repairs what a crash has left. A daemon is only asked what of its
//! configuration isn't there.

mod options;
mod policy;

use std::{
    net::IpAddr,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use clap::{Args, Subcommand};
use sandwire_api::{
    error::ErrorCode,
    identity::{AwaitedIdentity, ListedIdentity},
    name::Name,
};
use sandwire_identity::{Error, Identities, Identity, State};
use serde_json::json;

pub(crate) use self::options::{FolderArguments, Options};
use crate::{
    Context,
    failure::{Failure, Outcome},
    output::note,
};

/// What to do with identities.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Give the sockets of a cgroup addresses of their own.
    Add(AddArguments),
    /// List identities, and remove those whose cgroup is gone.
    #[command(
        after_help = "A daemon that runs is asked for those of its configuration that aren't there (`awaited`); why, /healthz says, if their cgroup is."
    )]
    List(FolderArguments),
    /// Show an identity with what its sockets sent, received and were refused.
    Show(ShowArguments),
    /// Show, set or reset what an identity may reach.
    #[command(subcommand)]
    Policy(policy::Verb),
    /// Take an identity away from its cgroup.
    Remove(OneArguments),
    /// Have all identities run the programs of this version, after an upgrade.
    #[command(after_help = "Sockets, counters and policies stay. A daemon does it when it starts.")]
    Renew(FolderArguments),
}

/// Command line of `sandwire identity add`.
#[derive(Debug, Args)]
#[command(
    after_help = "It holds for sockets made from now on, by processes in the cgroup and in those below it. What they see: \
    docs/identity.md."
)]
pub(crate) struct AddArguments {
    /// Folder of a cgroup of version 2.
    #[arg(value_name = "CGROUP")]
    cgroup: PathBuf,

    /// Name of the identity; by default that of the cgroup.
    #[arg(long)]
    name: Option<Name>,

    #[command(flatten)]
    options: Options,

    #[command(flatten)]
    folder: FolderArguments,
}

/// Which identity.
#[derive(Debug, Args)]
pub(crate) struct OneArguments {
    /// Name of the identity, or path of its cgroup.
    #[arg(value_name = "NAME")]
    name: String,

    #[command(flatten)]
    folder: FolderArguments,
}

/// Command line of `sandwire identity show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArguments {
    #[command(flatten)]
    one: OneArguments,

    /// Fail if its cgroup is gone, as before a service is started: a cgroup of the same path doesn't have this identity. A service names
    /// its cgroup's path: by its name, the identity may be active at another.
    #[arg(long)]
    active: bool,

    /// Wait until it is there and its cgroup is, so long at most: a daemon whose configuration has it adds it as its cgroup is made.
    #[arg(long, value_name = "SECONDS", requires = "active", value_parser = clap::value_parser!(u64).range(..=3600))]
    wait: Option<u64>,
}

/// Between two looks of who waits.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a daemon may take to say what it waits for: it may be stopped, and identities don't need it.
const DAEMON_PATIENCE: Duration = Duration::from_secs(2);

impl FolderArguments {
    /// The identities, for those who may see them.
    pub(crate) fn open(&self, operation: &str) -> Result<Identities, Failure> {
        if !rustix::process::geteuid().is_root() {
            return Err(Failure::new(
                ErrorCode::Forbidden,
                format!(
                    "cannot {operation}: it needs root, for eBPF and for addresses; run it by sudo"
                ),
            ));
        }
        Ok(Identities::new(&self.identity_folder))
    }
}

pub(crate) fn run(context: &Context, verb: Verb) -> Outcome {
    match verb {
        Verb::Add(arguments) => add(context, arguments),
        Verb::List(arguments) => list(context, &arguments),
        Verb::Show(arguments) => show(context, &arguments),
        Verb::Policy(verb) => policy::run(context, verb),
        Verb::Remove(arguments) => remove(context, &arguments),
        Verb::Renew(arguments) => renew(context, &arguments),
    }
}

fn add(context: &Context, arguments: AddArguments) -> Outcome {
    let operation = format!("add an identity to {}", arguments.cgroup.display());
    let identities = arguments.folder.open(&operation)?;
    let new =
        arguments
            .options
            .new_identity(arguments.cgroup, arguments.name, false, &operation)?;
    let added = identities.add(&new).map_err(failure(&operation))?;
    context.output.answer(&added, |added| {
        format!(
            "identity {} has {}; its loopback is {}\n",
            added.name,
            list_of(&added.addresses),
            list_of(&added.loopback),
        )
    })
}

fn list(context: &Context, arguments: &FolderArguments) -> Outcome {
    const OPERATION: &str = "list identities";
    let identities = arguments.open(OPERATION)?;
    let repaired = identities.repair().map_err(failure(OPERATION))?;
    for reason in &repaired.failures {
        note(reason);
    }
    // Sooner than what is there is looked at: what is added in between is in one of both.
    let told = context.client().with_timeout(DAEMON_PATIENCE).identities();
    let found = identities.list().map_err(failure(OPERATION))?;
    let listed = with_awaited(found, told.unwrap_or_default());
    context.output.answer(&listed, |listed| {
        let lines = listed.iter().map(|listed| match listed {
            ListedIdentity::Found(identity) => line(identity),
            ListedIdentity::Awaited(identity) => awaited_line(identity),
        });
        lines.collect::<String>()
    })
}

/// Identities, and those of a daemon's configuration that aren't there, by what a daemon told.
fn with_awaited(found: Vec<Identity>, told: Vec<ListedIdentity>) -> Vec<ListedIdentity> {
    let awaited = told.into_iter().filter(|told| match told {
        // It may have come meanwhile.
        ListedIdentity::Awaited(told) => !found.iter().any(|one| one.name == told.name),
        ListedIdentity::Found(_) => false,
    });
    let awaited: Vec<ListedIdentity> = awaited.collect();
    let found = found.into_iter().map(ListedIdentity::Found);
    found.chain(awaited).collect()
}

fn show(context: &Context, arguments: &ShowArguments) -> Outcome {
    let name = &arguments.one.name;
    let operation = format!("show identity {name}");
    let identities = arguments.one.folder.open(&operation)?;
    if let Some(seconds) = arguments.wait {
        wait_until_active(&identities, name, Duration::from_secs(seconds))
            .map_err(failure(&operation))?;
    }
    let shown = identities.show(name).map_err(failure(&operation))?;
    if arguments.active {
        require_active(&shown)?;
    }
    context.output.answer(&shown, text)
}

/// Returns when it is, or after so long.
fn wait_until_active(identities: &Identities, name: &str, patience: Duration) -> Result<(), Error> {
    if identities.is_active(name)? {
        return Ok(());
    }
    let seconds = patience.as_secs();
    note(&format!(
        "waiting until identity {name} is active, {seconds} s at most"
    ));
    let begun = Instant::now();
    while !identities.is_active(name)? && begun.elapsed() < patience {
        thread::sleep(PAUSE);
    }
    Ok(())
}

fn require_active(identity: &Identity) -> Result<(), Failure> {
    match identity.state {
        State::Active => Ok(()),
        State::Dying => Err(Failure::new(
            ErrorCode::Conflict,
            format!(
                "identity {name} isn't active: its cgroup {cgroup} is gone, and it ends with its last socket; end it with \
                 them, or at once: sandwire identity remove {name}",
                name = identity.name,
                cgroup = identity.cgroup.display(),
            ),
        )),
    }
}

fn remove(context: &Context, arguments: &OneArguments) -> Outcome {
    let operation = format!("remove identity {}", arguments.name);
    let identities = arguments.folder.open(&operation)?;
    let removed = identities
        .remove(&arguments.name)
        .map_err(failure(&operation))?;
    if removed.declared {
        note(
            "a daemon's configuration has it, and adds it again while that runs: take it out there, and reload the daemon",
        );
    }
    context.output.answer(&removed, |removed| {
        format!("identity {} is gone\n", removed.name)
    })
}

fn renew(context: &Context, arguments: &FolderArguments) -> Outcome {
    const OPERATION: &str = "renew the programs of identities";
    let identities = arguments.open(OPERATION)?;
    let renewed = identities.renew().map_err(failure(OPERATION))?;
    context
        .output
        .answer(&json!({ "identities": renewed }), |_| {
            let counted = match renewed {
                1 => "1 identity runs".to_owned(),
                count => format!("{count} identities run"),
            };
            format!("{counted} the programs of this version\n")
        })
}

fn line(identity: &Identity) -> String {
    format!(
        "{}  {}  {}{}\n",
        identity.name,
        list_of(&identity.addresses),
        identity.cgroup.display(),
        dying(identity),
    )
}

fn awaited_line(identity: &AwaitedIdentity) -> String {
    let prefixes = identity
        .prefixes
        .iter()
        .map(|prefix| format!("one of {prefix}"));
    let addresses = identity.addresses.iter().map(ToString::to_string);
    let all: Vec<String> = addresses.chain(prefixes).collect();
    format!(
        "{}  {}  {}  (of a daemon's configuration; awaited)\n",
        identity.name,
        all.join(" "),
        identity.cgroup.display(),
    )
}

fn text(identity: &Identity) -> String {
    let mut text = line(identity);
    let traffic = &identity.counters;
    text.push_str(&format!(
        "  loopback   {}\n  interface  {}\n",
        list_of(&identity.loopback),
        identity.interface
    ));
    if identity.tcp_only {
        text.push_str("  protocols  tcp only\n");
    }
    if identity.declared {
        text.push_str("  declared   by the configuration of a daemon\n");
    }
    text.push_str(&format!("  listeners  {}\n", identity.listeners));
    for (name, traffic) in [("sent", traffic.egress), ("received", traffic.ingress)] {
        text.push_str(&format!(
            "  {name:<9}  {} packets, {} bytes\n",
            traffic.packets, traffic.bytes
        ));
    }
    for (refusal, count) in &traffic.refused {
        text.push_str(&format!("  refused    {} {count}\n", refusal.name()));
    }
    text
}

fn dying(identity: &Identity) -> &'static str {
    match identity.state {
        State::Active => "",
        State::Dying => "  (its cgroup is gone; it ends with its last socket)",
    }
}

fn list_of(addresses: &[IpAddr]) -> String {
    let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    texts.join(" ")
}

pub(crate) fn failure(operation: &str) -> impl Fn(Error) -> Failure {
    move |error| {
        let code = match &error {
            Error::NoIdentity { .. } => ErrorCode::NotFound,
            Error::CgroupTaken { .. }
            | Error::NameTaken { .. }
            | Error::Dying { .. }
            | Error::AddressTaken { .. }
            | Error::AddressOnHost { .. }
            | Error::CgroupInUse { .. }
            | Error::PrefixFull { .. }
            | Error::GroupClash { .. }
            | Error::Nested { .. }
            | Error::NotShared { .. } => ErrorCode::Conflict,
            Error::Forbidden { .. } => ErrorCode::Forbidden,
            _ if error.is_refusal() => ErrorCode::InvalidRequest,
            _ => ErrorCode::Internal,
        };
        Failure::new(code, format!("cannot {operation}: {error}"))
    }
}
