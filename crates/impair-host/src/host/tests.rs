#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    thread,
    time::{Duration, Instant},
};

use sandwire_datapath::{divert, features};
use sandwire_testlab::lab::{self, Lab};

use super::*;
use crate::control::Side;

/// Targets in the lab's own namespace, at most two.
struct Bench<'a> {
    lab: &'a Lab,
    host: Host,
}

impl<'a> Bench<'a> {
    fn new(lab: &'a Lab) -> Self {
        Self::in_folder(lab, "targets")
    }

    fn in_folder(lab: &'a Lab, folder: &str) -> Self {
        let settings = Settings {
            memory: lab.folder().join(folder),
            pins: divert::FOLDER.into(),
            threads: 1,
            targets_max: 2,
            limits: PoolLimits::default(),
            uses_links: features::probe().unwrap().tcx,
        };
        let host = Host::start(settings).unwrap();
        Self { lab, host }
    }

    fn make(&self, name: &str) {
        self.lab.run(&format!(
            "ip link add name {name} type veth peer name {name}-peer"
        ));
    }

    fn set(&mut self, name: &str) -> Result<(), Error> {
        self.impair(&target(name), "delay 1ms")
    }

    fn impair(&mut self, target: &Target, text: &str) -> Result<(), Error> {
        let owner = Owner::User { uid: 0 };
        self.host.set(target, &owner, &text.parse().unwrap(), false)
    }

    fn begin_clear(&mut self, name: &str, flush: bool) -> Leaving {
        let leaving = self.host.begin_clear(&target(name), flush);
        let leaving = leaving.unwrap().unwrap();
        leaving.wait().unwrap();
        leaving
    }

    fn finish_clear(&mut self, leaving: &Leaving) {
        let parting = self.host.finish_clear(leaving);
        self.carry_out(parting);
    }

    fn look(&mut self) {
        self.host.look();
        let partings = self.host.take_partings();
        self.carry_out(partings);
    }

    fn carry_out(&mut self, partings: impl IntoIterator<Item = Parting>) {
        for parting in partings {
            parting.carry_out().unwrap();
            self.host.parted(&parting);
        }
    }

    /// What they are called now.
    fn listed(&self) -> Vec<String> {
        let listed = self.host.list(None, None).unwrap().into_iter();
        listed.map(|status| status.target.interface).collect()
    }
}

fn target(name: &str) -> Target {
    Target {
        netns: None,
        interface: name.to_owned(),
        side: Side::Host,
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_has_waited_for_an_end_does_not_end_what_came_after_it() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        bench.make("a");
        bench.set("a").unwrap();
        let slow = bench.begin_clear("a", false);
        let quick = bench.begin_clear("a", true);
        bench.finish_clear(&quick);
        bench.set("a").unwrap();
        bench.finish_clear(&slow);
        assert_eq!(bench.listed(), ["a"]);
    });
}

/// The kernel takes some 20 ms for each program and each TAP.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_ends_a_target_holds_up_nobody_but_who_wants_that_one() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        bench.make("a");
        bench.make("b");
        bench.set("a").unwrap();
        let leaving = bench.begin_clear("a", false);
        let parting = bench.host.finish_clear(&leaving).unwrap();
        assert!(bench.host.finish_clear(&leaving).is_none(), "one does it");
        bench.set("b").unwrap();
        bench.host.look();
        assert_eq!(bench.host.take_partings().len(), 0);
        assert_eq!(bench.listed(), ["a", "b"]);
        let state = |host: &Host| host.list(None, None).unwrap()[0].state.clone();
        assert_eq!(state(&bench.host), State::Draining);
        let shared = SharedHost::new(bench.host);
        thread::scope(|scope| {
            let other = &shared;
            let again = scope.spawn(move || other.finish_clear(&leaving));
            let anew = scope.spawn(|| {
                let (owner, impairment) = (Owner::User { uid: 0 }, "loss 1%".parse().unwrap());
                let set = |host: &mut Host| host.set(&target("a"), &owner, &impairment, false);
                shared.with(&target("a"), set)
            });
            thread::sleep(Duration::from_millis(100));
            assert!(!again.is_finished() && !anew.is_finished());
            shared.carry_out(&parting).unwrap();
            again.join().unwrap().unwrap();
            anew.join().unwrap().unwrap();
        });
        assert_eq!(state(&shared.lock()), State::Impaired);
        // With the service all end, also those that somebody else is about to.
        let leaving = shared.begin_clear_all();
        assert_eq!(leaving.len(), 2);
        drop(leaving);
        shared.flush_all();
        assert_eq!(lab.run("ip -o link").matches(": swd").count(), 0);
        assert!(!std::path::Path::new(divert::FOLDER).exists());
    });
}

