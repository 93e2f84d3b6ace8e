//! What is under way, in the order of deadlines.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BTreeMap, BinaryHeap, VecDeque},
};

use crate::Nanoseconds;

/// Items with deadlines. Equal deadlines leave in the order in which they came.
///
/// Those whose deadlines ascend, which are all of them without jitter, wait in a plain queue. Of the others only those of
/// the next slice of time are in a heap, so that it is small however much is under way; what is later lies unsorted in
/// the slice of its deadline until its turn comes. Memory that a burst needed is given back when the line is empty again.
#[derive(Debug)]
pub(crate) struct DelayLine<T> {
    in_order: VecDeque<Entry<T>>,
    /// Never empty while there are later ones.
    near: BinaryHeap<Reverse<Entry<T>>>,
    /// The last slice that is in the heap.
    near_slice: u64,
    later: BTreeMap<u64, Vec<Reverse<Entry<T>>>>,
    len: usize,
    bytes: u64,
    sequence: u64,
    latest: Nanoseconds,
}

#[derive(Debug)]
struct Entry<T> {
    deadline: Nanoseconds,
    sequence: u64,
    bytes: u32,
    item: T,
}

/// A slice is 2¹⁷ ns long, 131 µs: as many packets as fit into the cache at a million per second.
const SLICE_BITS: u32 = 17;

/// Entries whose memory an empty line keeps.
const KEPT: usize = 1024;

impl<T> Default for DelayLine<T> {
    fn default() -> Self {
        Self {
            in_order: VecDeque::new(),
            near: BinaryHeap::new(),
            near_slice: 0,
            later: BTreeMap::new(),
            len: 0,
            bytes: 0,
            sequence: 0,
            latest: 0,
        }
    }
}

impl<T> DelayLine<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The latest deadline of those inside; 0 if there is nothing.
    pub(crate) fn latest(&self) -> Nanoseconds {
        if self.len() == 0 { 0 } else { self.latest }
    }

    pub(crate) fn push(&mut self, deadline: Nanoseconds, bytes: u32, item: T) {
        let entry = Entry {
            deadline,
            sequence: self.sequence,
            bytes,
            item,
        };
        self.sequence += 1;
        self.bytes += u64::from(bytes);
        self.latest = self.latest().max(deadline);
        self.len += 1;
        let last = self.in_order.back();
        if last.is_none_or(|last| last.deadline <= deadline) {
            self.in_order.push_back(entry);
            return;
        }
        let slice = deadline >> SLICE_BITS;
        if self.near.is_empty() {
            self.near_slice = slice;
        }
        if slice <= self.near_slice {
            self.near.push(Reverse(entry));
        } else {
            self.later.entry(slice).or_default().push(Reverse(entry));
        }
    }

    pub(crate) fn next_deadline(&self) -> Option<Nanoseconds> {
        let first = self.in_order.front().map(|entry| entry.deadline);
        let other = self.near.peek().map(|entry| entry.0.deadline);
        first.into_iter().chain(other).min()
    }

    /// The first, and its deadline.
    pub(crate) fn pop(&mut self) -> Option<(Nanoseconds, T)> {
        let is_other_first = match (self.in_order.front(), self.near.peek()) {
            (Some(first), Some(Reverse(other))) => other < first,
            (None, other) => other.is_some(),
            (Some(_), None) => false,
        };
        let entry = if is_other_first {
            self.near.pop()?.0
        } else {
            self.in_order.pop_front()?
        };
        if self.near.is_empty()
            && let Some((slice, entries)) = self.later.pop_first()
        {
            self.near_slice = slice;
            self.near = entries.into();
        }
        self.bytes -= u64::from(entry.bytes);
        self.len -= 1;
        if self.in_order.is_empty() && self.in_order.capacity() > KEPT {
            self.in_order.shrink_to(KEPT);
        }
        if self.near.is_empty() && self.near.capacity() > KEPT {
            self.near.shrink_to(KEPT);
        }
        Some((entry.deadline, entry.item))
    }
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<T> Eq for Entry<T> {}

impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Entry<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.deadline, self.sequence).cmp(&(other.deadline, other.sequence))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn items_leave_by_deadline_and_then_as_they_came(
            steps in prop::collection::vec(prop::option::weighted(0.7, (0u64..5, prop::sample::select(vec![1, 1 << SLICE_BITS]))), 0..300),
        ) {
            let mut line = DelayLine::default();
            let mut model: Vec<(u64, u64)> = Vec::new();
            for (number, step) in (0u64..).zip(steps) {
                if let Some((factor, unit)) = step {
                    let deadline = factor * unit;
                    line.push(deadline, 3, number);
                    model.push((deadline, number));
                    model.sort_unstable();
                } else {
                    prop_assert_eq!(line.next_deadline(), model.first().map(|first| first.0));
                    let expected = (!model.is_empty()).then(|| model.remove(0));
                    prop_assert_eq!(line.pop(), expected);
                }
                prop_assert_eq!((line.len(), line.bytes()), (model.len(), model.len() as u64 * 3));
            }
        }
    }

    #[test]
    fn an_empty_line_gives_the_memory_of_a_burst_back() {
        let mut line = DelayLine::default();
        for deadline in (0..20_000).chain((0..20_000).rev()) {
            line.push(deadline, 1, ());
        }
        while line.pop().is_some() {}
        assert!(line.in_order.capacity() + line.near.capacity() <= 4 * KEPT);
    }
}
