//! Packets from the guest: each is judged by a private copy of its header; data goes to the peer straight
//! from the guest's memory, many packets of one connection in one call.
//!
//! Every chain goes back to the ring, whatever it held: broken ones at once, those of a batch after the
//! batch was passed on or copied.

use std::{ptr, sync::atomic::Ordering::Relaxed};

use rustix::event::epoll::EventFlags;
use sandwire_api::vsock::{HOST_CID, VsockRefusal, VsockType};

use super::{Context, Scratch, Side, Vm};
use crate::{
    connection::{Key, Verdict},
    front_end::{FROM_GUEST, Transport},
    packet::{HEADER_BYTES, Header, LARGEST_PAYLOAD, Operation, type_from_number},
    peer::{Wrote, length},
    queue::{Direction, Taken},
};

/// Most pieces of a batch; one chain more stays below IOV_MAX.
const BATCH_PIECES: usize = 512;
/// Most bytes of a batch.
const BATCH_BYTES: usize = 256 * 1024;
/// Bytes that make a bulk transfer of what came in one go.
const BULK: usize = 64 * 1024;
/// Resets that may wait to be told; beyond, no more packets are taken from the guest.
const MOST_RESETS: usize = 256;

/// Data packets of one connection that are passed on together.
#[derive(Debug, Default)]
struct Batch {
    /// Whose, and how its packets are addressed.
    flow: Option<(u32, DataAddress)>,
    /// Pieces of [`Scratch::pieces`] that are its.
    pieces: usize,
    /// Their bytes.
    bytes: usize,
}

/// All by which data of one connection is told from other packets: ports, CID, type, operation.
type DataAddress = (u32, u32, u64, u64, u16, u16);

fn data_address(header: &Header) -> DataAddress {
    let Header {
        src_port,
        dst_port,
        src_cid,
        dst_cid,
        kind,
        op,
        ..
    } = *header;
    (src_port, dst_port, src_cid, dst_cid, kind, op)
}

/// The number of streams in a header.
const STREAM: u16 = 1;

/// What to do with a packet after it was judged.
enum Next {
    /// Pass that much data on.
    Data { flow: u32, payload: usize },
    /// Nothing.
    Done,
}

impl Vm {
    /// Takes what the guest has offered. Also answers it.
    pub fn serve_from_guest(&mut self, context: &mut Context) {
        self.locked(|vm, transport| vm.drain(transport, context));
        self.serve_to_guest(context);
        self.check_memory(context);
    }

    /// Whether the guest has offered packets that haven't been taken and may be; for one that is awake.
    pub fn has_packets(&mut self) -> bool {
        self.locked(|vm, transport| {
            // None are while they can't be answered.
            let is_serving = !vm.paused && transport.is_serving();
            is_serving && transport.rings[FROM_GUEST].has_more(&transport.memory)
        })
    }

    /// It kicks again from now on. Whether something has come meanwhile, for which there may be no kick.
    pub fn ask_for_kicks(&mut self) -> bool {
        self.locked(|_, transport| {
            let Transport { rings, memory, .. } = transport;
            rings[FROM_GUEST].is_serving() && rings[FROM_GUEST].sleep(memory)
        })
    }

    fn drain(&mut self, transport: &mut Transport, context: &mut Context) {
        if self.paused || !self.may_serve(transport, context) {
            return;
        }
        self.begin_turn(transport, context);
        let mut scratch = std::mem::take(&mut context.scratch);
        scratch.moved = 0;
        loop {
            transport.rings[FROM_GUEST].wake(&transport.memory);
            let emptied = self.take_packets(transport, context, &mut scratch);
            let Transport { rings, memory, .. } = &mut *transport;
            if !emptied {
                if !self.paused && rings[FROM_GUEST].is_running() {
                    context.again.push(self.slot);
                }
                break;
            }
            // While much is coming, giving others the processor for a moment (the guest, or who reads what
            // it sent) saves a kick and a wake-up for each packet.
            if scratch.moved >= BULK {
                scratch.moved = 0;
                scratch.bulk = true;
                rings[FROM_GUEST].publish(memory);
                rustix::thread::sched_yield();
                if rings[FROM_GUEST].has_more(memory) {
                    continue;
                }
                // The worker looks for more before it sleeps: a kick for each packet would tell it nothing.
                context.awake.add(self.slot);
            }
            if context.awake.contains(self.slot) || !rings[FROM_GUEST].sleep(memory) {
                break;
            }
        }
        context.scratch = scratch;
        let Transport { rings, memory, .. } = transport;
        rings[FROM_GUEST].signal(memory);
    }

