//! `sandwire completion`: a completion script for a shell.

use clap::{Args, CommandFactory, ValueEnum};
use clap_complete::{Shell, generate};
use serde_json::json;

use crate::{Context, failure::Outcome};

/// Command line of `sandwire completion`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Shell to make it for.
    shell: Known,
}

/// Shells that are supported.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Known {
    Bash,
    Zsh,
    Fish,
}

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let (shell, name) = match arguments.shell {
        Known::Bash => (Shell::Bash, "bash"),
        Known::Zsh => (Shell::Zsh, "zsh"),
        Known::Fish => (Shell::Fish, "fish"),
    };
    let mut script = Vec::new();
    generate(
        shell,
        &mut crate::Arguments::command(),
        "sandwire",
        &mut script,
    );
    let script = String::from_utf8_lossy(&script).into_owned();
    context
        .output
        .answer(&json!({ "shell": name, "script": script }), |_| {
            script.clone()
        })
}
