//! Firecracker: boots one guest, saves it, restores clones copy-on-write.
//!
//! It maps the saved memory privately, so clones share what they don't write. Its API is HTTP on a Unix
//! socket, one per VM. As root it makes a missing TAP by itself, silently: whoever starts it checks the
//! slot first.

use std::{
    fs::{self, File},
    os::unix::{net::UnixStream, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{Vmm, console::Console, cpu_can_virtualise, initramfs, mac_text, vsock};
use crate::{command, fake_guest::GuestNetwork, http, namespace};

/// What is needed to start guests: the kernel, their user space, and a folder for their files.
#[derive(Clone, Debug)]
pub struct Recipe {
    kernel: PathBuf,
    initramfs: PathBuf,
    folder: PathBuf,
    mac: [u8; 6],
}

/// A running Firecracker.
#[derive(Debug)]
pub struct Firecracker {
    vmm: Vmm,
    socket: PathBuf,
    console: Console,
}

/// A saved guest that clones can be made of.
#[derive(Clone, Debug)]
pub struct Snapshot {
    recipe: Recipe,
}

impl Recipe {
    /// Prepares guests with this network and kernel, an ELF image or one packed with xz. All files go
    /// into `folder`; a tmpfs is best.
    ///
    /// # Errors
    /// If Firecracker or busybox isn't installed, or a file can't be read or written.
    pub fn prepare(kernel: &Path, network: &GuestNetwork, folder: &Path) -> Result<Self> {
        let initramfs = folder.join("firecracker.cpio");
        fs::write(&initramfs, initramfs::build(network, &[], "")?)
            .with_context(|| format!("write {}", initramfs.display()))?;
        Self::with(kernel, initramfs, network.mac, folder)
    }

    /// Prepares guests that have vsock and no network: `lab-vsock` runs in them. The kernel needs its driver built
    /// in, as those that Firecracker's project publishes have it.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn prepare_for_vsock(kernel: &Path, folder: &Path) -> Result<Self> {
        // The one serial line is the console: nothing comes in by it.
        let initramfs = vsock::user_space(&[], "/dev/ttyS0", folder)?;
        Self::with(kernel, initramfs, [0; 6], folder)
    }

    fn with(kernel: &Path, initramfs: PathBuf, mac: [u8; 6], folder: &Path) -> Result<Self> {
        command::require_on_path(&["firecracker"])?;
        let kernel = if kernel.extension().is_some_and(|ending| ending == "xz") {
            unpack(kernel, &folder.join("vmlinux"))?
        } else {
            kernel.to_owned()
        };
        Ok(Self {
            kernel,
            initramfs,
            folder: folder.to_owned(),
            mac,
        })
    }

    /// Boots the guest to be saved on a TAP in a network namespace and waits until its web server
    /// listens.
    ///
    /// # Errors
    /// If it doesn't boot; the error then holds its console.
    pub fn boot(&self, netns: &Path, tap: &str) -> Result<Firecracker> {
        let network =
            json!({"iface_id": "eth0", "host_dev_name": tap, "guest_mac": mac_text(self.mac)});
        let device = ("/network-interfaces/eth0", network);
        self.boot_with("original", netns, MEMORY_MIB, device)
    }

    /// Boots a guest whose vsock device is Firecracker's, with what a lease says to it (`firecracker_vsock`): the
    /// body of `PUT /vsock`. Its ports are served a moment later.
    ///
    /// # Errors
    /// If it doesn't boot; the error then holds its console.
    pub fn boot_with_vsock(&self, name: &str, vsock: Value) -> Result<Firecracker> {
        let own = Path::new("/proc/self/ns/net");
        self.boot_with(name, own, VSOCK_MEMORY_MIB, ("/vsock", vsock))
    }

    fn boot_with(
        &self,
        name: &str,
        netns: &Path,
        memory: u32,
        (path, device): (&str, Value),
    ) -> Result<Firecracker> {
        let mut guest = self.start(name, netns)?;
        let hardware = if cpu_can_virtualise() {
            ""
        } else {
            WITHOUT_HARDWARE
        };
        guest.put(
            "/boot-source",
            &json!({
                "kernel_image_path": self.kernel,
                "initrd_path": self.initramfs,
                "boot_args": format!("console=ttyS0 reboot=k panic=-1 quiet {hardware}"),
            }),
        )?;
        guest.put(
            "/machine-config",
            &json!({"vcpu_count": 1, "mem_size_mib": memory}),
        )?;
        guest.put(path, &device)?;
        guest.put("/actions", &json!({"action_type": "InstanceStart"}))?;
        guest
            .console
            .wait_ready(&mut guest.vmm, Duration::from_secs(180))?;
        Ok(guest)
    }

    fn start(&self, name: &str, netns: &Path) -> Result<Firecracker> {
        let socket = self.folder.join(format!("{name}.firecracker"));
        let console = Console::at(self.folder.join(format!("{name}.console")));
        let output = File::create(console.path())
            .with_context(|| format!("create {}", console.path().display()))?;
        let child = namespace::command_in(netns, "firecracker")
            .arg("--id")
            .arg(name)
            .arg("--api-sock")
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .spawn()
            .context("start Firecracker")?;
        let mut guest = Firecracker {
            vmm: Vmm::new(child),
            socket,
            console,
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        // The file is there before Firecracker listens.
        while UnixStream::connect(&guest.socket).is_err() {
            if let Some(status) = guest.vmm.ended()? {
                bail!("Firecracker ended ({status}): {}", guest.console());
            }
            ensure!(Instant::now() < deadline, "Firecracker opens no socket");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(guest)
    }

    fn memory(&self) -> PathBuf {
        self.folder.join("saved.memory")
    }

    fn state(&self) -> PathBuf {
        self.folder.join("saved.state")
    }
}

impl Firecracker {
    /// Saves the guest and ends its Firecracker.
    ///
    /// # Errors
    /// If Firecracker can't.
    pub fn save(mut self, recipe: &Recipe) -> Result<Snapshot> {
        self.request("PATCH", "/vm", &json!({"state": "Paused"}))?;
        self.put(
            "/snapshot/create",
            &json!({
                "snapshot_type": "Full",
                "snapshot_path": recipe.state(),
                "mem_file_path": recipe.memory(),
            }),
        )?;
        self.vmm.kill()?;
        Ok(Snapshot {
            recipe: recipe.clone(),
        })
    }

    /// What the guest and Firecracker have printed so far.
    #[must_use]
    pub fn console(&self) -> String {
        self.console.text()
    }

    /// Its process alone.
    #[must_use]
    pub fn into_vmm(self) -> Vmm {
        self.vmm
    }

    fn put(&self, path: &str, body: &Value) -> Result<()> {
        self.request("PUT", path, body)
    }

    fn request(&self, method: &str, path: &str, body: &Value) -> Result<()> {
        let patience = Duration::from_secs(60);
        let text = body.to_string();
        let answer = http::request_unix(&self.socket, method, path, Some(&text), patience)?;
        http::successful(answer).with_context(|| format!("{method} {path} of Firecracker"))?;
        Ok(())
    }
}

impl Snapshot {
    /// Restores a clone on a TAP in a network namespace; returns when it runs.
    ///
    /// # Errors
    /// If Firecracker can't.
    pub fn restore(&self, name: &str, netns: &Path, tap: &str) -> Result<Firecracker> {
        let clone = self.recipe.start(name, netns)?;
        clone.put(
            "/snapshot/load",
            &json!({
                "snapshot_path": self.recipe.state(),
                "mem_backend": {"backend_type": "File", "backend_path": self.recipe.memory()},
                "network_overrides": [{"iface_id": "eth0", "host_dev_name": tap}],
                "resume_vm": true,
            }),
        )?;
        Ok(clone)
    }

    /// Bytes that all clones share, and bytes of the device state.
    ///
    /// # Errors
    /// If the files are gone.
    pub fn sizes(&self) -> Result<(u64, u64)> {
        let memory = fs::metadata(self.recipe.memory()).context("look at the saved memory")?;
        let state = fs::metadata(self.recipe.state()).context("look at the saved state")?;
        Ok((memory.len(), state.len()))
    }
}

const MEMORY_MIB: u32 = 96;
/// As for guests of QEMU that have vsock.
const VSOCK_MEMORY_MIB: u32 = 256;

/// What a guest kernel needs under a KVM that emulates: no instruction that the emulator lacks, and no
/// calibration against a clock.
const WITHOUT_HARDWARE: &str = "noxsave \
     clearcpuid=308,295,288,298,311,312,306,141,151,158,154,145 tsc=reliable no_timer_check";

fn unpack(packed: &Path, target: &Path) -> Result<PathBuf> {
    let output = File::create(target).with_context(|| format!("create {}", target.display()))?;
    let status = Command::new("xz")
        .args(["--decompress", "--stdout"])
        .arg(packed)
        .stdin(Stdio::null())
        .stdout(output)
        .status()
        .context("start xz")?;
    ensure!(status.success(), "xz can't unpack {}", packed.display());
    Ok(target.to_owned())
}