    /// Takes packets until there are no more (true), or the turn is over, resets wait or the ring is lost.
    fn take_packets(
        &mut self,
        transport: &mut Transport,
        context: &mut Context,
        scratch: &mut Scratch,
    ) -> bool {
        let before = self.turn.packets;
        let mut batch = Batch::default();
        scratch.pieces.clear();
        let emptied = loop {
            if self.turn.packets == 0 || self.turn.egress_bytes == 0 {
                break false;
            }
            if self.resets.len() >= MOST_RESETS {
                self.paused = true;
                break false;
            }
            let Transport { rings, memory, .. } = &mut *transport;
            match rings[FROM_GUEST].take(memory, Direction::FromGuest, &mut scratch.pieces) {
                Taken::Empty => break true,
                Taken::Lost => {
                    self.lose(&mut rings[FROM_GUEST]);
                    break false;
                }
                Taken::Broken(head) => {
                    self.turn.packets -= 1;
                    self.counters.refuse(VsockRefusal::BadDescriptors);
                    rings[FROM_GUEST].give_back(memory, head, 0);
                }
                Taken::Chain(head) => {
                    self.turn.packets -= 1;
                    self.packet(head, transport, context, scratch, &mut batch);
                }
            }
        };
        let taken = u64::from(before - self.turn.packets);
        self.counters.egress_packets.fetch_add(taken, Relaxed);
        self.pass_on(transport, context, scratch, &mut batch);
        emptied
    }

    /// One packet. Its pieces are those behind the batch's.
    fn packet(
        &mut self,
        head: u16,
        transport: &mut Transport,
        context: &mut Context,
        scratch: &mut Scratch,
        batch: &mut Batch,
    ) {
        let mut bytes = [0; HEADER_BYTES];
        let next = if take_header(&mut scratch.pieces, batch.pieces, &mut bytes) {
            let header = Header::parse(&bytes);
            self.record(&bytes, &header, &scratch.pieces[batch.pieces..]);
            // What the guest sent before must have its effect before this packet has.
            if batch
                .flow
                .is_some_and(|(_, address)| address != data_address(&header))
            {
                let rest = scratch.pieces.split_off(batch.pieces);
                self.pass_on(transport, context, scratch, batch);
                scratch.pieces = rest;
            }
            let there = length(&scratch.pieces[batch.pieces..]);
            match self.judge(&header, there, transport, context) {
                Next::Data { flow, payload } => {
                    let left = &mut self.turn.egress_bytes;
                    *left = left.saturating_sub(payload);
                    let end = trim(&mut scratch.pieces, batch.pieces, payload);
                    scratch.pieces.truncate(end);
                    Some((flow, header))
                }
                Next::Done => None,
            }
        } else {
            self.counters.refuse(VsockRefusal::Malformed);
            None
        };
        match next {
            Some((flow, header)) if header.kind == STREAM => {
                batch.flow = Some((flow, data_address(&header)));
                batch.bytes += header.len as usize;
                scratch.moved += header.len as usize;
                batch.pieces = scratch.pieces.len();
                scratch.heads.push(head);
                if batch.pieces >= BATCH_PIECES || batch.bytes >= BATCH_BYTES {
                    self.pass_on(transport, context, scratch, batch);
                }
                return;
            }
            Some((flow, header)) => {
                self.add_to_message(flow, header.flags, &scratch.pieces[batch.pieces..], context);
            }
            None => {}
        }
        scratch.pieces.truncate(batch.pieces);
        let Transport { rings, memory, .. } = transport;
        rings[FROM_GUEST].give_back(memory, head, 0);
    }

    fn record(&self, bytes: &[u8; HEADER_BYTES], header: &Header, pieces: &[libc::iovec]) {
        let Some(sink) = &self.capture else {
            return;
        };
        let mut copy = Vec::new();
        let mut left = header.len.min(LARGEST_PAYLOAD) as usize;
        for piece in pieces {
            let now = piece.iov_len.min(left);
            left -= now;
            let piece = libc::iovec {
                iov_base: piece.iov_base,
                iov_len: now,
            };
            crate::peer::append(&mut copy, &piece, 0);
        }
        sink.record(bytes, &[&copy]);
    }

