//! Signals that ask a verb to end, looked for between its steps instead of ending it amid one.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd},
    process, thread,
    time::Duration,
};

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::{
    runtime,
    signal::unix::{SignalKind, signal},
};

use crate::{failure::Failure, output::note};

/// How long a verb that was asked to end may take.
const END_MAX: Duration = Duration::from_secs(1);

/// SIGINT and SIGTERM, and SIGHUP unless whoever started this has it ignored, as `nohup` does: of a signal that is blocked the kernel
/// tells all the same.
fn ending_signals() -> io::Result<SigSet> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.add(Signal::SIGTERM);
    if !is_hangup_ignored(&fs::read_to_string("/proc/self/status")?) {
        signals.add(Signal::SIGHUP);
    }
    Ok(signals)
}

fn is_hangup_ignored(status: &str) -> bool {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (Signal::SIGHUP as u32 - 1) != 0)
}

/// [`ending_signals`], caught from here on.
#[derive(Debug)]
pub(crate) struct Interruption(SignalFd);

impl Interruption {
    /// Catches the signals for this thread and those that it starts.
    pub(crate) fn catch() -> Result<Self, Failure> {
        let open = || -> io::Result<_> {
            let signals = ending_signals()?;
            signals.thread_block()?;
            let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
            Ok(SignalFd::with_flags(&signals, flags)?)
        };
        let opened = open().map(Self);
        opened.map_err(|error| Failure::failed(format!("cannot catch signals: {error}")))
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

/// Signals that ask a verb to end which waits for other things meanwhile: SIGINT and SIGTERM.
pub(crate) struct Ends {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Ends {
    /// Catches them from here on. To be called within a runtime.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// Until one has come.
    pub(crate) async fn wait(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// The failure of what was asked to end before it began.
pub(crate) fn interrupted(operation: &str) -> Failure {
    Failure::failed(format!("cannot {operation}: interrupted before it began"))
}

/// Ends the process with status 2 if it is there a moment after it was asked to end. A write or an open waits without
/// end for a reader that has stopped or never comes, and a signal that is caught doesn't cut it off.
pub(crate) fn end_in_any_case(operation: &str) -> io::Result<()> {
    let message =
        format!("cannot {operation}: it was asked to end, and nobody reads what it writes");
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let entered = runtime.enter();
    let mut ends = Ends::new()?;
    drop(entered);
    thread::Builder::new().spawn(move || {
        runtime.block_on(ends.wait());
        thread::sleep(END_MAX);
        if takes_more(io::stderr()) {
            note(&message);
        }
        process::exit(2);
    })?;
    Ok(())
}

/// Whether a write would not wait.
fn takes_more(output: impl AsFd) -> bool {
    let mut asked = [PollFd::new(&output, PollFlags::OUT)];
    poll(&mut asked, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}
