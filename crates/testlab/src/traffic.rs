//! Streams and datagrams whose receiver can tell whether every byte arrived: what `lab-traffic` does in
//! a guest, and tests do outside.
//!
//! A stream is made of words of a generator that both ends could run; its hash covers every bit in its
//! place, so a lost, doubled, swapped or changed byte shows.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

/// How much arrived, and what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// Bytes, a multiple of [`BLOCK`].
    pub bytes: u64,
    /// Hash of all of them in order.
    pub hash: u64,
}

/// Streams are whole blocks.
pub const BLOCK: usize = 64 * 1024;

impl std::fmt::Display for Stream {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} bytes {:016x}", self.bytes, self.hash)
    }
}

/// Connects and sends so many blocks; waits until the other side has closed.
///
/// # Errors
/// If the connection fails before that.
pub fn send(target: SocketAddr, blocks: u64) -> Result<Stream> {
    let mut stream = TcpStream::connect_timeout(&target, PATIENCE)
        .with_context(|| format!("connect to {target}"))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let sent = send_on(&mut stream, blocks)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest)?;
    Ok(sent)
}

/// Sends so many blocks on a connection, each by one write if the connection takes it whole.
///
/// # Errors
/// If the connection fails.
pub fn send_on(stream: &mut impl Write, blocks: u64) -> Result<Stream> {
    let (mut generator, mut hash) = (SEED, SEED);
    let mut block = vec![0; BLOCK];
    for _ in 0..blocks {
        for word in block.chunks_exact_mut(8) {
            generator ^= generator << 13;
            generator ^= generator >> 7;
            generator ^= generator << 17;
            word.copy_from_slice(&generator.to_le_bytes());
        }
        hash = hash_block(hash, &block);
        stream.write_all(&block).context("send a block")?;
    }
    let bytes = blocks * BLOCK as u64;
    Ok(Stream { bytes, hash })
}

/// A server for streams: receives one on each connection.
#[derive(Debug)]
pub struct Receiver {
    listener: TcpListener,
}

impl Receiver {
    /// Listens on a port of all addresses of the calling thread's namespace.
    ///
    /// # Errors
    /// If the port can't be had.
    pub fn listen(port: u16) -> Result<Self> {
        let listener =
            TcpListener::bind(("::", port)).with_context(|| format!("listen on {port}"))?;
        Ok(Self { listener })
    }

    /// Receives a stream on the next connection.
    ///
    /// # Errors
    /// If it breaks off.
    pub fn receive(&self) -> Result<Stream> {
        let (mut stream, _) = self.listener.accept().context("accept a stream")?;
        stream.set_read_timeout(Some(PATIENCE))?;
        receive_on(&mut stream)
    }
}

/// Receives a stream on a connection until the other side has closed.
///
/// # Errors
/// If it breaks off.
pub fn receive_on(stream: &mut impl Read) -> Result<Stream> {
    let (mut bytes, mut hash) = (0, SEED);
    let mut block = vec![0; BLOCK];
    while read_block(stream, &mut block)? {
        hash = hash_block(hash, &block);
        bytes += BLOCK as u64;
    }
    Ok(Stream { bytes, hash })
}

/// Reads a whole block; false at the stream's end.
fn read_block(stream: &mut impl Read, block: &mut [u8]) -> Result<bool> {
    let mut length = 0;
    while length < block.len() {
        match stream
            .read(&mut block[length..])
            .context("receive a block")?
        {
            0 => {
                ensure!(length == 0, "the stream ends within a block");
                return Ok(false);
            }
            count => length += count,
        }
    }
    Ok(true)
}

