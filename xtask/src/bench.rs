//! `cargo xtask bench`: the release executable's own benchmarks, built first.

use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};

use crate::{packages, workspace};

/// Builds the release executable and runs a benchmark with it.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Handed on to `sandwire bench`: `slots --json`, `report FILE`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    arguments: Vec<String>,
}

/// Runs `cargo xtask bench`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    packages::ensure()?;
    let executable = workspace::release_executable()?;
    // In the caller's own folder: report files are named relative to it.
    let status = Command::new(&executable)
        .arg("bench")
        .args(&arguments.arguments)
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("starting {}", executable.display()))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(2)))
}
