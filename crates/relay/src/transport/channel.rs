//! Packets of datagrams between two relays: QUIC datagrams, or a TLS connection where these don't get through.

use std::{
    future::Future,
    io,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf},
    sync::mpsc,
};

use super::SecureTcp;

/// Longest packet in TLS.
const TLS_PACKET_MAX: usize = 16_000;
/// Bytes that are read together.
const READ_BYTES: usize = 64 << 10;
/// Packets that are looked at together.
const TOGETHER: usize = 64;

/// Where packets go.
#[derive(Clone)]
pub(crate) enum Outgoing {
    Quic(quinn::Connection),
    Tls(Queue),
}

/// Packets that wait to be written, of so many bytes at most.
#[derive(Clone)]
pub(crate) struct Queue {
    packets: mpsc::UnboundedSender<Bytes>,
    waiting: Arc<AtomicUsize>,
    bytes_max: usize,
}

/// The queue's other end.
struct Waiting {
    packets: mpsc::UnboundedReceiver<Bytes>,
    bytes: Arc<AtomicUsize>,
}

/// Where packets come from.
pub(crate) enum Incoming {
    Quic(quinn::Connection),
    Tls(Framed<ReadHalf<SecureTcp>>),
}

/// Packets of a stream, each after its length in two bytes.
pub(crate) struct Framed<R> {
    reader: R,
    /// What has come of packets that nobody was given yet.
    pending: BytesMut,
}

impl Outgoing {
    /// Longest packet of now.
    pub(crate) fn length_max(&self) -> usize {
        match self {
            Self::Quic(connection) => connection.max_datagram_size().unwrap_or(0),
            Self::Tls(_) => TLS_PACKET_MAX,
        }
    }

    /// Sends a packet, unless the queue is full or the connection gone.
    pub(crate) fn send(&self, packet: Bytes) -> bool {
        match self {
            // Beyond that space, the oldest ones would be thrown away.
            Self::Quic(connection) => {
                connection.datagram_send_buffer_space() >= packet.len()
                    && connection.send_datagram(packet).is_ok()
            }
            Self::Tls(queue) => queue.add(packet),
        }
    }
}

impl Queue {
    fn new(bytes_max: usize) -> (Self, Waiting) {
        let (sender, packets) = mpsc::unbounded_channel();
        let bytes = Arc::new(AtomicUsize::new(0));
        let queue = Self {
            packets: sender,
            waiting: bytes.clone(),
            bytes_max,
        };
        (queue, Waiting { packets, bytes })
    }

    /// Adds a packet, if there is room for it.
    fn add(&self, packet: Bytes) -> bool {
        let length = cost(&packet);
        let room = self.bytes_max.checked_sub(length);
        let has_room = |waiting: usize| {
            let fits = room.is_some_and(|room| waiting <= room);
            fits.then_some(waiting + length)
        };
        let taken = self
            .waiting
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, has_room);
        taken.is_ok() && self.packets.send(packet).is_ok()
    }
}

impl Waiting {
    /// Waits for packets and appends some; false if there will be none any more.
    async fn take(&mut self, packets: &mut Vec<Bytes>) -> bool {
        let before = packets.len();
        let count = self.packets.recv_many(packets, TOGETHER).await;
        let taken: usize = packets[before..].iter().map(cost).sum();
        self.bytes.fetch_sub(taken, Ordering::Relaxed);
        count > 0
    }
}

/// What a packet takes up, with what is around it.
fn cost(packet: &Bytes) -> usize {
    packet.len() + size_of::<Bytes>()
}

impl Incoming {
    /// Waits for packets and appends them. Who stops waiting loses none, nor a part of one.
    ///
    /// # Errors
    /// The connection is gone.
    pub(crate) async fn receive(&mut self, packets: &mut Vec<Bytes>) -> io::Result<()> {
        match self {
            Self::Quic(connection) => {
                packets.push(connection.read_datagram().await.map_err(io::Error::other)?);
                while packets.len() < TOGETHER {
                    match now(connection.read_datagram()) {
                        Some(Ok(packet)) => packets.push(packet),
                        _ => break,
                    }
                }
            }
            Self::Tls(framed) => {
                packets.push(framed.next().await?);
                while packets.len() < TOGETHER
                    && let Some(packet) = framed.take()
                {
                    packets.push(packet);
                }
            }
        }
        Ok(())
    }
}

impl<R: AsyncRead + Unpin> Framed<R> {
    fn new(reader: R) -> Self {
        Self {
            reader,
            pending: BytesMut::new(),
        }
    }

