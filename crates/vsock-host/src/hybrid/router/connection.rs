//! What becomes of a guest's connection: accepted, dialled, relayed, over.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};

use rustix::{
    io::Errno,
    net::{SocketFlags, accept_with},
};
use sandwire_api::vsock::{
    HOST_CID, VsockClass, VsockConnection, VsockRefusal, VsockState, VsockType,
};

use super::{Entry, Router, Vm, watch::Watch};
use crate::{
    address::VmKey,
    budget::Budget,
    capture::Sink,
    descriptors,
    dial::{Dial, Progress},
    directory::Route,
    hybrid::{
        callee::Seat,
        packets::{Operation, Packets},
        pipe::PipePool,
        relay::{Carrier, Direction, Relay, Turn, WIDE_BYTES},
    },
    limits::Limits,
    listener::{ACCEPT_PAUSE, is_callers_own},
    readiness::{Interest, Ready},
    statistics::VmCounters,
};

/// The guest's ports in captures and lists count from here, where Linux has its own unnamed ones too.
const FIRST_GUEST_PORT: u32 = 1 << 30;

/// A guest's connection to one of its ports on CID 2.
pub(super) struct Connection {
    pub(super) vm: VmKey,
    route: Route,
    /// What it has of a called guest whose VMM owns its device; held, not looked at.
    _seat: Option<Seat>,
    packets: Packets,
    begun: Instant,
    pub(super) stage: Stage,
}

pub(super) enum Stage {
    Dialing {
        guest: OwnedFd,
        dial: Dial,
        deadline: Instant,
    },
    Relaying {
        relay: Relay,
        /// Whether it is in the queue for a turn.
        queued: bool,
        watch: Watch,
    },
    /// Between the two, and after the end.
    Over,
}

impl Router {
    pub(super) fn ready(&mut self, ready: Ready) {
        let number = ready.token / 2;
        match self.entries.get_mut(&number) {
            Some(Entry::Listener { .. }) => self.accept(number),
            Some(Entry::Connection(connection)) => match &mut connection.stage {
                Stage::Dialing { .. } => self.advance(number),
                Stage::Relaying {
                    relay,
                    queued,
                    watch,
                } => {
                    watch.heard(&self.poller, relay, number, ready);
                    relay.ready(usize::from(ready.token % 2 == 1), ready);
                    if !std::mem::replace(queued, true) {
                        self.run.push(&connection.vm, number);
                    }
                }
                Stage::Over => {}
            },
            // It ended earlier in the same batch of events.
            None => {}
        }
    }

    fn accept(&mut self, number: u64) {
        loop {
            let Some(Entry::Listener { vm, port, socket }) = self.entries.get(&number) else {
                return;
            };
            let accepts = self.vms.get_mut(vm).map(|vm| &mut vm.accepts);
            if !accepts.is_some_and(|accepts| accepts.take(self.round)) {
                return;
            }
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match accept_with(socket, flags) {
                Ok(guest) => {
                    let (vm, port) = (vm.clone(), *port);
                    self.admit(&vm, port, guest);
                }
                Err(Errno::AGAIN) => return,
                Err(error) if is_callers_own(error) => {}
                Err(_) => {
                    let _ = self.poller.remove(socket);
                    let at = Instant::now() + ACCEPT_PAUSE;
                    self.deadlines.insert((at, number));
                    return;
                }
            }
        }
    }

    /// Begins a connection, if the guest may have one more. Closing its socket is the refusal.
    fn admit(&mut self, key: &VmKey, port: u32, guest: OwnedFd) {
        let number = self.number();
        let Some(vm) = self.vms.get_mut(key) else {
            return;
        };
        let limits = &vm.setup.limits;
        let now = Instant::now();
        let guest_port = FIRST_GUEST_PORT.wrapping_add(vm.next_port);
        vm.next_port = vm.next_port.wrapping_add(1);
        let mut packets = Packets::new(vm.setup.cid, guest_port, port, limits.connection_bytes);
        if let Some(sink) = &vm.sink {
            packets.record(sink, Direction::Egress, Operation::Request, &[]);
        }
        let begun = if vm.connections.len() >= limits.connections as usize {
            Err(VsockRefusal::TooManyConnections)
        } else if !vm.connects.take(now) {
            Err(VsockRefusal::TooFast)
        } else if descriptors::is_reserved(&guest) {
            Err(VsockRefusal::Memory)
        } else {
            self.directory
                .route(key, HOST_CID, port, VsockType::Stream)
                .and_then(|route| {
                    let seat = route.seat(now)?;
                    Ok((Dial::start(&route, VsockType::Stream)?, route, seat))
                })
        };
        let (dial, route, seat) = match begun {
            Ok(begun) => begun,
            Err(refusal) => {
                vm.setup.counters.refuse(refusal);
                reset(&mut packets, vm.sink.as_deref());
                return;
            }
        };
        let deadline = now + limits.connect_timeout;
        vm.connections.insert(number);
        let counters = vm.setup.counters.class(route.class());
        counters.connections.fetch_add(1, Relaxed);
        self.deadlines.insert((deadline, number));
        let connection = Connection {
            vm: key.clone(),
            route,
            _seat: seat,
            packets,
            begun: now,
            stage: Stage::Dialing {
                guest,
                dial,
                deadline,
            },
        };
        self.entries
            .insert(number, Entry::Connection(Box::new(connection)));
        self.advance(number);
        self.watch_dial(number);
    }

