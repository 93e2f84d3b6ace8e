//! Guests: fake ones, that speak just enough TCP on a TAP, and real kernels in user mode.

pub(crate) mod linux;
pub(crate) mod receiver;
pub(crate) mod sender;

use anyhow::{Context, Result, bail};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use sandwire_kernel_net::tap::Opened;
use std::time::Duration;

/// Longest frame that a TAP hands over, with its virtio header.
pub(crate) const FRAME_MAX: usize = 70_000;

/// Writes a frame.
pub(crate) fn write(tap: &Opened, bytes: &[u8]) -> Result<()> {
    loop {
        match rustix::io::write(tap.file(), bytes) {
            Ok(length) if length == bytes.len() => return Ok(()),
            Ok(length) => bail!("the TAP took {length} of {} bytes", bytes.len()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno).context("the TAP takes no frame"),
        }
    }
}

/// Reads a frame if there is one.
pub(crate) fn read<'a>(tap: &Opened, buffer: &'a mut [u8]) -> Result<Option<&'a [u8]>> {
    loop {
        match rustix::io::read(tap.file(), &mut *buffer) {
            Ok(length) => return Ok(Some(&buffer[..length])),
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno).context("cannot read from the TAP"),
        }
    }
}

/// Waits until there is a frame, but not longer than `patience`.
pub(crate) fn wait(tap: &Opened, patience: Duration) -> Result<()> {
    let timeout = Timespec::try_from(patience).context("a short time")?;
    let mut wanted = [PollFd::new(tap.file(), PollFlags::IN)];
    match poll(&mut wanted, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno).context("cannot wait for the TAP"),
    }
}
