//! Rings of one writer and one reader in memory that is shared with the kernel.
//!
//! Each side has a counter that only it writes, and that counts on for ever; an entry's place is the counter modulo
//! the ring's size. The writer fills entries and then moves its counter (release), the reader sees the counter
//! (acquire) and then reads the entries; in the other direction the reader's counter tells which places may be
//! filled again. That the other side keeps to this is what the kernel promises.

#![allow(unsafe_code, reason = "rings are in memory that the kernel writes too")]

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// Memory that is mapped as long as this lives.
#[derive(Debug)]
pub(super) struct Mapping {
    address: NonNull<u8>,
    bytes: usize,
}

impl Mapping {
    /// Fresh memory, present from the start.
    pub(super) fn anonymous(bytes: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        Self::map(bytes, flags, -1, 0)
    }

    /// What a file offers at that offset.
    pub(super) fn of(file: BorrowedFd<'_>, offset: libc::off_t, bytes: usize) -> io::Result<Self> {
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        Self::map(bytes, flags, file.as_raw_fd(), offset)
    }

    fn map(bytes: usize, flags: i32, file: i32, offset: libc::off_t) -> io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that there is.
        let address = unsafe { libc::mmap(ptr::null_mut(), bytes, access, flags, file, offset) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { address, bytes })
    }

    /// Where it begins.
    pub(super) fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// How long it is.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The place of `count` values of type `T`, if it is inside and aligned.
    fn place<T>(&self, offset: u64, count: u32) -> Option<NonNull<T>> {
        let offset = usize::try_from(offset).ok()?;
        let bytes = size_of::<T>().checked_mul(count as usize)?;
        let is_inside = offset.checked_add(bytes)? <= self.bytes;
        if !is_inside || !offset.is_multiple_of(align_of::<T>()) {
            return None;
        }
        // SAFETY: the offset is inside the mapping.
        Some(unsafe { self.address.add(offset) }.cast())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it is mapped, and whatever pointed into it belongs to the same owner and goes with it.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.bytes) };
    }
}

/// A type of which every bit pattern is a value, as the kernel may have written any.
///
/// # Safety
/// It has neither invalid values nor a destructor.
pub(super) unsafe trait Entry: Copy {}

// SAFETY: an integer.
unsafe impl Entry for u64 {}
// SAFETY: a structure of integers.
unsafe impl Entry for libc::xdp_desc {}

/// What both sides of a ring know.
#[derive(Debug)]
struct Ring<T> {
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    entries: NonNull<T>,
    mask: u32,
    _mapping: Mapping,
    entry: PhantomData<T>,
}

impl<T: Entry> Ring<T> {
    /// A ring of `size`, a power of two, entries. None if the offsets don't fit the mapping.
    fn new(mapping: Mapping, offsets: &libc::xdp_ring_offset, size: u32) -> Option<Self> {
        if !size.is_power_of_two() {
            return None;
        }
        Some(Self {
            producer: mapping.place(offsets.producer, 1)?,
            consumer: mapping.place(offsets.consumer, 1)?,
            flags: mapping.place(offsets.flags, 1)?,
            entries: mapping.place(offsets.desc, size)?,
            mask: size - 1,
            _mapping: mapping,
            entry: PhantomData,
        })
    }

    fn size(&self) -> u32 {
        self.mask + 1
    }

    fn counter(&self, which: NonNull<AtomicU32>) -> &AtomicU32 {
        // SAFETY: `new` found it inside the mapping, which lives as long as we do.
        unsafe { which.as_ref() }
    }

    fn entry(&self, count: u32) -> NonNull<T> {
        // SAFETY: masked, it is one of the entries.
        unsafe { self.entries.add((count & self.mask) as usize) }
    }
}

/// Our end of a ring that the kernel reads.
#[derive(Debug)]
pub(super) struct Producer<T> {
    ring: Ring<T>,
    /// Entries written, published or not.
    written: u32,
    /// The reader's counter, as it was last seen.
    read: u32,
}

