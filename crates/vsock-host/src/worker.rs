//! A thread that serves guests: an epoll loop, and the queue by which others speak to it.
//!
//! A guest and all its connections belong to one worker; how many workers there are doesn't depend on the
//! number of guests. Commands arrive in a queue and an eventfd wakes the loop.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixListener,
    },
    sync::{Arc, Mutex, PoisonError, mpsc::SyncSender},
    time::Duration,
};

use sandwire_api::vsock::{VsockConnection, VsockType};

use crate::{address::VmKey, capture::Sink, limits::Limits, statistics::VmCounters};

mod event_loop;
mod patience;

pub use event_loop::spawn;

/// What a worker is told.
#[derive(Debug)]
pub enum Command {
    /// Serve this guest from now on; the answer comes when its sockets are being listened to.
    AddVm(Box<VmSetup>, SyncSender<Result<(), VmError>>),
    /// Forget this guest and close all that is its; the answer comes when that is done, also if there was none.
    RemoveVm(VmKey, SyncSender<()>),
    /// A sibling's connection, as if a client of the host had said `CONNECT port\n` on `socket`. The answer,
    /// `OK port\n`, is written to it once the guest has accepted; if it doesn't, the socket is closed.
    Connect {
        /// Who is called.
        vm: VmKey,
        /// Its port.
        port: u32,
        /// Our end of a socket pair, or a client's socket. Non-blocking.
        socket: OwnedFd,
        /// Stream or messages.
        kind: VsockType,
        /// Who calls.
        caller: VmKey,
    },
    /// The guest's policy is another: connections that it opened and that are no longer allowed are reset.
    PolicyChanged(VmKey),
    /// Record the guest's packets there from now on, or no more.
    SetCapture(VmKey, Option<Arc<Sink>>),
    /// All connections of one guest of this worker, or of all.
    List(Option<VmKey>, SyncSender<Vec<VsockConnection>>),
    /// End, closing everything.
    Stop,
    /// Fail.
    #[cfg(test)]
    Panic,
}

/// Why a worker didn't take a guest.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// It has it already.
    #[error("serve {key}: this worker serves it already; remove it first")]
    Exists {
        /// Whose.
        key: VmKey,
    },
    /// The kernel refused to watch a socket.
    #[error("serve {key}: watch its {socket} socket: {source}")]
    Watch {
        /// Whose.
        key: VmKey,
        /// Which socket.
        socket: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

/// A guest, with its sockets already bound and listening, non-blocking.
#[derive(Debug)]
pub struct VmSetup {
    /// Who it is.
    pub key: VmKey,
    /// The CID that its driver is told.
    pub cid: u32,
    /// What bounds it.
    pub limits: Limits,
    /// Where its VMM connects.
    pub vhost_listener: UnixListener,
    /// Where the host's clients connect for streams.
    pub stream_listener: OwnedFd,
    /// The same for messages.
    pub seqpacket_listener: OwnedFd,
    /// Where to count.
    pub counters: Arc<VmCounters>,
}

/// What all guests of a worker share.
#[derive(Clone, Debug, Default)]
pub struct WorkerSettings {
    /// How long to look for work before sleeping. Zero: sleep at once.
    pub busy_poll: Duration,
}

/// How others speak to a worker. Cheap to clone.
#[derive(Clone, Debug)]
pub struct WorkerHandle {
    inbox: Arc<Inbox>,
}

#[derive(Debug)]
struct Inbox {
    /// None once the worker has ended.
    commands: Mutex<Option<Vec<Command>>>,
    wake: OwnedFd,
}

impl WorkerHandle {
    /// A handle and its empty queue.
    ///
    /// # Errors
    /// When no eventfd can be had.
    pub fn new() -> io::Result<Self> {
        let flags = rustix::event::EventfdFlags::NONBLOCK | rustix::event::EventfdFlags::CLOEXEC;
        Ok(Self {
            inbox: Arc::new(Inbox {
                commands: Mutex::new(Some(Vec::new())),
                wake: rustix::event::eventfd(0, flags)?,
            }),
        })
    }

    /// Puts a command in the queue and wakes the worker. Never blocks. A worker that has ended drops it, and
    /// with it the sender of an answer.
    pub fn send(&self, command: Command) {
        let mut commands = self
            .inbox
            .commands
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(commands) = commands.as_mut() {
            commands.push(command);
        }
        drop(commands);
        // Fails only when the counter is full, and then the worker is being woken already.
        let _ = rustix::io::write(&self.inbox.wake, &1_u64.to_ne_bytes());
    }

    /// All commands that have arrived and not been taken yet.
    #[must_use]
    pub fn take(&self) -> Vec<Command> {
        let mut commands = self
            .inbox
            .commands
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        commands.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Takes no more commands; those that wait.
    fn close(&self) -> Vec<Command> {
        let mut commands = self
            .inbox
            .commands
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        commands.take().unwrap_or_default()
    }

    /// Readable when commands have arrived.
    fn waker(&self) -> BorrowedFd<'_> {
        self.inbox.wake.as_fd()
    }
}
