//! How an app and whoever waits for it agree on when to look outside.
//!
//! An app that reads from a descriptor shows it in [`App::watch`], with a [`Readiness`] that both keep. A waiter that
//! watches the descriptor says there when packets have come, and the app, once it has read all, that it wants to be
//! told again. So a breath costs no system call for a descriptor with nothing to read, however many there are, and not
//! even a call where the app's part of the graph rests. An app that nobody watches looks every time; so does one whose
//! look costs no system call while the waiter never sleeps.
//!
//! [`App::watch`]: crate::App::watch

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use crate::app::Wake;
use crate::awake::Marks;

/// A descriptor that packets come in by.
#[derive(Debug)]
pub struct Watch<'a> {
    /// What epoll is to watch for input, edge-triggered.
    pub descriptor: BorrowedFd<'a>,
    /// What is known about it.
    pub readiness: &'a Readiness,
}

/// Whether a descriptor may have something to read. Clones are one and the same.
#[derive(Debug, Clone, Default)]
pub struct Readiness {
    shared: Rc<Shared>,
    looks_for_free: bool,
}

#[derive(Debug, Default)]
struct Shared {
    state: Cell<State>,
    /// The part of a graph that the app is in, among those that are awake.
    part: RefCell<Option<(Rc<Marks>, usize)>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Unwatched,
    Empty,
    Ready,
}

impl Readiness {
    /// Of a descriptor that nobody watches yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same of a descriptor whose packets are in memory that the kernel shares, so that a look is no system call. A
    /// waiter that never sleeps leaves its app unwatched: to look is cheaper than to be told, for both.
    #[must_use]
    pub fn of_shared_memory() -> Self {
        Self {
            looks_for_free: true,
            ..Self::default()
        }
    }

    /// Whether to read: unless it is known that there is nothing.
    #[inline]
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.shared.state.get() != State::Empty
    }

    /// Whether somebody watches.
    #[inline]
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.shared.state.get() != State::Unwatched
    }

    /// Says that the descriptor has been read until it had no more (`EAGAIN`). Whoever stops reading before that,
    /// since there is no room for more, must not say it, or what is left waits until more comes.
    #[inline]
    pub fn drained(&self) {
        if self.shared.state.get() == State::Ready {
            self.shared.state.set(State::Empty);
        }
    }

    /// What an app with this descriptor answers to [`App::wake`]: to look again and again unless somebody watches.
    ///
    /// [`App::wake`]: crate::App::wake
    #[must_use]
    pub fn wake(&self) -> Wake {
        Wake {
            at: None,
            polls: self.shared.state.get() == State::Unwatched,
        }
    }

    /// Whether a look costs no system call.
    pub(crate) fn looks_for_free(&self) -> bool {
        self.looks_for_free
    }

    /// Somebody watches from now on; there may be something already.
    pub(crate) fn set_ready(&self) {
        self.shared.state.set(State::Ready);
        self.wake_part();
    }

    pub(crate) fn set_unwatched(&self) {
        self.shared.state.set(State::Unwatched);
        self.wake_part();
    }

    /// Whenever there may be something from now on, that part is awake.
    pub(crate) fn belongs_to(&self, awake: &Rc<Marks>, part: usize) {
        self.shared.part.replace(Some((Rc::clone(awake), part)));
    }

    fn wake_part(&self) {
        if let Some((awake, part)) = &*self.shared.part.borrow() {
            awake.insert(*part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_not_watched_always_looks() {
        let readiness = Readiness::new();
        readiness.drained();
        assert!(readiness.is_ready());
        assert!(readiness.wake().polls);
    }

    #[test]
    fn who_is_watched_looks_until_there_is_nothing_and_when_told() {
        let app = Readiness::new();
        let waiter = app.clone();
        waiter.set_ready();
        assert!(app.is_ready() && !app.wake().polls);
        app.drained();
        assert!(!app.is_ready() && !app.wake().polls);
        waiter.set_ready();
        assert!(app.is_ready());
        waiter.set_unwatched();
        app.drained();
        assert!(app.is_ready() && app.wake().polls);
    }
}
