//! QEMU: boots one guest, saves it, restores clones copy-on-write.
//!
//! The guest's memory is a file, shared while the guest to be saved runs; the clones map the same file
//! privately, so the kernel copies only what a clone writes. With `x-ignore-shared` the state file then
//! holds only the devices: 0.3 MB, restored in about 80 ms.
//!
//! Without virtualisation QEMU emulates (TCG): a boot takes 3–5 s. `/dev/kvm` may be there and yet
//! not work, so KVM counts only if the CPU says so and a guest really boots with it.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{
    Vmm, console::Console, cpu_can_virtualise, initramfs, kernel::Kernel, mac_text, qmp::Qmp,
};
use crate::{fake_guest::GuestNetwork, namespace, sandwire};

/// How QEMU runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// Hardware virtualisation.
    Kvm,
    /// Emulation.
    Tcg,
}

/// What is needed to start guests: the kernel, their user space, and a folder for their files.
#[derive(Clone, Debug)]
pub struct Recipe {
    kernel: PathBuf,
    initramfs: PathBuf,
    folder: PathBuf,
    mac: [u8; 6],
    accelerator: Accelerator,
}

/// A running QEMU.
#[derive(Debug)]
pub struct Qemu {
    vmm: Vmm,
    qmp: Qmp,
    console: Console,
}

/// A saved guest that clones can be made of.
#[derive(Clone, Debug)]
pub struct Snapshot {
    recipe: Recipe,
    memory: PathBuf,
    state: PathBuf,
}

impl Recipe {
    /// Prepares guests with this network. All files go into `folder`; a tmpfs is best.
    ///
    /// # Errors
    /// If busybox isn't installed or the folder can't be written.
    pub fn prepare(kernel: &Kernel, network: &GuestNetwork, folder: &Path) -> Result<Self> {
        Self::prepare_with(kernel, network, folder, "")
    }

    /// Like [`Recipe::prepare`], with a shell script that the guest runs once its network is up.
    ///
    /// # Errors
    /// If busybox isn't installed or the folder can't be written.
    pub fn prepare_with(
        kernel: &Kernel,
        network: &GuestNetwork,
        folder: &Path,
        script: &str,
    ) -> Result<Self> {
        Self::prepare_of(kernel, network, folder, &[], script)
    }

    /// Like [`Recipe::prepare_with`], with `/usr/bin/lab-traffic` in the guest (see [`crate::traffic`]).
    ///
    /// # Errors
    /// If that or busybox isn't there, or the folder can't be written.
    pub fn prepare_with_traffic(
        kernel: &Kernel,
        network: &GuestNetwork,
        folder: &Path,
        script: &str,
    ) -> Result<Self> {
        let executable = sandwire::beside("lab-traffic")?;
        let copy = initramfs::stripped(&executable, folder, "lab-traffic")?;
        let programs = [("lab-traffic".to_owned(), copy)];
        Self::prepare_of(kernel, network, folder, &programs, script)
    }

    fn prepare_of(
        kernel: &Kernel,
        network: &GuestNetwork,
        folder: &Path,
        programs: &[(String, PathBuf)],
        script: &str,
    ) -> Result<Self> {
        let modules = kernel.modules_for(&["virtio_pci", "virtio_net"])?;
        let path = folder.join("qemu.cpio");
        let content = initramfs::build_with(network, &modules, programs, script)?;
        fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
        Ok(Self {
            kernel: kernel.image.clone(),
            initramfs: path,
            folder: folder.to_owned(),
            mac: network.mac,
            accelerator: Accelerator::Tcg,
        })
    }

    /// How its guests run.
    #[must_use]
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// Boots the guest to be saved on a TAP in a network namespace and waits until its web server
    /// listens. Tries KVM first if the CPU has it.
    ///
    /// # Errors
    /// If it doesn't boot; the error then holds its console.
    pub fn boot(&mut self, netns: &Path, tap: &str) -> Result<Qemu> {
        if cpu_can_virtualise() {
            self.accelerator = Accelerator::Kvm;
            let attempt = self.boot_with(netns, tap, Duration::from_secs(15));
            if attempt.is_ok() {
                return attempt;
            }
            self.accelerator = Accelerator::Tcg;
        }
        self.boot_with(netns, tap, Duration::from_secs(90))
    }

    fn boot_with(&self, netns: &Path, tap: &str, patience: Duration) -> Result<Qemu> {
        let memory = self.memory();
        if memory.exists() {
            fs::remove_file(&memory).context("remove the memory of an earlier guest")?;
        }
        let kernel = [
            "-kernel".to_owned(),
            self.kernel.display().to_string(),
            "-initrd".to_owned(),
            self.initramfs.display().to_string(),
            "-append".to_owned(),
            "console=ttyS0 quiet panic=-1".to_owned(),
        ];
        let mut guest = self.start("original", netns, tap, true, &kernel)?;
        guest.console.wait_ready(&mut guest.vmm, patience)?;
        Ok(guest)
    }