/// Else the packets of all targets wait until the kernel has deleted them.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn taps_are_not_closed_by_the_engine() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        bench.make("a");
        bench.set("a").unwrap();
        let entry = bench.host.entries.values().next().unwrap();
        let names = entry.taps.clone().map(|(name, _)| name);
        let are_there = |are: bool| {
            let links = lab.run("ip -o link");
            let is_there = |name: &String| links.contains(&format!(": {name}:"));
            names.iter().all(|name| is_there(name) == are)
        };
        let taps = bench.host.workers[0].remove(entry.id).unwrap();
        assert!(are_there(true), "they are who asked's");
        drop(taps);
        assert!(are_there(false));
    });
}

/// A host `far` with `far0`, whose other end here is `near` with 10.9.0.1; as a target.
fn make_far(lab: &Lab, near: &str) -> Target {
    lab.shell(&format!(
        "ip netns add far
         ip link add {near} type veth peer name far0 netns far
         ip addr add 10.9.0.1/24 dev {near}; ip link set {near} up
         ip -n far addr add 10.9.0.2/24 dev far0; ip -n far link set far0 up"
    ));
    Target {
        netns: Some("/run/netns/far".into()),
        interface: "far0".to_owned(),
        side: Side::Sandbox,
    }
}

/// Whether this end of the pair into `far` goes, as it does with that namespace.
fn goes(lab: &Lab, near: &str) -> bool {
    let deadline = Instant::now() + Duration::from_secs(30);
    while lab.run("ip -o link").contains(&format!(": {near}@")) {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(20));
    }
    true
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_namespace_whose_file_is_deleted_is_not_kept() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        let far = make_far(lab, "near0");
        bench.impair(&far, "delay 1ms").unwrap();
        bench.look();
        assert_eq!(bench.listed(), ["far0"]);
        lab.run("ip netns del far");
        bench.look();
        assert_eq!(bench.listed(), [""; 0]);
        assert!(goes(lab, "near0"));
        assert!(!std::path::Path::new(divert::FOLDER).exists());

        // Another namespace of that name has an impairment of its own.
        make_far(lab, "near1");
        bench.impair(&far, "delay 1ms").unwrap();
        lab.run("ip netns del far");
        make_far(lab, "near2");
        bench.impair(&far, "delay 1ms").unwrap();
        assert_eq!(bench.listed(), ["far0", "far0"]);
        bench.look();
        assert_eq!(bench.listed(), ["far0"]);
        assert!(goes(lab, "near1"));
        assert!(lab.run("ip -o link").contains(": near2@"));
    });
}