    /// Decides what a packet is, with `there` bytes behind its header, and does all but pass data on.
    fn judge(
        &mut self,
        header: &Header,
        there: usize,
        transport: &mut Transport,
        context: &mut Context,
    ) -> Next {
        let (operation, key) = match self.address(header, there) {
            Ok(known) => known,
            Err(reason) => {
                self.refuse_packet(header, reason, context);
                return Next::Done;
            }
        };
        let known = self.by_key.get(&key).copied();
        let Some((number, flow)) =
            known.and_then(|number| Some((number, self.flows.get_mut(number)?)))
        else {
            match operation {
                Operation::Request => self.open_from_guest(header, key, transport, context),
                Operation::Reset => {}
                _ => self.refuse_packet(header, VsockRefusal::NoConnection, context),
            }
            return Next::Done;
        };
        flow.connection
            .credit
            .hear(header.buf_alloc, header.fwd_cnt);
        let payload = if operation == Operation::ReadWrite {
            header.len
        } else {
            0
        };
        let opening = flow.connection.is_opening();
        match flow.connection.from_guest(operation, header.flags, payload) {
            Verdict::Refuse(reason) => self.counters.refuse(reason),
            Verdict::Accept if operation == Operation::ReadWrite => {
                flow.egress += u64::from(payload);
                let counters = self.counters.class(flow.class);
                counters.egress_bytes.fetch_add(u64::from(payload), Relaxed);
                if payload == 0 && key.kind == VsockType::Stream {
                    // It may have told of credit.
                    self.settle(number, context);
                    return Next::Done;
                }
                if flow.readable {
                    self.queue(number);
                }
                return Next::Data {
                    flow: number,
                    payload: payload as usize,
                };
            }
            Verdict::Accept if operation == Operation::Response && opening => {
                self.accepted_by_guest(number);
            }
            Verdict::Accept | Verdict::Discard => {}
        }
        self.settle(number, context);
        Next::Done
    }

    /// Whether the packet's addresses and lengths make sense; its operation and connection.
    fn address(&self, header: &Header, there: usize) -> Result<(Operation, Key), VsockRefusal> {
        if header.src_cid != u64::from(self.cid) {
            return Err(VsockRefusal::ForgedSource);
        }
        let peer_cid = peer_cid(header.dst_cid, self.cid).ok_or(VsockRefusal::Cid)?;
        let operation = Operation::from_number(header.op).ok_or(VsockRefusal::Malformed)?;
        let kind = type_from_number(header.kind).ok_or(VsockRefusal::Malformed)?;
        let key = Key {
            guest_port: header.src_port,
            peer_cid,
            peer_port: header.dst_port,
            kind,
        };
        if header.len as usize > there || header.len > LARGEST_PAYLOAD {
            return Err(VsockRefusal::Malformed);
        }
        Ok((operation, key))
    }

    /// Counts a packet that is refused, and answers it with RST, unless it is one.
    pub(super) fn refuse_packet(
        &mut self,
        header: &Header,
        reason: VsockRefusal,
        context: &mut Context,
    ) {
        self.counters.refuse(reason);
        if header.op == Operation::Reset as u16 {
            return;
        }
        self.resets.push_back(header.reset());
        // A packet that lies about its length belongs to a connection all the same: that is over.
        if reason == VsockRefusal::Malformed
            && let (Ok(peer_cid), Some(kind)) =
                (u32::try_from(header.dst_cid), type_from_number(header.kind))
        {
            let (guest_port, peer_port) = (header.src_port, header.dst_port);
            let key = Key {
                guest_port,
                peer_cid,
                peer_port,
                kind,
            };
            if let Some(&number) = self.by_key.get(&key) {
                // The guest is told by the reset above.
                if let Some(flow) = self.flows.get_mut(number) {
                    flow.connection.from_guest(Operation::Reset, 0, 0);
                    flow.peer = Side::Closed;
                }
                self.settle(number, context);
            }
        }
    }

    /// Passes a batch on, and gives its chains back.
    fn pass_on(
        &mut self,
        transport: &mut Transport,
        context: &mut Context,
        scratch: &mut Scratch,
        batch: &mut Batch,
    ) {
        let Some((number, _)) = batch.flow.take() else {
            return;
        };
        if let Some(flow) = self.flows.get_mut(number)
            && let Side::Connected(peer) = &mut flow.peer
        {
            match peer.write(&scratch.pieces[..batch.pieces], &mut scratch.spare) {
                Wrote::Bytes(passed) => {
                    flow.connection.credit.forward(passed);
                    self.grow(number, context);
                }
                Wrote::Closed | Wrote::TooMany | Wrote::TooLong => self.stop_passing(number),
                Wrote::Fault => {
                    self.counters.refuse(VsockRefusal::BadDescriptors);
                    flow.connection.reset();
                }
            }
        }
        let Transport { rings, memory, .. } = transport;
        for head in scratch.heads.drain(..) {
            rings[FROM_GUEST].give_back(memory, head, 0);
        }
        scratch.pieces.clear();
        *batch = Batch::default();
        self.settle(number, context);
    }

