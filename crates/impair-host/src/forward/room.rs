//! How many packets a forwarder may have under way.
//!
//! Both ways have them of one pool. A queue that could hold all of them would leave the other way none, so what limits ask for comes
//! on top. That is a bound only: memory is taken for packets that there are.

use sandwire_api::impairment::{Direction, Impairment, QueueLimit, Rule};
use sandwire_engine::PoolLimits;

/// What is plenty, whatever is asked for: some tens of gigabytes.
const PACKETS_MAX: u32 = 1 << 24;

/// Packets that both ways may have under way under such an impairment.
pub(super) fn packets_max(impairment: &Impairment) -> u32 {
    let asked = impairment
        .rules
        .iter()
        .map(asked_by)
        .fold(0, u64::saturating_add);
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
    let packets = |limit: &QueueLimit| limit.packets.unwrap_or(0);
    let of_one_way: u64 = limits.iter().flatten().map(packets).sum();
    match rule.direction {
        Direction::Both => of_one_way.saturating_mul(2),
        Direction::Egress | Direction::Ingress => of_one_way,
    }
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
            ("rate 10mbit limit 64 kB", 0),
            ("egress rate 10mbit limit 500000 packets", 500_000),
            ("rate 10mbit limit 500000 packets", 1_000_000),
            ("delay 1s limit 1000 packets", 2000),
            (
                "name a match port=1 rate 1mbit limit 7 packets; name b ingress trace x.trace limit 5 packets",
                19,
            ),
        ] {
            let found = packets_max(&text.parse().unwrap());
            assert_eq!(found, usual + more, "{text}");
        }
    }
}
