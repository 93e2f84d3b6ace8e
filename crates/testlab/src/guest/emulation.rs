//! A guest that QEMU emulates, without a network, until it powers itself off.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};

use super::{Vmm, console::Console, kernel::Kernel};

/// What is to be booted.
pub(super) struct Boot<'a> {
    /// Begins the names of the guest's files.
    pub(super) name: &'a str,
    /// Where those files go.
    pub(super) folder: &'a Path,
    pub(super) kernel: &'a Kernel,
    /// The archive.
    pub(super) initramfs: &'a [u8],
    /// Memory, as QEMU writes it.
    pub(super) memory: &'a str,
    /// A file system that becomes `/dev/vda`. What the guest writes there is kept nowhere.
    pub(super) disk: Option<&'a Path>,
    /// More arguments of the kernel.
    pub(super) arguments: &'a str,
}

impl Boot<'_> {
    /// Boots it, waits until it has powered itself off, and returns what it printed.
    ///
    /// # Errors
    /// If QEMU can't be started, or the guest doesn't end in time; the error then holds its console.
    pub(super) fn run(&self, patience: Duration) -> Result<String> {
        let file = |ending: &str| self.folder.join(format!("{}.{ending}", self.name));
        let initramfs = file("cpio");
        fs::write(&initramfs, self.initramfs)
            .with_context(|| format!("write {}", initramfs.display()))?;
        let console = Console::at(file("console"));
        let errors = File::create(file("errors")).context("create a log")?;
        let disk = self.disk.map(|disk| {
            let disk = disk.display();
            format!("file={disk},format=raw,if=virtio,snapshot=on")
        });
        let child = Command::new("qemu-system-x86_64")
            // Linux 6.12 panics under QEMU 7.2's cmpxchg16b in half of all boots.
            .args(["-accel", "tcg", "-cpu", "qemu64,-cx16", "-m", self.memory])
            .args(["-machine", "q35", "-nodefaults", "-no-user-config"])
            .args(["-display", "none", "-no-reboot"])
            .arg("-kernel")
            .arg(&self.kernel.image)
            .arg("-initrd")
            .arg(&initramfs)
            .arg("-append")
            .arg(format!("console=ttyS0 quiet panic=-1 {}", self.arguments))
            .args(disk.iter().flat_map(|disk| ["-drive", disk]))
            .arg("-serial")
            .arg(format!("file:{}", console.path().display()))
            .env("TMPDIR", self.folder)
            .stdin(Stdio::null())
            .stdout(errors.try_clone()?)
            .stderr(errors)
            .process_group(0)
            .spawn()
            .context("start QEMU")?;
        match Vmm::new(child).wait(patience) {
            Ok(_) => Ok(console.text()),
            Err(error) => bail!("{error:#}; its console:\n{}", console.text()),
        }
    }
}
