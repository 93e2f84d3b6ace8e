//! How many packets a forwarder may have under way.
//!
//! Both ways have them of one pool. A queue that could hold all of them would leave the other way none, so what limits ask for comes
//! on top. That is a bound only: memory is taken for packets that there are.

use sandwire_api::impairment::{Direction, Impairment, QueueLimit, Rule, check::QUEUE_PACKETS_MAX};
use sandwire_engine::PoolLimits;

/// What is plenty, whatever is asked for: some tens of gigabytes.
const PACKETS_MAX: u32 = 1 << 24;

/// Bytes of the shortest packet, Ethernet's header with it.
const PACKET_BYTES_MIN: u64 = 60;

/// Packets that both ways may have under way under each of these impairments.
pub(super) fn packets_max<'a>(impairments: impl IntoIterator<Item = &'a Impairment>) -> u32 {
    let of_one = |impairment: &Impairment| {
        let rules = impairment.rules.iter();
        rules.map(asked_by).fold(0, u64::saturating_add)
    };
    let asked = impairments.into_iter().map(of_one).max().unwrap_or(0);
    let sum = asked.saturating_add(PoolLimits::default().packets_max.into());
    u32::try_from(sum).map_or(PACKETS_MAX, |sum| sum.min(PACKETS_MAX))
}

/// Packets that a rule's limits name.
fn asked_by(rule: &Rule) -> u64 {
    let limits = [
        rule.rate.as_ref().and_then(|rate| rate.limit),
        rule.trace.as_ref().and_then(|trace| trace.limit),
        rule.delay.as_ref().and_then(|delay| delay.limit),
    ];
    let of_one_way: u64 = limits.iter().flatten().map(packets_of).sum();
    match rule.direction {
        Direction::Both => of_one_way.saturating_mul(2),
        Direction::Egress | Direction::Ingress => of_one_way,
    }
}

/// Packets that a queue may hold.
fn packets_of(limit: &QueueLimit) -> u64 {
    let by_bytes = limit.bytes.map(|bytes| bytes / PACKET_BYTES_MIN);
    let named = [limit.packets, by_bytes].into_iter().flatten();
    named.min().unwrap_or(0).min(QUEUE_PACKETS_MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

    use super::*;

    #[test]
    fn what_a_queue_may_hold_is_not_taken_from_the_other_way() {
        let usual = PoolLimits::default().packets_max;
        for (text, more) in [
            ("delay 50ms loss 1%", 0),
            ("rate 10mbit", 0),
            ("rate 10mbit limit 60 kB", 2000),
            ("egress rate 10mbit limit 500000 packets", 500_000),
            ("rate 10mbit limit 500000 packets", 1_000_000),
            ("delay 1s limit 1000 packets", 2000),
            (
                "name a match port=1 rate 1mbit limit 7 packets; name b ingress trace x.trace limit 5 packets",
                19,
            ),
        ] {
            let found = packets_max(&[text.parse().unwrap()]);
            assert_eq!(found, usual + more, "{text}");
        }
        let course = [
            "rate 10mbit",
            "egress rate 10mbit limit 5 packets",
            "loss 1%",
        ];
        let course = course.map(|text| text.parse().unwrap());
        assert_eq!(packets_max(&course), usual + 5);
    }
}
