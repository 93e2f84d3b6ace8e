//! Sockets with addresses of others, from which their answers are passed on.

use std::{
    collections::HashMap,
    net::{SocketAddr, UdpSocket},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rustix::io::Errno;
use sandwire_kernel_net::{Error, transparent};

use crate::steering::MARK_PASS;

/// Somebody has the port on all addresses, and shares it with nobody.
const TAKEN: i32 = Errno::ADDRINUSE.raw_os_error();
/// How often that is said. Each answer finds it out.
const SAID_EACH: Duration = Duration::from_secs(10);

/// Those that are kept for the next answer.
#[derive(Default)]
pub(super) struct Answers(Mutex<Sockets>);

#[derive(Default)]
struct Sockets {
    /// With the time of the last answer.
    by_address: HashMap<SocketAddr, (Arc<UdpSocket>, Instant)>,
    /// When it was last said that a port is taken.
    said: Option<Instant>,
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
            tracing::warn!(%error, "an answer can't be passed on");
        } else if self.is_to_be_said(now) {
            tracing::warn!(
                %from,
                "answers can't be passed on: a service of this host has UDP port {} on all addresses",
                from.port()
            );
        }
    }

    /// Whether that a port is taken wasn't said just now; it is then.
    fn is_to_be_said(&mut self, now: Instant) -> bool {
        let is_due = self
            .said
            .is_none_or(|said| now.saturating_duration_since(said) >= SAID_EACH);
        if is_due {
            self.said = Some(now);
        }
        is_due
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

    #[test]
    fn a_port_that_is_taken_is_not_said_with_each_answer() {
        let mut sockets = Sockets::default();
        let start = Instant::now();
        let said = [0, 1, 9, 10, 11, 25].map(|seconds| {
            let now = start + Duration::from_secs(seconds);
            sockets.is_to_be_said(now)
        });
        assert_eq!(said, [true, false, false, true, false, true]);
    }
}
