//! A guest that QEMU emulates, with no network but one of its own, until it powers itself off.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::{Vmm, console::Console, kernel::Kernel, qmp::Qmp};

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
    /// Whether there is room for a second processor, plugged in when the guest prints [`PLUG_LINE`].
    pub(super) spare_processor: bool,
    /// Whether it has two network cards, with a cable between them.
    pub(super) cards: bool,
    /// More arguments of the kernel.
    pub(super) arguments: &'a str,
}

/// With it on its console a guest asks for its spare processor.
pub(super) const PLUG_LINE: &str = "machine: plug in a processor";

/// What its processors are, also the spare one.
const MODEL: &str = "qemu64";

/// One processor, and a socket that is empty.
const ROOM: &str = "cpus=1,sockets=2,cores=1,threads=1,maxcpus=2";

/// Two cards of virtio-net on a hub.
const CARDS: [&str; 8] = [
    "-netdev",
    "hubport,id=near,hubid=0",
    "-device",
    "virtio-net-pci,netdev=near,mac=02:00:00:00:00:10,romfile=",
    "-netdev",
    "hubport,id=far,hubid=0",
    "-device",
    "virtio-net-pci,netdev=far,mac=02:00:00:00:01:10,romfile=",
];

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
        let monitor = file("monitor");
        let room = self.spare_processor.then(|| {
            let socket = format!("unix:{},server=on,wait=off", monitor.display());
            ["-smp".into(), ROOM.into(), "-qmp".into(), socket]
        });
        let child = Command::new("qemu-system-x86_64")
            // Linux 6.12 panics under QEMU 7.2's cmpxchg16b in half of all boots.
            .args(["-accel", "tcg", "-m", self.memory])
            .args(["-cpu", &format!("{MODEL},-cx16")])
            .args(room.iter().flatten())
            .args(self.cards.then_some(CARDS).iter().flatten())
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
        let mut vmm = Vmm::new(child);
        let ended = match self.spare_processor {
            true => plug_in_when_asked(&mut vmm, &console, &monitor, patience)
                .and_then(|left| vmm.wait(left)),
            false => vmm.wait(patience),
        };
        match ended {
            Ok(_) => Ok(console.text()),
            Err(error) => bail!("{error:#}; its console:\n{}", console.text()),
        }
    }
}

/// Plugs the spare processor in when the guest asks, unless it ends before. Returns what is left of the patience.
fn plug_in_when_asked(
    vmm: &mut Vmm,
    console: &Console,
    monitor: &Path,
    patience: Duration,
) -> Result<Duration> {
    let deadline = Instant::now() + patience;
    while !console.text().lines().any(|line| line == PLUG_LINE) {
        if vmm.ended()?.is_some() {
            break;
        }
        if Instant::now() >= deadline {
            bail!("the guest has asked for no processor after {patience:?}");
        }
        thread::sleep(Duration::from_millis(50));
    }
    if vmm.ended()?.is_none() {
        let processor = json!({"driver": format!("{MODEL}-x86_64-cpu"), "id": "spare",
            "socket-id": 1, "core-id": 0, "thread-id": 0});
        Qmp::connect(monitor, Duration::from_secs(10))?.execute("device_add", &processor)?;
    }
    Ok(deadline.saturating_duration_since(Instant::now()))
}
