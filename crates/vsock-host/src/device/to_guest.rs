//! Packets to the guest: what the device has to say first, then data of the peers, in turns.
//!
//! Data of a stream is read from its descriptor straight into the guest's buffers, behind the space for each
//! header; how many bytes came is known only afterwards, and then the headers are written. Buffers that
//! were taken from the ring and not filled wait in [`Transport::ahead`].

use std::{collections::VecDeque, ptr, sync::atomic::Ordering::Relaxed};

use sandwire_api::vsock::{VsockRefusal, VsockType};

use super::{Context, Flow, Scratch, Side, Vm};
use crate::{
    front_end::{Ahead, TO_GUEST, Transport},
    packet::{HEADER_BYTES, Header, LARGEST_PAYLOAD, Operation, flags},
    peer::{Framing, Read, length},
    queue::{Direction, Taken},
};

/// What a connection is read from at first, in bytes; doubled each time that as much was there.
pub(super) const FIRST_APPETITE: u32 = 16 * 1024;
/// What it is read from at most at once, so that others get their turn.
const LARGEST_APPETITE: u32 = 256 * 1024;
/// Bytes that make a bulk transfer of what came in one read.
const BULK: u32 = 32 * 1024;
/// Most buffers of one read: one or two pieces each stay below IOV_MAX.
const MOST_BUFFERS: usize = 256;

/// What came of serving a connection's data.
enum Fed {
    /// It has had its turn; there may be more.
    More,
    /// It has nothing more, or may not.
    Done,
    /// The guest offers no buffers.
    Starved,
}

/// How much to make room for next, after so much was read: twice as much while a sender fills it, and less for others.
fn appetite_after(appetite: u32, read: u32, was_filled: bool) -> u32 {
    if was_filled {
        appetite.saturating_mul(2).min(LARGEST_APPETITE)
    } else {
        appetite.min(read.saturating_mul(2)).max(FIRST_APPETITE)
    }
}

impl Flow {
    /// Whether the guest has room for what comes next: a byte, or all of a message, since what is read of one has to
    /// be kept until it can go on.
    pub(super) fn has_room(&self) -> bool {
        let credit = &self.connection.credit;
        let begun = matches!(&self.peer, Side::Connected(peer) if peer.outgoing.is_some());
        // The guest may have made its buffer smaller meanwhile: then it is refused.
        let never = self.next_message > credit.peer_buf_alloc();
        begun || never || credit.may_send() >= self.next_message.max(1)
    }
}

impl Vm {
    /// Tells the guest all that there is to tell, as far as it has room.
    pub(super) fn serve_to_guest(&mut self, context: &mut Context) {
        if !(self.resets.is_empty() && self.control.is_empty() && self.data.is_empty()) {
            self.locked(|vm, transport| vm.fill(transport, context));
        }
        self.check_rings(context);
        if self.paused && self.resets.is_empty() {
            self.paused = false;
            context.again.push(self.slot);
        }
    }

    /// The guest has offered buffers.
    pub fn kicked_to_guest(&mut self, context: &mut Context) {
        self.starved = false;
        self.serve_to_guest(context);
    }

    fn fill(&mut self, transport: &mut Transport, context: &mut Context) {
        if self.starved || !self.may_serve(transport, context) {
            return;
        }
        self.begin_turn(transport, context);
        loop {
            let served = self.tell_resets(transport)
                && self.tell_control(transport, context)
                && self.feed(transport, context);
            if served {
                break;
            }
            if transport.left == 0 {
                context.again.push(self.slot);
                break;
            }
            // Out of buffers. Whatever came between the last look and asking for a kick has no kick.
            let Transport { rings, memory, .. } = transport;
            if !rings[TO_GUEST].is_serving() || !rings[TO_GUEST].sleep(memory) {
                self.starved = true;
                break;
            }
        }
        let Transport { rings, memory, .. } = transport;
        rings[TO_GUEST].signal(memory);
    }

