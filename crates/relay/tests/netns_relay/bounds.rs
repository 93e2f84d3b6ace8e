//! What others can take up of a relay is bounded, and whoever meets such a bound is told so.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream, UdpSocket},
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use quinn::crypto::rustls::QuicClientConfig;
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use sandwire_relay::wire::{Answer, Datagram, Opening, PROTOCOL};
use sandwire_testlab::{host::serve_tcp, lab};

use super::{DEADLINE, PATIENCE, fetch};
use crate::stage::{MARKER, Stage, wait_for};

pub(crate) const PEER: &str = "203.0.113.9:4433";
/// Connections that nobody goes on with, and the room that there is for them.
const IDLE: usize = 64;
const ROOM: usize = 8;

fn is_closed(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    match stream.peek(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// A figure of a relay.
pub(crate) fn figure(stage: &Stage, relay: &str, name: &str) -> usize {
    let metrics = stage.metrics(relay);
    let line = metrics.lines().find(|line| line.starts_with(name));
    let value = line.and_then(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in {metrics}"))
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn connections_that_never_begin_give_way_to_newer_ones() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("tls");
        stage.limit("peer", &format!("openings = {ROOM}\nconnect_seconds = 600"));
        stage.start_peer();
        let connect = |_| TcpStream::connect_timeout(&PEER.parse().unwrap(), PATIENCE).unwrap();
        let idle: Vec<TcpStream> = (0..IDLE).map(connect).collect();
        wait_for("there are no more than there is room for", || {
            idle.iter().filter(|stream| !is_closed(stream)).count() <= ROOM
        });
        stage.start_host();
        fetch(&stage);
        let displaced = figure(&stage, "peer", "sandwire_relay_openings_displaced_total ");
        assert!(displaced >= IDLE - ROOM, "{displaced}");
    });
}

pub(crate) fn client(stage: &Stage) -> quinn::ClientConfig {
    let certificates = |file: &str| -> Vec<CertificateDer<'static>> {
        let found: Result<_, _> = CertificateDer::pem_slice_iter(&stage.read(file)).collect();
        found.unwrap()
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates("authority.pem"));
    let key = PrivateKeyDer::from_pem_slice(&stage.read("host.key")).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(certificates("host.pem"), key)
        .unwrap();
    tls.alpn_protocols = vec![PROTOCOL.to_vec()];
    let mut config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
    let mut transport = quinn::TransportConfig::default();
    transport.keep_alive_interval(Some(Duration::from_secs(4)));
    config.transport_config(Arc::new(transport));
    config
}

pub(crate) fn endpoint() -> quinn::Endpoint {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let runtime = Arc::new(quinn::TokioRuntime);
    quinn::Endpoint::new(quinn::EndpointConfig::default(), None, socket, runtime).unwrap()
}

pub(crate) fn with_tokio<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    runtime.unwrap().block_on(work)
}

/// The first packets of QUIC connections, each of another one.
async fn first_packets(stage: &Stage) -> Vec<Vec<u8>> {
    let sink = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let (endpoint, config) = (endpoint(), client(stage));
    let to = sink.local_addr().unwrap();
    let mut packets: Vec<Vec<u8>> = Vec::new();
    let mut attempts = Vec::new();
    let mut room = vec![0; 2048];
    // Flags, version, and the connection's number after its length.
    let connection = |packet: &[u8]| packet[5..6 + usize::from(packet[5])].to_vec();
    while packets.len() < IDLE {
        let attempt = endpoint.connect_with(config.clone(), to, "peer.example");
        attempts.push(attempt.unwrap());
        // Earlier ones are sent again, too.
        loop {
            let length = sink.recv(&mut room).await.unwrap();
            let packet = &room[..length];
            let is_new = |known: &Vec<u8>| connection(known) != connection(packet);
            if packets.iter().all(is_new) {
                packets.push(packet.to_vec());
                break;
            }
        }
    }
    packets
}

