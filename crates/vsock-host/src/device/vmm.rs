//! A guest's VMM comes, speaks and goes; the device starts, starts anew, or goes on where another left off.
//!
//! A device that starts from the beginning of its rings is a driver's first or a new one: whatever was
//! before is gone on its side too. One that starts further on, from a VMM that we hadn't seen, is a restored
//! or reconnected guest, which may believe in connections that we know nothing of. If its event queue is
//! ours, it is told before any traffic; it may come last of the three rings, so traffic is held for
//! [`HOLD`]. If it comes later still, or has no buffer until then, the guest is told all the same, since a
//! reader there may wait for what never comes; by that event it drops the connections of the meantime too, and
//! so do we. If the VMM keeps that queue (QEMU), each old connection is reset when its next packet comes.
//! One that stops and starts again under the same VMM goes on as if nothing had been.
//!
//! A guest whose ring makes no sense can neither say nor be told anything: it counts as gone until the ring is started
//! again, and nobody is let wait for it meanwhile.
//!
//! Callers of whom no guest has heard yet go on waiting as long as there is a VMM: a guest that boots is asked
//! for them when its driver is there. And what a guest had sent before it ended a connection is passed on when the
//! guest is gone, as when it has only left that connection; it counts among the next guest's until then.

use std::{
    os::unix::net::UnixStream,
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use rustix::{
    event::epoll::EventFlags,
    net::{SocketFlags, accept_with},
};

use sandwire_api::vsock::VsockRefusal;

use super::{Context, Token, Vm};
use crate::{
    connection::Connection,
    front_end::{Change, EVENTS, FROM_GUEST, FrontEnd, Served, TO_GUEST, Transport, lock},
    queue::{Direction, Ring, Taken},
};

/// How long traffic waits for the event queue of a guest that ran before. VMMs start their rings within a
/// millisecond of each other.
const HOLD: Duration = Duration::from_millis(50);

/// Edge-triggered: a message that comes in parts must not keep the worker awake.
const VMM_FLAGS: EventFlags = EventFlags::IN
    .union(EventFlags::RDHUP)
    .union(EventFlags::ET);

/// Messages of a VMM served until the other guests of the worker get their turn.
const TURN: u32 = 64;

/// VIRTIO_VSOCK_EVENT_TRANSPORT_RESET, little-endian.
const TRANSPORT_RESET: [u8; 4] = 0_u32.to_le_bytes();

/// What is known of what ran before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct History {
    /// Whether rings ran under the VMM that is connected.
    ran: bool,
    /// Whether the guest is to be told that all its connections are gone.
    reset_due: bool,
    /// Until when traffic waits for that.
    hold: Option<Instant>,
    /// Whether a ring was lost, and its guest isn't let go yet.
    lost: bool,
}

impl Vm {
    /// A VMM has connected. One that is there already stays: a guest has one device. Whoever connected after it is
    /// reported again, when the other guests of the worker have had their turn.
    pub fn accept_vmm(&mut self, context: &mut Context) {
        if lock(&self.transport).is_held_up() {
            // What a former one left waits to be closed; the next may leave as much.
            return self.pause(Token::VmmListener(self.slot), context);
        }
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = match accept_with(&self.listeners.vmm, flags) {
            Ok(socket) => UnixStream::from(socket),
            Err(error) => {
                return self.not_accepted(error, Token::VmmListener(self.slot), context);
            }
        };
        // The former one may have gone without our having looked.
        self.vmm_is_ready(context);
        if self.front_end.is_some() {
            tracing::warn!(vm = %self.key, "a second VMM connected while one is there; it is turned away");
            return lock(&self.transport).turn_away(socket);
        }
        let attached = FrontEnd::new(socket, &self.transport).and_then(|front_end| {
            context.watch(front_end.fd(), Token::FrontEnd(self.slot), VMM_FLAGS)?;
            Ok(front_end)
        });
        match attached {
            Ok(front_end) => {
                tracing::info!(vm = %self.key, "a VMM has connected");
                self.front_end = Some(front_end);
                self.history = History::default();
                self.counters.attached.store(true, Relaxed);
            }
            Err(error) => tracing::warn!(vm = %self.key, %error, "a VMM can't be served"),
        }
    }