/// Who waits for the last packets of a namespace that is deleted hears that they were dropped.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_last_packets_of_a_deleted_namespace_are_not_waited_for() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        let far = make_far(lab, "near0");
        bench.impair(&far, "egress delay 600s").unwrap();
        lab.shell("ip netns exec far ping -n -q -c 1 -W 0.2 10.9.0.1 || true");
        let leaving = bench.host.begin_clear(&far, false).unwrap().unwrap();
        lab.run("ip netns del far");
        bench.look();
        let cleared = leaving.wait().unwrap();
        assert!(cleared.was_impaired && cleared.flushed > 0, "{cleared:?}");
        assert_eq!(cleared.released, 0);
        bench.finish_clear(&leaving);
        assert!(goes(lab, "near0"));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_name_means_the_interface_that_has_it_now() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        bench.make("a");
        bench.set("a").unwrap();
        lab.run("ip link set dev a name before");
        bench.make("b");
        lab.run("ip link set dev b name a");
        bench.set("a").unwrap();
        let leaving = bench.begin_clear("a", true);
        bench.finish_clear(&leaving);
        assert_eq!(bench.listed(), ["before"]);
        // Nobody else is called so any more.
        let leaving = bench.begin_clear("a", true);
        bench.finish_clear(&leaving);
        assert_eq!(bench.listed(), [""; 0]);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn why_a_renamed_interface_is_impaired_no_more_is_told() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        bench.make("a");
        bench.set("a").unwrap();
        lab.run("ip link set dev a name b");
        let [tap, _] = &bench.host.entries.values().next().unwrap().taps;
        lab.run(&format!("ip link del dev {}", tap.0));
        bench.look();
        let listed = bench.host.list(None, None).unwrap();
        let reason = "somebody has deleted a TAP of ours".to_owned();
        assert_eq!(listed[0].state, State::Ended { reason });
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_has_ended_by_itself_takes_no_place_from_others() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        for name in ["a", "b", "c", "d"] {
            bench.make(name);
        }
        bench.set("a").unwrap();
        bench.set("b").unwrap();
        assert!(matches!(bench.set("c"), Err(Error::Full { .. })));
        lab.run("ip link del dev a");
        bench.look();
        assert_eq!(bench.listed(), ["a", "b"]);
        bench.set("c").unwrap();
        assert_eq!(bench.listed(), ["b", "c"]);
        assert!(matches!(bench.set("d"), Err(Error::Full { .. })));
    });
}

/// That takes so many bytes, nearly.
fn with_trace(bytes: usize) -> Impairment {
    let mut impairment: Impairment = "trace a.trace".parse().unwrap();
    let lines = format!("1\n{}", "9\n".repeat(bytes / 3));
    let read = impairment.read_files(|_| Ok::<_, String>(lines.clone()));
    read.unwrap();
    impairment
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_user_fills_the_service_with_traces_only_so_far() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        bench.make("a");
        bench.make("b");
        let mut set = |name: &str, uid, bytes| {
            let owner = Owner::User { uid };
            let impairment = with_trace(bytes);
            bench.host.set(&target(name), &owner, &impairment, false)
        };
        set("a", 1000, room::OF_USER_MAX / 2).unwrap();
        let refused = set("b", 1000, room::OF_USER_MAX / 2 + 100).unwrap_err();
        assert!(matches!(refused, Error::Room { .. }), "{refused}");
        assert!(refused.to_string().contains("of user 1000"), "{refused}");
        // The same again takes no more, and who has less has room for others.
        set("a", 1000, room::OF_USER_MAX / 2).unwrap();
        set("a", 1000, 1000).unwrap();
        set("b", 1000, room::OF_USER_MAX / 2 + 100).unwrap();
        let refused = set("a", 1000, room::OF_USER_MAX / 2).unwrap_err();
        assert!(matches!(refused, Error::Room { .. }), "{refused}");
        let listed = bench
            .host
            .list(None, Some(&Owner::User { uid: 1000 }))
            .unwrap();
        assert_eq!(listed[0].impairment, with_trace(1000));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn lists_leave_traces_out_unless_they_are_asked_for() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        for (name, uid) in [("a", 1000), ("b", 1001)] {
            bench.make(name);
            let owner = Owner::User { uid };
            let set = bench.host.set(&target(name), &owner, &with_trace(9), false);
            set.unwrap();
        }
        let file: Impairment = "trace a.trace".parse().unwrap();
        let listed = |traces_of: Option<&Owner>| {
            let listed = bench.host.list(None, traces_of).unwrap();
            [0, 1].map(|place| listed[place].impairment.clone())
        };
        assert_eq!(listed(None), [file.clone(), file.clone()]);
        let owner = Owner::User { uid: 1001 };
        assert_eq!(listed(Some(&owner)), [file.clone(), with_trace(9)]);
        // Of one owner alone there is nothing of the other's, and of nobody's nothing.
        let own = bench.host.list(Some(&owner), None).unwrap();
        assert_eq!(own.len(), 1);
        assert_eq!((&own[0].owner, &own[0].impairment), (&owner, &file));
        let nobodys = bench.host.list(Some(&Owner::User { uid: 1002 }), None);
        assert_eq!(nobodys.unwrap(), []);
    });
}

