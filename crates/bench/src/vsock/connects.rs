//! How many connections per second a guest can open to the host and end again.

use std::{
    collections::VecDeque,
    os::unix::net::UnixListener,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use sandwire_vsock_guest::{Guest, Kind, packet::HOST_CID, socket::State};
use sandwire_vsock_host::readiness::{Interest, Poller};

use super::{
    host,
    role::{Role, join},
    throughput::{Place, precise},
};

/// Connections that are being opened at once.
const WINDOW: usize = 16;
const PATIENCE: Duration = Duration::from_secs(10);

/// Connections per second by one guest: opened, answered, reset.
pub(super) fn measure(place: &mut Place, time: Duration) -> Result<f64> {
    let port = place.backend.new_port();
    let path = place.backend.host_socket(0, port);
    let listener = host::listen(&path)?;
    let stop = AtomicBool::new(false);
    let rate = thread::scope(|scope| {
        let host = scope.spawn(|| {
            Role::Host.pin()?;
            accept(&listener, &stop)
        });
        let guest = scope.spawn(|| {
            Role::Guest.pin()?;
            open(place.guest(), port, time)
        });
        let rate = join(guest);
        stop.store(true, Ordering::Relaxed);
        join(host)?;
        rate
    });
    std::fs::remove_file(path)?;
    rate
}

fn open(guest: &mut Guest, port: u32, time: Duration) -> Result<f64> {
    let started = Instant::now();
    let mut opening = VecDeque::new();
    let mut count = 0_u64;
    let mut last = started;
    while started.elapsed() < time {
        while opening.len() < WINDOW {
            opening.push_back(guest.start_open(Kind::Stream, HOST_CID, port));
        }
        guest.poll();
        let before = count;
        while let Some(socket) = opening.front().copied() {
            match guest.socket(socket).state {
                State::Connecting => break,
                State::Established => guest.reset(socket),
                // The host has accepted and ended it already.
                State::Closed => {}
                State::Reset => bail!("a connection was refused"),
            }
            opening.pop_front();
            count += 1;
        }
        if count > before {
            last = Instant::now();
            continue;
        }
        ensure!(last.elapsed() < PATIENCE, "a connection isn't answered");
        guest
            .transport()
            .wait(Instant::now() + PATIENCE, "connect")?;
    }
    let rate = precise(count) / started.elapsed().as_secs_f64();
    for socket in opening {
        guest.reset(socket);
    }
    Ok(rate)
}

/// Accepts connections and drops them, until told to stop.
fn accept(listener: &UnixListener, stop: &AtomicBool) -> Result<()> {
    listener.set_nonblocking(true)?;
    let mut poller = Poller::new()?;
    poller.add(listener, 0, Interest::READ)?;
    while !stop.load(Ordering::Relaxed) {
        poller.wait(Some(Instant::now() + Duration::from_millis(20)))?;
        while let Ok(connection) = listener.accept() {
            drop(connection);
        }
    }
    Ok(())
}
