//! From maps of one size to those of another, by processes that are killed on the way.

use std::{fs, mem::offset_of, os::fd::AsFd, path::Path, sync::atomic::Ordering};

use sandwire_testlab::lab;

use super::{NOWHERE, clone_of, names_in, nic, open, settings};
use crate::{
    Datapath, NicIndex, PolicyIndex, Settings,
    abi::{Counters, Ledger, Nic, NicFlag, Traffic, ipv4_of},
    pins::open_map,
    sys,
};

/// Word of a line.
pub(super) const INGRESS_BYTES: usize =
    (offset_of!(Ledger, ingress) + offset_of!(Traffic, bytes)) / size_of::<u64>();

const SLOTS: std::ops::RangeInclusive<u32> = 1..=3;

pub(super) fn larger() -> Settings {
    Settings {
        nics_max: 512,
        ..settings()
    }
}

/// Enters a slot and leases it.
pub(super) fn enter(datapath: &Datapath, slot: u32) -> NicIndex {
    let index = datapath.allocate(1).unwrap();
    let mut entry = nic(NOWHERE, NOWHERE, clone_of(slot));
    entry.slot = slot;
    datapath.write_nic(index, &entry);
    datapath.activate(index, PolicyIndex(0), false).unwrap();
    index
}

/// As programs do: of before ledgers and of today, on two processors.
pub(super) fn count(datapath: &Datapath, index: NicIndex, bytes: u64) {
    let mut counted = Counters::default();
    counted.ingress.bytes = bytes / 2;
    counted.drops[17] = bytes;
    datapath.counters.add(index.0, &counted);
    let today = bytes - bytes / 2;
    let last = datapath.ledgers.processors() - 1;
    for (processor, share) in [(0, today / 2), (last, today - today / 2)] {
        let word = &datapath.ledgers.line(processor, index.0)[INGRESS_BYTES];
        word.fetch_add(share, Ordering::Relaxed);
    }
}

/// What is counted of each slot: bytes that reached it, and drops.
pub(super) fn counted(datapath: &Datapath) -> Vec<(u32, u64, u64)> {
    let used = datapath.used().into_iter();
    let mut all: Vec<_> = used
        .map(|(index, nic)| {
            let counted = datapath.counters(index);
            (nic.slot, counted.ingress.bytes, counted.drops[17])
        })
        .collect();
    all.sort_unstable();
    all
}

