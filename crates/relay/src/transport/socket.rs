//! The socket below QUIC: what the kernel hands out joined is handed on apart.
//!
//! The kernel joins datagrams of one caller that come at a time (up to 64 KiB, by GRO), and QUIC keeps what it gets by one call in
//! one piece of memory, for as long as anything of it waits in a stream. Who doesn't read would so keep what has come for others,
//! many times what its window has room for.

use std::{
    fmt,
    io::{self, IoSliceMut},
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
};

use quinn::{
    AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller,
    udp::{BATCH_SIZE, RecvMeta, Transmit},
};

/// What the kernel hands out at most by one message.
const MESSAGE_MAX: usize = 65_536;

/// Makes an endpoint of QUIC with that socket.
pub(crate) fn endpoint(
    socket: std::net::UdpSocket,
    server: Option<quinn::ServerConfig>,
) -> io::Result<quinn::Endpoint> {
    let runtime = Arc::new(TokioRuntime);
    let socket = Arc::new(Apart {
        joined: runtime.wrap_udp_socket(socket)?,
        held: Mutex::new(Held::new()),
    });
    let config = quinn::EndpointConfig::default();
    quinn::Endpoint::new_with_abstract_socket(config, server, socket, runtime)
}

/// A socket that hands out one datagram at a time.
struct Apart {
    joined: Arc<dyn AsyncUdpSocket>,
    held: Mutex<Held>,
}

/// What has come and wasn't handed on.
struct Held {
    messages: Box<[u8]>,
    metas: [RecvMeta; BATCH_SIZE],
    /// Messages that came, which one of them is next, and how much of it is handed on.
    count: usize,
    next: usize,
    from: usize,
}

impl Held {
    fn new() -> Self {
        Self {
            messages: vec![0; MESSAGE_MAX * BATCH_SIZE].into(),
            metas: [RecvMeta::default(); BATCH_SIZE],
            count: 0,
            next: 0,
            from: 0,
        }
    }

    /// Takes what there is, once all is handed on.
    fn poll_fill(
        &mut self,
        socket: &dyn AsyncUdpSocket,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        if self.next < self.count {
            return Poll::Ready(Ok(()));
        }
        let mut pieces = self.messages.chunks_exact_mut(MESSAGE_MAX);
        let mut messages: [IoSliceMut<'_>; BATCH_SIZE] =
            std::array::from_fn(|_| IoSliceMut::new(pieces.next().unwrap_or_default()));
        self.count = ready!(socket.poll_recv(context, &mut messages, &mut self.metas))?;
        (self.next, self.from) = (0, 0);
        Poll::Ready(Ok(()))
    }

    /// The next datagram, which may be empty.
    fn take(&mut self) -> Option<(&[u8], RecvMeta)> {
        if self.next == self.count {
            return None;
        }
        let meta = self.metas[self.next];
        let rest = meta.len.saturating_sub(self.from);
        let count = match meta.stride {
            0 => rest,
            stride => stride.min(rest),
        };
        let start = self.next * MESSAGE_MAX + self.from;
        self.from += count;
        if self.from >= meta.len {
            (self.next, self.from) = (self.next + 1, 0);
        }
        Some((&self.messages[start..start + count], meta))
    }

    /// Hands on as many as there is room for, and says how many.
    fn hand_on(&mut self, buffers: &mut [IoSliceMut<'_>], metas: &mut [RecvMeta]) -> usize {
        let mut count = 0;
        for (buffer, out) in buffers.iter_mut().zip(metas) {
            let Some((bytes, meta)) = self.take() else {
                break;
            };
            // What is longer than QUIC takes is cut, as by the kernel; nobody can read it then.
            let length = bytes.len().min(buffer.len());
            buffer[..length].copy_from_slice(&bytes[..length]);
            *out = meta;
            (out.len, out.stride) = (length, length);
            count += 1;
        }
        count
    }
}

impl AsyncUdpSocket for Apart {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.joined.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.joined.try_send(transmit)
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        ready!(held.poll_fill(&*self.joined, context))?;
        Poll::Ready(Ok(held.hand_on(buffers, metas)))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.joined.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.joined.max_transmit_segments()
    }

    fn may_fragment(&self) -> bool {
        self.joined.may_fragment()
    }
}

impl fmt::Debug for Apart {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Apart")
            .field("joined", &self.joined)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, net::UdpSocket};

    use super::*;

    const SIZE: usize = 1200;

    fn bound() -> UdpSocket {
        UdpSocket::bind("127.0.0.1:0").unwrap()
    }

    /// Takes what there is at one call, as QUIC does: how long each piece and its datagrams are, and their first bytes.
    async fn receive(socket: &dyn AsyncUdpSocket, most: usize) -> Vec<(usize, usize, u8)> {
        let mut all = vec![0; MESSAGE_MAX * most];
        let mut buffers: Vec<_> = all.chunks_mut(MESSAGE_MAX).map(IoSliceMut::new).collect();
        let mut metas = vec![RecvMeta::default(); most];
        let count = poll_fn(|context| socket.poll_recv(context, &mut buffers, &mut metas));
        let count = count.await.unwrap();
        let pieces = metas.iter().zip(&buffers).take(count);
        pieces
            .map(|(meta, bytes)| (meta.len, meta.stride, bytes[0]))
            .collect()
    }

    #[test]
    fn each_datagram_is_handed_on_an_empty_one_too() {
        let mut held = Held::new();
        held.count = 2;
        (held.metas[1].len, held.metas[1].stride) = (5, 3);
        let lengths = [(); 4].map(|()| held.take().map(|(bytes, _)| bytes.len()));
        assert_eq!(lengths, [Some(0), Some(3), Some(2), None]);
    }

    #[tokio::test]
    async fn datagrams_that_the_kernel_joins_are_handed_on_apart_and_in_order() {
        let runtime = TokioRuntime;
        let sender = runtime.wrap_udp_socket(bound()).unwrap();
        let joined = runtime.wrap_udp_socket(bound()).unwrap();
        let contents: Vec<_> = (0..9)
            .flat_map(|number| [number; SIZE])
            .chain([9; 7])
            .collect();
        let send = async |destination| {
            let transmit = Transmit {
                destination,
                ecn: None,
                contents: &contents,
                segment_size: Some(SIZE),
                src_ip: None,
            };
            // A new socket isn't known to be writable yet.
            let mut poller = sender.clone().create_io_poller();
            poll_fn(|context| poller.as_mut().poll_writable(context))
                .await
                .unwrap();
            sender.try_send(&transmit).unwrap();
        };
        send(joined.local_addr().unwrap()).await;
        let together = receive(&*joined, BATCH_SIZE).await;
        assert_eq!(together, [(contents.len(), SIZE, 0)], "the kernel joins");
        let apart = Apart {
            joined,
            held: Mutex::new(Held::new()),
        };
        send(apart.local_addr().unwrap()).await;
        send(apart.local_addr().unwrap()).await;
        let mut found = Vec::new();
        while found.len() < 20 {
            found.extend(receive(&apart, 3).await);
        }
        let one = (0..9).map(|number| (SIZE, SIZE, number)).chain([(7, 7, 9)]);
        let wanted: Vec<_> = one.clone().chain(one).collect();
        assert_eq!(found, wanted);
    }
}
