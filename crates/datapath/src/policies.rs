//! The policies in the maps: written as a whole or not at all, removed with all that belongs to them.
//!
//! The field `reserved` of an entry says how far it is, so that what a crash cut off is found: an entry
//! is marked before its prefixes are written, and unmarked after they have been removed.

use std::{
    collections::HashMap,
    mem::offset_of,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

mod numbers;
mod redirects;

use numbers::Numbers;

use crate::{
    Error, PolicyIndex,
    abi::{Policy, PrefixKey, PrefixValue, RuleList},
    map::{Array, Table},
    policy::{Compiled, Redirect},
};

/// Being written or removed.
const UNFINISHED: u32 = 1;
/// Complete.
const FINISHED: u32 = 2;

#[derive(Debug)]
pub(crate) struct Policies {
    array: Array<Policy, AtomicU32>,
    prefixes: Table<PrefixKey, PrefixValue>,
    lists: Table<u32, RuleList>,
    state: Mutex<State>,
    /// What [`Policies::set_redirects`] was told last.
    redirects: Mutex<Option<Vec<Redirect>>>,
}

#[derive(Debug)]
struct State {
    /// By index, whether somebody has it.
    taken: Vec<bool>,
    next_index: u32,
    list_numbers: Numbers,
    belongings: HashMap<u32, Belongings>,
    /// Nobody's, whose entries in other maps couldn't be removed.
    leftovers: Vec<u32>,
    /// Whether `belongings` lacks what an earlier process wrote.
    is_partial: bool,
}

/// What a policy has in other maps.
#[derive(Debug, Default)]
struct Belongings {
    prefixes: Vec<PrefixKey>,
    lists: Vec<u32>,
}

impl Belongings {
    /// Those of a policy of this index, whose lists are numbered from `first_list` on.
    fn new(compiled: &Compiled, policy: u32, first_list: u32) -> Self {
        let prefixes = compiled.prefixes.iter();
        Self {
            prefixes: prefixes
                .map(|(key, _)| PrefixKey { policy, ..*key })
                .collect(),
            lists: (first_list..).take(compiled.lists.len()).collect(),
        }
    }

    /// The number of a list by its position among the policy's lists, from 1 on; 0 is none.
    fn list(&self, position: u32) -> u32 {
        match position {
            0 => 0,
            position => self.lists[position as usize - 1],
        }
    }
}

impl Policies {
    /// Takes the maps, with what an earlier process left in them.
    pub(crate) fn new(
        array: Array<Policy, AtomicU32>,
        prefixes: Table<PrefixKey, PrefixValue>,
        lists: Table<u32, RuleList>,
    ) -> Result<Self, Error> {
        let marks: Vec<u32> = (0..array.entries())
            .map(|index| mark(&array, index).load(Ordering::Acquire))
            .collect();
        let mut taken: Vec<bool> = marks.iter().map(|mark| *mark != 0).collect();
        // Nobody's: what a NIC has that was never given a policy.
        taken[0] = true;
        let is_partial = marks.iter().any(|mark| *mark != 0);
        let known = lists.entries()?;
        let last_list = known.iter().map(|(list, _)| *list).max().unwrap_or(0);
        let policies = Self {
            array,
            prefixes,
            lists,
            state: Mutex::new(State {
                taken,
                next_index: 1,
                list_numbers: Numbers::behind(last_list),
                belongings: HashMap::new(),
                leftovers: Vec::new(),
                is_partial,
            }),
            redirects: Mutex::default(),
        };
        for (index, mark) in (0..).zip(marks) {
            if mark == UNFINISHED {
                policies.remove(PolicyIndex(index))?;
            }
        }
        Ok(policies)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that is done under the lock panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a policy: all of it, or nothing.
    pub(crate) fn add(&self, compiled: &Compiled) -> Result<PolicyIndex, Error> {
        self.remove_leftovers();
        let first_list = self.take_lists(compiled.lists.len())?;
        let index = self.state().take().ok_or(Error::Full {
            map: "policies",
            entries: self.array.entries(),
        })?;
        let mark = mark(&self.array, index);
        mark.store(UNFINISHED, Ordering::Release);
        let belongings = Belongings::new(compiled, index, first_list);
        if let Err(error) = self.write_belongings(compiled, &belongings) {
            self.state().belongings.insert(index, belongings);
            // What this can't remove either, the next policy or the next start removes.
            let _ = self.remove(PolicyIndex(index));
            return Err(error);
        }
        let mut policy = compiled.policy;
        policy.reserved = UNFINISHED;
        self.array.write(index, &policy);
        mark.store(FINISHED, Ordering::Release);
        self.state().belongings.insert(index, belongings);
        Ok(PolicyIndex(index))
    }

    /// Numbers for so many lists.
    fn take_lists(&self, lists: usize) -> Result<u32, Error> {
        self.state().list_numbers.take(lists, || {
            let known = self.lists.entries()?;
            Ok(known.into_iter().map(|(list, _)| list).collect())
        })
    }

    /// What fails leaves some of them, or all.
    fn write_belongings(&self, compiled: &Compiled, belongings: &Belongings) -> Result<(), Error> {
        let values: Vec<PrefixValue> = (compiled.prefixes.iter())
            .map(|(_, value)| PrefixValue {
                list: belongings.list(value.list),
                ..*value
            })
            .collect();
        // Lists are found by the prefixes that have them, also after a crash.
        self.prefixes.add_all(&belongings.prefixes, &values)?;
        self.lists.add_all(&belongings.lists, &compiled.lists)
    }

    /// Removes a policy with all that belongs to it, which is its owner's last word on it: what can't be removed now stays
    /// closed, its index isn't given again, and the next policy or the next start tries again.
    pub(crate) fn remove(&self, policy: PolicyIndex) -> Result<(), Error> {
        let index = policy.0;
        if index == 0 || !self.state().taken[index as usize] {
            return Ok(());
        }
        self.close(index);
        if let Err(error) = self.remove_belongings(index) {
            self.state().leftovers.push(index);
            return Err(error);
        }
        self.array.write(index, &Policy::default());
        self.state().taken[index as usize] = false;
        Ok(())
    }

    fn remove_belongings(&self, index: u32) -> Result<(), Error> {
        let belongings = self.belongings_of(index)?;
        let lists = self.lists.remove_all(&belongings.lists);
        // A list that stays is found by its prefix.
        let result = lists.and_then(|()| self.prefixes.remove_all(&belongings.prefixes));
        if result.is_err() {
            self.state().belongings.insert(index, belongings);
        }
        result
    }

    fn remove_leftovers(&self) {
        let leftovers = std::mem::take(&mut self.state().leftovers);
        for index in leftovers {
            // What fails again is put back.
            let _ = self.remove(PolicyIndex(index));
        }
    }

    /// Makes a policy deny everything, before what it denies is taken from the other maps: whoever still had it
    /// would be allowed more with each prefix that goes.
    fn close(&self, index: u32) {
        let closed = Policy {
            reserved: UNFINISHED,
            ..Policy::default()
        };
        self.array.write(index, &closed);
    }

    fn belongings_of(&self, index: u32) -> Result<Belongings, Error> {
        if let Some(belongings) = self.state().belongings.remove(&index) {
            return Ok(belongings);
        }
        if self.state().is_partial {
            let entries = self.prefixes.entries()?;
            let mut state = self.state();
            let mut found: HashMap<u32, Belongings> = HashMap::new();
            for (key, value) in entries {
                let belongings = found.entry(key.policy).or_default();
                belongings.prefixes.push(key);
                if value.list != 0 {
                    belongings.lists.push(value.list);
                }
            }
            for (policy, mut belongings) in found {
                belongings.lists.sort_unstable();
                belongings.lists.dedup();
                state.belongings.entry(policy).or_insert(belongings);
            }
            state.is_partial = false;
        }
        Ok(self.state().belongings.remove(&index).unwrap_or_default())
    }

    /// All that are complete.
    pub(crate) fn all(&self) -> Vec<PolicyIndex> {
        let is_complete =
            |index: &u32| mark(&self.array, *index).load(Ordering::Acquire) == FINISHED;
        let complete = (1..self.array.entries()).filter(is_complete);
        complete.map(PolicyIndex).collect()
    }

    /// The fixed part of a policy.
    pub(crate) fn read(&self, policy: PolicyIndex) -> Policy {
        self.array.read(policy.0)
    }

    /// The fixed part of a policy that something in a map names; `None`: there can be none.
    pub(crate) fn find(&self, policy: PolicyIndex) -> Option<Policy> {
        (policy.0 < self.array.entries()).then(|| self.read(policy))
    }
}

#[cfg(test)]
impl Policies {
    /// Entries of the maps of prefixes and lists.
    pub(crate) fn sizes(&self) -> Result<(usize, usize), Error> {
        Ok((self.prefixes.entries()?.len(), self.lists.entries()?.len()))
    }

    /// Whether removals of prefixes fail.
    pub(crate) fn refuse_removals(&self, whether: bool) {
        self.prefixes
            .refuses_removals
            .store(whether, Ordering::Relaxed);
    }

    pub(crate) fn is_empty(&self) -> Result<bool, Error> {
        Ok(self.sizes()? == (0, 0))
    }

    pub(crate) fn prefix_keys(&self) -> Result<Vec<PrefixKey>, Error> {
        let entries = self.prefixes.entries()?.into_iter();
        Ok(entries.map(|(key, _)| key).collect())
    }

    /// Leaves what a process leaves that is killed while it removes a policy.
    pub(crate) fn remove_half(&self, policy: PolicyIndex) {
        self.close(policy.0);
    }

    /// Leaves what a process leaves that is killed while it adds a policy.
    pub(crate) fn write_half(&self, compiled: &Compiled, index: u32) {
        mark(&self.array, index).store(UNFINISHED, Ordering::Release);
        let belongings = Belongings::new(compiled, index, 1_000);
        self.write_belongings(compiled, &belongings).unwrap();
    }
}

impl State {
    /// An index.
    fn take(&mut self) -> Option<u32> {
        let index = next_free(&self.taken, self.next_index, 1)?;
        self.taken[index as usize] = true;
        self.next_index = index + 1;
        Some(index)
    }
}

fn mark(array: &Array<Policy, AtomicU32>, index: u32) -> &AtomicU32 {
    array.field(index, offset_of!(Policy, reserved))
}

/// The first of `count` neighbouring free entries, looked for from `start` on and then from the beginning.
pub(crate) fn next_free(taken: &[bool], start: u32, count: usize) -> Option<u32> {
    let start = start as usize;
    let is_free = |first: &usize| {
        let places = taken.get(*first..*first + count);
        places.is_some_and(|places| !places.contains(&true))
    };
    let found = (start..taken.len())
        .chain(1..start.min(taken.len()))
        .find(is_free)?;
    u32::try_from(found).ok()
}

#[cfg(test)]
mod tests {
    use super::next_free;

    #[test]
    fn free_neighbours_are_found_behind_the_last_and_then_from_the_beginning() {
        let mut taken = vec![false; 8];
        taken[0] = true;
        assert_eq!(next_free(&taken, 1, 3), Some(1));
        taken[4] = true;
        assert_eq!(next_free(&taken, 2, 3), Some(5));
        assert_eq!(next_free(&taken, 7, 3), Some(1));
        assert_eq!(next_free(&taken, 1, 4), None);
        assert_eq!(next_free(&taken, 9, 1), Some(1));
        assert_eq!(next_free(&[true; 4], 1, 1), None);
    }
}
