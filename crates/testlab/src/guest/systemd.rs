//! A QEMU guest with systemd, to try units under their own settings.
//!
//! The root file system is made of the machine's own Debian packages, downloaded and unpacked into the
//! cache: for an empty system apt names everything that systemd needs, and nothing of it has to be
//! installed. busybox stands in for the usual tools. What a test adds (an executable, units, a script)
//! travels in the initramfs, so the cached image is never written: QEMU keeps changes to itself.

use std::{
    fs::{self, File},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use rustix::fs::{FlockOperation, flock};

use super::{cache_folder, emulation::Boot, initramfs, kernel::Kernel};
use crate::command;

/// A root file system with systemd and a kernel for it.
#[derive(Clone, Debug)]
pub struct Image {
    disk: PathBuf,
    kernel: Kernel,
}

/// A file that a test adds to the guest.
#[derive(Clone, Debug)]
pub struct Addition {
    /// Absolute path in the guest.
    pub path: String,
    /// What is in it.
    pub content: Vec<u8>,
    /// Whether it can be executed.
    pub executable: bool,
}

impl Image {
    /// The image in the cache; makes it first if there is none.
    ///
    /// # Errors
    /// If apt can't deliver the packages, or the image can't be made.
    pub fn fetch() -> Result<Self> {
        let kernel = Kernel::fetch()?;
        let cache = cache_folder()?;
        let lock = File::create(cache.join("systemd.lock")).context("lock the guest cache")?;
        flock(&lock, FlockOperation::LockExclusive).context("lock the guest cache")?;
        let disk = cache.join("systemd.ext4");
        if !disk.exists() {
            make_disk(&cache, &disk).context("make an image with systemd")?;
        }
        Ok(Self { disk, kernel })
    }

    /// Boots the guest, waits until it powers itself off, and returns what it printed on its console.
    ///
    /// # Errors
    /// If it doesn't end in time; the error then holds the console.
    pub fn run(
        &self,
        folder: &Path,
        additions: &[Addition],
        arguments: &str,
        patience: Duration,
    ) -> Result<String> {
        Boot {
            name: "systemd",
            folder,
            kernel: &self.kernel,
            initramfs: &self.initramfs(additions)?,
            memory: "512M",
            disk: Some(&self.disk),
            spare_processor: false,
            arguments: &format!(
                "systemd.show_status=no systemd.mask=getty.target \
                 systemd.mask=serial-getty@ttyS0.service {arguments}"
            ),
        }
        .run(patience)
    }

    /// Loads what a host of sandboxes needs, mounts the disk, adds the additions and starts systemd.
    fn initramfs(&self, additions: &[Addition]) -> Result<Vec<u8>> {
        let mut archive = initramfs::base()?;
        let load = initramfs::add_modules(&mut archive, &self.kernel.modules_for(MODULES)?)?;
        for addition in additions {
            let path = format!("add/{}", addition.path.trim_start_matches('/'));
            if addition.executable {
                archive.executable(&path, &addition.content);
            } else {
                archive.file(&path, &addition.content);
            }
        }
        let init = format!(
            "{}{load}\
             mkdir /root\n\
             mount -t ext4 /dev/vda /root\n\
             cp -a /add/. /root/\n\
             mount -o move /dev /root/dev\n\
             umount /proc /sys\n\
             exec switch_root /root /lib/systemd/systemd\n",
            initramfs::INIT_HEAD
        );
        archive.executable("init", init.as_bytes());
        Ok(archive.finish())
    }
}

/// What systemd, a bridge, veths, TAPs and the product's nftables rules need of the kernel.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "tun",
    "veth",
    "bridge",
    "nf_tables",
    "nft_chain_nat",
    "nft_connlimit",
    "nft_ct",
    "nft_fib_inet",
    "nft_limit",
    "nft_log",
    "nft_masq",
    "nft_nat",
    "nft_redir",
    "nft_reject_inet",
    "nf_conntrack_netlink",
];