    /// The VMM has said something.
    pub fn vmm_is_ready(&mut self, context: &mut Context) {
        let mut left = TURN;
        while let Some(front_end) = &mut self.front_end {
            if left == 0 {
                // What is there already is reported once more.
                let token = Token::FrontEnd(self.slot);
                if let Err(error) = context.watch(front_end.fd(), token, VMM_FLAGS) {
                    tracing::warn!(vm = %self.key, %error, "the VMM can't be waited for; it is let go");
                    self.disconnect_vmm(context);
                }
                break;
            }
            left -= 1;
            match front_end.serve() {
                Served::One => self.apply_changes(context),
                Served::Nothing => break,
                Served::Over(error) => {
                    tracing::info!(vm = %self.key, reason = %error, "the VMM has gone");
                    self.disconnect_vmm(context);
                }
            }
        }
        self.serve_from_guest(context);
    }

    /// The VMM is gone, and with it the guest's side of every connection, also of those that no guest has heard of.
    pub(super) fn disconnect_vmm(&mut self, context: &mut Context) {
        let Some(front_end) = self.front_end.take() else {
            return;
        };
        // Else waiting for events could be the last to hold its socket, for a moment.
        context.unwatch(front_end.fd());
        drop(front_end);
        self.counters.attached.store(false, Relaxed);
        lock(&self.transport).disconnect();
        self.apply_changes(context);
        self.guest_left(|_| true, context);
        self.history = History::default();
    }

    /// The guest has gone with its side of these connections: it isn't told of them any more, and they are over but for
    /// what it had sent before it ended them.
    pub(super) fn guest_left(
        &mut self,
        which: impl Fn(&Connection) -> bool,
        context: &mut Context,
    ) {
        let mut left = Vec::new();
        for number in self.flows.numbers() {
            if let Some(flow) = self.flows.get_mut(number)
                && which(&flow.connection)
            {
                flow.connection.guest_left();
                left.push(number);
            }
        }
        self.unqueue_gone();
        for number in left {
            self.settle(number, context);
        }
        self.resets.clear();
        self.paused = false;
    }

    /// The same with those that the guest has heard of. Whoever waits for it to be asked goes on waiting.
    fn guest_restarted(&mut self, context: &mut Context) {
        self.guest_left(|connection| !connection.is_unasked(), context);
    }

    fn apply_changes(&mut self, context: &mut Context) {
        let changes = lock(&self.transport).take_changes();
        for change in changes {
            match change {
                Change::Unwatch(kick) => context.unwatch(&kick),
                Change::Watch(ring) => {
                    self.watch_kick(ring, context);
                    self.look_at(ring);
                }
                Change::Started(ring) => self.ring_started(ring, context),
                Change::Look(ring) => self.look_at(ring),
                Change::Reset => {
                    self.history = History::default();
                    self.guest_restarted(context);
                }
            }
        }
    }

    /// The ring may have something without a kick: it is looked at when packets flow, which they do after each message.
    fn look_at(&mut self, ring: usize) {
        self.starved &= ring != TO_GUEST;
    }

    fn watch_kick(&mut self, ring: usize, context: &Context) {
        let token = Token::Kick(self.slot, u32::try_from(ring).expect("one of three"));
        let transport = lock(&self.transport);
        if let Some(kick) = &transport.rings[ring].kick {
            // Edge-triggered, so that nobody has to read the counter after each kick.
            let flags = EventFlags::IN | EventFlags::ET;
            if let Err(error) = context.watch(kick, token, flags) {
                tracing::warn!(vm = %self.key, ring, %error, "a kick can't be waited for");
            }
        }
    }