fn hash_block(mut hash: u64, block: &[u8]) -> u64 {
    for word in block.chunks_exact(8) {
        let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
        hash = (hash.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
    hash
}

/// Sends one datagram to an echo server and wants it back as it was.
///
/// # Errors
/// If it doesn't come back, or comes back changed.
pub fn exchange_datagram(target: SocketAddr, length: usize) -> Result<()> {
    let socket = UdpSocket::bind(unspecified(target)).context("bind a UDP socket")?;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    socket.connect(target).context("connect a UDP socket")?;
    let payload: Vec<u8> = (0..=250_u8).cycle().take(length).collect();
    let mut answer = vec![0; 65_536];
    // The first one may only find out the way's MTU.
    for attempt in 1.. {
        let result = socket.send(&payload).and_then(|_| socket.recv(&mut answer));
        match result {
            Ok(received) => {
                ensure!(answer[..received] == payload, "another datagram came back");
                return Ok(());
            }
            Err(error) if attempt == 3 => {
                return Err(error).with_context(|| format!("{length} bytes to {target}"));
            }
            Err(_) => {}
        }
    }
    Ok(())
}

/// Counts the datagrams that come to a UDP port, as a socket of the kernel hands them out.
#[derive(Debug)]
pub struct Tally(Arc<AtomicU64>);

impl Tally {
    /// Counts on a port of all addresses of the calling thread's namespace, until the process ends.
    ///
    /// # Errors
    /// If the port can't be had.
    pub fn start(port: u16) -> Result<Self> {
        let socket = UdpSocket::bind(("::", port)).with_context(|| format!("receive on {port}"))?;
        // As much as waits while a busy machine doesn't let us read.
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, TALLY_BUFFER)
            .context("enlarge a socket's buffer")?;
        let tally = Self(Arc::default());
        let count = Arc::clone(&tally.0);
        thread::spawn(move || {
            let mut packet = [0; 64];
            loop {
                if socket.recv(&mut packet).is_ok() {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Ok(tally)
    }

    /// Datagrams so far, once none has come for a while.
    #[must_use]
    pub fn settled(&self) -> u64 {
        loop {
            let before = self.0.load(Ordering::Relaxed);
            thread::sleep(TALLY_SETTLES);
            if self.0.load(Ordering::Relaxed) == before {
                return before;
            }
        }
    }
}

/// Sends one datagram over and over to an address for a time, from the calling thread's namespace. Returns
/// how many. In bursts: each processor has one queue for the packets of all namespaces, other tests' too.
///
/// # Errors
/// If there can be no socket.
pub fn flood(target: SocketAddr, length: usize, span: Duration) -> Result<u64> {
    let socket = UdpSocket::bind(unspecified(target)).context("bind a UDP socket")?;
    let payload = vec![0; length];
    let (started, mut sent) = (Instant::now(), 0);
    while started.elapsed() < span {
        for _ in 0..FLOOD_BURST {
            // A full queue loses it, as a network would.
            sent += u64::from(socket.send_to(&payload, target).is_ok());
        }
        thread::sleep(FLOOD_PAUSE);
    }
    Ok(sent)
}

fn unspecified(target: SocketAddr) -> SocketAddr {
    match target {
        SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        SocketAddr::V6(_) => ([0_u16; 8], 0).into(),
    }
}

const FLOOD_BURST: usize = 256;
const FLOOD_PAUSE: Duration = Duration::from_millis(80);
const TALLY_BUFFER: usize = 4 << 20;
const TALLY_SETTLES: Duration = Duration::from_millis(200);
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;
/// A guest that gets nothing for so long has lost its connection.
const PATIENCE: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_arrives_is_what_was_sent() {
        let receiver = Receiver::listen(0).unwrap();
        let port = receiver.listener.local_addr().unwrap().port();
        let sender = std::thread::spawn(move || send(([127, 0, 0, 1], port).into(), 5));
        let received = receiver.receive().unwrap();
        assert_eq!(sender.join().unwrap().unwrap(), received);
        assert_eq!(received.bytes, 5 * BLOCK as u64);
    }

    #[test]
    fn a_swapped_word_changes_the_hash() {
        let mut block = vec![0; BLOCK];
        block[8] = 1;
        let before = hash_block(SEED, &block);
        block.swap(8, 16);
        assert_ne!(hash_block(SEED, &block), before);
    }
}
