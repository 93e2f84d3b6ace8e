//! Packets of datagrams between two relays: QUIC datagrams, or a TLS connection where these don't get through.

use std::{
    future::Future,
    io,
    pin::pin,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf},
    sync::mpsc,
};

use super::SecureTcp;

/// Longest packet in TLS.
const TLS_PACKET_MAX: usize = 16_000;
/// Packets that are looked at together.
const TOGETHER: usize = 64;

/// Where packets go.
#[derive(Clone)]
pub(crate) enum Outgoing {
    Quic(quinn::Connection),
    Tls(mpsc::Sender<Bytes>),
}

/// Where packets come from.
pub(crate) enum Incoming {
    Quic(quinn::Connection),
    Tls(ReadHalf<SecureTcp>),
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
            Self::Tls(queue) => queue.try_send(packet).is_ok(),
        }
    }
}

impl Incoming {
    /// Waits for packets and appends them.
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
            Self::Tls(reader) => {
                let length = usize::from(reader.read_u16().await?);
                let mut packet = vec![0; length];
                reader.read_exact(&mut packet).await?;
                packets.push(packet.into());
            }
        }
        Ok(())
    }
}

/// Both ends of a TLS connection that carries packets; what is sent waits in a queue of so many bytes.
pub(crate) fn over_tls(stream: SecureTcp, queue_bytes: usize) -> (Outgoing, Incoming) {
    let (reader, writer) = tokio::io::split(stream);
    // Most packets are as long as QUIC's.
    let (queue, packets) = mpsc::channel((queue_bytes / 1400).max(1));
    tokio::spawn(write(writer, packets));
    (Outgoing::Tls(queue), Incoming::Tls(reader))
}

/// Writes packets until nobody can send any more, or the connection is gone.
async fn write(mut writer: WriteHalf<SecureTcp>, mut packets: mpsc::Receiver<Bytes>) {
    let mut waiting = Vec::new();
    let mut bytes = Vec::new();
    while packets.recv_many(&mut waiting, TOGETHER).await > 0 {
        bytes.clear();
        for packet in waiting.drain(..) {
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
