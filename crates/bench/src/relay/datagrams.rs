//! Datagrams at a pace, and how many of them arrive.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use rustix::net::sockopt::{set_socket_recv_buffer_size_force, set_socket_send_buffer_size_force};
use sandwire_kernel_net::{
    datagrams::{Receiver, Sender},
    netns::Home,
};

use super::place::DESTINATION;

const PORT: u16 = 9000;
/// Datagrams by one call.
const TOGETHER: u32 = 32;
/// Paces, in thousands per second: each a fifth above the one before.
const FIRST: f64 = 20.0;
const STEP: f64 = 1.2;
const LAST: f64 = 2000.0;
/// What may be lost at a pace that counts.
const LOSS_MAX: f64 = 0.01;
const BUFFER: usize = 8 << 20;

/// The most that arrived per second, in thousands, at a pace at which less than a hundredth was lost.
pub(super) fn highest(bytes: usize, time: Duration) -> Result<f64> {
    let sink = open("dest", SocketAddr::new(DESTINATION, PORT))?;
    let source = open("box", "0.0.0.0:0".parse()?)?;
    let mut best: Option<f64> = None;
    let mut pace = FIRST;
    while pace < LAST {
        let (sent, received) = offer(&source, &sink, bytes, pace, time)?;
        let seconds = time.as_secs_f64();
        let delivered = received / seconds / 1000.0;
        if received < sent * (1.0 - LOSS_MAX) {
            break;
        }
        best = Some(best.map_or(delivered, |best: f64| best.max(delivered)));
        pace *= STEP;
    }
    best.context("datagrams are lost at the slowest pace")
}

/// A socket in a namespace, with room for bursts.
fn open(namespace: &str, address: SocketAddr) -> Result<UdpSocket> {
    let home = Home::here()?;
    let inside = home.enter(namespace)?;
    let socket = UdpSocket::bind(address).with_context(|| format!("cannot bind to {address}"))?;
    drop(inside);
    socket
        .set_nonblocking(true)
        .context("cannot set up a socket")?;
    set_socket_recv_buffer_size_force(&socket, BUFFER).context("cannot set up a socket")?;
    set_socket_send_buffer_size_force(&socket, BUFFER).context("cannot set up a socket")?;
    Ok(socket)
}

/// Offers datagrams at a pace, in thousands per second; says how many were sent, and how many arrived.
fn offer(
    source: &UdpSocket,
    sink: &UdpSocket,
    bytes: usize,
    pace: f64,
    time: Duration,
) -> Result<(f64, f64)> {
    let (received, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let counting = scope.spawn(|| count(sink, &received, &is_over));
        let payload = vec![7; bytes];
        let to = SocketAddr::new(DESTINATION, PORT);
        let together: Vec<(SocketAddr, &[u8])> =
            (0..TOGETHER).map(|_| (to, &payload[..])).collect();
        let mut sender = Sender::one_by_one();
        let started = Instant::now();
        let mut sent = 0.0;
        while started.elapsed() < time {
            let due = started.elapsed().as_secs_f64() * pace * 1000.0;
            if sent + f64::from(TOGETHER) > due {
                thread::sleep(Duration::from_micros(50));
                continue;
            }
            let outcome = sender.send(source, &together, false, Instant::now());
            // What finds no room is as good as lost.
            sent += f64::from(TOGETHER);
            if outcome.sent == 0 {
                thread::yield_now();
            }
        }
        // The last ones are still under way.
        thread::sleep(Duration::from_millis(200));
        is_over.store(true, Ordering::Relaxed);
        counting
            .join()
            .map_err(|_| anyhow!("the receiver panicked"))??;
        Ok((sent, precise(received.load(Ordering::Relaxed))))
    })
}

fn count(sink: &UdpSocket, received: &AtomicU64, is_over: &AtomicBool) -> Result<()> {
    let mut receiver = Receiver::new(64, 2048);
    while !is_over.load(Ordering::Relaxed) {
        match receiver.receive(sink) {
            Ok(count) => {
                received.fetch_add(count as u64, Ordering::Relaxed);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                thread::sleep(Duration::from_micros(100));
            }
            Err(error) => return Err(error).context("cannot receive"),
        }
    }
    Ok(())
}

#[expect(
    clippy::cast_precision_loss,
    reason = "nobody sends 2^53 datagrams here"
)]
fn precise(count: u64) -> f64 {
    count as f64
}
