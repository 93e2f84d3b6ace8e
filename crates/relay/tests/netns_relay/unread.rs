//! What is held for connections in QUIC whose other end doesn't read is bounded, at both relays, and costs nobody else anything.

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    thread,
    time::Duration,
};

use sandwire_relay::wire::Opening;
use sandwire_testlab::{host::serve_tcp, lab};

use super::{
    DEADLINE, PATIENCE,
    bounds::{PEER, client, endpoint, figure, with_tokio},
    ends::{connection_to, running},
    fetch,
};
use crate::stage::{MARKER, Stage, wait_for};

const SILENT: u16 = 4021;
const LATE: u16 = 4022;
/// Connections of a sender that reads nothing, or has its destination read nothing. In QUIC 2 MiB may wait for each.
const CONNECTIONS: usize = 64;
/// Of which a relay has parts for so many, with a bound of 16 MiB.
const PARTS: usize = 4;
const UNREAD: &str = "unread_bytes = 16777216";
/// What an honest connection carries, more than both kernels keep of it.
const HONEST: usize = 32 << 20;
/// What a relay may have more of memory in the end: the window of its QUIC connection (18 MiB), with what is around it, and what
/// each connection has before it is ended. It would be 160 MiB without a bound.
const MEMORY_MAX: usize = 110 << 20;

fn reads_nothing(_stream: TcpStream) -> std::io::Result<()> {
    loop {
        thread::park();
    }
}

/// Reads once there is a file, and says in the end how much that was.
fn reads_late(mut stream: TcpStream, once: &Path) -> std::io::Result<()> {
    while !once.exists() {
        thread::sleep(Duration::from_millis(50));
    }
    let mut buffer = vec![0; 128 << 10];
    let mut all = 0;
    loop {
        match stream.read(&mut buffer)? {
            0 => return stream.write_all(all.to_string().as_bytes()),
            count => all += count,
        }
    }
}

fn sends_for_ever(mut stream: TcpStream) -> std::io::Result<()> {
    loop {
        stream.write_all(&[0; 65_536])?;
    }
}

fn sends_much(mut stream: TcpStream) -> std::io::Result<()> {
    stream.write_all(&vec![7; HONEST])
}

/// Connections that the kernel has at a port of the destination.
fn established(stage: &Stage, port: u16) -> usize {
    let tables = stage.inside_dest(|| {
        ["tcp", "tcp6"].map(|table| {
            let path = format!("/proc/thread-self/net/{table}");
            fs::read_to_string(path).unwrap_or_default()
        })
    });
    let port = format!(":{port:04X}");
    let is_one = |line: &&str| {
        let mut words = line.split_whitespace().skip(1);
        let local = words.next().unwrap_or_default();
        local.ends_with(&port) && words.nth(1) == Some("01")
    };
    tables
        .iter()
        .map(|table| table.lines().filter(is_one).count())
        .sum()
}

/// The most memory that a relay had.
fn memory(stage: &Stage, relay: &str) -> usize {
    let status = stage.threads(relay).swap_remove(0);
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes = most.and_then(|most| most.trim().strip_suffix(" kB"));
    kibibytes.unwrap().parse::<usize>().unwrap() << 10
}

fn connect(stage: &Stage, port: u16) -> Vec<TcpStream> {
    let to: SocketAddr = ([198, 51, 100, 7], port).into();
    let one = |_| TcpStream::connect_timeout(&to, PATIENCE).unwrap();
    stage.inside_box(|| (0..CONNECTIONS).map(one).collect())
}

