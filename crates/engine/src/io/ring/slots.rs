//! Slots of memory that a packet socket and this process share, one frame in each (TPACKET_V2).
//!
//! Each slot begins with a header whose status says whose it is. Who hands it over writes the status last, with
//! release, and who looks reads it first, with acquire; nobody touches a slot that isn't his. All that knows of
//! addresses is in this file.

#![expect(unsafe_code, reason = "memory that is shared with the kernel")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::io::inbound::VlanTag;
use crate::io::offload::VnetHeader;
use crate::io::packet_socket::{PacketSocket, vlan_tag};

/// A mapped ring.
#[derive(Debug)]
pub(super) struct Slots {
    memory: NonNull<u8>,
    bytes: usize,
    /// Where each slot begins.
    places: Vec<usize>,
    slot_bytes: usize,
}

/// Which of a socket's rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Receive,
    Send,
}

/// A frame in a slot that is ours.
#[derive(Debug, Clone, Copy)]
pub(super) struct Filled<'a> {
    pub(super) header: VnetHeader,
    /// As much of it as the slot holds.
    pub(super) frame: &'a [u8],
    pub(super) vlan: Option<VlanTag>,
    /// The frame was longer than the slot.
    pub(super) is_truncated: bool,
    /// All of it can be read from the socket.
    pub(super) is_at_socket: bool,
}

impl Slots {
    /// Has the socket make a ring of at least so many slots for frames of that size, and maps it.
    pub(super) fn map(
        socket: &PacketSocket,
        direction: Direction,
        count: usize,
        frame_bytes: usize,
    ) -> io::Result<Self> {
        let version: libc::c_int = libc::tpacket_versions::TPACKET_V2 as libc::c_int;
        socket.set(libc::PACKET_VERSION, &version)?;
        let shape = Shape::of(count, frame_bytes).ok_or(io::ErrorKind::InvalidInput)?;
        let option = match direction {
            Direction::Receive => libc::PACKET_RX_RING,
            Direction::Send => libc::PACKET_TX_RING,
        };
        socket.set(option, &shape.request)?;
        let socket = socket.as_fd().as_raw_fd();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // Populated, since a page fault in the middle of traffic costs packets.
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        let bytes = shape.bytes;
        // SAFETY: a new mapping at an address of the kernel's choice, of exactly the size of the ring.
        let memory = unsafe { libc::mmap(ptr::null_mut(), bytes, access, flags, socket, 0) };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            memory: NonNull::new(memory.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?,
            bytes,
            places: shape.places,
            slot_bytes: shape.slot_bytes,
        })
    }

    /// How many there are.
    #[inline]
    pub(super) fn count(&self) -> usize {
        self.places.len()
    }

    /// Bytes of the longest frame that a slot of a ring for sending holds.
    #[inline]
    pub(super) fn frame_bytes_max(&self) -> usize {
        self.slot_bytes - FRAME_AT
    }

    /// Whose a slot is.
    #[inline]
    pub(super) fn status(&self, index: usize) -> u32 {
        self.status_of(index).load(Ordering::Acquire)
    }

    /// Hands a slot over.
    #[inline]
    pub(super) fn set_status(&self, index: usize, status: u32) {
        self.status_of(index).store(status, Ordering::Release);
    }

    /// The frame in a slot, of which [`Slots::status`] said that it is ours, by that status; `None` if the slot makes
    /// no sense.
    #[inline]
    pub(super) fn filled(&self, index: usize, status: u32) -> Option<Filled<'_>> {
        let slot = self.slot(index);
        // SAFETY: a slot begins with such a header and is aligned for it; the slot is ours, so nobody writes it now.
        let header = unsafe { slot.cast::<libc::tpacket2_hdr>().read() };
        let at = usize::from(header.tp_mac);
        let length = header.tp_snaplen as usize;
        let vnet_at = at.checked_sub(VnetHeader::BYTES)?;
        if at.checked_add(length)? > self.slot_bytes {
            return None;
        }
        // SAFETY: vnet header and frame are within the slot, as was just checked, and all of the slot is initialised
        // memory; nobody writes it while it is ours, which the borrow of `self` outlives.
        let bytes = unsafe { slice::from_raw_parts(slot.add(vnet_at), VnetHeader::BYTES + length) };
        let (vnet, frame) = bytes.split_first_chunk()?;
        Some(Filled {
            header: VnetHeader::read(*vnet),
            frame,
            vlan: vlan_tag(status, header.tp_vlan_tci, header.tp_vlan_tpid),
            is_truncated: header.tp_snaplen < header.tp_len,
            is_at_socket: status & libc::TP_STATUS_COPY != 0,
        })
    }

    /// Writes a frame to be sent, which must fit, into a slot of which [`Slots::status`] said that it is ours.
    #[inline]
    pub(super) fn write(&mut self, index: usize, frame: &[u8]) {
        let length = frame.len().min(self.frame_bytes_max());
        #[expect(clippy::cast_possible_truncation, reason = "slots are far shorter")]
        let (total, header_bytes) = ((VnetHeader::BYTES + length) as u32, length as u16);
        // All of the frame is "headers", so the kernel copies it. Otherwise it would refer to the slot, and copy that
        // to a page of its own when the frame crosses a veth.
        let vnet = VnetHeader {
            header_bytes,
            ..VnetHeader::default()
        };
        let slot = self.slot(index);
        // SAFETY: a slot begins with such a header; it is ours, so nobody else reads or writes it now.
        unsafe { (&raw mut (*slot.cast::<libc::tpacket2_hdr>()).tp_len).write(total) };
        // SAFETY: the slot is ours, borrowed for as long, and `FRAME_AT + length` is within it.
        let bytes =
            unsafe { slice::from_raw_parts_mut(slot.add(VNET_AT), VnetHeader::BYTES + length) };
        let (to_header, to_frame) = bytes.split_at_mut(VnetHeader::BYTES);
        to_header.copy_from_slice(&vnet.write());
        to_frame.copy_from_slice(&frame[..length]);
    }

    /// The frame that [`Slots::write`] put into a slot that is ours again.
    pub(super) fn written(&self, index: usize) -> &[u8] {
        let slot = self.slot(index);
        // SAFETY: as in `filled`.
        let header = unsafe { slot.cast::<libc::tpacket2_hdr>().read() };
        let length = (header.tp_len as usize).saturating_sub(VnetHeader::BYTES);
        let length = length.min(self.frame_bytes_max());
        // SAFETY: within the slot, which is ours and initialised.
        unsafe { slice::from_raw_parts(slot.add(FRAME_AT), length) }
    }

    #[inline]
    fn slot(&self, index: usize) -> *mut u8 {
        // SAFETY: all places are within the mapping.
        unsafe { self.memory.as_ptr().add(self.places[index]) }
    }

    #[inline]
    fn status_of(&self, index: usize) -> &AtomicU32 {
        // SAFETY: the status is the header's first member, a word, aligned as slots are; kernel and process only ever
        // use it as a whole. The mapping outlives the borrow.
        unsafe { AtomicU32::from_ptr(self.slot(index).cast()) }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference into the mapping, which is all ours.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.bytes) };
    }
}

