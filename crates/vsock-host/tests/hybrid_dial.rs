//! Dialling what routes lead to, without a worker or a router around it.

mod hybrid;

use std::{
    io::{Read, Write},
    net::TcpListener,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use hybrid::{PATIENCE, serve};
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketType, bind, listen, recv, socket,
};
use sandwire_api::vsock::{VsockRefusal, VsockType};
use sandwire_vsock_host::{
    dial::{CLOSES, Dial, Progress},
    directory::{Route, Target},
    hybrid::callee::Callee,
    limits::Limits,
    readiness::Poller,
};

fn to(target: Target) -> Route {
    Route {
        target,
        identity: None,
        peer: "peer".to_owned(),
        caller: hybrid::key("web"),
    }
}

/// A port of a sibling whose VMM is at that socket.
fn sibling(socket: PathBuf, port: u32) -> Target {
    Target::HybridVm {
        socket,
        port,
        callee: Arc::new(Callee::new(&Limits::default(), Arc::default())),
    }
}

/// Dials to the end; how often it had to wait tells whether it spins.
fn dial(route: &Route, kind: VsockType) -> (Result<OwnedFd, VsockRefusal>, usize) {
    let mut dial = Dial::start(route, kind).expect("a dial");
    let mut poller = Poller::new().expect("an epoll instance");
    poller.add(dial.fd(), 1, dial.interest()).expect("watching");
    let end = Instant::now() + PATIENCE;
    let mut waits = 0;
    loop {
        match dial.advance() {
            Progress::Done(socket) => return (Ok(socket), waits),
            Progress::Failed(refusal) => return (Err(refusal), waits),
            Progress::Pending => {}
        }
        waits += 1;
        let ready = poller.wait(Some(end)).expect("waiting");
        assert_eq!(ready.len(), 1, "nothing happened");
    }
}

fn outcome(target: Target, kind: VsockType) -> Option<VsockRefusal> {
    dial(&to(target), kind).0.err()
}

#[test]
fn what_is_not_there_is_unreachable_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let stale = folder.path().join("stale");
    drop(UnixListener::bind(&stale).expect("a socket"));
    let closed = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = closed.local_addr().expect("its address");
    drop(closed);
    for target in [
        Target::Unix(folder.path().join("nothing")),
        Target::Unix(stale),
        Target::Unix(PathBuf::from(format!("/{}", "x".repeat(200)))),
        Target::Tcp(address),
    ] {
        let (outcome, waits) = dial(&to(target.clone()), VsockType::Stream);
        let refusal = outcome.err();
        assert_eq!(refusal, Some(VsockRefusal::Unreachable), "{target:?}");
        assert!(waits <= 1, "{waits} waits for {target:?}");
    }
}

#[test]
fn a_stream_is_no_messages() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("streams");
    let _streams = UnixListener::bind(&path).expect("a service");
    let refusal = outcome(Target::Unix(path), VsockType::Seqpacket);
    assert_eq!(refusal, Some(VsockRefusal::SeqpacketUnsupported));
}

#[test]
fn with_messages_the_identity_is_the_first_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("messages");
    let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    bind(&listener, &SocketAddrUnix::new(&path).expect("an address")).expect("binding");
    listen(&listener, 1).expect("listening");
    let mut route = to(Target::Unix(path));
    route.identity = Some("SANDWIRE/1 who\n".to_owned());
    let (client, _) = dial(&route, VsockType::Seqpacket);
    rustix::io::write(client.expect("a connection"), b"second").expect("writing");
    let server = rustix::net::accept(&listener).expect("its other side");
    for expected in [&b"SANDWIRE/1 who\n"[..], b"second"] {
        let mut message = [0; 64];
        let (length, _) = recv(&server, &mut message, RecvFlags::empty()).expect("a message");
        assert_eq!(&message[..length], expected);
    }
}

#[test]
fn a_full_backlog_is_waited_for_without_spinning() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("busy");
    let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
    bind(&listener, &SocketAddrUnix::new(&path).expect("an address")).expect("binding");
    listen(&listener, 0).expect("listening");
    let _first = UnixStream::connect(&path).expect("the only place");
    let accepting = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        let accept = || rustix::net::accept(&listener).expect("accepting");
        (accept(), accept())
    });
    let (outcome, waits) = dial(&to(Target::Unix(path)), VsockType::Stream);
    outcome.expect("there was room in the end");
    assert!((3..=20).contains(&waits), "{waits} waits in 300 ms");
    accepting.join().expect("both are accepted");
}

#[test]
fn an_answer_in_pieces_is_read_to_its_newline_and_not_a_byte_further() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("vmm");
    serve(&path, |mut stream| {
        let mut asked = [0; 13];
        stream.read_exact(&mut asked).expect("the question");
        assert_eq!(&asked, b"CONNECT 5432\n");
        for piece in ["O", "K 10", "7374", "\nfirst bytes"] {
            stream.write_all(piece.as_bytes()).expect("a piece");
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let (socket, waits) = dial(&to(sibling(path, 5432)), VsockType::Stream);
    assert!(waits <= 10, "{waits} waits for four pieces");
    let mut stream = UnixStream::from(socket.expect("a connection"));
    stream.set_nonblocking(false).expect("to block");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("the rest");
    assert_eq!(rest, "first bytes");
}

#[test]
fn a_sibling_that_refuses_is_asked_again_a_few_times_and_no_more() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("vmm");
    let asked = Arc::new(AtomicU8::new(0));
    let asks = asked.clone();
    serve(&path, move |mut stream| {
        assert_eq!(hybrid::read_line(&mut stream), "CONNECT 1\n");
        asks.fetch_add(1, Relaxed);
    });
    let (outcome, waits) = dial(&to(sibling(path, 1)), VsockType::Stream);
    assert_eq!(outcome.err(), Some(VsockRefusal::Unreachable));
    assert_eq!(asked.load(Relaxed), 1 + CLOSES);
    assert!(waits < 20, "{waits} waits");
}

#[test]
fn a_link_in_an_owners_folder_leads_nowhere() {
    let folder = tempfile::tempdir().expect("a folder");
    let precious = folder.path().join("precious.sock");
    let listener = UnixListener::bind(&precious).expect("a socket");
    listener.set_nonblocking(true).expect("non-blocking");
    let link = folder.path().join("vsock.sock_1024");
    std::os::unix::fs::symlink(&precious, &link).expect("a link");
    let target = Target::Unix(link.clone());
    assert_eq!(
        outcome(target, VsockType::Stream),
        Some(VsockRefusal::Unreachable)
    );
    assert!(listener.accept().is_err(), "nobody has come");
    let target = Target::Unix(precious);
    assert_eq!(outcome(target, VsockType::Stream), None);
    assert!(listener.accept().is_ok(), "the socket itself is reached");
}