    /// Has the dial reported when it can go on, if it has not come to an end at once.
    fn watch_dial(&mut self, number: u64) {
        let Some(Entry::Connection(connection)) = self.entries.get(&number) else {
            return;
        };
        if let Stage::Dialing { dial, .. } = &connection.stage
            && self
                .poller
                .add(dial.fd(), number * 2, Interest::READ)
                .is_err()
        {
            self.refuse(number, VsockRefusal::Memory);
        }
    }

    fn advance(&mut self, number: u64) {
        let Some(Entry::Connection(connection)) = self.entries.get_mut(&number) else {
            return;
        };
        let Stage::Dialing { dial, .. } = &mut connection.stage else {
            return;
        };
        match dial.advance() {
            Progress::Pending => {}
            Progress::Done(peer) => self.join(number, peer),
            Progress::Failed(refusal) => self.refuse(number, refusal),
        }
    }

    /// Joins the guest's socket and the one that was dialled.
    fn join(&mut self, number: u64, peer: OwnedFd) {
        let Some(Entry::Connection(connection)) = self.entries.get_mut(&number) else {
            return;
        };
        let stage = std::mem::replace(&mut connection.stage, Stage::Over);
        let Stage::Dialing {
            guest, deadline, ..
        } = stage
        else {
            return;
        };
        self.deadlines.remove(&(deadline, number));
        let relay = Relay::new(guest, peer);
        let Some(watch) = Watch::begin(&self.poller, &relay, number) else {
            self.refuse(number, VsockRefusal::Memory);
            return;
        };
        connection.stage = Stage::Relaying {
            relay,
            queued: true,
            watch,
        };
        if let Some(vm) = self.vms.get(&connection.vm) {
            let counters = vm.setup.counters.class(connection.route.class());
            counters.opened_by_guest.fetch_add(1, Relaxed);
            if let Some(sink) = &vm.sink {
                let packets = &mut connection.packets;
                packets.record(sink, Direction::Ingress, Operation::Response, &[]);
            }
        }
        self.run.push(&connection.vm, number);
    }

    /// Ends dials whose time is over, and lets listeners try again that had to pause.
    pub(super) fn pass_deadlines(&mut self, now: Instant) {
        while let Some((at, number)) = self.deadlines.first().copied()
            && at <= now
        {
            self.deadlines.remove(&(at, number));
            match self.entries.get(&number) {
                Some(Entry::Connection(_)) => self.refuse(number, VsockRefusal::TimedOut),
                Some(Entry::Listener { socket, .. })
                    if self.poller.add(socket, number * 2, Interest::READ).is_err() =>
                {
                    self.deadlines.insert((now + ACCEPT_PAUSE, number));
                }
                Some(Entry::Listener { .. }) | None => {}
            }
        }
    }

    /// Gives a relay one turn. How many bytes that moved.
    pub(super) fn turn(&mut self, number: u64) -> u64 {
        let Some(Entry::Connection(connection)) = self.entries.get_mut(&number) else {
            return 0;
        };
        let Some(vm) = self.vms.get(&connection.vm) else {
            return 0;
        };
        let Stage::Relaying {
            relay,
            queued,
            watch,
        } = &mut connection.stage
        else {
            return 0;
        };
        *queued = false;
        let mut carrying = Carrying::new(
            &mut self.pipes,
            &mut self.scratch,
            &self.budget,
            vm,
            connection.route.class(),
            &mut connection.packets,
        );
        let before = relay.bytes();
        let turn = relay.turn(&mut carrying);
        let after = relay.bytes();
        let moved = [after.0 - before.0, after.1 - before.1];
        let Some(rests) = watch.after_turn(&self.poller, relay, number, moved) else {
            self.refuse(number, VsockRefusal::Memory);
            return 0;
        };
        // What it hears of its sockets while it waits is a reason to go on: the other direction may have something to deliver,
        // and gives back what is lacking.
        let is_starved = turn == Turn::Starved;
        self.starved
            .turned(&connection.vm, number, is_starved, Instant::now());
        match turn {
            Turn::Idle | Turn::Starved => {}
            Turn::More => {
                *queued = true;
                self.run.push(&connection.vm, number);
            }
            Turn::Over => self.end(number),
        }
        self.rest(number, rests);
        moved.iter().sum()
    }