    /// Takes a flow that is gone out of the queues. A guest may open and reset without end, and offer no buffer
    /// that would empty them.
    pub(super) fn unqueue(&mut self, number: u32, flow: &Flow) {
        if self.flows.is_empty() {
            self.control = VecDeque::new();
            self.data = VecDeque::new();
            return;
        }
        if flow.in_control {
            self.control.retain(|queued| *queued != number);
        }
        if flow.in_data {
            self.data.retain(|queued| *queued != number);
        }
    }

    /// The same for all that are gone, in one pass: there may be thousands.
    pub(super) fn unqueue_gone(&mut self) {
        let flows = &mut self.flows;
        let mut stays = |number: &u32| {
            let Some(flow) = flows.get_mut(*number) else {
                return false;
            };
            let stays = !flow.connection.is_gone();
            flow.in_control &= stays;
            flow.in_data &= stays;
            stays
        };
        self.control.retain(&mut stays);
        self.data.retain(stays);
    }

    /// Whether all are told.
    fn tell_resets(&mut self, transport: &mut Transport) -> bool {
        while let Some(header) = self.resets.front() {
            let header = *header;
            if !self.put(transport, &header, &[]) {
                return false;
            }
            self.resets.pop_front();
        }
        true
    }

    /// Whether all are told.
    fn tell_control(&mut self, transport: &mut Transport, context: &mut Context) -> bool {
        while let Some(&number) = self.control.front() {
            while let Some(flow) = self.flows.get(number)
                && let Some((operation, bits)) = flow.connection.next_packet(flow.has_backlog())
            {
                // Not told before there is a buffer: telling changes what the guest is held to know.
                if !self.offer(transport) {
                    return false;
                }
                let Some(header) = self.header(number, operation, bits) else {
                    break;
                };
                self.put(transport, &header, &[]);
                if let Some(flow) = self.flows.get_mut(number) {
                    flow.connection.told(operation, bits);
                }
            }
            self.control.pop_front();
            if let Some(flow) = self.flows.get_mut(number) {
                flow.in_control = false;
                self.settle(number, context);
            }
        }
        true
    }

    /// Data, connection by connection, until nobody has more or the turn is over. False if the guest has no
    /// buffers left.
    fn feed(&mut self, transport: &mut Transport, context: &mut Context) -> bool {
        while let Some(number) = self.data.pop_front() {
            if self.turn.ingress_bytes == 0 {
                self.data.push_front(number);
                context.again.push(self.slot);
                return true;
            }
            let Some(flow) = self.flows.get_mut(number).filter(|flow| flow.in_data) else {
                continue;
            };
            let before = flow.ingress;
            let fed = match flow.key.kind {
                VsockType::Stream => self.feed_stream(number, transport, &mut context.scratch),
                VsockType::Seqpacket => self.feed_messages(number, transport, &mut context.scratch),
            };
            let Some(flow) = self.flows.get_mut(number) else {
                continue;
            };
            let left = &mut self.turn.ingress_bytes;
            *left = left.saturating_sub(flow.ingress - before);
            if matches!(fed, Fed::Starved) {
                self.data.push_front(number);
                return false;
            }
            flow.in_data = false;
            if matches!(fed, Fed::Done) {
                flow.readable = false;
            }
            self.settle(number, context);
            if !self.control.is_empty() && !self.tell_control(transport, context) {
                return false;
            }
        }
        true
    }

