//! An identity that goes on in a cgroup that is made anew, as of a service that is started again: judged by what old and new
//! sockets are told, by a peer on the wire and by what is left.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "netns_sockets/stage.rs"]
#[allow(dead_code, reason = "the other tests have more players")]
mod stage;

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use sandwire_identity::{Error, Identities, Identity, State};
use sandwire_testlab::lab::{self, Lab};

use self::stage::{Application, Cgroups, folder, new_identity, policy};

const DEADLINE: Duration = Duration::from_secs(600);
const DIAL_OUT: &str =
    "s = fresh(SOCK_DGRAM, AF_INET); s.connect(('192.0.2.2', 9)); r = s.getsockname()[0]";

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "not in a minute: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A cgroup whose application leaves it with its sockets, so that it can be made anew.
fn leave(application: &Application, cgroup: &Path) {
    let parent = cgroup.parent().unwrap();
    fs::write(parent.join("cgroup.procs"), application.id().to_string()).unwrap();
    until("nobody is in it", || fs::remove_dir(cgroup).is_ok());
    fs::create_dir(cgroup).unwrap();
}

/// Numbers of the cgroups that have programs.
fn linked() -> Vec<u64> {
    let entries = fs::read_dir(folder().join("v2/links")).unwrap();
    let numbers = entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse());
    let mut numbers: Vec<u64> = numbers.map(Result::unwrap).collect();
    numbers.sort_unstable();
    numbers
}

struct Scene {
    identities: Identities,
    cgroup: PathBuf,
    cgroups: Cgroups,
    /// Of the cgroup of before, with a listener and a socket of UDP.
    old: Application,
    first: Identity,
}

