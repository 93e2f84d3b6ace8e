//! What hosts share, and of a host its senders, of which each may have so many. Pure.
//!
//! Once all are taken, the host that has most loses one to a host that has fewer; and of a host's, the sender that has most, what it
//! took last. Who has most itself is refused. So whoever has few gets what it wants, however many others there are who want
//! all ([decision 42](../../../docs/decisions/0042-of-the-relays-senders-who-has-most-loses.md)). Whatever senders a host names,
//! it takes nothing from another one that has no more than itself.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// How many each may have, and all together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) per_sender: usize,
    pub(crate) per_host: usize,
    pub(crate) all: usize,
}

/// How many there are, and who has how many. By its key, what somebody loses is ended.
pub(crate) struct Fair<K> {
    bounds: Bounds,
    held: Mutex<Held<K>>,
}

struct Held<K> {
    next: u64,
    hosts: Ranked<Senders<K>>,
}

/// Senders of a host. What each has, by age.
type Senders<K> = Ranked<BTreeMap<u64, K>>;

/// What each of some has, by name.
struct Ranked<T> {
    all: usize,
    by_name: HashMap<Arc<str>, T>,
    /// Who has how many; the one who has most is the last.
    by_count: BTreeSet<(usize, Arc<str>)>,
}

/// One of them; given back when dropped, unless it was lost before.
pub(crate) struct Part<K> {
    of: Arc<Fair<K>>,
    host: Arc<str>,
    sender: Arc<str>,
    number: u64,
}

/// What somebody has lost.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lost<K> {
    pub(crate) sender: Arc<str>,
    pub(crate) key: K,
}

/// Whom one more costs one.
enum Loser {
    Nobody,
    Sender { host: Arc<str>, sender: Arc<str> },
}

impl<K> Fair<K> {
    pub(crate) fn new(bounds: Bounds) -> Arc<Self> {
        let held = Held {
            next: 0,
            hosts: Ranked::default(),
        };
        Arc::new(Self {
            bounds,
            held: Mutex::new(held),
        })
    }

    /// Takes one, if need be from who has most: the caller ends that. None if the sender has as many as it may, or all are
    /// taken and nobody has more than it would.
    pub(crate) fn take(
        self: &Arc<Self>,
        host: &Arc<str>,
        sender: &Arc<str>,
        key: K,
    ) -> Option<(Part<K>, Option<Lost<K>>)> {
        let mut held = self.lock();
        let lost = match held.loser(&self.bounds, host, sender)? {
            Loser::Nobody => None,
            Loser::Sender { host, sender } => {
                let newest = held.change(&host, &sender, BTreeMap::pop_last);
                newest.map(|(_, key)| Lost { sender, key })
            }
        };
        let number = held.next;
        held.next += 1;
        held.change(host, sender, |parts| parts.insert(number, key));
        let part = Part {
            of: self.clone(),
            host: host.clone(),
            sender: sender.clone(),
            number,
        };
        Some((part, lost))
    }

