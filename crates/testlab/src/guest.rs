//! Real guests: Linux kernels with busybox and a small web server, all with the same network.
//!
//! Every guest gets the same addresses from the same initramfs ([`initramfs`]), as clones of one
//! snapshot do. [`user_mode_linux`] runs many of them as plain processes; [`qemu`] boots one, saves it
//! and restores any number copy-on-write; [`firecracker`] does the same where it is installed.
//! [`systemd`] boots a whole Debian to try units in; [`machine`] runs a test on another kernel, [`arm`] on another
//! processor.
//! [`vsock`] has guests without any network, which do what [`agent`] says on a serial line.
//! [`kernel`] fetches kernels for QEMU once, without installing them. [`web`] talks to the guests'
//! web server.
//!
//! The guest runs nothing at a restore: no address change, no announcement. Whatever works at once
//! works because of what is outside of it.

pub mod agent;
mod apt;
pub mod arm;
mod console;
pub mod cpio;
mod emulation;
pub mod firecracker;
pub mod initramfs;
pub mod kernel;
pub mod machine;
mod python;
pub mod qemu;
pub mod qmp;
mod root_disk;
pub mod systemd;
pub mod user_mode_linux;
pub mod vsock;
pub mod web;

use std::{
    env,
    fmt::Write as _,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::{
    fs::{FlockOperation, flock},
    process::{Pid, Signal, kill_process_group},
};

/// Folder for what is fetched or made once and used by many test runs: `guests` in cargo's target
/// folder, or what `SANDWIRE_GUEST_CACHE` names.
///
/// # Errors
/// If it can't be created.
pub fn cache_folder() -> Result<PathBuf> {
    let folder = match env::var_os("SANDWIRE_GUEST_CACHE") {
        Some(path) => PathBuf::from(path),
        None => {
            let own = env::current_exe().context("find the running executable")?;
            let profile = own
                .ancestors()
                .find(|path| path.ends_with("debug") || path.ends_with("release"))
                .context("the running executable is not in cargo's target folder")?;
            profile.with_file_name("guests")
        }
    };
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    Ok(folder)
}

/// Has one process at a time make what is made once, of one kind: until the result is dropped.
fn lock_cache(cache: &Path, kind: &str) -> Result<File> {
    let lock = File::create(cache.join(format!("{kind}.lock"))).context("lock the guest cache")?;
    flock(&lock, FlockOperation::LockExclusive).context("lock the guest cache")?;
    Ok(lock)
}

/// A VMM's process with its helpers: a process group of its own.
#[derive(Debug)]
pub struct Vmm {
    child: Child,
}

impl Vmm {
    fn new(child: Child) -> Self {
        Self { child }
    }

    /// Its process number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended, and how.
    ///
    /// # Errors
    /// If the kernel doesn't say.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("look after the VMM")
    }

    /// Waits until it ends by itself.
    ///
    /// # Errors
    /// If it doesn't in time.
    pub fn wait(&mut self, patience: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            thread::sleep(Duration::from_millis(10));
        }
        bail!("the VMM still runs after {patience:?}")
    }

    /// Ends it and its helpers by SIGKILL and waits until it is gone.
    ///
    /// # Errors
    /// If it can't be ended.
    pub fn kill(&mut self) -> Result<()> {
        let group = Pid::from_child(&self.child);
        if self.ended()?.is_some() {
            // Helpers of one that crashed still hold its TAP; mostly there are none.
            let _ = kill_process_group(group, Signal::KILL);
            return Ok(());
        }
        kill_process_group(group, Signal::KILL).context("end the VMM")?;
        self.child.wait().context("wait for the VMM")?;
        Ok(())
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        // The lab's end gets what this doesn't.
        let _ = self.kill();
    }
}

fn mac_text(mac: [u8; 6]) -> String {
    let mut text = String::new();
    for (index, byte) in mac.iter().enumerate() {
        let separator = if index == 0 { "" } else { ":" };
        let _ = write!(text, "{separator}{byte:02x}");
    }
    text
}

/// Whether the CPU has what KVM needs. Where it hasn't, `/dev/kvm` can still be there and fail later, or
/// emulate at a few million instructions a second.
#[must_use]
pub fn cpu_can_virtualise() -> bool {
    let facts = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = facts.lines().find(|line| line.starts_with("flags"));
    let capable = flags.is_some_and(|line| {
        line.split_whitespace()
            .any(|flag| flag == "vmx" || flag == "svm")
    });
    capable && Path::new("/dev/kvm").exists()
}
