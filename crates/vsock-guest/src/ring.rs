//! The driver's side of one split virtqueue (virtio 1.3, §2.7), with EVENT_IDX and indirect descriptors.
//!
//! A chain is added once, published, comes back as used, and is then published again as it is or released.
//! [`Ring::set_descriptor`] and [`Ring::publish`] take anything, for tests that lie.

use std::sync::atomic::{Ordering, fence};

use crate::memory::Memory;

/// The chain goes on at `next`.
pub const NEXT: u16 = 1;
/// The device writes here.
pub const WRITE: u16 = 2;
/// It is a table of descriptors.
pub const INDIRECT: u16 = 4;

const DESCRIPTOR_BYTES: usize = 16;
const END: u16 = u16::MAX;

/// A descriptor as it stands in a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Guest-physical address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// [`NEXT`], [`WRITE`], [`INDIRECT`].
    pub flags: u16,
    /// Index of the next one.
    pub next: u16,
}

impl Descriptor {
    /// As it stands in memory.
    #[must_use]
    pub fn encode(&self) -> [u8; DESCRIPTOR_BYTES] {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[0..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..16].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// A chain that the device has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Its first descriptor, as the device says.
    pub head: u32,
    /// Bytes that the device says to have written.
    pub length: u32,
}

/// One queue. Its memory is elsewhere: each call is given it.
#[derive(Clone, Debug)]
pub struct Ring {
    size: u16,
    table: u64,
    available: u64,
    used: u64,
    event_idx: bool,
    /// Free descriptors.
    free: Vec<u16>,
    /// For each descriptor the next one of its chain, or `END`.
    following: Vec<u16>,
    /// Whether the chain that starts here is with the device.
    with_device: Vec<bool>,
    outstanding: usize,
    next_available: u16,
    next_used: u16,
    last_kick: u16,
}

impl Ring {
    /// Takes memory for a queue of `size` descriptors, a power of two.
    pub fn new(memory: &mut Memory, size: u16, event_idx: bool) -> Self {
        let entries = usize::from(size);
        Self {
            size,
            table: memory.allocate(entries * DESCRIPTOR_BYTES, 16),
            available: memory.allocate(6 + 2 * entries, 2),
            used: memory.allocate(6 + 8 * entries, 4),
            event_idx,
            free: (0..size).rev().collect(),
            following: vec![END; entries],
            with_device: vec![false; entries],
            outstanding: 0,
            next_available: 0,
            next_used: 0,
            last_kick: 0,
        }
    }

    /// Number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Guest-physical addresses of table, available ring and used ring.
    #[must_use]
    pub fn addresses(&self) -> [u64; 3] {
        [self.table, self.available, self.used]
    }

    /// Descriptors that are in no chain.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Chains that the device has and hasn't used.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Index of the next chain that will be published, as in the available ring.
    #[must_use]
    pub fn next_available(&self) -> u16 {
        self.next_available
    }

    /// Index in the used ring up to which the device has come.
    #[must_use]
    pub fn used_index(&self, memory: &Memory) -> u16 {
        memory.load(self.used + 2)
    }

    /// Makes a chain of these parts (address, length, whether the device writes), in this order, and gives its
    /// head; nothing if too few descriptors are free. It isn't published yet.
    pub fn add(&mut self, memory: &Memory, parts: &[(u64, u32, bool)]) -> Option<u16> {
        if parts.is_empty() || self.free.len() < parts.len() {
            return None;
        }
        let first = self.free.len() - parts.len();
        let mut next = END;
        for (place, (address, length, write)) in parts.iter().enumerate().rev() {
            // The top of the stack is the head, so that a chain's order is that of the stack.
            let index = self.free[first + parts.len() - 1 - place];
            let flags = if *write { WRITE } else { 0 } | if next == END { 0 } else { NEXT };
            let descriptor = Descriptor {
                address: *address,
                length: *length,
                flags,
                next: if next == END { 0 } else { next },
            };
            self.set_descriptor(memory, index, descriptor);
            self.following[usize::from(index)] = next;
            next = index;
        }
        self.free.truncate(first);
        Some(next)
    }

