//! What all senders of this host share, of which each may have so many. Pure.
//!
//! Once all are taken, the one who has most loses what it took last to who has fewer; who has most itself is refused. So
//! whoever has few gets what it wants, however many others there are who want all
//! ([decision 42](../../../../docs/decisions/0042-of-the-relays-senders-who-has-most-loses.md)).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// How many there are, and who has how many. By its key, what somebody loses is ended.
pub(crate) struct Fair<K> {
    per_sender: usize,
    all: usize,
    held: Mutex<Held<K>>,
}

struct Held<K> {
    all: usize,
    next: u64,
    /// By age.
    by_sender: HashMap<Arc<str>, BTreeMap<u64, K>>,
    /// Who has how many; the one who has most is the last.
    by_count: BTreeSet<(usize, Arc<str>)>,
}

/// One of them; given back when dropped, unless it was lost before.
pub(crate) struct Part<K> {
    of: Arc<Fair<K>>,
    sender: Arc<str>,
    number: u64,
}

/// What somebody has lost.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lost<K> {
    pub(crate) sender: Arc<str>,
    pub(crate) key: K,
}

impl<K> Fair<K> {
    pub(crate) fn new(per_sender: usize, all: usize) -> Arc<Self> {
        let held = Held {
            all: 0,
            next: 0,
            by_sender: HashMap::new(),
            by_count: BTreeSet::new(),
        };
        Arc::new(Self {
            per_sender,
            all,
            held: Mutex::new(held),
        })
    }

    /// Takes one, if need be from the sender that has most: the caller ends that. None if the sender has as many as it may, or
    /// all are taken and nobody has more than it would.
    pub(crate) fn take(
        self: &Arc<Self>,
        sender: &Arc<str>,
        key: K,
    ) -> Option<(Part<K>, Option<Lost<K>>)> {
        let mut held = self.lock();
        let count = held.by_sender.get(sender).map_or(0, BTreeMap::len);
        if count >= self.per_sender {
            return None;
        }
        let mut lost = None;
        if held.all >= self.all {
            lost = Some(held.take_away(count + 1)?);
        }
        let number = held.next;
        held.next += 1;
        held.change(sender, |parts| parts.insert(number, key));
        let part = Part {
            of: self.clone(),
            sender: sender.clone(),
            number,
        };
        Some((part, lost))
    }

    fn lock(&self) -> MutexGuard<'_, Held<K>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K> Held<K> {
    /// Takes the newest one away from who has most, if that is more than so many.
    fn take_away(&mut self, more_than: usize) -> Option<Lost<K>> {
        let (most, sender) = self.by_count.last()?;
        if *most <= more_than {
            return None;
        }
        let sender = sender.clone();
        let (_, key) = self.change(&sender, BTreeMap::pop_last)?;
        Some(Lost { sender, key })
    }

    fn change<T>(
        &mut self,
        sender: &Arc<str>,
        change: impl FnOnce(&mut BTreeMap<u64, K>) -> T,
    ) -> T {
        let parts = self.by_sender.entry(sender.clone()).or_default();
        let before = parts.len();
        let outcome = change(parts);
        let after = parts.len();
        if after == 0 {
            self.by_sender.remove(sender);
        }
        self.by_count.remove(&(before, sender.clone()));
        if after > 0 {
            self.by_count.insert((after, sender.clone()));
        }
        self.all = self.all - before + after;
        outcome
    }
}

impl<K> Drop for Part<K> {
    fn drop(&mut self) {
        let mut held = self.of.lock();
        drop(held.change(&self.sender, |parts| parts.remove(&self.number)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Parts = Vec<Part<usize>>;

    fn take(fair: &Arc<Fair<usize>>, sender: &str, key: usize) -> Option<Option<Lost<usize>>> {
        let (part, lost) = fair.take(&sender.into(), key)?;
        // Whoever has it keeps it.
        std::mem::forget(part);
        Some(lost)
    }

    fn counts(fair: &Fair<usize>) -> Vec<usize> {
        let held = fair.lock();
        let counts: Vec<usize> = held.by_count.iter().map(|(count, _)| *count).collect();
        assert_eq!(counts.iter().sum::<usize>(), held.all);
        assert_eq!(counts.len(), held.by_sender.len());
        counts
    }

    #[test]
    fn who_has_most_loses_what_it_took_last_and_who_has_few_nothing() {
        let fair = Fair::new(80, 100);
        let lost = |sender: &str, key| {
            let sender = sender.into();
            Some(Some(Lost { sender, key }))
        };
        for key in 0..80 {
            assert_eq!(take(&fair, "greedy", key), Some(None));
        }
        assert_eq!(take(&fair, "greedy", 80), None, "it has as many as it may");
        for key in 0..20 {
            assert_eq!(take(&fair, "second", key), Some(None));
        }
        assert_eq!(take(&fair, "few", 0), lost("greedy", 79));
        assert_eq!(take(&fair, "few", 1), lost("greedy", 78));
        assert_eq!(take(&fair, "greedy", 81), None, "it has most");
        for key in 20..49 {
            assert_eq!(take(&fair, "second", key), lost("greedy", 97 - key));
        }
        assert_eq!(take(&fair, "second", 49), None, "nobody has more");
        assert_eq!(counts(&fair), [2, 49, 49]);
    }

    #[test]
    fn however_many_are_greedy_each_has_as_many_as_the_others() {
        let fair = Fair::new(100, 1000);
        for number in 0..50 {
            let name = format!("greedy {number}");
            while take(&fair, &name, 0).is_some() {}
        }
        assert_eq!(counts(&fair), [20; 50]);
        for key in 0..19 {
            assert!(take(&fair, "few", key).is_some());
        }
    }

    #[test]
    fn what_is_given_back_can_be_had_again_and_what_was_lost_is_given_back_once() {
        let fair = Fair::new(10, 4);
        let (web, batch): (Arc<str>, Arc<str>) = ("web".into(), "batch".into());
        let mut of_web: Parts = (0..4).map(|key| fair.take(&web, key).unwrap().0).collect();
        let (of_batch, lost) = fair.take(&batch, 7).unwrap();
        assert_eq!(lost.unwrap().key, 3);
        drop(of_web.pop());
        assert_eq!(counts(&fair), [1, 3]);
        drop(of_web.pop());
        let (_again, lost) = fair.take(&web, 8).unwrap();
        assert_eq!(lost, None);
        drop((of_web, of_batch));
        assert_eq!(counts(&fair), [1]);
        assert!(Fair::new(1, 0).take(&web, 0).is_none());
    }
}
