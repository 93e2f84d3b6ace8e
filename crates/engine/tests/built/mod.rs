//! Where the executable of an example is, built as it stands now.

use std::{env, path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};

/// Builds it with the whole workspace's features, as these tests were: with its package's own, everything below it would be
/// compiled again.
pub(crate) fn example(name: &str) -> Result<PathBuf> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["build", "--quiet", "--locked", "--offline"])
        .args(["--workspace", "--example", name])
        .status()
        .context("starting cargo")?;
    ensure!(status.success(), "building example {name}: {status}");
    let test = env::current_exe()?;
    let profile = test.ancestors().nth(2).context("the folder of a profile")?;
    Ok(profile.join("examples").join(name))
}
