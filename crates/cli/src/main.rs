//! The `sandwire` executable: one file per verb under [`verb`].
//!
//! Standard output carries the answer, as one JSON document with `--json`; everything else goes to
//! standard error. Exit status: 0 done, 1 refused (nothing changed), 2 failed. `run` passes on its
//! command's own.

mod connection;
mod detached;
#[cfg(test)]
mod documents;
mod failure;
mod interruption;
mod log;
mod output;
mod patient;
mod prefix;
mod privilege;
mod progress;
mod record_file;
#[cfg(test)]
mod reference;
mod render;
mod verb;

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{Parser, error::ErrorKind};
use sandwire_kernel_net::process;

use crate::{failure::Failure, output::Output, verb::Verb};

/// Networks for sandboxes: isolated slots built ahead of time, each with its own address.
#[derive(Debug, Parser)]
#[command(
    name = "sandwire",
    version,
    max_term_width = 100,
    arg_required_else_help = true
)]
struct Arguments {
    /// Unix socket of the daemon.
    #[arg(
        long,
        global = true,
        value_name = "PATH",
        env = "SANDWIRE_SOCKET",
        default_value = sandwire_api::DEFAULT_SOCKET,
        help_heading = "Global options"
    )]
    socket: PathBuf,

    /// Print one JSON document on standard output.
    #[arg(long, global = true, help_heading = "Global options")]
    json: bool,

    #[command(subcommand)]
    verb: Verb,
}

/// What every verb needs to know.
#[derive(Clone, Debug)]
struct Context {
    /// Unix socket of the daemon.
    socket: PathBuf,
    /// Where answers go, and in which form.
    output: Output,
}

fn main() -> ExitCode {
    process::hear_of_children();
    let arguments: Vec<OsString> = std::env::args_os().collect();
    // A runtime starts a process per container: it gets by without the tree of verbs.
    if arguments
        .first()
        .is_some_and(|name| sandwire_cni::is_plugin(name))
    {
        return verb::cni::run_plugin();
    }
    match Arguments::try_parse_from(&arguments) {
        Ok(arguments) => {
            let context = Context {
                socket: arguments.socket,
                output: Output {
                    json: arguments.json,
                },
            };
            match arguments.verb.run(&context) {
                Ok(code) => code,
                Err(failure) => context.output.fail(&failure),
            }
        }
        Err(error) => answer_unparsed(&error, &arguments),
    }
}

/// Help and version go to standard output with status 0; a wrong command line is a refusal.
fn answer_unparsed(error: &clap::Error, arguments: &[OsString]) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A reader that went away is no error.
            let _ = error.print();
            ExitCode::SUCCESS
        }
        _ => {
            let json = arguments
                .iter()
                .take_while(|argument| *argument != "--")
                .any(|argument| argument == "--json");
            let _ = error.print();
            if json {
                let text = error.render().to_string();
                let message = text.trim_start_matches("error: ").trim_end().to_owned();
                Output { json }.fail_quietly(&Failure::refused(message));
            }
            ExitCode::from(1)
        }
    }
}
