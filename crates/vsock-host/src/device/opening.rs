//! Connections come to be: asked for by the guest, by a client of the host, or by a sibling.

use std::{os::fd::OwnedFd, sync::atomic::Ordering::Relaxed};

use rustix::{
    event::epoll::EventFlags,
    io::Errno,
    net::{SocketFlags, accept_with},
};
use sandwire_api::vsock::{HOST_CID, VsockClass, VsockRefusal, VsockType};

use super::{
    Client, Context, FIRST_PORT, Flow, MOST_NUMBERS, PEER_FLAGS, Side, Token, Vm,
    from_guest::DIAL_FLAGS, growth::first_promise, to_guest::FIRST_APPETITE,
};
use crate::{
    address::VmKey,
    budget::{LEAST_PROMISE, offer},
    connection::{Connection, Key},
    descriptors,
    dial::{Dial, Progress},
    directory::{Route, Target},
    front_end::{Transport, lock},
    hybrid::{
        callee::Seat,
        handshake::{Asked, Handshake},
    },
    packet::Header,
    peer::{Framing, Peer},
};

/// Clients accepted in one go.
const ACCEPTS: usize = 64;

/// What a new connection is made of.
struct Draft {
    key: Key,
    from_guest: bool,
    class: VsockClass,
    route: Option<Box<Route>>,
    seat: Option<Seat>,
    name: String,
    caller: Option<Box<VmKey>>,
    marked: bool,
}

impl Vm {
    /// The guest asks for a connection.
    pub(super) fn open_from_guest(
        &mut self,
        header: &Header,
        key: Key,
        transport: &Transport,
        context: &mut Context,
    ) {
        let number = match self.try_open(header, key, transport, context) {
            Ok(number) => number,
            Err(reason) => return self.refuse_packet(header, reason, context),
        };
        self.advance(number, context);
        self.settle(number, context);
    }

    fn try_open(
        &mut self,
        header: &Header,
        key: Key,
        transport: &Transport,
        context: &mut Context,
    ) -> Result<u32, VsockRefusal> {
        if key.kind == VsockType::Seqpacket && !transport.has_seqpacket() {
            return Err(VsockRefusal::SeqpacketUnsupported);
        }
        self.take_turn(context)?;
        let route = context
            .directory
            .route(&self.key, key.peer_cid, key.peer_port, key.kind)?;
        let seat = route.seat(context.now)?;
        let dial = Dial::start(&route, key.kind)?;
        let draft = Draft {
            key,
            from_guest: true,
            class: route.class(),
            name: route.peer.clone(),
            caller: None,
            marked: matches!(route.target, Target::LocalVm { .. }),
            route: Some(Box::new(route)),
            seat,
        };
        let number = self.insert(draft, Side::Dialing(Box::new(dial)), context)?;
        if let Some(flow) = self.flows.get_mut(number) {
            flow.connection
                .credit
                .hear(header.buf_alloc, header.fwd_cnt);
        }
        Ok(number)
    }

    /// The guest's limit of connections per second: evenly spaced ones pass, and a second's worth at once.
    fn take_turn(&mut self, context: &Context) -> Result<(), VsockRefusal> {
        let has_turn = self.connects.take(context.now);
        has_turn.then_some(()).ok_or(VsockRefusal::TooFast)
    }

    /// Makes a connection, if the limits allow it.
    fn insert(
        &mut self,
        draft: Draft,
        peer: Side,
        context: &mut Context,
    ) -> Result<u32, VsockRefusal> {
        let most = self.limits.connections.min(MOST_NUMBERS - 1);
        let admits = |caller| self.callers.admits(caller, most);
        if self.flows.len() >= most as usize || !draft.caller.as_deref().is_none_or(admits) {
            return Err(VsockRefusal::TooManyConnections);
        }
        let promise = self.promise(draft.key.kind, draft.caller.is_some(), context)?;
        let Draft {
            key,
            from_guest,
            class,
            route,
            seat,
            name,
            caller,
            marked,
        } = draft;
        if let Some(caller) = &caller {
            self.callers.enter(caller);
        }
        let connection = if from_guest {
            Connection::dialing(promise)
        } else {
            Connection::asking(promise)
        };
        let number = self.flows.insert(Box::new(Flow {
            key,
            connection,
            peer,
            from_guest,
            class,
            route,
            _seat: seat,
            name,
            caller,
            marked,
            egress: 0,
            ingress: 0,
            since: context.now,
            deadline: None,
            reminded: None,
            retry: None,
            in_control: false,
            in_data: false,
            readable: false,
            appetite: FIRST_APPETITE,
            next_message: 0,
            promise,
            counted: 0,
        }));
        self.by_key.insert(key, number);
        let counters = self.counters.class(class);
        counters.connections.fetch_add(1, Relaxed);
        Ok(number)
    }

