//! What a guest prints while it runs: a file that its VMM writes.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

use super::{Vmm, initramfs::READY_LINE};

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

    /// Waits until the guest says that its web server listens.
    ///
    /// # Errors
    /// If it doesn't in time, or its VMM ends; the error then holds what was printed.
    pub(super) fn wait_ready(&self, vmm: &mut Vmm, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        while !self.text().contains(READY_LINE) {
            if let Some(status) = vmm.ended()? {
                bail!("the guest's VMM ended ({status}): {}", self.text());
            }
            if Instant::now() >= deadline {
                bail!("the guest isn't ready after {patience:?}: {}", self.text());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}
