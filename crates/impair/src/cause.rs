//! Why a packet was dropped. Each drop has exactly one cause, and no limit poses as a loss.

/// What dropped a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DropCause {
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
}

impl DropCause {
    /// All causes, in the order of their discriminants.
    pub const ALL: [Self; 5] = [
        Self::Loss,
        Self::QueueFull,
        Self::Codel,
        Self::DelayFull,
        Self::Unread,
    ];

    /// The name in reports and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Loss => "loss",
            Self::QueueFull => "queue_full",
            Self::Codel => "codel",
            Self::DelayFull => "delay_full",
            Self::Unread => "unread",
        }
    }
}