impl<T: Entry> Producer<T> {
    /// Our end of a fresh ring; None if the offsets don't fit the mapping.
    pub(super) fn new(
        mapping: Mapping,
        offsets: &libc::xdp_ring_offset,
        size: u32,
    ) -> Option<Self> {
        let ring = Ring::new(mapping, offsets, size)?;
        Some(Self {
            ring,
            written: 0,
            read: 0,
        })
    }

    /// Writes an entry, which the kernel doesn't see yet. False if the ring is full.
    #[must_use]
    pub(super) fn write(&mut self, entry: T) -> bool {
        let size = self.ring.size();
        if self.written.wrapping_sub(self.read) == size {
            let waiting = self.waiting();
            self.read = self.written.wrapping_sub(waiting);
            if waiting == size {
                return false;
            }
        }
        // SAFETY: the place is inside, and the reader's counter says that it is done with it.
        unsafe { self.ring.entry(self.written).write(entry) };
        self.written = self.written.wrapping_add(1);
        true
    }

    /// Lets the kernel see all entries written.
    pub(super) fn publish(&self) {
        let counter = self.ring.counter(self.ring.producer);
        counter.store(self.written, Ordering::Release);
    }

    /// Entries that the kernel has not read yet.
    pub(super) fn waiting(&self) -> u32 {
        let counter = self.ring.counter(self.ring.consumer);
        self.written.wrapping_sub(counter.load(Ordering::Acquire))
    }

    /// Whether the kernel looks at the ring only when it is told to.
    pub(super) fn wants_wakeup(&self) -> bool {
        // Otherwise the flag might be read before the kernel can see the entries, just after which it looks at the
        // ring for the last time and raises the flag.
        fence(Ordering::SeqCst);
        let flags = self.ring.counter(self.ring.flags);
        flags.load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }
}

/// Our end of a ring that the kernel writes.
#[derive(Debug)]
pub(super) struct Consumer<T> {
    ring: Ring<T>,
    /// Entries read, released or not.
    read: u32,
    /// The writer's counter, as it was last seen.
    written: u32,
}

impl<T: Entry> Consumer<T> {
    /// Our end of a fresh ring; None if the offsets don't fit the mapping.
    pub(super) fn new(
        mapping: Mapping,
        offsets: &libc::xdp_ring_offset,
        size: u32,
    ) -> Option<Self> {
        let ring = Ring::new(mapping, offsets, size)?;
        Some(Self {
            ring,
            read: 0,
            written: 0,
        })
    }

    /// Entries that wait to be read.
    pub(super) fn waiting(&mut self) -> u32 {
        let counter = self.ring.counter(self.ring.producer);
        self.written = counter.load(Ordering::Acquire);
        self.written.wrapping_sub(self.read)
    }

    /// Reads an entry among those that were there at the last call of [`Consumer::waiting`].
    pub(super) fn read(&mut self) -> Option<T> {
        if self.read == self.written {
            return None;
        }
        // SAFETY: the place is inside, any bits are a value, and the writer's counter says that it has been written.
        let entry = unsafe { self.ring.entry(self.read).read() };
        self.read = self.read.wrapping_add(1);
        Some(entry)
    }

