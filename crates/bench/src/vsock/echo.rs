//! How long a small message takes to the host and back, and how long the same wake-ups take alone.
//!
//! Sleeping, each of driver, service and host waits for the one before. Polling, the service looks for work
//! without sleeping, and one thread is driver and host in turn, so that two processors are enough.

use std::{
    io::{self, Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::{
    event::{EventfdFlags, eventfd},
    stdio,
};
use sandwire_vsock_host::readiness::{Interest, Poller};

use super::{
    host,
    role::{Role, join},
    throughput::Place,
};

const BYTES: usize = 64;
/// Round trips before the first that counts.
const WARM_UP: u32 = 500;
const PATIENCE: Duration = Duration::from_secs(20);
const KICK: u64 = 0;
const SOCKET: u64 = 1;
/// What the stand-in for a service is called on the command line.
pub(super) const BARE_HOPS: &str = "bare-hops";

/// Round trips through a service, in microseconds, with everybody asleep in between.
pub(super) fn sleeping(place: &mut Place, count: u32) -> Result<Vec<f64>> {
    let port = place.backend.new_port();
    let listener = host::listen(&place.backend.host_socket(0, port))?;
    thread::scope(|scope| {
        let host = scope.spawn(|| {
            Role::Host.pin()?;
            let stream = host::accept(&listener)?;
            answer(&stream)
        });
        let guest = scope.spawn(|| {
            Role::Guest.pin()?;
            let guest = place.guest();
            let socket = guest.open_stream(port)?;
            let message = [0x5a; BYTES];
            let mut got = [0; BYTES];
            let samples = repeat(count, || {
                guest.send(socket, &message)?;
                let mut left = BYTES;
                while left > 0 {
                    let count = guest.receive(socket, &mut got[..left])?;
                    ensure!(count > 0, "the host hung up");
                    left -= count;
                }
                Ok(())
            });
            guest.reset(socket);
            samples
        });
        let samples = join(guest);
        join(host)?;
        samples
    })
}

/// The same with nobody asleep.
pub(super) fn polling(place: &mut Place, count: u32) -> Result<Vec<f64>> {
    let port = place.backend.new_port();
    let listener = host::listen(&place.backend.host_socket(0, port))?;
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            Role::Guest.pin()?;
            let guest = place.guest();
            let socket = guest.open_stream(port)?;
            let mut stream = host::accept(&listener)?;
            stream.set_nonblocking(true)?;
            let message = [0x5a; BYTES];
            let (mut got, mut seen) = ([0; BYTES], [0; BYTES]);
            let samples = repeat(count, || {
                guest.try_send(socket, &message)?;
                guest.kick();
                let deadline = Instant::now() + PATIENCE;
                let mut left = BYTES;
                while left > 0 {
                    match stream.read(&mut seen) {
                        Ok(count) => stream.write_all(&seen[..count])?,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        Err(error) => return Err(error.into()),
                    }
                    guest.poll();
                    left -= guest.try_receive(socket, &mut got[..left])?;
                    ensure!(Instant::now() < deadline, "no answer in time");
                }
                Ok(())
            });
            guest.reset(socket);
            samples
        });
        join(thread)
    })
}

/// The same wake-ups as [`sleeping`] without vsock: driver, eventfd, a process in the service's place, a Unix
/// socket, the host, and back.
pub(super) fn bare_hops(count: u32) -> Result<Vec<f64>> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let (kick, call) = (eventfd(0, flags)?, eventfd(0, flags)?);
    let (host_end, service_end) = UnixStream::pair().context("cannot make a pair of sockets")?;
    let executable = std::env::current_exe().context("cannot find this executable")?;
    let mut command = Command::new(executable);
    command
        .args(["bench", "vsock", "--stand-in", BARE_HOPS])
        .stdin(Stdio::from(kick.try_clone()?))
        .stdout(Stdio::from(OwnedFd::from(service_end)))
        .stderr(Stdio::from(call.try_clone()?));
    let mut child = Role::Service.run(|| command.spawn().context("cannot start a process"))?;
    // Its end of the socket must be its alone.
    drop(command);
    let samples = thread::scope(|scope| {
        let host = scope.spawn(|| {
            Role::Host.pin()?;
            answer(&host_end)
        });
        let guest = scope.spawn(|| {
            Role::Guest.pin()?;
            let mut poller = Poller::new().context("cannot make an epoll instance")?;
            poller.add_edge(&call, KICK, Interest::READ)?;
            repeat(count, || {
                rustix::io::write(&kick, &1_u64.to_ne_bytes())?;
                loop {
                    let ready = poller.wait(Some(Instant::now() + PATIENCE))?;
                    ensure!(!ready.is_empty(), "no answer in time");
                    // At first it is reported as writable.
                    if ready[0].read {
                        return Ok(());
                    }
                }
            })
        });
        let samples = join(guest);
        // That ends the process, and with it the host's thread.
        let killed = child.kill();
        join(host)?;
        killed.context("cannot end a process")?;
        samples
    });
    child.wait().context("cannot wait for a process")?;
    samples
}

/// The process in the service's place: from standard input, an eventfd, to standard output, a socket, and from
/// there to standard error, an eventfd. Eventfds are never read, as in the service.
pub(super) fn stand_in() -> Result<()> {
    let (kick, socket, call) = (stdio::stdin(), stdio::stdout(), stdio::stderr());
    let mut poller = Poller::new()?;
    poller.add_edge(kick, KICK, Interest::READ)?;
    poller.add(socket, SOCKET, Interest::READ)?;
    let mut bytes = [0; BYTES];
    loop {
        let ready = poller.wait(None)?.to_vec();
        for ready in ready {
            if ready.token == KICK {
                if ready.read {
                    rustix::io::write(socket, &bytes)?;
                }
            } else {
                if rustix::io::read(socket, &mut bytes)? == 0 {
                    return Ok(());
                }
                rustix::io::write(call, &1_u64.to_ne_bytes())?;
            }
        }
    }
}

/// Sends back what comes until the other side ends.
fn answer(mut stream: &UnixStream) -> Result<()> {
    let mut bytes = [0; BYTES];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => stream.write_all(&bytes[..count]).context("cannot answer")?,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
            Err(error) => return Err(error).context("cannot read what to answer"),
        }
    }
}

fn repeat(count: u32, mut round_trip: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    for _ in 0..WARM_UP {
        round_trip()?;
    }
    (0..count)
        .map(|_| {
            let started = Instant::now();
            round_trip()?;
            Ok(started.elapsed().as_secs_f64() * 1e6)
        })
        .collect()
}
