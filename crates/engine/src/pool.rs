//! Where packets come from and return to.
//!
//! Each engine has one pool of its own. Buffers are made when first needed, up to a limit; past it, a packet is
//! refused and the refusal counted. A buffer waits in the pool as a whole packet that holds a reference to the pool,
//! so neither taking nor bulk return counts references; the circle that this makes is cut when the pool's owner
//! goes. Packets that outlive the pool free their memory themselves.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::mem;
use std::rc::Rc;

use crate::error::PoolError;
use crate::packet::{ALIGNMENT, HEADROOM, Packet};

/// How large a pool may become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolLimits {
    /// Packets that may exist at once.
    pub packets_max: u32,
    /// Bytes of the longest frame, 64 to 65,000.
    pub frame_bytes_max: u16,
}

impl Default for PoolLimits {
    /// 131,072 packets of up to 2048 bytes: 300 MB if all were in use at once.
    fn default() -> Self {
        Self {
            packets_max: 131_072,
            frame_bytes_max: 2048,
        }
    }
}

/// What a pool has counted since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolCounters {
    /// Packets handed out.
    pub taken: u64,
    /// Packets that wanted to be, when the limit was reached.
    pub refused: u64,
    /// Packets that came back.
    pub freed: u64,
    /// Bytes of their frames.
    pub freed_bytes: u64,
    /// Bytes that those that came back took on a wire: at least 60, and 24 for preamble, check sequence and gap.
    pub freed_wire_bytes: u64,
    /// Buffers in memory, in use or not.
    pub buffers: u32,
}

impl PoolCounters {
    /// Packets in use: on links or with apps.
    #[must_use]
    pub fn in_use(&self) -> u64 {
        self.taken - self.freed
    }
}

/// The pool of one engine. Dropping it frees what isn't in use.
#[derive(Debug)]
pub struct Pool {
    shelf: Rc<Shelf>,
}

impl Pool {
    /// An empty pool, which takes no memory yet.
    ///
    /// # Errors
    ///
    /// If frames would be shorter than 64 or longer than 65,000 bytes.
    pub fn new(limits: PoolLimits) -> Result<Self, PoolError> {
        if !(FRAME_BYTES_MIN..=FRAME_BYTES_MAX).contains(&limits.frame_bytes_max) {
            return Err(PoolError::FrameBytes {
                asked: limits.frame_bytes_max,
                min: FRAME_BYTES_MIN,
                max: FRAME_BYTES_MAX,
            });
        }
        let shelf = Shelf {
            limits,
            state: RefCell::default(),
        };
        Ok(Self {
            shelf: Rc::new(shelf),
        })
    }

    /// An empty packet, or `None`, counted, when as many are in use as the limit allows.
    #[must_use]
    pub fn take(&self) -> Option<Packet> {
        Shelf::take(&self.shelf)
    }

    /// What has been counted.
    #[must_use]
    pub fn counters(&self) -> PoolCounters {
        self.shelf.state.borrow().counters
    }

    /// Packets that it had to refuse.
    #[inline]
    pub(crate) fn refused(&self) -> u64 {
        self.shelf.state.borrow().counters.refused
    }

    /// The limits that it was made with.
    #[must_use]
    pub fn limits(&self) -> PoolLimits {
        self.shelf.limits
    }

    /// Puts up to `count` empty packets at the end of a ring; how many it were.
    pub(crate) fn take_into(&self, ring: &mut VecDeque<Packet>, count: usize) -> usize {
        let mut state = self.shelf.state.borrow_mut();
        let ready = count.min(state.free.len());
        let rest = state.free.len() - ready;
        ring.extend(state.free.drain(rest..).map(|mut packet| {
            packet.clear();
            packet
        }));
        state.counters.taken += ready as u64;
        drop(state);
        for taken in ready..count {
            let Some(packet) = self.take() else {
                return taken;
            };
            ring.push_back(packet);
        }
        count
    }

