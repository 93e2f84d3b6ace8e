//! A configuration that is exchanged while the relays run.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    thread,
    time::Duration,
};

use sandwire_kernel_net::tcp;
use sandwire_testlab::lab;

use super::{DEADLINE, everything_works, fetch};
use crate::{
    ends::{connection_to, is_reset, running},
    stage::{MARKER, Stage, wait_for},
};

const FETCH: &str = "curl -sS --max-time 60 http://198.51.100.7:8080/page";
const READ: &str = "the configuration is read again";
const REFUSED: &str = "the configuration stays as it was";
const LAST: &str = "via = \"beyond\"\n";

fn is_alive([caller, callee]: &[TcpStream; 2]) {
    for (mut from, mut to) in [(caller, callee), (callee, caller)] {
        let mut answer = [0; 4];
        from.write_all(b"more").unwrap();
        to.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"more");
    }
}

/// Sends until that is refused.
fn send_on(mut stream: &TcpStream) -> ErrorKind {
    loop {
        match stream.write_all(MARKER.as_bytes()) {
            Ok(()) => thread::sleep(Duration::from_micros(200)),
            Err(error) => return error.kind(),
        }
    }
}

fn is_cut(refused: ErrorKind) {
    let is_so = [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe].contains(&refused);
    assert!(is_so, "{refused}");
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_not_redirected_any_more_is_cut_before_it_can_leave_and_the_rest_goes_on() {
    lab::run_within(DEADLINE, |lab| {
        let stage = running("auto");
        let rules =
            || lab.run("ip rule") + &lab.run("ip -6 rule") + &lab.run("nft -s list ruleset");
        let before = rules();
        let kept = connection_to(&stage, "198.51.100.7:4010");
        let [caller, callee] = connection_to(&stage, "198.51.100.7:4011");
        let capture = stage.capture();
        let narrower = format!("protocols = [\"tcp\"]\nports = [4010, 8080]\n{LAST}");
        stage.exchange("host", LAST, &narrower);
        thread::scope(|scope| {
            let sending = scope.spawn(|| send_on(&caller));
            let mut read = &callee;
            scope.spawn(move || while read.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {});
            assert!(stage.reload("host").contains(READ), "{}", stage.host_log());
            is_cut(sending.join().unwrap());
        });
        is_alive(&kept);
        fetch(&stage);
        capture.has_nothing_in_the_clear(true);
        let relayed = stage.report_of("host").matches("198.51.100.7:4011").count();
        let beside = connection_to(&stage, "198.51.100.7:4012");
        is_alive(&beside);
        // Else the server would send it again, in the clear as it came.
        wait_for("what was sent beside the relay is acknowledged", || {
            let unacknowledged = |end| tcp::sent(end).unwrap().unacknowledged;
            beside.iter().all(|end| unacknowledged(end) == 0)
        });
        stage.exchange("host", &narrower, LAST);
        assert!(stage.reload("host").contains(READ), "{}", stage.host_log());
        assert_eq!(rules(), before);
        let capture = stage.capture();
        // It was begun without the relay.
        is_cut(send_on(&beside[0]));
        is_alive(&kept);
        everything_works(&stage);
        capture.has_nothing_in_the_clear(true);
        assert_eq!(relayed, 1);
        assert!(!stage.report_of("host").contains("198.51.100.7:4012"));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_cgroup_that_is_added_is_steered_and_the_others_keep_their_names() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        let other = stage.other_sender();
        stage.exchange("host", &other, "");
        stage.exchange("host", ", \"other\"]", "]");
        stage.start_peer();
        stage.start_host();
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        let batch = "[[sender]]\nname = \"batch\"\n";
        stage.exchange("host", batch, &format!("{other}{batch}"));
        stage.exchange("host", "\"batch\"]", "\"batch\", \"other\"]");
        assert!(stage.reload("host").contains(READ), "{}", stage.host_log());
        let capture = stage.capture();
        for _ in 0..2 {
            assert_eq!(stage.in_cgroup(FETCH), MARKER);
        }
        assert_eq!(stage.in_other_cgroup(FETCH), MARKER);
        everything_works(&stage);
        capture.has_nothing_in_the_clear(true);
        let senders = |name: &str| {
            let report = stage.report_of("peer");
            report.matches(&format!(r#""sender":"{name}""#)).count()
        };
        wait_for("all is reported", || {
            senders("batch") + senders("other") == 4
        });
        assert_eq!((senders("batch"), senders("other")), (3, 1));
        // And gone again.
        stage.exchange("host", &other, "");
        stage.exchange("host", ", \"other\"]", "]");
        assert!(stage.reload("host").contains(READ), "{}", stage.host_log());
        assert_eq!(stage.in_other_cgroup(FETCH), MARKER);
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        wait_for("all is reported", || senders("batch") == 4);
        assert_eq!(senders("other"), 1);
    });
}

/// Places are numbered anew at a start, and what comes to them before the kernel is told is by the former numbers.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn nothing_is_taken_for_another_cgroup_s_when_the_relay_is_started_anew() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        stage.kill_host();
        let (batch, other) = ("[[sender]]\nname = \"batch\"\n", stage.other_sender());
        stage.exchange("host", &other, "");
        stage.exchange("host", batch, &format!("{other}{batch}"));
        // For a while, without end and without waiting for it.
        stage.in_cgroup(&format!(
            "sh -c 'timeout 20 python3 -c \"$0\" >/dev/null 2>&1 &' 'import socket, time\n\
             s = socket.socket(type=socket.SOCK_DGRAM)\n\
             while True:\n\
             \x20   s.sendto(b\"{MARKER}\", (\"198.51.100.7\", 7))\n\
             \x20   time.sleep(0.0001)'"
        ));
        thread::sleep(Duration::from_secs(1));
        stage.start_host();
        wait_for("it has ended", || {
            stage.report_of("host").contains(r#""sender":"batch""#)
        });
        let report = stage.report_of("host");
        assert!(!report.contains(r#""sender":"other""#), "{report}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_configuration_that_is_wrong_changes_nothing() {
    lab::run_within(DEADLINE, |lab| {
        let stage = running("auto");
        let rules = || lab.run("ip rule") + &lab.run("nft -s list ruleset");
        let before = rules();
        let kept = connection_to(&stage, "198.51.100.7:4010");
        for (old, new, reason) in [
            (LAST, "via = \"nobody\"\n", "there is no peer 'nobody'"),
            (
                "[egress]\n",
                "[egress]\nlisten_port = 15100\n",
                "`egress.listen_port` has changed",
            ),
            ("203.0.113.9:4433", "203.0.113.9:4434", "`peer` has changed"),
            (
                "cgroup = \"",
                "cgroup = \"/proc/self\" # \"",
                "no cgroup of version 2",
            ),
        ] {
            stage.exchange("host", old, new);
            let said = stage.reload("host");
            assert!(said.contains(REFUSED) && said.contains(reason), "{said}");
            assert_eq!(rules(), before);
            is_alive(&kept);
            stage.exchange("host", new, old);
        }
        assert!(stage.reload("host").contains(READ), "{}", stage.host_log());
        is_alive(&kept);
        everything_works(&stage);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_a_peer_does_not_allow_any_more_ends() {
    lab::run_within(DEADLINE, |_| {
        let stage = running("auto");
        let [caller, callee] = connection_to(&stage, "198.51.100.7:4010");
        let allowed = "allow = [\"198.51.100.0/24\", ";
        stage.exchange("peer", allowed, "allow = [\"198.51.100.64/26\", ");
        assert!(stage.reload("peer").contains(READ), "{}", stage.peer_log());
        is_reset("caller", &caller);
        is_reset("callee", &callee);
        let refused = stage.in_box("curl -sS --max-time 10 http://198.51.100.7:8080/page");
        assert!(refused.unwrap_err().contains("reset"));
        stage.exchange("peer", "allow = [\"198.51.100.64/26\", ", allowed);
        assert!(stage.reload("peer").contains(READ), "{}", stage.peer_log());
        everything_works(&stage);
        let kept = connection_to(&stage, "198.51.100.7:4010");
        let clients = "clients = [\"host.example\"]";
        stage.exchange(
            "peer",
            clients,
            "clients = [\"host.example\", \"another.example\"]",
        );
        assert!(stage.reload("peer").contains(READ), "{}", stage.peer_log());
        is_alive(&kept);
        stage.exchange("peer", "clients = [\"host.example\", ", "clients = [");
        assert!(stage.reload("peer").contains(READ), "{}", stage.peer_log());
        is_reset("caller", &kept[0]);
        stage.nothing_is_answered();
        stage.exchange("peer", "clients = [\"another.example\"]", clients);
        assert!(stage.reload("peer").contains(READ), "{}", stage.peer_log());
        everything_works(&stage);
    });
}
