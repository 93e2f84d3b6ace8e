//! Groups of sandboxes that talk to each other, as policies say it: both must, and it ends when one doesn't any more.

use sandwire_testlab::{fake_guest::FakeGuest, lab, sandwire::Lease};
use serde_json::{Value, json};

use crate::{
    assert_in_touch,
    ebpf::{SECOND, World, wait_until},
};

type Sandbox = (Lease, FakeGuest);

fn policy(group: &str, talks_to: &[&str]) -> Value {
    json!({"uplink": "route", "group": group, "talks_to": talks_to})
}

#[track_caller]
fn assert_reaches(from: &Sandbox, to: &Sandbox, answers: bool) {
    let patience = if answers { 5 * SECOND } else { SECOND / 2 };
    for address in [to.0.ipv4, to.0.ipv6] {
        let answer = from.1.ping(address, patience);
        assert_eq!(answer.is_ok(), answers, "{address}: {answer:?}");
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn groups_talk_while_each_names_the_other() {
    // What nobody answers takes its time, often.
    lab::run_within(300 * SECOND, |lab| {
        let mut world = World::start(lab, "route", 2);
        let [web, database, other] = [("netns", "web"), ("host", "db"), ("host", "other")]
            .map(|(pool, name)| world.guest(pool, name));
        for sandbox in [&web, &database, &other] {
            assert_in_touch(&sandbox.0, &sandbox.1);
        }
        let set = |world: &World, name: &str, group: &str, talks_to: &[&str]| {
            let policy = policy(group, talks_to);
            world.daemon.set_policy(name, &policy).unwrap();
        };
        let assert_talk = |talk: bool| {
            assert_reaches(&web, &database, talk);
            assert_reaches(&database, &web, talk);
            for (from, to) in [(&web, &other), (&other, &web), (&database, &other)] {
                assert_reaches(from, to, false);
            }
        };
        set(&world, "web", "front", &["back", "elsewhere"]);
        set(&world, "db", "back", &[]);
        set(&world, "other", "elsewhere", &["back"]);
        assert_talk(false);
        set(&world, "db", "back", &["front"]);
        assert_talk(true);
        world.daemon.kill().unwrap();
        assert_talk(true);
        world.daemon.restart().unwrap();
        assert_talk(true);
        set(&world, "web", "front", &["elsewhere"]);
        assert_talk(false);
        // A new name for a group is another group, also for who named the old one.
        set(&world, "web", "front", &["back"]);
        assert_talk(true);
        set(&world, "db", "rear", &["front"]);
        assert_talk(false);
        let drops = || world.detail(&other.0)["traffic"]["drops"]["other_sandbox"].clone();
        wait_until("drops are told", 5 * SECOND, || {
            drops().as_u64().is_some_and(|drops| drops > 0)
        });
    });
}
