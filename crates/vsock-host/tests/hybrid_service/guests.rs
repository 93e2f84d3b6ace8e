//! Guests of both kinds at one service, under its filter of system calls: any that it lacks kills it.

use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
    net::TcpListener,
    os::unix::net::UnixStream,
    process::{Command, Stdio},
    thread,
};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use sandwire_api::vsock::{HOST_CID, VsockKind, VsockRefusal};
use sandwire_vsock_guest::{Guest, Kind, Settings};
use sandwire_vsock_host::control::VmSpec;

use super::{
    hybrid::{PATIENCE, echo, key, policy, read_line, serve, to_unix, until, vmm},
    process::Service,
};

const STREAM: Kind = Kind::Stream;

pub(crate) fn boot(spec: &VmSpec) -> Guest {
    Guest::connect(&Settings::default(), &spec.vhost_socket()).expect("a guest")
}

/// A client of the host, having said the words, with `more` in the same write.
fn client(spec: &VmSpec, port: u32, more: &str) -> UnixStream {
    let mut stream = UnixStream::connect(spec.stream_socket()).expect("the guest's socket");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time-out");
    stream
        .write_all(format!("CONNECT {port}\n{more}").as_bytes())
        .expect("asking");
    stream
}

#[test]
fn a_guest_reaches_services_siblings_and_the_host_reaches_it() {
    let service = Service::start();
    let echoing = service.path("echo");
    serve(&echoing, echo);
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a TCP service");
    let address = tcp.local_addr().expect("its address");
    thread::spawn(move || {
        let (mut stream, _) = tcp.accept().expect("a connection");
        let line = read_line(&mut stream);
        stream.write_all(line.as_bytes()).expect("repeating it");
    });
    let web = service.spec(
        "web",
        VsockKind::VhostUser,
        &[
            &to_unix("1", &echoing),
            &format!(r#"+2 {{"kind": "tcp", "address": "{address}"}}"#),
            r#"3 {"kind": "sandbox", "lease": "db", "port": 5432}"#,
            r#"4 {"kind": "sandbox", "lease": "fire", "port": 80}"#,
            r#"5 {"kind": "host"}"#,
        ],
    );
    let mut db = service.spec("db", VsockKind::VhostUser, &[]);
    db.virtual_cid = Some(77);
    let fire = service.spec(
        "fire",
        VsockKind::Hybrid,
        &[r#"9 {"kind": "sandbox", "lease": "web", "port": 22}"#],
    );
    for spec in [&web, &db, &fire] {
        service.client().add_vm(spec.clone()).expect("a guest");
    }
    let (mut guest, mut sibling) = (boot(&web), boot(&db));
    // A service on a Unix socket, and one on TCP that is told who calls.
    let socket = guest.open_stream(1).expect("the service");
    guest.send(socket, b"hello").expect("sending");
    assert_eq!(guest.receive_exact(socket, 5).expect("the echo"), b"hello");
    let socket = guest.open_stream(2).expect("the TCP service");
    let line = guest.receive_to_end(socket).expect("its answer");
    let identity = "SANDWIRE/1 tenant=1000 lease=web cid=3 port=2\n";
    assert_eq!(String::from_utf8_lossy(&line), identity);
    // The owner's own socket beside the guest's.
    serve(&web.folder.join("vsock.sock_5"), echo);
    let socket = guest.open_stream(5).expect("the owner's socket");
    guest.send(socket, b"x").expect("sending");
    assert_eq!(guest.receive_exact(socket, 1).expect("the echo"), b"x");
    // A sibling, by the rule's port and by its virtual CID.
    sibling.listen(STREAM, 5432);
    let sibling = thread::spawn(move || {
        for answer in [&b"one"[..], b"two"] {
            let socket = sibling.accept(STREAM, 5432).expect("a call");
            sibling.send(socket, answer).expect("answering");
        }
        sibling
            .run_for(std::time::Duration::from_millis(200))
            .expect("delivering");
    });
    for (cid, port, answer) in [(HOST_CID, 3, &b"one"[..]), (77, 5432, b"two")] {
        let socket = guest.open(STREAM, cid.into(), port).expect("the sibling");
        assert_eq!(guest.receive_exact(socket, 3).expect("its answer"), answer);
    }
    sibling.join().expect("the sibling");
    guest
        .open(STREAM, 77, 5433)
        .expect_err("no rule leads there");
    guest
        .open(STREAM, 78, 5432)
        .expect_err("nobody has that CID");
    // A sibling whose VMM owns its device, and back.
    vmm(&fire.stream_socket(), 80, "OK 1024\nwelcome", |_| ());
    let socket = guest.open_stream(4).expect("the sibling behind a VMM");
    assert_eq!(
        guest.receive_to_end(socket).expect("its answer"),
        b"welcome"
    );
    guest.listen(STREAM, 22);
    let mut call = service.call("fire", 9).expect("a call");
    let socket = guest.accept(STREAM, 22).expect("it arrives");
    guest.send(socket, b"ssh").expect("sending");
    guest.close(socket).expect("closing");
    let reading = thread::spawn(move || {
        let mut text = String::new();
        call.read_to_string(&mut text).map(|_| text)
    });
    until("the sibling has read it", || {
        guest.poll();
        reading.is_finished()
    });
    assert_eq!(reading.join().expect("reading").expect("the text"), "ssh");
}

#[test]
fn a_guest_that_floods_one_behind_a_vmm_leaves_connections_to_its_siblings() {
    let service = Service::start();
    let to_fire = [r#"4 {"kind": "sandbox", "lease": "fire", "port": 80}"#];
    let loud = service.spec("loud", VsockKind::VhostUser, &to_fire);
    let quiet = service.spec("quiet", VsockKind::Hybrid, &to_fire);
    let mut fire = service.spec("fire", VsockKind::Hybrid, &[]);
    fire.limits.connections = 16;
    for spec in [&loud, &quiet, &fire] {
        service.client().add_vm(spec.clone()).expect("a guest");
    }
    vmm(&fire.stream_socket(), 80, "OK 1024\n", echo);
    let mut guest = boot(&loud);
    let held = (0..20).filter(|_| guest.open_stream(4).is_ok()).count();
    assert_eq!(held, 6, "half of three quarters of 16");
    let traffic = service.client().traffic(Some(fire.key)).expect("counters");
    let refused = &traffic[0].traffic.refusals;
    assert_eq!(refused[&VsockRefusal::TooManyConnections], 14);
    let mut call = service.call("quiet", 4).expect("a call");
    call.write_all(b"x").expect("writing");
    call.read_exact(&mut [0]).expect("the echo");
}

#[test]
fn a_client_s_payload_in_the_same_write_arrives_and_messages_keep_their_bounds() {
    let service = Service::start();
    let spec = service.spec("web", VsockKind::VhostUser, &[]);
    service.client().add_vm(spec.clone()).expect("a guest");
    let mut guest = boot(&spec);
    guest.listen(STREAM, 22);
    guest.listen(Kind::Seqpacket, 22);
    let mut stream = client(&spec, 22, "at once");
    let socket = guest.accept(STREAM, 22).expect("it arrives");
    assert_eq!(
        guest.receive_exact(socket, 7).expect("the payload"),
        b"at once"
    );
    guest.send(socket, b"and back").expect("sending");
    let line = read_line(&mut stream);
    let port = line
        .strip_prefix("OK ")
        .and_then(|line| line.strip_suffix('\n'));
    let port: u32 = port
        .and_then(|port| port.parse().ok())
        .expect("OK and a port");
    assert_eq!(guest.socket(socket).address.peer_port, port);
    let mut back = [0; 8];
    stream.read_exact(&mut back).expect("reading");
    assert_eq!(&back, b"and back");
    let flags = SocketFlags::CLOEXEC;
    let messages =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
    let address = SocketAddrUnix::new(spec.seqpacket_socket()).expect("its address");
    connect(&messages, &address).expect("the guest's socket for messages");
    for message in [&b"CONNECT 22\n"[..], b"first", b"second one"] {
        send(&messages, message, SendFlags::empty()).expect("sending");
    }
    let socket = guest.accept(Kind::Seqpacket, 22).expect("it arrives");
    for expected in [&b"first"[..], b"second one"] {
        let (message, _) = guest
            .receive_message(socket)
            .expect("a message")
            .expect("not the end");
        assert_eq!(message, expected);
    }
    let mut line = [0; 32];
    let (length, _) = recv(&messages, &mut line, RecvFlags::empty()).expect("the answer");
    assert!(line[..length].starts_with(b"OK "));
}

#[test]
fn a_service_killed_under_a_guest_is_reconnected_to() {
    let mut service = Service::start();
    let echoing = service.path("echo");
    serve(&echoing, echo);
    let spec = service.spec("web", VsockKind::VhostUser, &[&to_unix("1", &echoing)]);
    service.client().add_vm(spec.clone()).expect("a guest");
    let mut guest = boot(&spec);
    let socket = guest.open_stream(1).expect("the service");
    guest.send(socket, b"x").expect("sending");
    assert_eq!(guest.receive_exact(socket, 1).expect("the echo"), b"x");
    service.kill();
    service.restart();
    guest.reconnect(&spec.vhost_socket()).expect("reconnecting");
    // Before anything else it is told that its connections are no more.
    until("the transport is reset", || {
        guest.poll();
        guest.transport_resets() == 1
    });
    let socket = guest.open_stream(1).expect("the service again");
    guest.send(socket, b"y").expect("sending");
    assert_eq!(guest.receive_exact(socket, 1).expect("the echo"), b"y");
    // Live, and for what is open.
    service
        .client()
        .set_policy(key("web"), policy(&[]))
        .expect("another policy");
    assert_eq!(guest.receive_to_end(socket).unwrap_or_default(), b"");
    guest.open_stream(1).expect_err("no longer allowed");
}

/// Half of what a guest sends isn't taken for all of it.
#[test]
fn a_tcp_service_is_told_that_the_service_was_killed() {
    let mut service = Service::start();
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a TCP service");
    let address = tcp.local_addr().expect("its address");
    let rule = format!(r#"1 {{"kind": "tcp", "address": "{address}"}}"#);
    let spec = service.spec("web", VsockKind::VhostUser, &[&rule]);
    let hybrid = service.spec("fire", VsockKind::Hybrid, &[&rule]);
    for spec in [&spec, &hybrid] {
        service.client().add_vm(spec.clone()).expect("a guest");
    }
    let mut guest = boot(&spec);
    let socket = guest.open_stream(1).expect("the service");
    guest.send(socket, b"x").expect("sending");
    let (ours, _) = tcp.accept().expect("a connection");
    let mut call = service.call("fire", 1).expect("a call");
    call.write_all(b"x").expect("writing");
    let (routed, _) = tcp.accept().expect("a connection");
    for mut stream in [&ours, &routed] {
        stream.read_exact(&mut [0]).expect("reading");
    }
    service.kill();
    for mut stream in [&ours, &routed] {
        let heard = stream.read(&mut [0]).map_err(|error| error.kind());
        assert_eq!(heard, Err(ErrorKind::ConnectionReset));
    }
}

#[test]
fn tcpdump_reads_a_guest_s_packets() {
    let service = Service::start();
    let echoing = service.path("echo");
    serve(&echoing, echo);
    let spec = service.spec("web", VsockKind::VhostUser, &[&to_unix("1", &echoing)]);
    service.client().add_vm(spec.clone()).expect("a guest");
    let path = service.path("web.pcap");
    let file = File::create(&path).expect("a file");
    let capture = service
        .client()
        .capture(key("web"), None, &file)
        .expect("a capture");
    // Packets are recorded from the next turn of the guest's worker on, which a list waits for.
    service.client().connections(None).expect("a list");
    let mut guest = boot(&spec);
    let socket = guest.open_stream(1).expect("the service");
    guest.send(socket, b"hello").expect("sending");
    assert_eq!(guest.receive_exact(socket, 5).expect("the echo"), b"hello");
    guest.close(socket).expect("closing");
    let read = || {
        let output = Command::new("tcpdump")
            .args(["-n", "-t", "-r"])
            .arg(&path)
            .stdin(Stdio::null())
            .output()
            .expect("tcpdump, which `cargo xtask setup` installs");
        // Its word on the file, and the packets; the file's header is written with the first of them.
        String::from_utf8_lossy(&[output.stderr, output.stdout].concat()).into_owned()
    };
    until("the payload is in the file, both ways", || {
        let text = read();
        text.contains("link-type VSOCK")
            && text.contains("> 2.1 CONNECT")
            && text.contains("> 2.1 PAYLOAD, length 81")
            && text.contains("2.1 > 3.")
            && text.matches("PAYLOAD").count() == 2
            && text.contains("DISCONNECT")
    });
    drop(capture);
}
