//! A machine with two processors of 64-bit ARM, emulated by QEMU, that runs a program built for it.
//!
//! Its kernel and its root file system are Debian's, of the machine's own release. The program and what it needs come on
//! a disk of their own, made for the one run; neither disk is written: QEMU keeps changes to itself. The emulator does
//! the work of one processor in some ten times its time, and never what a real one may do in another order.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{
    apt::Apt,
    cache_folder,
    initramfs::{self, INIT_HEAD},
    kernel::Kernel,
    lock_cache,
    machine::MODULES,
    root_disk::{self, Contents},
};
use crate::command;

/// What is made once: a kernel and a disk with the programs that tests use.
#[derive(Clone, Debug)]
pub struct Machine {
    kernel: Kernel,
    disk: PathBuf,
    busybox: PathBuf,
}

/// What the machine is to do.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// A shell script, which runs as root in a mount and PID namespace of its own. Its `$1` is the program.
    pub script: &'a str,
    /// The program, built for the machine.
    pub program: &'a Path,
    /// Programs that are to be in the folder above its own, as they are in cargo's target folder.
    pub beside: &'a [PathBuf],
}

impl Machine {
    /// The machine in the cache; makes it first if there is none.
    ///
    /// # Errors
    /// If apt can't deliver the packages, or the disk can't be made.
    pub fn fetch() -> Result<Self> {
        let kernel = Kernel::fetch_arm()?;
        let cache = cache_folder()?;
        let _lock = lock_cache(&cache, "arm64")?;
        let machine = Self {
            kernel,
            disk: cache.join("arm64.ext4"),
            busybox: cache.join("arm64.busybox"),
        };
        if !machine.busybox.exists() {
            machine.make(&cache).context("make a disk for ARM guests")?;
        }
        Ok(machine)
    }

    fn make(&self, cache: &Path) -> Result<()> {
        let contents = Contents {
            packages: PACKAGES,
            mebibytes: 1024,
        };
        root_disk::make(&Apt::of_arm(cache)?, &contents, &self.disk)?;
        // Last: it says that the disk is whole, too.
        let request = format!("dump /usr/bin/busybox {}", self.busybox.display());
        command::output_of(
            Command::new("debugfs")
                .args(["-R", &request])
                .arg(&self.disk),
        )?;
        Ok(())
    }

    /// A command that boots the machine, has it do the job, and ends when that has ended. Its standard output is the
    /// machine's console. What it needs is in `folder`, which must be empty.
    ///
    /// # Errors
    /// If the files can't be written.
    pub fn command(&self, folder: &Path, job: &Job<'_>) -> Result<Command> {
        let work = folder.join("work.ext4");
        write_work(folder, job, &work)?;
        let archive = folder.join("initramfs.cpio");
        fs::write(&archive, self.initramfs()?)
            .with_context(|| format!("write {}", archive.display()))?;
        let disk = |path: &Path| {
            let path = path.display();
            format!("file={path},format=raw,if=virtio,snapshot=on")
        };
        let mut command = Command::new("qemu-system-aarch64");
        command
            .args(["-machine", "virt", "-cpu", "cortex-a72", "-smp", "2"])
            .args(["-accel", "tcg,thread=multi", "-m", "3072M"])
            .args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args(["-display", "none", "-serial", "stdio"])
            .arg("-kernel")
            .arg(&self.kernel.image)
            .arg("-initrd")
            .arg(&archive)
            .args(["-append", "console=ttyAMA0 quiet panic=-1"])
            .args(["-drive", &disk(&self.disk)])
            .args(["-drive", &disk(&work)])
            .env("TMPDIR", folder);
        Ok(command)
    }

    /// Loads the modules, mounts both disks and begins the job.
    fn initramfs(&self) -> Result<Vec<u8>> {
        let mut archive = initramfs::base_with(&self.busybox)?;
        let modules = [&["virtio_pci", "virtio_blk", "ext4"], MODULES].concat();
        let load = initramfs::add_modules(&mut archive, &self.kernel.modules_for(&modules)?)?;
        let init = format!(
            "{INIT_HEAD}{load}\
             mount -t ext4 /dev/vda /root\n\
             mkdir /root/{WORK}\n\
             mount -t ext4 /dev/vdb /root/{WORK}\n\
             for folder in dev proc sys; do mount -o move /$folder /root/$folder; done\n\
             exec switch_root /root /{WORK}/run\n"
        );
        archive.executable("init", init.as_bytes());
        Ok(archive.finish())
    }
}

/// Where the job's disk is.
const WORK: &str = "work";

/// The programs that labs, tests and the product run. What else they need comes with these.
const PACKAGES: &[&str] = &[
    "bind9-dnsutils",
    "bpftool",
    "busybox-static",
    "conntrack",
    "coreutils",
    "curl",
    "dash",
    "dnsmasq-base",
    "ethtool",
    "grep",
    "iperf3",
    "iproute2",
    "iptables",
    "iputils-ping",
    "libcap2-bin",
    "mount",
    "nftables",
    "procps",
    "python3",
    "python3-prometheus-client",
    "sed",
    "socat",
    "tcpdump",
    "util-linux",
];

/// Makes the disk with the job.
fn write_work(folder: &Path, job: &Job<'_>, disk: &Path) -> Result<()> {
    let root = folder.join("work");
    let programs = root.join("programs");
    fs::create_dir_all(&programs).with_context(|| format!("create {}", programs.display()))?;
    let name = file_name(job.program)?;
    strip(job.program, &programs.join(name))?;
    for path in job.beside {
        strip(path, &root.join(file_name(path)?))?;
    }
    let run = root.join("run");
    fs::write(&run, first_process(name)).with_context(|| format!("write {}", run.display()))?;
    fs::set_permissions(&run, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("make {} executable", run.display()))?;
    let script = root.join("script");
    fs::write(&script, job.script).with_context(|| format!("write {}", script.display()))?;
    root_disk::of_folder(&root, 512, disk)
}

/// The machine's first process.
fn first_process(program: &str) -> String {
    format!(
        "#!/bin/sh\n\
         export PATH=/usr/sbin:/usr/bin HOME=/root RUST_BACKTRACE=1\n\
         for folder in /run /tmp; do mount -t tmpfs tmpfs $folder; done\n\
         mount -t cgroup2 cgroup2 /sys/fs/cgroup\n\
         mkdir -p /dev/shm\n\
         ip link set lo up\n\
         cd /tmp\n\
         unshare --mount --pid --fork --mount-proc sh /{WORK}/script /{WORK}/programs/{program}\n\
         busybox poweroff -f\n"
    )
}

fn file_name(path: &Path) -> Result<&str> {
    let name = path.file_name().and_then(|name| name.to_str());
    name.with_context(|| format!("{} has no file name", path.display()))
}

fn strip(from: &Path, to: &Path) -> Result<()> {
    let mut strip = Command::new("aarch64-linux-gnu-strip");
    command::output_of(strip.arg("-o").args([to, from]))?;
    Ok(())
}
