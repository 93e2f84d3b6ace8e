//! One virtqueue of a guest: descriptor chains taken out of the ring and given back.
//!
//! The ring's own rules are the crate `virtio-queue`'s. Added here: a chain is taken as the pieces of memory
//! it names, all of the right direction and inside the guest, or it is broken; at most [`LONGEST_CHAIN`]
//! descriptors and pieces; and the state that vhost-user gives a ring (addresses of the VMM, enabled, kick and call).
//!
//! Notifications, both ways, follow EVENT_IDX where the guest has it: [`Ring::sleep`] asks the guest to kick
//! and says if something has come meanwhile; [`Ring::signal`] interrupts the guest only if it asked for that.
//! Chains are given back many at a time: [`Ring::publish`] writes the ring's index once for all, since the guest
//! on another processor looks at it all the time.

use std::{
    fs::File,
    sync::atomic::{Ordering, fence},
};

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use crate::{bell::Call, memory::Memory};

/// Most descriptors of a ring.
pub const LARGEST_RING: u16 = 32768;

/// Most descriptors and most pieces of one chain: a packet of 64 KiB in pages takes 17. A descriptor of no bytes has
/// no piece, and is work all the same.
pub const LONGEST_CHAIN: usize = 512;

/// Who writes into the memory that a chain names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The guest; we read.
    FromGuest,
    /// We do.
    ToGuest,
}

/// What came out of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// There is nothing.
    Empty,
    /// A chain, to be given back under that number. Its pieces were appended.
    Chain(u16),
    /// A chain that loops, is too long, has the wrong direction or leaves the guest's memory. Nothing was
    /// appended; it is to be given back all the same.
    Broken(u16),
    /// The ring itself makes no sense: nothing more can be taken from it.
    Lost,
}

/// Addresses of a ring's parts, as the VMM names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Descriptor table.
    pub descriptors: u64,
    /// Ring of the chains that the guest offers.
    pub available: u64,
    /// Ring of those that we give back.
    pub used: u64,
}

/// A ring, with all that vhost-user says of it.
#[derive(Debug)]
pub struct Ring {
    queue: Queue,
    /// Where it is. Looked up when it starts.
    pub addresses: Option<Addresses>,
    /// By which the guest says that there is something.
    pub kick: Option<File>,
    /// By which the guest is told so.
    pub call: Option<Call>,
    /// The guest's wish that it be served.
    pub enabled: bool,
    /// Whether the VMM has started it and it makes sense.
    running: bool,
    /// Whether it would run if its memory hadn't been taken away.
    displaced: bool,
    /// Whether it was started, and doesn't run only since it made no sense later.
    lost: bool,
    /// Chains given back that the guest can't see yet, and those it hasn't been asked about.
    unpublished: u16,
    unsignalled: u16,
}

impl Default for Ring {
    fn default() -> Self {
        Self {
            queue: Queue::new(LARGEST_RING).expect("the size is a power of two"),
            addresses: None,
            kick: None,
            call: None,
            enabled: false,
            running: false,
            displaced: false,
            lost: false,
            unpublished: 0,
            unsignalled: 0,
        }
    }
}

impl Ring {
    /// Sets its size; whether that is a power of two and not too large.
    #[must_use]
    pub fn set_size(&mut self, size: u16) -> bool {
        self.queue.try_set_size(size).is_ok()
    }

    /// Its size.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Sets the position from which chains are taken.
    pub fn set_base(&mut self, base: u16) {
        self.queue.set_next_avail(base);
    }

    /// That position.
    #[must_use]
    pub fn base(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Goes back by that many chains, that were taken and not given back.
    pub fn rewind(&mut self, chains: usize) {
        let chains = u16::try_from(chains).expect("no more than the ring has");
        self.queue
            .set_next_avail(self.queue.next_avail().wrapping_sub(chains));
    }

    /// Whether chains may be taken.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.running && self.enabled
    }

