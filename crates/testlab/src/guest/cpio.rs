//! Writes archives in cpio's "newc" format, which the kernel unpacks as an initramfs.
//!
//! Format: Documentation/driver-api/early-userspace/buffer-format.rst in the kernel's source.

use std::collections::BTreeSet;

/// An archive in the making. Parent folders come by themselves.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    folders: BTreeSet<String>,
    entries: usize,
}

impl Archive {
    /// Adds an executable file; the path has no leading slash.
    pub fn executable(&mut self, path: &str, content: &[u8]) {
        self.entry(path, 0o100_755, (0, 0), content);
    }

    /// Adds a file; the path has no leading slash.
    pub fn file(&mut self, path: &str, content: &[u8]) {
        self.entry(path, 0o100_644, (0, 0), content);
    }

    /// Adds a symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) {
        self.entry(path, 0o120_777, (0, 0), target.as_bytes());
    }

    /// Adds an empty folder.
    pub fn folder(&mut self, path: &str) {
        self.parents(&format!("{path}/"));
    }

    /// Adds a character device.
    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, 0o020_600, (major, minor), &[]);
    }

    /// The whole archive.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.write("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.parents(path);
        self.write(path, mode, device, content);
    }

    fn parents(&mut self, path: &str) {
        for (end, _) in path.match_indices('/') {
            let folder = &path[..end];
            if self.folders.insert(folder.to_owned()) {
                self.write(folder, 0o040_755, (0, 0), &[]);
            }
        }
    }

    fn write(&mut self, path: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) {
        self.entries += 1;
        let header = format!(
            "070701{:08x}{mode:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{major:08x}{minor:08x}{:08x}{:08x}",
            self.entries,
            0,
            0,
            1,
            0,
            content.len(),
            0,
            0,
            path.len() + 1,
            0,
        );
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        let length = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(length, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command;

    #[test]
    #[ignore = "needs cpio: cargo xtask test guest"]
    fn another_program_reads_the_archive() {
        let mut archive = Archive::default();
        archive.executable("bin/tool", b"#!/bin/sh\n");
        archive.symlink("bin/alias", "tool");
        archive.folder("proc");
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("archive");
        std::fs::write(&file, archive.finish()).unwrap();
        let listed = command::shell(&format!("cpio -t < {} 2>/dev/null", file.display())).unwrap();
        let mut names: Vec<&str> = listed.lines().collect();
        names.sort_unstable();
        assert_eq!(names, ["bin", "bin/alias", "bin/tool", "proc"]);
    }
}
