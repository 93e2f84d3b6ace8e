//! Virtual machine monitors on the `PATH`.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

/// Programs that are looked for, and what they are for.
pub(super) const PROGRAMS: [(&str, &str); 6] = [
    ("firecracker", "--version"),
    ("jailer", "--version"),
    ("cloud-hypervisor", "--version"),
    ("qemu-system-x86_64", "--version"),
    ("qemu-system-aarch64", "--version"),
    ("crosvm", "version"),
];

/// Where a program is, if it is on the `PATH`.
pub(super) fn find(program: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|file| {
            file.metadata()
                .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
        })
}

/// The first line of what a program says of its version.
pub(super) fn version(program: &PathBuf, argument: &str) -> Option<String> {
    let output = Command::new(program)
        .arg(argument)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().next().map(|line| line.trim().to_owned())
}
