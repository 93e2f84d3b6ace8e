//! What one line may have of the packets that all lines of an engine share.
//!
//! Whoever sends to a line whose packets are under way for long could have all of them, and the other lines would carry nothing. So
//! a line takes no more while it holds more than so many times what is free. A single one has nearly all of the pool that way, and
//! however many are greedy, something stays free for those that hold little (A. Choudhury and E. Hahne, "Dynamic Queue
//! Length Thresholds for Shared-Memory Packet Switches", 1998).

use sandwire_engine::{Pool, PoolCounters};

/// How many times what is free a line may hold.
const TIMES_FREE: u64 = 8;

/// Whether a line that holds so many packets, which is only asked where it matters, has more than its share.
pub(super) fn is_exceeded(pool: &Pool, inside: impl FnOnce() -> u64) -> bool {
    let most = most(pool.counters(), pool.limits().packets_max);
    pool.counters().in_use() > most && inside() > most
}

/// Packets that a line may hold.
fn most(counters: PoolCounters, packets_max: u32) -> u64 {
    let free = u64::from(packets_max).saturating_sub(counters.in_use());
    free.saturating_mul(TIMES_FREE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearly_all_is_a_single_lines_and_something_stays_free_of_many() {
        let used = |taken| PoolCounters {
            taken,
            ..PoolCounters::default()
        };
        assert_eq!(most(used(0), 900), 7200);
        assert_eq!(most(used(800), 900), 800);
        assert_eq!(most(used(801), 900), 792);
        // Fifty that take as much as they get.
        let mut lines = [0u64; 50];
        for _ in 0..200_000 {
            for line in 0..lines.len() {
                let sum = lines.iter().sum();
                if lines[line] <= most(used(sum), 131_072) {
                    lines[line] += 1;
                }
            }
        }
        let free = 131_072 - lines.iter().sum::<u64>();
        assert!(free > 300, "{free}");
    }
}