/// Whoever is only an address, which may be anybody's, is asked to show that it hears us, once there are several.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn first_packets_of_quic_take_up_no_room_once_there_are_many() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("quic");
        stage.limit("peer", &format!("openings = {ROOM}\nconnect_seconds = 600"));
        stage.start_peer();
        let packets = with_tokio(first_packets(&stage));
        let senders: Vec<UdpSocket> = packets
            .iter()
            .map(|packet| {
                let sender = UdpSocket::bind("0.0.0.0:0").unwrap();
                sender.set_read_timeout(Some(PATIENCE)).unwrap();
                sender.connect(PEER).unwrap();
                sender.send(packet).unwrap();
                sender
            })
            .collect();
        let is_retry = |sender: &&UdpSocket| {
            let mut room = [0; 2048];
            sender.recv(&mut room).unwrap();
            room[0] & 0xf0 == 0xf0
        };
        let sent_back = senders.iter().filter(is_retry).count();
        assert!(sent_back >= IDLE - ROOM, "{sent_back} of {IDLE}");
        stage.start_host();
        fetch(&stage);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_stream_of_quic_that_never_begins_ends() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("quic");
        stage.limit("peer", "connect_seconds = 2");
        stage.start_peer();
        with_tokio(async {
            let peer: SocketAddr = PEER.parse().unwrap();
            let endpoint = endpoint();
            let connecting = endpoint.connect_with(client(&stage), peer, "peer.example");
            let connection = connecting.unwrap().await.unwrap();
            let (mut writer, mut reader) = connection.open_bi().await.unwrap();
            // Less than the length of what should come.
            writer.write_all(&[0]).await.unwrap();
            let end = tokio::time::timeout(PATIENCE, reader.read_to_end(16)).await;
            assert!(end.expect("it waits").unwrap().is_empty());
            assert!(connection.close_reason().is_none());
        });
        let late = figure(&stage, "peer", "sandwire_relay_openings_timed_out_total ");
        assert_eq!(late, 1);
    });
}

/// The answer has no room, and what was sent behind the opening fills whatever there is.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_stream_whose_answer_is_not_taken_ends() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("quic");
        stage.limit("peer", "connect_seconds = 2");
        stage.start_peer();
        with_tokio(async {
            let mut config = client(&stage);
            let mut transport = quinn::TransportConfig::default();
            transport.keep_alive_interval(Some(Duration::from_secs(4)));
            transport.stream_receive_window(quinn::VarInt::from_u32(0));
            config.transport_config(Arc::new(transport));
            let (endpoint, peer) = (endpoint(), PEER.parse().unwrap());
            let connecting = endpoint.connect_with(config, peer, "peer.example");
            let connection = connecting.unwrap().await.unwrap();
            for destination in [[192, 0, 2, 7], [198, 51, 100, 7]] {
                let (mut writer, mut reader) = connection.open_bi().await.unwrap();
                let opening = Opening::Tcp {
                    sender: "lab".to_owned(),
                    source: ([10, 64, 0, 2], 4000).into(),
                    destination: (destination, 7).into(),
                };
                writer.write_all(&opening.encode()).await.unwrap();
                // It may be stopped before all is written.
                let _ = writer.write_all(&[0; 1 << 20]).await;
                let end = tokio::time::timeout(PATIENCE, reader.read_to_end(16)).await;
                let end = end.expect("it is open").unwrap_err();
                assert!(end.to_string().contains("reset"), "{end}");
                let stopped = tokio::time::timeout(PATIENCE, writer.stopped()).await;
                assert!(stopped.expect("it is read").unwrap().is_some());
            }
            assert!(connection.close_reason().is_none());
        });
        let late = figure(&stage, "peer", "sandwire_relay_openings_timed_out_total ");
        assert_eq!(late, 2);
    });
}

