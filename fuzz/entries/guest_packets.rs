//! A guest that says anything on its rings, beside a connection of its own that behaves: what is kept for it is
//! bounded, what it hears makes sense, and that connection goes on.
//!
//! The device, the guest's side of the rings and the other ends of all connections are in one thread, and time is
//! what the case says: so a case is the same each time.

use std::{
    collections::HashSet,
    os::{
        fd::OwnedFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::{
    event::{
        Timespec,
        epoll::{self, CreateFlags, Event},
    },
    net::{
        AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send,
        shutdown, socketpair,
    },
};
use sandwire_api::{
    name::Name,
    vsock::{
        PortRange, VsockDestination, VsockPolicy, VsockRule, VsockState, VsockTraffic, VsockType,
    },
};
use sandwire_vsock_guest::{
    packet::{HEADER_BYTES, Header, Operation, SHUTDOWN_SEND},
    wire::{self, Message, Wire, request},
};
use sandwire_vsock_host::{
    address::VmKey,
    budget::Budget,
    device::{Context, Token, Vm},
    directory::{Directory, Face, Placement},
    limits::Limits,
    statistics::VmCounters,
    worker::{Command, VmSetup, WorkerHandle},
};

use self::rings::{QUEUE, Rings};

#[path = "guest_packets/rings.rs"]
mod rings;

/// Steps of a case, at most.
const STEPS: usize = 600;
/// Turns that the device may need for a step until it rests.
const TURNS: usize = 10_000;

/// The guest's port of the connection that behaves, and the port of the host that leads to a service.
const NEIGHBOUR: u32 = 0x900;
const SERVICE: u32 = 10;
/// First port of connections from the host, and of the guest's ports that a case names.
const HOST_PORT: u32 = 1 << 30;
const GUEST_PORT: u32 = 0x100;
const PING: &[u8] = b"ping";

fn limits() -> Limits {
    Limits {
        connections: 8,
        connects_per_second: 1_000_000,
        connection_bytes: 64 * 1024,
        guest_bytes: 1024 * 1024,
        message_bytes: 16 * 1024,
        connect_timeout: Duration::from_secs(1),
        shutdown_timeout: Duration::from_millis(500),
        ..Limits::default()
    }
}

/// One case: steps, each begun by a byte that says which.
pub(crate) fn run(bytes: &[u8]) {
    traffic(bytes);
}

/// The same; gives what the device has counted.
pub(crate) fn traffic(bytes: &[u8]) -> VsockTraffic {
    let mut stage = Stage::new();
    let mut said = Said(bytes);
    for _ in 0..STEPS {
        let Some(step) = said.byte() else {
            break;
        };
        stage.step(step, &mut said);
        stage.rest();
        stage.check();
    }
    stage.end()
}

/// What is left of a case.
struct Said<'a>(&'a [u8]);

impl Said<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// 0 after the end.
    fn number(&mut self) -> u32 {
        self.byte().unwrap_or_default().into()
    }

    fn word(&mut self) -> u32 {
        self.number() | self.number() << 8
    }
}

/// How calls of the guest are answered.
#[derive(Clone, Copy)]
enum Manner {
    Accepted,
    Refused,
    Ignored,
}

/// A device with its guest and everybody whom that speaks with.
struct Stage {
    vm: Vm,
    context: Context,
    counters: Arc<VmCounters>,
    budget: Arc<Budget>,
    sibling: WorkerHandle,
    wire: Wire,
    rings: Rings,
    posting: bool,
    manner: Manner,
    /// Ends of the host, the neighbour's first.
    peers: Vec<OwnedFd>,
    /// What came on the neighbour's connection, and whether it was answered.
    heard: Vec<u8>,
    answered: bool,
    /// Connections to which the guest was told that no more comes.
    ended: HashSet<(u16, u64, u32, u32)>,
}

impl Stage {
    fn new() -> Self {
        let budget = Arc::new(Budget::new(limits().guest_bytes));
        let counters = Arc::new(VmCounters::default());
        let (directory, key, sibling) = directory();
        let context = Context::new(
            epoll::create(CreateFlags::CLOEXEC).expect("an epoll"),
            directory,
            budget.clone(),
            Default::default(),
        );
        let (vhost_listener, stream) = vmm();
        let setup = VmSetup {
            key,
            cid: 3,
            limits: limits(),
            vhost_listener,
            // Clients come by a call.
            stream_listener: wire::event().expect("a descriptor"),
            seqpacket_listener: wire::event().expect("a descriptor"),
            counters: counters.clone(),
        };
        let vm = Vm::new(setup, 0, &context).expect("a device");
        let mut stage = Self {
            vm,
            context,
            counters,
            budget,
            sibling,
            wire: stream.into(),
            rings: Rings::new(PING),
            posting: true,
            manner: Manner::Accepted,
            peers: Vec::new(),
            heard: Vec::new(),
            answered: false,
            ended: HashSet::new(),
        };
        stage.boot();
        stage
    }

