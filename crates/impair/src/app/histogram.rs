//! A histogram of times that never grows: 16 buckets for each doubling.

/// Counts of times in nanoseconds.
#[derive(Clone, Debug, Default)]
pub(super) struct Histogram {
    /// Empty until the first time.
    buckets: Vec<u64>,
    count: u64,
    max: u64,
}

/// Buckets for each doubling, as a power of two.
const PART_BITS: u32 = 4;
const PARTS: u64 = 1 << PART_BITS;
/// One for each value below [`PARTS`], then [`PARTS`] for each doubling.
const BUCKETS: usize = (64 - PART_BITS as usize + 1) << PART_BITS;

impl Histogram {
    pub(super) fn add(&mut self, value: u64) {
        if self.buckets.is_empty() {
            self.buckets = vec![0; BUCKETS];
        }
        self.buckets[bucket_of(value)] += 1;
        self.count += 1;
        self.max = self.max.max(value);
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn max(&self) -> u64 {
        self.max
    }

    /// A time that so many percent don't exceed: the upper end of its bucket.
    pub(super) fn percentile(&self, percent: u64) -> u64 {
        let wanted = (u128::from(self.count) * u128::from(percent)).div_ceil(100);
        let mut seen = 0u128;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += u128::from(*count);
            if seen >= wanted && seen > 0 {
                return upper_end(index).min(self.max);
            }
        }
        0
    }
}

fn bucket_of(value: u64) -> usize {
    let index = if value < PARTS {
        value
    } else {
        let exponent = value.ilog2();
        let part = (value >> (exponent - PART_BITS)) & (PARTS - 1);
        (u64::from(exponent - PART_BITS + 1) << PART_BITS) | part
    };
    // At most 64 doublings.
    usize::try_from(index).unwrap_or(BUCKETS - 1)
}

fn upper_end(index: usize) -> u64 {
    let index = index as u64;
    let (doubling, part) = (index >> PART_BITS, index & (PARTS - 1));
    let Some(shift) = doubling.checked_sub(1) else {
        return part;
    };
    let next = u128::from(PARTS + part + 1) << shift;
    u64::try_from(next - 1).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_bucket_ends_at_most_a_sixteenth_above(value: u64) {
            let end = upper_end(bucket_of(value));
            prop_assert!(end >= value && end - value <= value / 16);
        }

        #[test]
        fn percentiles_are_those_of_the_sorted_values(mut values in prop::collection::vec(0u64..1 << 40, 1..300)) {
            let mut histogram = Histogram::default();
            values.iter().for_each(|value| histogram.add(*value));
            values.sort_unstable();
            for percent in [50, 99, 100] {
                let rank = (values.len() * usize::try_from(percent).unwrap()).div_ceil(100);
                let exact = values[rank - 1];
                let told = histogram.percentile(percent);
                prop_assert!(told >= exact && told - exact <= exact / 16);
            }
            prop_assert_eq!(histogram.max(), *values.last().unwrap());
        }
    }

    #[test]
    fn nothing_counted_is_zero() {
        assert_eq!(Histogram::default().percentile(99), 0);
    }
}
