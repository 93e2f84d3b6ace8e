//! What a guest is like: sizes, features, and how its packets lie in descriptors.

use std::time::Duration;

use crate::{
    front_end::{EVENT_IDX, FEATURE_SEQPACKET, FEATURE_STREAM, INDIRECT_DESC},
    packet::HEADER_BYTES,
};

/// Descriptors that one packet out may take.
pub(super) const PIECES_MAX: usize = 64;

/// How a buffer for a packet to the guest is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveLayout {
    /// Header and payload behind each other in one descriptor: Linux since 6.3.
    Whole,
    /// A descriptor for the header, another one for the payload: Linux before.
    Split,
    /// A descriptor for every so many bytes, whatever they belong to.
    Pieces(u32),
}

/// How a packet from the guest is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransmitLayout {
    /// Header and payload behind each other in one descriptor: Linux since 6.3, up to 32 KiB since 6.17.
    Whole,
    /// A descriptor for the header, another one for the payload: Linux before.
    Split,
    /// Header with the first bytes, then a descriptor for every so many bytes: Linux since 6.17 with 32 KiB.
    Pieces(u32),
}

/// What a guest is like.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Descriptors of a queue, a power of two.
    pub queue_size: u16,
    /// Guest-physical bases and sizes.
    pub memory: Vec<(u64, usize)>,
    /// Features that are taken if they are offered.
    pub features: u64,
    /// Whether the back end is given the event queue; QEMU keeps it.
    pub event_queue: bool,
    /// Whether memory is told region by region.
    pub memory_slots: bool,
    /// Whether packets out are in indirect tables, if the feature is agreed on.
    pub indirect: bool,
    /// Layout of buffers for packets in.
    pub receive_layout: ReceiveLayout,
    /// Bytes of payload that fit one of them.
    pub receive_bytes: u32,
    /// How many of them are posted, at most what the queue holds.
    pub receive_buffers: u16,
    /// Layout of packets out.
    pub transmit_layout: TransmitLayout,
    /// Most bytes of payload in one of them.
    pub transmit_bytes: u32,
    /// How many of them can be on their way.
    pub transmit_slots: u16,
    /// `buf_alloc` of a socket.
    pub buffer_bytes: u32,
    /// CID where the back end has no configuration to read.
    pub fallback_cid: u64,
    /// How long anything that is waited for may take.
    pub timeout: Duration,
}

impl Default for Settings {
    /// As Linux since 6.3 on QEMU, but with a queue of 256.
    fn default() -> Self {
        Self {
            queue_size: 256,
            memory: vec![(0, 1 << 20), (1 << 32, 7 << 20)],
            features: EVENT_IDX | INDIRECT_DESC | FEATURE_STREAM | FEATURE_SEQPACKET,
            event_queue: true,
            memory_slots: false,
            indirect: false,
            receive_layout: ReceiveLayout::Whole,
            receive_bytes: 4096,
            receive_buffers: 256,
            transmit_layout: TransmitLayout::Whole,
            transmit_bytes: 64 * 1024,
            transmit_slots: 64,
            buffer_bytes: 256 * 1024,
            fallback_cid: 3,
            timeout: Duration::from_secs(10),
        }
    }
}

/// Parts of a chain: address, length, whether the device writes.
pub(super) type Parts = [(u64, u32, bool); PIECES_MAX];

impl ReceiveLayout {
    pub(super) fn split(self, address: u64, bytes: usize, parts: &mut Parts) -> usize {
        match self {
            Self::Whole => cut(address, bytes, bytes, bytes, true, parts),
            Self::Split => cut(address, bytes, HEADER_BYTES, bytes, true, parts),
            Self::Pieces(piece) => cut(address, bytes, piece as usize, piece as usize, true, parts),
        }
    }
}

impl TransmitLayout {
    /// Descriptors that the longest packet takes.
    pub(super) fn descriptors(self, settings: &Settings) -> usize {
        match self {
            Self::Whole => 1,
            Self::Split => 2,
            Self::Pieces(piece) => (HEADER_BYTES + settings.transmit_bytes as usize)
                .div_ceil(piece as usize)
                .min(PIECES_MAX),
        }
    }

    pub(super) fn split(self, address: u64, bytes: usize, parts: &mut Parts) -> usize {
        match self {
            Self::Whole => cut(address, bytes, bytes, bytes, false, parts),
            Self::Split => cut(address, bytes, HEADER_BYTES, bytes, false, parts),
            Self::Pieces(piece) => {
                cut(address, bytes, piece as usize, piece as usize, false, parts)
            }
        }
    }
}

/// Cuts a buffer into a first piece and further ones; gives their number. The last place takes all that is left.
fn cut(
    address: u64,
    bytes: usize,
    first: usize,
    further: usize,
    write: bool,
    parts: &mut Parts,
) -> usize {
    let (mut done, mut count) = (0, 0);
    while done < bytes {
        let piece = if count == 0 { first } else { further };
        let length = if count + 1 == PIECES_MAX {
            bytes - done
        } else {
            piece.min(bytes - done)
        };
        let length_field = u32::try_from(length).expect("a packet is smaller than 4 GiB");
        parts[count] = (address + done as u64, length_field, write);
        done += length;
        count += 1;
    }
    count
}