/// Each has memory of its own before it says what it is for, and a host may have many channels.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_has_no_more_streams_by_opening_them_in_several_channels() {
    const MOST: usize = 6;
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("quic");
        let limits = "connections_per_host = 2\nopenings = 4\nconnect_seconds = 600";
        stage.limit("peer", limits);
        stage.start_peer();
        with_tokio(async {
            let (endpoint, config) = (endpoint(), client(&stage));
            let connect = async || {
                let peer = PEER.parse().unwrap();
                let connecting = endpoint.connect_with(config.clone(), peer, "peer.example");
                connecting.unwrap().await.unwrap()
            };
            let begin = async |connection: &quinn::Connection| {
                let (mut writer, reader) = connection.open_bi().await.unwrap();
                writer.write_all(&[0]).await.unwrap();
                (writer, reader)
            };
            let (first, second) = (connect().await, connect().await);
            let (mut writers, mut ends) = (Vec::new(), tokio::task::JoinSet::new());
            for number in 0..=MOST {
                let channel = if number % 2 == 0 { &first } else { &second };
                let (writer, mut reader) = begin(channel).await;
                writers.push(writer);
                ends.spawn(async move { reader.read_to_end(16).await });
            }
            // Which one it is depends on whose packet comes last.
            let end = tokio::time::timeout(PATIENCE, ends.join_next()).await;
            let end = end.expect("all are open").unwrap().unwrap().unwrap_err();
            assert!(end.to_string().contains("reset"), "{end}");
        });
        let refused = "sandwire_relay_connections_refused_limit_total ";
        assert_eq!(figure(&stage, "peer", refused), 1);
    });
}

/// A host's certificate says nothing of the senders that it names: it may make up any number of them.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_has_no_more_by_naming_ever_new_senders() {
    const MOST: usize = 3;
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("quic");
        let limits = format!("connections_per_host = {MOST}\nflows_per_host = {MOST}");
        stage.limit("peer", &limits);
        stage.start_peer();
        let destination: SocketAddr = ([198, 51, 100, 7], 7).into();
        let source = |port| SocketAddr::from(([10, 64, 0, 2], port));
        let (answers, datagrams) = with_tokio(async {
            let endpoint = endpoint();
            let connecting =
                endpoint.connect_with(client(&stage), PEER.parse().unwrap(), "peer.example");
            let connection = connecting.unwrap().await.unwrap();
            let (mut answers, mut streams) = (Vec::new(), Vec::new());
            for number in 0..2 * MOST {
                let sender = format!("sender {number}");
                let (writer, reader, answer) = echo_of(&connection, &sender).await;
                answers.push(answer);
                streams.push((writer, reader));
            }
            for (number, port) in (0..2 * MOST).zip(5000..) {
                let mut packet = Vec::new();
                let datagram = Datagram {
                    sender: &format!("sender {number}"),
                    source: source(port),
                    destination,
                    payload: b"?",
                };
                datagram.encode(&mut packet);
                connection.send_datagram(packet.into()).unwrap();
            }
            let mut datagrams = 0;
            let one = || tokio::time::timeout(Duration::from_secs(2), connection.read_datagram());
            while one().await.is_ok() {
                datagrams += 1;
            }
            (answers, datagrams)
        });
        let expected = [[Answer::Connected; MOST], [Answer::TooMany; MOST]].concat();
        assert_eq!(answers, expected);
        assert_eq!(datagrams, MOST);
    });
}

/// Opens a stream for a connection of that sender to the echo; with the peer's answer.
async fn echo_of(
    connection: &quinn::Connection,
    sender: &str,
) -> (quinn::SendStream, quinn::RecvStream, Answer) {
    let (mut writer, mut reader) = connection.open_bi().await.unwrap();
    let opening = Opening::Tcp {
        sender: sender.to_owned(),
        source: ([10, 64, 0, 2], 4000).into(),
        destination: ([198, 51, 100, 7], 7).into(),
    };
    writer.write_all(&opening.encode()).await.unwrap();
    let mut answer = [0];
    reader.read_exact(&mut answer).await.unwrap();
    (writer, reader, Answer::decode(answer[0]).unwrap())
}

