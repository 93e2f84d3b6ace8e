//! Flow control of one connection, as the specification has it (§5.10.6.3).
//!
//! Each side says in every packet how much it takes (`buf_alloc`) and how much of that it has passed on
//! (`fwd_cnt`). What a side may have in flight is the other's `buf_alloc`. All counters are of payload bytes
//! and run modulo 2^32.
//!
//! Two numbers bound what a guest can make us do: it may never send more than *we* have told it (more is a
//! violation, and the connection is reset), and whatever it tells us, its word only ever bounds what we send.
//!
//! Linux sends no more ahead than it takes itself, however much we take: "vsock/virtio: cap TX credit to local
//! buffer size", 6.19 and the stable kernels of 2026. So what a guest may send ahead is the smaller of both
//! buffers: its window.
//!
//! An update goes to the guest by itself when half a window was passed on of which it doesn't know. So a guest
//! that still has data knows of half a window, or its data waits for the host: it can't stall. Telling it of
//! less would make it send less at once, and that little be passed on and told again: the silly window that TCP
//! avoids likewise (RFC 9293, 3.8.6.2.2). What is here of a message that isn't whole waits for the guest itself, so
//! it comes off the window: half of the rest.

/// Counters of one connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credit {
    /// What we take.
    buf_alloc: u32,
    /// What the guest knows that we take.
    told_alloc: u32,
    /// What we received.
    received: u32,
    /// What we passed on.
    forwarded: u32,
    /// What that was when `buf_alloc` last became more.
    grown_at: u32,
    /// What the guest knows that we passed on.
    told: u32,
    /// Of what waits, what belongs to a message that isn't whole.
    held: u32,
    /// What the guest takes.
    peer_buf_alloc: u32,
    /// What the guest passed on.
    peer_forwarded: u32,
    /// What we sent.
    sent: u32,
}

/// A guest that sent more than it was allowed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation;

impl Credit {
    /// For a connection of which `buf_alloc` bytes may wait on our side.
    #[must_use]
    pub fn new(buf_alloc: u32) -> Self {
        Self {
            buf_alloc,
            told_alloc: buf_alloc,
            received: 0,
            forwarded: 0,
            grown_at: 0,
            told: 0,
            held: 0,
            peer_buf_alloc: 0,
            peer_forwarded: 0,
            sent: 0,
        }
    }

    /// Bytes that we take.
    #[must_use]
    pub fn buf_alloc(&self) -> u32 {
        self.buf_alloc
    }

    /// So many bytes more may wait from now on. The guest is to be told at once; and never of fewer again, as it may be
    /// sending by then what it was told it may.
    pub fn grow(&mut self, more: u32) {
        self.buf_alloc = self.buf_alloc.saturating_add(more);
        self.grown_at = self.forwarded;
    }

    /// Whether more credit would be used: the guest has hardly any left, and the peer has taken as much as that
    /// is since it was last more.
    #[must_use]
    pub fn is_short(&self) -> bool {
        let taken = self.forwarded.wrapping_sub(self.grown_at);
        taken >= self.buf_alloc && self.guest_may_send() < self.buf_alloc / 4
    }

    /// Bytes received and not yet passed on.
    #[must_use]
    pub fn waiting(&self) -> u32 {
        self.received.wrapping_sub(self.forwarded)
    }

    /// Bytes that the guest may still send, as far as it knows.
    #[must_use]
    pub fn guest_may_send(&self) -> u32 {
        self.buf_alloc - self.received.wrapping_sub(self.told)
    }

    /// Bytes that we may still send.
    #[must_use]
    pub fn may_send(&self) -> u32 {
        self.peer_buf_alloc
            .saturating_sub(self.sent.wrapping_sub(self.peer_forwarded))
    }

    /// The guest sent that much.
    ///
    /// # Errors
    /// More than it was told it may. Nothing has changed then.
    pub fn receive(&mut self, bytes: u32) -> Result<(), Violation> {
        if bytes > self.guest_may_send() {
            return Err(Violation);
        }
        self.received = self.received.wrapping_add(bytes);
        Ok(())
    }

    /// That much of it was passed on.
    pub fn forward(&mut self, bytes: u32) {
        debug_assert!(bytes <= self.waiting(), "more was passed on than received");
        self.forwarded = self.forwarded.wrapping_add(bytes);
    }

    /// So much of what waits can't be passed on before the guest has sent the rest of a message.
    pub fn hold(&mut self, bytes: u32) {
        self.held = bytes;
    }

    /// That much was sent to the guest.
    pub fn send(&mut self, bytes: u32) {
        debug_assert!(bytes <= self.may_send(), "sent beyond the guest's credit");
        self.sent = self.sent.wrapping_add(bytes);
    }

    /// What a packet of the guest says about its side. `forwarded` that can't be, beyond what was ever sent,
    /// counts as everything being in flight: [`Self::may_send`] is 0 or little until it says something better.
    pub fn hear(&mut self, buf_alloc: u32, forwarded: u32) {
        self.peer_buf_alloc = buf_alloc;
        self.peer_forwarded = forwarded;
    }

    /// What a packet to the guest says about ours: `buf_alloc` and `fwd_cnt`. The guest knows it then.
    pub fn tell(&mut self) -> (u32, u32) {
        self.told = self.forwarded;
        self.told_alloc = self.buf_alloc;
        (self.buf_alloc, self.forwarded)
    }

    /// Whether the guest should be told, with a packet for that alone if there is no other.
    #[must_use]
    pub fn update_is_due(&self) -> bool {
        let untold = self.forwarded.wrapping_sub(self.told);
        if self.told_alloc != self.buf_alloc {
            return true;
        }
        untold != 0 && untold >= self.window().saturating_sub(self.held) / 2
    }