    fn start(
        &self,
        name: &str,
        netns: &Path,
        tap: &str,
        share: bool,
        more: &[String],
    ) -> Result<Qemu> {
        let socket = self.folder.join(format!("{name}.qmp"));
        let console = Console::at(self.folder.join(format!("{name}.console")));
        let errors = self.folder.join(format!("{name}.errors"));
        let output =
            File::create(&errors).with_context(|| format!("create {}", errors.display()))?;
        let (accelerator, cpu) = match self.accelerator {
            Accelerator::Kvm => ("kvm", "host"),
            // Linux 6.12 panics under QEMU 7.2's cmpxchg16b in half of all boots.
            Accelerator::Tcg => ("tcg", "qemu64,-cx16"),
        };
        let share = if share { "on" } else { "off" };
        let child = namespace::command_in(netns, "qemu-system-x86_64")
            .args(["-accel", accelerator, "-cpu", cpu, "-m", MEMORY])
            .args(["-machine", "q35,memory-backend=memory"])
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .arg("-object")
            .arg(format!(
                "memory-backend-file,id=memory,size={MEMORY},mem-path={},share={share}",
                self.memory().display()
            ))
            .arg("-netdev")
            .arg(format!(
                "tap,id=net0,ifname={tap},script=no,downscript=no,vhost=off"
            ))
            // No announcement after a restore: the first packet has to work without.
            .arg("-device")
            .arg(format!(
                "virtio-net-pci,netdev=net0,mac={},romfile=,guest_announce=off",
                mac_text(self.mac)
            ))
            .arg("-serial")
            .arg(format!("file:{}", console.path().display()))
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", socket.display()))
            .args(more)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .spawn()
            .context("start QEMU")?;
        let mut vmm = Vmm::new(child);
        let connected = Qmp::connect(&socket, Duration::from_secs(20));
        let qmp = connected.with_context(|| {
            // QEMU may have ended: then it said why.
            let _ = vmm.kill();
            fs::read_to_string(&errors).unwrap_or_default()
        })?;
        Ok(Qemu { vmm, qmp, console })
    }

    fn memory(&self) -> PathBuf {
        self.folder.join("saved.memory")
    }
}

impl Qemu {
    /// Saves the guest and ends its QEMU.
    ///
    /// # Errors
    /// If QEMU can't.
    pub fn save(mut self, recipe: &Recipe) -> Result<Snapshot> {
        let state = recipe.folder.join("saved.state");
        self.ignore_shared_memory()?;
        self.qmp.execute("stop", &json!({}))?;
        let target = json!({"uri": format!("exec:cat > {}", state.display())});
        self.qmp.execute("migrate", &target)?;
        let ended = self.qmp.wait_status(
            "query-migrate",
            &["completed", "failed"],
            Duration::from_secs(30),
        )?;
        ensure!(ended == "completed", "QEMU failed to save the guest");
        self.qmp.execute("quit", &json!({}))?;
        self.vmm.wait(Duration::from_secs(10))?;
        Ok(Snapshot {
            recipe: recipe.clone(),
            memory: recipe.memory(),
            state,
        })
    }

    /// What the guest has printed so far.
    #[must_use]
    pub fn console(&self) -> String {
        self.console.text()
    }

    /// Its process alone. QEMU goes on without the connection to its protocol.
    #[must_use]
    pub fn into_vmm(self) -> Vmm {
        self.vmm
    }

    /// Its process.
    pub fn vmm(&mut self) -> &mut Vmm {
        &mut self.vmm
    }

    fn ignore_shared_memory(&mut self) -> Result<()> {
        let capability = json!({"capability": "x-ignore-shared", "state": true});
        let arguments = json!({"capabilities": [capability]});
        self.qmp
            .execute("migrate-set-capabilities", &arguments)
            .map(drop)
    }
}

impl Snapshot {
    /// Restores a clone on a TAP in a network namespace; returns when it runs.
    ///
    /// # Errors
    /// If QEMU can't.
    pub fn restore(&self, name: &str, netns: &Path, tap: &str) -> Result<Qemu> {
        let more = ["-incoming".to_owned(), "defer".to_owned()];
        let mut clone = self.recipe.start(name, netns, tap, false, &more)?;
        clone.ignore_shared_memory()?;
        let source = json!({"uri": format!("exec:cat {}", self.state.display())});
        clone.qmp.execute("migrate-incoming", &source)?;
        clone
            .qmp
            .wait_status("query-status", &["paused"], Duration::from_secs(60))
            .with_context(|| format!("restore the clone {name}"))?;
        clone.qmp.execute("cont", &json!({}))?;
        Ok(clone)
    }

    /// Bytes that all clones share, and bytes of the device state.
    ///
    /// # Errors
    /// If the files are gone.
    pub fn sizes(&self) -> Result<(u64, u64)> {
        let memory = fs::metadata(&self.memory).context("look at the saved memory")?;
        let state = fs::metadata(&self.state).context("look at the saved state")?;
        Ok((memory.len(), state.len()))
    }
}

/// 80 MiB boots Debian's 6.1 kernel; a newer one needs 96.
const MEMORY: &str = "96M";
