//! The limit of all that goes through a Unix socket: one thread writes, another one reads, nothing between.

use std::{
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::net::sockopt::{set_socket_send_buffer_size, set_socket_send_buffer_size_force};

use super::{
    buffer::Buffer,
    host::READ_BYTES,
    role::{Role, join},
    throughput::precise,
};

const WARM_UP: Duration = Duration::from_millis(100);

/// What the sender's socket may buffer: the kernel's default without.
pub(super) const SEND_BUFFERS: [(&str, Option<usize>); 3] = [
    ("unix_socket_default", None),
    ("unix_socket_1m", Some(1 << 20)),
    ("unix_socket_4m", Some(4 << 20)),
];

/// A pair whose reader has as much memory as the receive buffers of many guests together, for comparison with
/// them: none of it is in a cache when it is written to.
pub(super) const SPREAD: &str = "unix_socket_4m_into_100_mib";
/// That memory: 256 buffers of 4 KiB for each of 100 guests.
pub(super) const SPREAD_BYTES: usize = 100 << 20;

/// Gigabits per second by writes of that size, read into memory of `memory` bytes by turns.
pub(super) fn measure(
    buffer: Option<usize>,
    write: usize,
    memory: usize,
    time: Duration,
) -> Result<f64> {
    let (sender, receiver) = UnixStream::pair().context("cannot make a pair of sockets")?;
    if let Some(bytes) = buffer {
        // Over the system's limit as root; up to it otherwise.
        set_socket_send_buffer_size_force(&sender, bytes)
            .or_else(|_| set_socket_send_buffer_size(&sender, bytes))
            .context("cannot set the size of a socket's buffer")?;
    }
    let (received, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            Role::Guest.pin()?;
            let (bytes, mut sender) = (Buffer::new(0x5a, write), &sender);
            while !stop.load(Ordering::Relaxed) {
                sender.write_all(&bytes).context("cannot write")?;
            }
            Ok(sender.shutdown(Shutdown::Write)?)
        });
        let reader = scope.spawn(|| {
            Role::Service.pin()?;
            let (mut bytes, mut receiver) = (Buffer::new(0, memory), &receiver);
            let places = memory / READ_BYTES;
            for place in (0..places).cycle() {
                let room = &mut bytes[place * READ_BYTES..][..READ_BYTES];
                match receiver.read(room).context("cannot read")? {
                    0 => break,
                    count => received.fetch_add(count as u64, Ordering::Relaxed),
                };
            }
            Ok(())
        });
        thread::sleep(WARM_UP);
        let (before, started) = (received.load(Ordering::Relaxed), Instant::now());
        thread::sleep(time);
        let bytes = received.load(Ordering::Relaxed) - before;
        let seconds = started.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        join(writer)?;
        join(reader)?;
        Ok(precise(bytes) * 8.0 / 1e9 / seconds)
    })
}
