//! The vsock device of one guest: its connections, and what waits to be told to it.
//!
//! [`from_guest`] takes packets out of the guest's ring and passes their data on; [`to_guest`] fills the
//! guest's ring with what the device has to say and with data of the peers; [`opening`] makes connections,
//! both ways. All of them end in [`Vm::settle`], which looks at a connection after something happened to it
//! and does what its state asks for.
//!
//! Nothing here waits. What can't be done now stays where it is (in the guest's ring, in a socket) until an
//! event says that it can: a kick, or a descriptor that became ready.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use rustix::{event::epoll::EventFlags, io::Errno};
use sandwire_api::vsock::{VsockClass, VsockConnection, VsockRefusal};
use sandwire_rate::{Allowance, Share};

use crate::{
    address::VmKey,
    callers::Callers,
    capture::Sink,
    connection::{Connection, Key},
    dial::Dial,
    directory::Route,
    front_end::{self, FrontEnd, SharedTransport, Transport, lock},
    hybrid::{callee::Seat, handshake::Handshake},
    limits::Limits,
    packet::Header,
    peer::{Peer, Wrote},
    slab::Slab,
    statistics::VmCounters,
    worker::VmSetup,
};

mod awake;
mod context;
mod from_guest;
mod growth;
mod listeners;
mod opening;
mod to_guest;
mod token;
mod turn;
mod vmm;

pub use awake::Awake;
pub use context::{Context, Scratch};
use listeners::Listeners;
pub use token::{MOST_NUMBERS, Token};
use turn::{LateTurn, Turn};

/// Readiness of a connected peer that is always waited for, edge-triggered.
const PEER_FLAGS: EventFlags = EventFlags::IN
    .union(EventFlags::RDHUP)
    .union(EventFlags::ET);

/// How soon something is tried again that failed for want of memory.
const RETRY: Duration = Duration::from_millis(100);

/// How soon something goes on that has had its turn: not before all others have had theirs.
const NEXT_ROUND: Duration = Duration::from_nanos(1);

/// A connection with its peer.
#[derive(Debug)]
struct Flow {
    key: Key,
    connection: Connection,
    peer: Side,
    from_guest: bool,
    class: VsockClass,
    /// Where it leads, if the guest opened it.
    route: Option<Box<Route>>,
    /// What it has of a called guest whose VMM owns its device; held, not looked at.
    _seat: Option<Seat>,
    /// What the other side is called.
    name: String,
    /// The sibling that called, if one did.
    caller: Option<Box<VmKey>>,
    /// Whether messages of the peer carry marks: siblings.
    marked: bool,
    /// Bytes from the guest, and to it.
    egress: u64,
    ingress: u64,
    since: Instant,
    /// When it must have got further.
    deadline: Option<Instant>,
    /// When the next reminder comes.
    reminded: Option<Instant>,
    /// When what waits for the peer is tried again, if no event may say when that is of use.
    retry: Option<Instant>,
    /// Whether it is in [`Vm::control`] and [`Vm::data`].
    in_control: bool,
    in_data: bool,
    /// Whether the peer may have something to read.
    readable: bool,
    /// Bytes to ask the peer for at once.
    appetite: u32,
    /// Bytes of the peer's next message, if it had to wait for room.
    next_message: u32,
    /// What it holds of the budgets.
    promise: u32,
    /// Bytes that [`VmCounters::buffered_bytes`] has of it.
    counted: u64,
}

/// The other side of a connection.
#[derive(Debug)]
enum Side {
    Dialing(Box<Dial>),
    Connected(Peer),
    /// Closed; the guest is still to be told.
    Closed,
}

impl Flow {
    fn has_backlog(&self) -> bool {
        matches!(&self.peer, Side::Connected(peer) if peer.has_backlog())
    }
}

/// A client that hasn't said yet where to.
#[derive(Debug)]
struct Client {
    handshake: Handshake,
    since: Instant,
}

/// A guest.
#[derive(Debug)]
pub struct Vm {
    key: VmKey,
    /// Its number in the worker.
    slot: u32,
    cid: u32,
    limits: Limits,
    counters: Arc<VmCounters>,
    transport: SharedTransport,
    front_end: Option<FrontEnd>,
    listeners: Listeners,
    flows: Slab<Box<Flow>>,
    by_key: HashMap<Key, u32>,
    callers: Callers,
    clients: Slab<Box<Client>>,
    /// Flows that have something to tell, and flows whose peer has data for the guest. Each once.
    control: VecDeque<u32>,
    data: VecDeque<u32>,
    /// Resets for packets without a connection.
    resets: VecDeque<Header>,
    /// Bytes promised to its connections.
    promised: u64,
    /// How often a connection may be opened.
    connects: Allowance,
    next_port: u32,
    capture: Option<Arc<Sink>>,
    /// Whether the guest's ring for packets to it has been found empty, so that its kick matters.
    starved: bool,
    /// Whether its packets aren't taken until resets have been told.
    paused: bool,
    turn: Turn,
    late: LateTurn,
    /// What is known of a run before this one.
    history: vmm::History,
}

