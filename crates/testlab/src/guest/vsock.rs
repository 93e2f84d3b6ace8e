//! QEMU guests that have vsock and no network at all.
//!
//! The device is a vhost-user one, so the guest's memory is shared with whoever serves it: a memfd, or a file
//! where guests are to be saved. A private mapping of such a file would hide from the device what the guest
//! writes, so a restored clone gets a copy of its own. QEMU refuses to save a guest that has the device;
//! it is plugged into the clone ([`Guest::plug`]).

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use super::{
    Vmm,
    agent::Agent,
    initramfs::{self, add_modules, add_programs, stripped},
    kernel::Kernel,
    qmp::Qmp,
};
use crate::sandwire;

/// What is needed to start guests: the kernel, their user space, and a folder for their files.
#[derive(Clone, Debug)]
pub struct Recipe {
    kernel: PathBuf,
    initramfs: PathBuf,
    folder: PathBuf,
}

/// A running guest.
#[derive(Debug)]
pub struct Guest {
    vmm: Vmm,
    qmp: Qmp,
    agent: Agent,
}

/// A saved guest that clones can be made of.
#[derive(Clone, Debug)]
pub struct Snapshot {
    recipe: Recipe,
    memory: PathBuf,
    state: PathBuf,
}

impl Recipe {
    /// Prepares guests of this kernel. All files go into `folder`, best on a tmpfs.
    ///
    /// # Errors
    /// If busybox, a module or `lab-vsock` is missing, or the folder can't be written.
    pub fn prepare(kernel: &Kernel, folder: &Path) -> Result<Self> {
        let modules = kernel.modules_for(MODULES)?;
        Ok(Self {
            kernel: kernel.image.clone(),
            initramfs: user_space(&modules, "/dev/ttyS1", folder)?,
            folder: folder.to_owned(),
        })
    }

    /// Boots a guest with what a lease says to QEMU, and waits until its agent is ready.
    ///
    /// # Errors
    /// If it doesn't boot; the error then holds its console.
    pub fn boot(&self, name: &str, channel: &[String]) -> Result<Guest> {
        let memory = format!("memory-backend-memfd,id=memory,size={MEMORY},share=on");
        self.boot_on(name, &memory, channel)
    }

    /// Boots a guest without the device, to be saved.
    ///
    /// # Errors
    /// If it doesn't boot; the error then holds its console.
    pub fn boot_to_save(&self) -> Result<Guest> {
        self.boot_on("original", &shared_file(&self.memory("original")), &[])
    }

    fn boot_on(&self, name: &str, memory: &str, channel: &[String]) -> Result<Guest> {
        let mut more = vec![
            "-kernel".to_owned(),
            self.kernel.display().to_string(),
            "-initrd".to_owned(),
            self.initramfs.display().to_string(),
            "-append".to_owned(),
            "console=ttyS0 quiet panic=-1".to_owned(),
        ];
        more.extend_from_slice(channel);
        let mut guest = self.start(name, memory, &more)?;
        if let Err(error) = guest.agent.wait_ready(BOOT_PATIENCE) {
            bail!("{error:#}; the console of {name}: {}", self.console(name));
        }
        Ok(guest)
    }

    fn start(&self, name: &str, memory: &str, more: &[String]) -> Result<Guest> {
        let at = |ending: &str| self.folder.join(format!("{name}.{ending}"));
        let (control, line, console) = (at("qmp"), at("agent"), at("console"));
        for socket in [&control, &line] {
            if socket.exists() {
                fs::remove_file(socket).context("remove an ended guest's socket")?;
            }
        }
        let errors = at("errors");
        let output =
            File::create(&errors).with_context(|| format!("create {}", errors.display()))?;
        let child = Command::new("qemu-system-x86_64")
            .args(["-accel", "tcg", "-cpu", "qemu64,-cx16", "-m", MEMORY])
            .args(["-machine", "q35,memory-backend=memory"])
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-object", memory])
            // Where a device can be plugged while the guest runs.
            .args(["-device", &format!("pcie-root-port,id={SLOT},chassis=1")])
            .arg("-serial")
            .arg(format!("file:{}", console.display()))
            .arg("-serial")
            .arg(format!("unix:{},server=on,wait=off", line.display()))
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", control.display()))
            .args(more)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .spawn()
            .context("start QEMU")?;
        let mut vmm = Vmm::new(child);
        let connected = Qmp::connect(&control, Duration::from_secs(20));
        let qmp = connected.with_context(|| {
            // QEMU may have ended: then it said why.
            let _ = vmm.kill();
            fs::read_to_string(&errors).unwrap_or_default()
        })?;
        let agent = Agent::connect(&line)?;
        Ok(Guest { vmm, qmp, agent })
    }

