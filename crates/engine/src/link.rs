//! A link: a one-way ring of packets from one app's output to another's input, within one engine.
//!
//! A ring is bounded. What doesn't fit is dropped and counted, so an app that stops reading costs its own packets
//! and never memory. Whoever would rather wait than lose asks for the room first ([`Ports::space`]).
//!
//! [`Ports::space`]: crate::Ports::space

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use crate::packet::Packet;
use crate::pool::Pool;

/// Packets that a link holds at most.
pub const LINK_PACKETS_MAX: usize = 1024;

/// What a link has counted since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkCounters {
    /// Packets that were put on it.
    pub packets_in: u64,
    /// Bytes of their frames.
    pub bytes_in: u64,
    /// Packets that were taken off it.
    pub packets_out: u64,
    /// Bytes of their frames.
    pub bytes_out: u64,
    /// Packets that found it full, and copies that were not made because it was. Not among `packets_in`.
    pub dropped: u64,
}

impl LinkCounters {
    /// Packets on the link.
    #[must_use]
    pub fn queued(&self) -> u64 {
        self.packets_in - self.packets_out
    }
}

#[derive(Debug)]
pub(crate) struct Link {
    ring: VecDeque<Packet>,
    pub(crate) counters: LinkCounters,
}

impl Default for Link {
    fn default() -> Self {
        Self {
            ring: VecDeque::with_capacity(LINK_PACKETS_MAX),
            counters: LinkCounters::default(),
        }
    }
}

impl Link {
    #[inline]
    pub(crate) fn queued(&self) -> usize {
        self.ring.len()
    }

    #[inline]
    pub(crate) fn space(&self) -> usize {
        LINK_PACKETS_MAX - self.ring.len()
    }

    /// Puts a packet on, or drops it where there is no room.
    #[inline]
    pub(crate) fn transmit(&mut self, packet: Packet) {
        if self.space() == 0 {
            self.counters.dropped += 1;
            return;
        }
        self.counters.packets_in += 1;
        self.counters.bytes_in += u64::from(packet.length);
        self.ring.push_back(packet);
    }

    /// Takes the oldest packet off.
    #[inline]
    pub(crate) fn receive(&mut self) -> Option<Packet> {
        let packet = self.ring.pop_front()?;
        self.counters.packets_out += 1;
        self.counters.bytes_out += u64::from(packet.length);
        Some(packet)
    }

    /// Gives all packets back to the pool; how many packets and bytes.
    pub(crate) fn discard(&mut self, pool: &Pool) -> (u64, u64) {
        let discarded = pool.take_back_all(&mut self.ring);
        self.all_out();
        discarded
    }

    /// Moves all packets to another link; what doesn't fit there is dropped.
    pub(crate) fn forward(&mut self, to: &mut Self) {
        let bytes = self.counters.bytes_in - self.counters.bytes_out;
        self.all_out();
        self.hand_over(to, bytes);
    }

    /// Moves those packets to another link of which `pass`, which may change them, says so, and drops the others;
    /// their number.
    pub(crate) fn filter(
        &mut self,
        to: &mut Self,
        mut pass: impl FnMut(&mut Packet) -> bool,
    ) -> u64 {
        self.all_out();
        let before = self.ring.len();
        let mut bytes = 0;
        self.ring.retain_mut(|packet| {
            let passes = pass(packet);
            if passes {
                bytes += u64::from(packet.length);
            }
            passes
        });
        let dropped = before - self.ring.len();
        self.hand_over(to, bytes);
        dropped as u64
    }

    /// Puts copies of all packets on another link, as far as room and pool go.
    pub(crate) fn copy(&self, to: &mut Self, pool: &Pool) -> Copied {
        let fitting = self.ring.len().min(to.space());
        let overflow = (self.ring.len() - fitting) as u64;
        to.counters.dropped += overflow;
        let first = to.ring.len();
        let mut made = 0;
        if self.ring.iter().all(|packet| pool.owns(packet)) {
            made = pool.take_into(&mut to.ring, fitting);
            let mut bytes = 0;
            for (copy, original) in to.ring.range_mut(first..).zip(&self.ring) {
                copy.become_copy_of(original);
                bytes += u64::from(original.length);
            }
            to.counters.packets_in += made as u64;
            to.counters.bytes_in += bytes;
        } else {
            for copy in self.ring.iter().take(fitting).filter_map(Packet::copy) {
                to.transmit(copy);
                made += 1;
            }
        }
        Copied {
            made: made as u64,
            overflow,
            refused: (fitting - made) as u64,
        }
    }

    /// Puts up to `count` packets on, as `write` makes them out of empty ones; how many.
    pub(crate) fn fill(
        &mut self,
        pool: &Pool,
        count: usize,
        mut write: impl FnMut(&mut Packet),
    ) -> usize {
        let first = self.ring.len();
        let count = count.min(self.space());
        let made = pool.take_into(&mut self.ring, count);
        let mut bytes = 0;
        for packet in self.ring.range_mut(first..) {
            write(packet);
            bytes += u64::from(packet.length);
        }
        self.counters.packets_in += made as u64;
        self.counters.bytes_in += bytes;
        made
    }

    /// Moves all packets, which are counted as taken off and have so many bytes, to another link.
    fn hand_over(&mut self, to: &mut Self, bytes: u64) {
        if to.ring.is_empty() {
            // The whole ring changes hands: no packet is touched.
            to.counters.packets_in += self.ring.len() as u64;
            to.counters.bytes_in += bytes;
            std::mem::swap(&mut self.ring, &mut to.ring);
            return;
        }
        for packet in self.ring.drain(..) {
            to.transmit(packet);
        }
    }

    /// Counts all that is queued as taken off.
    fn all_out(&mut self) {
        self.counters.packets_out = self.counters.packets_in;
        self.counters.bytes_out = self.counters.bytes_in;
    }
}

/// What became of copies that were to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Copied {
    /// Copies on the link.
    pub made: u64,
    /// Copies for which the link had no room; counted there as dropped.
    pub overflow: u64,
    /// Copies for which the pool had no packet; counted there as refused.
    pub refused: u64,
}