    fn add_to_message(
        &mut self,
        number: u32,
        bits: u32,
        pieces: &[libc::iovec],
        context: &mut Context,
    ) {
        let most = self.limits.message_bytes as usize;
        let Some(flow) = self.flows.get_mut(number) else {
            return;
        };
        let Side::Connected(peer) = &mut flow.peer else {
            return;
        };
        let whole = bits & crate::packet::flags::END_OF_MESSAGE != 0;
        let so_far = peer.assembled() + length(pieces);
        // A message that fills the whole credit and isn't at its end would wait for ever.
        let stuck = !whole && so_far >= flow.connection.credit.buf_alloc() as usize;
        if so_far > most || stuck {
            self.counters.refuse(VsockRefusal::MessageTooLong);
            flow.connection.reset();
        } else {
            match peer.write_message(pieces, bits) {
                Wrote::Bytes(passed) => {
                    let held = u32::try_from(peer.assembled()).expect("credit bounds it");
                    flow.connection.credit.forward(passed);
                    flow.connection.credit.hold(held);
                }
                Wrote::Closed => self.stop_passing(number),
                Wrote::TooMany => {
                    self.counters.refuse(VsockRefusal::Memory);
                    flow.connection.reset();
                }
                Wrote::TooLong => {
                    self.counters.refuse(VsockRefusal::MessageTooLong);
                    flow.connection.reset();
                }
                Wrote::Fault => flow.connection.reset(),
            }
        }
        self.settle(number, context);
    }

    /// The guest has accepted a connection of the host: the client is told.
    fn accepted_by_guest(&mut self, number: u32) {
        let Some(flow) = self.flows.get_mut(number) else {
            return;
        };
        let Side::Connected(peer) = &flow.peer else {
            return;
        };
        let counters = self.counters.class(flow.class);
        counters.opened_by_peers.fetch_add(1, Relaxed);
        if crate::hybrid::handshake::answer(peer.fd(), flow.key.peer_port).is_err() {
            // It went away meanwhile; its end is read like any other.
            flow.readable = true;
        }
    }
}

/// Readiness that a dial is waited for with.
pub(super) const DIAL_FLAGS: EventFlags = EventFlags::IN;

/// Whether a guest may name that CID as a peer at all: not 0, not 1, not more than 32 bits, not itself.
fn peer_cid(cid: u64, own: u32) -> Option<u32> {
    let cid = u32::try_from(cid).ok()?;
    (cid >= HOST_CID && cid != own && cid != u32::MAX).then_some(cid)
}

/// Cuts the pieces from `start` on to `bytes` in all; where they end then.
fn trim(pieces: &mut [libc::iovec], start: usize, mut bytes: usize) -> usize {
    for (index, piece) in pieces.iter_mut().enumerate().skip(start) {
        if bytes == 0 {
            return index;
        }
        piece.iov_len = piece.iov_len.min(bytes);
        bytes -= piece.iov_len;
    }
    pieces.len()
}

/// Copies the header out of the pieces from `start` on, and takes it off them. False if they are shorter;
/// what is left of them then is of no use.
fn take_header(
    pieces: &mut Vec<libc::iovec>,
    start: usize,
    bytes: &mut [u8; HEADER_BYTES],
) -> bool {
    let (mut filled, mut used) = (0, 0);
    for piece in &mut pieces[start..] {
        let now = piece.iov_len.min(HEADER_BYTES - filled);
        let from = piece.iov_base.cast::<u8>();
        // SAFETY: the piece is mapped guest memory, looked up while the transport is locked; `bytes` is ours
        // and has room. The guest may write at the same time: the copy is then any mix, and only the copy
        // is looked at.
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr().add(filled), now) };
        filled += now;
        piece.iov_base = from.wrapping_add(now).cast();
        piece.iov_len -= now;
        used += usize::from(piece.iov_len == 0);
        if filled == HEADER_BYTES {
            break;
        }
    }
    // Linux gives the header a descriptor of its own: it shouldn't take a place in the batch.
    pieces.drain(start..start + used);
    filled == HEADER_BYTES
}
