//! What is asked for, for the packets of one direction and one flow rule.

use crate::{
    corrupt::CorruptModel,
    delay::DelayModel,
    flap::FlapModel,
    line::Capacity,
    loss::LossModel,
    mtu::MtuModel,
    nat::NatModel,
    queue::{Limit, QueueModel},
    reorder::ReorderModel,
};

/// What happens to the packets of one rule. What is absent doesn't happen. The fields are in the order in
/// which packets meet them.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// When the far side sees another address or port of a flow. A pipeline takes no notice of it: who has both
    /// directions applies it with [`Nat`](crate::nat::Nat). Only egress counts.
    pub nat: Option<NatModel>,
    /// The direction is cut: everything is dropped as [`DropCause::Partition`](crate::DropCause::Partition).
    pub partition: bool,
    /// The rule swallows everything: dropped as [`DropCause::Blackhole`](crate::DropCause::Blackhole).
    pub blackhole: bool,
    /// When the line is down.
    pub flap: Option<FlapModel>,
    /// Which packets are too large.
    pub mtu: Option<MtuModel>,
    /// Which are lost.
    pub loss: Option<LossModel>,
    /// The bottleneck.
    pub bottleneck: Option<Bottleneck>,
    /// How long they are under way.
    pub delay: Option<DelayModel>,
    /// What may be under way at once, the default being [`DELAY_LIMIT`]; never more packets than [`DELAY_PACKETS_MAX`].
    pub delay_limit: Limit,
    /// Which are held back for others to overtake them.
    pub reorder: Option<ReorderModel>,
    /// That a packet comes twice, from 0 to 1.
    pub duplicate: f64,
    /// Which bits flip.
    pub corrupt: Option<CorruptModel>,
    /// Due packets that wait for the consumer, at most.
    pub unread_packets_max: usize,
}

/// A line and what waits for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Bottleneck {
    /// How fast the line is.
    pub capacity: Capacity,
    /// What waits.
    pub queue: QueueModel,
}

/// What a delay line holds unless somebody says otherwise: 262,144 packets, 256 MiB.
pub const DELAY_LIMIT: Limit = Limit {
    packets: 1 << 18,
    bytes: 256 << 20,
};

/// Packets that a delay line holds whatever its limit says; what comes beyond is dropped as
/// [`DropCause::DelayFull`](crate::DropCause::DelayFull). A second's worth at a million packets per second.
pub const DELAY_PACKETS_MAX: usize = 1 << 20;

impl Default for Settings {
    /// Nothing happens.
    fn default() -> Self {
        Self {
            nat: None,
            partition: false,
            blackhole: false,
            flap: None,
            mtu: None,
            loss: None,
            bottleneck: None,
            delay: None,
            delay_limit: DELAY_LIMIT,
            reorder: None,
            duplicate: 0.0,
            corrupt: None,
            unread_packets_max: 1 << 16,
        }
    }
}