    /// The same with the parts in a table of their own at `table`, which one descriptor points to.
    pub fn add_indirect(
        &mut self,
        memory: &Memory,
        table: u64,
        parts: &[(u64, u32, bool)],
    ) -> Option<u16> {
        let index = self.free.pop()?;
        let mut bytes = Vec::with_capacity(parts.len() * DESCRIPTOR_BYTES);
        for (place, (address, length, write)) in (1u16..).zip(parts) {
            let last = usize::from(place) == parts.len();
            let descriptor = Descriptor {
                address: *address,
                length: *length,
                flags: if *write { WRITE } else { 0 } | if last { 0 } else { NEXT },
                next: if last { 0 } else { place },
            };
            bytes.extend(descriptor.encode());
        }
        memory.write(table, &bytes);
        let descriptor = Descriptor {
            address: table,
            length: u32::try_from(bytes.len()).expect("at most 65536 descriptors"),
            flags: INDIRECT,
            next: 0,
        };
        self.set_descriptor(memory, index, descriptor);
        self.following[usize::from(index)] = END;
        Some(index)
    }

    /// Writes one descriptor of the table, whatever it says.
    pub fn set_descriptor(&self, memory: &Memory, index: u16, descriptor: Descriptor) {
        let address = self.table + u64::from(index) * DESCRIPTOR_BYTES as u64;
        memory.write(address, &descriptor.encode());
    }

    /// Gives the chain with this head, which may be anything, to the device.
    pub fn publish(&mut self, memory: &Memory, head: u16) {
        let place = self.next_available % self.size;
        memory.store(self.available + 4 + 2 * u64::from(place), head);
        if let Some(with_device) = self.with_device.get_mut(usize::from(head)) {
            self.outstanding += usize::from(!std::mem::replace(with_device, true));
        }
        self.set_available_index(memory, self.next_available.wrapping_add(1));
    }

    /// Says how far the driver has published, true or not.
    pub fn set_available_index(&mut self, memory: &Memory, index: u16) {
        self.next_available = index;
        memory.store(self.available + 2, index);
    }

    /// Whether the device must be told of what was published since this was last asked.
    pub fn kick_needed(&mut self, memory: &Memory) -> bool {
        let (old, new) = (self.last_kick, self.next_available);
        if old == new {
            return false;
        }
        self.last_kick = new;
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = memory.load(self.used + 4 + 8 * u64::from(self.size));
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            memory.load(self.used) & 1 == 0
        }
    }

    /// The next chain that the device has used, if any.
    pub fn pop(&mut self, memory: &Memory) -> Option<Used> {
        if !self.pending(memory) {
            return None;
        }
        let place = self.next_used % self.size;
        let mut bytes = [0; 8];
        memory.read(self.used + 4 + 8 * u64::from(place), &mut bytes);
        self.next_used = self.next_used.wrapping_add(1);
        let [a, b, c, d, e, f, g, h] = bytes;
        Some(Used {
            head: u32::from_le_bytes([a, b, c, d]),
            length: u32::from_le_bytes([e, f, g, h]),
        })
    }

    /// Takes a used chain's head back from the device; nothing if the device didn't have it.
    pub fn take_back(&mut self, used: Used) -> Option<u16> {
        let with_device = self.with_device.get_mut(usize::try_from(used.head).ok()?)?;
        if !std::mem::take(with_device) {
            return None;
        }
        self.outstanding -= 1;
        u16::try_from(used.head).ok()
    }

    /// Makes the descriptors of a chain free again.
    pub fn release(&mut self, head: u16) {
        let mut index = head;
        while index != END {
            self.free.push(index);
            index = std::mem::replace(&mut self.following[usize::from(index)], END);
        }
    }

    /// Whether the device has used something that wasn't popped.
    #[must_use]
    pub fn pending(&self, memory: &Memory) -> bool {
        memory.load(self.used + 2) != self.next_used
    }

    /// Asks to be called when the device uses another `after` + 1 chains; true if it has already used some.
    pub fn arm(&self, memory: &Memory, after: u16) -> bool {
        if self.event_idx {
            let event = self.next_used.wrapping_add(after);
            memory.store(self.available + 4 + 2 * u64::from(self.size), event);
        } else {
            memory.store(self.available, 0);
        }
        fence(Ordering::SeqCst);
        self.pending(memory)
    }

    /// Asks not to be called. With EVENT_IDX there is nothing to write: the event stays behind.
    pub fn disarm(&self, memory: &Memory) {
        if !self.event_idx {
            memory.store(self.available, 1);
        }
    }
}
