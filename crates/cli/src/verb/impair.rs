//! `sandwire impair`: bad networks for leases and for any interfaces, live.

mod clear;
mod lease;
mod presets;
mod record;
mod replay;
mod run;
mod serve;
pub(crate) mod service;
mod set;
mod show;
mod target;

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::{Context, failure::Outcome};

/// Command line of `sandwire impair`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "An impairment in a line of text: 'delay 50ms 10ms normal loss 1% rate 10mbit', several rules separated \
    by ';', each for some packets: 'match protocol=udp peer_port=53 loss 100%; delay 50ms'. The first rule that matches a \
    packet decides. Setting an impairment again replaces it without losing a packet. If no service listens, one is started \
    in the background."
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    set: set::Impairing,

    /// Folder of the impairment service.
    #[arg(
        long,
        global = true,
        value_name = "FOLDER",
        env = "SANDWIRE_IMPAIR_FOLDER",
        default_value = sandwire_impair_host::control::DEFAULT_FOLDER
    )]
    folder: PathBuf,

    #[command(subcommand)]
    verb: Option<Verb>,
}

/// What to do besides impairing something.
#[derive(Debug, Subcommand)]
enum Verb {
    /// Show what is impaired, how, and what became of its packets.
    Show(show::Arguments),
    /// End an impairment: packets under way are let go first, in order.
    Clear(clear::Arguments),
    /// List networks by name, with their numbers and where these come from.
    Presets,
    /// Measure a live link, and write a scenario that does the same.
    Record(record::Arguments),
    /// Run what `sandwire forward --record` has recorded again, in virtual time, and say whether the same is decided.
    Replay(replay::Arguments),
    /// Carry out a scenario: impairments that change by the clock.
    Run(run::Arguments),
    /// Run the impairment service in the foreground; the first impairment or systemd starts it.
    Serve(serve::Arguments),
}

pub(crate) fn run(context: &Context, arguments: Arguments) -> Outcome {
    let folder = arguments.folder;
    match arguments.verb {
        None => set::run(context, &folder, &arguments.set),
        Some(Verb::Show(arguments)) => show::run(context, &folder, &arguments),
        Some(Verb::Clear(arguments)) => clear::run(context, &folder, &arguments),
        Some(Verb::Record(arguments)) => record::run(context, &arguments),
        Some(Verb::Replay(arguments)) => replay::run(context, &arguments),
        Some(Verb::Run(arguments)) => run::run(context, &folder, &arguments),
        Some(Verb::Presets) => presets::run(context),
        Some(Verb::Serve(arguments)) => serve::run(&folder, &arguments),
    }
}
