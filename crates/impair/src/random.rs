//! Random streams that are counted, not drawn one after the other.
//!
//! Every number is a function of the seed, of who asks (link, direction, flow rule, impairment) and of the
//! packet's number within its rule. So a change to one flow, or to one impairment, never moves the
//! numbers of another, and a decision can be worked out again for a single packet.
//!
//! The function is Philox4x32-10 of J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel Random Numbers:
//! As Easy as 1, 2, 3", SC'11, <https://doi.org/10.1145/2063384.2063405>; the tests hold it against the
//! known answers that its authors publish with Random123. It is written out here, and not taken from a
//! library, because an upgrade that changes the numbers would change every recorded run.

use serde::{Deserialize, Serialize};

/// Which way a packet goes, as the sandbox sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Out of the sandbox.
    Egress,
    /// Into the sandbox.
    Ingress,
}

/// What asks for random numbers. The numbers are part of every recorded run: never change one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Impairment {
    /// Which packets are lost.
    Loss = 1,
    /// How long packets are delayed.
    Delay = 2,
    /// Which packets are held back.
    Reorder = 3,
    /// Which packets are sent twice.
    Duplicate = 4,
    /// Which bits flip.
    Corrupt = 5,
    /// Which port a rebound flow gets.
    Nat = 6,
}

/// Whose packets they are: the part of a stream's name that all impairments of one rule share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// The run's seed.
    pub seed: u64,
    /// Number of the link, as whoever runs it counts them.
    pub link: u32,
    /// Which way.
    pub direction: Direction,
    /// Number of the classifier's rule that the packets matched.
    pub rule: u32,
}

/// The random numbers of one impairment for one flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
}

/// The random numbers for one packet, in order. As many as one asks for.
#[derive(Clone, Debug)]
pub struct Draw {
    key: [u32; 2],
    counter: [u32; 4],
    block: [u32; 4],
    used: usize,
}

/// Tells counters that make keys from those that make numbers.
const KEY_DOMAIN: u32 = 0x7377_6972;

impl Stream {
    /// The stream of an impairment for a flow.
    ///
    /// The name is hashed into the key by the generator itself, under the seed.
    #[must_use]
    pub fn new(flow: Flow, impairment: Impairment) -> Self {
        let direction = match flow.direction {
            Direction::Egress => 0,
            Direction::Ingress => 1,
        };
        let counter = [
            flow.link,
            flow.rule,
            impairment as u32 | direction << 16,
            KEY_DOMAIN,
        ];
        let [first, second, ..] = philox(counter, halves(flow.seed));
        Self {
            key: [first, second],
        }
    }

    /// The numbers for the packet of this number within the flow.
    #[must_use]
    pub fn draw(&self, packet: u64) -> Draw {
        self.draw_copy(packet, 0)
    }

    /// The numbers for a copy of that packet; copy 0 is the packet itself.
    #[must_use]
    pub fn draw_copy(&self, packet: u64, copy: u32) -> Draw {
        let [low, high] = halves(packet);
        Draw {
            key: self.key,
            counter: [low, high, 0, copy],
            block: [0; 4],
            used: 4,
        }
    }
}

impl Draw {
    /// All 32-bit integers, equally often.
    #[must_use]
    pub fn word(&mut self) -> u32 {
        if self.used == self.block.len() {
            self.block = philox(self.counter, self.key);
            self.counter[2] = self.counter[2].wrapping_add(1);
            self.used = 0;
        }
        self.used += 1;
        self.block[self.used - 1]
    }

    /// All 64-bit integers, equally often.
    #[must_use]
    pub fn integer(&mut self) -> u64 {
        u64::from(self.word()) | u64::from(self.word()) << 32
    }

    /// An integer below `bound`, each equally often; 0 if the bound is 0.
    ///
    /// D. Lemire, "Fast Random Integer Generation in an Interval", 2019: what would make some values
    /// more frequent than others is drawn again.
    #[must_use]
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 {
            return 0;
        }
        let uneven = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.integer()) * u128::from(bound);
            let [low, high] = wide_halves(product);
            if low >= uneven {
                return high;
            }
        }
    }

    /// A number from 0 up to, and without, 1, in steps of 2⁻⁵³.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact in an f64")]
    pub fn unit(&mut self) -> f64 {
        (self.integer() >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0)
    }

    /// A number above 0, up to and with 1, in steps of 2⁻⁵³: what may be divided by, or have a logarithm.
    #[must_use]
    pub fn unit_above_zero(&mut self) -> f64 {
        1.0 - self.unit()
    }

    /// Whether something happens that has this probability; 0 is never, 1 is always.
    #[must_use]
    pub fn happens(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// A number of the standard normal distribution, by Box and Muller's transformation.
    ///
    /// The functions are libm's in Rust, so that all machines draw the same.
    #[must_use]
    pub fn normal(&mut self) -> f64 {
        let radius = libm::sqrt(-2.0 * libm::log(self.unit_above_zero()));
        radius * libm::cos(core::f64::consts::TAU * self.unit())
    }
}