/// First port for connections that the host opens, as with Firecracker.
const FIRST_PORT: u32 = 1 << 30;

impl Vm {
    /// A guest whose VMM hasn't connected yet.
    ///
    /// # Errors
    /// When a socket can't be waited for: which one, and why.
    pub fn new(
        setup: VmSetup,
        slot: u32,
        context: &Context,
    ) -> Result<Self, (&'static str, Errno)> {
        let VmSetup {
            key,
            cid,
            limits,
            vhost_listener,
            stream_listener,
            seqpacket_listener,
            counters,
        } = setup;
        let listeners = Listeners {
            vmm: vhost_listener,
            stream: stream_listener,
            seqpacket: seqpacket_listener,
        };
        if let Err(error) = listeners.watch(slot, context) {
            listeners.close(context);
            return Err(error);
        }
        let connects = Share::per_second(limits.connects_per_second);
        let connects = Allowance::new(connects, context.now);
        let transport = Transport::of(&key, cid, &context.bell, context.disposal.for_another());
        Ok(Self {
            key,
            slot,
            cid,
            limits,
            counters,
            transport: front_end::share(transport),
            front_end: None,
            listeners,
            flows: Slab::default(),
            by_key: HashMap::new(),
            callers: Callers::default(),
            clients: Slab::default(),
            control: VecDeque::new(),
            data: VecDeque::new(),
            resets: VecDeque::new(),
            promised: 0,
            connects,
            next_port: FIRST_PORT,
            capture: None,
            starved: false,
            paused: false,
            turn: Turn::default(),
            late: LateTurn::default(),
            history: vmm::History::default(),
        })
    }

    /// Who it is.
    #[must_use]
    pub fn key(&self) -> &VmKey {
        &self.key
    }

    /// From now on, packets are recorded there, or nowhere.
    pub fn set_capture(&mut self, sink: Option<Arc<Sink>>) {
        self.capture = sink;
    }

    /// What a peer's descriptor, or a dial's, is ready for.
    pub fn flow_is_ready(&mut self, number: u32, events: EventFlags, context: &mut Context) {
        let Some(flow) = self.flows.get_mut(number) else {
            return;
        };
        match &mut flow.peer {
            Side::Dialing(_) => self.advance(number, context),
            Side::Connected(_) => {
                self.peer_is_ready(number, events, context);
            }
            Side::Closed => {}
        }
        self.settle(number, context);
        self.serve_to_guest(context);
    }

    fn peer_is_ready(&mut self, number: u32, events: EventFlags, context: &mut Context) {
        let Some(flow) = self.flows.get_mut(number) else {
            return;
        };
        let Side::Connected(peer) = &flow.peer else {
            return;
        };
        let events = peer.confirm(events);
        let closed = events.intersects(EventFlags::HUP | EventFlags::ERR);
        flow.readable |= closed || events.intersects(EventFlags::IN | EventFlags::RDHUP);
        if closed {
            // Both directions are over. Before the guest has accepted, there is no sense in asking it.
            if flow.connection.is_opening() {
                flow.connection.reset();
            }
            self.stop_passing(number);
        } else if events.contains(EventFlags::OUT) {
            self.flush(number, context);
        }
    }

    /// The peer takes nothing more: what waits for it is given up.
    fn stop_passing(&mut self, number: u32) {
        let Some(flow) = self.flows.get_mut(number) else {
            return;
        };
        if let Side::Connected(peer) = &mut flow.peer {
            peer.discard();
        }
        let waiting = flow.connection.credit.waiting();
        flow.connection.credit.forward(waiting);
        flow.connection.peer_stopped_receiving();
    }

