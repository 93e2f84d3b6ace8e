//! What processors count alone, beside what was counted before they did.

use std::{fs, os::fd::AsFd, path::Path, sync::atomic::Ordering};

use sandwire_testlab::lab;

use super::{
    NOWHERE, clone_of,
    migrate::{INGRESS_BYTES, count, counted, enter, larger},
    names_in, nic, open, settings,
};
use crate::{
    Datapath, NicIndex, PolicyIndex,
    abi::{Counters, NeighbourShare, Nic, NicState},
    features,
    ledgers::Ledgers,
    map::Array,
    open::{OBJECTS, load, sizes},
    pins::{current, find_bpffs, make_folder, map_path, open_map},
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_lease_counts_from_zero_while_ledgers_go_on() {
    lab::run(|_| {
        let datapath = open(&settings());
        let [first, second] = [1, 2].map(|slot| enter(&datapath, slot));
        count(&datapath, first, 1000);
        count(&datapath, second, 30);
        let line = |datapath: &Datapath| {
            let line = datapath.ledgers.line(0, first.0);
            line[INGRESS_BYTES].load(Ordering::Relaxed)
        };
        let before = line(&datapath);
        assert!(before > 0);
        let mut share = NeighbourShare::default();
        (share.next, share.asked[0]) = (1, 1 << 32);
        datapath.neighbour_shares.set(&first.0, &share).unwrap();
        datapath.deactivate(first).unwrap();
        let until_somebody_comes = [(1, 1000, 1000), (2, 30, 30)];
        assert_eq!(counted(&datapath), until_somebody_comes);
        datapath.activate(first, PolicyIndex(0), false).unwrap();
        assert_eq!(counted(&datapath), [(1, 0, 0), (2, 30, 30)]);
        assert_eq!(line(&datapath), before);
        let share = datapath.neighbour_shares.get(&first.0).unwrap();
        assert_eq!(share, Some(NeighbourShare::default()));
        count(&datapath, first, 9);
        assert_eq!(counted(&datapath), [(1, 9, 9), (2, 30, 30)]);
        drop(datapath);
        let datapath = open(&settings());
        assert_eq!(counted(&datapath), [(1, 9, 9), (2, 30, 30)]);
        assert!(line(&datapath) > before);
    });
}

/// As programs and daemon of before ledgers leave it.
fn leave_without_ledgers(datapath: Datapath, folder: &Path) {
    drop(datapath);
    fs::remove_file(map_path(folder, "ledgers")).unwrap();
}

/// As the programs of before ledgers do.
fn count_as_before(datapath: &Datapath, index: NicIndex, bytes: u64) {
    let mut counted = Counters::default();
    counted.ingress.bytes = bytes;
    datapath.counters.add(index.0, &counted);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_maps_of_before_ledgers_go_on_with_what_they_have() {
    lab::run(|_| {
        let folder = settings().folder;
        let datapath = open(&settings());
        let index = enter(&datapath, 1);
        count_as_before(&datapath, index, 1000);
        leave_without_ledgers(datapath, &folder);
        let datapath = open(&settings());
        assert!(names_in(&current(&folder)).contains(&"ledgers".to_owned()));
        // Its programs go on beside today's.
        count_as_before(&datapath, index, 100);
        count(&datapath, index, 7);
        assert_eq!(counted(&datapath), [(1, 1107, 7)]);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_figures_of_before_ledgers_move_to_other_maps() {
    lab::run(|_| {
        let folder = settings().folder;
        let datapath = open(&settings());
        let index = enter(&datapath, 1);
        count_as_before(&datapath, index, 1000);
        leave_without_ledgers(datapath, &folder);
        let datapath = Datapath::open(&larger()).unwrap().datapath;
        let index = enter(&datapath, 1);
        count(&datapath, index, 7);
        datapath.finish_migration(|_| true, |_, _| {}).unwrap();
        assert_eq!(counted(&datapath), [(1, 1007, 7)]);
        assert_eq!(names_in(&folder), ["links", "v1"]);
    });
}

/// As a daemon of before ledgers leases a NIC anew.
fn lease_as_before(datapath: &Datapath, index: NicIndex) {
    let lease = std::mem::offset_of!(Nic, lease);
    datapath
        .nics
        .field(index.0, lease)
        .fetch_add(1, Ordering::Relaxed);
    datapath.counters.clear(index.0);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_who_leased_before_ledgers_is_counted_nothing_of_the_lease_before() {
    lab::run(|_| {
        for (settings, migrates) in [(settings(), false), (larger(), true)] {
            let datapath = open(&super::settings());
            let index = enter(&datapath, 1);
            count(&datapath, index, 1000);
            // Somebody went back to the version before, and on to this one.
            lease_as_before(&datapath, index);
            count_as_before(&datapath, index, 30);
            drop(datapath);
            let datapath = Datapath::open(&settings).unwrap().datapath;
            if migrates {
                enter(&datapath, 1);
                datapath.finish_migration(|_| true, |_, _| {}).unwrap();
            }
            assert_eq!(counted(&datapath), [(1, 30, 0)]);
            drop(datapath);
            Datapath::remove(&settings.folder).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_ledgers_of_another_number_of_processors_move_to_other_maps() {
    lab::run(|_| {
        let settings = settings();
        let folder = &settings.folder;
        find_bpffs(folder, settings.mount).unwrap();
        make_folder(&current(folder).join("programs")).unwrap();
        let mut sizes = sizes(&settings).unwrap();
        let size = sizes.iter_mut().find(|(name, _)| *name == "ledgers");
        let entries = &mut size.unwrap().1;
        // One more.
        *entries += settings.nics_max;
        let daemons = *entries / settings.nics_max - 1;
        load(folder, &sizes, features::probe().unwrap(), &OBJECTS).unwrap();
        let map = |name| open_map(folder, name).unwrap();
        let nics = Array::<Nic, _>::new("nics", map("nics").as_fd()).unwrap();
        let leased = Nic {
            state: NicState::Active.number(),
            slot: 1,
            ..nic(NOWHERE, NOWHERE, clone_of(1))
        };
        nics.write(5, &leased);
        let ledgers = Ledgers::new(map("ledgers").as_fd(), settings.nics_max).unwrap();
        assert_eq!(ledgers.processors(), daemons);
        ledgers.line(daemons - 1, 5)[INGRESS_BYTES].store(1000, Ordering::Relaxed);
        ledgers.line(daemons, 5)[INGRESS_BYTES].store(300, Ordering::Relaxed);

        let opened = Datapath::open(&settings).unwrap();
        assert!(opened.migrated_from.is_some());
        let datapath = opened.datapath;
        assert_eq!(datapath.ledgers.processors(), daemons - 1);
        enter(&datapath, 1);
        for _ in 0..2 {
            let old = folder.join("old-1-v1");
            datapath.take_counters(&old, |_| true, |_, _| {}).unwrap();
            assert_eq!(counted(&datapath), [(1, 700, 0)]);
        }
    });
}
