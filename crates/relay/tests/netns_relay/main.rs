//! The relay as a user runs it, between namespaces that play a sandbox, its host, the peer relay's host and the
//! destination beyond; what is on the wire between the two hosts is captured.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

mod bounds;
mod closed;
mod ends;
mod hosts;
mod impostors;
mod processes;
mod reload;
mod stage;
mod strangers;
mod unread;

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpStream, UdpSocket},
    process::Command,
    time::{Duration, Instant},
};

use rustix::net::{SendFlags, send};
use sandwire_testlab::{host::ECHO_PORT, lab, namespace::command_in};
use stage::{DESTINATIONS, MARKER, Stage, wait_for};

const FETCH: &str = "curl -sS --max-time 60 http://198.51.100.7:8080/page";

const DEADLINE: Duration = Duration::from_secs(600);
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection that is half closed by the caller, and answered until its end.
fn half_close(server: SocketAddr) {
    let mut stream = TcpStream::connect_timeout(&server, PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(stream.peer_addr().unwrap(), server);
    let sent: Vec<u8> = MARKER.repeat(20_000).into_bytes();
    let mut writer = stream.try_clone().unwrap();
    let copy = sent.clone();
    let thread = std::thread::spawn(move || {
        writer.write_all(&copy).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    thread.join().unwrap();
    assert!(answer == sent, "{} bytes of {}", answer.len(), sent.len());
}

/// Sends until an answer comes: datagrams may be lost while a peer is being connected.
fn ask(socket: &UdpSocket, server: SocketAddr, payload: &[u8]) {
    let deadline = Instant::now() + PATIENCE;
    let mut answer = vec![0; 65_536];
    socket
        .set_read_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    loop {
        socket.send_to(payload, server).unwrap();
        match socket.recv_from(&mut answer) {
            Ok((length, from)) => {
                assert_eq!(from, server);
                assert!(answer[..length] == *payload, "{length} bytes");
                return;
            }
            Err(error) if Instant::now() > deadline => panic!("no answer from {server}: {error}"),
            Err(_) => {}
        }
    }
}

/// One socket speaks with several destinations, with small and large datagrams.
fn datagrams(servers: &[SocketAddr]) {
    let any: IpAddr = if servers[0].is_ipv4() {
        "0.0.0.0".parse().unwrap()
    } else {
        "::".parse().unwrap()
    };
    for length in [MARKER.len(), 1400, 20_000] {
        let socket = UdpSocket::bind((any, 0)).unwrap();
        let payload: Vec<u8> = MARKER.bytes().cycle().take(length).collect();
        for server in servers {
            ask(&socket, *server, &payload);
        }
    }
}

fn fetch(stage: &Stage) {
    for destination in DESTINATIONS {
        let host = SocketAddr::new(destination.parse().unwrap(), 8080);
        let url = format!("http://{host}/page");
        let page = stage
            .in_box(&format!("curl -sS --max-time 60 {url}"))
            .unwrap();
        assert_eq!(page, MARKER);
    }
}

fn everything_works(stage: &Stage) {
    fetch(stage);
    for destination in DESTINATIONS {
        let address: IpAddr = destination.parse().unwrap();
        stage.inside_box(move || half_close(SocketAddr::new(address, ECHO_PORT)));
        let servers =
            [ECHO_PORT, stage::OTHER_ECHO_PORT].map(|port| SocketAddr::new(address, port));
        stage.inside_box(move || datagrams(&servers));
    }
}

/// Both ways.
fn urgent_bytes_stay_in_the_stream(stage: &Stage) {
    let [caller, callee] = &ends::connection_to(stage, "198.51.100.7:4010");
    for [mut from, mut to] in [[caller, callee], [callee, caller]] {
        from.write_all(b"be").unwrap();
        send(from, b"f", SendFlags::OOB).unwrap();
        from.write_all(b"ore").unwrap();
        let mut read = [0; 6];
        to.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"before");
    }
}

fn carried(transport: &str) {
    let mut stage = Stage::build(transport);
    stage.start_peer();
    stage.start_host();
    let capture = stage.capture();
    everything_works(&stage);
    urgent_bytes_stay_in_the_stream(&stage);
    stage.name_is_resolved();
    let of_cgroup = stage.in_cgroup("curl -sS --max-time 60 http://198.51.100.7:8080/page");
    assert_eq!(of_cgroup, MARKER);
    capture.has_nothing_in_the_clear(true);
    let report = stage.report();
    for wanted in [
        r#""sender":"lab""#,
        r#""sender":"batch""#,
        r#""host":"host.example""#,
        r#""destination":"198.51.100.7:8080""#,
        r#""destination":"[2001:db8:5::7]:7""#,
        r#""protocol":"tcp""#,
    ] {
        assert!(report.contains(wanted), "{wanted} is missing in {report}");
    }
    let metrics = stage.metrics("host");
    assert!(
        !metrics.contains("sandwire_relay_datagrams_to_destinations_total 0\n"),
        "{metrics}"
    );
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn tcp_in_tls_and_udp_in_quic() {
    lab::run_within(DEADLINE, |_| carried("auto"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn both_in_quic() {
    lab::run_within(DEADLINE, |_| carried("quic"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn both_in_tls() {
    lab::run_within(DEADLINE, |_| carried("tls"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn each_thread_of_a_relay_has_the_privileges_that_it_keeps_and_no_way_to_others() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        everything_works(&stage);
        // The network's administration and low ports, by their numbers in linux/capability.h.
        for (relay, kept) in [("host", (1_u64 << 12) | (1 << 10)), ("peer", 0)] {
            let threads = stage.threads(relay);
            assert!(threads.len() > 2, "{threads:?}");
            let writes = |thread: &String| thread.starts_with("Name:\treport\n");
            assert!(threads.iter().any(writes), "{threads:?}");
            for thread in threads {
                let is =
                    |field: &str, wanted: &str| thread.contains(&format!("\n{field}:\t{wanted}\n"));
                let kept = format!("{kept:016x}");
                let has_kept = ["CapPrm", "CapEff", "CapBnd"]
                    .iter()
                    .all(|set| is(set, &kept));
                assert!(has_kept && is("NoNewPrivs", "1"), "{relay}: {thread}");
            }
        }
    });
}

/// Lets a rule for QUIC's packets to the peer be the only one, which counts them.
fn rule_for_quic(stage: &Stage, verdict: &str) {
    stage.in_peer("nft flush chain inet wall input");
    let rule = format!("nft add rule inet wall input udp dport 4433 counter {verdict}");
    stage.in_peer(&rule);
}

fn packets_of_quic(stage: &Stage) -> u64 {
    counted(stage, "input")
}

/// Packets that the first rule of the peer's chain has met.
fn counted(stage: &Stage, chain: &str) -> u64 {
    let chain = stage.in_peer(&format!("nft -j list chain inet wall {chain}"));
    let chain: serde_json::Value = serde_json::from_str(&chain).unwrap();
    let all = chain["nftables"].as_array().unwrap();
    let rule = all.iter().find_map(|object| object.get("rule")).unwrap();
    let expressions = rule["expr"].as_array().unwrap();
    let counter = expressions.iter().find_map(|part| part.get("counter"));
    counter.unwrap()["packets"].as_u64().unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn datagrams_go_in_tls_while_udp_is_blocked_and_by_quic_once_it_gets_through() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.in_peer("nft add table inet wall");
        stage.in_peer("nft add chain inet wall input { type filter hook input priority 0 ; }");
        rule_for_quic(&stage, "drop");
        stage.start_peer();
        stage.start_host();
        let capture = stage.capture();
        everything_works(&stage);
        assert!(packets_of_quic(&stage) > 0, "QUIC wasn't tried");
        rule_for_quic(&stage, "accept");
        wait_for("QUIC is tried again", || {
            stage.host_log().contains("kind=\"QUIC\"")
        });
        let before = packets_of_quic(&stage);
        everything_works(&stage);
        assert!(packets_of_quic(&stage) > before + 10, "QUIC wasn't used");
        capture.has_nothing_in_the_clear(true);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn without_the_relay_nothing_leaves_and_with_it_all_comes_back() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        fetch(&stage);
        let capture = stage.capture();
        stage.kill_host();
        stage.nothing_is_answered();
        // As if somebody's firewall had been loaded anew.
        Command::new("nft")
            .args(["flush", "ruleset"])
            .status()
            .unwrap();
        stage.nothing_is_answered();
        stage.start_host();
        everything_works(&stage);
        capture.has_nothing_in_the_clear(true);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn neighbours_are_found_where_all_destinations_are_redirected() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.redirect_everywhere();
        stage.start_peer();
        stage.start_host();
        lab.run("ip neighbour flush dev box0");
        stage.in_box("ip neighbour flush dev eth0").unwrap();
        let capture = stage.capture();
        everything_works(&stage);
        capture.has_nothing_in_the_clear(true);
        stage.kill_host();
        stage.nothing_is_answered();
    });
}

/// As the host's own address in the prefix of its sandboxes is.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_the_host_sends_from_an_address_among_those_that_are_redirected_goes_its_way() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.redirect_everywhere();
        stage.start_peer();
        stage.start_host();
        let own = || {
            for (source, host) in [
                ("10.64.0.1", "198.51.100.7"),
                ("fd64::1", "[2001:db8:5::7]"),
            ] {
                let fetch = "curl -sS --max-time 20 --interface";
                let page = lab.run(&format!("{fetch} {source} http://{host}:8080/page"));
                assert_eq!(page, MARKER);
            }
        };
        own();
        let capture = stage.capture();
        everything_works(&stage);
        stage.kill_host();
        stage.nothing_is_answered();
        lab.run("nft flush ruleset");
        stage.nothing_is_answered();
        capture.has_nothing_in_the_clear(true);
        own();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_cgroup_that_was_made_anew_is_steered_while_another_one_is_missing() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        stage.make_cgroup_anew_without_the_other();
        wait_for("it is steered anew", || {
            stage.host_log().contains("a cgroup was made anew")
        });
        let capture = stage.capture();
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        capture.has_nothing_in_the_clear(true);
    });
}

/// Looks each second would take ten seconds at least.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_cgroup_is_steered_at_the_moment_when_it_is_made() {
    lab::run_within(DEADLINE, |_| {
        const ROUNDS: usize = 10;
        let mut stage = Stage::build("auto");
        stage.start_peer();
        stage.start_host();
        stage.make_cgroup_anew_without_the_other();
        let is_steered =
            |times| stage.host_log().matches("a cgroup was made anew").count() >= times;
        wait_for("it is steered", || is_steered(1));
        let begun = Instant::now();
        for round in 0..ROUNDS {
            stage.make_cgroup_anew();
            wait_for("it is steered anew", || is_steered(round + 2));
        }
        let taken = begun.elapsed();
        assert!(taken < Duration::from_secs(9), "{taken:?}");
        let capture = stage.capture();
        assert_eq!(stage.in_cgroup(FETCH), MARKER);
        capture.has_nothing_in_the_clear(true);
    });
}

fn cut_and_back(transport: &str) {
    let mut stage = Stage::build(transport);
    stage.start_peer();
    stage.start_host();
    let capture = stage.capture();
    let mut stream = stage.inside_box(|| {
        TcpStream::connect_timeout(&"198.51.100.7:7".parse().unwrap(), PATIENCE).unwrap()
    });
    stream.write_all(MARKER.as_bytes()).unwrap();
    let mut answer = vec![0; MARKER.len()];
    stream.read_exact(&mut answer).unwrap();
    stage.kill_peer();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let cut = stream.read(&mut answer).unwrap_err();
    assert_eq!(cut.kind(), ErrorKind::ConnectionReset);
    stage.start_peer();
    wait_for("the peer is there again", || {
        stage
            .in_box("curl -sS --max-time 5 http://198.51.100.7:8080/page")
            .is_ok_and(|page| page == MARKER)
    });
    everything_works(&stage);
    capture.has_nothing_in_the_clear(true);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_peer_that_goes_away_cuts_connections_in_tls_and_may_come_back() {
    lab::run_within(DEADLINE, |_| cut_and_back("auto"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_peer_that_goes_away_cuts_streams_of_quic_and_may_come_back() {
    lab::run_within(DEADLINE, |_| cut_and_back("quic"));
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn certificates_that_are_wrong_expired_or_missing_let_nothing_through() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        // Another name than the peer delivers for.
        stage.certify_host("stranger.example", Duration::from_secs(3600));
        stage.start_host();
        let capture = stage.capture();
        assert!(
            stage
                .in_box("curl -sS --max-time 20 http://198.51.100.7:8080/page")
                .is_err()
        );
        wait_for("the peer says why", || {
            stage.peer_log().contains("NotValidForName")
        });
        // One that is right, and expires while it is used.
        stage.certify_host("host.example", Duration::from_secs(12));
        stage.wait_for_a_page("the new certificate is taken");
        is_used_until_it_is_cut(&stage);
        // The peer may have been the first to see it.
        wait_for("the host says why", || {
            stage.host_log().contains("has expired")
        });
        assert!(
            stage
                .in_box("curl -sS --max-time 20 http://198.51.100.7:8080/page")
                .is_err()
        );
        // Live again with a new one.
        stage.certify_host("host.example", Duration::from_secs(3600));
        stage.wait_for_a_page("the new certificate is taken");
        capture.has_nothing_in_the_clear(true);
        stage.kill_host();
        stage.remove_host_key();
        let refused = stage.host_refuses();
        assert!(
            refused.contains("private key") && refused.contains("host.key"),
            "{refused}"
        );
    });
}

/// Has a connection answered, and waits until it is reset.
fn is_used_until_it_is_cut(stage: &Stage) {
    let mut stream = stage.inside_box(|| {
        TcpStream::connect_timeout(&"198.51.100.7:7".parse().unwrap(), PATIENCE).unwrap()
    });
    stream.write_all(b"?").unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = [0; 1];
    stream.read_exact(&mut answer).unwrap();
    let cut = stream.read(&mut answer).unwrap_err();
    assert_eq!(cut.kind(), ErrorKind::ConnectionReset);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn certificates_that_expire_cut_streams_of_quic_with_their_channel() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("quic");
        stage.start_peer();
        stage.certify_host("host.example", Duration::from_secs(20));
        stage.start_host();
        stage.wait_for_a_page("there is a channel");
        is_used_until_it_is_cut(&stage);
        wait_for("the host says why", || {
            stage.host_log().contains("has expired")
        });
        wait_for("the peer says that the channel has ended", || {
            stage.peer_log().contains("a host's channel has ended")
        });
        stage.certify_host("host.example", Duration::from_secs(3600));
        stage.wait_for_a_page("there is a channel again");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_isnt_redirected_goes_its_way_and_clear_ends_it() {
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("auto");
        stage.start_peer();
        let before = lab.run("ip rule") + &lab.run("ip -6 rule") + &lab.run("nft list ruleset");
        stage.start_host();
        let page = stage
            .in_box("curl -sS --max-time 60 http://203.0.113.9:8081/page")
            .unwrap();
        assert_eq!(page, MARKER);
        stage.kill_host();
        let output = Command::new(stage::executable())
            .args(["relay", "clear"])
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let after = lab.run("ip rule") + &lab.run("ip -6 rule") + &lab.run("nft list ruleset");
        assert_eq!(after, before);
        let page = stage
            .in_box("curl -sS --max-time 60 http://198.51.100.7:8080/page")
            .unwrap();
        assert_eq!(page, MARKER);
        let box_path = stage.box_path();
        let ping = command_in(&box_path, "ping")
            .args(["-c", "1", "-W", "20", "198.51.100.7"])
            .status();
        assert!(ping.unwrap().success());
    });
}
