//! `sandwire vsock`: channels to guests, and what goes through them.

mod capture;
mod connect;
mod forward;
mod guest;
mod list;
mod listen;
pub(crate) mod policy;
mod serve;

use clap::{Args, Subcommand};
use sandwire_api::name::Name;
use sandwire_bench::command::{BenchCommand, VsockArguments};

pub(crate) use self::list::kind_text;
use crate::{Context, failure::Outcome};

/// What to do with vsock.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Connect standard input and output to a port of a guest; fit to be an ssh ProxyCommand.
    Connect(connect::Arguments),
    /// Listen for connections that a guest makes to a port of its host.
    Listen(listen::Arguments),
    /// Join a TCP port or Unix socket of the host and a port of a guest, in either direction.
    Forward(forward::Arguments),
    /// List connections, or the channels themselves.
    List(list::Arguments),
    /// Write a guest's packets to a file that tcpdump and Wireshark read.
    Capture(capture::Arguments),
    /// Show, set, extend or reset what a guest may reach by vsock.
    #[command(subcommand)]
    Policy(policy::Verb),
    /// Run the service for vsock in the foreground; the daemon or systemd starts it.
    Serve(serve::Arguments),
    /// The same as `bench vsock`.
    Bench(VsockArguments),
}

/// Which lease.
#[derive(Clone, Debug, Args)]
pub(crate) struct Which {
    /// Name of the lease.
    name: Name,

    /// Numeric user that holds it, if not you; for root.
    #[arg(long, value_name = "UID")]
    owner_uid: Option<u32>,
}

pub(crate) fn run(context: &Context, verb: Verb) -> Outcome {
    match verb {
        Verb::Connect(arguments) => connect::run(context, &arguments),
        Verb::Listen(arguments) => listen::run(context, &arguments),
        Verb::Forward(arguments) => forward::run(context, &arguments),
        Verb::List(arguments) => list::run(context, &arguments),
        Verb::Capture(arguments) => capture::run(context, &arguments),
        Verb::Policy(verb) => policy::run(context, verb),
        Verb::Serve(arguments) => serve::run(&arguments),
        Verb::Bench(arguments) => super::bench::run(context, &BenchCommand::vsock(arguments)),
    }
}
