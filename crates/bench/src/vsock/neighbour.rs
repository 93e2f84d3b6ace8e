//! What a guest loses by hostile ones beside it, on the same worker of the service.
//!
//! Two guests advertise buffers of 4 GiB, and ask for connections far faster than the limits allow. One takes what
//! comes and drops it; the other leaves everything in its queue, and the host has a lot for both. The neighbour
//! moves bytes as always, first without them, then beside them. They keep to a pace that leaves the neighbour's own
//! thread its processor: on two of them a driver that spins would take away more than the service could.

use std::{
    io::{ErrorKind, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use sandwire_api::vsock::VsockRefusal;
use sandwire_vsock_guest::{Guest, Header, Kind, Operation, packet::HOST_CID};
use sandwire_vsock_host::{
    limits::Limits,
    readiness::{Interest, Poller},
};

use super::{
    backend::{Backend, Program},
    host,
    role::{Role, join},
    throughput::{Direction, Place, precise},
};
use crate::record::Record;

/// The neighbour without them, and beside them.
pub(super) const ALONE: &str = "neighbour_alone";
pub(super) const BESIDE: &str = "neighbour_beside_hostile";
/// What they do.
pub(super) const HOSTILE: &str = "hostile";

/// Connections that each asks for per second: 25 times what the service grants.
pub(super) const CONNECTS_PER_SECOND: u32 = 50_000;
const STEP: Duration = Duration::from_millis(1);
/// Connections on which the host has more for a hostile guest than it takes.
const PUSHED: usize = 64;
const PATIENCE: Duration = Duration::from_secs(10);
const WRITE: usize = 65_536;

/// Measures both directions without and with them.
pub(super) fn measure(time: Duration, record: &mut Record) -> Result<()> {
    let limits = Limits::default();
    let program = Program::Sandwire {
        busy_poll: Duration::ZERO,
        connection_bytes: limits.connection_bytes,
        connects_per_second: limits.connects_per_second,
    };
    let mut place = Place::build(program, 3)?;
    let mut hostile = place.take_guests_from(1);
    row(&mut place, ALONE, time, record)?;

    let port = place.backend.new_port();
    let paths = [1, 2].map(|vm| place.backend.host_socket(vm, port));
    let listeners = paths.iter().map(|path| host::listen(path));
    let listeners: Vec<_> = listeners.collect::<Result<_>>()?;
    let (stop, asked) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let begun = Instant::now();
        let host = scope.spawn(|| {
            Role::Host.pin()?;
            push(&listeners, &stop)
        });
        let flood = scope.spawn(|| {
            Role::Hostile.pin()?;
            flood(&mut hostile, port, &asked, &stop)
        });
        let outcome = wait_for_refusals(&mut place.backend)
            .and_then(|()| row(&mut place, BESIDE, time, record));
        let connects = precise(asked.load(Ordering::Relaxed)) / begun.elapsed().as_secs_f64();
        record.add(HOSTILE, "connects_asked", "per second", &[connects]);
        stop.store(true, Ordering::Relaxed);
        join(flood)?;
        join(host)?;
        outcome
    })?;
    ensure!(
        place.violations().is_none(),
        "the device broke a rule towards the neighbour"
    );
    Ok(())
}

fn row(place: &mut Place, case: &str, time: Duration, record: &mut Record) -> Result<()> {
    for direction in Direction::ALL {
        let metric = format!("{}_64k", direction.name());
        let figures = place.measure(direction, WRITE, time);
        let figures = figures.with_context(|| format!("{case}, {metric}"))?;
        figures.add(record, case, &metric);
    }
    Ok(())
}

/// Waits until the service has refused the guest that takes what comes: the flood is there.
fn wait_for_refusals(backend: &mut Backend) -> Result<()> {
    let mut client = backend.client()?;
    let begun = Instant::now();
    loop {
        let all = client.traffic(None)?;
        let refused = |vm: &sandwire_vsock_host::control::VmTraffic| {
            vm.traffic.refusals.get(&VsockRefusal::TooFast).copied()
        };
        if all.iter().filter_map(refused).sum::<u64>() > u64::from(CONNECTS_PER_SECOND) / 100 {
            return Ok(());
        }
        ensure!(begun.elapsed() < PATIENCE, "nothing of a flood is refused");
        thread::sleep(STEP);
    }
}

/// Asks for connections at the pace until told to stop. The first guest takes what comes, the second nothing.
fn flood(guests: &mut [Guest], port: u32, asked: &AtomicU64, stop: &AtomicBool) -> Result<()> {
    let burst = CONNECTS_PER_SECOND / 1000;
    let mut next = Instant::now();
    let mut src_port = 1024;
    while !stop.load(Ordering::Relaxed) {
        for (guest, takes) in guests.iter_mut().zip([true, false]) {
            let transport = guest.transport();
            let src_cid = transport.cid();
            for _ in 0..burst {
                src_port += 1;
                let header = Header {
                    src_cid,
                    dst_cid: HOST_CID,
                    src_port,
                    dst_port: port,
                    kind: Kind::Stream as u16,
                    op: Operation::Request as u16,
                    buf_alloc: u32::MAX,
                    ..Header::default()
                };
                if !transport.send(&header, &[]) {
                    break;
                }
                asked.fetch_add(1, Ordering::Relaxed);
            }
            transport.kick();
            while takes && transport.receive().is_some() {}
        }
        next = (next + STEP).max(Instant::now());
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

/// Accepts what the service lets through, and sends as much as it takes on the first connections of each guest.
fn push(listeners: &[UnixListener], stop: &AtomicBool) -> Result<()> {
    let mut poller = Poller::new().context("cannot make an epoll instance")?;
    for (listener, token) in listeners.iter().zip(0..) {
        listener.set_nonblocking(true)?;
        poller.add(listener, token, Interest::READ)?;
    }
    let block = vec![0x5a; WRITE];
    let mut kept: Vec<Vec<UnixStream>> = listeners.iter().map(|_| Vec::new()).collect();
    while !stop.load(Ordering::Relaxed) {
        for ready in poller.wait(Some(Instant::now() + 20 * STEP))? {
            let index = usize::try_from(ready.token)?;
            while let Ok((stream, _)) = listeners[index].accept() {
                if kept[index].len() < PUSHED {
                    fill(&stream, &block)?;
                    kept[index].push(stream);
                }
            }
        }
    }
    Ok(())
}

/// Writes until nothing more is taken.
fn fill(mut stream: &UnixStream, block: &[u8]) -> Result<()> {
    stream.set_nonblocking(true)?;
    loop {
        match stream.write(block) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            // The service may have ended it.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
                ) =>
            {
                return Ok(());
            }
            Err(error) => return Err(error).context("cannot write to a hostile guest"),
        }
    }
}