    /// Whether it was started.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.running
    }

    /// Whether it was started, and stands still only since its memory was taken away.
    #[must_use]
    pub fn is_displaced(&self) -> bool {
        self.displaced
    }

    /// Whether it was started, and stands still only since it made no sense later.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost
    }

    /// Looks its addresses up again after the memory has changed. Whether it makes sense; if not, it is displaced.
    pub fn relocate(&mut self, memory: &Memory, event_idx: bool) -> bool {
        let found = self.start(memory, event_idx);
        self.displaced = !found;
        found
    }

    /// Starts it. Whether it makes sense.
    pub fn start(&mut self, memory: &Memory, event_idx: bool) -> bool {
        (self.displaced, self.lost) = (false, false);
        self.running = self.place(memory).is_some();
        self.queue.set_event_idx(event_idx);
        (self.unpublished, self.unsignalled) = (0, 0);
        self.queue.set_ready(self.running);
        self.running = self.running && self.queue.is_valid(memory.map());
        if self.running {
            // What we gave back last is in the guest's memory; that is right after a restart too.
            match self.queue.used_idx(memory.map(), Ordering::Acquire) {
                Ok(used) => self.queue.set_next_used(used.0),
                Err(_) => self.running = false,
            }
        }
        self.running
    }

    fn place(&mut self, memory: &Memory) -> Option<()> {
        let addresses = self.addresses?;
        let find = |address| memory.guest_address(address);
        self.queue
            .try_set_desc_table_address(find(addresses.descriptors)?)
            .ok()?;
        self.queue
            .try_set_avail_ring_address(find(addresses.available)?)
            .ok()?;
        self.queue
            .try_set_used_ring_address(find(addresses.used)?)
            .ok()
    }

    /// Stops it. Its position stays.
    pub fn stop(&mut self) {
        (self.running, self.displaced, self.lost) = (false, false, false);
        self.queue.set_ready(false);
    }

    /// Stops it because of [`Taken::Lost`], until it is started again.
    pub fn lose(&mut self) {
        self.stop();
        self.lost = true;
    }

    /// Takes the next chain, appending its pieces.
    pub fn take(
        &mut self,
        memory: &Memory,
        direction: Direction,
        pieces: &mut Vec<libc::iovec>,
    ) -> Taken {
        let map = memory.map();
        let Ok(mut available) = self.queue.iter(map) else {
            return Taken::Lost;
        };
        let Some(mut chain) = available.next() else {
            return Taken::Empty;
        };
        let head = chain.head_index();
        if head >= self.queue.size() {
            // It can't be given back, so the guest could never use its ring again.
            return Taken::Lost;
        }
        let before = pieces.len();
        let (mut descriptors, mut ended) = (0, false);
        for descriptor in &mut chain {
            descriptors += 1;
            let right = descriptor.is_write_only() == (direction == Direction::ToGuest);
            let found = right && memory.locate(descriptor.addr().0, descriptor.len(), pieces);
            let length = descriptors.max(pieces.len() - before);
            if !found || length > LONGEST_CHAIN {
                ended = false;
                break;
            }
            // The iterator stops without a word at whatever is wrong; a chain is whole only if its last
            // descriptor names no next one.
            ended = !descriptor.has_next();
        }
        if ended {
            return Taken::Chain(head);
        }
        pieces.truncate(before);
        Taken::Broken(head)
    }

    /// Gives a chain back, with that many bytes written into it. Whether the ring could be written. The guest
    /// sees it after [`Self::publish`] or [`Self::signal`].
    pub fn give_back(&mut self, memory: &Memory, head: u16, written: u32) -> bool {
        if head >= self.queue.size() {
            return false;
        }
        if self.unpublished >= self.queue.size() {
            // Only a guest that lies about its ring gets so far.
            self.publish(memory);
        }
        let next = self.queue.next_used().wrapping_add(self.unpublished);
        let place = u64::from(next % self.queue.size());
        // Its number, then what was written, both little-endian.
        let element = (u64::from(written) << 32 | u64::from(head)).to_le();
        let Some(address) = used_ring(&self.queue, USED_HEADER_BYTES + place * USED_ELEMENT_BYTES)
        else {
            return false;
        };
        let is_written = memory.map().write_obj(element, address).is_ok();
        self.unpublished += u16::from(is_written);
        is_written
    }

    /// Lets the guest see what was given back.
    pub fn publish(&mut self, memory: &Memory) {
        if self.unpublished == 0 {
            return;
        }
        let next = self.queue.next_used().wrapping_add(self.unpublished);
        self.queue.set_next_used(next);
        self.unsignalled = self.unsignalled.saturating_add(self.unpublished);
        self.unpublished = 0;
        if let Some(address) = used_ring(&self.queue, USED_INDEX_OFFSET) {
            // Fails only for a ring that is not in memory, and then it isn't running.
            let _ = memory.map().store(next.to_le(), address, Ordering::Release);
        }
    }

    /// Whether there is something to take.
    #[must_use]
    pub fn has_more(&self, memory: &Memory) -> bool {
        self.queue
            .avail_idx(memory.map(), Ordering::Acquire)
            .is_ok_and(|index| index.0 != self.queue.next_avail())
    }

    /// Asks the guest not to kick: the ring is being served.
    pub fn wake(&mut self, memory: &Memory) {
        // Fails only for a ring that is not in memory, and then it isn't running.
        let _ = self.queue.disable_notification(memory.map());
    }

    /// Asks the guest to kick. True if something has come meanwhile, for which there may be no kick.
    #[must_use]
    pub fn sleep(&mut self, memory: &Memory) -> bool {
        self.queue
            .enable_notification(memory.map())
            .unwrap_or(false)
    }

    /// Lets the guest see what was given back, and interrupts it if it wants to know.
    pub fn signal(&mut self, memory: &Memory) {
        self.publish(memory);
        let Some(call) = &self.call else {
            return;
        };
        let wanted = self.is_signal_wanted(memory);
        self.unsignalled = 0;
        if wanted {
            call.ring();
        }
    }

    /// Whether the guest asked to be interrupted for one of the chains published since the last time.
    fn is_signal_wanted(&self, memory: &Memory) -> bool {
        if !self.queue.event_idx_enabled() {
            return self.unsignalled != 0;
        }
        // What was published is there before the guest's wish is read (virtio 1.3, §2.7.10).
        fence(Ordering::SeqCst);
        let offset = AVAILABLE_HEADER_BYTES + 2 * u64::from(self.queue.size());
        let event: Option<u16> = self
            .queue
            .avail_ring()
            .checked_add(offset)
            .and_then(|address| {
                let event = memory.map().load(GuestAddress(address), Ordering::Relaxed);
                event.ok().map(u16::from_le)
            });
        let next = self.queue.next_used();
        event.is_none_or(|event| next.wrapping_sub(event).wrapping_sub(1) < self.unsignalled)
    }
}

/// Flags and index, in front of the elements of the used ring (virtio 1.3, §2.7.8) and of the available one.
const USED_HEADER_BYTES: u64 = 4;
const USED_ELEMENT_BYTES: u64 = 8;
const USED_INDEX_OFFSET: u64 = 2;
const AVAILABLE_HEADER_BYTES: u64 = 4;

fn used_ring(queue: &Queue, offset: u64) -> Option<GuestAddress> {
    queue.used_ring().checked_add(offset).map(GuestAddress)
}

#[cfg(test)]
mod tests;
