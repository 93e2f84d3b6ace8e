//! Fake guests that receive: they answer pings and take what a real TCP sends them.
//!
//! A few threads serve all guests, each guest on its own TAP. A guest accepts every connection and
//! acknowledges each frame handed over, selectively if it came out of order ([`Reassembly`]). Its window
//! is constant, because it has nobody who would read too slowly: data is counted and thrown away.

mod reassembly;

use std::{
    collections::HashMap,
    net::SocketAddrV4,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use anyhow::{Context, Result, anyhow};
use rustix::event::{Timespec, epoll};
use sandwire_kernel_net::tap::Opened;

use super::{FRAME_MAX, read, write};
use reassembly::Reassembly;

use crate::{
    cpu,
    packet::{self, ACK, Checksum, FIN, RST, SYN, Seen, SeenTcp, TcpFields, VirtioHeader},
    way::Sandbox,
    world,
};

/// The window that guests announce: the largest without scaling, times 2^3 once that is agreed. Half a
/// megabyte is what Linux settles at on such a path, and more only fills the host's queues.
const WINDOW: u16 = 0xffff;
const SCALE: u8 = 3;
/// Segments of 1460 bytes, selective acknowledgements, scaled windows.
const OPTIONS: [u8; 12] = [2, 4, 5, 0xb4, 4, 2, 1, 1, 1, 3, 3, SCALE];
/// A guest's own numbers begin here.
const FIRST: u32 = 1000;
/// Frames of one guest that are served before another has its turn.
const BURST: u32 = 64;
/// Connections that a guest remembers; old ones make room.
const CONNECTIONS_MAX: usize = 64;

/// How guests wait for frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// As processes do: asleep until woken.
    Asleep,
    /// Awake all the time, on a processor of their own, so that no wake-up blurs a round trip.
    Awake,
}

/// Running guests. They end when this is dropped.
pub(crate) struct Receivers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<()>>>,
    received: Arc<AtomicU64>,
}

impl Receivers {
    /// Starts a guest on each sandbox's TAP.
    pub(crate) fn start(sandboxes: &[Sandbox], threads: usize, waiting: Waiting) -> Result<Self> {
        let mut shares: Vec<Vec<Guest>> = Vec::new();
        shares.resize_with(threads.max(1), Vec::new);
        for (index, sandbox) in sandboxes.iter().enumerate() {
            let place = index % shares.len();
            shares[place].push(Guest::open(sandbox)?);
        }
        let mut receivers = Self {
            stop: Arc::new(AtomicBool::new(false)),
            threads: Vec::new(),
            received: Arc::new(AtomicU64::new(0)),
        };
        for guests in shares {
            let (stop, received) = (receivers.stop.clone(), receivers.received.clone());
            let work = move || serve(guests, waiting, &stop, &received);
            receivers.threads.push(thread::spawn(work));
        }
        Ok(receivers)
    }

    /// Ends the guests; says why if one ended by itself.
    pub(crate) fn end(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().map_err(|_| anyhow!("a guest panicked"))??;
        }
        Ok(self.received.load(Ordering::Relaxed))
    }
}

impl Drop for Receivers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // Somebody who cares how they ended calls `end`.
            let _ = thread.join();
        }
    }
}

