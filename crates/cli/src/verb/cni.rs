//! `sandwire cni`: the CNI plugin under this executable's own name, and its installation.
//!
//! Runtimes start the plugin as `sandwire-cni`, which doesn't come by here: see `main`.

use std::{path::PathBuf, process::ExitCode};

use clap::Subcommand;
use sandwire_cni::{Environment, Install, Installed, Placed};
use serde_json::json;

use crate::{
    Context,
    failure::{Failure, Outcome},
    patient::Patient,
    privilege,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    verb: Option<Verb>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Put the plugin where container runtimes look for it, and an example of a network.
    Install(InstallArguments),
}

#[derive(Debug, clap::Args)]
struct InstallArguments {
    /// Folder of plugins.
    #[arg(long, value_name = "FOLDER", default_value = "/opt/cni/bin")]
    bin_dir: PathBuf,
    /// Folder of network configurations.
    #[arg(long, value_name = "FOLDER", default_value = "/etc/cni/net.d")]
    conf_dir: PathBuf,
    /// Copy the executable instead of linking to it: for a folder that is used with another root, whose
    /// C library must be as new as the one that it was built with.
    #[arg(long)]
    copy: bool,
    /// A network configuration to put there under its own name, in the place of one that is there. Default: an example,
    /// unless there is a file of its name.
    #[arg(long, value_name = "FILE")]
    conflist: Option<PathBuf>,
}

pub(crate) fn run(context: &Context, arguments: Arguments) -> Outcome {
    match arguments.verb {
        None => Ok(run_plugin()),
        Some(Verb::Install(arguments)) => install(context, arguments),
    }
}

/// Carries out the operation that a container runtime asks for.
pub(crate) fn run_plugin() -> ExitCode {
    let (input, output) = (Patient(std::io::stdin()), Patient(std::io::stdout()));
    if sandwire_cni::run(&Environment::read(), input, output) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn install(context: &Context, arguments: InstallArguments) -> Outcome {
    let wanted = Install {
        bin_dir: arguments.bin_dir,
        conf_dir: arguments.conf_dir,
        copy: arguments.copy,
        conflist: arguments.conflist,
    };
    let installed = sandwire_cni::install(&wanted)
        .map_err(|error| Failure::failed(privilege::advise(error.to_string(), &error)))?;
    let is_written = installed.placed != Placed::Kept;
    let document = json!({
        "plugin": installed.plugin,
        "executable": installed.executable,
        "copied": wanted.copy,
        "plugin_was_there": installed.plugin_was_there,
        "conflist": installed.conflist,
        "conflist_written": is_written,
    });
    context
        .output
        .answer(&document, |_| describe(&installed, wanted.copy))
}

fn describe(installed: &Installed, is_copy: bool) -> String {
    let plugin = installed.plugin.display();
    let executable = installed.executable.display();
    let kind = if is_copy { "a copy of" } else { "a link to" };
    let first = if installed.plugin_was_there {
        format!("{plugin} is {kind} {executable} already")
    } else {
        format!("{plugin} is now {kind} {executable}")
    };
    let conflist = installed.conflist.display();
    let second = match installed.placed {
        Placed::Given => format!("{conflist} is the network configuration that was given"),
        Placed::Example => format!(
            "{conflist} is an example of a network: name in it a pool of kind container, as \
             `sandwire pool create containers --kind container …` makes one"
        ),
        Placed::Kept => format!("{conflist} was there, and stays as it is"),
    };
    format!("{first}\n{second}\n")
}