    /// What the guest takes in all; a message that is longer never is whole there.
    #[must_use]
    pub fn peer_buf_alloc(&self) -> u32 {
        self.peer_buf_alloc
    }

    /// What the guest sends ahead at most.
    fn window(&self) -> u32 {
        self.buf_alloc.min(self.peer_buf_alloc)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_guest_may_fill_the_buffer_and_not_a_byte_more() {
        let mut credit = Credit::new(4096);
        assert_eq!(credit.receive(4096), Ok(()));
        assert_eq!(credit.receive(1), Err(Violation));
        assert_eq!(credit.receive(0), Ok(()));
        credit.forward(100);
        assert_eq!(credit.receive(1), Err(Violation), "it hasn't been told yet");
        credit.tell();
        assert_eq!(credit.receive(101), Err(Violation));
        assert_eq!(credit.receive(100), Ok(()));
    }

    #[test]
    fn an_update_is_due_when_the_guest_doesn_t_know_of_half() {
        let mut credit = Credit::new(1000);
        credit.hear(4096, 0);
        credit.receive(1000).expect("within credit");
        assert!(!credit.update_is_due(), "there is nothing new to tell");
        credit.forward(499);
        assert!(!credit.update_is_due(), "it would send as little again");
        credit.forward(1);
        assert!(credit.update_is_due());
        credit.tell();
        assert!(!credit.update_is_due());
    }

    #[test]
    fn a_guest_in_the_middle_of_a_message_is_told_of_half_of_what_is_left() {
        let mut credit = Credit::new(1000);
        credit.hear(1000, 0);
        credit.receive(10).expect("within credit");
        credit.forward(10);
        assert!(!credit.update_is_due());
        credit.receive(990).expect("within credit");
        credit.hold(990);
        assert!(credit.update_is_due(), "it can't go on");
        credit.tell();
        assert!(!credit.update_is_due());
    }

    #[test]
    fn a_guest_that_sends_no_more_than_it_takes_itself_is_told_in_time() {
        let mut credit = Credit::new(4096);
        credit.hear(1000, 0);
        credit.receive(1000).expect("within credit");
        credit.forward(499);
        assert!(!credit.update_is_due());
        credit.forward(1);
        assert!(credit.update_is_due(), "it sends nothing more until then");
    }

    #[test]
    fn a_guest_that_claims_what_was_never_sent_gets_nothing_from_it() {
        let mut credit = Credit::new(4096);
        credit.hear(1000, 1);
        assert_eq!(
            credit.may_send(),
            0,
            "it has passed on a byte that was never sent"
        );
        credit.hear(1000, 0);
        credit.send(1000);
        assert_eq!(credit.may_send(), 0);
        credit.hear(500, 200);
        assert_eq!(
            credit.may_send(),
            0,
            "it has shrunk its buffer below what is in flight"
        );
        credit.hear(u32::MAX, 1000);
        assert_eq!(credit.may_send(), u32::MAX);
    }

    #[test]
    fn more_is_wanted_once_guest_and_peer_have_used_all() {
        let mut credit = Credit::new(1000);
        credit.hear(1 << 20, 0);
        credit.receive(900).expect("within credit");
        assert!(!credit.is_short(), "the peer has taken nothing yet");
        credit.forward(900);
        credit.tell();
        credit.receive(100).expect("within credit");
        credit.forward(100);
        assert!(!credit.is_short(), "the guest has enough left");
        credit.receive(700).expect("within credit");
        assert!(credit.is_short());
        credit.grow(1000);
        assert!(!credit.is_short(), "it has just got more");
        assert!(credit.update_is_due(), "though nothing new was passed on");
        assert_eq!(credit.tell(), (2000, 1000));
        assert!(!credit.update_is_due());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Receive(u32),
        Forward(u32),
        Tell,
        Grow(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..70_000_u32).prop_map(Step::Receive),
            (0..70_000_u32).prop_map(Step::Forward),
            Just(Step::Tell),
            (1..70_000_u32).prop_map(Step::Grow),
        ]
    }

    proptest! {
        /// Whatever a guest sends, and however slowly it is passed on, no more than `buf_alloc` waits; and a
        /// guest that sends nothing more by what it knows is told as soon as it may.
        #[test]
        fn no_more_than_the_promise_ever_waits(
            buf_alloc in 4096..300_000_u32,
            peer_buf_alloc in 4096..300_000_u32,
            start in any::<u32>(),
            steps in proptest::collection::vec(step(), 1..200),
        ) {
            let mut credit = Credit::new(buf_alloc);
            (credit.received, credit.forwarded, credit.told) = (start, start, start);
            credit.grown_at = start;
            credit.hear(peer_buf_alloc, 0);
            let (mut buf_alloc, mut known) = (buf_alloc, buf_alloc);
            for step in steps {
                match step {
                    Step::Receive(bytes) => {
                        let allowed = credit.guest_may_send();
                        prop_assert_eq!(credit.receive(bytes).is_ok(), bytes <= allowed);
                    }
                    Step::Forward(bytes) => credit.forward(bytes.min(credit.waiting())),
                    Step::Tell => {
                        known = credit.tell().0;
                        prop_assert_eq!(credit.guest_may_send(), buf_alloc - credit.waiting());
                    }
                    Step::Grow(bytes) => {
                        credit.grow(bytes);
                        buf_alloc += bytes;
                    }
                }
                prop_assert!(credit.waiting() <= buf_alloc);
                prop_assert!(credit.guest_may_send() <= buf_alloc - credit.waiting());
                let window = known.min(peer_buf_alloc);
                let in_flight = credit.received.wrapping_sub(credit.told);
                if in_flight >= window && credit.waiting() <= window / 2 {
                    prop_assert!(credit.update_is_due());
                }
            }
        }
    }
}
