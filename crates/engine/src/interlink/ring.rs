//! A bounded ring of batches from one thread to another: one writes, one reads, nobody ever waits.
//!
//! Each slot has a flag that says whose it is: the writer's while it is empty, the reader's while it is full. Whoever
//! owns a slot swaps its batch with one of their own and gives the slot to the other side. So the lock around a
//! batch is always free when it is asked for; it stands there because it makes this safe Rust, and a batch of many
//! packets pays for it once. Batches are swapped, never made: after the first round nothing is allocated.
//!
//! `tests/interleavings.rs` compiles this very source with loom's atomics and locks, and tries all interleavings.

use std::collections::VecDeque;
use std::mem;

use super::sync::{Arc, AtomicBool, Mutex, Ordering};

/// A ring of so many slots, which hold a batch each.
pub(super) fn ring<T>(slots: usize) -> (Writer<T>, Reader<T>) {
    let ring = Arc::new(Ring {
        slots: (0..slots.max(1)).map(|_| Slot::new()).collect(),
        writer_gone: AtomicBool::new(false),
        reader_gone: AtomicBool::new(false),
    });
    let writer = Writer {
        ring: Arc::clone(&ring),
        next: 0,
    };
    (writer, Reader { ring, next: 0 })
}

#[derive(Debug)]
struct Ring<T> {
    slots: Box<[Slot<T>]>,
    writer_gone: AtomicBool,
    reader_gone: AtomicBool,
}

/// In cache lines of its own: what one side does to its slot is none of the other's business. Two lines, since
/// processors fetch pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Slot<T> {
    /// The reader's; else the writer's.
    is_full: AtomicBool,
    batch: Mutex<VecDeque<T>>,
}

impl<T> Slot<T> {
    fn new() -> Self {
        Self {
            is_full: AtomicBool::new(false),
            batch: Mutex::new(VecDeque::new()),
        }
    }

    /// Exchanges batches and gives the slot to the other side. To be called by the side that owns it. False, and
    /// nothing done, if the other side has it locked, which it can't have.
    fn swap(&self, batch: &mut VecDeque<T>) -> bool {
        let Ok(mut inside) = self.batch.try_lock() else {
            return false;
        };
        mem::swap(&mut *inside, batch);
        drop(inside);
        let was_full = self.is_full.load(Ordering::Relaxed);
        self.is_full.store(!was_full, Ordering::Release);
        true
    }
}

/// What became of a batch that was to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// The ring has it; an empty one is in its place.
    Done,
    /// The ring is full; the batch is untouched.
    Full,
    /// Nobody will ever read it; it is untouched.
    ReaderGone,
}

/// The side that sends.
#[derive(Debug)]
pub(super) struct Writer<T> {
    ring: Arc<Ring<T>>,
    next: usize,
}

impl<T> Writer<T> {
    /// What would become of a batch now.
    pub(super) fn outlook(&self) -> Sent {
        if self.ring.reader_gone.load(Ordering::Acquire) {
            Sent::ReaderGone
        } else if self.ring.slots[self.next].is_full.load(Ordering::Acquire) {
            Sent::Full
        } else {
            Sent::Done
        }
    }

    /// Sends all of a batch, or nothing.
    pub(super) fn send(&mut self, batch: &mut VecDeque<T>) -> Sent {
        let outlook = self.outlook();
        if outlook != Sent::Done {
            return outlook;
        }
        if !self.ring.slots[self.next].swap(batch) {
            return Sent::Full;
        }
        self.next = (self.next + 1) % self.ring.slots.len();
        Sent::Done
    }
}

impl<T> Drop for Writer<T> {
    fn drop(&mut self) {
        self.ring.writer_gone.store(true, Ordering::Release);
    }
}

/// What the reader found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Received {
    /// A batch.
    Batch,
    /// Nothing yet.
    Nothing,
    /// Nothing, now and for ever: the writer is gone, and all that it sent has been read.
    Ended,
}

/// The side that receives.
#[derive(Debug)]
pub(super) struct Reader<T> {
    ring: Arc<Ring<T>>,
    next: usize,
}

impl<T> Reader<T> {
    /// Exchanges an empty batch for the oldest one in the ring.
    pub(super) fn receive(&mut self, batch: &mut VecDeque<T>) -> Received {
        debug_assert!(
            batch.is_empty(),
            "what is in it would go back to the writer"
        );
        // Asked for first: what the writer sent before it went is then seen below.
        let is_last = self.ring.writer_gone.load(Ordering::Acquire);
        let slot = &self.ring.slots[self.next];
        if slot.is_full.load(Ordering::Acquire) && slot.swap(batch) {
            self.next = (self.next + 1) % self.ring.slots.len();
            return Received::Batch;
        }
        if is_last {
            Received::Ended
        } else {
            Received::Nothing
        }
    }
}

impl<T> Drop for Reader<T> {
    fn drop(&mut self) {
        self.ring.reader_gone.store(true, Ordering::Release);
    }
}
