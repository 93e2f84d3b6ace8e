//! The states of one connection, without any I/O.
//!
//! Events arrive as method calls, from the guest's packets and from the peer (whatever is behind our file
//! descriptor). What follows is asked afterwards: [`Connection::next_packet`] says what to tell the guest,
//! [`Connection::peer_is_done`], [`Connection::shut_peer`] and [`Connection::may_read_peer`] what to do with
//! the descriptor. Asking twice changes nothing; so whoever does the I/O looks after every event and needs no
//! list of effects.
//!
//! ```text
//! guest's REQUEST ─► Dialing ──dialed──► RESPONSE ─┐
//! client, sibling ─► Asking ──guest's RESPONSE─────┴─► Established ─► both sides shut ─► RST ─► Gone
//! any: refusal, violation, failure, time-out ─► Resetting ─► RST is in the ring ─► Gone
//! any: guest's RST ─► Gone
//! ```
//!
//! The guest's SHUTDOWN with both bits is answered by RST once everything that it sent has been passed on.
//! Nothing is sent to the guest after RST, and no data after SHUTDOWN with the bit for sending.

use sandwire_api::vsock::{VsockRefusal, VsockState, VsockType};

use crate::{
    credit::Credit,
    packet::{Operation, flags},
};

/// What tells connections of one guest apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The guest's port.
    pub guest_port: u32,
    /// The peer's CID as the guest sees it.
    pub peer_cid: u32,
    /// The peer's port as the guest sees it.
    pub peer_port: u32,
    /// Stream or messages.
    pub kind: VsockType,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The guest asked, the peer is being dialed.
    Dialing,
    /// We ask the guest; whether REQUEST is in its ring.
    Asking { asked: bool },
    /// Data flows.
    Established,
    /// RST is to be told.
    Resetting,
    /// The guest knows nothing of it any more.
    Gone,
}

/// What to do with data of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Pass it on; nothing to do for packets without data.
    Accept,
    /// Drop it: the peer takes no more. Its credit has been given back.
    Discard,
    /// It was refused, and the connection is being reset.
    Refuse(VsockRefusal),
}

/// One connection.
#[derive(Clone, Debug)]
pub struct Connection {
    phase: Phase,
    /// Flow control.
    pub credit: Credit,
    guest_sends: bool,
    guest_receives: bool,
    peer_sends: bool,
    peer_receives: bool,
    /// SHUTDOWN bits that the guest has been told.
    told_shutdown: u32,
    response_due: bool,
    update_wanted: bool,
    /// The guest is out of room and there is something to send to it.
    starving: bool,
    /// It has been asked for credit since it last had room.
    credit_asked: bool,
}

impl Connection {
    /// The guest asked for it, and the peer is being dialed.
    #[must_use]
    pub fn dialing(buf_alloc: u32) -> Self {
        Self::new(Phase::Dialing, buf_alloc)
    }

    /// A client or a sibling asked for it: the guest will be asked.
    #[must_use]
    pub fn asking(buf_alloc: u32) -> Self {
        Self::new(Phase::Asking { asked: false }, buf_alloc)
    }

    fn new(phase: Phase, buf_alloc: u32) -> Self {
        Self {
            phase,
            credit: Credit::new(buf_alloc),
            guest_sends: true,
            guest_receives: true,
            peer_sends: true,
            peer_receives: true,
            told_shutdown: 0,
            response_due: false,
            update_wanted: false,
            starving: false,
            credit_asked: false,
        }
    }

