//! `vhost-device-vsock`, which others use for what our service does. The benchmark installs it where it is told
//! no other.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The version that is compared with.
pub(super) const VERSION: &str = "0.3.0";
const CRATE: &str = "vhost-device-vsock";

/// Installs it into a folder, unless it is there, and returns the executable's path; otherwise why that
/// can't be.
pub(crate) fn install(folder: &Path) -> Result<PathBuf, String> {
    let executable = folder.join("bin").join(CRATE);
    if executable.exists() {
        return Ok(executable);
    }
    eprintln!("installing {CRATE} {VERSION} into {}", folder.display());
    let status = Command::new("cargo")
        .args(["install", "--quiet", "--locked", "--version", VERSION])
        .arg("--root")
        .arg(folder)
        .arg(CRATE)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .map_err(|error| {
            format!("cargo, which would install {CRATE}, can't be started: {error}")
        })?;
    if !status.success() || !executable.exists() {
        return Err(format!(
            "cargo couldn't install {CRATE} {VERSION} ({status}); --peer PATH names one that is there"
        ));
    }
    Ok(executable)
}
