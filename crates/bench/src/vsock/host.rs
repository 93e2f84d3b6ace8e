//! The host's side: programs that call guests and that guests call, all in one thread.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use sandwire_vsock_host::readiness::{Interest, Poller};

use super::buffer::Buffer;

/// Bytes that are read at once.
pub(super) const READ_BYTES: usize = 64 * 1024;
/// Writes to one socket before it is another's turn.
const TURN_WRITES: usize = 64;
/// Bytes likewise.
const TURN_BYTES: usize = 256 * 1024;
/// Longest sleep, so that the end is noticed.
const SLEEP: Duration = Duration::from_millis(20);
const PATIENCE: Duration = Duration::from_secs(20);

/// Listens at a path.
pub(super) fn listen(path: &Path) -> Result<UnixListener> {
    UnixListener::bind(path).with_context(|| format!("cannot listen at {}", path.display()))
}

/// Accepts the connection of a guest, which is about to come.
pub(super) fn accept(listener: &UnixListener) -> Result<UnixStream> {
    let mut poller = Poller::new().context("cannot make an epoll instance")?;
    poller.add(listener, 0, Interest::READ)?;
    let ready = poller.wait(Some(Instant::now() + PATIENCE))?;
    ensure!(!ready.is_empty(), "a guest doesn't call the host in time");
    let (stream, _) = listener.accept().context("cannot accept a guest")?;
    Ok(stream)
}

/// Accepts a connection from each guest and takes what comes, until told to stop. The bytes are counted.
pub(super) fn sink(
    listeners: &[UnixListener],
    received: &AtomicU64,
    stop: &AtomicBool,
) -> Result<()> {
    let mut streams = Vec::new();
    let mut poller = Poller::new().context("cannot make an epoll instance")?;
    for (listener, token) in listeners.iter().zip(0..) {
        let stream = accept(listener)?;
        stream.set_nonblocking(true)?;
        poller.add(&stream, token, Interest::READ)?;
        streams.push(stream);
    }
    let mut buffer = Buffer::new(0, READ_BYTES);
    let mut ended = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        for ready in poller.wait(Some(Instant::now() + SLEEP))? {
            let index = usize::try_from(ready.token)?;
            let mut stream = &streams[index];
            match stream.read(&mut buffer) {
                Ok(0) => ended.push(index),
                Ok(count) => {
                    received.fetch_add(count as u64, Ordering::Relaxed);
                }
                Err(error) if is_over(&error) => ended.push(index),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("cannot read from a guest"),
            }
        }
        for index in ended.drain(..) {
            poller.remove(&streams[index])?;
        }
    }
    Ok(())
}

fn is_over(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
    )
}

/// Calls a port of a guest.
pub(super) fn call(socket: &Path, port: u32) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    writeln!(stream, "CONNECT {port}").context("cannot ask for a port of a guest")?;
    let mut answer = Vec::new();
    let mut byte = [0];
    while byte != *b"\n" {
        let count = stream.read(&mut byte).context("a guest doesn't answer")?;
        ensure!(count == 1, "the guest's port {port} is not reachable");
        answer.push(byte[0]);
    }
    ensure!(answer.starts_with(b"OK "), "the answer to CONNECT is no OK");
    Ok(stream)
}

/// Calls each guest and sends writes of that size to all until told to stop.
pub(super) fn source(
    sockets: &[PathBuf],
    port: u32,
    write: usize,
    stop: &AtomicBool,
) -> Result<()> {
    let mut poller = Poller::new().context("cannot make an epoll instance")?;
    let mut streams = Vec::new();
    for (socket, token) in sockets.iter().zip(0..) {
        let stream = call(socket, port)?;
        stream.set_nonblocking(true)?;
        poller.add_edge(&stream, token, Interest::BOTH)?;
        streams.push(stream);
    }
    let bytes = Buffer::new(0xa5, write);
    let mut left = vec![write; streams.len()];
    let mut runnable: VecDeque<usize> = (0..streams.len()).collect();
    let mut is_runnable = vec![true; streams.len()];
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..runnable.len() {
            let Some(index) = runnable.pop_front() else {
                break;
            };
            if fill(&streams[index], &bytes, &mut left[index])? {
                runnable.push_back(index);
            } else {
                is_runnable[index] = false;
            }
        }
        if !runnable.is_empty() && streams.len() == 1 {
            continue;
        }
        let sleep = if runnable.is_empty() {
            SLEEP
        } else {
            Duration::ZERO
        };
        for ready in poller.wait(Some(Instant::now() + sleep))? {
            let index = usize::try_from(ready.token)?;
            if ready.write && !std::mem::replace(&mut is_runnable[index], true) {
                runnable.push_back(index);
            }
        }
    }
    Ok(())
}

/// Writes for one turn; false if the socket takes no more now.
fn fill(mut stream: &UnixStream, bytes: &[u8], left: &mut usize) -> Result<bool> {
    let mut budget = TURN_BYTES;
    for _ in 0..TURN_WRITES {
        match stream.write(&bytes[bytes.len() - *left..]) {
            Ok(count) => {
                *left -= count;
                if *left == 0 {
                    *left = bytes.len();
                }
                budget = budget.saturating_sub(count);
                if budget == 0 {
                    break;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error).context("cannot write to a guest"),
        }
    }
    Ok(true)
}
