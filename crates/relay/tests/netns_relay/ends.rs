//! How what is under way ends when a relay does.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use sandwire_testlab::{command, lab};

use super::{DEADLINE, PATIENCE, ask};
use crate::stage::{DESTINATIONS, MARKER, Stage, wait_for};

/// A connection under way in the box and at its destination.
fn connection(stage: &Stage) -> [TcpStream; 2] {
    connection_to(stage, "198.51.100.7:4010")
}

/// The same to another port.
pub(crate) fn connection_to(stage: &Stage, to: &str) -> [TcpStream; 2] {
    let to: SocketAddr = to.parse().unwrap();
    let listener = stage.inside_dest(|| TcpListener::bind(to).unwrap());
    let mut caller = stage.inside_box(|| TcpStream::connect_timeout(&to, PATIENCE).unwrap());
    let (mut callee, _) = listener.accept().unwrap();
    for stream in [&caller, &callee] {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    caller.write_all(b"?").unwrap();
    callee.read_exact(&mut [0]).unwrap();
    callee.write_all(b"!").unwrap();
    caller.read_exact(&mut [0]).unwrap();
    // What is on its way when the other end goes is TCP's to send again, for a quarter of an hour.
    wait_for("all is acknowledged", || {
        let sockets = command::run("ss -Htn").unwrap() + &stage.in_peer("ss -Htn");
        let unacknowledged = |line: &str| line.split_whitespace().nth(2) != Some("0");
        !sockets.lines().any(unacknowledged)
    });
    [caller, callee]
}

pub(crate) fn is_reset(who: &str, mut stream: &TcpStream) {
    let cut = stream.read(&mut [0]).map_err(|error| error.kind());
    assert_eq!(cut, Err(ErrorKind::ConnectionReset), "{who}");
}

pub(crate) fn running(transport: &str) -> Stage {
    let mut stage = Stage::build(transport);
    stage.start_peer();
    stage.start_host();
    stage
}

/// Both ends of a relayed connection under way see a reset when a relay ends: nobody takes a part for the whole.
fn cut_by(end: impl Fn(&mut Stage), reports: &str) {
    let mut stage = running("auto");
    let [caller, callee] = connection(&stage);
    end(&mut stage);
    is_reset("caller", &caller);
    is_reset("callee", &callee);
    if !reports.is_empty() {
        let report = stage.report_of(reports);
        let line = report
            .lines()
            .find(|line| line.contains("198.51.100.7:4010"));
        let line = line.unwrap_or_else(|| panic!("not in the report of the {reports}: {report}"));
        for wanted in [
            r#""outcome":"cut""#,
            r#""to_destination_bytes":1"#,
            r#""from_destination_bytes":1"#,
        ] {
            assert!(line.contains(wanted), "{line}");
        }
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_that_is_stopped_cuts_and_reports_what_is_under_way() {
    lab::run_within(DEADLINE, |_| cut_by(Stage::stop_host, "host"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_peer_that_is_stopped_cuts_and_reports_what_is_under_way() {
    lab::run_within(DEADLINE, |_| cut_by(Stage::stop_peer, "peer"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_that_is_killed_cuts_what_is_under_way() {
    lab::run_within(DEADLINE, |_| cut_by(Stage::kill_host, ""));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_peer_that_is_killed_cuts_what_is_under_way() {
    lab::run_within(DEADLINE, |_| cut_by(Stage::kill_peer, ""));
}

/// As when the other machine has lost its power.
fn part_the_relays(stage: &Stage) {
    stage.in_peer("nft add table inet wall");
    stage.in_peer("nft add chain inet wall input { type filter hook input priority 0 ; }");
    stage.in_peer("nft add chain inet wall output { type filter hook output priority 0 ; }");
    stage.in_peer("nft add rule inet wall input tcp dport 4433 drop");
    stage.in_peer("nft add rule inet wall output tcp sport 4433 drop");
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_idle_connection_ends_when_the_other_relay_is_gone_without_a_word() {
    lab::run_within(DEADLINE, |_| {
        let stage = running("tls");
        let [caller, callee] = connection(&stage);
        part_the_relays(&stage);
        is_reset("caller", &caller);
        is_reset("callee", &callee);
    });
}

/// As when a microVM is killed.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_idle_connection_ends_when_its_sandbox_is_gone_without_a_word() {
    lab::run_within(DEADLINE, |lab| {
        let stage = running("auto");
        let [_caller, callee] = connection(&stage);
        lab.run("ip -n box link set eth0 down");
        is_reset("callee", &callee);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_idle_connection_ends_when_its_destination_is_gone_without_a_word() {
    lab::run_within(DEADLINE, |lab| {
        let stage = running("auto");
        let [caller, _callee] = connection(&stage);
        lab.run("ip -n dest link set eth0 down");
        is_reset("caller", &caller);
    });
}

/// Relays that wait two seconds for an answer to what they have sent.
fn running_with_little_patience(transport: &str) -> Stage {
    let mut stage = Stage::build(transport);
    for relay in ["host", "peer"] {
        stage.limit(relay, "tcp_unanswered_seconds = 2");
    }
    stage.start_peer();
    stage.start_host();
    stage
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_connection_with_bytes_on_their_way_ends_when_its_destination_is_gone_without_a_word() {
    lab::run_within(DEADLINE, |lab| {
        let stage = running_with_little_patience("auto");
        let [mut caller, _callee] = connection(&stage);
        lab.run("ip -n dest link set eth0 down");
        caller.write_all(b"anybody there?").unwrap();
        is_reset("caller", &caller);
        wait_for("the peer says why", || {
            let said = "its end in the clear has not acknowledged what was sent to it for 2 s";
            stage.peer_log().contains(said)
        });
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_connection_with_bytes_on_their_way_ends_when_the_other_relay_is_gone_without_a_word() {
    lab::run_within(DEADLINE, |_| {
        let stage = running_with_little_patience("tls");
        let [mut caller, mut callee] = connection(&stage);
        part_the_relays(&stage);
        for stream in [&mut caller, &mut callee] {
            stream.write_all(b"anybody there?").unwrap();
        }
        is_reset("caller", &caller);
        is_reset("callee", &callee);
        // A connection is reset before its end is written down.
        wait_for("both relays say why", || {
            let said = "the other relay has not acknowledged what was sent to it for 2 s";
            stage.host_log().contains(said) && stage.peer_log().contains(said)
        });
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_connection_whose_destination_does_not_read_goes_on() {
    lab::run_within(DEADLINE, |_| {
        let stage = running_with_little_patience("tls");
        let [mut caller, mut callee] = connection(&stage);
        // Until nobody on the way takes any more.
        caller
            .set_write_timeout(Some(Duration::from_secs(1)))
            .unwrap();
        let mut sent = 0;
        while let Ok(count) = caller.write(&[7; 65_536]) {
            sent += count;
        }
        thread::sleep(Duration::from_secs(12));
        let mut buffer = vec![0; 65_536];
        while sent > 0 {
            let count = callee.read(&mut buffer).unwrap();
            assert!(count > 0, "an end, and {sent} bytes are missing");
            sent -= count;
        }
    });
}

/// As when a process is killed that had more to say than its destination has taken.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_reset_is_noticed_while_the_destination_does_not_read() {
    lab::run_within(DEADLINE, |_| {
        let stage = running_with_little_patience("tls");
        let [mut caller, _callee] = connection(&stage);
        let patience = Some(Duration::from_secs(1));
        caller.set_write_timeout(patience).unwrap();
        while caller.write(&[7; 65_536]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&caller, Some(Duration::ZERO)).unwrap();
        drop(caller);
        wait_for("the host ends it", || {
            let report = stage.report_of("host");
            report.contains("198.51.100.7:4010")
        });
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_channel_in_tls_ends_when_nothing_is_heard_any_more() {
    lab::run_within(DEADLINE, |_| {
        let stage = running("tls");
        let server = SocketAddr::new(DESTINATIONS[0].parse().unwrap(), 7);
        let socket = stage.inside_box(|| std::net::UdpSocket::bind("0.0.0.0:0").unwrap());
        ask(&socket, server, MARKER.as_bytes());
        part_the_relays(&stage);
        wait_for("the host notices", || {
            let _ = socket.send_to(b"anybody there?", server);
            stage
                .host_log()
                .contains("the channel to the peer has ended")
        });
        wait_for("the peer notices", || {
            stage.peer_log().contains("a host's channel has ended")
        });
        stage.in_peer("nft delete table inet wall");
        ask(&socket, server, MARKER.as_bytes());
    });
}

/// Without that, it would be noticed by its silence, after a quarter of a minute in which all that is sent is lost.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_relay_that_is_stopped_tells_the_other_one_by_quic() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        let server = SocketAddr::new(DESTINATIONS[0].parse().unwrap(), 7);
        let socket = stage.inside_box(|| std::net::UdpSocket::bind("0.0.0.0:0").unwrap());
        ask(&socket, server, MARKER.as_bytes());
        stage.stop_peer();
        wait_for("the host notices", || {
            stage
                .host_log()
                .contains("the channel to the peer has ended")
        });
        let log = stage.host_log();
        assert!(log.contains("closed by peer"), "{log}");
        stage.start_peer();
        ask(&socket, server, MARKER.as_bytes());
        let of_host = stage.host_log().len();
        // The peer already wrote of the channel's end when it was stopped itself.
        let of_peer = stage.peer_log().len();
        stage.stop_host();
        let last = stage.host_log().split_off(of_host);
        assert!(
            !last.contains("WARN") && !last.contains("the peer"),
            "{last}"
        );
        wait_for("the peer notices", || {
            stage.peer_log()[of_peer..].contains("a host's channel has ended")
        });
        let log = stage.peer_log().split_off(of_peer);
        assert!(log.contains("closed by peer"), "{log}");
    });
}