/// What is a host's is shared by its senders.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn at_the_peer_too_a_sender_of_a_host_that_has_few_gets_what_who_has_most_loses() {
    const MOST: usize = 3;
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("quic");
        stage.exchange("peer", "udp_idle_seconds = 2", "udp_idle_seconds = 600");
        let limits = format!("connections_per_host = {MOST}\nflows_per_host = {MOST}");
        stage.limit("peer", &limits);
        stage.start_peer();
        with_tokio(async {
            let endpoint = endpoint();
            let connecting =
                endpoint.connect_with(client(&stage), PEER.parse().unwrap(), "peer.example");
            let connection = connecting.unwrap().await.unwrap();
            // As one that is given up at once: nothing is wrong with it.
            let (mut given_up, _reader) = connection.open_bi().await.unwrap();
            given_up.write_all(b"?").await.unwrap();
            given_up.reset(quinn::VarInt::from_u32(1)).unwrap();
            let mut streams = Vec::new();
            for _ in 0..MOST {
                streams.push(echo_of(&connection, "greedy").await);
            }
            let (.., beyond) = echo_of(&connection, "greedy").await;
            assert_eq!(beyond, Answer::TooMany);
            let few = echo_of(&connection, "few").await;
            let (_, mut lost, _) = streams.pop().unwrap();
            let end = tokio::time::timeout(PATIENCE, lost.read_to_end(16)).await;
            let end = end.expect("it is open").unwrap_err();
            assert!(end.to_string().contains("reset"), "{end}");
            streams.push(few);
            for (writer, reader, answer) in &mut streams {
                assert_eq!(*answer, Answer::Connected);
                writer.write_all(b"?").await.unwrap();
                reader.read_exact(&mut [0]).await.unwrap();
            }
            answered(&connection, "greedy", 5000..5005, MOST).await;
            answered(&connection, "few", 6000..6001, 1).await;
        });
        for (name, wanted) in [
            ("connections_displaced_total", 1),
            ("connections_refused_limit_total", 1),
            ("flows_displaced_total", 1),
            ("malformed_total", 0),
            ("datagrams_dropped_limit_total", 2),
        ] {
            let found = figure(&stage, "peer", &format!("sandwire_relay_{name} "));
            assert_eq!(found, wanted, "{name}");
        }
        wait_for("it is reported", || {
            let report = stage.report_of("peer");
            let is_flow = |line: &&str| line.contains("udp") && line.contains("too_many");
            report.lines().filter(is_flow).count() == 1
        });
    });
}

/// Sends a datagram from each of these ports of a sandbox, of which so many are answered.
async fn answered(connection: &quinn::Connection, sender: &str, ports: Range<u16>, wanted: usize) {
    for port in ports {
        let mut packet = Vec::new();
        let datagram = Datagram {
            sender,
            source: ([10, 64, 0, 2], port).into(),
            destination: ([198, 51, 100, 7], 7).into(),
            payload: b"?",
        };
        datagram.encode(&mut packet);
        connection.send_datagram(packet.into()).unwrap();
    }
    for number in 0..wanted {
        let answer = tokio::time::timeout(PATIENCE, connection.read_datagram()).await;
        answer
            .unwrap_or_else(|_| panic!("{number} of {wanted}"))
            .unwrap();
    }
    let beyond = tokio::time::timeout(Duration::from_secs(2), connection.read_datagram());
    assert!(beyond.await.is_err(), "more than {wanted}");
}

/// Each address that sends takes one of the ports that the peer's machine has for whatever calls from it.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_takes_no_more_than_its_share_of_the_peer_s_ports() {
    const RANGE: usize = 64;
    const SENT: usize = 100;
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("quic");
        stage.narrow_ports_of_peer("40000 40063");
        stage.exchange("peer", "udp_idle_seconds = 2", "udp_idle_seconds = 600");
        let clients = "clients = [\"host.example\"";
        stage.exchange("peer", clients, &format!("{clients}, \"second.example\""));
        stage.start_peer();
        let first = client(&stage);
        stage.certify_host("second.example", Duration::from_secs(3600));
        let second = client(&stage);
        with_tokio(async {
            let endpoint = endpoint();
            let connect = async |config| {
                let peer = PEER.parse().unwrap();
                let connecting = endpoint.connect_with(config, peer, "peer.example");
                connecting.unwrap().await.unwrap()
            };
            let (first, second) = (connect(first).await, connect(second).await);
            answered(&first, "lab", 5000..5100, RANGE / 4).await;
            answered(&second, "lab", 6000..6001, 1).await;
            // Another sender of the host that has all it may.
            answered(&first, "other", 7000..7002, 2).await;
        });
        let dropped = "sandwire_relay_datagrams_dropped_limit_total ";
        assert_eq!(figure(&stage, "peer", dropped), SENT - RANGE / 4);
        wait_for("who has most has lost two", || {
            figure(&stage, "peer", "sandwire_relay_flows_displaced_total ") == 2
        });
        let said = stage.peer_log().matches("no socket for datagrams").count();
        assert!((1..5).contains(&said), "{}", stage.peer_log());
    });
}

