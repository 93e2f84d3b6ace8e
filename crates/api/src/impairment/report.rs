//! What impairments did, as numbers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What becomes of the packets of an impaired interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ImpairmentState)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum State {
    /// They are diverted.
    Impaired,
    /// Those that are under way are let go; then it ends.
    Draining,
    /// The diversion has ended by itself; it is listed until it is cleared, or others need its place.
    Ended {
        /// Why.
        reason: String,
    },
}

/// One direction of an impaired interface.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Way {
    /// Packets taken off the interface, those of super-packets each.
    pub diverted: u64,
    /// Packets brought back to it.
    pub returned: u64,
    /// Packets dropped as the engine had died.
    pub dead_dropped: u64,
    /// Packets that passed as the engine had died.
    pub dead_passed: u64,
    /// Packets dropped before the engine, as it didn't read them in time, or had no room for them.
    pub unread: u64,
    /// Packets dropped as they are longer than the engine's frames: the interface has got a larger MTU than when it was
    /// impaired. A service with a larger `--frame-bytes-max` takes them.
    #[serde(default)]
    pub too_long: u64,
    /// Super-packets dropped as they would be cut into more than 2048 packets.
    #[serde(default)]
    pub uncut: u64,
    /// Packets that the kernel didn't take back.
    pub refused: u64,
    /// What its rules have done.
    pub line: LineReport,
}

/// One way of an impaired link or interface.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LineReport {
    /// Packets that no rule matched; they passed untouched.
    pub passed: u64,
    /// Packets that no rule matched, and that the consumer left no room for.
    pub passed_dropped: u64,
    /// Packets that came for a NAT mapping which is forgotten, and that no rule matched.
    pub nat_dropped: u64,
    /// ICMP messages of a clamped MTU that couldn't be sent back.
    pub answers_dropped: u64,
    /// Packets inside now, in all rules.
    pub inside: u64,
    /// Whether the timing of every rule was within its budget, also of those that are gone. If not, what was measured with it doesn't
    /// count.
    pub valid: bool,
    /// In their order.
    pub rules: Vec<RuleReport>,
    /// Rules that are gone, all together: their packets.
    pub gone: Packets,
}

/// One rule, one way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RuleReport {
    /// Its name.
    pub name: String,
    /// Whether it was taken away, and only lets out what is inside.
    pub draining: bool,
    /// Since it is there.
    #[serde(flatten)]
    pub packets: Packets,
    /// Packets that wait for the line now.
    pub queued_packets: u64,
    /// Bytes that wait for the line now.
    pub queued_bytes: u64,
    /// Packets under way now, behind the line.
    pub delayed_packets: u64,
    /// Bytes under way now.
    pub delayed_bytes: u64,
    /// Bits per second of Ethernet frames that were released in the last whole second.
    pub achieved_bits_per_second: u64,
    /// Nanoseconds from coming to being released, the mean of those released in the last whole second. Absent if there were
    /// none.
    pub achieved_delay_nanoseconds: Option<u64>,
    /// How late packets were released.
    pub timing: Timing,
}

/// What became of packets. At all times `offered + copies + made` is `released`, all drops, and what is inside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Packets {
    /// Packets that matched.
    pub offered: u64,
    /// Packets that went on, copies and fragments too.
    pub released: u64,
    /// Bytes of those.
    pub released_bytes: u64,
    /// Packets made by duplication.
    pub copies: u64,
    /// Copies that there was no room for.
    pub copies_refused: u64,
    /// Packets made by fragmentation, beyond the one that was fragmented.
    pub made: u64,
    /// ICMP messages of a clamped MTU.
    pub answers: u64,
    /// Packets with flipped bits.
    pub corrupted: u64,
    /// Packets that were held back for others to overtake them.
    pub held_back: u64,
    /// Packets that really left after a later one (RFC 4737 §3).
    pub out_of_order: u64,
    /// Drops by cause; causes that never occurred are absent.
    pub dropped: BTreeMap<String, u64>,
}

/// Actual minus planned moment of release, in nanoseconds, of all packets of a rule. Percentiles are rounded up, by at most
/// 1 part in 16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Timing {
    /// How many were released.
    pub packets: u64,
    /// Half of them were no later than this.
    pub p50_nanoseconds: u64,
    /// 99 of 100 were no later than this.
    pub p99_nanoseconds: u64,
    /// The latest.
    pub max_nanoseconds: u64,
    /// How late 99 of 100 may be now: what the impairment says, else the larger of 1 ms and 1% of the delay.
    pub budget_nanoseconds: u64,
    /// How many were later than the budget that there was when they were released.
    #[serde(default)]
    pub late: u64,
    /// Whether that is one of 100 at most.
    pub valid: bool,
}

impl Packets {
    /// Packets dropped for whatever cause.
    #[must_use]
    pub fn dropped_in_all(&self) -> u64 {
        self.dropped.values().sum()
    }

    /// Adds those of another rule.
    pub fn add(&mut self, other: &Self) {
        self.offered += other.offered;
        self.released += other.released;
        self.released_bytes += other.released_bytes;
        self.copies += other.copies;
        self.copies_refused += other.copies_refused;
        self.made += other.made;
        self.answers += other.answers;
        self.corrupted += other.corrupted;
        self.held_back += other.held_back;
        self.out_of_order += other.out_of_order;
        for (cause, count) in &other.dropped {
            *self.dropped.entry(cause.clone()).or_default() += count;
        }
    }
}
