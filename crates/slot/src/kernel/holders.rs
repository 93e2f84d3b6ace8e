//! Who has the TAPs of a slot open.
//!
//! All processes have to be looked through for that, and of a slot without a namespace all that they have open. So one search
//! answers all who asked before it began, and tells those who ask soon after where to look first: what it found may have
//! changed, and is looked at again. That it found nobody says nothing about later.

use std::{
    borrow::Borrow,
    collections::HashMap,
    fs,
    hash::Hash,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, Instant},
};

use sandwire_api::lease::TapHolder;
use sandwire_kernel_net::{netns, process};

use super::lock;
use crate::plan::SlotPlan;

/// For so long what a search has found is looked at before others are.
const SEARCH_INTERVAL: Duration = Duration::from_secs(1);

/// Finds who has TAPs open.
#[derive(Default)]
pub(super) struct Holders {
    /// By the name of a TAP that they have open.
    by_tap: Search<String>,
    /// By the inode of the network namespace that they are in.
    by_namespace: Search<u64>,
}

impl Holders {
    /// Processes that have a TAP of a slot without a namespace open.
    pub(super) fn of_host_slot(&self, slot: &SlotPlan) -> Vec<TapHolder> {
        let taps = taps_of(slot);
        let has_one = |process: &Path| taps_open(process).any(|tap| taps.contains(&&*tap));
        let see = |process: &Path| taps_open(process).collect();
        self.by_tap.find(&taps, see, has_one)
    }

    /// The same for a slot with a namespace. A process that was given the open TAP from outside can't be told from a
    /// user of another slot's, and isn't named.
    pub(super) fn inside(&self, slot: &SlotPlan) -> Vec<TapHolder> {
        let Some(namespace) = inode(&netns::path_of(&slot.netns_name)) else {
            return Vec::new();
        };
        let taps = taps_of(slot);
        let inode_of = |process: &Path| inode(&process.join("ns/net"));
        let has_one = |process: &Path| {
            inode_of(process) == Some(namespace)
                && taps_open(process).any(|tap| taps.contains(&&*tap))
        };
        let see = |process: &Path| inode_of(process).into_iter().collect();
        self.by_namespace.find(&[&namespace], see, has_one)
    }
}

/// The last search through all processes, by what was looked for.
struct Search<K>(Mutex<Option<Seen<K>>>);

struct Seen<K> {
    begun: Instant,
    ended: Instant,
    /// Numbers of the processes.
    by_key: HashMap<K, Vec<u32>>,
}

impl<K> Default for Search<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash> Search<K> {
    /// The processes that are what is asked for. `see` says by which keys a process is to be found, by its folder in `/proc`.
    fn find<Q>(
        &self,
        keys: &[&Q],
        see: impl Fn(&Path) -> Vec<K>,
        is_one: impl Fn(&Path) -> bool,
    ) -> Vec<TapHolder>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let asked = Instant::now();
        let those = |numbers: Vec<u32>| -> Vec<TapHolder> {
            let found = numbers.into_iter().filter_map(|pid| {
                let folder = folder_of(pid);
                is_one(&folder).then(|| TapHolder {
                    pid,
                    command: process::name(&folder),
                })
            });
            found.collect()
        };
        let known = those(self.recent(asked, keys));
        if !known.is_empty() {
            return known;
        }
        those(self.search(asked, keys, || see_all(see)))
    }

    /// Who was found by a search that hasn't ended long before.
    fn recent<Q>(&self, asked: Instant, keys: &[&Q]) -> Vec<u32>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let seen = lock(&self.0);
        let recent = seen
            .as_ref()
            .filter(|seen| asked < seen.ended + SEARCH_INTERVAL);
        recent.map(|seen| seen.of(keys)).unwrap_or_default()
    }

    /// Who was found by a search that has begun since. Others who ask wait for it.
    fn search<Q>(
        &self,
        asked: Instant,
        keys: &[&Q],
        see_all: impl FnOnce() -> HashMap<K, Vec<u32>>,
    ) -> Vec<u32>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let mut seen = lock(&self.0);
        if let Some(seen) = seen.as_ref().filter(|seen| seen.begun >= asked) {
            return seen.of(keys);
        }
        let begun = Instant::now();
        let by_key = see_all();
        seen.insert(Seen {
            begun,
            ended: Instant::now(),
            by_key,
        })
        .of(keys)
    }
}

impl<K: Eq + Hash> Seen<K> {
    fn of<Q>(&self, keys: &[&Q]) -> Vec<u32>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let found = keys.iter().filter_map(|key| self.by_key.get(*key));
        let mut numbers: Vec<u32> = found.flatten().copied().collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }
}

fn see_all<K: Eq + Hash>(see: impl Fn(&Path) -> Vec<K>) -> HashMap<K, Vec<u32>> {
    let mut by_key: HashMap<K, Vec<u32>> = HashMap::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    for pid in numbers {
        for key in see(&folder_of(pid)) {
            let found = by_key.entry(key).or_default();
            // Many of its descriptors may be of one TAP.
            if found.last() != Some(&pid) {
                found.push(pid);
            }
        }
    }
    by_key
}

fn folder_of(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}

fn taps_of(slot: &SlotPlan) -> Vec<&str> {
    slot.nics.iter().map(|nic| &*nic.tap).collect()
}

fn inode(path: &Path) -> Option<u64> {
    fs::metadata(path).map(|status| status.ino()).ok()
}

/// Names of the TAPs that a process has open, once for each time.
fn taps_open(process: &Path) -> impl Iterator<Item = String> + use<> {
    let descriptors = fs::read_dir(process.join("fdinfo")).into_iter().flatten();
    descriptors.flatten().filter_map(|descriptor| {
        let about = fs::read_to_string(descriptor.path()).ok()?;
        let name = about.lines().find_map(|line| line.strip_prefix("iff:\t"))?;
        Some(name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(numbers: &[u32]) -> HashMap<String, Vec<u32>> {
        HashMap::from([("tap".to_owned(), numbers.to_vec())])
    }

    #[test]
    fn one_search_answers_all_who_asked_before_it_began() {
        let search = Search::<String>::default();
        let asked = Instant::now();
        assert_eq!(search.search(asked, &["tap"], || found(&[7])), [7]);
        let again = || unreachable!("there is an answer");
        assert_eq!(search.search(asked, &["tap"], again), [7]);
        assert_eq!(search.search(asked, &["other"], again), [0; 0]);
    }

    #[test]
    fn who_asks_later_is_told_nothing_of_what_came_before_but_where_to_look_first() {
        let search = Search::<String>::default();
        let asked = Instant::now();
        assert_eq!(search.recent(asked, &["tap"]), [0; 0]);
        search.search(asked, &["tap"], || found(&[9, 7, 7]));
        let later = Instant::now() + Duration::from_nanos(1);
        assert_eq!(search.recent(asked, &["tap", "other"]), [7, 9]);
        assert_eq!(search.recent(later + SEARCH_INTERVAL, &["tap"]), [0; 0]);
        assert_eq!(search.search(later, &["tap"], || found(&[])), [0; 0]);
    }

    #[test]
    fn what_was_found_is_looked_at_again() {
        let search = Search::<u64>::default();
        let own = std::process::id();
        let see = |process: &Path| inode(process).map(|_| 1).into_iter().collect();
        let is_own = |process: &Path| process.ends_with(own.to_string());
        let holders = search.find(&[&1], see, is_own);
        let numbers: Vec<u32> = holders.iter().map(|holder| holder.pid).collect();
        assert_eq!(numbers, [own]);
        assert_eq!(search.find(&[&1], see, |_| false), []);
    }
}