    /// Takes back all packets of a ring; their number and the bytes of their frames.
    pub(crate) fn take_back_all(&self, ring: &mut VecDeque<Packet>) -> (u64, u64) {
        let count = ring.len() as u64;
        let mut bytes = 0;
        let mut wire_bytes = 0;
        let mut foreign = 0;
        for packet in &*ring {
            bytes += u64::from(packet.length);
            wire_bytes += wire_bytes_of(packet.length);
            foreign += u64::from(!Rc::ptr_eq(&packet.shelf, &self.shelf));
        }
        if foreign > 0 {
            // An app brought packets of another engine: each finds its own way home.
            ring.clear();
            return (count, bytes);
        }
        let mut state = self.shelf.state.borrow_mut();
        // A ring becomes a vector and back without allocation, and vectors are appended in one move: draining the
        // ring packet by packet was half of the engine's time.
        let mut packets = Vec::from(mem::take(ring));
        state.free.append(&mut packets);
        *ring = VecDeque::from(packets);
        state.counters.freed += count;
        state.counters.freed_bytes += bytes;
        state.counters.freed_wire_bytes += wire_bytes;
        (count, bytes)
    }

    /// Takes back a buffer that went to another thread with a frame of that length.
    pub(crate) fn take_back(&self, bytes: Box<[u8]>, length: u16) {
        Shelf::take_back(&self.shelf, bytes, length);
    }

    /// Gives up so many packets whose buffers will never come back: they count as freed, and others may be made in
    /// their place.
    pub(crate) fn write_off(&self, packets: u64) {
        let counters = &mut self.shelf.state.borrow_mut().counters;
        counters.freed += packets;
        let buffers = u64::from(counters.buffers).saturating_sub(packets);
        counters.buffers = u32::try_from(buffers).unwrap_or(u32::MAX);
    }

    /// Whether the packet is one of this pool's.
    pub(crate) fn owns(&self, packet: &Packet) -> bool {
        Rc::ptr_eq(&packet.shelf, &self.shelf)
    }
}

impl Default for Pool {
    /// A pool of the default limits.
    fn default() -> Self {
        let shelf = Shelf {
            limits: PoolLimits::default(),
            state: RefCell::default(),
        };
        Self {
            shelf: Rc::new(shelf),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let free = {
            let mut state = self.shelf.state.borrow_mut();
            state.closed = true;
            mem::take(&mut state.free)
        };
        // Outside the borrow: each of these comes by `take_back` once more.
        drop(free);
    }
}

/// What pool and packets share.
#[derive(Debug)]
pub(crate) struct Shelf {
    limits: PoolLimits,
    state: RefCell<State>,
}

#[derive(Debug, Default)]
struct State {
    /// A stack: the buffer that came back last is the likeliest to be in the cache.
    free: Vec<Packet>,
    counters: PoolCounters,
    /// The pool is gone; what comes back is freed.
    closed: bool,
}

impl Shelf {
    /// Bytes of the longest frame.
    #[inline]
    pub(crate) fn frame_bytes_max(&self) -> usize {
        usize::from(self.limits.frame_bytes_max)
    }

    /// An empty packet, or `None`, counted.
    #[inline]
    pub(crate) fn take(shelf: &Rc<Self>) -> Option<Packet> {
        let mut state = shelf.state.borrow_mut();
        let mut packet = match state.free.pop() {
            Some(packet) => packet,
            None => state.make(shelf)?,
        };
        state.counters.taken += 1;
        packet.clear();
        Some(packet)
    }

    /// Takes back the buffer of one packet.
    #[inline]
    pub(crate) fn take_back(shelf: &Rc<Self>, bytes: Box<[u8]>, length: u16) {
        let mut state = shelf.state.borrow_mut();
        if state.closed {
            return;
        }
        state
            .free
            .push(Packet::with_buffer(bytes, Rc::clone(shelf)));
        state.counters.freed += 1;
        state.counters.freed_bytes += u64::from(length);
        state.counters.freed_wire_bytes += wire_bytes_of(length);
    }