    /// Bytes that a new connection may have waiting, out of the guest's and of all guests' budget; `called` if a
    /// sibling asks for it.
    fn promise(
        &mut self,
        kind: VsockType,
        called: bool,
        context: &Context,
    ) -> Result<u32, VsockRefusal> {
        let more = u64::from(self.limits.connections).saturating_sub(self.flows.len() as u64);
        let reserved = more.saturating_mul(u64::from(LEAST_PROMISE));
        let wanted = first_promise(kind, self.limits.connection_bytes);
        let ours = offer(self.promisable(called), self.promised, reserved, wanted)
            .ok_or(VsockRefusal::Memory)?;
        let given = context.budget.promise(ours).ok_or(VsockRefusal::Memory)?;
        self.promised += u64::from(given);
        Ok(given)
    }

    /// Goes on with a dial.
    pub(super) fn advance(&mut self, number: u32, context: &mut Context) {
        let Some(flow) = self.flows.get_mut(number) else {
            return;
        };
        let Side::Dialing(dial) = &mut flow.peer else {
            return;
        };
        match dial.advance() {
            Progress::Pending => {
                let token = Token::Flow(self.slot, number);
                if let Err(error) = context.watch(dial.fd(), token, DIAL_FLAGS) {
                    self.cannot_watch(number, error);
                }
            }
            Progress::Done(fd) => {
                let framing = framing(flow.key.kind, flow.marked);
                flow.connection.dialed();
                let counters = self.counters.class(flow.class);
                counters.opened_by_guest.fetch_add(1, Relaxed);
                self.connect(number, fd, framing, context);
            }
            Progress::Failed(reason) => {
                self.counters.refuse(reason);
                flow.connection.reset();
            }
        }
    }

    fn cannot_watch(&mut self, number: u32, error: Errno) {
        tracing::warn!(vm = %self.key, %error, "a connection's descriptor can't be waited for");
        self.counters.refuse(VsockRefusal::Memory);
        if let Some(flow) = self.flows.get_mut(number) {
            flow.connection.reset();
        }
    }

    /// The peer of a connection is there.
    fn connect(&mut self, number: u32, fd: OwnedFd, framing: Framing, context: &Context) {
        let peer = Peer::new(fd, framing);
        let token = Token::Flow(self.slot, number);
        let promise = self
            .flows
            .get(number)
            .map_or(0, |flow| flow.promise as usize);
        let prepared = match framing {
            Framing::Stream => peer.prepare_stream(promise),
            // A longer one than was promised never becomes whole.
            _ => peer.prepare_messages(promise.min(self.limits.message_bytes as usize)),
        };
        if let Err(error) = prepared {
            tracing::debug!(vm = %self.key, %error, "a socket's buffer stays as it is; long messages may be refused");
        }
        let watched = context.watch(peer.fd(), token, PEER_FLAGS);
        if let Some(flow) = self.flows.get_mut(number) {
            flow.peer = Side::Connected(peer);
            // Whatever came before it was waited for.
            flow.readable = true;
        }
        if let Err(error) = watched {
            self.cannot_watch(number, error);
        }
    }

    /// Clients of the host have connected.
    pub fn accept_clients(&mut self, kind: VsockType, context: &mut Context) {
        for _ in 0..ACCEPTS {
            let listener = match kind {
                VsockType::Stream => &self.listeners.stream,
                VsockType::Seqpacket => &self.listeners.seqpacket,
            };
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket = match accept_with(listener, flags) {
                Ok(socket) => socket,
                Err(error) => {
                    let token = match kind {
                        VsockType::Stream => Token::StreamListener(self.slot),
                        VsockType::Seqpacket => Token::SeqpacketListener(self.slot),
                    };
                    return self.not_accepted(error, token, context);
                }
            };
            if descriptors::is_reserved(&socket) {
                self.counters.refuse(VsockRefusal::Memory);
                continue;
            }
            self.make_room_for_client();
            let client = Client {
                handshake: Handshake::new(socket, kind),
                since: context.now,
            };
            let number = self.clients.insert(Box::new(client));
            self.client_is_ready(number, context);
            if let Some(client) = self.clients.get(number) {
                let token = Token::Handshake(self.slot, number);
                let fd = client.handshake.fd();
                if context
                    .watch(
                        fd,
                        token,
                        EventFlags::IN | EventFlags::RDHUP | EventFlags::ET,
                    )
                    .is_err()
                {
                    self.clients.remove(number);
                }
                context
                    .timers
                    .set(context.now + self.limits.handshake_timeout, token.pack());
            }
        }
    }