/// Whether the far end of a target's pair is reached by way of the target.
fn passes(lab: &Lab) -> bool {
    lab.shell("ip netns exec far ping -n -q -c 3 -i 0.05 -W 1 10.9.0.1 || true")
        .contains(" 0% packet loss")
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_engine_that_has_panicked_is_started_anew_with_its_targets() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        lab.shell(
            "ip netns add far
             ip link add name a type veth peer name far0 netns far
             ip addr add 10.9.0.1/24 dev a; ip link set dev a up
             ip -n far addr add 10.9.0.2/24 dev far0; ip -n far link set far0 up",
        );
        bench.make("b");
        bench.set("a").unwrap();
        bench.set("b").unwrap();
        assert!(passes(lab));
        let leaving = bench.host.begin_clear(&target("b"), false).unwrap();
        leaving.unwrap().wait().unwrap();

        bench.host.workers[0].panic();
        assert!(!passes(lab));
        assert!(matches!(
            bench.host.list(None, None),
            Err(Error::EngineGone)
        ));
        bench.look();
        assert!(passes(lab));
        assert_eq!(bench.listed(), ["a"]);
        let state = &bench.host.list(None, None).unwrap()[0].state;
        assert_eq!(*state, State::Impaired);
        // Of the one that was about to end nothing is left.
        assert_eq!(lab.run("ip -o link").matches(": swd").count(), 2);
        let leaving = bench.begin_clear("a", false);
        bench.finish_clear(&leaving);
        assert!(passes(lab));
        assert!(!std::path::Path::new(divert::FOLDER).exists());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_service_that_ends_after_a_panic_leaves_no_interface_closed() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        bench.make("a");
        bench.set("a").unwrap();
        bench.host.workers[0].panic();
        for leaving in bench.host.begin_clear_all() {
            leaving.wait().unwrap();
            bench.finish_clear(&leaving);
        }
        assert_eq!(lab.run("ip -o link").matches(": swd").count(), 0);
        assert!(!std::path::Path::new(divert::FOLDER).exists());
    });
}

fn compiled(text: &str) -> Compiled {
    Compiled::new(&text.parse().unwrap()).unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_engine_goes_on_when_no_descriptor_is_left() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        bench.make("a");
        bench.set("a").unwrap();
        let limit = rustix::process::Rlimit {
            current: Some(256),
            ..rustix::process::getrlimit(rustix::process::Resource::Nofile)
        };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
        let open = || std::fs::File::open("/dev/null").ok();
        let all: Vec<_> = std::iter::from_fn(open).collect();
        // Each is another configuration for the engine to wait by.
        let id = bench.host.entries.values().next().unwrap().id;
        for text in ["delay 2ms", "delay 3ms", "delay 4ms"] {
            bench.host.workers[0].configure().unwrap().unwrap();
            std::thread::sleep(std::time::Duration::from_millis(50));
            let changed = bench.host.workers[0].change(id, &compiled(text));
            changed.unwrap().unwrap();
            bench.host.workers[0].report(Vec::new()).unwrap();
        }
        assert!(!all.is_empty() && !bench.host.workers[0].has_ended());
    });
}