    /// Starts the rings and opens the neighbour's connection.
    fn boot(&mut self) {
        for message in wire::session(self.rings.memory(), QUEUE.into()).expect("messages") {
            let number = &message.bytes[..4];
            if number == request::GET_VRING_BASE.to_le_bytes() {
                break;
            }
            let message = if number == request::SET_FEATURES.to_le_bytes() {
                // VERSION_1, EVENT_IDX, PROTOCOL_FEATURES, streams and messages.
                Message::words(request::SET_FEATURES, &[1 << 32 | 1 << 29 | 1 << 30 | 3])
            } else {
                message
            };
            let length = message.bytes.len();
            self.wire.write(&message, length).expect("saying it");
        }
        self.rest();
        let request = neighbour(Operation::Request);
        assert!(self.send(&request, 0));
        self.rest();
        assert!(self.answered, "the neighbour is there");
        self.check();
    }

    fn step(&mut self, step: u8, said: &mut Said<'_>) {
        match step >> 5 {
            0..=2 => self.packet(step, said),
            3 => self.any_packet(said),
            4 => self.act_on_peer(step & 3, said),
            5 => self.call(step),
            6 => {
                let time = Duration::from_millis(u64::from(said.number()) * 16);
                self.context.now += time;
            }
            _ => {
                self.manner = match step & 3 {
                    0 | 1 => Manner::Accepted,
                    2 => Manner::Refused,
                    _ => Manner::Ignored,
                };
                self.posting = step & 4 == 0;
            }
        }
    }

    /// A packet of a connection that there may be, with a length that may be a lie.
    fn packet(&mut self, step: u8, said: &mut Said<'_>) {
        let (ports, flags) = (said.number(), said.number());
        let (len, credit) = (said.word(), said.number());
        let header = Header {
            src_cid: 3,
            dst_cid: 2,
            src_port: GUEST_PORT + (ports & 3),
            dst_port: match ports >> 2 & 3 {
                0 | 1 => SERVICE,
                2 => HOST_PORT + (ports >> 4),
                _ => 99,
            },
            len,
            kind: 1 + u16::from(step >> 4 & 1),
            op: u16::from(step & 15),
            flags: flags & 15,
            buf_alloc: [64 * 1024, 0, 100, u32::MAX][(credit & 3) as usize],
            fwd_cnt: [0, (credit >> 4) * 1000, u32::MAX, 1 << 31][(credit >> 2 & 3) as usize],
        };
        let there = if flags & 0x80 == 0 { len } else { len / 2 };
        self.send(&header, there);
    }

    /// Any header but one of the neighbour's.
    fn any_packet(&mut self, said: &mut Said<'_>) {
        let mut bytes = [0; HEADER_BYTES];
        bytes.fill_with(|| said.byte().unwrap_or_default());
        let mut header = Header::decode(&bytes);
        if header.src_port == NEIGHBOUR {
            header.src_port = GUEST_PORT;
        }
        let there = said.word();
        self.send(&header, there);
    }

    /// Somebody of the host writes, reads, half-closes or closes; never the neighbour's peer.
    fn act_on_peer(&mut self, action: u8, said: &mut Said<'_>) {
        let which = said.number() as usize % self.peers.len();
        if which == 0 {
            return;
        }
        let peer = &self.peers[which];
        match action {
            0 => {
                let bytes = vec![1; said.word() as usize];
                let _ = send(peer, &bytes, SendFlags::NOSIGNAL);
            }
            1 => {
                let mut bytes = vec![0; 0x1_0000];
                let _ = recv(peer, &mut bytes[..], RecvFlags::DONTWAIT);
            }
            2 => {
                let both = [Shutdown::Read, Shutdown::Write];
                let _ = shutdown(peer, both[(said.number() & 1) as usize]);
            }
            _ => drop(self.peers.swap_remove(which)),
        }
    }

