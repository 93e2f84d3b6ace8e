//! The project's own commands, run as `cargo xtask COMMAND`.
//!
//! Whatever a developer or CI does with this tree is one of these commands, so that both do the
//! same. They run from any folder of the workspace, install the system packages they lack where they
//! may, and print progress on standard error.

#![allow(
    clippy::print_stdout,
    reason = "standard output is where a command answers"
)]

mod bench;
mod command;
mod deb;
mod demo;
mod image;
mod lint;
mod miri;
mod packages;
mod staging;
mod test;
mod tidy;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The project's own commands.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Installs the system packages that building and testing need.
    Setup(packages::Arguments),
    /// Shows the main job for real: clones of one microVM snapshot, each at its own address.
    Demo(demo::Arguments),
    /// Runs the tests, tier by tier, and says which could not run.
    Test(test::Arguments),
    /// Runs the tests of the engine's core under Miri, where it is installed.
    Miri(miri::Arguments),
    /// Builds the release executable and runs a benchmark with it.
    Bench(bench::Arguments),
    /// Puts a Debian package together from the release executable.
    Deb(deb::Arguments),
    /// Puts an image for containers together from the release executable.
    Image(image::Arguments),
    /// Checks formatting, clippy and the project's own rules.
    Lint,
    /// Checks the project's own rules only.
    Tidy,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Setup(arguments) => packages::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Test(arguments) => test::run(&arguments),
        Command::Miri(arguments) => miri::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Deb(arguments) => deb::run(&arguments),
        Command::Image(arguments) => image::run(&arguments),
        Command::Lint => lint::run(),
        Command::Tidy => tidy::run(),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        super::Arguments::command().debug_assert();
    }
}