    /// Passes on what waits for a peer that has become writable.
    fn flush(&mut self, number: u32, context: &mut Context) {
        let turn = self.late.left(context.round);
        let Some(flow) = self.flows.get_mut(number) else {
            return;
        };
        let Side::Connected(peer) = &mut flow.peer else {
            return;
        };
        match peer.flush(turn, &mut context.scratch.spare) {
            Wrote::Bytes(passed) => {
                flow.connection.credit.forward(passed);
                if !peer.became_writable(passed != 0) {
                    peer.waits_for_room = false;
                    let token = Token::Flow(self.slot, number);
                    let _ = context.watch(peer.fd(), token, PEER_FLAGS);
                }
                self.grow(number, context);
            }
            Wrote::TooLong => {
                self.counters.refuse(VsockRefusal::MessageTooLong);
                flow.connection.reset();
            }
            _ => self.stop_passing(number),
        }
    }

    /// Does what the state of a connection asks for. Called after anything that happened to it.
    fn settle(&mut self, number: u32, context: &mut Context) {
        let Some(flow) = self.flows.get_mut(number) else {
            return;
        };
        let connection = &flow.connection;
        if connection.peer_is_done() {
            flow.peer = Side::Closed;
        }
        let backlog = flow.has_backlog();
        if let Side::Connected(peer) = &mut flow.peer
            && (connection.is_established() || connection.is_gone())
        {
            peer.shut(connection.shut_peer(backlog));
        }
        if connection.is_gone() && !(backlog && connection.is_lingering()) {
            return self.forget(number, context);
        }
        if connection.is_gone() && self.by_key.get(&flow.key) == Some(&number) {
            // Its ports are free for the guest's next connection.
            self.by_key.remove(&flow.key);
        }
        let mut buffered = 0;
        if let Side::Connected(peer) = &mut flow.peer {
            if backlog && !peer.waits_for_room {
                peer.waits_for_room = true;
                let token = Token::Flow(self.slot, number);
                let _ = context.watch(peer.fd(), token, PEER_FLAGS | EventFlags::OUT);
            }
            if backlog && !peer.is_full && flow.retry.is_none() {
                let pause = match peer.is_out_of_turn {
                    true => NEXT_ROUND,
                    false => RETRY,
                };
                let when = context.now + pause;
                flow.retry = Some(when);
                let token = Token::Flow(self.slot, number);
                context.timers.set(when, token.pack());
            }
            buffered = peer.buffered() as u64;
        }
        let more = buffered.wrapping_sub(flow.counted);
        self.counters.buffered_bytes.fetch_add(more, Relaxed);
        flow.counted = buffered;
        self.queue(number);
        self.set_deadline(number, context);
    }

    /// Puts a flow where it will be served, if it has something for the guest.
    fn queue(&mut self, number: u32) {
        let Some(flow) = self.flows.get_mut(number) else {
            return;
        };
        if let Side::Connected(peer) = &flow.peer
            && flow.connection.may_read_peer()
            && (flow.readable || peer.outgoing.is_some())
        {
            let room = flow.has_room();
            flow.connection.set_starving(!room);
            if room && !flow.in_data {
                flow.in_data = true;
                self.data.push_back(number);
            }
        }
        let backlog = flow.has_backlog();
        if !flow.in_control && flow.connection.next_packet(backlog).is_some() {
            flow.in_control = true;
            self.control.push_back(number);
        }
    }

    fn set_deadline(&mut self, number: u32, context: &mut Context) {
        let Some(flow) = self.flows.get_mut(number) else {
            return;
        };
        let limit = if flow.connection.is_opening() {
            self.limits.connect_timeout
        } else if flow.connection.is_closing() && !flow.has_backlog() {
            // Else it is the reader of the host who is awaited, and gets what was sent however long that takes.
            self.limits.shutdown_timeout
        } else {
            flow.deadline = None;
            return;
        };
        let deadline = *flow.deadline.get_or_insert(context.now + limit);
        // One for its opening may come too late for its end.
        if flow.reminded.is_none_or(|when| deadline < when) {
            flow.reminded = Some(deadline);
            context
                .timers
                .set(deadline, Token::Flow(self.slot, number).pack());
        }
    }

    /// A reminder of a flow is due.
    pub fn flow_is_due(&mut self, number: u32, context: &mut Context) {
        let Some(flow) = self.flows.get_mut(number) else {
            return;
        };
        flow.reminded = flow.reminded.filter(|when| *when > context.now);
        if flow.retry.is_some_and(|when| when <= context.now) {
            flow.retry = None;
            self.flush(number, context);
            self.settle(number, context);
            self.serve_to_guest(context);
        }
        let Some(flow) = self.flows.get_mut(number) else {
            return;
        };
        match flow.deadline {
            Some(deadline) if deadline <= context.now => {
                flow.deadline = None;
                let opening = flow.connection.is_opening();
                flow.connection.reset();
                if opening {
                    self.counters.refuse(VsockRefusal::TimedOut);
                }
                self.settle(number, context);
                self.serve_to_guest(context);
            }
            _ => self.set_deadline(number, context),
        }
    }

