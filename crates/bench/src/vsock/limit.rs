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

/// Gigabits per second by writes of that size.
pub(super) fn measure(buffer: Option<usize>, write: usize, time: Duration) -> Result<f64> {
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
            let (bytes, mut sender) = (vec![0x5a; write], &sender);
            while !stop.load(Ordering::Relaxed) {
                sender.write_all(&bytes).context("cannot write")?;
            }
            Ok(sender.shutdown(Shutdown::Write)?)
        });
        let reader = scope.spawn(|| {
            Role::Service.pin()?;
            let (mut bytes, mut receiver) = (vec![0; READ_BYTES], &receiver);
            while let count @ 1.. = receiver.read(&mut bytes).context("cannot read")? {
                received.fetch_add(count as u64, Ordering::Relaxed);
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