/// Once one sender has all that there is: it has no more, and its connections that are read go on; so do others', and of those
/// one that isn't read until there is a file gets a part.
fn is_bounded(stage: &Stage, relay: &str, before: usize, (late, once): (&str, &Path)) {
    let figure = |name: &str| figure(stage, relay, &format!("sandwire_relay_{name} "));
    let are_cut = |count| figure("connections_cut_unread_total") == count;
    wait_for("all but those that have a part are cut", || {
        are_cut(CONNECTIONS - PARTS)
    });
    wait_for("their destination knows", || {
        established(stage, SILENT) == PARTS
    });
    assert_eq!(figure("connections_unread"), PARTS);
    fetch(stage);
    let page = stage.in_cgroup("curl --silent --max-time 60 http://198.51.100.7:8080/page");
    assert!(page.contains(MARKER), "{page}");
    let script = stage.write("late.py", late);
    let carried = thread::scope(|scope| {
        let carrying = scope.spawn(|| stage.in_cgroup(&format!("python3 {}", script.display())));
        wait_for("who has most has lost one", || {
            are_cut(CONNECTIONS - PARTS + 1)
        });
        wait_for("its destination knows", || {
            established(stage, SILENT) == PARTS - 1
        });
        fs::write(once, "").unwrap();
        carrying.join().unwrap()
    });
    assert_eq!(carried.trim(), HONEST.to_string());
    assert!(are_cut(CONNECTIONS - PARTS + 1), "nobody else lost any");
    let more = memory(stage, relay).saturating_sub(before);
    assert!(more < MEMORY_MAX, "{more} bytes");
    wait_for("it is reported", || {
        let report = stage.report_of(relay);
        let of_bound = |line: &&str| {
            line.contains(r#""outcome":"unread""#) && line.contains(r#""sender":"lab""#)
        };
        report.lines().filter(of_bound).count() == CONNECTIONS - PARTS + 1
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn destinations_that_do_not_read_have_a_bounded_part_of_the_peer() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("quic");
        let once = stage.write("late.py", "").with_file_name("once");
        // A host's part is half of all.
        stage.limit("peer", "unread_bytes = 33554432");
        stage.start_peer();
        stage.start_host();
        let listener = stage.inside_dest(|| {
            serve_tcp(SILENT, reads_nothing).unwrap();
            TcpListener::bind(("198.51.100.7", LATE)).unwrap()
        });
        let file = once.clone();
        thread::spawn(move || reads_late(listener.accept()?.0, &file));
        fetch(&stage);
        let before = memory(&stage, "peer");
        for stream in connect(&stage, SILENT) {
            thread::spawn(move || sends_for_ever(stream));
        }
        let late = format!(
            "import socket\ns = socket.create_connection(('198.51.100.7', {LATE}))\ns.sendall(bytes({HONEST}))\n\
             s.shutdown(socket.SHUT_WR)\nprint(s.recv(64).decode())\n"
        );
        is_bounded(&stage, "peer", before, (&late, &once));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn senders_that_do_not_read_have_a_bounded_part_of_the_host() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("quic");
        stage.limit("host", UNREAD);
        stage.start_peer();
        stage.start_host();
        stage.inside_dest(|| {
            serve_tcp(SILENT, sends_for_ever).unwrap();
            serve_tcp(LATE, sends_much).unwrap();
        });
        fetch(&stage);
        let before = memory(&stage, "host");
        let silent = connect(&stage, SILENT);
        let once = stage.write("late.py", "").with_file_name("once");
        let late = format!(
            "import os, socket, time\ns = socket.create_connection(('198.51.100.7', {LATE}))\ncount = 0\n\
             while not os.path.exists('{}'):\n  time.sleep(0.05)\n\
             while part := s.recv(131072):\n  count += len(part)\nprint(count)\n",
            once.display()
        );
        is_bounded(&stage, "host", before, (&late, &once));
        drop(silent);
    });
}

/// Else all that it has sent would be held for as long as a connection may be silent.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_destination_that_does_not_read_sees_a_reset_when_the_host_is_killed() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = running("quic");
        let [caller, callee] = connection_to(&stage, "198.51.100.7:4023");
        thread::spawn(move || sends_for_ever(caller));
        wait_for("something waits for it", || {
            figure(&stage, "peer", "sandwire_relay_connections_unread ") == 1
        });
        stage.kill_host();
        wait_for("it is reset", || {
            let error = callee.take_error().unwrap();
            error.is_some_and(|error| error.kind() == ErrorKind::ConnectionReset)
        });
        assert_eq!(
            figure(&stage, "peer", "sandwire_relay_connections_unread "),
            0
        );
    });
}

/// A relay that isn't ours sends before it is answered, for destinations that never answer.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_has_no_more_held_than_the_window_of_its_channel_whatever_it_sends() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("quic");
        stage.limit("peer", "unread_bytes = 33554432\nconnect_seconds = 600");
        stage.start_peer();
        stage.in_peer("ip neighbour add 198.51.100.99 lladdr 02:00:00:00:00:99 dev far0");
        let sent = with_tokio(async {
            let endpoint = endpoint();
            let connecting =
                endpoint.connect_with(client(&stage), PEER.parse().unwrap(), "peer.example");
            let connection = connecting.unwrap().await.unwrap();
            let mut streams = Vec::new();
            for _ in 0..CONNECTIONS {
                let (mut writer, reader) = connection.open_bi().await.unwrap();
                let opening = Opening::Tcp {
                    sender: "lab".to_owned(),
                    source: ([10, 64, 0, 2], 4000).into(),
                    destination: ([198, 51, 100, 99], 7).into(),
                };
                writer.write_all(&opening.encode()).await.unwrap();
                streams.push(reader);
                tokio::spawn(async move { writer.write_all(&vec![0; 2 << 20]).await });
            }
            let mut before = 0;
            loop {
                tokio::time::sleep(Duration::from_secs(2)).await;
                let sent = connection.stats().udp_tx.bytes;
                // The window is 18 MiB.
                if sent > 16 << 20 && sent - before < 100_000 {
                    break;
                }
                before = sent;
            }
            // A pause isn't the end.
            tokio::time::sleep(Duration::from_secs(5)).await;
            connection.stats().udp_tx.bytes
        });
        assert!(sent < 32 << 20, "{sent} bytes");
    });
}