    /// If too many clients are silent, the one that has been so for longest goes.
    fn make_room_for_client(&mut self) {
        if self.clients.len() < self.limits.handshakes.max(1) as usize {
            return;
        }
        let oldest = self.clients.iter().min_by_key(|(_, client)| client.since);
        if let Some(oldest) = oldest.map(|(number, _)| number) {
            self.clients.remove(oldest);
            self.counters.refuse(VsockRefusal::Handshake);
        }
    }

    /// A client says something of its handshake.
    pub fn client_is_ready(&mut self, number: u32, context: &mut Context) {
        let Some(client) = self.clients.get_mut(number) else {
            return;
        };
        match client.handshake.advance() {
            Asked::Pending => {}
            Asked::Failed => {
                self.clients.remove(number);
                self.counters.refuse(VsockRefusal::Handshake);
            }
            Asked::Connect { port } => {
                let Some(client) = self.clients.remove(number) else {
                    return;
                };
                let kind = client.handshake.kind();
                let socket = client.handshake.into_socket();
                self.connect_to_guest(socket, port, kind, None, context);
            }
        }
    }

    /// A client may have been silent for too long.
    pub fn client_is_due(&mut self, number: u32, context: &mut Context) {
        let timeout = self.limits.handshake_timeout;
        let late = |client: &Client| context.now.saturating_duration_since(client.since) >= timeout;
        if self.clients.get(number).is_some_and(|client| late(client)) {
            self.clients.remove(number);
            self.counters.refuse(VsockRefusal::Handshake);
        }
    }

    /// Asks the guest for a connection, for whoever is at the other end of `socket`: a sibling that calls, or a client
    /// of the host. If it can't be, the socket is closed.
    pub fn connect_to_guest(
        &mut self,
        socket: OwnedFd,
        port: u32,
        kind: VsockType,
        caller: Option<VmKey>,
        context: &mut Context,
    ) {
        if let Err(reason) = self.try_connect(socket, port, kind, caller, context) {
            self.counters.refuse(reason);
        }
        self.serve_to_guest(context);
    }

    fn try_connect(
        &mut self,
        socket: OwnedFd,
        port: u32,
        kind: VsockType,
        caller: Option<VmKey>,
        context: &mut Context,
    ) -> Result<(), VsockRefusal> {
        if self.front_end.is_none() || lock(&self.transport).is_lost() {
            return Err(VsockRefusal::Unreachable);
        }
        if kind == VsockType::Seqpacket && !lock(&self.transport).has_seqpacket() {
            return Err(VsockRefusal::SeqpacketUnsupported);
        }
        let key = self.free_key(port, kind);
        let marked = caller.is_some();
        let draft = Draft {
            key,
            from_guest: false,
            class: if marked {
                VsockClass::GuestToGuest
            } else {
                VsockClass::HostToGuest
            },
            route: None,
            seat: None,
            name: match &caller {
                Some(caller) if caller.tenant == self.key.tenant => caller.lease.to_string(),
                // Another tenant's lease may be called as one's own.
                Some(caller) => caller.to_string(),
                None => "client".to_owned(),
            },
            caller: caller.map(Box::new),
            marked,
        };
        let number = self.insert(draft, Side::Closed, context)?;
        self.connect(number, socket, framing(kind, marked), context);
        self.settle(number, context);
        Ok(())
    }

    /// A key for a connection to that port of the guest, with a port of ours that isn't in use.
    fn free_key(&mut self, guest_port: u32, kind: VsockType) -> Key {
        loop {
            let peer_port = self.next_port;
            self.next_port = FIRST_PORT | self.next_port.wrapping_add(1) & (FIRST_PORT - 1);
            let key = Key {
                guest_port,
                peer_cid: HOST_CID,
                peer_port,
                kind,
            };
            // There are far more ports than connections.
            if !self.by_key.contains_key(&key) {
                return key;
            }
        }
    }
}

fn framing(kind: VsockType, marked: bool) -> Framing {
    match kind {
        VsockType::Stream => Framing::Stream,
        VsockType::Seqpacket if marked => Framing::MarkedMessage,
        VsockType::Seqpacket => Framing::Message,
    }
}