/// `web`, whose cgroup has been made anew.
fn set(tcp_only: bool) -> Scene {
    let mut cgroups = Cgroups::new();
    let cgroup = cgroups.make("web");
    let identities = Identities::new(folder());
    let mut new = new_identity(&cgroup, &["10.77.0.1", "10.77.0.9", "fd77::1"]);
    new.tcp_only = tcp_only;
    let first = identities.add(&new).unwrap();
    let mut old = Application::start(Some(&cgroup), None);
    old.run("l = listen('::', 8080)");
    if !tcp_only {
        old.run("u = udp('0.0.0.0', 5353); f = fresh(SOCK_DGRAM, AF_INET)");
    }
    leave(&old, &cgroup);
    Scene {
        identities,
        cgroup,
        cgroups,
        old,
        first,
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn old_and_new_sockets_are_of_one_identity_until_the_last_old_one_is_closed() {
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let before = lab.run("ip -o addr show dev lo");
        let mut scene = set(false);
        let mut new = new_identity(&scene.cgroup, &["10.77.0.1", "10.77.0.9", "fd77::1"]);
        let second = scene.identities.add(&new).unwrap();
        assert_eq!(
            (second.number, second.state),
            (scene.first.number, State::Active)
        );
        assert_ne!(second.cgroup_id, scene.first.cgroup_id);
        assert_eq!(scene.identities.list().unwrap().len(), 1);
        assert_eq!(linked(), [scene.first.cgroup_id, second.cgroup_id]);

        let mut web = Application::start(Some(&scene.cgroup), None);
        let mut host = Application::start(None, None);
        let mut peer = Application::start(None, Some("peer"));
        assert_eq!(web.run(DIAL_OUT), "10.77.0.1");
        // The old listener is reached as before, at all addresses and from inside.
        for address in ["10.77.0.1", "10.77.0.9", "fd77::1"] {
            peer.run(&format!("c = dial('{address}', 8080)"));
            let reached = scene.old.run("r = accepted(l)")[0].clone();
            let is_meant = reached.as_str().is_some_and(|text| text.ends_with(address));
            assert!(is_meant, "{reached}, not {address}");
        }
        web.run("c = dial('127.0.0.1', 8080)");
        let reached = scene.old.run("r = accepted(l)");
        assert_eq!(reached[0], "::ffff:127.0.0.1");
        // Dropped in silence, as it is of a socket on the wildcard.
        let loopback = format!("dial('{}', 8080, patience=1)", second.loopback[0]);
        assert_eq!(host.run(&loopback), "TIMEOUT");
        web.run("l = listen('::', 8081)");
        peer.run("c = dial('10.77.0.9', 8081)");
        assert_eq!(web.run("r = accepted(l)")[0], "::ffff:10.77.0.9");

        // The policy is that of both, and the programs are exchanged for both.
        let send = "r = f.sendto(b'x', ('192.0.2.2', 9))";
        assert_eq!(scene.old.run(send), 1);
        let denied = policy(r#"{"egress": {"default": "deny"}}"#);
        scene.identities.set_policy("web", &denied).unwrap();
        assert_eq!(scene.old.run(send), "EPERM");
        assert_eq!(scene.identities.renew().unwrap(), 1);
        assert_eq!(scene.old.run(send), "EPERM");
        assert_eq!(
            web.run("f = fresh(SOCK_DGRAM, AF_INET); r = f.sendto(b'x', ('192.0.2.2', 9))"),
            "EPERM"
        );

        // Once more: the policy that is asked for is the new one's.
        leave(&web, &scene.cgroup);
        new.policy = policy("{}");
        let third = scene.identities.add(&new).unwrap();
        assert_eq!(linked().len(), 3);
        assert_eq!(scene.old.run(send), 1);

        // Those in between go; the identity stays, also while only the oldest has sockets and its own cgroup is gone.
        drop(web);
        until("the second cgroup has ended", || {
            scene.identities.repair().unwrap();
            linked() == [scene.first.cgroup_id, third.cgroup_id]
        });
        fs::remove_dir(&scene.cgroup).unwrap();
        until("the third has ended", || {
            assert_eq!(scene.identities.repair().unwrap().ended, [""; 0]);
            scene.identities.show("web").unwrap().state == State::Dying
        });
        peer.run("c = dial('10.77.0.9', 8080)");
        assert_eq!(scene.old.run("r = accepted(l)")[0], "::ffff:10.77.0.9");
        assert_eq!(scene.old.run(send), 1);
        drop(scene.old);
        until("it ends", || scene.identities.list().unwrap().is_empty());
        assert_eq!(lab.run("ip -o addr show dev lo"), before);
        assert_eq!(linked(), [0_u64; 0]);
        fs::create_dir(&scene.cgroup).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn former_cgroups_go_with_the_identity() {
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let before = lab.run("ip -o addr show dev lo");
        for tcp_only in [false, true] {
            let mut scene = set(tcp_only);
            let mut new = new_identity(&scene.cgroup, &["10.77.0.1", "10.77.0.9", "fd77::1"]);
            new.tcp_only = tcp_only;
            scene.identities.add(&new).unwrap();
            scene.identities.remove("web").unwrap();
            assert_eq!(linked(), [0_u64; 0]);
            assert_eq!(lab.run("ip -o addr show dev lo"), before);
            assert_eq!(scene.identities.list().unwrap(), []);
            // Without rules: another that has the name, or one day the number, is none of theirs.
            let other = scene.cgroups.make("other");
            scene
                .identities
                .add(&new_identity(&other, &["10.77.0.2"]))
                .unwrap();
            let seen = "s = fresh(SOCK_STREAM, AF_INET); r = s.connect_ex(('127.0.0.1', 9))";
            assert_eq!(scene.old.run(seen), 111);
            scene.identities.remove("other").unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn one_with_other_settings_and_too_many_wait_until_the_sockets_are_closed() {
    lab::run_within(DEADLINE, |_| {
        let scene = set(false);
        let asked = new_identity(&scene.cgroup, &["10.77.0.1", "10.77.0.9", "fd77::1"]);
        type Change = fn(&mut sandwire_identity::NewIdentity);
        let changes: [Change; 4] = [
            |new| new.addresses.truncate(1),
            |new| new.allowed.loopback = true,
            |new| new.tcp_only = true,
            |new| new.declared_by = Some("default".parse().unwrap()),
        ];
        for change in changes {
            let mut new = asked.clone();
            change(&mut new);
            let error = scene.identities.add(&new).unwrap_err();
            assert!(matches!(error, Error::Dying { .. }), "{error}");
            assert_eq!(linked(), [scene.first.cgroup_id]);
        }
        let mut kept = Vec::new();
        for _ in 0..16 {
            scene.identities.add(&asked).unwrap();
            let mut application = Application::start(Some(&scene.cgroup), None);
            application.run("s = fresh(SOCK_STREAM, AF_INET)");
            leave(&application, &scene.cgroup);
            kept.push(application);
        }
        let error = scene.identities.add(&asked).unwrap_err();
        assert!(matches!(error, Error::Dying { .. }), "{error}");
        kept.remove(3);
        until("another one fits in", || {
            scene.identities.add(&asked).is_ok()
        });
        scene.identities.remove("web").unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn one_that_the_kernel_refuses_leaves_the_policy_as_it_was() {
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let mut scene = set(false);
        let before = scene.identities.policy("web").unwrap();
        let mut new = new_identity(&scene.cgroup, &["10.77.0.1", "10.77.0.9", "fd77::1"]);
        new.policy = policy(r#"{"egress": {"default": "deny"}}"#);
        let hook = format!(
            "{} sock_create pinned {}/v2/programs/*/on_sock_create",
            scene.cgroup.display(),
            folder().display()
        );
        // Without flags: it shares the hook with nobody.
        lab.shell(&format!("bpftool cgroup attach {hook}"));
        let refused = scene.identities.add(&new);
        assert!(
            matches!(refused, Err(Error::NotShared { .. })),
            "{refused:?}"
        );
        assert_eq!(scene.identities.policy("web").unwrap(), before);
        let send = "r = f.sendto(b'x', ('192.0.2.2', 9))";
        assert_eq!(scene.old.run(send), 1);
        assert_eq!(linked(), [scene.first.cgroup_id]);
        lab.shell(&format!("bpftool cgroup detach {hook}"));
        scene.identities.add(&new).unwrap();
        assert_eq!(scene.old.run(send), "EPERM");
        scene.identities.remove("web").unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_a_crash_left_of_a_takeover_is_taken_back_or_finished() {
    lab::run_within(DEADLINE, |lab| {
        let _wire = stage::wire(lab);
        let mut scene = set(false);
        let mut new = new_identity(&scene.cgroup, &["10.77.0.1", "10.77.0.9", "fd77::1"]);
        let mut steps = Vec::new();
        new.policy = policy(r#"{"cloud_metadata": true}"#);
        scene
            .identities
            .add_watched(&new, &mut |step| steps.push(step))
            .unwrap();
        assert_eq!(steps.last(), Some(&"former"), "{steps:?}");
        for fatal in 0..steps.len() {
            let policies = [r#"{}"#, r#"{"cloud_metadata": true}"#];
            new.policy = policy(policies[fatal % 2]);
            // Nobody has made a socket in it: it is gone at once or takes a moment.
            fs::remove_dir(&scene.cgroup).unwrap();
            fs::create_dir(&scene.cgroup).unwrap();
            let mut step = 0;
            let mut watch = |_: &'static str| {
                assert!(step != fatal, "dies here");
                step += 1;
            };
            let died = catch_unwind(AssertUnwindSafe(|| {
                scene.identities.add_watched(&new, &mut watch)
            }));
            assert!(died.is_err(), "step {fatal}");
            let seen = scene.identities.snapshot().unwrap();
            assert_eq!(seen.len(), 1, "step {fatal}");
            assert_still_whole(lab, &mut scene, fatal);
            let added = scene.identities.add(&new);
            let is_there = matches!(&added, Err(Error::CgroupTaken { .. }));
            assert!(
                added.is_ok() || is_there,
                "{:?} after step {fatal}",
                added.err()
            );
            let mut web = Application::start(Some(&scene.cgroup), None);
            assert_eq!(web.run(DIAL_OUT), "10.77.0.1", "after step {fatal}");
            drop(web);
            until("it is free", || {
                fs::read_to_string(scene.cgroup.join("cgroup.events"))
                    .unwrap()
                    .contains("populated 0")
            });
        }
        scene.identities.remove("web").unwrap();
        assert_eq!(linked(), [0_u64; 0]);
    });
}

/// The identity is there once, and sockets of before are its own.
fn assert_still_whole(lab: &Lab, scene: &mut Scene, fatal: usize) {
    let listed = scene.identities.list().unwrap();
    assert_eq!(listed.len(), 1, "after step {fatal}: {listed:?}");
    assert_eq!(listed[0].number, scene.first.number, "after step {fatal}");
    let now = lab.run("ip -o addr show dev lo");
    assert!(now.contains("10.77.0.9/32"), "after step {fatal}: {now}");
    let mut peer = Application::start(None, Some("peer"));
    peer.run("c = dial('10.77.0.9', 8080)");
    let reached = scene.old.run("r = accepted(l)");
    assert_eq!(reached[0], "::ffff:10.77.0.9", "after step {fatal}");
}
