//! Which bits of which packets flip.
//!
//! We only say where; the caller flips them, and repairs the checksums or leaves them.

use crate::random::Draw;

/// What is corrupted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CorruptModel {
    /// That a packet is corrupted, from 0 to 1.
    pub probability: f64,
    /// How many different bits of it flip; at most as many as there are.
    pub bits: u32,
    /// Bytes at the start of the frame that stay whole, as the 14 of the Ethernet header.
    pub first_byte: u32,
}

/// The bits that flip in a packet of this length, in ascending order: bit 0 is the highest of the frame's first byte.
#[must_use]
pub fn bit_flips(model: &CorruptModel, frame_bytes: u32, draw: &mut Draw) -> Vec<u64> {
    let first = u64::from(model.first_byte) * 8;
    let candidates = (u64::from(frame_bytes) * 8).saturating_sub(first);
    if candidates == 0 || !draw.happens(model.probability) {
        return Vec::new();
    }
    // R. Floyd's sample without repetition: each set of bits is equally likely.
    let wanted = u64::from(model.bits).min(candidates);
    let mut flips = Vec::new();
    for last in candidates - wanted..candidates {
        let bit = draw.below(last + 1);
        let bit = if flips.contains(&bit) { last } else { bit };
        flips.push(bit);
    }
    flips.iter_mut().for_each(|bit| *bit += first);
    flips.sort_unstable();
    flips
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Direction, Flow, Impairment, Stream};

    fn flips(model: CorruptModel, packet: u64, frame_bytes: u32) -> Vec<u64> {
        let flow = Flow {
            seed: 1,
            link: 0,
            direction: Direction::Egress,
            rule: 0,
        };
        let stream = Stream::new(flow, Impairment::Corrupt);
        bit_flips(&model, frame_bytes, &mut stream.draw(packet))
    }

    #[test]
    fn bits_differ_and_spare_the_header() {
        let model = CorruptModel {
            probability: 1.0,
            bits: 9,
            first_byte: 14,
        };
        for packet in 0..1000 {
            let flips = flips(model, packet, 16);
            assert_eq!(flips.len(), 9);
            assert!(flips.windows(2).all(|two| two[0] < two[1]));
            assert!(flips.iter().all(|bit| (112..128).contains(bit)));
        }
        assert_eq!(flips(model, 0, 15).len(), 8);
        assert_eq!(flips(model, 0, 14), Vec::<u64>::new());
    }

    /// Chi-squared over 16 bits, 15 degrees of freedom: 37.7 is exceeded once in 1000 seeds.
    #[test]
    fn every_bit_flips_equally_often() {
        let model = CorruptModel {
            probability: 1.0,
            bits: 1,
            first_byte: 0,
        };
        let mut counts = [0u32; 16];
        for packet in 0..16_000 {
            for bit in flips(model, packet, 2) {
                counts[usize::try_from(bit).unwrap()] += 1;
            }
        }
        let chi: f64 = counts
            .iter()
            .map(|&count| (f64::from(count) - 1000.0).powi(2) / 1000.0)
            .sum();
        assert!(chi < 37.7, "{chi}");
    }
}
