//! What this machine can do, so that a test tier that can't run is reported as not run.
//!
//! Each answer is None if the tier can run, else the reason in words that finish the sentence "not run:
//! …". Nothing is installed here; `cargo xtask setup` does that.

use std::{env, path::Path};

use crate::command;

/// Why tests in private namespaces can't run here.
#[must_use]
pub fn missing_for_namespaces() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("needs root".to_owned());
    }
    missing_programs(&["ip", "nft", "setpriv", "unshare", "nsenter", "ping"])
        .or_else(|| missing_file("/dev/net/tun"))
        .or_else(|| {
            let attempt = "setpriv --pdeathsig KILL unshare --net --mount --pid --uts --ipc --fork \
                           --mount-proc --propagation private true";
            let error = command::run(attempt).err()?;
            Some(format!("private namespaces can't be made: {error:#}"))
        })
}

/// Why tests with containers can't run here.
#[must_use]
pub fn missing_for_containers() -> Option<String> {
    missing_for_namespaces()
        .or_else(|| missing_programs(&["podman", "crun", "conmon", "busybox"]))
        .or_else(|| missing_programs(&["containerd", "ctr", "runc"]))
        .or_else(|| missing_file("/usr/lib/python3/dist-packages/grpc/__init__.py"))
        .or_else(|| missing_file("/usr/lib/cni/bridge"))
        .or_else(|| {
            let version = command::run("podman --version").unwrap_or_default();
            // Later ones have other networks only.
            let has_cni = version.contains("version 4.");
            (!has_cni).then(|| format!("{} has no CNI back end", version.trim()))
        })
}

/// Why tests with user-mode Linux guests can't run here.
#[must_use]
pub fn missing_for_user_mode_linux() -> Option<String> {
    missing_for_namespaces().or_else(sandwire_user_mode_linux::missing)
}

/// Why tests with QEMU guests can't run here.
#[must_use]
pub fn missing_for_qemu() -> Option<String> {
    missing_for_namespaces().or_else(|| {
        missing_programs(&[
            "qemu-system-x86_64",
            "busybox",
            "dpkg",
            "apt-get",
            "xz",
            "strip",
            "ldd",
            "bpftool",
            "tc",
        ])
    })
}

/// Why the test with systemd in a QEMU guest can't run here.
#[must_use]
pub fn missing_for_systemd() -> Option<String> {
    missing_for_qemu().or_else(|| missing_programs(&["mkfs.ext4", "tar", "strip"]))
}

/// Why tests on emulated ARM can't run here. Of Rust's own part only whoever builds knows.
#[must_use]
pub fn missing_for_arm() -> Option<String> {
    let programs = [
        "qemu-system-aarch64",
        "aarch64-linux-gnu-gcc",
        "aarch64-linux-gnu-strip",
    ];
    // Nothing else needs them, so `cargo xtask setup` doesn't install them.
    let is_missing = !programs.into_iter().all(command::is_on_path);
    let missing = is_missing.then(|| {
        "`apt-get install --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross \
         qemu-system-arm` installs what it needs"
            .to_owned()
    });
    missing.or_else(|| {
        missing_programs(&[
            "busybox",
            "dpkg",
            "apt-get",
            "xz",
            "tar",
            "mkfs.ext4",
            "debugfs",
        ])
    })
}

/// Why tests with Firecracker can't run here.
#[must_use]
pub fn missing_for_firecracker() -> Option<String> {
    let missing = if command::is_on_path("firecracker") {
        missing_for_namespaces()
    } else {
        // No package has it, so `cargo xtask setup` doesn't install it.
        Some("firecracker is not on the PATH".to_owned())
    };
    missing
        .or_else(|| missing_programs(&["busybox", "strip", "ldd", "xz"]))
        .or_else(|| missing_file("/dev/kvm"))
        .or_else(|| match env::var(FIRECRACKER_KERNEL) {
            Ok(path) => missing_file(&path),
            Err(_) => Some(format!("{FIRECRACKER_KERNEL} names no kernel")),
        })
}

/// Why tests with the program of CNI's reference library can't run here.
#[must_use]
pub fn missing_for_cnitool() -> Option<String> {
    // No package has it, so `cargo xtask setup` doesn't install it.
    let is_missing = !command::is_on_path("cnitool");
    let missing = is_missing.then(|| "cnitool is not on the PATH".to_owned());
    missing.or_else(missing_for_namespaces)
}

/// Environment variable that names a kernel for Firecracker: an ELF image, or one packed with xz.
pub const FIRECRACKER_KERNEL: &str = "SANDWIRE_FIRECRACKER_KERNEL";

fn missing_programs(programs: &[&str]) -> Option<String> {
    command::require_on_path(programs)
        .err()
        .map(|error| format!("{error:#}"))
}

fn missing_file(path: &str) -> Option<String> {
    (!Path::new(path).exists()).then(|| format!("no {path}"))
}
