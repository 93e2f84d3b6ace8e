//! Waits for the command, and passes signals on to it.
//!
//! The command is in our process group. A signal that the kernel sends for the terminal (Ctrl-C,
//! Ctrl-\, a changed window, hang-up) has reached it already; one that a process sent to us alone
//! has not. The two are told apart by the signal's code. Ctrl-Z stops both and `fg` continues both.

use std::{future, io, time::Duration};

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd, siginfo},
};
use rustix::process::{Pid, WaitOptions, WaitStatus, kill_process, waitpid};
use tokio::time::sleep;

/// Signals that are passed on.
const FORWARDED: [Signal; 8] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGWINCH,
    Signal::SIGCONT,
];

/// Of these, what asks us to end where there is no command yet that it could be passed on to.
const ENDING: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// How often it is looked for one of these.
const LOOK: Duration = Duration::from_millis(20);

/// `si_code` of a signal that the kernel made, as for a key pressed at the terminal.
const SI_KERNEL: i32 = 0x80;

/// The signals, caught from here on: none is lost between here and the start of the command.
pub(super) struct Signals {
    descriptor: SignalFd,
}

/// Signals that ask us to end, taken before there is a command; all others wait for it.
pub(super) struct Ending {
    descriptor: SignalFd,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// By itself, with this status.
    Exited(u8),
    /// By this signal.
    Killed(i32),
}

impl End {
    /// The status to end with ourselves: as a shell does, 128 and the signal's number.
    pub(super) fn exit_status(self) -> u8 {
        match self {
            Self::Exited(status) => status,
            Self::Killed(signal) => u8::try_from(128 + signal).unwrap_or(255),
        }
    }

    /// The signal that ended it.
    pub(super) fn signal(self) -> Option<i32> {
        match self {
            Self::Exited(_) => None,
            Self::Killed(signal) => Some(signal),
        }
    }

    fn of(status: WaitStatus) -> Option<Self> {
        if let Some(status) = status.exit_status() {
            return Some(Self::Exited(u8::try_from(status).unwrap_or(255)));
        }
        status.terminating_signal().map(Self::Killed)
    }
}

impl Signals {
    /// Blocks the signals in the calling thread, in those that it starts and, unless told otherwise,
    /// in processes that these start.
    pub(super) fn block() -> io::Result<Self> {
        let mut set: SigSet = FORWARDED.into_iter().collect();
        set.add(Signal::SIGCHLD);
        set.thread_block()?;
        let descriptor = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC)?;
        Ok(Self { descriptor })
    }

    fn next(&self) -> io::Result<siginfo> {
        loop {
            match self.descriptor.read_signal() {
                Ok(Some(signal)) => return Ok(signal),
                Ok(None) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Ending {
    /// To be called once the signals are blocked.
    pub(super) fn new() -> io::Result<Self> {
        let set: SigSet = ENDING.into_iter().collect();
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Self {
            descriptor: SignalFd::with_flags(&set, flags)?,
        })
    }

    /// Waits for one, in a runtime.
    pub(super) async fn next(&self) -> io::Result<Signal> {
        loop {
            if let Some(signal) = self.descriptor.read_signal()? {
                let number = i32::try_from(signal.ssi_signo).map_err(io::Error::other)?;
                return Ok(Signal::try_from(number)?);
            }
            sleep(LOOK).await;
        }
    }

    /// Forgets those that have come.
    fn forget(&self) {
        while let Ok(Some(_)) = self.descriptor.read_signal() {}
    }
}

/// Waits for a signal that asks us to end. Those don't count that came before, which have ended the command perhaps.
pub(super) fn ending_from_now() -> impl Future<Output = ()> {
    let ending = Ending::new().inspect(Ending::forget);
    async move {
        let is_asked = match &ending {
            Ok(ending) => ending.next().await.is_ok(),
            Err(_) => false,
        };
        if !is_asked {
            future::pending::<()>().await;
        }
    }
}

/// Waits until `child` ends, passing signals on.
pub(super) fn wait(signals: &Signals, child: Pid) -> io::Result<End> {
    loop {
        // First of all: it may have ended before the signals were read.
        if let Some((_, status)) = waitpid(Some(child), WaitOptions::NOHANG)?
            && let Some(end) = End::of(status)
        {
            return Ok(end);
        }
        let signal = signals.next()?;
        if let Some(signal) = to_forward(&signal) {
            // It may have ended in between; that is seen at the next turn.
            let _ = kill_process(child, signal);
        }
    }
}

/// The signal, if the command hasn't got it yet.
fn to_forward(signal: &siginfo) -> Option<rustix::process::Signal> {
    let number = i32::try_from(signal.ssi_signo).ok()?;
    if number == Signal::SIGCHLD as i32 || signal.ssi_code == SI_KERNEL {
        return None;
    }
    rustix::process::Signal::from_named_raw(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_command_ends_us_as_a_shell_would() {
        assert_eq!(End::Killed(15).exit_status(), 143);
        assert_eq!(End::Exited(7).exit_status(), 7);
    }
}
