//! `vhost-device-vsock`, which others use for what our service does. The benchmark installs it where it is told
//! no other.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::private_host;

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
    let build = folder.join("build");
    eprintln!("installing {CRATE} {VERSION} into {}", folder.display());
    let mut cargo = Command::new("cargo");
    cargo
        .args(["install", "--quiet", "--locked", "--version", VERSION])
        .arg("--root")
        .arg(folder)
        .arg("--target-dir")
        .arg(&build)
        .arg(CRATE)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let status = private_host::status_unless_interrupted(&mut cargo).map_err(|error| {
        format!("cargo, which would install {CRATE}, can't be started: {error}")
    })?;
    // It takes hundreds of megabytes. What of it stays goes with the folder.
    let _ = fs::remove_dir_all(build);
    if !status.success() || !executable.exists() {
        return Err(format!(
            "cargo couldn't install {CRATE} {VERSION} ({status}); --peer PATH names one that is there"
        ));
    }
    Ok(executable)
}
