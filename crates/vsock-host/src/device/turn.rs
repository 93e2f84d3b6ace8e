//! How much a guest may do until it is the turn of the others of its worker: so much each way in a round, however many
//! of the round's events are about it.

use super::{Context, Vm};
use crate::front_end::Transport;

/// Packets from a guest, and bytes in them.
const PACKETS: u32 = 1024;
const EGRESS_BYTES: usize = 1024 * 1024;
/// Bytes to a guest, and buffers of it: it may offer buffers of no use without end, and messages of no bytes may come
/// without end.
const INGRESS_BYTES: u64 = 1024 * 1024;
const BUFFERS: u32 = 1024;
/// Messages from the guest that had to wait for their readers.
const LATE_MESSAGES: u32 = 1024;

/// What is left of a guest's turn; of its buffers, [`Transport::left`].
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// The round that it is of.
    round: Option<u64>,
    /// Packets from the guest.
    pub(super) packets: u32,
    /// Bytes in these.
    pub(super) egress_bytes: usize,
    /// Bytes to the guest.
    pub(super) ingress_bytes: u64,
}

/// What is left of its turn for messages that had to wait; where the transport may be anybody's.
#[derive(Debug, Default)]
pub(super) struct LateTurn {
    round: Option<u64>,
    left: u32,
}

impl LateTurn {
    /// How many it may pass on in this round.
    pub(super) fn left(&mut self, round: u64) -> &mut u32 {
        if self.round != Some(round) {
            *self = Self {
                round: Some(round),
                left: LATE_MESSAGES,
            };
        }
        &mut self.left
    }
}

impl Vm {
    /// Begins the guest's turn, unless it has begun in this round.
    pub(super) fn begin_turn(&mut self, transport: &mut Transport, context: &Context) {
        if self.turn.round == Some(context.round) {
            return;
        }
        transport.left = BUFFERS;
        self.turn = Turn {
            round: Some(context.round),
            packets: PACKETS,
            egress_bytes: EGRESS_BYTES,
            ingress_bytes: INGRESS_BYTES,
        };
    }
}
