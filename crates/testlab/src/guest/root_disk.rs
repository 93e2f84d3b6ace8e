//! Root file systems of guests, made of Debian packages that are never installed.
//!
//! For an empty system apt names everything that the packages need. They are unpacked, not set up: none of their
//! scripts runs, so it may be another architecture's. busybox, which must be among them, stands in for the usual tools.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::apt::Apt;
use crate::command;

/// What a disk has.
pub(super) struct Contents<'a> {
    /// Names of packages. What they depend on comes with them.
    pub(super) packages: &'a [&'a str],
    /// The disk's size.
    pub(super) mebibytes: u32,
}

/// Makes a disk with one ext4 file system.
///
/// # Errors
/// If apt can't deliver the packages, or something can't be written; there is no disk then.
pub(super) fn make(apt: &Apt, contents: &Contents<'_>, disk: &Path) -> Result<()> {
    let [packages, root, fresh] =
        ["packages", "root", "new"].map(|ending| disk.with_extension(ending));
    for folder in [&packages, &root] {
        if folder.exists() {
            fs::remove_dir_all(folder).context("clear the guest cache")?;
        }
    }
    apt.download(contents.packages, &packages)?;
    unpack(&packages, &root)?;
    complete(&root)?;
    of_folder(&root, contents.mebibytes, &fresh)?;
    fs::remove_dir_all(&packages).context("clear the guest cache")?;
    fs::remove_dir_all(&root).context("clear the guest cache")?;
    fs::rename(&fresh, disk).context("complete the guest cache")
}

/// Makes a disk with one ext4 file system that has what a folder has.
///
/// # Errors
/// If it can't be written.
pub(super) fn of_folder(folder: &Path, mebibytes: u32, disk: &Path) -> Result<()> {
    command::output_of(
        Command::new("mkfs.ext4")
            .args(["-q", "-F", "-L", "root", "-E", "root_owner=0:0", "-d"])
            .args([folder, disk])
            .arg(format!("{mebibytes}M")),
    )?;
    Ok(())
}

fn unpack(packages: &Path, root: &Path) -> Result<()> {
    for folder in ["bin", "sbin", "lib", "lib64"] {
        fs::create_dir_all(root.join("usr").join(folder))?;
        symlink(format!("usr/{folder}"), root.join(folder))
            .with_context(|| format!("link {folder} to usr/{folder}"))?;
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

/// Adds what the packages' installation would have made, as far as it is needed, and busybox's names.
fn complete(root: &Path) -> Result<()> {
    for (path, content) in [
        (
            "etc/passwd",
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n\
             tcpdump:x:100:100::/:/bin/false\nmessagebus:x:101:101::/:/bin/false\n\
             systemd-network:x:998:998::/:/bin/false\n",
        ),
        (
            "etc/group",
            "root:x:0:\ntcpdump:x:100:\nmessagebus:x:101:\nsystemd-network:x:998:\nnogroup:x:65534:\n",
        ),
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
    for applet in command::run("busybox --list")?.lines() {
        let mut folders = ["usr/bin", "usr/sbin"].iter();
        let is_there = |path: PathBuf| path.symlink_metadata().is_ok();
        if !folders.any(|folder| is_there(root.join(folder).join(applet))) {
            symlink("/usr/bin/busybox", root.join("usr/bin").join(applet))
                .with_context(|| format!("link {applet} to busybox"))?;
        }
    }
    Ok(())
}