    fn feed_stream(
        &mut self,
        number: u32,
        transport: &mut Transport,
        scratch: &mut Scratch,
    ) -> Fed {
        let Some(flow) = self.flows.get_mut(number) else {
            return Fed::Done;
        };
        let credit = flow.connection.credit.may_send();
        let (Side::Connected(_), true) = (&flow.peer, flow.connection.may_send_data()) else {
            return Fed::Done;
        };
        if credit == 0 {
            // It stays readable, and goes on when the guest gives credit.
            return Fed::More;
        }
        let wanted = credit.min(flow.appetite);
        let room = self.gather(transport, wanted, &mut scratch.pieces);
        if room == 0 {
            return Fed::Starved;
        }
        let Some(flow) = self.flows.get_mut(number) else {
            return Fed::Done;
        };
        let Side::Connected(peer) = &mut flow.peer else {
            return Fed::Done;
        };
        match peer.read(&scratch.pieces) {
            Read::Bytes(read) => {
                let read = u32::try_from(read).expect("at most what was wanted");
                let all = read == room;
                flow.appetite = appetite_after(flow.appetite, read, all);
                let bulk = read >= BULK;
                self.deliver(number, transport, read);
                if bulk {
                    // The guest has something to do meanwhile.
                    let Transport { rings, memory, .. } = transport;
                    rings[TO_GUEST].signal(memory);
                    scratch.bulk = true;
                }
                if bulk && !all {
                    // Who sends that much sends more at once, given the processor for a moment; that saves
                    // both of us a wake-up.
                    rustix::thread::sched_yield();
                }
                // A shorter read needn't have emptied the descriptor: one stops in front of urgent data, and behind
                // descriptors that came along. No event tells of what is left, so it is read until it says so itself.
                Fed::More
            }
            Read::Nothing => Fed::Done,
            Read::End => {
                flow.connection.peer_ended();
                Fed::Done
            }
            Read::Fault => {
                flow.connection.reset();
                self.counters.refuse(VsockRefusal::BadDescriptors);
                Fed::Done
            }
            Read::Broken | Read::Message | Read::TooLong | Read::NoRoom(_) => {
                flow.connection.reset();
                Fed::Done
            }
        }
    }

    /// The pieces of the buffers taken ahead, without the space for headers, up to `wanted` bytes; how many
    /// bytes that is.
    fn gather(
        &mut self,
        transport: &mut Transport,
        wanted: u32,
        pieces: &mut Vec<libc::iovec>,
    ) -> u32 {
        pieces.clear();
        let (mut room, mut buffers) = (0, 0);
        while room < wanted && buffers < MOST_BUFFERS {
            if buffers == transport.ahead.len() && !self.take_ahead(transport) {
                break;
            }
            let buffer = &transport.ahead[buffers];
            let mut now = payload_room(buffer).min(wanted - room) as usize;
            room += u32::try_from(now).expect("at most a payload");
            let mut skip = HEADER_BYTES;
            for piece in std::iter::once(&buffer.first).chain(&buffer.rest) {
                let skipped = skip.min(piece.iov_len);
                let used = now.min(piece.iov_len - skipped);
                skip -= skipped;
                now -= used;
                if used != 0 {
                    pieces.push(libc::iovec {
                        iov_base: piece.iov_base.cast::<u8>().wrapping_add(skipped).cast(),
                        iov_len: used,
                    });
                }
            }
            buffers += 1;
            if pieces.len() >= MOST_BUFFERS * 2 {
                break;
            }
        }
        room
    }

    /// Writes the headers of buffers that hold `left` bytes of payload by now, and gives them to the guest.
    fn deliver(&mut self, number: u32, transport: &mut Transport, mut left: u32) {
        while left != 0 {
            let Some(buffer) = transport.ahead.front() else {
                break;
            };
            let len = payload_room(buffer).min(left);
            left -= len;
            let Some(flow) = self.flows.get_mut(number) else {
                return;
            };
            flow.connection.credit.send(len);
            flow.ingress += u64::from(len);
            let counters = self.counters.class(flow.class);
            counters.ingress_bytes.fetch_add(u64::from(len), Relaxed);
            let Some(header) = self.header(number, Operation::ReadWrite, 0) else {
                return;
            };
            self.give(transport, &Header { len, ..header }, len);
        }
    }

    /// Sends the message that is on its way, or reads the next.
    fn feed_messages(
        &mut self,
        number: u32,
        transport: &mut Transport,
        scratch: &mut Scratch,
    ) -> Fed {
        // Before a message is read, so that no more than one of a guest is ever here.
        if !self.offer(transport) {
            return Fed::Starved;
        }
        match self.read_message(number, &mut scratch.bytes) {
            Some(fed) => fed,
            None => self.send_message(number, transport),
        }
    }