    /// Whether one would be had now.
    pub(crate) fn has_one(&self, host: &str, sender: &str) -> bool {
        self.lock().loser(&self.bounds, host, sender).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Held<K>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K> Held<K> {
    /// Whom it costs one if that sender takes one; none if it can't have any.
    fn loser(&self, bounds: &Bounds, host: &str, sender: &str) -> Option<Loser> {
        let hosts = &self.hosts;
        let its_host = hosts.by_name.get(host);
        let count = its_host.map_or(0, |senders| senders.count_of(sender));
        let of_host = hosts.count_of(host);
        if count >= bounds.per_sender {
            return None;
        }
        let has_host_room = of_host < bounds.per_host;
        if has_host_room && hosts.all < bounds.all {
            return Some(Loser::Nobody);
        }
        // Another host's, if that has more than this one would; else of its own.
        let other = hosts.who_has_more_than(of_host + 1);
        let (host, sender) = if let Some(other) = other.filter(|_| has_host_room) {
            let senders = hosts.by_name.get(other)?;
            (other, senders.who_has_more_than(0)?)
        } else {
            let (host, senders) = hosts.by_name.get_key_value(host)?;
            (host, senders.who_has_more_than(count + 1)?)
        };
        let (host, sender) = (host.clone(), sender.clone());
        Some(Loser::Sender { host, sender })
    }

    fn change<R>(
        &mut self,
        host: &Arc<str>,
        sender: &Arc<str>,
        change: impl FnOnce(&mut BTreeMap<u64, K>) -> R,
    ) -> R {
        self.hosts
            .change(host, |senders| senders.change(sender, change))
    }
}

impl<K> Drop for Part<K> {
    fn drop(&mut self) {
        let mut held = self.of.lock();
        let given_back = held.change(&self.host, &self.sender, |parts| parts.remove(&self.number));
        drop(held);
        drop(given_back);
    }
}

/// What can be counted.
trait Counted: Default {
    fn count(&self) -> usize;
}

impl<K> Counted for BTreeMap<u64, K> {
    fn count(&self) -> usize {
        self.len()
    }
}

impl<T: Counted> Counted for Ranked<T> {
    fn count(&self) -> usize {
        self.all
    }
}

impl<T> Default for Ranked<T> {
    fn default() -> Self {
        Self {
            all: 0,
            by_name: HashMap::new(),
            by_count: BTreeSet::new(),
        }
    }
}

impl<T: Counted> Ranked<T> {
    fn count_of(&self, name: &str) -> usize {
        self.by_name.get(name).map_or(0, Counted::count)
    }

    /// The one who has most, if that is more than so many.
    fn who_has_more_than(&self, count: usize) -> Option<&Arc<str>> {
        let (most, name) = self.by_count.last()?;
        (*most > count).then_some(name)
    }

    fn change<R>(&mut self, name: &Arc<str>, change: impl FnOnce(&mut T) -> R) -> R {
        let its = self.by_name.entry(name.clone()).or_default();
        let before = its.count();
        let outcome = change(its);
        let after = its.count();
        if after == 0 {
            self.by_name.remove(name);
        }
        if after != before {
            self.by_count.remove(&(before, name.clone()));
            if after > 0 {
                self.by_count.insert((after, name.clone()));
            }
        }
        self.all = self.all - before + after;
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Parts = Vec<Part<usize>>;

    /// For one host alone.
    fn fair(per_sender: usize, all: usize) -> Arc<Fair<usize>> {
        Fair::new(Bounds {
            per_sender,
            per_host: all,
            all,
        })
    }

    fn take(fair: &Arc<Fair<usize>>, sender: &str, key: usize) -> Option<Option<Lost<usize>>> {
        take_of(fair, ("", sender), key)
    }

    fn take_of(
        fair: &Arc<Fair<usize>>,
        (host, sender): (&str, &str),
        key: usize,
    ) -> Option<Option<Lost<usize>>> {
        let has_one = fair.has_one(host, sender);
        let taken = fair.take(&host.into(), &sender.into(), key);
        assert_eq!(taken.is_some(), has_one);
        let (part, lost) = taken?;
        // Whoever has it keeps it.
        std::mem::forget(part);
        Some(lost)
    }

    fn lost(sender: &str, key: usize) -> Option<Option<Lost<usize>>> {
        let sender = sender.into();
        Some(Some(Lost { sender, key }))
    }

    /// How many each sender of a host has.
    fn counts_of(fair: &Fair<usize>, host: &str) -> Vec<usize> {
        fn check<T: Counted>(ranked: &Ranked<T>) -> Vec<usize> {
            let counts: Vec<usize> = ranked.by_count.iter().map(|(count, _)| *count).collect();
            assert_eq!(counts.iter().sum::<usize>(), ranked.all);
            assert_eq!(counts.len(), ranked.by_name.len());
            counts
        }
        let held = fair.lock();
        check(&held.hosts);
        held.hosts.by_name.get(host).map_or_else(Vec::new, check)
    }

    fn counts(fair: &Fair<usize>) -> Vec<usize> {
        counts_of(fair, "")
    }

    #[test]
    fn who_has_most_loses_what_it_took_last_and_who_has_few_nothing() {
        let fair = fair(80, 100);
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
        let fair = fair(100, 1000);
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
        let fair = fair(10, 4);
        let [host, web, batch]: [Arc<str>; 3] = ["", "web", "batch"].map(Into::into);
        let one = |sender, key| fair.take(&host, sender, key).unwrap();
        let mut of_web: Parts = (0..4).map(|key| one(&web, key).0).collect();
        let (of_batch, lost) = one(&batch, 7);
        assert_eq!(lost.unwrap().key, 3);
        drop(of_web.pop());
        assert_eq!(counts(&fair), [1, 3]);
        drop(of_web.pop());
        let (_again, lost) = one(&web, 8);
        assert_eq!(lost, None);
        drop((of_web, of_batch));
        assert_eq!(counts(&fair), [1]);
    }

    #[test]
    fn where_there_is_nothing_nobody_gets_any() {
        assert_eq!(take(&fair(1, 0), "web", 0), None);
    }

    #[test]
    fn a_host_that_has_all_it_may_takes_from_its_own_and_none_of_what_is_free() {
        let fair = Fair::new(Bounds {
            per_sender: usize::MAX,
            per_host: 10,
            all: 100,
        });
        for key in 0..20 {
            assert!(
                take_of(&fair, ("quiet", &format!("sender {key}")), key).is_some() == (key < 10)
            );
        }
        for key in 0..10 {
            assert_eq!(take_of(&fair, ("loud", "greedy"), key), Some(None));
        }
        assert_eq!(take_of(&fair, ("loud", "greedy"), 10), None);
        for key in 0..5 {
            assert_eq!(
                take_of(&fair, ("loud", "few"), key),
                lost("greedy", 9 - key)
            );
        }
        assert_eq!(take_of(&fair, ("loud", "few"), 5), None, "nobody has more");
        assert_eq!(counts_of(&fair, "loud"), [5, 5]);
        assert_eq!(counts_of(&fair, "quiet"), [1; 10]);
    }

    #[test]
    fn a_host_takes_from_the_one_that_has_most_and_however_many_senders_it_names_only_up_to_as_many()
     {
        let fair = Fair::new(Bounds {
            per_sender: usize::MAX,
            per_host: 60,
            all: 100,
        });
        for key in 0..60 {
            let sender = if key < 40 { "first" } else { "second" };
            assert_eq!(take_of(&fair, ("loud", sender), key), Some(None));
        }
        for key in 0..40 {
            assert_eq!(take_of(&fair, ("other", "one"), key), Some(None));
        }
        // Of the host that has most, the sender that has: by the sender alone it would be another's.
        assert_eq!(take_of(&fair, ("quiet", "few"), 0), lost("first", 39));
        for number in 0..100 {
            take_of(&fair, ("liar", &format!("sender {number}")), number);
        }
        let of = |host| counts_of(&fair, host).iter().sum::<usize>();
        assert_eq!(["loud", "other", "liar", "quiet"].map(of), [33, 33, 33, 1]);
        assert_eq!(counts_of(&fair, "loud"), [16, 17]);
        // Who has most makes room for its own.
        assert!(take_of(&fair, ("other", "second"), 0).is_some());
        assert_eq!(counts_of(&fair, "other"), [1, 32]);
    }
}