/// Each has memory of its own, so a valid certificate alone isn't enough for any number of them.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_has_no_more_than_128_channels() {
    const MOST: usize = 128;
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("quic");
        stage.start_peer();
        with_tokio(async {
            let endpoint = endpoint();
            let config = client(&stage);
            let connect = async || {
                let peer = PEER.parse().unwrap();
                let connecting = endpoint.connect_with(config.clone(), peer, "peer.example");
                connecting.unwrap().await.unwrap()
            };
            let closed = async |connection: &quinn::Connection| {
                let closed = tokio::time::timeout(PATIENCE, connection.closed()).await;
                closed.expect("it is open").to_string()
            };
            let mut open = Vec::new();
            for _ in 0..MOST {
                open.push(connect().await);
            }
            let beyond = closed(&connect().await).await;
            assert!(beyond.contains("has 128 channels already"), "{beyond}");
            assert!(
                open.iter()
                    .all(|connection| connection.close_reason().is_none())
            );
            // One that goes makes room.
            open.pop().unwrap().close(quinn::VarInt::from_u32(0), b"");
            let deadline = Instant::now() + PATIENCE;
            loop {
                let next = connect().await;
                let end = tokio::time::timeout(Duration::from_millis(300), next.closed()).await;
                if end.is_err() {
                    break;
                }
                assert!(Instant::now() < deadline, "there is no room");
            }
        });
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_host_says_who_has_too_many_connections() {
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.limit("host", "connections_per_sender = 2");
        stage.start_peer();
        stage.start_host();
        let answered = || -> std::io::Result<TcpStream> {
            let to = "198.51.100.7:7".parse().unwrap();
            let mut stream = stage.inside_box(|| TcpStream::connect_timeout(&to, PATIENCE))?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(b"?")?;
            stream.read_exact(&mut [0])?;
            Ok(stream)
        };
        let connections = [(); 3].map(|()| answered());
        let outcomes = connections
            .each_ref()
            .map(|answered| answered.as_ref().err().map(std::io::Error::kind));
        assert_eq!(outcomes, [None, None, Some(ErrorKind::ConnectionReset)]);
        wait_for("it is reported", || {
            let report = stage.report_of("host");
            let of_bound = |line: &&str| line.contains(r#""outcome":"too_many""#);
            let found: Vec<&str> = report.lines().filter(of_bound).collect();
            assert!(found.len() < 2, "{report}");
            found
                .iter()
                .any(|line| line.contains(r#""sender":"lab""#) && line.contains("198.51.100.7:7"))
        });
        let refused = figure(
            &stage,
            "host",
            "sandwire_relay_connections_refused_limit_total ",
        );
        assert_eq!(refused, 1);
    });
}

/// A connection to the echo that has been answered.
fn echoed(stage: &Stage) -> TcpStream {
    let to = "198.51.100.7:7".parse().unwrap();
    let mut stream = stage.inside_box(|| TcpStream::connect_timeout(&to, PATIENCE).unwrap());
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    is_answered(&mut stream).unwrap();
    stream
}

fn is_answered(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"?")?;
    stream.read_exact(&mut [0])
}

