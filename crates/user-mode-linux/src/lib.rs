//! User-mode Linux: a real kernel as a plain process on a TAP. Needs no virtualisation.
//!
//! Debian's package `user-mode-linux`. One CPU, 64 MiB, about 30 MB resident. This says what is missing, makes what all
//! guests share beside their initramfs, and completes the command that starts one. The initramfs and the running process
//! are the caller's.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

/// What is started: the kernel comes with its arguments. See [`Start::complete`].
pub const PROGRAM: &str = "setarch";
/// User space of the guests. Has to be static.
pub const BUSYBOX: &str = "/bin/busybox";
const KERNEL: &str = "/usr/bin/linux.uml";

/// For the vector registers of a process, Debian's kernel has so much room; see `whole_registers.c`.
const REGISTERS_ROOM: u32 = 2696;
const WHOLE_REGISTERS: &str = include_str!("whole_registers.c");
/// Names of that file and what is made of it, beside the initramfs.
const SOURCE: &str = "whole_registers.c";
const LIBRARY: &str = "whole_registers.so";
const COMPILER: &str = "/usr/bin/cc";

/// What every guest needs, and the packages that have it.
const NEEDED: [(&str, &str); 2] = [(KERNEL, "user-mode-linux"), (BUSYBOX, "busybox-static")];
/// What they need where processes have more registers than their kernel has room for.
const NEEDED_TO_COMPILE: [(&str, &str); 2] =
    [(COMPILER, "gcc"), ("/usr/include/stdio.h", "libc6-dev")];

/// Why there can be no such guests here, if so.
#[must_use]
pub fn missing() -> Option<String> {
    first_missing(registers_bytes(), Path::exists)
}

fn first_missing(registers: u32, exists: impl Fn(&Path) -> bool) -> Option<String> {
    let absent = |(path, _): &&(&str, &str)| !exists(Path::new(path));
    if let Some((path, package)) = NEEDED.iter().find(absent) {
        return Some(format!("there is no {path}, of the package {package}"));
    }
    if registers <= REGISTERS_ROOM {
        return None;
    }
    let (path, package) = NEEDED_TO_COMPILE.iter().find(absent)?;
    Some(format!(
        "there is no {path}, of the package {package}; on a processor with {registers} bytes of vector registers, as \
         AMX has, guests need a library that is compiled here"
    ))
}

/// Makes what guests need beside their initramfs in the folder that has it: nothing on most processors.
///
/// # Errors
/// If it can't be compiled.
pub fn prepare(folder: &Path) -> Result<()> {
    if registers_bytes() <= REGISTERS_ROOM {
        return Ok(());
    }
    compile(folder)
}

fn compile(folder: &Path) -> Result<()> {
    let source = folder.join(SOURCE);
    fs::write(&source, WHOLE_REGISTERS).with_context(|| format!("write {}", source.display()))?;
    let output = Command::new(COMPILER)
        .args(["-O2", "-shared", "-fPIC", "-o"])
        .args([&folder.join(LIBRARY), &source])
        .output()
        .with_context(|| format!("start {COMPILER}, of the package gcc"))?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "compile {}: {}",
        source.display(),
        problem.trim()
    );
    Ok(())
}

/// How many bytes of vector registers a process has, as the processor says and the kernel has set it up.
#[cfg(target_arch = "x86_64")]
fn registers_bytes() -> u32 {
    use core::arch::x86_64::{__cpuid, __cpuid_count};

    /// "Processor extended state enumeration" in Intel's manual.
    const STATE: u32 = 0xd;
    if __cpuid(0).eax < STATE {
        return 0;
    }
    __cpuid_count(STATE, 0).ebx
}

#[cfg(not(target_arch = "x86_64"))]
fn registers_bytes() -> u32 {
    0
}

/// How one guest is started.
#[derive(Clone, Copy, Debug)]
pub struct Start<'a> {
    /// The TAP, in the namespace that the command runs in.
    pub tap: &'a str,
    /// Where its files go, by its name.
    pub folder: &'a Path,
    /// Its name among the guests of that folder.
    pub name: &'a str,
    /// What it boots from, in the folder that [`prepare`] was called for.
    pub initramfs: &'a Path,
}

impl Start<'_> {
    /// Completes a command that runs [`PROGRAM`]. It and all processes of the guest will be a process group.
    ///
    /// `gro=1` is needed: without it the guest drops the segmented frames that a host's TCP sends. `setarch -R` is needed
    /// too: the kernel counts what lies between itself and its heap as memory of its own and has a page structure for each
    /// page of it. Where the host puts the heap at random, that is up to 1 GiB, and half of the 64 MiB are gone before the
    /// first program starts.
    ///
    /// `pty.legacy_count=0` leaves 512 devices out that nobody opens. For each device the kernel begins a thread that looks
    /// for `/sbin/hotplug`, and these wait until the initramfs is unpacked. With all of them as many were there as 64 MiB
    /// allow (some 300), and where the host was busy, they still were when the first program forked, which failed (EAGAIN).
    pub fn complete(&self, command: &mut Command) {
        command
            .args(["-R", KERNEL])
            .args(["mem=64M", "root=/dev/ram0", "pty.legacy_count=0"])
            .args(["con=null", "con0=null,fd:1"])
            .arg(format!("initrd={}", self.initramfs.display()))
            .arg(format!("vec0:transport=tap,ifname={},gro=1", self.tap))
            .arg(format!("umid={}", self.name))
            .arg(format!("uml_dir={}", self.folder.display()))
            .env("TMPDIR", self.folder)
            .env("HOME", self.folder)
            .process_group(0);
        let library = self.library();
        if library.exists() {
            command.env("LD_PRELOAD", library);
        }
    }

    fn library(&self) -> PathBuf {
        self.initramfs.with_file_name(LIBRARY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_its_package() {
        let without = |absent: &'static str| move |path: &Path| path != Path::new(absent);
        let missing = |registers, absent| first_missing(registers, without(absent));
        assert_eq!(missing(11_008, "/nothing"), None);
        let reason = missing(REGISTERS_ROOM, KERNEL).unwrap();
        assert!(reason.ends_with("package user-mode-linux"), "{reason}");
        assert_eq!(missing(REGISTERS_ROOM, COMPILER), None, "none is needed");
        let reason = missing(11_008, COMPILER).unwrap();
        assert!(reason.contains("package gcc;"), "{reason}");
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_processor_with_amx_has_more_registers_than_the_kernel_has_room_for() {
        let processor = fs::read_to_string("/proc/cpuinfo").unwrap();
        let registers = registers_bytes();
        assert!(registers >= 512, "SSE's alone are 512: {registers}");
        assert!(
            !processor.contains(" amx_tile") || registers > REGISTERS_ROOM,
            "{registers}"
        );
    }

    #[test]
    fn a_library_is_preloaded_where_there_is_one() {
        let folder = tempfile::tempdir().unwrap();
        let start = Start {
            tap: "vmtap0",
            folder: folder.path(),
            name: "guest0",
            initramfs: &folder.path().join("guest.cpio"),
        };
        let preloads = || {
            let mut command = Command::new(PROGRAM);
            start.complete(&mut command);
            command.get_envs().any(|(name, _)| name == "LD_PRELOAD")
        };
        assert!(!preloads());
        compile(folder.path()).unwrap();
        assert!(preloads());
    }
}