    /// A client, or a sibling, calls the guest.
    fn call(&mut self, step: u8) {
        let (kind, socket_type) = match step >> 2 & 1 {
            0 => (VsockType::Stream, SocketType::STREAM),
            _ => (VsockType::Seqpacket, SocketType::SEQPACKET),
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, socket_type, flags, None);
        let (theirs, ours) = pair.expect("a pair of sockets");
        let port = GUEST_PORT + u32::from(step & 3);
        let caller = (step >> 3 & 1 != 0).then(|| key_of("caller"));
        self.vm
            .connect_to_guest(theirs, port, kind, caller, &mut self.context);
        self.peers.push(ours);
    }

    // The guest's side.

    /// Sends a header with that much payload behind it; false while the device takes nothing.
    fn send(&mut self, header: &Header, payload: u32) -> bool {
        let offered = self.rings.offer(header, payload);
        if offered {
            self.vm.serve_from_guest(&mut self.context);
        }
        offered
    }

    /// Takes what came for the guest, and gives buffers. Whether there was anything to do.
    fn receive(&mut self) -> bool {
        let mut did = false;
        while let Some((header, payload)) = self.rings.take() {
            did = true;
            self.hear(&header, &payload);
        }
        if !self.posting || !self.rings.post() {
            return did;
        }
        self.vm.kicked_to_guest(&mut self.context);
        true
    }

    /// Judges a packet for the guest.
    fn hear(&mut self, header: &Header, payload: &[u8]) {
        let Some(operation) = header.operation() else {
            panic!("unknown: {header:?}");
        };
        let key = (
            header.kind,
            header.src_cid,
            header.src_port,
            header.dst_port,
        );
        match operation {
            Operation::ReadWrite => assert!(!self.ended.contains(&key), "too late: {header:?}"),
            Operation::Shutdown if header.flags & SHUTDOWN_SEND != 0 => {
                self.ended.insert(key);
            }
            Operation::Request | Operation::Response => {
                self.ended.remove(&key);
            }
            _ => assert_eq!(header.len, 0, "{header:?}"),
        }
        if header.dst_port != NEIGHBOUR {
            return;
        }
        match operation {
            Operation::Response => self.answered = true,
            Operation::ReadWrite => self.heard.extend_from_slice(payload),
            Operation::CreditUpdate | Operation::CreditRequest => {}
            _ => panic!("the neighbour was harmed: {header:?}"),
        }
    }

    // The host's side.

    /// Everybody does what there is to do, until there is nothing more.
    fn rest(&mut self) {
        for _ in 0..TURNS {
            let mut did = self.turn();
            did |= self.answer_calls();
            did |= self.receive();
            if !did {
                return;
            }
        }
        panic!("the device never rests");
    }

    /// A round of the worker.
    fn turn(&mut self) -> bool {
        self.context.round += 1;
        let mut events: Vec<Event> = Vec::with_capacity(64);
        let room = rustix::buffer::spare_capacity(&mut events);
        epoll::wait(&self.context.epoll, room, Some(&Timespec::default())).expect("events");
        let mut did = !events.is_empty();
        for event in &events {
            let context = &mut self.context;
            match Token::unpack(event.data.u64()) {
                Some(Token::VmmListener(_)) => self.vm.accept_vmm(context),
                Some(Token::FrontEnd(_)) => self.vm.vmm_is_ready(context),
                Some(Token::Flow(_, number)) => {
                    self.vm.flow_is_ready(number, event.flags, context);
                }
                other => panic!("{other:?}"),
            }
        }
        if !std::mem::take(&mut self.context.again).is_empty() {
            did = true;
            self.vm.serve_from_guest(&mut self.context);
        }
        while let Some(token) = self.context.timers.take_due(self.context.now) {
            did = true;
            if let Some(Token::Flow(_, number)) = Token::unpack(token) {
                self.vm.flow_is_due(number, &mut self.context);
            }
        }
        did
    }

    /// The sibling that the guest calls.
    fn answer_calls(&mut self) -> bool {
        let commands = self.sibling.take();
        let did = !commands.is_empty();
        for command in commands {
            let Command::Connect { socket, .. } = command else {
                panic!("{command:?}");
            };
            match self.manner {
                Manner::Refused => continue,
                Manner::Accepted => {
                    let _ = send(&socket, b"OK 1\n", SendFlags::NOSIGNAL);
                }
                Manner::Ignored => {}
            }
            self.peers.push(socket);
        }
        did
    }

