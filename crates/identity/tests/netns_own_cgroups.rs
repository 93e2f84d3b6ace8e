//! Cgroups for commands, made by several at once.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "netns_sockets/stage.rs"]
#[allow(dead_code, reason = "the other tests have more players")]
mod stage;

use std::{
    fs,
    io::Read,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use sandwire_identity::{Identities, OwnCgroup};
use sandwire_testlab::lab;

use self::stage::{Cgroups, folder, new_identity};

const DEADLINE: Duration = Duration::from_secs(300);

/// Each that is made looks for what killed commands have left, and must not take others' for that.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn cgroups_that_are_made_at_once_stay() {
    lab::run_within(DEADLINE, |_| {
        let cgroups = Cgroups::new();
        let make = |maker: usize| {
            for round in 0..300 {
                let name = format!("{maker}-{round}");
                let made = OwnCgroup::create(Some(cgroups.root()), &name).unwrap();
                thread::yield_now();
                assert!(made.path().is_dir(), "{name} is gone");
            }
        };
        thread::scope(|scope| {
            for maker in 0..8 {
                scope.spawn(move || make(maker));
            }
        });
        let left = fs::read_dir(cgroups.root()).unwrap().flatten();
        let left = left.filter(|entry| entry.file_type().unwrap().is_dir());
        assert_eq!(left.count(), 0);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn nobody_is_killed_who_has_the_name_of_a_cgroup_that_is_gone() {
    lab::run_within(DEADLINE, |_| {
        let mut cgroups = Cgroups::new();
        let made = OwnCgroup::create(Some(cgroups.root()), "one").unwrap();
        let path = made.path().to_owned();
        fs::remove_dir(&path).unwrap();
        assert_eq!(cgroups.make("sandwire-run-one"), path);
        let mut other = Command::new("sleep").arg("600").spawn().unwrap();
        fs::write(path.join("cgroup.procs"), other.id().to_string()).unwrap();
        drop(made);
        // Who is killed is gone by then.
        assert_eq!(other.try_wait().unwrap(), None);
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(path.is_dir());
    });
}

/// As for a daemon in a container, which has its own view of cgroups and the host's bpffs.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_cannot_see_a_cgroup_does_not_take_its_identity_away() {
    lab::run_within(DEADLINE, |lab| {
        let cgroups = Cgroups::new();
        let identities = Identities::new(folder());
        let made = OwnCgroup::create(Some(cgroups.root()), "one").unwrap();
        let mut new = new_identity(made.path(), &["10.77.0.1"]);
        new.own_cgroup = true;
        let added = identities.add(&new).unwrap();
        lab.run("mount -t tmpfs none /sys/fs/cgroup");
        identities.repair().unwrap();
        lab.run("umount /sys/fs/cgroup");
        assert_eq!(identities.list().unwrap(), [added]);
        identities.remove("sandwire-run-one").unwrap();
    });
}

/// Anybody may lock what he may read; who makes a cgroup, and who looks whether it is abandoned, would wait for him.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn no_stranger_holds_up_who_makes_a_cgroup() {
    const STRANGER: &str = "\
import fcntl, os, sys, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print('ready', flush=True)
while True:
    try: folder = os.open(sys.argv[1], os.O_RDONLY)
    except OSError: continue
    try:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        time.sleep(600)
    except OSError: os.close(folder)";
    lab::run_within(DEADLINE, |_| {
        let cgroups = Cgroups::new();
        let path = cgroups.root().join("sandwire-run-one");
        let mut stranger = Command::new("python3")
            .args(["-c", STRANGER])
            .arg(&path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = [0; 6];
        stranger
            .stdout
            .take()
            .unwrap()
            .read_exact(&mut ready)
            .unwrap();
        let root = cgroups.root().to_owned();
        let (made, rounds) = mpsc::channel();
        thread::spawn(move || {
            for round in 0..2000 {
                drop(OwnCgroup::create(Some(&root), "one").unwrap());
                let _ = made.send(round);
            }
        });
        while let Ok(round) = rounds.recv_timeout(Duration::from_secs(10)) {
            if round == 1999 {
                break;
            }
        }
        let held_up = path.is_dir();
        stranger.kill().unwrap();
        stranger.wait().unwrap();
        assert!(!held_up, "it waits for a stranger");
    });
}
