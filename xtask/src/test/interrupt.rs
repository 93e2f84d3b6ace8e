//! Has test commands end with us when somebody ends us.
//!
//! A test command leads a process group, so that its deadline can end all of it. That group isn't the terminal's: Ctrl-C reaches us
//! alone, and tests of root's would go on. So SIGINT and SIGTERM kill the groups that run, and then end us.

use std::{
    os::unix::process::CommandExt,
    process::{self, Child, Command, ExitStatus},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tokio::{
    runtime,
    signal::unix::{SignalKind, signal},
};

/// The groups that run. Who starts one holds this, so that no signal comes between its start and its entry.
static RUNNING: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// A test command that leads a process group.
pub(super) struct Group {
    leader: Child,
}

/// From now on, SIGINT and SIGTERM end what runs, and us with the status that shells give them.
pub(super) fn watch() -> Result<()> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .context("making what waits for signals")?;
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        let handle = |kind| signal(kind).context("handling a signal");
        (
            handle(SignalKind::interrupt())?,
            handle(SignalKind::terminate())?,
        )
    };
    thread::spawn(move || {
        let which = runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => SignalKind::interrupt(),
                _ = terminate.recv() => SignalKind::terminate(),
            }
        });
        // Held until the end: nothing starts any more.
        let running = running();
        for group in running.iter() {
            // It may have ended by itself.
            let _ = kill_process_group(*group, Signal::KILL);
        }
        process::exit(128 + which.as_raw_value());
    });
    Ok(())
}

impl Group {
    /// Starts a command as the leader of a group of its own.
    pub(super) fn start(command: &mut Command) -> Result<Self> {
        let mut running = running();
        let leader = command.process_group(0).spawn()?;
        running.push(Pid::from_child(&leader));
        Ok(Self { leader })
    }

    /// The command itself.
    pub(super) fn leader(&mut self) -> &mut Child {
        &mut self.leader
    }

    /// Ends all of the group.
    pub(super) fn kill(&self) -> Result<()> {
        kill_process_group(self.pid(), Signal::KILL).context("ending a test command")
    }

    /// Waits until the command has ended.
    pub(super) fn wait(mut self) -> Result<ExitStatus> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(self.pid()), options)?;
        // Before its number can become another's.
        running().retain(|group| *group != self.pid());
        Ok(self.leader.wait()?)
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.leader)
    }
}

fn running() -> MutexGuard<'static, Vec<Pid>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}