    /// What holds at any time.
    fn check(&self) {
        let limits = limits();
        let traffic = self.counters.snapshot();
        let list: Vec<_> = self.vm.list(self.context.now).collect();
        assert!(list.len() <= limits.connections as usize);
        assert_eq!(list.len() as u64, traffic.connections);
        let each = u64::from(limits.connection_bytes);
        for connection in &list {
            assert!(connection.queued_bytes <= each, "{connection:?}");
            let credit = connection.own_credit.expect("the device knows");
            assert!(u64::from(credit) <= each, "{connection:?}");
        }
        // A mark, and a message on its way to the guest, aren't the guest's credit.
        let most = (each + 1 + u64::from(limits.message_bytes)) * list.len() as u64;
        assert!(traffic.buffered_bytes <= most, "{traffic:?}");
        assert!(self.budget.promised() <= each * list.len() as u64);
        let neighbour = list.iter().find(|one| one.guest_port == Some(NEIGHBOUR));
        let state = neighbour.map(|neighbour| neighbour.state);
        assert_eq!(state, Some(VsockState::Established));
    }

    /// The neighbour still works; then the VMM goes, and nothing is left but for readers, which go too.
    fn end(mut self) -> VsockTraffic {
        self.posting = true;
        self.rest();
        let data = Header {
            len: 4,
            ..neighbour(Operation::ReadWrite)
        };
        assert!(self.send(&data, 4), "packets are taken");
        let mut got = [0; 8];
        let count = recv(&self.peers[0], &mut got[..], RecvFlags::DONTWAIT).map(|(count, _)| count);
        assert_eq!(count.map(|count| &got[..count]), Ok(PING));
        assert_eq!(send(&self.peers[0], b"pong", SendFlags::NOSIGNAL), Ok(4));
        self.rest();
        assert_eq!(self.heard, b"pong");
        self.check();
        let before = self.counters.snapshot();
        let (_, nobody) = UnixStream::pair().expect("a pair of sockets");
        drop(std::mem::replace(&mut self.wire, nobody.into()));
        while self.turn() {}
        assert!(!self.counters.snapshot().attached);
        // What a guest had sent before it ended a connection waits for its reader, and for nobody else.
        let left = self.vm.list(self.context.now);
        assert!(
            left.into_iter()
                .all(|one| one.queued_bytes > 0 && one.guest_port != Some(NEIGHBOUR))
        );
        self.peers.clear();
        while self.turn() {}
        let after = self.counters.snapshot();
        assert_eq!((after.connections, after.buffered_bytes), (0, 0));
        assert_eq!(self.budget.promised(), 0);
        before
    }
}

/// A packet of the connection that behaves. What it takes is far more than it gets.
fn neighbour(operation: Operation) -> Header {
    Header {
        src_cid: 3,
        dst_cid: 2,
        src_port: NEIGHBOUR,
        dst_port: SERVICE,
        kind: 1,
        op: operation as u16,
        buf_alloc: 64 * 1024,
        ..Header::default()
    }
}

fn name(lease: &str) -> Name {
    lease.parse().expect("a name")
}

fn key_of(lease: &str) -> VmKey {
    VmKey {
        tenant: 1000,
        lease: name(lease),
    }
}

/// The guest and the sibling that it may call, whose worker is the case itself.
fn directory() -> (Arc<Directory>, VmKey, WorkerHandle) {
    let worker = WorkerHandle::new().expect("a queue");
    let directory = Directory::new();
    let rule = VsockRule {
        port: PortRange::single(SERVICE).expect("a port"),
        to: VsockDestination::Sandbox {
            lease: name("sibling"),
            owner_uid: None,
            port: 7,
        },
        identity: false,
    };
    let [key, sibling] = ["guest", "sibling"].map(key_of);
    for (key, rules) in [(&key, vec![rule]), (&sibling, Vec::new())] {
        let placement = Placement {
            key: key.clone(),
            face: Face::Local(worker.clone()),
            cid: 3,
            virtual_cid: None,
            socket: "/nowhere".into(),
            policy: VsockPolicy { rules },
        };
        directory.add(placement).expect("a place");
    }
    (Arc::new(directory), key, worker)
}

/// A VMM that has connected, and where the device will find it.
fn vmm() -> (UnixListener, UnixStream) {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("sandwire-fuzz-{}-{count}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).expect("an address");
    let listener = UnixListener::bind_addr(&address).expect("listening");
    listener.set_nonblocking(true).expect("not to block");
    let stream = UnixStream::connect_addr(&address).expect("connecting");
    (listener, stream)
}
