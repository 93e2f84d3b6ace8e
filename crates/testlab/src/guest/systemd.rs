//! A QEMU guest with systemd, to try units under their own settings.
//!
//! The root file system is made of the machine's own Debian packages ([`root_disk`]). What a test adds (an executable,
//! units, a script) travels in the initramfs, so the cached image is never written: QEMU keeps changes to itself.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};

use super::{
    apt::Apt,
    cache_folder,
    emulation::Boot,
    initramfs,
    kernel::Kernel,
    lock_cache,
    root_disk::{self, Contents},
};

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

impl Addition {
    /// A file that is read.
    #[must_use]
    pub fn text(path: &str, text: &str) -> Self {
        Self {
            path: path.to_owned(),
            content: text.into(),
            executable: false,
        }
    }

    /// A program.
    #[must_use]
    pub fn program(path: &str, content: Vec<u8>) -> Self {
        Self {
            path: path.to_owned(),
            content,
            executable: true,
        }
    }
}

/// What makes a guest a host of sandboxes: the executable, its configuration and its unit, and a script that runs once the units
/// `after` are started. Written into a folder on the way.
///
/// # Errors
/// There is no executable, or it can't be stripped of its symbols.
pub fn host(folder: &Path, config: &str, after: &str, script: &str) -> Result<Vec<Addition>> {
    const UNIT: &str = include_str!("../../../../packaging/systemd/sandwire.service");
    let check = format!(
        "[Unit]\nAfter={after}\n\
         [Service]\nType=oneshot\nExecStart=/bin/sh /check\n"
    );
    Ok(vec![
        Addition::program("/usr/bin/sandwire", crate::sandwire::stripped(folder)?),
        Addition::text("/etc/sandwire/sandwire.toml", config),
        Addition::text("/etc/systemd/system/sandwire.service", UNIT),
        Addition::text("/etc/systemd/system/check.service", &check),
        Addition::text("/check", script),
    ])
}

/// What a guest said on its console by lines of `check NAME: TEXT`, by name.
#[must_use]
pub fn checks(console: &str) -> BTreeMap<String, String> {
    console
        .lines()
        .filter_map(|line| line.split_once("check ")?.1.split_once(": "))
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect()
}

impl Image {
    /// The image in the cache; makes it first if there is none.
    ///
    /// # Errors
    /// If apt can't deliver the packages, or the image can't be made.
    pub fn fetch() -> Result<Self> {
        Self::with("systemd-networkd", &[])
    }

    /// The same with NetworkManager.
    ///
    /// # Errors
    /// As of [`Image::fetch`].
    pub fn with_network_manager() -> Result<Self> {
        Self::with("systemd-network-manager", &["network-manager", "dbus"])
    }

    /// The same with dpkg, which knows of no package there, and what packages' scripts need.
    ///
    /// # Errors
    /// As of [`Image::fetch`].
    pub fn with_dpkg() -> Result<Self> {
        Self::with("systemd-dpkg", DPKG)
    }

    /// What is on a disk changes with its name: one that is there is not made again.
    fn with(name: &str, more: &[&str]) -> Result<Self> {
        let kernel = Kernel::fetch()?;
        let cache = cache_folder()?;
        let _lock = lock_cache(&cache, "systemd")?;
        let disk = cache.join(format!("{name}.ext4"));
        if !disk.exists() {
            let contents = Contents {
                packages: &[PACKAGES, more].concat(),
                mebibytes: 512,
            };
            root_disk::make(&Apt::own(), &contents, &disk).context("make an image with systemd")?;
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
            cards: false,
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

const PACKAGES: &[&str] = &[
    "systemd",
    "udev",
    "iproute2",
    "nftables",
    "busybox-static",
    "usr-is-merged",
];

/// What is essential on a Debian host as far as dpkg, its helpers and scripts of packages use it.
const DPKG: &[&str] = &[
    "coreutils",
    "dash",
    "dpkg",
    "init-system-helpers",
    "libc-bin",
    "perl-base",
    "sed",
    "tar",
];

/// What systemd, a bridge, veths, TAPs and the product's nftables rules need of the kernel.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "tun",
    "veth",
    "bridge",
    "sch_ingress",
    "cls_bpf",
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
    "nft_socket",
    "nft_tproxy",
    "nf_conntrack_netlink",
];
