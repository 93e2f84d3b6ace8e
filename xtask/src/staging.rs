//! Files that are put together in a folder of their own, for a package or an image.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{packages, workspace};

/// What is put together of, and where it goes.
#[derive(clap::Args)]
pub(crate) struct Wanted {
    /// The executable `sandwire` to put in; without it, the release executable is built.
    #[arg(long, value_name = "FILE")]
    executable: Option<PathBuf>,
    /// Folder for what comes of it; without it, one of the command's name in cargo's target folder.
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
}

impl Wanted {
    /// The executable, which is built if none is named.
    pub(crate) fn executable(&self) -> Result<PathBuf> {
        if let Some(executable) = &self.executable {
            return Ok(executable.clone());
        }
        packages::ensure()?;
        workspace::release_executable()
    }

    /// The folder, by default this one in cargo's.
    pub(crate) fn output(&self, usual: &str) -> Result<PathBuf> {
        match &self.output {
            Some(output) => Ok(output.clone()),
            None => Ok(workspace::metadata()?.target_directory.join(usual)),
        }
    }
}

/// A file of what is put together.
pub(crate) struct Entry {
    /// Where it is, relative to the root.
    pub(crate) path: PathBuf,
    pub(crate) content: Content,
    pub(crate) is_executable: bool,
}

pub(crate) enum Content {
    /// A file of the tree or of this machine.
    Copy(PathBuf),
    Text(String),
    Link(&'static str),
}

impl Entry {
    /// Writes it below a folder, readable for all whatever our umask is.
    pub(crate) fn put(&self, root: &Path) -> Result<()> {
        let path = root.join(&self.path);
        folder(root, self.path.parent().unwrap_or(Path::new("")))?;
        let done = match &self.content {
            Content::Copy(from) => fs::copy(from, &path).map(drop),
            Content::Text(text) => fs::write(&path, text),
            Content::Link(to) => symlink(to, &path),
        };
        done.with_context(|| format!("writing {}", path.display()))?;
        if matches!(self.content, Content::Link(_)) {
            return Ok(());
        }
        set_mode(&path, if self.is_executable { 0o755 } else { 0o644 })
    }
}

/// Creates a folder inside, and those above it up to the root, which everybody may enter.
pub(crate) fn folder(root: &Path, inside: &Path) -> Result<()> {
    let mut path = root.to_owned();
    for part in std::iter::once(Path::new("")).chain(inside.iter().map(Path::new)) {
        if part != Path::new("") {
            path.push(part);
        }
        if !path.is_dir() {
            fs::create_dir(&path).with_context(|| format!("creating {}", path.display()))?;
            set_mode(&path, 0o755)?;
        }
    }
    Ok(())
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .with_context(|| format!("setting the mode of {}", path.display()))
}

/// The name of an executable's processor, by which Debian and images of containers know it.
pub(crate) fn architecture(executable: &[u8]) -> Result<&'static str> {
    const MACHINE: std::ops::Range<usize> = 18..20;
    const LITTLE_ENDIAN_64_BIT: [u8; 6] = [0x7f, b'E', b'L', b'F', 2, 1];
    ensure!(
        executable.starts_with(&LITTLE_ENDIAN_64_BIT),
        "it is no ELF file of 64 bits"
    );
    match executable.get(MACHINE) {
        Some([62, 0]) => Ok("amd64"),
        Some([183, 0]) => Ok("arm64"),
        other => bail!("its processor {other:?} is none that sandwire runs on"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_told_by_the_executable() {
        let elf = |machine: u8| {
            let mut bytes = vec![0x7f, b'E', b'L', b'F', 2, 1];
            bytes.resize(18, 0);
            bytes.extend([machine, 0]);
            bytes
        };
        assert_eq!(architecture(&elf(62)).unwrap(), "amd64");
        assert_eq!(architecture(&elf(183)).unwrap(), "arm64");
        for none in [elf(3), b"#!/bin/sh\n".to_vec(), Vec::new()] {
            assert!(architecture(&none).is_err());
        }
    }
}
