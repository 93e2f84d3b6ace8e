//! What a guest prints while it runs: a file that its VMM writes.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

use super::{Vmm, initramfs::READY_LINE};

/// How many lines of a console an error shows.
const END_LINES: usize = 60;

/// The console of one guest.
#[derive(Debug)]
pub(super) struct Console {
    path: PathBuf,
}

impl Console {
    /// Of the guest that prints into this file.
    pub(super) fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// The file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What has been printed so far, without carriage returns.
    pub(super) fn text(&self) -> String {
        let bytes = fs::read(&self.path).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\r', "")
    }

    /// The end of it, for an error: CI keeps the first lines of an output, and why a guest ended is in its last.
    pub(super) fn end(&self) -> String {
        let text = self.text();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(END_LINES)..].join("\n")
    }

    /// Waits until the guest says that its web server listens.
    ///
    /// # Errors
    /// If it doesn't in time, or its VMM ends; the error then holds the end of what was printed.
    pub(super) fn wait_ready(&self, vmm: &mut Vmm, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        while !self.text().contains(READY_LINE) {
            if let Some(status) = vmm.ended()? {
                bail!("the guest's VMM ended ({status}): {}", self.end());
            }
            if Instant::now() >= deadline {
                bail!("the guest isn't ready after {patience:?}: {}", self.end());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}
