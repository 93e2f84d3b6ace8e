//! Ports of sockets for datagrams. Each address that sends has one, of those that the machine has for all that it calls.
//!
//! Half of them are given out at most, so that there are some for the machine's own programs, and a quarter to one host.

use std::{
    fmt::Display,
    fs,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use crate::{
    seldom::Seldom,
    senders::{Quota, Share},
};

const RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
/// The kernel's own range, should it not say.
const RANGE_USUAL: (u16, u16) = (32_768, 60_999);

/// How many may be taken.
pub(crate) struct Ports {
    all: Arc<Quota>,
    hosts: Arc<Quota>,
    /// That there is no socket, which each datagram finds out.
    said: Mutex<Seldom>,
}

/// One of them; given back when dropped.
pub(super) struct Port {
    _of: [Share; 2],
}

impl Ports {
    /// Those of the machine, as its range is now.
    pub(crate) fn of_machine() -> Self {
        let text = fs::read_to_string(RANGE).unwrap_or_default();
        let (first, last) = range(&text).unwrap_or(RANGE_USUAL);
        let there = usize::from(last.saturating_sub(first)) + 1;
        Self {
            all: Quota::new(there / 2),
            hosts: Quota::new(there / 4),
            said: Mutex::default(),
        }
    }

    /// Takes one, unless the host has as many as it may, or all have.
    pub(super) fn take(&self, host: &Arc<str>) -> Option<Port> {
        let of_host = self.hosts.take(host)?;
        let of_all = self.all.take(&"".into())?;
        Some(Port {
            _of: [of_host, of_all],
        })
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
}
