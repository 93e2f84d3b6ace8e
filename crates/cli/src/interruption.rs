//! Signals that ask a verb to end, looked for between its steps instead of ending it amid one.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};

use crate::failure::Failure;

/// SIGINT, SIGTERM and SIGHUP, caught from here on.
#[derive(Debug)]
pub(crate) struct Interruption(SignalFd);

impl Interruption {
    /// Catches the signals for this thread and those that it starts.
    pub(crate) fn catch() -> Result<Self, Failure> {
        let open = || {
            let mut signals = SigSet::empty();
            for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
                signals.add(signal);
            }
            signals.thread_block()?;
            let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
            SignalFd::with_flags(&signals, flags)
        };
        let opened = open().map(Self);
        opened.map_err(|errno| {
            let error = io::Error::from(errno);
            Failure::failed(format!("cannot catch signals: {error}"))
        })
    }

    /// Whether a signal has come since this was asked last.
    pub(crate) fn has_come(&self) -> bool {
        matches!(self.0.read_signal(), Ok(Some(_)))
    }
}

impl AsFd for Interruption {
    /// Has something to read when a signal has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
