//! User-mode Linux: a real kernel as a plain process on a TAP. Needs no virtualisation.
//!
//! How it is started, and what it needs for that, is in [`sandwire_user_mode_linux`].

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result};
use sandwire_user_mode_linux::{self as user_mode_linux, Start};

use super::{
    Vmm,
    console::Console,
    initramfs,
    kernel::{dependencies, in_order},
};
use crate::{fake_guest::GuestNetwork, namespace, sandwire};

/// A running user-mode Linux.
#[derive(Debug)]
pub struct UserModeLinux {
    vmm: Vmm,
    console: Console,
}

impl UserModeLinux {
    /// Writes the initramfs of such guests into a folder, and beside it what else they need. All guests can share them.
    ///
    /// # Errors
    /// If user-mode Linux, busybox or a C compiler isn't installed.
    pub fn initramfs(folder: &Path, network: &GuestNetwork) -> Result<PathBuf> {
        Self::initramfs_with(folder, network, &[])
    }

    /// Like [`UserModeLinux::initramfs`], with `/usr/bin/lab-traffic` in it (see [`crate::traffic`]).
    ///
    /// # Errors
    /// If that, user-mode Linux or busybox isn't there.
    pub fn initramfs_with_traffic(folder: &Path, network: &GuestNetwork) -> Result<PathBuf> {
        let executable = sandwire::beside("lab-traffic")?;
        let copy = initramfs::stripped(&executable, folder, "lab-traffic")?;
        Self::initramfs_with(folder, network, &[("lab-traffic".to_owned(), copy)])
    }

    fn initramfs_with(
        folder: &Path,
        network: &GuestNetwork,
        programs: &[(String, PathBuf)],
    ) -> Result<PathBuf> {
        let versions = Path::new("/usr/lib/uml/modules");
        let version = fs::read_dir(versions)
            .context("look for the modules of the package user-mode-linux")?
            .next()
            .context("the package user-mode-linux has no modules")??
            .path();
        let modules = in_order(&dependencies(&version)?, &["ipv6"])?;
        let path = folder.join("user-mode-linux.cpio");
        fs::write(
            &path,
            initramfs::build_with(network, &modules, programs, "")?,
        )
        .with_context(|| format!("write {}", path.display()))?;
        user_mode_linux::prepare(folder)?;
        Ok(path)
    }

    /// Starts a guest on a TAP in a network namespace, from what [`Self::initramfs`] has written. Its files go into
    /// `folder`, by its name.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start(
        netns: &Path,
        tap: &str,
        folder: &Path,
        name: &str,
        initramfs: &Path,
    ) -> Result<Self> {
        let console = Console::at(folder.join(format!("{name}.console")));
        let mut command = namespace::command_in(netns, user_mode_linux::PROGRAM);
        let start = Start {
            tap,
            folder,
            name,
            initramfs,
        };
        start.complete(&mut command);
        let output = File::create(console.path())
            .with_context(|| format!("create {}", console.path().display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .context("start user-mode Linux")?;
        Ok(Self {
            vmm: Vmm::new(child),
            console,
        })
    }

    /// Waits until the guest's web server listens.
    ///
    /// # Errors
    /// If it doesn't in time, or the guest ends; the error then holds the end of its console.
    pub fn wait_ready(&mut self, patience: Duration) -> Result<()> {
        self.console.wait_ready(&mut self.vmm, patience)
    }

    /// What the guest has printed so far.
    #[must_use]
    pub fn console(&self) -> String {
        self.console.text()
    }

    /// Its process.
    pub fn vmm(&mut self) -> &mut Vmm {
        &mut self.vmm
    }
}