    /// Lets the kernel write again where entries were read.
    pub(super) fn release(&self) {
        let counter = self.ring.counter(self.ring.consumer);
        counter.store(self.read, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u32 = 4;

    /// Both ends of one ring: what one writes the other reads.
    fn both_ends() -> (Producer<u64>, Consumer<u64>) {
        let offsets = libc::xdp_ring_offset {
            producer: 0,
            consumer: 64,
            flags: 128,
            desc: 192,
        };
        let mapping = Mapping::anonymous(4096).unwrap();
        let again = Mapping {
            address: mapping.address,
            bytes: mapping.bytes,
        };
        let consumer = Consumer::new(mapping, &offsets, SIZE).unwrap();
        let producer = Producer::new(again, &offsets, SIZE).unwrap();
        (producer, consumer)
    }

    /// Without the second `munmap` of the one mapping.
    fn end(producer: Producer<u64>, consumer: Consumer<u64>) {
        std::mem::forget(producer);
        drop(consumer);
    }

    #[test]
    fn entries_come_out_as_they_went_in_and_a_full_ring_takes_none() {
        let (mut producer, mut consumer) = both_ends();
        for round in 0..10_u64 {
            for place in 0..u64::from(SIZE) {
                assert!(producer.write(round * 10 + place));
            }
            assert!(!producer.write(99));
            assert_eq!(consumer.waiting(), 0, "seen before it was published");
            producer.publish();
            assert_eq!(consumer.waiting(), SIZE);
            for place in 0..u64::from(SIZE) {
                assert_eq!(consumer.read(), Some(round * 10 + place));
            }
            assert_eq!(consumer.read(), None);
            assert!(!producer.write(99), "filled before it was released");
            consumer.release();
            assert_eq!(producer.waiting(), 0);
        }
        end(producer, consumer);
    }

    #[test]
    fn counters_go_past_their_end() {
        let (mut producer, mut consumer) = both_ends();
        let late = u32::MAX - 1;
        (producer.written, producer.read) = (late, late);
        (consumer.written, consumer.read) = (late, late);
        producer
            .ring
            .counter(producer.ring.consumer)
            .store(late, Ordering::Relaxed);
        for entry in 0..20 {
            assert!(producer.write(entry));
            producer.publish();
            assert_eq!(consumer.waiting(), 1);
            assert_eq!(consumer.read(), Some(entry));
            consumer.release();
        }
        end(producer, consumer);
    }

    #[test]
    fn between_threads_nothing_is_lost_or_torn() {
        struct Ends<T>(T);
        // SAFETY: each end is used by one thread, and what they share are atomics and entries guarded by these.
        unsafe impl<T> Send for Ends<T> {}
        const COUNT: u64 = if cfg!(miri) { 200 } else { 200_000 };
        let (producer, consumer) = both_ends();
        let (mut writing, mut reading) = (Ends(producer), Ends(consumer));
        let (writing, reading) = std::thread::scope(|scope| {
            let writer = scope.spawn(move || {
                let ends = &mut writing;
                for entry in 0..COUNT {
                    while !ends.0.write(entry * 0x1_0000_0001) {
                        std::thread::yield_now();
                    }
                    ends.0.publish();
                }
                writing
            });
            let reader = scope.spawn(move || {
                let ends = &mut reading;
                for entry in 0..COUNT {
                    while ends.0.waiting() == 0 {
                        std::thread::yield_now();
                    }
                    assert_eq!(ends.0.read(), Some(entry * 0x1_0000_0001));
                    ends.0.release();
                }
                reading
            });
            (writer.join().unwrap(), reader.join().unwrap())
        });
        end(writing.0, reading.0);
    }

    #[test]
    fn offsets_outside_of_the_mapping_make_no_ring() {
        let good = libc::xdp_ring_offset {
            producer: 0,
            consumer: 64,
            flags: 128,
            desc: 192,
        };
        let ring = |offsets, size| {
            Consumer::<u64>::new(Mapping::anonymous(4096).unwrap(), &offsets, size).is_some()
        };
        assert!(ring(good, 256));
        assert!(!ring(good, 512));
        assert!(!ring(good, 3));
        assert!(!ring(
            libc::xdp_ring_offset {
                producer: 4094,
                ..good
            },
            4
        ));
        assert!(!ring(
            libc::xdp_ring_offset {
                consumer: 2,
                ..good
            },
            4
        ));
        assert!(!ring(
            libc::xdp_ring_offset {
                flags: u64::MAX,
                ..good
            },
            4
        ));
    }
}
