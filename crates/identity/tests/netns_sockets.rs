//! The cases of `docs/identity.md`, a row each: what applications do, what they see, and what the kernel and a peer
//! on the wire say of it.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "netns_sockets/rows.rs"]
mod rows;
#[path = "netns_sockets/stage.rs"]
mod stage;
#[path = "netns_sockets/tcp_rows.rs"]
mod tcp_rows;

use std::time::Duration;

use sandwire_testlab::{
    guest::kernel::Series,
    lab::{self, Lab},
};
use serde_json::json;

use self::{
    rows::{ROWS, Row},
    stage::{Application, Stage},
    tcp_rows::{OTHERWISE, TCP_ROWS},
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
    assert_rows(&mut Stage::set(lab), ROWS);
}

/// Cases of the table that are about TCP alone must be the same without programs on packets; those that aren't, and those of
/// other sockets, are in a table of their own.
fn assert_tcp_alone_is_as_the_tables_say(lab: &Lab) {
    let mut stage = Stage::set_with(lab, true);
    let is_of_tcp = |row: &&Row| {
        let others = ["udp(", "SOCK_DGRAM", "SOCK_RAW"];
        let steps = row.steps.iter();
        let mut codes = steps.filter(|(who, ..)| *who != "host" && *who != "peer");
        codes.all(|(_, code, _)| others.iter().all(|other| !code.contains(other)))
            && !OTHERWISE.contains(&row.case)
    };
    let shared: Vec<Row> = ROWS.iter().filter(is_of_tcp).copied().collect();
    assert!(shared.len() >= 20, "{}", shared.len());
    assert_rows(&mut stage, &shared);
    assert_rows(&mut stage, TCP_ROWS);
}

fn assert_rows(stage: &mut Stage, rows: &[Row]) {
    let mut wrong = Vec::new();
    for row in rows {
        for (who, code, expected) in row.steps {
            let found = stage.step(who, code).to_string();
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
fn tcp_alone_is_as_the_tables_say() {
    lab::run_within(DEADLINE, |lab| {
        assert_tcp_alone_is_as_the_tables_say(lab);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn tcp_alone_is_as_the_tables_say_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, DEADLINE, |lab| {
        assert_tcp_alone_is_as_the_tables_say(lab);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn udp_leaves_a_host_that_translates_its_source() {
    lab::run_within(DEADLINE, |lab| {
        assert_udp_leaves_a_host_that_translates_its_source(lab);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn udp_leaves_a_host_that_translates_its_source_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, DEADLINE, |lab| {
        assert_udp_leaves_a_host_that_translates_its_source(lab);
    });
}

fn assert_udp_leaves_a_host_that_translates_its_source(lab: &Lab) {
    let mut stage = Stage::set(lab);
    stage::masquerade(lab);
    stage.run(
        "peer",
        "s = udp('192.0.2.2', 9000); t = udp('2001:db8::2', 9000)",
    );
    let to4 = ("s", "192.0.2.1", "192.0.2.2");
    let to_mapped = ("s", "192.0.2.1", "::ffff:192.0.2.2");
    let to6 = ("t", "2001:db8::1", "2001:db8::2");
    let ways = [
        (to4, "fresh(SOCK_DGRAM, AF_INET)"),
        (to4, "udp('0.0.0.0', 0)"),
        (to4, "udp('10.77.0.9', 0)"),
        (to_mapped, "fresh(SOCK_DGRAM, AF_INET6)"),
        (to_mapped, "udp('::', 0)"),
        (to6, "fresh(SOCK_DGRAM, AF_INET6)"),
        (to6, "udp('::', 0)"),
        (to6, "udp('fd77::9', 0)"),
    ];
    let mut wrong = Vec::new();
    for ((server, host, address), made) in ways {
        for send in [
            "c.sendto(b'question', to)",
            "c.connect(to); c.send(b'question')",
        ] {
            // This one has no source that it could be connected from.
            if made == "udp('::', 0)" && send.starts_with("c.connect") {
                continue;
            }
            let code = format!("c = {made}; to = ({address:?}, 9000); {send}");
            let sent = stage.run("a", &code);
            if !sent.is_null() {
                wrong.push(format!("{code}: {sent}"));
                continue;
            }
            assert_eq!(
                stage.run("peer", &format!("r = heard({server})")),
                json!(["question", host]),
                "{code}"
            );
            assert_eq!(
                stage.run("a", "r = answer(c)"),
                json!(["answer", address]),
                "{code}"
            );
        }
    }
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
    // From a group it sends by an own address, too, as long as it isn't connected.
    let from_group = "c = udp('224.0.0.1', 0); c.sendto(b'question', ('192.0.2.2', 9000))";
    assert_eq!(stage.run("a", from_group), json!(null));
    assert_eq!(stage.run("peer", "r = heard(s)[1]"), "192.0.2.1");
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
        assert_eq!(bound, json!(["0.0.0.0"]));
        drop((early, elsewhere, peer, wire));
    });
}
