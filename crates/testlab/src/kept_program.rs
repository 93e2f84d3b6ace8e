//! A program of the product that is kept although another has taken its place, as it is where its replacement failed.

use std::{
    os::fd::{AsFd, BorrowedFd},
    path::Path,
};

use anyhow::{Context, Result};
use aya::programs::{ProgramFd, SchedClassifier};

/// A loaded program of tc; it stays loaded, with its maps, for as long as this is there.
#[derive(Debug)]
pub struct KeptProgram(ProgramFd);

impl KeptProgram {
    /// Opens what is pinned now.
    ///
    /// # Errors
    /// If nothing is, or something else.
    pub fn open(pin: &Path) -> Result<Self> {
        let found = SchedClassifier::from_pin(pin);
        let program = found.with_context(|| format!("open the program {}", pin.display()))?;
        Ok(Self(program.fd()?.try_clone()?))
    }
}

impl AsFd for KeptProgram {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
