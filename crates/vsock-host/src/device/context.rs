//! What the guests of a worker have in common.

use std::{
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    sync::Arc,
    time::Instant,
};

use rustix::{
    event::epoll::{self, EventData, EventFlags},
    io::Errno,
};

use super::{Awake, Token};
use crate::{
    bell::Bell, budget::Budget, directory::Directory, disposal::Disposal, peer::spare::Spare,
    timers::Timers,
};

/// What the guests of a worker share, for as long as an event is handled.
#[derive(Debug)]
pub struct Context {
    /// Where descriptors are waited for.
    pub epoll: OwnedFd,
    /// Reminders.
    pub timers: Timers,
    /// Who may reach what.
    pub directory: Arc<Directory>,
    /// Bytes of all guests.
    pub budget: Arc<Budget>,
    /// The time of this round: events that there were at once, and those who have more to do.
    pub now: Instant,
    /// Its number.
    pub round: u64,
    /// Guests that have used up their turn and have more to do.
    pub again: Vec<u32>,
    /// Guests that needn't kick.
    pub awake: Awake,
    /// Memory for lists that live only for a call.
    pub scratch: Scratch,
    /// By what guests are interrupted.
    pub bell: Rc<Bell>,
    /// Where ends what VMMs handed over.
    pub disposal: Disposal,
}

/// See [`Context::scratch`].
#[derive(Debug, Default)]
pub struct Scratch {
    pub(super) pieces: Vec<libc::iovec>,
    pub(super) heads: Vec<u16>,
    pub(super) bytes: Vec<u8>,
    /// Memory for backlogs.
    pub(super) spare: Spare,
    /// Bytes taken from a guest since others last had the processor.
    pub(super) moved: usize,
    /// Whether much has been moved at once since [`Context::take_bulk`].
    pub(super) bulk: bool,
}

impl Context {
    /// For a worker that has no guests yet.
    #[must_use]
    pub fn new(
        epoll: OwnedFd,
        directory: Arc<Directory>,
        budget: Arc<Budget>,
        (bell, disposal): (Rc<Bell>, Disposal),
    ) -> Self {
        Self {
            epoll,
            timers: Timers::default(),
            directory,
            budget,
            now: Instant::now(),
            round: 0,
            again: Vec::new(),
            awake: Awake::default(),
            scratch: Scratch::default(),
            bell,
            disposal,
        }
    }

    /// Whether a stream was in full flow since this was last asked.
    pub fn take_bulk(&mut self) -> bool {
        std::mem::take(&mut self.scratch.bulk)
    }

    /// Waits for a descriptor; replaces what was waited for at it.
    pub(super) fn watch(
        &self,
        fd: impl AsFd,
        token: Token,
        flags: EventFlags,
    ) -> Result<(), Errno> {
        let data = EventData::new_u64(token.pack());
        match epoll::add(&self.epoll, fd.as_fd(), data, flags) {
            Err(Errno::EXIST) => epoll::modify(&self.epoll, fd, data, flags),
            other => other,
        }
    }

    /// Stops waiting for a descriptor that somebody else may hold too.
    pub(super) fn unwatch(&self, fd: impl AsFd) {
        // Fails only if it wasn't waited for.
        let _ = epoll::delete(&self.epoll, fd);
    }
}
