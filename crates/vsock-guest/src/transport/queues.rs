//! The driver's own state of its queues.

use super::{PAGE, Settings, settings::PIECES_MAX};
use crate::{memory::Memory, packet::HEADER_BYTES, ring::Ring};

/// The driver's own state of its queues: what a snapshot of a guest has beside its memory.
#[derive(Clone, Debug)]
pub(crate) struct Queues {
    pub(super) rings: [Ring; 3],
    /// Address of each posted buffer, by the head of its chain.
    pub(super) receive_buffers: Vec<u64>,
    /// Chains of the receive queue that were taken and not posted again yet.
    pub(super) taken: Vec<u16>,
    pub(super) event_buffers: Vec<u64>,
    /// Slots for packets out, and those that are free.
    pub(super) slots: Vec<u64>,
    pub(super) tables: Vec<u64>,
    pub(super) free_slots: Vec<u16>,
    /// Slot of each chain of the transmit queue, by its head.
    pub(super) slot_of: Vec<Option<u16>>,
}

impl Queues {
    pub(super) fn new(settings: &Settings, memory: &mut Memory, event_idx: bool) -> Self {
        let entries = usize::from(settings.queue_size);
        let rings = [(); 3].map(|()| Ring::new(memory, settings.queue_size, event_idx));
        let slot_bytes = HEADER_BYTES + settings.transmit_bytes as usize;
        let slots = settings.transmit_slots;
        Self {
            rings,
            receive_buffers: vec![0; entries],
            taken: Vec::new(),
            event_buffers: vec![0; entries],
            slots: (0..slots)
                .map(|_| memory.allocate(slot_bytes, PAGE))
                .collect(),
            tables: (0..slots)
                .map(|_| memory.allocate(PIECES_MAX * 16, 16))
                .collect(),
            free_slots: (0..slots).rev().collect(),
            slot_of: vec![None; entries],
        }
    }
}
