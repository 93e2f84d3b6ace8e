//! Which parts of a graph a breath calls: a bit each, which the engine and the [`Readiness`] of apps share.
//!
//! [`Readiness`]: crate::Readiness

use std::cell::Cell;

/// A set of numbers below a bound. It may change while somebody goes through it in order.
#[derive(Debug, Default)]
pub(crate) struct Marks(Box<[Cell<u64>]>);

impl Marks {
    /// All numbers below `bound`.
    pub(crate) fn all(bound: usize) -> Self {
        let marks = Self(vec![Cell::new(0); bound.div_ceil(BITS)].into());
        (0..bound).for_each(|number| marks.insert(number));
        marks
    }

    #[inline]
    pub(crate) fn insert(&self, number: usize) {
        if let Some(word) = self.0.get(number / BITS) {
            word.set(word.get() | 1 << (number % BITS));
        }
    }

    #[inline]
    pub(crate) fn remove(&self, number: usize) {
        if let Some(word) = self.0.get(number / BITS) {
            word.set(word.get() & !(1 << (number % BITS)));
        }
    }

    /// The least number that isn't less than `from`.
    #[inline]
    pub(crate) fn next(&self, from: usize) -> Option<usize> {
        let mut word = from / BITS;
        let mut bits = self.0.get(word)?.get() & (u64::MAX << (from % BITS));
        while bits == 0 {
            word += 1;
            bits = self.0.get(word)?.get();
        }
        Some(word * BITS + bits.trailing_zeros() as usize)
    }
}

const BITS: usize = 64;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn members(marks: &Marks) -> Vec<usize> {
        let next = |last: &usize| marks.next(last + 1);
        std::iter::successors(marks.next(0), next).collect()
    }

    proptest! {
        #[test]
        fn marks_are_a_set_in_order(
            bound in 0_usize..300,
            changes in prop::collection::vec((any::<bool>(), 0_usize..300), 0..200),
        ) {
            let marks = Marks::all(bound);
            let mut set: BTreeSet<usize> = (0..bound).collect();
            prop_assert_eq!(members(&marks), (0..bound).collect::<Vec<_>>());
            for (inserts, number) in changes.into_iter().filter(|change| change.1 < bound) {
                if inserts {
                    marks.insert(number);
                    set.insert(number);
                } else {
                    marks.remove(number);
                    set.remove(&number);
                }
                prop_assert_eq!(members(&marks), set.iter().copied().collect::<Vec<_>>());
            }
        }
    }
}
