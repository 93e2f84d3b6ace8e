//! Ports of sockets for datagrams. Each address that sends has one, of those that the machine has for all that it calls.
//!
//! Half of them are given out at most, so that there are some for the machine's own programs, and a quarter to one host. Once
//! these are taken, who has most loses one ([`crate::fair`]), and its socket is closed.

use std::{
    fmt::Display,
    fs,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use crate::{
    fair::{Bounds, Fair},
    room::{Room, Rooms},
    seldom::Seldom,
};

const RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
/// The kernel's own range, should it not say.
const RANGE_USUAL: (u16, u16) = (32_768, 60_999);

/// How many may be taken.
pub(crate) struct Ports {
    rooms: Rooms,
    /// That there is no socket, which each datagram finds out.
    said: Mutex<Seldom>,
}

impl Ports {
    /// Those of the machine, as its range is now.
    pub(crate) fn of_machine() -> Self {
        let text = fs::read_to_string(RANGE).unwrap_or_default();
        let (first, last) = range(&text).unwrap_or(RANGE_USUAL);
        Self::of(usize::from(last.saturating_sub(first)) + 1)
    }

    fn of(there: usize) -> Self {
        Self {
            rooms: Fair::new(Bounds {
                per_sender: usize::MAX,
                per_host: there / 4,
                all: there / 2,
            }),
            said: Mutex::default(),
        }
    }

    /// Takes one, if need be from who has most: of the host's senders, or of another host.
    pub(super) fn take(&self, host: &Arc<str>, sender: &Arc<str>) -> Option<Room> {
        Room::take(&self.rooms, host, sender)
    }

    /// Says why there is no socket, unless that was said just now.
    pub(super) fn say(&self, host: &str, reason: &dyn Display) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(left_out) = said.is_due(Instant::now()) {
            tracing::warn!(%host, %reason, left_out, "no socket for datagrams");
        }
    }
}

fn range(text: &str) -> Option<(u16, u16)> {
    let mut ends = text.split_whitespace().map(str::parse);
    Some((ends.next()?.ok()?, ends.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_read_as_the_kernel_writes_it() {
        assert_eq!(range("32768\t60999\n"), Some((32_768, 60_999)));
        assert_eq!(range(""), None);
    }

    #[test]
    fn two_greedy_senders_leave_others_of_their_host_some_and_other_hosts_theirs() {
        let ports = Ports::of(64);
        let mut taken = Vec::new();
        let mut take = |host: &str, sender: &str| {
            let port = ports.take(&host.into(), &sender.into());
            let displaced = port.as_ref().map(|port| port.displaced);
            taken.extend(port);
            displaced
        };
        for _ in 0..8 {
            assert_eq!(take("a", "greedy"), Some(0));
            assert_eq!(take("a", "second"), Some(0));
        }
        assert_eq!(take("a", "greedy"), None, "a quarter is one host's");
        for sender in ["few", "few", "other"] {
            assert_eq!(take("a", sender), Some(1));
        }
        assert_eq!(take("a", "second"), None);
        let of_others = ["b", "c"].map(|host| (0..16).filter_map(|_| take(host, "one")).count());
        assert_eq!(of_others, [16, 10], "half is the machine's");
        assert_eq!(take("c", "few"), Some(1));
    }
}