    /// Closes a connection that has come to its end.
    fn end(&mut self, number: u64) {
        self.with_vm(number, Self::close);
    }

    /// Refuses or breaks off a connection, and counts why.
    fn refuse(&mut self, number: u64, refusal: VsockRefusal) {
        self.with_vm(number, |router, number, vm| {
            vm.setup.counters.refuse(refusal);
            router.break_off(number, vm);
        });
    }

    fn with_vm(&mut self, number: u64, action: impl FnOnce(&mut Self, u64, &mut Vm)) {
        let Some(Entry::Connection(connection)) = self.entries.get(&number) else {
            return;
        };
        let key = connection.vm.clone();
        if let Some(mut vm) = self.vms.remove(&key) {
            vm.connections.remove(&number);
            action(self, number, &mut vm);
            self.vms.insert(key, vm);
        }
    }

    fn break_off(&mut self, number: u64, vm: &mut Vm) {
        if let Some(Entry::Connection(connection)) = self.entries.get_mut(&number) {
            reset(&mut connection.packets, vm.sink.as_deref());
        }
        self.close(number, vm);
    }

    /// Closes a connection that is in the guest's set no more.
    pub(super) fn close(&mut self, number: u64, vm: &mut Vm) {
        let Some(Entry::Connection(mut connection)) = self.entries.remove(&number) else {
            return;
        };
        self.starved.forget(&connection.vm, number, Instant::now());
        let class = connection.route.class();
        let counters = vm.setup.counters.class(class);
        counters.connections.fetch_sub(1, Relaxed);
        match &mut connection.stage {
            Stage::Dialing { deadline, .. } => {
                self.deadlines.remove(&(*deadline, number));
            }
            Stage::Relaying { relay, .. } => {
                let packets = &mut connection.packets;
                relay.forget(&mut Carrying::new(
                    &mut self.pipes,
                    &mut self.scratch,
                    &self.budget,
                    vm,
                    class,
                    packets,
                ));
            }
            Stage::Over => {}
        }
    }

    /// Breaks off what the guest's policy no longer allows.
    pub(super) fn recheck(&mut self, vm: &mut Vm) {
        let key = vm.setup.key.clone();
        let directory = self.directory.clone();
        let entries = &self.entries;
        let gone: Vec<u64> = vm
            .connections
            .iter()
            .copied()
            .filter(|number| {
                let Some(Entry::Connection(connection)) = entries.get(number) else {
                    return false;
                };
                let port = connection.packets.host_port();
                let route = directory.route(&key, HOST_CID, port, VsockType::Stream);
                !route.is_ok_and(|route| route.same(&connection.route))
            })
            .collect();
        for number in gone {
            vm.connections.remove(&number);
            vm.setup.counters.refuse(VsockRefusal::Policy);
            self.break_off(number, vm);
        }
    }

    /// Every connection of one guest, or of all.
    pub(super) fn list(&self, of: Option<&VmKey>) -> Vec<VsockConnection> {
        let now = Instant::now();
        let mut list = Vec::new();
        let vms: Vec<&Vm> = match of {
            Some(key) => self.vms.get(key).into_iter().collect(),
            None => self.vms.values().collect(),
        };
        for vm in vms {
            for number in &vm.connections {
                if let Some(Entry::Connection(connection)) = self.entries.get(number) {
                    list.push(connection.describe(vm.setup.cid, now));
                }
            }
        }
        list
    }
}