    /// What a guest has printed so far.
    #[must_use]
    pub fn console(&self, name: &str) -> String {
        fs::read(self.folder.join(format!("{name}.console")))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    fn memory(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.memory"))
    }
}

impl Guest {
    /// What does things in it.
    pub fn agent(&mut self) -> &mut Agent {
        &mut self.agent
    }

    /// Its VMM's process.
    pub fn vmm(&mut self) -> &mut Vmm {
        &mut self.vmm
    }

    /// Plugs a vsock device into the running guest: what `docs/vsock.md` says to do after a restore.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn plug(&mut self, id: &str, vhost_user_socket: &Path) -> Result<()> {
        let address = json!({"type": "unix", "data": {"path": vhost_user_socket}});
        let backend = json!({"addr": address, "server": false});
        let chardev = json!({"id": id, "backend": {"type": "socket", "data": backend}});
        self.qmp.execute("chardev-add", &chardev)?;
        let device = json!({
            "driver": "vhost-user-vsock-pci", "id": format!("{id}-device"), "chardev": id, "bus": SLOT,
        });
        self.qmp.execute("device_add", &device)?;
        Ok(())
    }

    /// Takes out what [`Guest::plug`] has plugged in, and waits until the guest has let it go.
    ///
    /// # Errors
    /// If QEMU refuses, or the guest holds on to it.
    pub fn unplug(&mut self, id: &str) -> Result<()> {
        let device = json!({"id": format!("{id}-device")});
        self.qmp.execute("device_del", &device)?;
        self.qmp.wait_gone(
            &format!("/machine/peripheral/{id}-device"),
            Duration::from_secs(20),
        )?;
        // QEMU lets go of the device's socket a moment after the device is gone.
        let begun = Instant::now();
        loop {
            match self.qmp.execute("chardev-remove", &json!({"id": id})) {
                Err(error) if error.to_string().contains("is busy") && begun.elapsed() < LET_GO => {
                    thread::sleep(Duration::from_millis(20));
                }
                removed => return removed.map(drop),
            }
        }
    }

    /// Saves the guest and ends its QEMU.
    ///
    /// # Errors
    /// If QEMU can't: also if the guest has a vhost-user vsock device.
    pub fn save(mut self, recipe: &Recipe) -> Result<Snapshot> {
        let state = recipe.folder.join("original.state");
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
            memory: recipe.memory("original"),
            state,
        })
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
    /// Restores a clone on a copy of the memory; returns when it runs.
    ///
    /// # Errors
    /// If QEMU can't.
    pub fn restore(&self, name: &str) -> Result<Guest> {
        let memory = self.recipe.memory(name);
        fs::copy(&self.memory, &memory)
            .with_context(|| format!("copy the memory to {}", memory.display()))?;
        let more = ["-incoming".to_owned(), "defer".to_owned()];
        let mut clone = self.recipe.start(name, &shared_file(&memory), &more)?;
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
}

/// Writes the user space of such a guest: these modules, and the agent, told what to do on this serial line.
pub(super) fn user_space(modules: &[PathBuf], line: &str, folder: &Path) -> Result<PathBuf> {
    let mut archive = initramfs::base()?;
    let agent = stripped(&sandwire::beside("lab-vsock")?, folder, "lab-vsock")?;
    add_programs(&mut archive, &[("lab-vsock".to_owned(), agent)])?;
    let load = add_modules(&mut archive, modules)?;
    let init = format!(
        "{}{load}echo '{}'\nexec /usr/bin/lab-vsock {line}\n",
        initramfs::INIT_HEAD,
        initramfs::READY_LINE,
    );
    archive.executable("init", init.as_bytes());
    let path = folder.join("vsock.cpio");
    fs::write(&path, archive.finish()).with_context(|| format!("write {}", path.display()))?;
    Ok(path)
}

fn shared_file(path: &Path) -> String {
    format!(
        "memory-backend-file,id=memory,size={MEMORY},mem-path={},share=on",
        path.display()
    )
}

const MODULES: &[&str] = &["virtio_pci", "vmw_vsock_virtio_transport"];
/// Enough for a thousand threads: the kernel allows so many by its memory.
const MEMORY: &str = "256M";
const SLOT: &str = "slot0";
/// How long QEMU may still use the socket of a device that is gone.
const LET_GO: Duration = Duration::from_secs(10);
/// Two guests may boot at once on a busy machine, emulated.
const BOOT_PATIENCE: Duration = Duration::from_secs(90);