    /// A packet of the guest, except REQUEST of a connection that didn't exist. `payload` is its length in
    /// bytes for RW; its buffer numbers must have been given to [`Credit::hear`] before.
    pub fn from_guest(&mut self, operation: Operation, bits: u32, payload: u32) -> Verdict {
        match (self.phase, operation) {
            (Phase::Gone | Phase::Resetting, Operation::Reset) | (_, Operation::Reset) => {
                self.phase = Phase::Gone;
                Verdict::Accept
            }
            (Phase::Gone | Phase::Resetting, _) => Verdict::Discard,
            (Phase::Asking { asked: true }, Operation::Response) => {
                self.phase = Phase::Established;
                Verdict::Accept
            }
            (Phase::Established, Operation::Shutdown) => {
                self.guest_receives &= bits & flags::SHUTDOWN_RECEIVE == 0;
                self.guest_sends &= bits & flags::SHUTDOWN_SEND == 0;
                Verdict::Accept
            }
            (Phase::Established, Operation::ReadWrite) => self.data_from_guest(payload),
            (Phase::Established, Operation::CreditRequest) => {
                self.update_wanted = true;
                Verdict::Accept
            }
            (Phase::Dialing | Phase::Established, Operation::CreditUpdate) => Verdict::Accept,
            // It gave up waiting, of which Linux says nothing, and tries again: it gets what is being opened.
            (Phase::Dialing, Operation::Request) => Verdict::Accept,
            _ => self.refuse(VsockRefusal::NoConnection),
        }
    }

    fn data_from_guest(&mut self, payload: u32) -> Verdict {
        if !self.guest_sends {
            return self.refuse(VsockRefusal::NoConnection);
        }
        if self.credit.receive(payload).is_err() {
            return self.refuse(VsockRefusal::Credit);
        }
        if self.peer_receives {
            return Verdict::Accept;
        }
        self.credit.forward(payload);
        Verdict::Discard
    }

    /// Resets it, for that reason.
    pub fn refuse(&mut self, reason: VsockRefusal) -> Verdict {
        self.reset();
        Verdict::Refuse(reason)
    }

    /// Resets it. If the guest hasn't heard of it yet, it never will.
    pub fn reset(&mut self) {
        self.phase = match self.phase {
            Phase::Gone | Phase::Asking { asked: false } => Phase::Gone,
            _ => Phase::Resetting,
        };
    }

    /// The guest is gone, or another by now, and knows nothing of it.
    pub fn guest_left(&mut self) {
        self.phase = Phase::Gone;
    }

    /// The peer was reached.
    pub fn dialed(&mut self) {
        if self.phase == Phase::Dialing {
            self.phase = Phase::Established;
            self.response_due = true;
        }
    }

    /// The peer sends no more, and all that it sent is in the guest's ring.
    pub fn peer_ended(&mut self) {
        self.peer_sends = false;
    }

    /// The peer takes no more: what the guest sends from now on is discarded. What waited for the peer is
    /// given up by whoever has it, with [`Credit::forward`].
    pub fn peer_stopped_receiving(&mut self) {
        self.peer_receives = false;
        self.credit.hold(0);
    }

    /// Whether there is something to send for which the guest has no room. It is asked for credit once and not
    /// again until it has had room: its answer may be that it still has none, and asking on would keep both busy
    /// for as long as its user doesn't read. When its user does, it says so by itself.
    pub fn set_starving(&mut self, starving: bool) {
        self.starving = starving;
        self.credit_asked &= starving;
    }

    /// What to tell the guest now, if anything; with the bits of SHUTDOWN. `backlog` is whether data of the
    /// guest still waits to be passed on.
    #[must_use]
    pub fn next_packet(&self, backlog: bool) -> Option<(Operation, u32)> {
        match self.phase {
            Phase::Asking { asked: false } => Some((Operation::Request, 0)),
            Phase::Resetting => Some((Operation::Reset, 0)),
            Phase::Established => self.next_of_established(backlog),
            _ => None,
        }
    }

    fn next_of_established(&self, backlog: bool) -> Option<(Operation, u32)> {
        if self.response_due {
            return Some((Operation::Response, 0));
        }
        if !self.guest_sends && !self.guest_receives && !backlog {
            return Some((Operation::Reset, 0));
        }
        let bits = self.shutdown_bits();
        if bits & !self.told_shutdown != 0 {
            return Some((Operation::Shutdown, bits));
        }
        if self.update_wanted || (self.guest_sends && self.credit.update_is_due()) {
            return Some((Operation::CreditUpdate, 0));
        }
        if self.starving && !self.credit_asked && self.may_send_data() {
            return Some((Operation::CreditRequest, 0));
        }
        None
    }

