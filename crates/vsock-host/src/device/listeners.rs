//! Where VMMs and clients of the host connect, and who waits there while there is no room for them.

use std::os::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    unix::net::UnixListener,
};

use rustix::{event::epoll::EventFlags, io::Errno};

use super::{Context, Token, Vm};
use crate::listener::{ACCEPT_PAUSE, is_callers_own};

/// The three sockets of a guest.
#[derive(Debug)]
pub(super) struct Listeners {
    pub(super) vmm: UnixListener,
    pub(super) stream: OwnedFd,
    pub(super) seqpacket: OwnedFd,
}

impl Listeners {
    /// Lets nobody in any more. Clients can't have sent descriptors along ([`refuse_descriptors`]), VMMs can.
    ///
    /// [`refuse_descriptors`]: crate::listener::refuse_descriptors
    pub(super) fn close(self, context: &Context) {
        // Waiting for events takes hold of it for a moment: that would be the last hold, if it were closed meanwhile.
        context.unwatch(&self.vmm);
        context.disposal.close_listener(self.vmm);
    }

    /// Has all of them reported; which one can't be, and why.
    pub(super) fn watch(&self, slot: u32, context: &Context) -> Result<(), (&'static str, Errno)> {
        for (which, token) in [
            ("vhost-user", Token::VmmListener(slot)),
            ("stream", Token::StreamListener(slot)),
            ("seqpacket", Token::SeqpacketListener(slot)),
        ] {
            let watched = self.watch_one(token, context);
            watched.map_err(|error| (which, error))?;
        }
        Ok(())
    }

    fn watch_one(&self, token: Token, context: &Context) -> Result<(), Errno> {
        match self.of(token) {
            Some(listener) => context.watch(listener, token, EventFlags::IN),
            None => Ok(()),
        }
    }

    fn of(&self, token: Token) -> Option<BorrowedFd<'_>> {
        match token {
            Token::VmmListener(_) => Some(self.vmm.as_fd()),
            Token::StreamListener(_) => Some(self.stream.as_fd()),
            Token::SeqpacketListener(_) => Some(self.seqpacket.as_fd()),
            _ => None,
        }
    }
}

impl Vm {
    /// Leaves a listener alone for a while if there is no room for whoever calls.
    pub(super) fn not_accepted(&self, error: Errno, token: Token, context: &mut Context) {
        // After a caller's own error the listener is reported again if there are more.
        if error == Errno::AGAIN || is_callers_own(error) {
            return;
        }
        self.pause(token, context);
    }

    /// Leaves a listener alone for a while.
    pub(super) fn pause(&self, token: Token, context: &mut Context) {
        if let Some(listener) = self.listeners.of(token) {
            context.unwatch(listener);
            context.timers.set(context.now + ACCEPT_PAUSE, token.pack());
        }
    }

    /// The pause of a listener is over.
    pub fn listen_again(&self, token: Token, context: &mut Context) {
        if self.listeners.watch_one(token, context).is_err() {
            context.timers.set(context.now + ACCEPT_PAUSE, token.pack());
        }
    }
}