    /// Reads the next message, unless one is on its way, if the guest has room for all of it; what came of it if
    /// there is none to send.
    fn read_message(&mut self, number: u32, bytes: &mut Vec<u8>) -> Option<Fed> {
        let most = self.limits.message_bytes;
        let Some(flow) = self.flows.get_mut(number) else {
            return Some(Fed::Done);
        };
        let (Side::Connected(peer), true) = (&mut flow.peer, flow.connection.may_send_data())
        else {
            return Some(Fed::Done);
        };
        if peer.outgoing.is_some() {
            return None;
        }
        let credit = &mut flow.connection.credit;
        // A message that is longer than all that the guest takes would never be whole there.
        let most = most.min(credit.peer_buf_alloc());
        flow.next_message = 0;
        match peer.read_message(bytes, most as usize, credit.may_send() as usize) {
            Read::NoRoom(length) => {
                flow.next_message = u32::try_from(length).expect("no more than its buffer");
                return Some(Fed::More);
            }
            Read::Message => {
                // Promised by the guest for this message, whatever it says while that is on its way.
                let length = peer
                    .outgoing
                    .as_ref()
                    .map_or(0, |message| message.bytes.len());
                credit.send(u32::try_from(length).expect("no more than its buffer"));
                return None;
            }
            Read::Nothing => {}
            Read::End => flow.connection.peer_ended(),
            Read::TooLong => {
                flow.connection.reset();
                self.counters.refuse(VsockRefusal::MessageTooLong);
            }
            _ => flow.connection.reset(),
        }
        Some(Fed::Done)
    }

    /// Sends as much of the message on its way as there are buffers for.
    fn send_message(&mut self, number: u32, transport: &mut Transport) -> Fed {
        loop {
            if !self.offer(transport) {
                return Fed::Starved;
            }
            let room = transport.ahead.front().map_or(0, payload_room);
            let Some(flow) = self.flows.get_mut(number) else {
                return Fed::Done;
            };
            let Side::Connected(peer) = &mut flow.peer else {
                return Fed::Done;
            };
            let Some(mut message) = peer.outgoing.take() else {
                return Fed::More;
            };
            let left = message.bytes.len() - message.sent;
            let now = left.min(room as usize);
            let len = u32::try_from(now).expect("at most a payload");
            flow.ingress += u64::from(len);
            let counters = self.counters.class(flow.class);
            counters.ingress_bytes.fetch_add(u64::from(len), Relaxed);
            let bits = if now == left { message.marks } else { 0 };
            let Some(header) = self.header(number, Operation::ReadWrite, bits) else {
                return Fed::Done;
            };
            self.put(
                transport,
                &Header { len, ..header },
                &message.bytes[message.sent..][..now],
            );
            message.sent += now;
            if let Some(flow) = self.flows.get_mut(number)
                && let Side::Connected(peer) = &mut flow.peer
            {
                if now != left {
                    peer.outgoing = Some(message);
                    continue;
                }
                debug_assert!(
                    bits & flags::END_OF_MESSAGE != 0,
                    "a message ends with its mark"
                );
                debug_assert!(
                    peer.framing() != Framing::Stream,
                    "streams have no messages"
                );
            }
            return Fed::More;
        }
    }

    /// Whether the guest offers a buffer; then there is one ahead.
    fn offer(&mut self, transport: &mut Transport) -> bool {
        !transport.ahead.is_empty() || self.take_ahead(transport)
    }

