//! The guest's side of its rings, in a memory that the device has too, without any idea of a connection.

use rustix::io::{pread, pwrite};
use sandwire_vsock_guest::{
    packet::{HEADER_BYTES, Header},
    ring::{Descriptor, NEXT, WRITE},
    wire::Region,
};

/// Where a session has the rings.
const RING: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x8000;
const USED: u64 = 0xc000;
/// Descriptors of a ring.
pub(super) const QUEUE: u16 = 256;
const TO_GUEST: u64 = 0;
const FROM_GUEST: u64 = RING;
/// Headers of packets from the guest, and the one place of all their payloads.
const HEADERS: u64 = 0x4_0000;
const SLOTS: u16 = QUEUE / 2;
const PAYLOAD: u64 = 0x5_0000;
/// Buffers for packets to it.
const BUFFERS: u64 = 0x8_0000;
const BUFFER_BYTES: u32 = 4096 + 44;
const BUFFER_COUNT: u16 = 64;
const MEMORY: u64 = 0x10_0000;

/// Both rings of packets.
pub(super) struct Rings {
    memory: Region,
    /// Places: packets published, buffers published, and packets to the guest taken.
    sent: u16,
    posted: u16,
    taken: u16,
    /// Buffers that aren't with the device.
    buffers: Vec<u16>,
}

impl Rings {
    /// Empty ones, where [`wire::session`](sandwire_vsock_guest::wire::session) says; all payloads begin like this.
    pub(super) fn new(payload: &[u8]) -> Self {
        let rings = Self {
            memory: Region::new(0, MEMORY).expect("memory"),
            sent: 0,
            posted: 0,
            taken: 0,
            buffers: (0..BUFFER_COUNT).collect(),
        };
        rings.write(PAYLOAD, payload);
        rings
    }

    pub(super) fn memory(&self) -> &Region {
        &self.memory
    }

    /// Publishes a header with that much payload behind it; false while too many aren't taken.
    pub(super) fn offer(&mut self, header: &Header, payload: u32) -> bool {
        if self.sent.wrapping_sub(self.used(FROM_GUEST)) >= SLOTS {
            return false;
        }
        let slot = self.sent % SLOTS;
        let head = slot * 2;
        let at = HEADERS + 64 * u64::from(slot);
        self.write(at, &header.encode());
        let first = Descriptor {
            address: at,
            length: 44,
            flags: if payload == 0 { 0 } else { NEXT },
            next: head + 1,
        };
        let second = Descriptor {
            address: PAYLOAD,
            length: payload,
            ..Descriptor::default()
        };
        self.describe(FROM_GUEST, head, first);
        self.describe(FROM_GUEST, head + 1, second);
        self.publish(FROM_GUEST, self.sent, head);
        self.sent = self.sent.wrapping_add(1);
        true
    }

    /// The next packet for the guest.
    pub(super) fn take(&mut self) -> Option<(Header, Vec<u8>)> {
        if self.taken == self.used(TO_GUEST) {
            return None;
        }
        let place = u64::from(self.taken % QUEUE);
        let entry: [u8; 8] = self.read(TO_GUEST + USED + 4 + 8 * place);
        self.taken = self.taken.wrapping_add(1);
        let [a, b, c, d, e, f, g, h] = entry;
        let index = u32::from_le_bytes([a, b, c, d]);
        let length = u32::from_le_bytes([e, f, g, h]);
        let index = u16::try_from(index).expect("a buffer's number");
        assert!(index < BUFFER_COUNT && !self.buffers.contains(&index));
        self.buffers.push(index);
        assert!((44..=BUFFER_BYTES).contains(&length));
        let at = BUFFERS + u64::from(index) * 0x2000;
        let header = Header::decode(&self.read(at));
        assert_eq!(header.len, length - 44, "{header:?}");
        let mut payload = vec![0; header.len as usize];
        let at = at + HEADER_BYTES as u64;
        pread(&self.memory.file, &mut payload, at).expect("the guest's memory");
        Some((header, payload))
    }

    /// Publishes the buffers that aren't with the device. Whether there were any.
    pub(super) fn post(&mut self) -> bool {
        let buffers = std::mem::take(&mut self.buffers);
        for index in &buffers {
            let buffer = Descriptor {
                address: BUFFERS + u64::from(*index) * 0x2000,
                length: BUFFER_BYTES,
                flags: WRITE,
                next: 0,
            };
            self.describe(TO_GUEST, *index, buffer);
            self.publish(TO_GUEST, self.posted, *index);
            self.posted = self.posted.wrapping_add(1);
        }
        !buffers.is_empty()
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        let written = pwrite(&self.memory.file, bytes, at).expect("the guest's memory");
        assert_eq!(written, bytes.len());
    }

    fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        let read = pread(&self.memory.file, &mut bytes, at).expect("the guest's memory");
        assert_eq!(read, N);
        bytes
    }

    fn used(&self, ring: u64) -> u16 {
        u16::from_le_bytes(self.read(ring + USED + 2))
    }

    fn publish(&self, ring: u64, place: u16, head: u16) {
        let entry = ring + AVAILABLE + 4 + 2 * u64::from(place % QUEUE);
        self.write(entry, &head.to_le_bytes());
        let next = place.wrapping_add(1);
        self.write(ring + AVAILABLE + 2, &next.to_le_bytes());
    }

    fn describe(&self, ring: u64, index: u16, descriptor: Descriptor) {
        self.write(ring + 16 * u64::from(index), &descriptor.encode());
    }
}
