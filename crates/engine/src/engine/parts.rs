//! The parts of a graph, and which of them rest.
//!
//! A part is all apps that links connect, however far. Packets never leave theirs, so a part in which nothing moves
//! can be left out of breaths as a whole until something outside it happens. Apps and links of a part that is busy
//! know nothing of this; the price is per part and breath.

use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

use crate::awake::Marks;
use crate::time::Time;

/// All parts of a graph.
#[derive(Debug, Default)]
pub(super) struct Parts {
    parts: Vec<Part>,
    /// Those that the next breath calls.
    awake: Rc<Marks>,
    /// When those that rest are due. One that has been woken otherwise may still be among them.
    deadlines: BTreeSet<(Time, usize)>,
}

/// One part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    /// Its apps, in the engine's order of `pull`.
    pub(super) pulls: Range<usize>,
    /// Those with inputs, in the engine's order of `push`.
    pub(super) pushes: Range<usize>,
    /// Its entry in the deadlines.
    due: Option<Time>,
}

impl Part {
    pub(super) fn new(pulls: Range<usize>, pushes: Range<usize>) -> Self {
        Self {
            pulls,
            pushes,
            due: None,
        }
    }
}

impl Parts {
    /// These, all awake.
    pub(super) fn new(parts: Vec<Part>) -> Self {
        Self {
            awake: Rc::new(Marks::all(parts.len())),
            parts,
            deadlines: BTreeSet::new(),
        }
    }

    pub(super) fn get(&self, part: usize) -> &Part {
        &self.parts[part]
    }

    /// Those that are awake, for whoever wakes one from outside.
    pub(super) fn awake(&self) -> &Rc<Marks> {
        &self.awake
    }

    /// The first that is awake, beginning with `from`.
    #[inline]
    pub(super) fn next_awake(&self, from: usize) -> Option<usize> {
        self.awake.next(from)
    }

    /// Has the next breath call a part.
    pub(super) fn wake(&self, part: usize) {
        self.awake.insert(part);
    }

    /// Has the next breath call all.
    #[cfg(test)]
    pub(super) fn wake_all(&self) {
        (0..self.parts.len()).for_each(|part| self.wake(part));
    }

    /// Wakes those that are due.
    #[inline]
    pub(super) fn wake_due(&mut self, now: Time) {
        while self.deadline().is_some_and(|due| due <= now) {
            self.wake_first();
        }
    }

    fn wake_first(&mut self) {
        if let Some((_, part)) = self.deadlines.pop_first() {
            self.parts[part].due = None;
            self.awake.insert(part);
        }
    }

    /// When the first that rests is due; right while those that are awake have no deadline here.
    #[inline]
    pub(super) fn deadline(&self) -> Option<Time> {
        self.deadlines.first().map(|&(due, _)| due)
    }

    /// Leaves a part out of breaths until it is due.
    pub(super) fn rest(&mut self, part: usize, due: Option<Time>) {
        self.awake.remove(part);
        self.set_due(part, due);
    }

    /// Goes on calling a part.
    pub(super) fn stay(&mut self, part: usize) {
        self.set_due(part, None);
    }

    fn set_due(&mut self, part: usize, due: Option<Time>) {
        let before = std::mem::replace(&mut self.parts[part].due, due);
        if before == due {
            return;
        }
        if let Some(before) = before {
            self.deadlines.remove(&(before, part));
        }
        if let Some(due) = due {
            self.deadlines.insert((due, part));
        }
    }
}

/// The part of each app, by the pairs of apps that links connect. Parts are numbered in the order of their first apps.
pub(super) fn parts_of(apps: usize, links: &[(usize, usize)]) -> Vec<usize> {
    let mut first: Vec<usize> = (0..apps).collect();
    for &(one, other) in links {
        let (one, other) = (root(&mut first, one), root(&mut first, other));
        first[one.max(other)] = one.min(other);
    }
    let mut numbers = vec![0; apps];
    let mut count = 0;
    for app in 0..apps {
        let root = root(&mut first, app);
        if root == app {
            numbers[app] = count;
            count += 1;
        } else {
            numbers[app] = numbers[root];
        }
    }
    numbers
}

/// The first app that this one is known to be connected with.
fn root(first: &mut [usize], mut app: usize) -> usize {
    while first[app] != app {
        first[app] = first[first[app]];
        app = first[app];
    }
    app
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_links_connect_either_way_is_one_part() {
        assert_eq!(parts_of(0, &[]), [0; 0]);
        assert_eq!(parts_of(4, &[]), [0, 1, 2, 3]);
        assert_eq!(parts_of(6, &[(5, 3), (1, 5), (4, 0)]), [0, 1, 2, 1, 0, 1]);
        assert_eq!(parts_of(3, &[(0, 1), (1, 0), (2, 1)]), [0, 0, 0]);
    }

    proptest! {
        #[test]
        fn deadlines_come_in_order_and_the_last_word_counts(
            count in 1_usize..70,
            changes in prop::collection::vec((0_usize..70, prop::option::of(0_u64..50)), 0..200),
            now in 0_u64..50,
        ) {
            let mut parts = Parts::new(vec![Part::new(0..0, 0..0); count]);
            let mut known = vec![None; count];
            for part in 0..count {
                parts.rest(part, None);
            }
            for (part, due) in changes.into_iter().filter(|change| change.0 < count) {
                let due = due.map(Time::from_nanos);
                parts.rest(part, due);
                known[part] = due;
                prop_assert_eq!(parts.deadline(), known.iter().flatten().min().copied());
            }
            let now = Time::from_nanos(now);
            parts.wake_due(now);
            for (part, due) in known.iter().enumerate() {
                let is_due = due.is_some_and(|due| due <= now);
                prop_assert_eq!(parts.next_awake(part) == Some(part), is_due);
            }
            let left = known.iter().flatten().filter(|&&due| due > now).min();
            prop_assert_eq!(parts.deadline(), left.copied());
        }
    }
}
