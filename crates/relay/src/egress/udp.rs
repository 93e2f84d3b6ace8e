//! Datagrams that the kernel has taken for their destinations, and answers to them.
//!
//! A flow is a pair of addresses between which datagrams go; one socket of an application may have many. Answers are
//! passed on only within a flow, from a socket that has the destination's address.

use std::{
    collections::HashMap,
    io,
    net::{SocketAddr, UdpSocket},
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use sandwire_kernel_net::datagrams::{Receiver, Sender};
use tokio::{io::Interest, time::sleep};

use super::{Host, answers::Answers, tcp::canonical};
use crate::{
    config::Protocol,
    fair::{Lost, Part},
    packets::{Packer, Unpacker},
    report::Subject,
    transport::channel::{Incoming, Outgoing},
    wire::Datagram,
};

/// Datagrams that are taken by one call.
const TOGETHER: usize = 64;
/// Longest datagram.
const BYTES_MAX: usize = 65_535;

/// Two addresses: who sends, and where to.
pub(super) type Pair = (SocketAddr, SocketAddr);

/// All flows of the host.
pub(crate) struct Flows {
    started: Instant,
    by_pair: Mutex<HashMap<Pair, Arc<Flow>>>,
    answers: Answers,
}

struct Flow {
    subject: Subject,
    /// Where it comes to us.
    place: u16,
    via: usize,
    /// When something last happened, in milliseconds since the start.
    last: AtomicU64,
    bytes_out: AtomicU64,
    bytes_back: AtomicU64,
    _part: Part<Pair>,
}

impl Flows {
    pub(crate) fn new() -> Self {
        Self {
            started: Instant::now(),
            by_pair: Mutex::default(),
            answers: Answers::default(),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Pair, Arc<Flow>>> {
        self.by_pair.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets flows that are silent, and sockets for answers from where none come, for ever. The rest ends with it.
    pub(crate) async fn keep(&self, host: &Host) {
        let _rest = Rest { flows: self, host };
        let idle = host.limits.udp_idle;
        let bound = u64::try_from(idle.as_millis()).unwrap_or(u64::MAX);
        loop {
            sleep((idle / 4).clamp(Duration::from_millis(250), Duration::from_secs(5))).await;
            let now = self.now();
            let is_alive =
                |flow: &Flow| now.saturating_sub(flow.last.load(Ordering::Relaxed)) < bound;
            self.retain(host, "idle", |_, flow| is_alive(flow));
            self.answers.close_idle(idle);
        }
    }

    /// Ends flows that the configuration of now doesn't lead to the peer that they went to.
    pub(crate) fn judge_anew(&self, host: &Host) {
        let egress = host.now();
        self.retain(host, "cut", |(source, destination), flow| {
            egress.via(flow.place, Protocol::Udp, *source, *destination) == Some(flow.via)
        });
    }

    fn retain(&self, host: &Host, outcome: &'static str, is_kept: impl Fn(&Pair, &Flow) -> bool) {
        let mut ended = Vec::new();
        self.lock().retain(|pair, flow| {
            let is_kept = is_kept(pair, flow);
            if !is_kept {
                ended.push(flow.clone());
            }
            is_kept
        });
        for flow in ended {
            end(host, &flow, outcome);
        }
    }
}

/// What there is when nobody looks after it any more: the relay ends.
struct Rest<'a> {
    flows: &'a Flows,
    host: &'a Host,
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        for (_, flow) in self.flows.lock().drain() {
            end(self.host, &flow, "cut");
        }
    }
}

/// Takes datagrams for ever.
pub(crate) async fn serve(host: Arc<Host>, flows: Arc<Flows>, socket: UdpSocket, place: u16) {
    let socket = match tokio::net::UdpSocket::from_std(socket) {
        Ok(socket) => socket,
        Err(error) => {
            tracing::error!(%error, "a socket can't be waited for");
            return;
        }
    };
    let mut receiver = Receiver::new(TOGETHER, BYTES_MAX);
    let mut packers: Vec<FlowPacker> = host.links.iter().map(|_| Packer::default()).collect();
    loop {
        if let Err(error) = socket.readable().await {
            tracing::error!(%error, "a socket can't be waited for");
            return;
        }
        let received = socket.try_io(Interest::READABLE, || receiver.receive(&socket));
        // Nothing there after all, or an error of ICMP about an answer that didn't arrive.
        let Ok(received) = received else { continue };
        take(&host, &flows, &receiver, received, place, &mut packers);
        // Others want to run too.
        tokio::task::yield_now().await;
    }
}

/// Of each datagram: its flow, and the bytes of its payload.
type FlowPacker = Packer<(Arc<Flow>, usize)>;

fn take(
    host: &Host,
    flows: &Flows,
    receiver: &Receiver,
    received: usize,
    place: u16,
    packers: &mut [FlowPacker],
) {
    let channels: Vec<Option<Outgoing>> = host.links.iter().map(|link| link.outgoing()).collect();
    let lengths: Vec<usize> = channels
        .iter()
        .map(|channel| channel.as_ref().map_or(0, Outgoing::length_max))
        .collect();
    let mut last: Option<(Pair, Arc<Flow>)> = None;
    for index in 0..received {
        let Some(datagram) = receiver.get(index) else {
            continue;
        };
        let Some(to) = datagram.to else {
            host.metrics.dropped_policy.add(1);
            continue;
        };
        let pair = (canonical(datagram.from), canonical(to));
        let flow = match &last {
            Some((known, flow)) if *known == pair => flow.clone(),
            _ => match find_flow(host, flows, place, pair) {
                Some(flow) => flow,
                None => continue,
            },
        };
        flow.last.store(flows.now(), Ordering::Relaxed);
        if channels[flow.via].is_none() {
            host.metrics.dropped_away.add(1);
        } else {
            let record = Datagram {
                sender: &flow.subject.sender,
                source: pair.0,
                destination: pair.1,
                payload: datagram.payload,
            };
            let of_flow = (flow.clone(), datagram.payload.len());
            if !packers[flow.via].add(&record, lengths[flow.via], of_flow) {
                host.metrics.dropped_full.add(1);
            }
        }
        last = Some((pair, flow));
    }
    for (packer, channel) in packers.iter_mut().zip(&channels) {
        let Some(channel) = channel else { continue };
        let outcome = packer.send(
            |packet| channel.send(packet),
            |(flow, bytes)| {
                flow.bytes_out.fetch_add(bytes as u64, Ordering::Relaxed);
            },
        );
        host.metrics.datagrams_out.add_many(outcome.sent);
        host.metrics.dropped_full.add_many(outcome.lost);
    }
}

fn find_flow(host: &Host, flows: &Flows, place: u16, pair: Pair) -> Option<Arc<Flow>> {
    let (source, destination) = pair;
    let known = flows.lock().get(&pair).cloned();
    let sender = match place {
        0 => host.senders.find(source.ip()),
        place => host
            .now()
            .sender_at(place)
            .map(|sender| sender.name.clone()),
    };
    // Another lease may have the address meanwhile, and a clone of the same guest sends from the same port.
    if let Some(flow) = known
        && sender.as_ref() == Some(&flow.subject.sender)
    {
        return Some(flow);
    }
    let mut by_pair = flows.lock();
    // Held: a new configuration goes through all flows that there are, and this one would be missed.
    let Some(via) = host.now().via(place, Protocol::Udp, source, destination) else {
        host.metrics.dropped_policy.add(1);
        return None;
    };
    let Some(sender) = sender else {
        host.metrics.dropped_unknown.add(1);
        return None;
    };
    let here: Arc<str> = "".into();
    let Some((part, lost)) = host.flows.take(&here, &sender, pair) else {
        host.metrics.dropped_limit.add(1);
        return None;
    };
    let flow = Arc::new(Flow {
        subject: Subject {
            protocol: Protocol::Udp,
            host: here,
            sender,
            source,
            destination,
            started: Instant::now(),
        },
        place,
        via,
        last: AtomicU64::new(flows.now()),
        bytes_out: AtomicU64::new(0),
        bytes_back: AtomicU64::new(0),
        _part: part,
    });
    let displaced = lost.and_then(|lost| displace(&mut by_pair, &lost));
    let before = by_pair.insert(pair, flow.clone());
    drop(by_pair);
    host.metrics.flows_open.add(1);
    if let Some(before) = before {
        end(host, &before, "cut");
    }
    if let Some(displaced) = displaced {
        host.metrics.flows_displaced.add(1);
        end(host, &displaced, "too_many");
    }
    Some(flow)
}

/// Takes out a flow that its sender has lost, unless another one has the pair by now.
fn displace(by_pair: &mut HashMap<Pair, Arc<Flow>>, lost: &Lost<Pair>) -> Option<Arc<Flow>> {
    let flow = by_pair.get(&lost.key)?;
    (flow.subject.sender == lost.sender)
        .then(|| by_pair.remove(&lost.key))
        .flatten()
}

fn end(host: &Host, flow: &Flow, outcome: &'static str) {
    let bytes = (
        flow.bytes_out.load(Ordering::Relaxed),
        flow.bytes_back.load(Ordering::Relaxed),
    );
    host.metrics.flows_open.subtract(1);
    host.report.add(&flow.subject, outcome, bytes);
}

/// Passes answers of a peer on until its channel is gone; says why that is.
pub(crate) async fn answer(
    host: Arc<Host>,
    flows: Arc<Flows>,
    via: usize,
    mut incoming: Incoming,
) -> String {
    let mut packets: Vec<Bytes> = Vec::new();
    let mut unpacker = Unpacker::default();
    let mut sender = Sender::default();
    loop {
        packets.clear();
        if let Err(error) = incoming.receive(&mut packets).await {
            return describe(&error);
        }
        // Payloads one after the other: less to allocate than one by one.
        let mut bytes: Vec<u8> = Vec::with_capacity(packets.iter().map(Bytes::len).sum());
        let mut answers: Vec<(SocketAddr, SocketAddr, Range<usize>, Arc<Flow>)> = Vec::new();
        for packet in &packets {
            let is_sound = unpacker.take_apart(packet, |datagram| {
                let pair = (datagram.destination, datagram.source);
                let flow = flows.lock().get(&pair).cloned();
                let Some(flow) = flow.filter(|flow| flow.via == via) else {
                    host.metrics.dropped_unasked.add(1);
                    return;
                };
                flow.last.store(flows.now(), Ordering::Relaxed);
                let start = bytes.len();
                bytes.extend_from_slice(datagram.payload);
                answers.push((pair.1, pair.0, start..bytes.len(), flow));
            });
            host.metrics.malformed.add(u64::from(!is_sound));
        }
        // Those from one address by one call; their order among themselves stays.
        answers.sort_by_key(|(from, ..)| *from);
        for group in answers.chunk_by(|one, other| one.0 == other.0) {
            let Some(socket) = flows.answers.socket(group[0].0, host.limits.answer_sockets) else {
                host.metrics.dropped_full.add_many(group.len());
                continue;
            };
            let datagrams: Vec<(SocketAddr, &[u8])> = group
                .iter()
                .map(|(_, to, payload, _)| (*to, &bytes[payload.clone()]))
                .collect();
            let sent = sender.send(&*socket, &datagrams, false, Instant::now());
            for (index, (.., payload, flow)) in group.iter().enumerate() {
                if !sender.has_refused(index) {
                    flow.bytes_back
                        .fetch_add(payload.len() as u64, Ordering::Relaxed);
                }
            }
            host.metrics.datagrams_in.add_many(sent.sent);
            host.metrics.dropped_full.add_many(sent.refused);
        }
    }
}

/// What ended a channel, with all that it says.
pub(crate) fn describe(error: &io::Error) -> String {
    error
        .get_ref()
        .map_or_else(|| error.to_string(), ToString::to_string)
}