    fn ring_started(&mut self, ring: usize, context: &mut Context) {
        if ring == EVENTS {
            return;
        }
        self.starved = false;
        let both = [TO_GUEST, FROM_GUEST];
        let (running, fresh) = {
            let transport = lock(&self.transport);
            let rings = both.map(|ring| &transport.rings[ring]);
            (
                rings.iter().all(|ring| ring.is_running()),
                rings.iter().all(|ring| ring.base() == 0),
            )
        };
        if !running {
            return;
        }
        if fresh {
            self.guest_restarted(context);
        } else if !self.history.ran {
            self.guest_restarted(context);
            let until = context.now + HOLD;
            self.history.reset_due = true;
            self.history.hold = Some(until);
            context.timers.set(until, Token::Hold(self.slot).pack());
        }
        self.history.ran = true;
    }

    /// Resets the connections that the guest has dropped by the event: those opened before it could be told.
    /// RST goes with it, for one whose answer the guest's driver reads only after the event.
    fn reset_heard(&mut self, context: &mut Context) {
        for number in self.flows.numbers() {
            if let Some(flow) = self.flows.get_mut(number)
                && flow.connection.is_heard()
            {
                flow.connection.reset();
                self.settle(number, context);
            }
        }
    }

    /// If the VMM has taken its guest's memory away, lets go of it.
    pub(super) fn check_memory(&mut self, context: &mut Context) {
        if self.front_end.is_some() && lock(&self.transport).memory.is_gone() {
            tracing::warn!(vm = %self.key, "the VMM has taken its guest's memory away; it is let go");
            self.disconnect_vmm(context);
        }
    }

    /// A ring makes no sense. It isn't served before it is started again.
    pub(super) fn lose(&mut self, ring: &mut Ring) {
        self.counters.refuse(VsockRefusal::BadDescriptors);
        tracing::warn!(vm = %self.key, "the guest's ring makes no sense; it isn't served");
        ring.lose();
        self.history.lost = true;
    }

    /// If a ring was lost, the guest is as good as gone. One that starts the ring again may still believe in what it had.
    pub(super) fn check_rings(&mut self, context: &mut Context) {
        if self.history.lost {
            self.history = History::default();
            self.guest_left(|_| true, context);
        }
    }

    /// The wait for an event queue may be over.
    pub fn hold_is_due(&mut self, context: &mut Context) {
        self.serve_from_guest(context);
    }

    /// Whether packets may flow. Tells the guest of a reset first, if one is due and its event queue is ours.
    pub(super) fn may_serve(&mut self, transport: &mut Transport, context: &mut Context) -> bool {
        if !transport.is_serving() {
            return false;
        }
        if transport.memory.is_gone() {
            // Nothing that is in it can be believed; the VMM is let go at the next look.
            return false;
        }
        if self.history.reset_due && transport.rings[EVENTS].is_serving() && tell_reset(transport) {
            self.history.reset_due = false;
            self.history.hold = None;
            self.reset_heard(context);
            tracing::info!(vm = %self.key, "the guest was told that its connections are gone");
        }
        match self.history.hold {
            Some(until) if context.now < until => false,
            Some(_) => {
                self.history.hold = None;
                true
            }
            None => true,
        }
    }
}

/// Puts the event into the event queue. Whether there was room.
fn tell_reset(transport: &mut Transport) -> bool {
    let mut pieces = Vec::new();
    let ring = &mut transport.rings[EVENTS];
    let memory = &transport.memory;
    let told = match ring.take(memory, Direction::ToGuest, &mut pieces) {
        Taken::Chain(head) => {
            let written = super::to_guest::copy_in(&pieces, &TRANSPORT_RESET);
            ring.give_back(memory, head, written) && written != 0
        }
        Taken::Broken(head) => {
            ring.give_back(memory, head, 0);
            false
        }
        Taken::Empty | Taken::Lost => false,
    };
    ring.signal(memory);
    // Its next buffer, if there was none, comes with a kick.
    let _ = ring.sleep(memory);
    told
}