    /// Removes a flow and gives back what it held.
    fn forget(&mut self, number: u32, context: &Context) {
        let Some(flow) = self.flows.remove(number) else {
            return;
        };
        if self.by_key.get(&flow.key) == Some(&number) {
            self.by_key.remove(&flow.key);
        }
        self.unqueue(number, &flow);
        if self.flows.is_empty() {
            self.by_key = HashMap::new();
        }
        if let Some(caller) = &flow.caller {
            self.callers.leave(caller);
        }
        let counters = self.counters.class(flow.class);
        counters.connections.fetch_sub(1, Relaxed);
        self.counters
            .buffered_bytes
            .fetch_sub(flow.counted, Relaxed);
        self.promised -= u64::from(flow.promise);
        context.budget.release(flow.promise.into());
    }

    /// The guest's policy is another: what it opened and may not reach any more is reset, and gets nothing more of what
    /// it had sent.
    pub fn policy_changed(&mut self, context: &mut Context) {
        for number in self.flows.numbers() {
            let Some(flow) = self.flows.get_mut(number) else {
                continue;
            };
            let Some(route) = &flow.route else {
                continue;
            };
            if flow.connection.peer_is_done() {
                // It is being reset already, and has been counted.
                continue;
            }
            let Key {
                peer_cid,
                peer_port,
                kind,
                ..
            } = flow.key;
            let now = context
                .directory
                .route(&self.key, peer_cid, peer_port, kind);
            if !now.is_ok_and(|now| now.same(route)) {
                flow.connection.reset();
                // Also if the guest has left, and only what it had sent is still passed on.
                flow.peer = Side::Closed;
                self.counters.refuse(VsockRefusal::Policy);
                self.settle(number, context);
            }
        }
        self.serve_to_guest(context);
    }

    /// Its connections.
    pub fn list(&self, now: Instant) -> impl Iterator<Item = VsockConnection> {
        self.flows.iter().map(move |(_, flow)| {
            let Flow {
                key, connection, ..
            } = flow.as_ref();
            VsockConnection {
                lease: self.key.lease.clone(),
                owner_uid: self.key.tenant,
                socket_type: key.kind,
                from_guest: flow.from_guest,
                guest_cid: self.cid,
                guest_port: Some(key.guest_port),
                peer_cid: key.peer_cid,
                peer_port: key.peer_port,
                peer: flow.name.clone(),
                state: connection.state(),
                egress_bytes: flow.egress,
                ingress_bytes: flow.ingress,
                peer_credit: Some(connection.credit.may_send()),
                own_credit: Some(connection.credit.guest_may_send()),
                queued_bytes: u64::from(connection.credit.waiting()),
                queued_ingress_bytes: match &flow.peer {
                    Side::Connected(peer) => peer.waiting_for_guest(),
                    Side::Dialing(_) | Side::Closed => None,
                },
                age_milliseconds: u64::try_from(
                    now.saturating_duration_since(flow.since).as_millis(),
                )
                .unwrap_or(u64::MAX),
            }
        })
    }

    /// Ends everything of this guest, also what it sent and nobody has read yet.
    pub fn close(mut self, context: &mut Context) {
        self.disconnect_vmm(context);
        for number in self.flows.numbers() {
            self.forget(number, context);
        }
        self.listeners.close(context);
    }

    /// The header of a packet to the guest on a connection, with the latest word on credit.
    fn header(&mut self, number: u32, op: crate::packet::Operation, bits: u32) -> Option<Header> {
        let cid = self.cid;
        let flow = self.flows.get_mut(number)?;
        let (buf_alloc, fwd_cnt) = flow.connection.credit.tell();
        Some(Header {
            src_cid: u64::from(flow.key.peer_cid),
            dst_cid: u64::from(cid),
            src_port: flow.key.peer_port,
            dst_port: flow.key.guest_port,
            len: 0,
            kind: crate::packet::type_number(flow.key.kind),
            op: op as u16,
            flags: bits,
            buf_alloc,
            fwd_cnt,
        })
    }

    fn locked<T>(&mut self, work: impl FnOnce(&mut Self, &mut Transport) -> T) -> T {
        let transport = Arc::clone(&self.transport);
        let mut transport = lock(&transport);
        work(self, &mut transport)
    }
}

#[cfg(test)]
mod tests;
