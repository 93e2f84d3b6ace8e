//! A packet: a buffer on loan from a pool, and which part of it is the frame.
//!
//! The frame may grow at both ends: at the front into the headroom, where headers are added, at the back up to
//! the pool's largest frame. Dropping a packet gives its buffer back.
//!
//! Length and start are kept beside the buffer's address and not in the buffer: an app that only counts or
//! forwards never touches the buffer's memory.

#![forbid(unsafe_code)]

use std::fmt;
use std::mem;
use std::rc::Rc;

use crate::interlink::Parcel;
use crate::pool::Shelf;

/// Bytes in front of every fresh frame, for headers that apps add.
pub const HEADROOM: usize = 128;

/// Where frames start in memory: at a multiple of this, so that a short one lies in one cache line.
pub(crate) const ALIGNMENT: usize = 64;

/// One frame, and the buffer that it is in.
///
/// Frames are what an Ethernet interface sends, without preamble and frame check sequence.
pub struct Packet {
    pub(crate) bytes: Box<[u8]>,
    pub(crate) shelf: Rc<Shelf>,
    pub(crate) start: u16,
    pub(crate) length: u16,
    mark: u32,
}

impl Packet {
    /// A new buffer of that shelf.
    pub(crate) fn with_buffer(bytes: Box<[u8]>, shelf: Rc<Shelf>) -> Self {
        Self {
            bytes,
            shelf,
            start: 0,
            length: 0,
            mark: 0,
        }
    }

    /// Makes an empty frame of whatever was in the buffer, after the whole headroom.
    #[inline]
    pub(crate) fn clear(&mut self) {
        let headroom = self.bytes.as_ptr().align_offset(ALIGNMENT) + HEADROOM;
        self.start = u16_of(headroom);
        self.length = 0;
        self.mark = 0;
    }

    /// Bytes in the frame.
    #[inline]
    #[must_use]
    pub fn length(&self) -> usize {
        usize::from(self.length)
    }

    /// Whether the frame has no byte.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Bytes that may still be added at the front.
    #[inline]
    #[must_use]
    pub fn headroom(&self) -> usize {
        usize::from(self.start)
    }

    /// Bytes that may still be added at the back.
    #[inline]
    #[must_use]
    pub fn tailroom(&self) -> usize {
        let end = usize::from(self.start) + usize::from(self.length);
        let room = self.bytes.len().saturating_sub(end);
        room.min(self.shelf.frame_bytes_max() - usize::from(self.length))
    }

    /// The frame.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let start = usize::from(self.start);
        &self.bytes[start..start + usize::from(self.length)]
    }

    /// The frame, to be changed in place.
    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let start = usize::from(self.start);
        &mut self.bytes[start..start + usize::from(self.length)]
    }

    /// A number that apps may pin to a packet for apps after them; 0 in a fresh packet, and copied with it.
    #[must_use]
    pub fn mark(&self) -> u32 {
        self.mark
    }

    /// Pins a number to the packet.
    pub fn set_mark(&mut self, mark: u32) {
        self.mark = mark;
    }

    /// Puts this frame in place of the one before. Without effect and false if it is longer than the pool allows.
    #[inline]
    #[must_use = "a frame that is too long is not put in"]
    pub fn set_bytes(&mut self, frame: &[u8]) -> bool {
        if frame.len() > self.length() + self.tailroom() {
            return false;
        }
        let start = usize::from(self.start);
        copy_frame(&mut self.bytes[start..start + frame.len()], frame);
        self.length = u16_of(frame.len());
        true
    }

    /// Adds bytes at the back. Without effect and false if there is no room.
    #[must_use = "what has no room is not added"]
    pub fn append(&mut self, more: &[u8]) -> bool {
        if more.len() > self.tailroom() {
            return false;
        }
        let end = usize::from(self.start) + usize::from(self.length);
        self.bytes[end..end + more.len()].copy_from_slice(more);
        self.length += u16_of(more.len());
        true
    }

    /// Adds a header at the front. Without effect and false if the headroom, or the longest frame, has no room.
    #[must_use = "what has no room is not added"]
    pub fn prepend(&mut self, header: &[u8]) -> bool {
        let start = usize::from(self.start);
        let room = self.shelf.frame_bytes_max() - self.length();
        if header.len() > start.min(room) {
            return false;
        }
        self.bytes[start - header.len()..start].copy_from_slice(header);
        self.start -= u16_of(header.len());
        self.length += u16_of(header.len());
        true
    }

    /// Takes bytes off the front. Without effect and false if the frame has fewer.
    #[must_use = "a shorter frame stays as it is"]
    pub fn strip(&mut self, count: usize) -> bool {
        if count > self.length() {
            return false;
        }
        self.start += u16_of(count);
        self.length -= u16_of(count);
        true
    }

    /// Cuts the frame to `length` bytes; without effect on one that isn't longer.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(u16::try_from(length).unwrap_or(u16::MAX));
    }

    /// The whole room from the frame's first byte on, for a reader that fills it; what is in it is arbitrary until
    /// [`Packet::set_length`] says how much of it is the frame.
    pub fn room_mut(&mut self) -> &mut [u8] {
        let start = usize::from(self.start);
        let room = self.length() + self.tailroom();
        &mut self.bytes[start..start + room]
    }

    /// Says how much of [`Packet::room_mut`] is the frame. Without effect and false if that is more than there is.
    #[must_use = "a length that doesn't fit is not taken"]
    pub fn set_length(&mut self, length: usize) -> bool {
        if length > self.length() + self.tailroom() {
            return false;
        }
        self.length = u16_of(length);
        true
    }

    /// A packet of the same pool with the same frame and mark; `None`, counted by the pool, when it has none left.
    #[must_use]
    pub fn copy(&self) -> Option<Self> {
        let mut copy = Shelf::take(&self.shelf)?;
        copy.become_copy_of(self);
        Some(copy)
    }

    /// Makes this fresh packet equal to `original`, of the same pool or one with frames no longer.
    #[inline]
    pub(crate) fn become_copy_of(&mut self, original: &Self) {
        let start = usize::from(self.start);
        let length = usize::from(original.length);
        copy_frame(&mut self.bytes[start..start + length], original.bytes());
        self.length = original.length;
        self.mark = original.mark;
    }

    /// The buffer and what is in it, to be sent to another thread. The pool counts it as in use until it has a
    /// buffer back.
    pub(crate) fn into_parcel(mut self) -> Parcel {
        Parcel {
            bytes: mem::take(&mut self.bytes),
            start: self.start,
            length: self.length,
            mark: self.mark,
        }
    }

    /// Becomes what a parcel holds; the buffer that is left over, and whether the frame fitted. Buffers of one size
    /// are exchanged; a frame in another one is copied.
    pub(crate) fn exchange(&mut self, parcel: Parcel) -> (Box<[u8]>, bool) {
        let Parcel {
            bytes,
            start,
            length,
            mark,
        } = parcel;
        let fits = usize::from(length) <= self.shelf.frame_bytes_max();
        if fits && bytes.len() == self.bytes.len() {
            (self.start, self.length, self.mark) = (start, length, mark);
            return (mem::replace(&mut self.bytes, bytes), true);
        }
        self.mark = mark;
        let start = usize::from(start);
        let fits = self.set_bytes(&bytes[start..start + usize::from(length)]);
        (bytes, fits)
    }
}