fn serve(
    mut guests: Vec<Guest>,
    waiting: Waiting,
    stop: &AtomicBool,
    received: &AtomicU64,
) -> Result<()> {
    let mut buffer = vec![0; FRAME_MAX];
    if waiting == Waiting::Awake {
        cpu::pin(0)?;
        while !stop.load(Ordering::Relaxed) {
            for guest in &mut guests {
                guest.serve(&mut buffer)?;
            }
        }
    } else {
        let queue = epoll::create(epoll::CreateFlags::CLOEXEC).context("cannot wait")?;
        for (index, guest) in guests.iter().enumerate() {
            let data = epoll::EventData::new_u64(index as u64);
            epoll::add(&queue, guest.tap.file(), data, epoll::EventFlags::IN)
                .context("cannot wait for a TAP")?;
        }
        let mut events = Vec::with_capacity(64);
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: 50_000_000,
        };
        while !stop.load(Ordering::Relaxed) {
            events.clear();
            match epoll::wait(
                &queue,
                rustix::buffer::spare_capacity(&mut events),
                Some(&timeout),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno).context("cannot wait for TAPs"),
            }
            for event in &events {
                let index = usize::try_from(event.data.u64()).unwrap_or(0);
                if let Some(guest) = guests.get_mut(index) {
                    guest.serve(&mut buffer)?;
                }
            }
        }
    }
    let sum = guests
        .iter()
        .map(|guest| guest.conversations.received)
        .sum();
    received.fetch_add(sum, Ordering::Relaxed);
    Ok(())
}

/// One guest.
struct Guest {
    sandbox: Sandbox,
    tap: Opened,
    conversations: Conversations,
}

impl Guest {
    fn open(sandbox: &Sandbox) -> Result<Self> {
        Ok(Self {
            tap: world::open_tap(&sandbox.namespace, &sandbox.tap, sandbox.has_offloads)?,
            sandbox: sandbox.clone(),
            conversations: Conversations::default(),
        })
    }

    fn serve(&mut self, buffer: &mut [u8]) -> Result<()> {
        let start = if self.sandbox.has_offloads {
            VirtioHeader::LENGTH
        } else {
            0
        };
        for _ in 0..BURST {
            let Some(frame) = read(&self.tap, buffer)? else {
                break;
            };
            let Some(frame) = frame.get(start..) else {
                continue;
            };
            if let Some(bytes) = self.conversations.answer(&self.sandbox, frame, start) {
                write(&self.tap, &bytes)?;
            }
        }
        Ok(())
    }
}

/// A guest's connections.
#[derive(Default)]
struct Conversations {
    /// What has come, by peer and own port.
    streams: HashMap<(SocketAddrV4, u16), Reassembly>,
    received: u64,
}

impl Conversations {
    /// The answer, with room for a virtio header of `start` bytes; all zeros, it means a whole frame.
    fn answer(&mut self, sandbox: &Sandbox, frame: &[u8], start: usize) -> Option<Vec<u8>> {
        let seen = Seen::parse(frame).filter(|seen| seen.target == sandbox.guest);
        let Some((seen, tcp)) = seen.and_then(|seen| Some((seen, seen.tcp()?))) else {
            let plain = packet::answer(frame, sandbox.mac, sandbox.guest)?;
            return Some([&vec![0; start], plain.as_slice()].concat());
        };
        let peer = SocketAddrV4::new(seen.source, tcp.source_port);
        let (fields, options) = self.reply(peer, &tcp)?;
        let flow = sandbox.flow(tcp.target_port, peer);
        let frame = flow.tcp(Checksum::Complete, &fields, &options, 0);
        let bytes = if start == 0 {
            frame.plain()
        } else {
            frame.with_header()
        };
        Some(bytes.to_vec())
    }

