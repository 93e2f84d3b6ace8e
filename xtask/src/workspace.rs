//! Where the workspace lies and what it consists of.
//!
//! The root is found from this package's own folder, so commands work from anywhere. Everything else
//! is asked of `cargo metadata`; nothing here reads manifests by itself.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::command;

/// What `cargo metadata` says, as far as we need it.
#[derive(Deserialize)]
pub(crate) struct Metadata {
    /// The workspace's own packages.
    pub(crate) packages: Vec<Package>,
    /// Where cargo puts what it builds.
    pub(crate) target_directory: PathBuf,
}

/// A package of the workspace.
#[derive(Deserialize)]
pub(crate) struct Package {
    /// Its name in the manifest.
    pub(crate) name: String,
    /// What it depends on, of any kind.
    pub(crate) dependencies: Vec<Dependency>,
}

/// A dependency of a package.
#[derive(Deserialize)]
pub(crate) struct Dependency {
    /// Name of the package depended on.
    pub(crate) name: String,
    /// `dev`, `build`, or nothing for an ordinary one.
    pub(crate) kind: Option<String>,
}

/// Root folder of the workspace.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a folder of the workspace")
}

/// Asks cargo what the workspace consists of.
pub(crate) fn metadata() -> Result<Metadata> {
    let text = command::cargo(["metadata", "--no-deps", "--format-version", "1"]).output()?;
    serde_json::from_str(&text).context("reading what cargo metadata says")
}

/// Builds the release executable and says where it is.
pub(crate) fn release_executable() -> Result<PathBuf> {
    command::cargo([
        "build",
        "--release",
        "--locked",
        "--package",
        "sandwire-cli",
    ])
    .run()?;
    Ok(metadata()?.target_directory.join("release/sandwire"))
}