impl Drop for Packet {
    #[inline]
    fn drop(&mut self) {
        let bytes = mem::take(&mut self.bytes);
        if !bytes.is_empty() {
            Shelf::take_back(&self.shelf, bytes, self.length);
        }
    }
}

impl fmt::Debug for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packet")
            .field("length", &self.length)
            .field("mark", &self.mark)
            .finish_non_exhaustive()
    }
}

/// Copies between slices of one length. Frames of 32 to 64 bytes, the commonest ones and the ones of which there
/// are most in a second, are two overlapping moves of fixed size instead of a call.
#[inline]
fn copy_frame(to: &mut [u8], from: &[u8]) {
    const HALF: usize = 32;
    let length = from.len();
    if (HALF..=2 * HALF).contains(&length) && to.len() == length {
        to[..HALF].copy_from_slice(&from[..HALF]);
        to[length - HALF..].copy_from_slice(&from[length - HALF..]);
    } else {
        to.copy_from_slice(from);
    }
}

/// Lengths and starts fit in 16 bits: the pool makes no buffer where they don't.
#[inline]
fn u16_of(count: usize) -> u16 {
    debug_assert!(count <= usize::from(u16::MAX));
    #[expect(
        clippy::cast_possible_truncation,
        reason = "bounded by the pool's largest frame"
    )]
    let count = count as u16;
    count
}

#[cfg(test)]
mod tests {
    use crate::pool::{Pool, PoolLimits};

    fn pool() -> Pool {
        Pool::new(PoolLimits {
            packets_max: 4,
            frame_bytes_max: 100,
        })
        .unwrap()
    }

    #[test]
    fn a_frame_grows_at_both_ends_and_no_further() {
        let pool = pool();
        let mut packet = pool.take().unwrap();
        assert!(packet.set_bytes(b"payload"));
        assert!(packet.prepend(b"head "));
        assert!(packet.append(b" tail"));
        assert_eq!(packet.bytes(), b"head payload tail");
        assert!(!packet.append(&[0; 84]));
        assert!(!packet.prepend(&[0; 84]));
        assert!(!packet.set_bytes(&[0; 101]));
        assert!(!packet.set_length(101));
        assert_eq!(packet.bytes(), b"head payload tail");
        assert!(packet.strip(5));
        packet.truncate(7);
        assert_eq!(packet.bytes(), b"payload");
        assert!(!packet.strip(8));
    }

    #[test]
    fn a_stripped_frame_is_still_bounded_by_its_buffer() {
        let pool = pool();
        let mut packet = pool.take().unwrap();
        for _ in 0..100 {
            assert!(packet.set_bytes(&[7; 40]) || packet.tailroom() < 40);
            let length = packet.length();
            assert!(packet.strip(length));
            let room = packet.room_mut().len();
            assert!(room <= 100);
        }
    }

    #[test]
    fn a_copy_has_every_byte_at_every_length() {
        let pool = pool();
        let frame: Vec<u8> = (0..100).collect();
        let mut packet = pool.take().unwrap();
        for length in 0..=100 {
            assert!(packet.set_bytes(&frame[..length]));
            packet.set_mark(9);
            let copy = packet.copy().unwrap();
            assert_eq!(copy.bytes(), &frame[..length]);
            assert_eq!(copy.mark(), 9);
        }
    }

    #[test]
    fn frames_start_at_a_cache_line() {
        let pool = pool();
        let packets: Vec<_> = (0..4).map(|_| pool.take().unwrap()).collect();
        for packet in packets {
            assert!(packet.bytes().as_ptr().addr().is_multiple_of(64));
            assert!(packet.headroom() >= super::HEADROOM);
        }
    }
}