    fn reply(&mut self, peer: SocketAddrV4, tcp: &SeenTcp) -> Option<(TcpFields, Vec<u8>)> {
        let key = (peer, tcp.target_port);
        if tcp.fields.flags & RST != 0 {
            self.streams.remove(&key);
            return None;
        }
        if tcp.fields.flags & SYN != 0 {
            if self.streams.len() >= CONNECTIONS_MAX {
                self.streams.clear();
            }
            let expected = tcp.fields.sequence.wrapping_add(1);
            self.streams.insert(key, Reassembly::new(expected));
            let fields = TcpFields {
                sequence: FIRST,
                acknowledged: expected,
                flags: SYN | ACK,
                window: WINDOW,
            };
            return Some((fields, OPTIONS.to_vec()));
        }
        let stream = self.streams.get_mut(&key)?;
        let is_end = tcp.fields.flags & FIN != 0;
        if tcp.payload == 0 && !is_end {
            return None;
        }
        self.received += u64::from(stream.take(tcp.fields.sequence, tcp.payload));
        let end = tcp.fields.sequence.wrapping_add(tcp.payload);
        let mut flags = ACK;
        if is_end && end == stream.expected() {
            stream.take(end, 1);
            flags |= FIN;
        }
        let fields = TcpFields {
            sequence: FIRST + 1,
            acknowledged: stream.expected(),
            flags,
            window: WINDOW,
        };
        Some((fields, stream.options()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::{Flow, Frame, PSH};
    use std::net::Ipv4Addr;

    const PEER: Flow = Flow {
        source_mac: [4; 6],
        target_mac: [2; 6],
        source: SocketAddrV4::new(Ipv4Addr::new(198, 18, 0, 2), 40_000),
        target: SocketAddrV4::new(Ipv4Addr::new(192, 168, 241, 2), 5001),
    };

    /// A conversation without a TAP: `/dev/null` takes its place.
    fn replies(frames: &[Frame]) -> Vec<Option<TcpFields>> {
        let sandbox = Sandbox {
            namespace: "host".to_owned(),
            tap: "tap0".to_owned(),
            has_offloads: false,
            mac: [2; 6],
            gateway_mac: [4; 6],
            guest: *PEER.target.ip(),
            gateway: Ipv4Addr::new(192, 168, 241, 1),
            prefix_length: 29,
            clone: Ipv4Addr::new(10, 64, 0, 2),
        };
        let mut conversation = Conversations::default();
        let mut answers = Vec::new();
        for frame in frames {
            let answer = conversation.answer(&sandbox, frame.plain(), 0);
            answers.push(answer.map(|bytes| {
                let seen = Seen::parse(&bytes).unwrap();
                assert!(seen.checksums_hold(None));
                seen.tcp().unwrap().fields
            }));
        }
        answers
    }

    fn data(sequence: u32, flags: u8, payload: usize) -> Frame {
        let fields = TcpFields {
            sequence,
            flags,
            ..TcpFields::default()
        };
        PEER.tcp(Checksum::Complete, &fields, &[], payload)
    }

    fn acknowledged(frames: &[Frame]) -> Vec<Option<u32>> {
        let replies = replies(frames).into_iter();
        replies
            .map(|reply| reply.map(|fields| fields.acknowledged))
            .collect()
    }

    #[test]
    fn what_comes_in_order_is_acknowledged() {
        let frames = [
            data(99, SYN, 0),
            data(100, ACK, 0),
            data(100, ACK | PSH, 500),
            data(600, ACK, 1000),
        ];
        assert_eq!(
            acknowledged(&frames),
            [Some(100), None, Some(600), Some(1600)]
        );
    }

    #[test]
    fn what_fills_a_gap_is_acknowledged_with_what_follows_it() {
        let frames = [
            data(99, SYN, 0),
            data(600, ACK, 500),
            data(100, ACK, 500),
            data(100, ACK, 700),
        ];
        assert_eq!(
            acknowledged(&frames),
            [Some(100), Some(100), Some(1100), Some(1100)]
        );
    }

    #[test]
    fn an_end_is_answered_with_an_end() {
        let replies = replies(&[data(99, SYN, 0), data(100, ACK | FIN, 10)]);
        let last = replies[1].unwrap();
        assert_eq!((last.acknowledged, last.flags), (111, ACK | FIN));
    }

    #[test]
    fn strangers_and_resets_get_no_answer() {
        let frames = [
            data(5, ACK, 10),
            data(99, SYN, 0),
            data(100, RST, 0),
            data(100, ACK, 1),
        ];
        assert_eq!(acknowledged(&frames), [None, Some(100), None, None]);
    }
}