/// How a ring lies in memory.
struct Shape {
    request: libc::tpacket_req,
    bytes: usize,
    slot_bytes: usize,
    places: Vec<usize>,
}

impl Shape {
    fn of(count: usize, frame_bytes: usize) -> Option<Self> {
        // An odd number of cache lines, so that the headers of neighbours don't compete for a few sets of the cache.
        let lines = frame_bytes
            .checked_add(OVERHEAD_BYTES)?
            .div_ceil(LINE_BYTES)
            | 1;
        let slot_bytes = lines.checked_mul(LINE_BYTES)?;
        let block_bytes = slot_bytes.next_power_of_two().max(BLOCK_BYTES);
        let per_block = block_bytes / slot_bytes;
        let blocks = count.max(2).div_ceil(per_block);
        let bytes = blocks.checked_mul(block_bytes)?;
        let request = libc::tpacket_req {
            tp_block_size: u32::try_from(block_bytes).ok()?,
            tp_block_nr: u32::try_from(blocks).ok()?,
            tp_frame_size: u32::try_from(slot_bytes).ok()?,
            tp_frame_nr: u32::try_from(blocks * per_block).ok()?,
        };
        let places = (0..blocks * per_block)
            .map(|slot| slot / per_block * block_bytes + slot % per_block * slot_bytes)
            .collect();
        Some(Self {
            request,
            bytes,
            slot_bytes,
            places,
        })
    }
}

/// Where the kernel expects what is to be sent: behind the header, aligned to 16.
const VNET_AT: usize = size_of::<libc::tpacket2_hdr>().next_multiple_of(16);
const FRAME_AT: usize = VNET_AT + VnetHeader::BYTES;
/// The most that comes before a received frame: header, address, vnet header, and what aligns them.
const OVERHEAD_BYTES: usize = 128;
const LINE_BYTES: usize = 64;
const BLOCK_BYTES: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_lie_within_their_blocks_and_apart() {
        for (count, frame_bytes) in [(1, 60), (512, 1518), (4096, 2048), (100, 9018), (7, 65_000)] {
            let shape = Shape::of(count, frame_bytes).unwrap();
            let block = shape.request.tp_block_size as usize;
            assert!(shape.places.len() >= count.max(2));
            assert_eq!(shape.places.len(), shape.request.tp_frame_nr as usize);
            assert_eq!(shape.bytes, block * shape.request.tp_block_nr as usize);
            assert!(shape.slot_bytes >= frame_bytes + OVERHEAD_BYTES);
            for pair in shape.places.windows(2) {
                assert!(pair[0] + shape.slot_bytes <= pair[1]);
            }
            for place in &shape.places {
                assert!(place % block + shape.slot_bytes <= block);
            }
        }
        assert!(Shape::of(usize::MAX, 1518).is_none());
        assert!(Shape::of(16, usize::MAX).is_none());
    }
}