/// A process is killed when it has done some of the last steps of a migration, and another one comes.
fn finish_after(done: impl FnOnce(&Datapath, &Path), begins_anew: bool) {
    let folder = settings().folder;
    let datapath = open(&settings());
    for slot in SLOTS {
        let index = enter(&datapath, slot);
        count(&datapath, index, u64::from(slot) * 1000);
    }
    drop(datapath);
    let datapath = Datapath::open(&larger()).unwrap().datapath;
    for slot in SLOTS.rev() {
        let index = enter(&datapath, slot);
        count(&datapath, index, 7);
    }
    datapath.take_into_use().unwrap();
    done(&datapath, &folder.join("old-1-v1"));
    drop(datapath);
    let opened = Datapath::open(&larger()).unwrap();
    assert_eq!(opened.migrated_from.is_some(), begins_anew);
    let datapath = opened.datapath;
    if begins_anew {
        SLOTS.for_each(|slot| assert!(enter(&datapath, slot).0 > 0));
        datapath.finish_migration(|_| true, |_, _| {}).unwrap();
    }
    let all: Vec<_> = SLOTS
        .map(|slot| (slot, u64::from(slot) * 1000 + 7))
        .collect();
    let all: Vec<_> = all.iter().map(|(slot, sum)| (*slot, *sum, *sum)).collect();
    assert_eq!(counted(&datapath), all);
    assert_eq!(names_in(&folder), ["links", "v1"]);
    Datapath::remove(&folder).unwrap();
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_whoever_is_killed_in_a_migration_counts_nothing_twice() {
    lab::run(|_| {
        finish_after(|_, _| {}, true);
        let take_one = |datapath: &Datapath, old: &Path| {
            datapath
                .take_counters(old, |nic| nic.slot == 2, |_, _| {})
                .unwrap();
        };
        finish_after(take_one, true);
        let take_all = |datapath: &Datapath, old: &Path| {
            datapath.take_counters(old, |_| true, |_, _| {}).unwrap();
        };
        finish_after(take_all, true);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_whoever_is_killed_while_old_maps_are_removed_leaves_nothing() {
    lab::run(|_| {
        let finish = |pins: &'static [&str]| {
            move |datapath: &Datapath, old: &Path| {
                datapath.take_counters(old, |_| true, |_, _| {}).unwrap();
                let done = old.with_file_name("done-1-v1");
                fs::rename(old, &done).unwrap();
                for pin in pins {
                    fs::remove_file(done.join(pin)).unwrap();
                }
            }
        };
        for pins in [
            &[][..],
            &["nics"],
            &["ledgers"],
            &["counters", "programs/from_guest"],
        ] {
            finish_after(finish(pins), false);
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_counters_of_another_sandbox_stay_behind() {
    lab::run(|_| {
        let datapath = open(&settings());
        let [first, second, third] = [1, 2, 3].map(|slot| enter(&datapath, slot));
        for index in [first, second, third] {
            count(&datapath, index, 1000);
        }
        // Nobody's any more, and what was counted stays until somebody comes.
        datapath.deactivate(second).unwrap();
        drop(datapath);
        let datapath = Datapath::open(&larger()).unwrap().datapath;
        SLOTS.for_each(|slot| assert!(enter(&datapath, slot).0 > 0));
        // The third was handed out anew meanwhile.
        let mut told = Vec::new();
        let tell = |nic: &Nic, moved: &Counters| {
            told.push((nic.slot, moved.ingress.bytes, moved.drops[17]));
        };
        datapath
            .finish_migration(|nic| nic.slot != 3, tell)
            .unwrap();
        assert_eq!(counted(&datapath), [(1, 1000, 1000), (2, 0, 0), (3, 0, 0)]);
        assert_eq!(told, [(1, 1000, 1000)], "all of it is of before");
    });
}

/// The kernel's number of the table of answers.
fn answers_of(datapath: &Datapath) -> u32 {
    let map = open_map(&datapath.folder, "answers").unwrap();
    sys::map_info(map.as_fd()).unwrap().id
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_answers_and_the_leases_that_they_name_stay_where_they_are() {
    lab::run(|_| {
        let datapath = open(&settings());
        let [first, second, third] = [1, 2, 3].map(|slot| enter(&datapath, slot));
        // Leased a second time.
        datapath.deactivate(first).unwrap();
        datapath.activate(first, PolicyIndex(0), false).unwrap();
        datapath.deactivate(third).unwrap();
        let answers = answers_of(&datapath);
        drop(datapath);
        for _ in 0..2 {
            let datapath = Datapath::open(&larger()).unwrap().datapath;
            assert_eq!(answers_of(&datapath), answers);
            let places = [first, second, third];
            let leases = places.map(|index| datapath.nic(index).lease);
            assert_eq!(leases, [2, 1, 1]);
            datapath.take_into_use().unwrap();
            // As if it had been killed before it wrote them.
            for index in places {
                let lease = datapath.nics.field(index.0, offset_of!(Nic, lease));
                lease.store(0, Ordering::Relaxed);
            }
        }
        let datapath = Datapath::open(&larger()).unwrap().datapath;
        // Nobody gets what is kept for others.
        let other = datapath.allocate(1).unwrap();
        assert!(![first, second].contains(&other), "{other}");
        assert_eq!(datapath.allocate_former(0, 1, 2), None, "it had one");
        assert_eq!(datapath.allocate_former(0, 2, 1), Some(second));
        assert_eq!(datapath.allocate_former(0, 2, 1), None, "it has it");
        assert_eq!(datapath.allocate_former(0, 3, 1), None, "nobody leased it");
        datapath.write_nic(second, &nic(NOWHERE, NOWHERE, clone_of(2)));
        datapath.resume(second, PolicyIndex(0), false).unwrap();
        assert_eq!(datapath.nic(second).lease, 1, "the same");
        datapath.deactivate(second).unwrap();
        datapath.activate(second, PolicyIndex(0), false).unwrap();
        assert_eq!(datapath.nic(second).lease, 2, "another");
        drop(datapath);
        Datapath::remove(&settings().folder).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_flags_of_leases_are_told_by_the_last_maps_that_know_them() {
    lab::run(|_| {
        let (impaired, published) = (NicFlag::Impaired, NicFlag::Published);
        let datapath = open(&settings());
        let [first, second, third] = [1, 2, 3].map(|slot| enter(&datapath, slot));
        datapath.set_flag(first, impaired, true);
        datapath.set_flag(second, published, true);
        datapath.deactivate(third).unwrap();
        assert_eq!(datapath.former_nics().unwrap(), []);
        drop(datapath);
        let datapath = Datapath::open(&larger()).unwrap().datapath;
        let told = |datapath: &Datapath| -> Vec<_> {
            let former = datapath.former_nics().unwrap().into_iter();
            former
                .map(|nic| (nic.slot, ipv4_of(nic.clone4), nic.flags))
                .collect()
        };
        let of_second = (2, Some(clone_of(2)), published.number());
        let of_first = (1, Some(clone_of(1)), impaired.number());
        assert_eq!(told(&datapath), [of_first, of_second]);
        // Killed when packets went by them, of which the second had none.
        datapath.take_into_use().unwrap();
        enter(&datapath, 1);
        drop(datapath);
        let datapath = Datapath::open(&larger()).unwrap().datapath;
        let of_first = (1, Some(clone_of(1)), 0);
        assert_eq!(told(&datapath), [of_first, of_second]);
        drop(datapath);
        Datapath::remove(&settings().folder).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_answers_of_another_size_are_made_anew() {
    lab::run(|_| {
        let datapath = open(&settings());
        enter(&datapath, 1);
        let answers = answers_of(&datapath);
        drop(datapath);
        let other = Settings {
            answers_max: 2048,
            ..settings()
        };
        let datapath = Datapath::open(&other).unwrap().datapath;
        assert_ne!(answers_of(&datapath), answers);
        assert_eq!(datapath.allocate_former(0, 1, 1), None);
        drop(datapath);
        Datapath::remove(&other.folder).unwrap();
    });
}

/// A start that ends before packets go by its maps, and one after it with the sizes of `settings`.
fn start_after(failed: &Settings, settings: &Settings) -> Datapath {
    drop(Datapath::open(failed).unwrap());
    Datapath::open(settings).unwrap().datapath
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_start_that_ends_before_packets_go_by_its_maps_takes_nothing_away() {
    lab::run(|_| {
        let more_answers = Settings {
            answers_max: 2048,
            ..settings()
        };
        let fewer = Settings {
            nics_max: 128,
            ..settings()
        };
        for failed in [&more_answers, &fewer, &larger()] {
            let datapath = open(&settings());
            let [first, second] = [1, 2].map(|slot| enter(&datapath, slot));
            datapath.deactivate(second).unwrap();
            datapath.activate(second, PolicyIndex(0), false).unwrap();
            count(&datapath, first, 1000);
            let answers = answers_of(&datapath);
            drop(datapath);
            for after in [settings(), larger()] {
                let datapath = start_after(failed, &after);
                assert_eq!(answers_of(&datapath), answers, "{failed:?}, {after:?}");
                assert!(datapath.shares_answers());
                assert_eq!(datapath.allocate_former(0, 2, 1), Some(second));
                assert_eq!(datapath.nic(second).lease, 2);
            }
            let folder = settings().folder;
            // Killed as soon as it had moved them aside.
            Datapath::remove(&folder.join("v1")).unwrap();
            let datapath = Datapath::open(&larger()).unwrap().datapath;
            assert_eq!(answers_of(&datapath), answers);
            datapath.take_into_use().unwrap();
            enter(&datapath, 1);
            datapath.finish_migration(|_| true, |_, _| {}).unwrap();
            assert_eq!(counted(&datapath), [(1, 1000, 1000)]);
            assert_eq!(names_in(&folder), ["links", "v1"]);
            assert!(!names_in(&folder.join("v1")).contains(&"unused".to_owned()));
            drop(datapath);
            Datapath::remove(&folder).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_places_that_are_kept_are_given_away_when_nobody_comes() {
    lab::run(|_| {
        let datapath = open(&settings());
        for slot in 1..=200 {
            enter(&datapath, slot);
        }
        drop(datapath);
        let datapath = Datapath::open(&larger()).unwrap().datapath;
        assert_eq!(datapath.allocate_former(0, 100, 1), Some(NicIndex(100)));
        let others = std::iter::from_fn(|| datapath.allocate(1).ok());
        assert_eq!(others.count(), 510, "all but none and that one");
        let answers = answers_of(&datapath);
        drop(datapath);
        let fewer = Settings {
            nics_max: 128,
            ..settings()
        };
        let datapath = Datapath::open(&fewer).unwrap().datapath;
        assert_ne!(answers_of(&datapath), answers);
        assert_eq!(datapath.allocate_former(0, 100, 1), None);
        drop(datapath);
        Datapath::remove(&fewer.folder).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_other_sizes_make_new_maps_and_keep_counters() {
    lab::run(|_| {
        let datapath = open(&settings());
        let first = datapath.allocate(1).unwrap();
        let second = datapath.allocate(1).unwrap();
        for (index, number) in [(first, 1), (second, 2)] {
            datapath.write_nic(index, &nic(NOWHERE, NOWHERE, clone_of(number)));
            datapath.activate(index, PolicyIndex(0), false).unwrap();
        }
        let mut counted = datapath.counters(second);
        counted.ingress.bytes = 1234;
        counted.drops[17] = 5;
        datapath.counters.add(second.0, &counted);
        drop(datapath);

        let larger = Settings {
            nics_max: 512,
            ..settings()
        };
        let opened = Datapath::open(&larger).unwrap();
        let folder = larger.folder.clone();
        assert_eq!(opened.migrated_from, Some(folder.join("old-1-v1")));
        let datapath = opened.datapath;
        assert!(datapath.used().is_empty());
        // In another order than before.
        let index = datapath.allocate(1).unwrap();
        datapath.write_nic(index, &nic(NOWHERE, NOWHERE, clone_of(2)));
        datapath.activate(index, PolicyIndex(0), false).unwrap();
        datapath.counters.add(index.0, &counted);
        // Killed before it was done: the next process begins anew.
        datapath.take_into_use().unwrap();
        drop(datapath);
        let opened = Datapath::open(&larger).unwrap();
        assert_eq!(opened.migrated_from, Some(folder.join("old-2-v1")));
        let datapath = opened.datapath;
        let index = datapath.allocate(1).unwrap();
        datapath.write_nic(index, &nic(NOWHERE, NOWHERE, clone_of(2)));
        datapath.activate(index, PolicyIndex(0), false).unwrap();
        datapath.finish_migration(|_| true, |_, _| {}).unwrap();
        let carried = datapath.counters(index);
        assert_eq!((carried.ingress.bytes, carried.drops[17]), (2468, 10));
        assert_eq!(names_in(&folder), ["links", "v1"]);
        drop(datapath);
        let datapath = open(&larger);
        assert_eq!(datapath.used().len(), 1);
        Datapath::remove(&folder).unwrap();
        assert!(!folder.exists());
    });
}