/// However much there is of each sender, all together can take what the relay has.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_has_few_gets_what_who_has_most_loses() {
    const MOST: usize = 4;
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("auto");
        stage.exchange("host", "udp_idle_seconds = 2", "udp_idle_seconds = 600");
        stage.limit("host", &format!("connections = {MOST}\nflows = {MOST}"));
        stage.start_peer();
        stage.start_host();
        let mut streams = [(); MOST].map(|()| echoed(&stage));
        let sockets = stage.inside_box(|| {
            [(); MOST].map(|()| {
                let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                socket.set_read_timeout(Some(PATIENCE)).unwrap();
                socket.connect("198.51.100.7:7").unwrap();
                socket
            })
        });
        for socket in &sockets {
            socket.send(b"?").unwrap();
            socket.recv(&mut [0]).unwrap();
        }
        // Another sender.
        let page = stage.in_cgroup("curl --silent --max-time 60 http://198.51.100.7:8080/page");
        assert!(page.contains(MARKER), "{page}");
        let name = stage.in_cgroup("dig +time=20 +short @198.51.100.7 marker.example");
        assert!(name.contains("192.0.2.77"), "{name}");
        let (last, older) = streams.split_last_mut().unwrap();
        assert!(is_answered(last).is_err(), "nobody has lost anything");
        for stream in older {
            is_answered(stream).unwrap();
        }
        for figure_of in ["connections", "flows"] {
            let name = format!("sandwire_relay_{figure_of}_displaced_total ");
            assert_eq!(figure(&stage, "host", &name), 1, "{name}");
        }
        wait_for("it is reported", || {
            let report = stage.report_of("host");
            let is_flow = |line: &str| line.contains("udp") && line.contains("too_many");
            report.lines().filter(|line| is_flow(line)).count() == 1
        });
    });
}

/// Each time that an address is another sender's is a line of the report.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_host_fills_no_report_by_naming_one_sender_and_another() {
    const SENT: usize = 200;
    lab::run_within(DEADLINE, |_| {
        let mut stage = Stage::build("quic");
        stage.start_peer();
        let begun = Instant::now();
        with_tokio(async {
            let endpoint = endpoint();
            let connecting =
                endpoint.connect_with(client(&stage), PEER.parse().unwrap(), "peer.example");
            let connection = connecting.unwrap().await.unwrap();
            for number in 0..SENT {
                let mut packet = Vec::new();
                let datagram = Datagram {
                    sender: ["one", "other"][number % 2],
                    source: ([10, 64, 0, 2], 5000).into(),
                    destination: ([198, 51, 100, 7], 7).into(),
                    payload: b"?",
                };
                datagram.encode(&mut packet);
                connection.send_datagram(packet.into()).unwrap();
            }
            wait_for("all have come", || {
                let passed = "sandwire_relay_datagrams_to_destinations_total ";
                let dropped = "sandwire_relay_datagrams_dropped_limit_total ";
                let [passed, dropped] = [passed, dropped].map(|name| figure(&stage, "peer", name));
                passed + dropped == SENT
            });
        });
        // The last flow ends with the channel, or not yet.
        let seconds = usize::try_from(begun.elapsed().as_secs()).unwrap();
        let report = stage.report_of("peer");
        let lines = report.lines().count();
        assert!(lines <= seconds + 2, "{report}");
        assert!(figure(&stage, "peer", "sandwire_relay_flows_open ") <= 1);
    });
}

fn send_for_ever(mut stream: TcpStream) -> std::io::Result<()> {
    loop {
        stream.write_all(&[0; 65_536])?;
    }
}

/// How many bytes have come over the wire.
fn received(lab: &lab::Lab) -> u64 {
    let shown = lab.run("ip -s -j link show wire0");
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    shown[0]["stats64"]["rx"]["bytes"].as_u64().unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_reads_nothing_holds_up_nobody_else_in_quic() {
    const PORT: u16 = 4011;
    lab::run_within(DEADLINE, |lab| {
        let mut stage = Stage::build("quic");
        stage.start_peer();
        stage.start_host();
        stage.inside_dest(|| serve_tcp(PORT, send_for_ever).unwrap());
        fetch(&stage);
        let silent = stage.inside_box(|| {
            let to: SocketAddr = ([198, 51, 100, 7], PORT).into();
            [(); 8].map(|()| TcpStream::connect_timeout(&to, PATIENCE).unwrap())
        });
        let mut before = 0;
        wait_for("nothing more comes that nobody reads", || {
            std::thread::sleep(Duration::from_secs(2));
            let now = received(lab);
            let is_still = now - before < 100_000;
            before = now;
            is_still
        });
        fetch(&stage);
        drop(silent);
    });
}