/// Philox4x32-10: a bijection of 128-bit counters for every 64-bit key.
#[must_use]
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [low_0, high_0] = halves(0xD251_1F53 * u64::from(counter[0]));
        let [low_2, high_2] = halves(0xCD9E_8D57 * u64::from(counter[2]));
        counter = [
            high_2 ^ counter[1] ^ key[0],
            low_2,
            high_0 ^ counter[3] ^ key[1],
            low_0,
        ];
        key = [
            key[0].wrapping_add(0x9E37_79B9),
            key[1].wrapping_add(0xBB67_AE85),
        ];
    }
    counter
}

/// Low half, high half.
#[expect(clippy::cast_possible_truncation, reason = "the halves are the point")]
fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

#[expect(clippy::cast_possible_truncation, reason = "the halves are the point")]
fn wide_halves(value: u128) -> [u64; 2] {
    [value as u64, (value >> 64) as u64]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(rule: u32) -> Flow {
        Flow {
            seed: 42,
            link: 1,
            direction: Direction::Egress,
            rule,
        }
    }

    /// `kat_vectors` of Random123, the lines of philox4x32 with 10 rounds.
    #[test]
    fn the_generator_gives_the_published_answers() {
        let answers = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, answer) in answers {
            assert_eq!(philox(counter, key), answer);
        }
    }

    #[test]
    fn a_packets_numbers_do_not_depend_on_what_was_asked_before() {
        let stream = Stream::new(flow(0), Impairment::Loss);
        let mut first = stream.draw(7);
        for packet in 0..7 {
            assert_ne!(stream.draw(packet).integer(), first.clone().integer());
        }
        assert_eq!(stream.draw(7).integer(), first.integer());
    }

    #[test]
    fn every_part_of_the_name_makes_another_stream() {
        let base = flow(0);
        let mut firsts: Vec<u64> = [
            base,
            Flow { seed: 43, ..base },
            Flow {
                seed: 42 << 32,
                ..base
            },
            Flow { link: 2, ..base },
            Flow { rule: 1, ..base },
            Flow {
                direction: Direction::Ingress,
                ..base
            },
        ]
        .into_iter()
        .flat_map(|flow| {
            [
                Impairment::Loss,
                Impairment::Delay,
                Impairment::Reorder,
                Impairment::Duplicate,
                Impairment::Corrupt,
                Impairment::Nat,
            ]
            .map(|impairment| Stream::new(flow, impairment).draw(0).integer())
        })
        .collect();
        firsts.sort_unstable();
        firsts.dedup();
        assert_eq!(firsts.len(), 36);
    }

    /// Chi-squared over seven values, six degrees of freedom: 22.46 is exceeded once in 1000 seeds.
    #[test]
    fn integers_below_a_bound_are_equally_frequent() {
        let stream = Stream::new(flow(0), Impairment::Reorder);
        let mut counts = [0u32; 7];
        for packet in 0..70_000 {
            counts[usize::try_from(stream.draw(packet).below(7)).unwrap()] += 1;
        }
        let chi: f64 = counts
            .iter()
            .map(|&count| (f64::from(count) - 10_000.0).powi(2) / 10_000.0)
            .sum();
        assert!(chi < 22.46, "{chi}");
        assert_eq!(stream.draw(0).below(0), 0);
        assert_eq!(stream.draw(0).below(1), 0);
    }

    /// A bound just above half of the range: without the second drawing, the lower half of the values
    /// would be twice as frequent as the others.
    #[test]
    fn a_large_bound_has_no_bias() {
        let bound = (1u64 << 63) + (1 << 62);
        let stream = Stream::new(flow(0), Impairment::Reorder);
        let low = (0..30_000)
            .filter(|&packet| stream.draw(packet).below(bound) < bound / 3)
            .count();
        // 10,000 ± 4 deviations of 81.6: one seed in 16,000 would fail.
        assert!((9_674..10_326).contains(&low), "{low}");
    }

    #[test]
    fn units_stay_in_their_range() {
        let stream = Stream::new(flow(3), Impairment::Loss);
        let mut sum = 0.0;
        for packet in 0..10_000 {
            let unit = stream.draw(packet).unit();
            assert!((0.0..1.0).contains(&unit));
            assert!(stream.draw(packet).unit_above_zero() > 0.0);
            sum += unit;
        }
        // Mean 0.5, deviation of the mean 0.00289; 4 of them.
        assert!((sum / 10_000.0 - 0.5).abs() < 0.0116, "{sum}");
    }
}
