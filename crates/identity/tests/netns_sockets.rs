//! The cases of `docs/identity.md`, a row each: what applications do, what they see, and what the kernel and a peer
//! on the wire say of it.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "netns_sockets/rows.rs"]
mod rows;
#[path = "netns_sockets/stage.rs"]
mod stage;

use std::time::Duration;

use sandwire_testlab::{
    guest::kernel::Series,
    lab::{self, Lab},
};

use self::{
    rows::ROWS,
    stage::{Application, Stage},
};

/// Each row waits for what it expects, and for what must not come half a second.
const DEADLINE: Duration = Duration::from_secs(600);

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn every_case_is_as_the_table_says() {
    lab::run_within(DEADLINE, |lab| {
        assert_every_case_is_as_the_table_says(lab);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn every_case_is_as_the_table_says_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, DEADLINE, |lab| {
        assert_every_case_is_as_the_table_says(lab);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn every_case_is_as_the_table_says_on_linux_6_12() {
    lab::run_on(Series::Linux6_12, DEADLINE, |lab| {
        assert_every_case_is_as_the_table_says(lab);
    });
}

fn assert_every_case_is_as_the_table_says(lab: &Lab) {
    let mut stage = Stage::set(lab);
    let mut wrong = Vec::new();
    for row in ROWS {
        for (who, code, expected) in row.steps {
            let found = stage.run(who, code).to_string();
            if expected.split('|').all(|expected| found != expected) {
                wrong.push(format!(
                    "{}: {who}: {code}\n    gives {found} instead of {expected}",
                    row.case
                ));
                break;
            }
        }
        stage.reset();
    }
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_socket_belongs_to_the_cgroup_that_it_was_made_in() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::set(lab);
        let outside = stage.cgroups.make("outside");
        let id = stage.applications[0].1.id();
        stage.run("peer", "s = udp('192.0.2.2', 9000)");
        stage.run("a", "old = fresh(SOCK_DGRAM, AF_INET)");
        std::fs::write(outside.join("cgroup.procs"), id.to_string()).unwrap();
        let send = "c.sendto(b'question', ('192.0.2.2', 9000))";
        stage.run("a", &format!("c = old; {send}"));
        assert_eq!(stage.run("peer", "r = heard(s)[1]"), "10.77.0.1");
        stage.run("a", &format!("c = fresh(SOCK_DGRAM, AF_INET); {send}"));
        assert_eq!(stage.run("peer", "r = heard(s)[1]"), "192.0.2.1");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn sockets_from_before_and_in_other_namespaces_are_left_alone() {
    lab::run_within(DEADLINE, |lab| {
        let wire = stage::wire(lab);
        let mut cgroups = stage::Cgroups::new();
        let cgroup = cgroups.make("web");
        let mut early = Application::start(Some(&cgroup), None);
        early.run("old = listen('0.0.0.0', 8080); c = fresh(SOCK_DGRAM, AF_INET)");
        let identities = sandwire_identity::Identities::new(stage::folder());
        let new = stage::new_identity(&cgroup, &["10.77.0.1"]);
        identities.add(&new).unwrap();
        let mut peer = Application::start(None, Some("peer"));
        peer.run("s = udp('192.0.2.2', 9000)");
        early.run("c.sendto(b'question', ('192.0.2.2', 9000))");
        assert_eq!(peer.run("r = heard(s)[1]"), "192.0.2.1");
        peer.run("d = dial('192.0.2.1', 8080)");
        assert_eq!(early.run("r = accepted(old)[0]"), "192.0.2.1");
        // In another namespace the cgroup's sockets are those of that namespace.
        let mut elsewhere = Application::start(Some(&cgroup), Some("peer"));
        let bound = elsewhere.run("l = listen('0.0.0.0', 8081); r = bound('tcp', 8081)");
        assert_eq!(bound, serde_json::json!(["0.0.0.0"]));
        drop((early, elsewhere, peer, wire));
    });
}