impl Connection {
    fn describe(&self, cid: u32, now: Instant) -> VsockConnection {
        let relay = match &self.stage {
            Stage::Relaying { relay, .. } => Some(relay),
            Stage::Dialing { .. } | Stage::Over => None,
        };
        let (egress, ingress) = relay.map_or((0, 0), |relay| relay.bytes());
        let age = now.saturating_duration_since(self.begun).as_millis();
        VsockConnection {
            lease: self.vm.lease.clone(),
            owner_uid: self.vm.tenant,
            socket_type: VsockType::Stream,
            from_guest: true,
            guest_cid: cid,
            // That, and credit, its VMM keeps to itself.
            guest_port: None,
            peer_cid: HOST_CID,
            peer_port: self.packets.host_port(),
            peer: self.route.peer.clone(),
            state: relay.map_or(VsockState::Connecting, state),
            egress_bytes: egress,
            ingress_bytes: ingress,
            peer_credit: None,
            own_credit: None,
            queued_bytes: relay.map_or(0, |relay| relay.queued_egress() as u64),
            queued_ingress_bytes: relay.and_then(|relay| relay.queued_ingress()),
            age_milliseconds: u64::try_from(age).unwrap_or(u64::MAX),
        }
    }
}

fn state(relay: &Relay) -> VsockState {
    let over = |direction| relay.is_over(direction);
    match (over(Direction::Egress), over(Direction::Ingress)) {
        (false, false) => VsockState::Established,
        (true, false) => VsockState::GuestClosed,
        (false, true) => VsockState::PeerClosed,
        (true, true) => VsockState::Closing,
    }
}

/// The guest is told that there is no connection, as far as a capture goes; its VMM learns it by the close.
fn reset(packets: &mut Packets, sink: Option<&Sink>) {
    if let Some(sink) = sink {
        packets.record(sink, Direction::Ingress, Operation::Reset, &[]);
    }
}

/// What a relay needs during its turn.
struct Carrying<'a> {
    pipes: &'a mut PipePool,
    scratch: &'a mut [u8],
    counters: &'a VmCounters,
    class: VsockClass,
    limits: &'a Limits,
    budget: &'a Budget,
    /// Connections of the guest.
    connections: usize,
    sink: Option<&'a Arc<Sink>>,
    packets: &'a mut Packets,
}

impl<'a> Carrying<'a> {
    fn new(
        pipes: &'a mut PipePool,
        scratch: &'a mut [u8],
        budget: &'a Budget,
        vm: &'a Vm,
        class: VsockClass,
        packets: &'a mut Packets,
    ) -> Self {
        Self {
            pipes,
            scratch,
            counters: &vm.setup.counters,
            class,
            limits: &vm.setup.limits,
            budget,
            connections: vm.connections.len(),
            sink: vm.sink.as_ref(),
            packets,
        }
    }
}

impl Carrier for Carrying<'_> {
    fn pipes(&mut self) -> &mut PipePool {
        self.pipes
    }

    fn copy_room(&mut self) -> Option<&mut [u8]> {
        self.sink.is_some().then_some(&mut *self.scratch)
    }

    fn see(&mut self, direction: Direction, bytes: &[u8]) {
        if let Some(sink) = self.sink {
            self.packets.record(sink, direction, Operation::Data, bytes);
        }
    }

    /// No more than its connection and its guest may have, and all guests together.
    fn reserve(&mut self, most: usize) -> usize {
        let buffered = &self.counters.buffered_bytes;
        let of_guest = self.limits.guest_bytes;
        let left = of_guest.saturating_sub(buffered.load(Relaxed));
        let most = most.min(self.limits.connection_bytes as usize) as u64;
        let given = self.budget.reserve(most.min(left));
        buffered.fetch_add(given, Relaxed);
        usize::try_from(given).expect("no more than was asked for")
    }

    fn freed(&mut self, bytes: usize) {
        let bytes = bytes as u64;
        self.counters.buffered_bytes.fetch_sub(bytes, Relaxed);
        self.budget.release(bytes);
    }

    fn moved(&mut self, direction: Direction, bytes: usize) {
        let counters = self.counters.class(self.class);
        let counter = match direction {
            Direction::Egress => &counters.egress_bytes,
            Direction::Ingress => &counters.ingress_bytes,
        };
        counter.fetch_add(bytes as u64, Relaxed);
    }

    fn ended(&mut self, direction: Direction) {
        if let Some(sink) = self.sink {
            let operation = Operation::Shutdown;
            self.packets.record(sink, direction, operation, &[]);
        }
    }

    /// As long as both sockets of all connections may: so what the kernel holds is bounded like the rest.
    fn may_widen(&self) -> bool {
        let all = (2 * self.connections * WIDE_BYTES) as u64;
        WIDE_BYTES <= self.limits.connection_bytes as usize && all <= self.limits.guest_bytes
    }
}