    /// Bytes of a buffer, such that glibc's allocator, which adds 8 and rounds up to 16, puts neighbours an odd
    /// number of cache lines apart. With an even number, as the round sizes are, the first lines of many buffers
    /// would compete for a few sets of the cache.
    fn buffer_bytes(&self) -> usize {
        let needed = ALIGNMENT + HEADROOM + self.frame_bytes_max() + ALLOCATOR_BYTES;
        let lines = needed.div_ceil(ALIGNMENT) | 1;
        lines * ALIGNMENT - ALLOCATOR_BYTES
    }
}

impl State {
    #[cold]
    fn make(&mut self, shelf: &Rc<Shelf>) -> Option<Packet> {
        if self.closed || self.counters.buffers >= shelf.limits.packets_max {
            self.counters.refused += 1;
            return None;
        }
        self.counters.buffers += 1;
        let bytes = vec![0; shelf.buffer_bytes()].into_boxed_slice();
        Some(Packet::with_buffer(bytes, Rc::clone(shelf)))
    }
}

/// Bytes that a frame takes on an Ethernet wire: padded to 60, and 24 for preamble, check sequence and gap.
#[inline]
fn wire_bytes_of(length: u16) -> u64 {
    u64::from(length.max(60)) + 24
}

/// What glibc's allocator may add to an allocation.
const ALLOCATOR_BYTES: usize = 16;

const FRAME_BYTES_MIN: u16 = 64;

/// So that start and length together fit in 16 bits.
const FRAME_BYTES_MAX: u16 = 65_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Pool {
        Pool::new(PoolLimits {
            packets_max: 2,
            ..PoolLimits::default()
        })
        .unwrap()
    }

    #[test]
    fn past_the_limit_packets_are_refused_and_counted() {
        let pool = small();
        let first = pool.take().unwrap();
        let second = pool.take().unwrap();
        assert!(pool.take().is_none());
        assert!(first.copy().is_none());
        assert_eq!(pool.counters().refused, 2);
        drop(second);
        assert!(pool.take().is_some());
        assert_eq!(pool.counters().buffers, 2);
        assert_eq!(pool.counters().in_use(), 1);
    }

    #[test]
    fn a_packet_may_outlive_its_pool() {
        let pool = small();
        let mut packet = pool.take().unwrap();
        assert!(packet.set_bytes(b"still here"));
        drop(pool);
        assert_eq!(packet.bytes(), b"still here");
        assert!(packet.copy().is_none());
    }

    #[test]
    fn a_pool_that_is_gone_leaves_nothing() {
        let pool = small();
        drop((pool.take(), pool.take()));
        let shelf = Rc::downgrade(&pool.shelf);
        drop(pool);
        assert_eq!(shelf.strong_count(), 0);
    }

    #[test]
    fn frames_of_another_pool_go_home() {
        let pool = small();
        let other = small();
        let mut ring = VecDeque::from([pool.take().unwrap(), other.take().unwrap()]);
        assert_eq!(pool.take_back_all(&mut ring), (2, 0));
        assert_eq!(pool.counters().in_use(), 0);
        assert_eq!(other.counters().in_use(), 0);
        assert_eq!(other.counters().freed, 1);
    }

    #[test]
    fn what_frames_take_on_a_wire_is_counted_as_the_report_says_it() {
        let pool = small();
        let mut packet = pool.take().unwrap();
        assert!(packet.set_bytes(&[0; 1514]));
        drop(packet);
        drop(pool.take());
        assert_eq!(pool.counters().freed_bytes, 1514);
        assert_eq!(pool.counters().freed_wire_bytes, 1514 + 24 + 60 + 24);
    }

    #[test]
    fn the_size_of_frames_is_bounded() {
        for frame_bytes_max in [0, 63, 65_001] {
            let limits = PoolLimits {
                frame_bytes_max,
                ..PoolLimits::default()
            };
            assert!(Pool::new(limits).is_err());
        }
        let limits = PoolLimits {
            packets_max: 1,
            frame_bytes_max: 65_000,
        };
        let mut packet = Pool::new(limits).unwrap().take().unwrap();
        assert!(packet.set_bytes(&[1; 65_000]));
        assert!(packet.strip(65_000));
    }
}
