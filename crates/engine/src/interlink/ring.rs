//! A bounded ring of batches from one thread to another: one writes, one reads, nobody ever waits.
//!
//! Each slot has a flag that says whose it is: the writer's while it is empty, the reader's while it is full. Whoever
//! owns a slot swaps its batch with one of their own and gives the slot to the other side. So the lock around a
//! batch is always free when it is asked for; it stands there because it makes this safe Rust, and a batch of many
//! packets pays for it once. Batches are swapped, never made: after the first round nothing is allocated.
//!
//! The tests at the end let loom try all interleavings of this very source.

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

#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use std::collections::VecDeque;

    use loom::thread;

    use super::{Received, Sent, ring};

    /// Sends batches of one number each until the reader is gone; how many it took.
    fn send_all(mut writer: super::Writer<u32>, numbers: u32) -> u32 {
        let mut batch = VecDeque::new();
        for number in 0..numbers {
            batch.push_back(number);
            loop {
                match writer.send(&mut batch) {
                    Sent::Done => break,
                    Sent::Full => thread::yield_now(),
                    Sent::ReaderGone => return number,
                }
            }
            assert!(batch.is_empty(), "what comes back is empty: {batch:?}");
        }
        numbers
    }

    fn check_transfer(slots: usize, numbers: u32) {
        loom::model(move || {
            let (writer, mut reader) = ring(slots);
            let sender = thread::spawn(move || send_all(writer, numbers));
            let mut received = Vec::new();
            let mut batch = VecDeque::new();
            loop {
                match reader.receive(&mut batch) {
                    Received::Batch => received.extend(batch.drain(..)),
                    Received::Nothing => thread::yield_now(),
                    Received::Ended => break,
                }
            }
            assert_eq!(sender.join().unwrap(), numbers);
            assert!(received.into_iter().eq(0..numbers));
        });
    }

    #[test]
    fn everything_arrives_once_and_in_order_with_one_slot() {
        check_transfer(1, 3);
    }

    #[test]
    fn everything_arrives_once_and_in_order_with_two_slots() {
        check_transfer(2, 3);
    }

    #[test]
    fn a_reader_that_goes_is_noticed() {
        loom::model(|| {
            let (writer, mut reader) = ring(1);
            let sender = thread::spawn(move || send_all(writer, 3));
            let mut batch = VecDeque::new();
            let first = reader.receive(&mut batch);
            drop(reader);
            let sent = sender.join().unwrap();
            assert!(sent <= 2, "one read, one in the ring");
            match first {
                Received::Batch => assert_eq!(batch, [0]),
                other => assert_eq!(other, Received::Nothing),
            }
        });
    }

    #[test]
    fn a_batch_is_either_sent_whole_or_untouched() {
        loom::model(|| {
            let (mut writer, mut reader) = ring(1);
            let sender = thread::spawn(move || {
                let mut outcomes = Vec::new();
                for pair in [[1, 2], [3, 4]] {
                    let mut batch = VecDeque::from(pair);
                    let sent = writer.send(&mut batch);
                    assert_eq!(sent == Sent::Done, batch.is_empty());
                    assert!(batch.is_empty() || batch == pair);
                    outcomes.push(sent);
                }
                outcomes
            });
            let mut received = Vec::new();
            let mut batch = VecDeque::new();
            for _ in 0..2 {
                if reader.receive(&mut batch) == Received::Batch {
                    assert_eq!(batch.len(), 2, "a batch comes whole");
                    received.extend(batch.drain(..));
                }
            }
            let outcomes = sender.join().unwrap();
            while reader.receive(&mut batch) == Received::Batch {
                received.extend(batch.drain(..));
            }
            let sent = [[1, 2], [3, 4]].into_iter().zip(outcomes);
            let sent: Vec<u32> = sent
                .filter(|(_, outcome)| *outcome == Sent::Done)
                .flat_map(|(pair, _)| pair)
                .collect();
            assert_eq!(received, sent);
        });
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::collections::VecDeque;
    use std::thread;

    use super::{Received, Sent, ring};

    #[test]
    fn a_full_ring_takes_no_more_until_somebody_reads() {
        let (mut writer, mut reader) = ring(2);
        for number in [1, 2] {
            assert_eq!(writer.send(&mut VecDeque::from([number])), Sent::Done);
        }
        let mut third = VecDeque::from([3]);
        assert_eq!(writer.send(&mut third), Sent::Full);
        assert_eq!(third, [3]);
        let mut batch = VecDeque::new();
        assert_eq!(reader.receive(&mut batch), Received::Batch);
        assert_eq!(batch, [1]);
        assert_eq!(writer.send(&mut third), Sent::Done);
    }

    #[test]
    fn what_was_sent_before_the_writer_went_is_read() {
        let (mut writer, mut reader) = ring(2);
        assert_eq!(writer.send(&mut VecDeque::from([1])), Sent::Done);
        drop(writer);
        let mut batch = VecDeque::new();
        assert_eq!(reader.receive(&mut batch), Received::Batch);
        batch.clear();
        assert_eq!(reader.receive(&mut batch), Received::Ended);
    }

    #[test]
    fn batches_are_swapped_and_not_made() {
        let (mut writer, mut reader) = ring(1);
        let mut mine = VecDeque::with_capacity(64);
        let mut theirs = VecDeque::with_capacity(64);
        for round in 0..10 {
            mine.push_back(round);
            assert_eq!(writer.send(&mut mine), Sent::Done);
            assert_eq!(reader.receive(&mut theirs), Received::Batch);
            assert_eq!(theirs.pop_front(), Some(round));
        }
        // Three batches go round; the one that the ring began with is the only one that grew.
        assert!(mine.capacity() >= 1 && theirs.capacity() >= 1);
        assert!(mine.capacity().max(theirs.capacity()) >= 64);
    }

    #[test]
    fn many_numbers_cross_threads_in_order() {
        let (mut writer, mut reader) = ring(4);
        let numbers = 100_000_u32;
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut batch = VecDeque::new();
                let mut next = 0;
                while next < numbers || !batch.is_empty() {
                    let size = (next % 61 + 1).min(numbers - next);
                    if batch.is_empty() {
                        batch.extend(next..next + size);
                        next += size;
                    }
                    if writer.send(&mut batch) == Sent::Full {
                        thread::yield_now();
                    }
                }
            });
            let mut batch = VecDeque::new();
            let mut expected = 0;
            loop {
                match reader.receive(&mut batch) {
                    Received::Batch => {
                        for number in batch.drain(..) {
                            assert_eq!(number, expected);
                            expected += 1;
                        }
                    }
                    Received::Nothing => thread::yield_now(),
                    Received::Ended => break,
                }
            }
            assert_eq!(expected, numbers);
        });
    }
}