    async fn next(&mut self) -> io::Result<Bytes> {
        loop {
            if let Some(packet) = self.take() {
                return Ok(packet);
            }
            self.pending.reserve(READ_BYTES);
            if self.reader.read_buf(&mut self.pending).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// A packet that has come as a whole.
    fn take(&mut self) -> Option<Bytes> {
        let (length, rest) = self.pending.split_first_chunk()?;
        let length = usize::from(u16::from_be_bytes(*length));
        if rest.len() < length {
            return None;
        }
        self.pending.advance(size_of::<u16>());
        Some(self.pending.split_to(length).freeze())
    }
}

/// Both ends of a TLS connection that carries packets; what is sent waits in a queue of so many bytes.
pub(crate) fn over_tls(stream: SecureTcp, queue_bytes: usize) -> (Outgoing, Incoming) {
    let (reader, writer) = tokio::io::split(stream);
    let (queue, waiting) = Queue::new(queue_bytes);
    tokio::spawn(write(writer, waiting));
    (Outgoing::Tls(queue), Incoming::Tls(Framed::new(reader)))
}

/// Writes packets until nobody can send any more, or the connection is gone.
async fn write(mut writer: WriteHalf<SecureTcp>, mut waiting: Waiting) {
    let mut packets = Vec::new();
    let mut bytes = Vec::new();
    while waiting.take(&mut packets).await {
        bytes.clear();
        for packet in packets.drain(..) {
            let Ok(length) = u16::try_from(packet.len()) else {
                continue;
            };
            bytes.extend_from_slice(&length.to_be_bytes());
            bytes.extend_from_slice(&packet);
        }
        if writer.write_all(&bytes).await.is_err() || writer.flush().await.is_err() {
            return;
        }
    }
    // The other side reads an end, or that it is gone.
    let _ = writer.shutdown().await;
}

/// What a future has now.
fn now<F: Future>(future: F) -> Option<F::Output> {
    let future = pin!(future);
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        packets::{Packer, Unpacker},
        wire::Datagram,
    };

    #[tokio::test]
    async fn no_more_waits_than_there_is_room_for_however_long_packets_are() {
        for length in [0, 100, 1400, TLS_PACKET_MAX] {
            let (queue, mut waiting) = Queue::new(1 << 20);
            let packet = Bytes::from(vec![0; length]);
            for _ in 0..2 {
                let taken = (0..1 << 20)
                    .take_while(|_| queue.add(packet.clone()))
                    .count();
                let bytes = taken * cost(&packet);
                assert!(bytes <= 1 << 20 && bytes + cost(&packet) > 1 << 20);
                let mut packets = Vec::new();
                while waiting.bytes.load(Ordering::Relaxed) > 0 {
                    assert!(waiting.take(&mut packets).await);
                    packets.clear();
                }
            }
        }
    }

    #[test]
    fn datagrams_of_packets_that_find_a_full_queue_are_not_taken() {
        const LENGTH_MAX: usize = 1400;
        let (queue, mut waiting) = Queue::new(LENGTH_MAX + size_of::<Bytes>());
        let outgoing = Outgoing::Tls(queue);
        let mut packer = Packer::default();
        for _ in 0..64 {
            let datagram = Datagram {
                sender: "web/a",
                source: "10.0.0.1:1000".parse().unwrap(),
                destination: "198.51.100.7:53".parse().unwrap(),
                payload: &[5; 200],
            };
            assert!(packer.add(&datagram, LENGTH_MAX, ()));
        }
        let outcome = packer.send(|packet| outgoing.send(packet), drop);
        assert_eq!(outcome.sent + outcome.lost, 64);
        let packet = waiting.packets.try_recv().unwrap();
        let mut found = 0;
        assert!(Unpacker::default().take_apart(&packet, |_| found += 1));
        assert!(outcome.sent == found && found > 1, "{outcome:?} of {found}");
        assert!(waiting.packets.try_recv().is_err());
    }

    #[tokio::test]
    async fn who_stops_waiting_in_the_midst_of_a_packet_loses_nothing_of_it() {
        let (mut writer, reader) = tokio::io::duplex(1 << 20);
        let mut framed = Framed::new(reader);
        let long = vec![7; 65_535];
        for packet in [&b"first"[..], b"", &long] {
            let mut bytes = u16::try_from(packet.len()).unwrap().to_be_bytes().to_vec();
            bytes.extend_from_slice(packet);
            let last = bytes.len() - 1;
            for part in [&bytes[..1], &bytes[1..last]] {
                writer.write_all(part).await.unwrap();
                assert!(now(framed.next()).is_none());
            }
            writer.write_all(&bytes[last..]).await.unwrap();
            assert_eq!(now(framed.next()).unwrap().unwrap(), packet);
        }
        drop(writer);
        assert!(now(framed.next()).unwrap().is_err());
    }
}