fn make_disk(cache: &Path, disk: &Path) -> Result<()> {
    let packages = cache.join("systemd.packages");
    let root = cache.join("systemd.root");
    for folder in [&packages, &root] {
        if folder.exists() {
            fs::remove_dir_all(folder).context("clear the guest cache")?;
        }
        fs::create_dir_all(folder.join("partial")).context("create the guest cache")?;
    }
    fs::remove_dir(root.join("partial")).context("create the guest cache")?;
    download(&packages)?;
    unpack(&packages, &root)?;
    complete(&root)?;
    let fresh = cache.join("systemd.ext4.new");
    command::output_of(
        Command::new("mkfs.ext4")
            .args(["-q", "-F", "-L", "root", "-E", "root_owner=0:0", "-d"])
            .args([&root, &fresh])
            .arg("512M"),
    )?;
    fs::remove_dir_all(&packages).context("clear the guest cache")?;
    fs::remove_dir_all(&root).context("clear the guest cache")?;
    fs::rename(&fresh, disk).context("complete the guest cache")
}

/// Downloads the packages and all that they need, as for an empty system.
fn download(folder: &Path) -> Result<()> {
    let attempt = || {
        command::output_of(
            Command::new("apt-get")
                .args(["-q", "-y", "--no-install-recommends", "--download-only"])
                .args(["-o", "Dir::State::status=/dev/null"])
                .args(["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=root"])
                .arg("-o")
                .arg(format!("Dir::Cache::Archives={}", folder.display()))
                .args([
                    "install",
                    "systemd",
                    "iproute2",
                    "nftables",
                    "usr-is-merged",
                ]),
        )
    };
    if attempt().is_err() {
        // The package lists are missing or too old.
        command::run("apt-get -q update")?;
        attempt()?;
    }
    Ok(())
}

fn unpack(packages: &Path, root: &Path) -> Result<()> {
    for folder in ["bin", "sbin", "lib", "lib64"] {
        fs::create_dir_all(root.join("usr").join(folder))?;
        symlink(format!("usr/{folder}"), root.join(folder))?;
    }
    let mut count = 0;
    for entry in fs::read_dir(packages).context("list the packages")? {
        let path = entry?.path();
        if path.extension().is_none_or(|ending| ending != "deb") {
            continue;
        }
        // `dpkg -x` would replace the links to /usr by folders.
        command::shell(&format!(
            "dpkg --fsys-tarfile '{}' | tar -x -C '{}' --keep-directory-symlink \
               --exclude=./usr/share/doc --exclude=./usr/share/locale --exclude=./usr/share/man",
            path.display(),
            root.display()
        ))?;
        count += 1;
    }
    ensure!(count > 0, "apt delivered no package");
    Ok(())
}

/// Adds what the packages' installation would have made, as far as systemd needs it, and busybox.
fn complete(root: &Path) -> Result<()> {
    for (path, content) in [
        (
            "etc/passwd",
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
        ),
        ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
        ("etc/machine-id", ""),
        ("etc/fstab", ""),
        ("etc/hostname", "guest\n"),
        ("etc/os-release", "ID=guest\n"),
    ] {
        let target = root.join(path);
        if !target.exists() {
            fs::write(&target, content).with_context(|| format!("write {path}"))?;
        }
    }
    for folder in ["proc", "sys", "dev", "run", "tmp", "root", "mnt"] {
        fs::create_dir_all(root.join(folder))?;
    }
    let busybox = root.join("usr/bin/busybox");
    fs::copy("/bin/busybox", &busybox).context("copy busybox")?;
    fs::set_permissions(&busybox, fs::Permissions::from_mode(0o755))?;
    for applet in command::run("busybox --list")?.lines() {
        let present = ["usr/bin", "usr/sbin"]
            .iter()
            .any(|folder| root.join(folder).join(applet).exists());
        if !present {
            symlink("/usr/bin/busybox", root.join("usr/bin").join(applet))?;
        }
    }
    Ok(())
}