    /// Takes one more buffer ahead. Buffers that can't hold a packet go back empty.
    fn take_ahead(&mut self, transport: &mut Transport) -> bool {
        let Transport {
            rings,
            memory,
            ahead,
            taking: pieces,
            left,
            ..
        } = transport;
        let ring = &mut rings[TO_GUEST];
        while *left != 0 {
            *left -= 1;
            pieces.clear();
            match ring.take(memory, Direction::ToGuest, pieces) {
                Taken::Chain(head) if length(pieces) > HEADER_BYTES => {
                    let bytes = u32::try_from(length(pieces)).unwrap_or(u32::MAX);
                    ahead.push_back(Ahead {
                        head,
                        bytes,
                        first: pieces[0],
                        rest: pieces[1..].to_vec(),
                    });
                    return true;
                }
                Taken::Chain(head) | Taken::Broken(head) => {
                    self.counters.refuse(VsockRefusal::BadDescriptors);
                    if !ring.give_back(memory, head, 0) {
                        return false;
                    }
                }
                Taken::Empty => return false,
                Taken::Lost => {
                    self.lose(ring);
                    return false;
                }
            }
        }
        false
    }

    /// Puts a packet with a payload of ours into the next buffer. Whether there was one.
    fn put(&mut self, transport: &mut Transport, header: &Header, payload: &[u8]) -> bool {
        if !self.offer(transport) {
            return false;
        }
        if let Some(buffer) = transport.ahead.front() {
            copy_in_at(buffer, HEADER_BYTES, payload);
        }
        let len = u32::try_from(payload.len()).expect("it fits the buffer");
        self.give(transport, header, len);
        true
    }

    /// Writes the header into the next buffer and gives it to the guest, with that much payload in it.
    fn give(&mut self, transport: &mut Transport, header: &Header, payload: u32) {
        let Some(buffer) = transport.ahead.pop_front() else {
            return;
        };
        let bytes = header.bytes();
        copy_in_at(&buffer, 0, &bytes);
        if let Some(sink) = &self.capture {
            let mut copy = Vec::new();
            copy_out_at(&buffer, HEADER_BYTES, payload as usize, &mut copy);
            sink.record(&bytes, &[&copy]);
        }
        let Transport { rings, memory, .. } = transport;
        let written = u32::try_from(HEADER_BYTES).expect("44") + payload;
        rings[TO_GUEST].give_back(memory, buffer.head, written);
        self.counters.ingress_packets.fetch_add(1, Relaxed);
    }
}

/// Payload that a buffer takes.
fn payload_room(buffer: &Ahead) -> u32 {
    (buffer.bytes - u32::try_from(HEADER_BYTES).expect("44")).min(LARGEST_PAYLOAD)
}

fn copy_in_at(buffer: &Ahead, mut skip: usize, mut bytes: &[u8]) {
    for piece in std::iter::once(&buffer.first).chain(&buffer.rest) {
        let skipped = skip.min(piece.iov_len);
        skip -= skipped;
        let now = bytes.len().min(piece.iov_len - skipped);
        let to = piece.iov_base.cast::<u8>().wrapping_add(skipped);
        // SAFETY: the piece is mapped guest memory, looked up for this buffer while the transport is locked
        // (buffers ahead are forgotten when the memory changes); `bytes` is ours.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, now) };
        bytes = &bytes[now..];
    }
}

/// Copies bytes into pieces of the guest's memory; how many fitted.
pub(super) fn copy_in(pieces: &[libc::iovec], bytes: &[u8]) -> u32 {
    let Some((first, rest)) = pieces.split_first() else {
        return 0;
    };
    let buffer = Ahead {
        head: 0,
        bytes: 0,
        first: *first,
        rest: rest.to_vec(),
    };
    copy_in_at(&buffer, 0, bytes);
    u32::try_from(bytes.len().min(length(pieces))).unwrap_or(u32::MAX)
}

/// Appends bytes of a buffer, from `skip` on, for a capture.
fn copy_out_at(buffer: &Ahead, mut skip: usize, mut bytes: usize, copy: &mut Vec<u8>) {
    for piece in std::iter::once(&buffer.first).chain(&buffer.rest) {
        let skipped = skip.min(piece.iov_len);
        skip -= skipped;
        let now = bytes.min(piece.iov_len - skipped);
        bytes -= now;
        let piece = libc::iovec {
            iov_base: piece.iov_base.cast::<u8>().wrapping_add(skipped).cast(),
            iov_len: now,
        };
        crate::peer::append(copy, &piece, 0);
    }
}
