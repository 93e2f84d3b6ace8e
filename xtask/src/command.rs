//! Runs other programs and says clearly what went wrong with them.
//!
//! Programs never read our standard input, so that nothing waits for an answer in CI.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::workspace;

/// A program that is about to be run in the workspace's root folder.
pub(crate) struct Invocation(Command);

/// A cargo command: the same cargo that runs us.
pub(crate) fn cargo<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Invocation {
    program(
        env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
        arguments,
    )
}

/// Any program.
pub(crate) fn program<'a>(
    name: impl AsRef<OsStr>,
    arguments: impl IntoIterator<Item = &'a str>,
) -> Invocation {
    let mut command = Command::new(name);
    command
        .args(arguments)
        .env("PATH", search_path())
        .current_dir(workspace::root())
        .stdin(Stdio::null());
    Invocation(command)
}

impl Invocation {
    /// Sets an environment variable.
    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.0.env(name, value);
        self
    }

    /// Runs it with our own output and returns how it ended.
    pub(crate) fn status(mut self) -> Result<ExitStatus> {
        self.0
            .status()
            .with_context(|| format!("starting {}", self.line()))
    }

    /// Runs it with our own output and fails if it fails.
    pub(crate) fn run(self) -> Result<()> {
        let line = self.line();
        let status = self.status()?;
        if !status.success() {
            bail!("`{line}` failed ({status})");
        }
        Ok(())
    }

    /// Runs it, and returns what it wrote to standard output.
    pub(crate) fn output(mut self) -> Result<String> {
        let line = self.line();
        let output = self
            .0
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("starting {line}"))?;
        if !output.status.success() {
            bail!("`{line}` failed ({})", output.status);
        }
        String::from_utf8(output.stdout).with_context(|| format!("reading the output of {line}"))
    }

    fn line(&self) -> String {
        let words = std::iter::once(self.0.get_program()).chain(self.0.get_args());
        words
            .map(OsStr::to_string_lossy)
            .collect::<Vec<_>>()
            .join(" ")
    }
}

/// Where programs are looked for: as a shell would, and where root's own are, which `su` and some CI leave out.
pub(crate) fn search_path() -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    env::join_paths(folders).unwrap_or(path)
}

/// Where tests look for programs: first the toolchain that runs us, then what the machine has for all its users, then the rest.
/// What a home folder has in front of those (shims of a version manager) may be another version, and start a dozen processes.
pub(crate) fn search_path_of_tests() -> OsString {
    let toolchain = env::var_os("CARGO").map(PathBuf::from);
    let toolchain = toolchain.as_deref().and_then(Path::parent);
    let rest = search_path();
    let folders = toolchain.into_iter().map(Path::to_owned);
    let folders = folders
        .chain(OF_ALL_USERS.map(PathBuf::from))
        .chain(env::split_paths(&rest));
    env::join_paths(folders).unwrap_or(rest)
}

/// Debian's own default for root.
const OF_ALL_USERS: [&str; 6] = [
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
];

/// Path of a program.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    env::split_paths(&search_path())
        .map(|folder| folder.join(name))
        .find(|candidate| is_executable(candidate))
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata()
        .is_ok_and(|facts| facts.is_file() && facts.permissions().mode() & 0o111 != 0)
}

/// Whether we are root.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
