//! Why a packet was dropped. Each drop has exactly one cause, and no limit poses as a loss.

use serde::{Deserialize, Serialize};

/// What dropped a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DropCause {
    /// This direction is cut.
    Partition,
    /// The rule swallows everything.
    Blackhole,
    /// It came while the line was down.
    Flap,
    /// It was larger than the line's MTU.
    Mtu,
    /// It belonged to a connection whose address or port was changed under way.
    Nat,
    /// The loss model chose it.
    Loss,
    /// The queue before the bottleneck was full.
    QueueFull,
    /// CoDel's control law dropped it, at the head of its queue.
    Codel,
    /// More packets were under way than the delay line may hold.
    DelayFull,
    /// It was due, but the consumer left too many others where they were.
    Unread,
    /// Somebody asked for everything inside to be dropped.
    Flushed,
    /// Its line held more than its share of the packets that those of an engine have together.
    Share,
}

impl DropCause {
    /// All causes, in the order of their discriminants.
    pub const ALL: [Self; 12] = [
        Self::Partition,
        Self::Blackhole,
        Self::Flap,
        Self::Mtu,
        Self::Nat,
        Self::Loss,
        Self::QueueFull,
        Self::Codel,
        Self::DelayFull,
        Self::Unread,
        Self::Flushed,
        Self::Share,
    ];

    /// The name in reports, metrics and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Partition => "partition",
            Self::Blackhole => "blackhole",
            Self::Flap => "flap",
            Self::Mtu => "mtu",
            Self::Nat => "nat",
            Self::Loss => "loss",
            Self::QueueFull => "queue_full",
            Self::Codel => "codel",
            Self::DelayFull => "delay_full",
            Self::Unread => "unread",
            Self::Flushed => "flushed",
            Self::Share => "share",
        }
    }
}
