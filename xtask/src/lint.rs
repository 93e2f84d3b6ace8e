//! Formatting, clippy and the project's own rules, in the order of how fast they answer.

use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::{command, packages, tidy};

/// Runs `cargo xtask lint`.
pub(crate) fn run() -> Result<ExitCode> {
    // Clippy builds what it looks at, the eBPF programs too.
    packages::try_ensure();
    ensure_component("fmt", "rustfmt")?;
    ensure_component("clippy", "clippy")?;
    let steps: [(&str, &[&str]); 3] = [
        ("fmt", &["fmt", "--all", "--", "--check"]),
        // A workspace of its own, whose lock file names our packages too, and which is built last of all.
        (
            "the lock file of fuzz",
            &[
                "fetch",
                "--quiet",
                "--locked",
                "--manifest-path",
                "fuzz/Cargo.toml",
            ],
        ),
        (
            "clippy",
            &[
                "clippy",
                "--workspace",
                "--all-targets",
                "--locked",
                "--",
                "-D",
                "warnings",
            ],
        ),
    ];
    let mut failed = Vec::new();
    if tidy::run()? != ExitCode::SUCCESS {
        failed.push("tidy");
    }
    for (name, arguments) in steps {
        eprintln!("lint: cargo {}", arguments.join(" "));
        if !command::cargo(arguments.iter().copied())
            .status()?
            .success()
        {
            failed.push(name);
        }
    }
    if failed.is_empty() {
        eprintln!("lint: clean");
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("lint: failed: {}", failed.join(", "));
    Ok(ExitCode::FAILURE)
}

/// A minimal toolchain lacks both components; rustup can add them.
fn ensure_component(subcommand: &str, component: &str) -> Result<()> {
    if command::cargo([subcommand, "--version"]).output().is_ok() {
        return Ok(());
    }
    if command::find("rustup").is_none() {
        bail!("this toolchain has no {component}; install it as you installed Rust");
    }
    command::program("rustup", ["component", "add", component]).run()
}
