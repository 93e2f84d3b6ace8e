//! How much a connection is promised: little at first, and more once its guest would use it.
//!
//! A promise can't be taken back, and what one connection holds others can't have. Most say little, and there may be
//! thousands. A stream in full flow is twice as fast with a megabyte, as guest, service and reader seldom wait for each
//! other then; it has that as soon as it has sent a few.

use std::cmp::min;

use sandwire_api::vsock::VsockType;

use super::{Context, Side, Vm};
use crate::callers::share;

/// What a stream is promised at first: a packet of the largest kind.
const FIRST_PROMISE: u32 = 64 * 1024;

/// What a new connection is promised, of at most `most` bytes. All, for messages: they must fit.
pub(super) fn first_promise(kind: VsockType, most: u32) -> u32 {
    match kind {
        VsockType::Stream => min(most, FIRST_PROMISE),
        VsockType::Seqpacket => most,
    }
}

impl Vm {
    /// Bytes that all connections of the guest may be promised together; `called` are those for which siblings ask.
    pub(super) fn promisable(&self, called: bool) -> u64 {
        match called {
            true => share(self.limits.guest_bytes),
            false => self.limits.guest_bytes,
        }
    }

    /// Promises twice as much to a stream whose guest and peer would use it, while no more than half is promised then, of
    /// what is the guest's and of what is all guests'.
    pub(super) fn grow(&mut self, number: u32, context: &mut Context) {
        let Some(flow) = self.flows.get(number) else {
            return;
        };
        if flow.key.kind != VsockType::Stream || !flow.connection.credit.is_short() {
            return;
        }
        let left = self.limits.connection_bytes.saturating_sub(flow.promise);
        let more = min(flow.promise, left);
        let promised = self.promised + u64::from(more);
        let half = self.promisable(flow.caller.is_some()) / 2;
        if more == 0 || promised > half || !context.budget.extend(more) {
            return;
        }
        self.promised = promised;
        let Some(flow) = self.flows.get_mut(number) else {
            return;
        };
        flow.promise += more;
        flow.connection.credit.grow(more);
        let Side::Connected(peer) = &flow.peer else {
            return;
        };
        if let Err(error) = peer.prepare_stream(flow.promise as usize) {
            tracing::debug!(vm = %self.key, %error, "a socket's buffer stays as it is");
        } else if peer.has_backlog() {
            // The socket has room now, of which the kernel tells only when it is mostly empty. That may be a reason to promise
            // more again: no more often than it can be doubled.
            self.flush(number, context);
        }
    }
}