/// What can't be remembered isn't done: it would be undone by the service's next start.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn nothing_changes_where_the_disk_is_full() {
    lab::run(|lab| {
        lab.shell("mkdir /run/lab/targets; mount -t tmpfs -o size=64k tmpfs /run/lab/targets");
        let mut bench = Bench::new(lab);
        bench.make("a");
        bench.make("b");
        bench.set("a").unwrap();
        lab.shell("head -c 1M /dev/zero > /run/lab/targets/full 2> /dev/null || true");
        for name in ["a", "b"] {
            let refused = bench.impair(&target(name), "on-death open; delay 2ms");
            assert!(matches!(refused, Err(Error::State { .. })), "{refused:?}");
        }
        let listed = bench.host.list(None, None).unwrap();
        assert_eq!(bench.listed(), ["a"]);
        assert_eq!(listed[0].impairment, "delay 1ms".parse().unwrap());
        let (remembered, errors) = bench.host.memory.read().unwrap();
        assert_eq!(remembered[0].impairment, listed[0].impairment);
        assert!(remembered.len() == 1 && errors.is_empty());
        // Nor is there anything of the other.
        assert_eq!(lab.run("ip -o link").matches(": swd").count(), 2);
        assert_eq!(std::fs::read_dir(divert::FOLDER).unwrap().count(), 1);
        let files = std::fs::read_dir("/run/lab/targets").unwrap();
        assert_eq!(files.count(), 2, "the target's, and what fills the disk");
        lab.run("rm /run/lab/targets/full");
        bench.impair(&target("a"), "delay 2ms").unwrap();
    });
}

/// The kernel gives a new namespace the lowest inode that is free, so often that of one that has just gone.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_remembered_of_a_namespace_is_not_taken_for_another_with_its_inode() {
    lab::run(|lab| {
        let far = make_far(lab, "near0");
        let mut bench = Bench::new(lab);
        bench.impair(&far, "delay 1ms").unwrap();
        // As SIGKILL does.
        drop(bench);
        let mut bench = Bench::new(lab);
        bench.host.recall().unwrap();
        assert_eq!(bench.listed(), ["far0"]);
        let (mut remembered, _) = bench.host.memory.read().unwrap();
        drop(bench);
        lab.run("ip netns del far");
        assert!(goes(lab, "near0"));
        make_far(lab, "near1");
        let namespace = Namespace::open(far.netns.as_deref()).unwrap();
        let mut old = remembered.remove(0);
        old.inode = namespace.inode;
        old.ifindex = index_in(&namespace, &far).unwrap().unwrap().0;
        let mut bench = Bench::new(lab);
        bench.host.memory.write(&old).unwrap();
        bench.host.recall().unwrap();
        assert_eq!(bench.listed(), [""; 0]);
        assert!(bench.host.memory.read().unwrap().0.is_empty());
    });
}

/// By another folder: what that has to say of the interface is what an earlier process of its own has left.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_another_service_impairs_by_now_is_left_to_it() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        let far = make_far(lab, "near0");
        bench.impair(&far, "delay 1ms").unwrap();
        let old = bench.host.memory.read().unwrap().0.remove(0);
        // As SIGKILL does.
        drop(bench);
        let mut other = Bench::in_folder(lab, "others");
        other.impair(&far, "egress blackhole").unwrap();
        let mut bench = Bench::new(lab);
        bench.host.memory.write(&old).unwrap();
        bench.host.recall().unwrap();
        assert_eq!(bench.listed(), [""; 0]);
        assert!(bench.host.memory.read().unwrap().0.is_empty());
        other.look();
        assert_eq!(
            other.host.list(None, None).unwrap()[0].state,
            State::Impaired,
            "nothing has been detached"
        );
        assert!(!passes(lab));
    });
}

/// As of an interface that has the machine's default route.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_insisted_once_has_a_change_taken_up_again_too() {
    lab::run(|lab| {
        let mut bench = Bench::new(lab);
        bench.make("a");
        let owner = Owner::User { uid: 0 };
        let delay = "delay 1ms".parse().unwrap();
        bench.host.set(&target("a"), &owner, &delay, true).unwrap();
        bench.set("a").unwrap();
        assert!(bench.host.memory.read().unwrap().0[0].force);
    });
}