    /// That packet is in the guest's ring.
    pub fn told(&mut self, operation: Operation, bits: u32) {
        self.update_wanted = false;
        match operation {
            Operation::Request => self.phase = Phase::Asking { asked: true },
            Operation::Response => self.response_due = false,
            Operation::Reset => self.phase = Phase::Gone,
            Operation::Shutdown => self.told_shutdown |= bits,
            Operation::CreditRequest => self.credit_asked = true,
            Operation::ReadWrite | Operation::CreditUpdate => {}
        }
    }

    fn shutdown_bits(&self) -> u32 {
        let receive = if self.peer_receives {
            0
        } else {
            flags::SHUTDOWN_RECEIVE
        };
        let send = if self.peer_sends {
            0
        } else {
            flags::SHUTDOWN_SEND
        };
        receive | send
    }

    /// Whether data of the peer may be sent to the guest, room permitting.
    #[must_use]
    pub fn may_send_data(&self) -> bool {
        self.phase == Phase::Established
            && !self.response_due
            && self.guest_receives
            && self.peer_sends
            && self.told_shutdown & flags::SHUTDOWN_SEND == 0
    }

    /// Whether the peer is to be read from. The same, and named for the descriptor's side.
    #[must_use]
    pub fn may_read_peer(&self) -> bool {
        self.may_send_data()
    }

    /// Which directions of the descriptor are to be shut: reading, writing.
    #[must_use]
    pub fn shut_peer(&self, backlog: bool) -> (bool, bool) {
        (!self.guest_receives, !self.guest_sends && !backlog)
    }

    /// Whether the peer's descriptor is to be closed at once, whatever still waits for it.
    #[must_use]
    pub fn peer_is_done(&self) -> bool {
        self.phase == Phase::Resetting
    }

    /// Whether the guest knows nothing of it any more and never will. What the guest had sent before it shut
    /// its side may still be passed on ([`Self::is_lingering`]).
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.phase == Phase::Gone
    }

    /// Whether the guest has left in good order, so that what waits for the peer should still reach it.
    #[must_use]
    pub fn is_lingering(&self) -> bool {
        self.phase == Phase::Gone && !self.guest_sends && self.peer_receives
    }

    /// Whether data flows, or has.
    #[must_use]
    pub fn is_established(&self) -> bool {
        self.phase == Phase::Established
    }

    /// Whether a caller waits for the guest to be asked: it knows nothing of it yet.
    #[must_use]
    pub fn is_unasked(&self) -> bool {
        self.phase == Phase::Asking { asked: false }
    }

    /// Whether the guest may hold it to be a connection: data flows, or it has been asked.
    #[must_use]
    pub fn is_heard(&self) -> bool {
        matches!(
            self.phase,
            Phase::Established | Phase::Asking { asked: true }
        )
    }

    /// Whether it is still being opened.
    #[must_use]
    pub fn is_opening(&self) -> bool {
        matches!(self.phase, Phase::Dialing | Phase::Asking { .. })
    }

    /// Whether it ends as soon as the guest confirms and what it sent has been passed on, so that a time limit applies
    /// to the guest.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        let told = self.told_shutdown == flags::SHUTDOWN_BOTH;
        let shut = !self.guest_sends && !self.guest_receives;
        self.phase == Phase::Gone || self.phase == Phase::Established && (told || shut)
    }

    /// For the list of connections.
    #[must_use]
    pub fn state(&self) -> VsockState {
        let guest_ended = !self.guest_sends;
        let peer_ended = !self.peer_sends;
        match self.phase {
            Phase::Dialing | Phase::Asking { .. } => VsockState::Connecting,
            Phase::Established if guest_ended && peer_ended || self.is_closing() => {
                VsockState::Closing
            }
            Phase::Established if guest_ended => VsockState::GuestClosed,
            Phase::Established if peer_ended => VsockState::PeerClosed,
            Phase::Established => VsockState::Established,
            Phase::Resetting | Phase::Gone => VsockState::Closing,
        }
    }
}

#[cfg(test)]
mod tests;
