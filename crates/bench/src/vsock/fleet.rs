//! The guests' side: one thread drives all of them, each for a turn while it has something to do.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use anyhow::{Context, Result};
use sandwire_vsock_guest::{
    Guest, GuestError, Kind, Socket,
    transport::{RECEIVE, TRANSMIT},
};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::buffer::Buffer;

/// Writes of one guest before it is another's turn.
const TURN_WRITES: usize = 64;
/// Bytes likewise.
const TURN_BYTES: usize = 256 * 1024;
/// Longest sleep, so that the end is noticed.
const SLEEP_MS: i32 = 20;

/// What a guest's turn came to.
enum Next {
    /// It could go on at once.
    Again,
    /// It waits for the device.
    Wait,
}

/// Lets the guests send, each by a connection of its own, writes of that size until told to stop.
pub(super) fn send(guests: &mut [Guest], port: u32, write: usize, stop: &AtomicBool) -> Result<()> {
    let sockets = guests
        .iter_mut()
        .map(|guest| guest.open_stream(port))
        .collect::<Result<Vec<Socket>, GuestError>>()
        .context("a guest cannot reach the host")?;
    let bytes = Buffer::new(0x5a, write);
    let mut left = vec![0; guests.len()];
    let outcome = drive(guests, stop, |index, guest| {
        let left = &mut left[index];
        let mut budget = TURN_BYTES;
        for _ in 0..TURN_WRITES {
            if *left == 0 {
                *left = write;
            }
            let sent = guest.try_send(sockets[index], &bytes[write - *left..])?;
            // Linux kicks for each packet, if the device wants to know.
            guest.kick();
            *left -= sent;
            if *left > 0 {
                return Ok(Next::Wait);
            }
            budget = budget.saturating_sub(sent);
            if budget == 0 {
                break;
            }
        }
        Ok(Next::Again)
    });
    for (guest, socket) in guests.iter_mut().zip(sockets) {
        guest.reset(socket);
    }
    outcome
}

/// Lets each guest accept one connection and take what comes, until told to stop. The bytes are counted.
pub(super) fn receive(
    guests: &mut [Guest],
    port: u32,
    received: &AtomicU64,
    stop: &AtomicBool,
) -> Result<()> {
    let mut sockets: Vec<Option<(Socket, u64)>> = vec![None; guests.len()];
    let mut scratch = vec![0; 64 * 1024];
    let outcome = drive(guests, stop, |index, guest| {
        let Some((socket, seen)) = &mut sockets[index] else {
            if let Some(socket) = guest.try_accept(Kind::Stream, port) {
                guest.socket_mut(socket).drain = true;
                // What came along with the request isn't drained by itself.
                guest.try_receive(socket, &mut scratch)?;
                sockets[index] = Some((socket, 0));
            }
            return Ok(Next::Wait);
        };
        let now = guest.socket(*socket).received;
        received.fetch_add(now - *seen, Ordering::Relaxed);
        *seen = now;
        Ok(Next::Wait)
    });
    for (guest, socket) in guests.iter_mut().zip(sockets) {
        guest.stop_listening(Kind::Stream, port);
        if let Some((socket, _)) = socket {
            guest.reset(socket);
        }
    }
    outcome
}

/// Gives turns to those who have something to do, and sleeps while nobody has.
fn drive(
    guests: &mut [Guest],
    stop: &AtomicBool,
    mut turn: impl FnMut(usize, &mut Guest) -> Result<Next, GuestError>,
) -> Result<()> {
    let epoll = watch(guests)?;
    let mut runnable: VecDeque<usize> = (0..guests.len()).collect();
    let mut is_runnable = vec![true; guests.len()];
    let mut events = vec![EpollEvent::default(); 256];
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..runnable.len() {
            let Some(index) = runnable.pop_front() else {
                break;
            };
            let guest = &mut guests[index];
            guest.poll();
            // So that memory which is still in the caches is used again first, as a kernel would.
            guest.transport().reclaim();
            let next = turn(index, guest).context("a guest's connection ended")?;
            guest.kick();
            if matches!(next, Next::Again) || guest.transport().arm() {
                runnable.push_back(index);
            } else {
                is_runnable[index] = false;
            }
        }
        // One guest alone that has work needn't ask who else has.
        if !runnable.is_empty() && guests.len() == 1 {
            continue;
        }
        let sleep = if runnable.is_empty() { SLEEP_MS } else { 0 };
        let count = epoll.wait(sleep, &mut events).unwrap_or(0);
        for event in &events[..count] {
            let index = usize::try_from(event.data()).unwrap_or(usize::MAX);
            if let Some(is_runnable) = is_runnable.get_mut(index)
                && !std::mem::replace(is_runnable, true)
            {
                runnable.push_back(index);
            }
        }
    }
    Ok(())
}

/// An epoll instance that tells which guest's device calls.
fn watch(guests: &mut [Guest]) -> Result<Epoll> {
    let epoll = Epoll::new().context("cannot make an epoll instance")?;
    for (guest, number) in guests.iter_mut().zip(0..) {
        for queue in [RECEIVE, TRANSMIT] {
            let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, number);
            let fd = guest.transport().call(queue);
            epoll
                .ctl(ControlOperation::Add, fd, event)
                .context("cannot watch a guest's queue")?;
        }
    }
    Ok(epoll)
}
