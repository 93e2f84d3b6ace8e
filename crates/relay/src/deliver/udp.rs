//! Datagrams for destinations, and answers to them.
//!
//! Each address that sends has a socket here, as long as it does: from it goes what that address sends to anybody,
//! and to it comes what anybody answers. Only who was sent to may answer.

use std::{
    collections::{HashMap, hash_map::Entry},
    io, mem,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use sandwire_kernel_net::datagrams::{Receiver, Sender};
use tokio::{
    io::Interest,
    task::{JoinError, JoinSet},
    time::sleep,
};

use super::{Caller, Destination};
use crate::{
    config::{Deliver, Protocol},
    egress::tcp::canonical,
    fair::{Lost, Part},
    packets::{Packer, Unpacker},
    report::Subject,
    room::Room,
    transport::channel::{Incoming, Outgoing},
    wire::Datagram,
};

const TOGETHER: usize = 64;
const BYTES_MAX: usize = 65_535;
/// How soon an address may be another sender's, of datagrams to the same destination.
const HANDED_OVER_EACH: Duration = Duration::from_secs(1);

/// An address that sends, and its socket.
struct Origin {
    source: SocketAddr,
    socket: tokio::net::UdpSocket,
    flows: Mutex<HashMap<SocketAddr, Flow>>,
    /// Nobody waits for answers any more. Changed by who holds `flows`.
    is_closed: AtomicBool,
    port: Room,
}

/// Where a flow is found.
pub(crate) struct FlowKey {
    origin: Weak<Origin>,
    destination: SocketAddr,
}

struct Flow {
    subject: Subject,
    last: Instant,
    bytes_out: u64,
    bytes_back: u64,
    _part: Part<FlowKey>,
}

impl Origin {
    fn open(source: SocketAddr, port: Room) -> io::Result<Self> {
        let any: IpAddr = match source.ip() {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0))?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            source,
            socket: tokio::net::UdpSocket::from_std(socket)?,
            flows: Mutex::default(),
            is_closed: AtomicBool::new(false),
            port,
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SocketAddr, Flow>> {
        self.flows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What of a channel's datagrams is alive.
struct Session<'a> {
    here: &'a Arc<Destination>,
    caller: &'a Caller,
    outgoing: Outgoing,
    origins: HashMap<SocketAddr, Arc<Origin>>,
    answering: JoinSet<Arc<Origin>>,
    /// Another socket has lost its port.
    has_displaced: bool,
}

/// Delivers until the channel is gone; says why that is.
pub(super) async fn deliver(
    here: &Arc<Destination>,
    caller: &Caller,
    outgoing: Outgoing,
    mut incoming: Incoming,
) -> io::Error {
    let mut session = Session {
        here,
        caller,
        outgoing,
        origins: HashMap::new(),
        answering: JoinSet::new(),
        has_displaced: false,
    };
    let mut packets: Vec<Bytes> = Vec::new();
    let mut unpacker = Unpacker::default();
    let mut sender = Sender::default();
    loop {
        packets.clear();
        tokio::select! {
            outcome = incoming.receive(&mut packets) => if let Err(error) = outcome {
                return error;
            },
            Some(ended) = session.answering.join_next() => session.note_end(ended),
        }
        // All of them: until it is forgotten, a socket has its port.
        while let Some(ended) = session.answering.try_join_next() {
            session.note_end(ended);
        }
        session.pass_on(&packets, &mut unpacker, &mut sender);
        if mem::take(&mut session.has_displaced) {
            // Whose socket it is closes it.
            tokio::task::yield_now().await;
        }
    }
}

impl Session<'_> {
    fn note_end(&mut self, ended: Result<Arc<Origin>, JoinError>) {
        // One that has panicked ends with the channel.
        if let Ok(ended) = ended {
            self.forget(&ended);
        }
    }

    /// Unless there is another one for that address already.
    fn forget(&mut self, ended: &Arc<Origin>) {
        let known = self.origins.get(&ended.source);
        if known.is_some_and(|known| Arc::ptr_eq(known, ended)) {
            self.origins.remove(&ended.source);
        }
    }

    fn pass_on(&mut self, packets: &[Bytes], unpacker: &mut Unpacker, sender: &mut Sender) {
        // Payloads one after the other: less to allocate than one by one.
        let mut bytes: Vec<u8> = Vec::with_capacity(packets.iter().map(Bytes::len).sum());
        let mut wanted: Vec<(SocketAddr, SocketAddr, Range<usize>)> = Vec::new();
        let deliver = self.here.now();
        for packet in packets {
            let is_sound = unpacker.take_apart(packet, |datagram| {
                if self.admit(&deliver, &datagram) {
                    let start = bytes.len();
                    bytes.extend_from_slice(datagram.payload);
                    let to = canonical(datagram.destination);
                    wanted.push((datagram.source, to, start..bytes.len()));
                }
            });
            self.here.metrics.malformed.add(u64::from(!is_sound));
        }
        // Those of one socket by one call; their order among themselves stays.
        wanted.sort_by_key(|(source, ..)| *source);
        for group in wanted.chunk_by(|one, other| one.0 == other.0) {
            let Some(origin) = self.origins.get(&group[0].0) else {
                continue;
            };
            let datagrams: Vec<(SocketAddr, &[u8])> = group
                .iter()
                .map(|(_, to, payload)| (*to, &bytes[payload.clone()]))
                .collect();
            let sent = sender.send(&origin.socket, &datagrams, false, Instant::now());
            self.here.metrics.datagrams_out.add_many(sent.sent);
            self.here.metrics.dropped_full.add_many(sent.refused);
            for (index, (_, to, payload)) in group.iter().enumerate() {
                if sender.has_refused(index)
                    && let Some(flow) = origin.lock().get_mut(to)
                {
                    // Another sender may have the address meanwhile.
                    flow.bytes_out = flow.bytes_out.saturating_sub(payload.len() as u64);
                }
            }
        }
    }

    /// Whether a datagram may be passed on; then there is a socket and a flow for it.
    fn admit(&mut self, deliver: &Deliver, datagram: &Datagram<'_>) -> bool {
        let metrics = &self.here.metrics;
        let destination = canonical(datagram.destination);
        let is_denied = !deliver.allows(destination.ip());
        if is_denied || destination.is_ipv4() != datagram.source.is_ipv4() {
            metrics.dropped_policy.add(1);
            return false;
        }
        let known = self.origins.get(&datagram.source).cloned();
        if let Some(origin) = &known
            && let Some(flow) = origin.lock().get_mut(&destination)
        {
            if *flow.subject.sender == *datagram.sender {
                flow.last = Instant::now();
                flow.bytes_out += datagram.payload.len() as u64;
                return true;
            }
            // Each time that is a line of the report, and its end goes by no name.
            if flow.subject.started.elapsed() < HANDED_OVER_EACH {
                metrics.dropped_limit.add(1);
                return false;
            }
        }
        let subject = Subject {
            protocol: Protocol::Udp,
            host: self.caller.name.clone(),
            sender: datagram.sender.into(),
            source: datagram.source,
            destination,
            started: Instant::now(),
        };
        // A socket for those alone who may have a flow: nobody is to lose one to who is refused then.
        if !self.here.flows.has_one(&subject.host, &subject.sender) {
            metrics.dropped_limit.add(1);
            return false;
        }
        let origin = known.or_else(|| self.add_origin(datagram.source, &subject.sender));
        origin.is_some_and(|origin| self.begin(&origin, subject, datagram.payload.len()))
    }

    /// Begins a flow with a datagram of so many bytes, unless there may be none.
    fn begin(&mut self, origin: &Arc<Origin>, subject: Subject, bytes: usize) -> bool {
        let (here, destination) = (self.here, subject.destination);
        // Held: whoever takes this one away finds it there.
        let mut flows = origin.lock();
        if origin.is_closed.load(Ordering::Relaxed) {
            // It ends at this moment; the next datagram finds another one.
            drop(flows);
            self.forget(origin);
            return false;
        }
        let key = FlowKey {
            origin: Arc::downgrade(origin),
            destination,
        };
        let Some((part, lost)) = here.flows.take(&subject.host, &subject.sender, key) else {
            here.metrics.dropped_limit.add(1);
            return false;
        };
        let flow = Flow {
            subject,
            last: Instant::now(),
            bytes_out: bytes as u64,
            bytes_back: 0,
            _part: part,
        };
        let before = flows.insert(destination, flow);
        drop(flows);
        here.metrics.flows_open.add(1);
        // Another sender has the address meanwhile.
        if let Some(before) = before {
            end(here, &before, "cut");
        }
        if let Some(lost) = lost {
            displace(here, &lost);
        }
        true
    }

    fn add_origin(&mut self, source: SocketAddr, sender: &Arc<str>) -> Option<Arc<Origin>> {
        let (ports, host) = (&self.here.ports, &self.caller.name);
        let Some(port) = ports.take(host, sender) else {
            ports.say(host, &"there are as many as there may be");
            self.here.metrics.dropped_limit.add(1);
            return None;
        };
        self.has_displaced |= port.displaced > 0;
        match Origin::open(source, port) {
            Ok(origin) => {
                let origin = Arc::new(origin);
                self.origins.insert(source, origin.clone());
                let (here, outgoing) = (self.here.clone(), self.outgoing.clone());
                self.answering.spawn(answer(here, origin.clone(), outgoing));
                Some(origin)
            }
            Err(error) => {
                ports.say(host, &error);
                self.here.metrics.dropped_full.add(1);
                None
            }
        }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        for origin in self.origins.values() {
            for (_, flow) in origin.lock().drain() {
                end(self.here, &flow, "cut");
            }
        }
    }
}

/// Ends a flow that its sender has lost, unless another one's is in its place by now.
fn displace(here: &Destination, lost: &Lost<FlowKey>) {
    let Some(origin) = lost.key.origin.upgrade() else {
        return;
    };
    let mut flows = origin.lock();
    let Entry::Occupied(entry) = flows.entry(lost.key.destination) else {
        return;
    };
    if entry.get().subject.sender == lost.sender {
        here.metrics.flows_displaced.add(1);
        end(here, &entry.remove(), "too_many");
    }
}

fn end(here: &Destination, flow: &Flow, outcome: &'static str) {
    here.metrics.flows_open.subtract(1);
    here.report
        .add(&flow.subject, outcome, (flow.bytes_out, flow.bytes_back));
}

/// Sends answers back until all flows of a socket are silent; gives it back then.
async fn answer(here: Arc<Destination>, origin: Arc<Origin>, outgoing: Outgoing) -> Arc<Origin> {
    let mut packer = Packer::default();
    let idle = here.limits.udp_idle;
    let look = (idle / 4).clamp(Duration::from_millis(250), Duration::from_secs(5));
    let mut looked = Instant::now();
    loop {
        tokio::select! {
            ready = origin.socket.readable() => {
                if ready.is_err() {
                    return close(&here, origin, "cut");
                }
                // Memory for a moment, and not for every socket.
                let mut receiver = RECEIVERS.take();
                let socket = &origin.socket;
                let received = socket.try_io(Interest::READABLE, || receiver.receive(socket));
                if let Ok(received) = received {
                    send_back(&here, &origin, &outgoing, &receiver, received, &mut packer);
                }
                RECEIVERS.give(receiver);
            }
            () = origin.port.lost() => return close(&here, origin, "too_many"),
            () = sleep(look) => {}
        }
        if looked.elapsed() >= look {
            looked = Instant::now();
            let mut flows = origin.lock();
            let deliver = here.now();
            flows.retain(|destination, flow| {
                let outcome = if !deliver.allows(destination.ip()) {
                    "cut"
                } else if flow.last.elapsed() >= idle {
                    "idle"
                } else {
                    return true;
                };
                end(&here, flow, outcome);
                false
            });
            if flows.is_empty() {
                origin.is_closed.store(true, Ordering::Relaxed);
                drop(flows);
                return origin;
            }
        }
    }
}

/// Ends all flows of a socket that can't be waited for, or whose port is another one's.
fn close(here: &Destination, origin: Arc<Origin>, outcome: &'static str) -> Arc<Origin> {
    let mut flows = origin.lock();
    origin.is_closed.store(true, Ordering::Relaxed);
    if outcome == "too_many" {
        here.metrics.flows_displaced.add_many(flows.len());
    }
    for (_, flow) in flows.drain() {
        end(here, &flow, outcome);
    }
    drop(flows);
    origin
}

fn send_back(
    here: &Destination,
    origin: &Origin,
    outgoing: &Outgoing,
    receiver: &Receiver,
    received: usize,
    packer: &mut Packer<(SocketAddr, usize)>,
) {
    let length_max = outgoing.length_max();
    let mut flows = origin.lock();
    for index in 0..received {
        let Some(datagram) = receiver.get(index) else {
            continue;
        };
        let from = canonical(datagram.from);
        let Some(flow) = flows.get_mut(&from) else {
            here.metrics.dropped_unasked.add(1);
            continue;
        };
        flow.last = Instant::now();
        let record = Datagram {
            sender: "",
            source: from,
            destination: origin.source,
            payload: datagram.payload,
        };
        if !packer.add(&record, length_max, (from, datagram.payload.len())) {
            here.metrics.dropped_full.add(1);
        }
    }
    let outcome = packer.send(
        |packet| outgoing.send(packet),
        |(from, bytes)| {
            if let Some(flow) = flows.get_mut(&from) {
                flow.bytes_back += bytes as u64;
            }
        },
    );
    drop(flows);
    here.metrics.datagrams_in.add_many(outcome.sent);
    here.metrics.dropped_full.add_many(outcome.lost);
}

/// Memory to receive into, of whoever needs none now.
struct Receivers(Mutex<Vec<Receiver>>);

static RECEIVERS: Receivers = Receivers(Mutex::new(Vec::new()));

impl Receivers {
    fn take(&self) -> Receiver {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.unwrap_or_else(|| Receiver::new(TOGETHER, BYTES_MAX))
    }

    fn give(&self, receiver: Receiver) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(receiver);
    }
}
