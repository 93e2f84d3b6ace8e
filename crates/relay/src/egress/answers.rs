//! Sockets with addresses of others, from which their answers are passed on.

use std::{
    collections::HashMap,
    net::{SocketAddr, UdpSocket},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rustix::io::Errno;
use sandwire_kernel_net::{Error, transparent};

use crate::{seldom::Seldom, steering::MARK_PASS};

/// Somebody has the port on all addresses, and shares it with nobody.
const TAKEN: i32 = Errno::ADDRINUSE.raw_os_error();

/// Those that are kept for the next answer.
#[derive(Default)]
pub(super) struct Answers(Mutex<Sockets>);

#[derive(Default)]
struct Sockets {
    /// With the time of the last answer.
    by_address: HashMap<SocketAddr, (Arc<UdpSocket>, Instant)>,
    /// That a port is taken, and that a socket can't be had for another reason: each answer finds it out.
    taken: Seldom,
    failed: Seldom,
}

impl Answers {
    fn lock(&self) -> MutexGuard<'_, Sockets> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One with that address, unless there can be none. At most so many are kept.
    pub(super) fn socket(&self, from: SocketAddr, most: usize) -> Option<Arc<UdpSocket>> {
        let now = Instant::now();
        let mut sockets = self.lock();
        if let Some((socket, last)) = sockets.by_address.get_mut(&from) {
            *last = now;
            return Some(socket.clone());
        }
        if sockets.by_address.len() >= most {
            sockets.halve();
        }
        match transparent::udp_sender(from, MARK_PASS) {
            Ok(socket) => {
                let socket = Arc::new(socket);
                sockets.by_address.insert(from, (socket.clone(), now));
                Some(socket)
            }
            Err(error) => {
                sockets.say(from, &error, now);
                None
            }
        }
    }

    /// Closes those from which nothing was passed on for so long: while one is open, no service of this host can have its
    /// port on all addresses.
    pub(super) fn close_idle(&self, at_most: Duration) {
        self.lock().close_idle(Instant::now(), at_most);
    }
}

impl Sockets {
    /// The half that was used least lately goes, so that this is seldom done.
    fn halve(&mut self) {
        let mut times: Vec<Instant> = self.by_address.values().map(|(_, last)| *last).collect();
        times.sort_unstable();
        let middle = times[times.len() / 2];
        self.by_address.retain(|_, (_, last)| *last > middle);
    }

    fn close_idle(&mut self, now: Instant, at_most: Duration) {
        self.by_address
            .retain(|_, (_, last)| now.saturating_duration_since(*last) < at_most);
    }

    fn say(&mut self, from: SocketAddr, error: &Error, now: Instant) {
        if error.errno() != Some(TAKEN) {
            if let Some(left_out) = self.failed.is_due(now) {
                tracing::warn!(%error, left_out, "an answer can't be passed on");
            }
        } else if let Some(left_out) = self.taken.is_due(now) {
            tracing::warn!(
                %from,
                left_out,
                "answers can't be passed on: a service of this host has UDP port {} on all addresses",
                from.port()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_times(times: &[Instant]) -> Sockets {
        let mut sockets = Sockets::default();
        for (last, port) in times.iter().zip(1..) {
            let socket = Arc::new(UdpSocket::bind("127.0.0.1:0").unwrap());
            let from = SocketAddr::from(([192, 0, 2, 1], port));
            sockets.by_address.insert(from, (socket, *last));
        }
        sockets
    }

    #[test]
    fn a_socket_that_is_idle_is_closed_and_one_that_is_used_stays() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut sockets = of_times(&[start, start + 30 * second]);
        let first = SocketAddr::from(([192, 0, 2, 1], 1));
        let closed = Arc::downgrade(&sockets.by_address[&first].0);
        sockets.close_idle(start + 59 * second, 60 * second);
        assert_eq!(sockets.by_address.len(), 2);
        sockets.close_idle(start + 60 * second, 60 * second);
        let left: Vec<u16> = sockets.by_address.keys().map(SocketAddr::port).collect();
        assert_eq!((left, closed.strong_count()), (vec![2], 0));
    }

    #[test]
    fn of_too_many_those_go_that_were_used_least_lately() {
        let start = Instant::now();
        let times: Vec<Instant> = (0..8).map(|ms| start + Duration::from_millis(ms)).collect();
        let mut sockets = of_times(&times);
        sockets.halve();
        let mut left: Vec<u16> = sockets.by_address.keys().map(SocketAddr::port).collect();
        left.sort_unstable();
        assert_eq!(left, [6, 7, 8]);
    }
}
