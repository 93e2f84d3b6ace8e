//! The device with a guest that has real virtqueues, and clients and services that are real sockets.

use std::{
    fs,
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::{Arc, mpsc::sync_channel},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::epoll,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use sandwire_api::vsock::{
    HOST_CID, PortRange, VsockConnection, VsockDestination, VsockPolicy, VsockRefusal, VsockRule,
    VsockState, VsockType,
};
use sandwire_vsock_guest::{Guest, Kind, Settings};

use super::*;
use crate::{
    budget::Budget,
    directory::{Directory, Face, Placement},
    lifeline::Lifeline,
    packet::Operation,
    worker::{self, Command, WorkerHandle, WorkerSettings},
};

mod by_hand;

/// The port of each guest's own host-side service.
const SERVICE: u32 = 1024;

struct Lab {
    folder: tempfile::TempDir,
    directory: Arc<Directory>,
    worker: WorkerHandle,
    thread: Option<thread::JoinHandle<()>>,
}

struct Machine {
    folder: PathBuf,
    key: VmKey,
    counters: Arc<VmCounters>,
}

impl Lab {
    fn new() -> Self {
        Self::polling(Duration::ZERO)
    }

    /// With a worker that looks for work that long before it sleeps.
    fn polling(busy_poll: Duration) -> Self {
        let directory = Arc::new(Directory::new());
        let budget = Arc::new(Budget::new(1 << 30));
        let settings = WorkerSettings { busy_poll };
        let (worker, thread) = worker::spawn(
            0,
            Arc::clone(&directory),
            budget,
            settings,
            Lifeline::default(),
        )
        .expect("a worker");
        let folder = tempfile::tempdir().expect("a folder");
        Self {
            folder,
            directory,
            worker,
            thread: Some(thread),
        }
    }

    fn machine(&self, name: &str, rules: Vec<VsockRule>, limits: Limits) -> Machine {
        let (machine, setup) = self.prepare(name, rules, limits);
        let (sender, receiver) = sync_channel(1);
        self.worker.send(Command::AddVm(Box::new(setup), sender));
        receiver.recv().expect("an answer").expect("being served");
        machine
    }

    /// A guest that is in the directory, and that no worker serves yet.
    fn prepare(&self, name: &str, rules: Vec<VsockRule>, limits: Limits) -> (Machine, VmSetup) {
        let key = VmKey {
            tenant: 1000,
            lease: name.parse().expect("a name"),
        };
        let folder = self.folder.path().join(name);
        fs::create_dir(&folder).expect("a folder");
        let counters = Arc::new(VmCounters::default());
        let vhost_listener = UnixListener::bind(folder.join("vhost.sock")).expect("listening");
        vhost_listener.set_nonblocking(true).expect("non-blocking");
        let listen = |file: &str, kind| {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).expect("a socket");
            let address = SocketAddrUnix::new(folder.join(file)).expect("a short path");
            rustix::net::bind(&socket, &address).expect("binding");
            rustix::net::listen(&socket, 128).expect("listening");
            socket
        };
        let setup = VmSetup {
            key: key.clone(),
            cid: 3,
            limits,
            vhost_listener,
            stream_listener: listen("vsock.sock", SocketType::STREAM),
            seqpacket_listener: listen("vsock.sock_seqpacket", SocketType::SEQPACKET),
            counters: Arc::clone(&counters),
        };
        self.directory
            .add(Placement {
                key: key.clone(),
                face: Face::Local(self.worker.clone()),
                cid: 3,
                virtual_cid: None,
                socket: folder.join("vsock.sock"),
                policy: VsockPolicy { rules },
            })
            .expect("a place in the directory");
        let machine = Machine {
            folder,
            key,
            counters,
        };
        (machine, setup)
    }

    /// What a worker has, for a guest that is served by the test itself.
    fn context(&self) -> Context {
        Context::new(
            epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll instance"),
            Arc::clone(&self.directory),
            Arc::new(Budget::new(1 << 30)),
            Default::default(),
        )
    }

    fn connections(&self) -> Vec<VsockConnection> {
        let (sender, receiver) = sync_channel(1);
        self.worker.send(Command::List(None, sender));
        receiver.recv().expect("an answer")
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.worker.send(Command::Stop);
        let ended = self.thread.take().expect("it runs").join();
        assert!(ended.is_ok() || thread::panicking(), "the worker panicked");
    }
}

impl Machine {
    fn boot(&self) -> Guest {
        Guest::connect(&Settings::default(), &self.folder.join("vhost.sock")).expect("a guest")
    }

    /// A service of the host, for the rule `to = host`.
    fn service(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.folder.join(format!("vsock.sock_{port}"))).expect("listening")
    }

    fn client(&self, port: u32) -> UnixStream {
        let mut socket = UnixStream::connect(self.folder.join("vsock.sock")).expect("connecting");
        socket
            .set_read_timeout(Some(Duration::from_secs(60)))
            .expect("a time-out");
        writeln!(socket, "CONNECT {port}").expect("asking");
        socket
    }
}

fn to_host(port: u32) -> VsockRule {
    VsockRule {
        port: PortRange::single(port).expect("a port"),
        to: VsockDestination::Host,
        identity: false,
    }
}

fn to_sibling(port: u32, lease: &str, their_port: u32) -> VsockRule {
    VsockRule {
        port: PortRange::single(port).expect("a port"),
        to: VsockDestination::Sandbox {
            lease: lease.parse().expect("a name"),
            owner_uid: None,
            port: their_port,
        },
        identity: false,
    }
}

fn line(socket: &mut UnixStream) -> String {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        assert_eq!(
            socket.read(&mut byte).expect("reading the answer"),
            1,
            "it closed after {line:?}"
        );
        line.push(byte[0]);
    }
    String::from_utf8(line).expect("text")
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..251_u8).cycle().step_by(31).take(bytes).collect()
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "{what} didn't come to be");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn tokens_survive_being_numbers() {
    let tokens = [
        Token::Wake,
        Token::VmmListener(1),
        Token::StreamListener(2),
        Token::SeqpacketListener(3),
        Token::FrontEnd(MOST_NUMBERS - 1),
        Token::Kick(5, 2),
        Token::Handshake(6, 7),
        Token::Flow(MOST_NUMBERS - 1, MOST_NUMBERS - 1),
        Token::Hold(9),
    ];
    for token in tokens {
        assert_eq!(Token::unpack(token.pack()), Some(token));
    }
    assert_eq!(Token::unpack(u64::MAX), None);
}

#[test]
fn a_guest_reaches_a_service_and_both_may_end() {
    let lab = Lab::new();
    let machine = lab.machine("web", vec![to_host(SERVICE)], Limits::default());
    let listener = machine.service(SERVICE);
    let mut guest = machine.boot();
    let socket = guest.open_stream(SERVICE).expect("connecting");
    let (mut service, _) = listener.accept().expect("a connection");
    let sent = pattern(3_000_000);
    let expected = sent.clone();
    let reader = thread::spawn(move || {
        let mut got = Vec::new();
        service.read_to_end(&mut got).expect("reading to the end");
        assert_eq!(got.len(), expected.len());
        assert!(got == expected, "the bytes are others");
        service
            .write_all(b"thanks")
            .expect("answering after the guest's end");
    });
    guest.send(socket, &sent).expect("sending");
    guest.shut_down(socket, crate::packet::flags::SHUTDOWN_SEND);
    let answer = guest
        .receive_to_end(socket)
        .expect("the answer, after our own end");
    assert_eq!(answer, b"thanks");
    reader.join().expect("the service");
    guest.close(socket).expect("closing");
    assert_eq!(guest.violations(), [] as [String; 0]);
    eventually("the end of the connection", || lab.connections().is_empty());
    let traffic = machine.counters.snapshot();
    assert_eq!(
        (traffic.egress_bytes, traffic.ingress_bytes),
        (3_000_000, 6)
    );
    assert_eq!(
        (
            traffic.opened_by_guest,
            traffic.connections,
            traffic.buffered_bytes
        ),
        (1, 0, 0)
    );
}

#[test]
fn a_client_reaches_a_guest_and_sends_at_once() {
    let lab = Lab::new();
    let machine = lab.machine("web", vec![], Limits::default());
    let mut guest = machine.boot();
    guest.listen(Kind::Stream, 52);
    // Before the client connects: who says nothing for two seconds is turned away.
    let sent = pattern(3_000_000);
    let mut all = b"CONNECT 52\n".to_vec();
    all.extend(&sent);
    let mut client = UnixStream::connect(machine.folder.join("vsock.sock")).expect("connecting");
    let mut writer = client.try_clone().expect("a second handle");
    let thread = thread::spawn(move || {
        writer.write_all(&all).expect("writing");
        writer.shutdown(Shutdown::Write).expect("ending");
    });
    let socket = guest.accept(Kind::Stream, 52).expect("being called");
    let got = guest.receive_to_end(socket).expect("all of it");
    assert!(got == sent, "the bytes are others");
    thread.join().expect("the writer");
    guest
        .send(socket, b"bye")
        .expect("answering after the client's end");
    guest.close(socket).expect("closing");
    assert_eq!(line(&mut client), format!("OK {FIRST_PORT}\n"));
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).expect("the rest");
    assert_eq!(rest, b"bye");
    assert_eq!(guest.violations(), [] as [String; 0]);
    assert_eq!(machine.counters.snapshot().ingress_bytes, 3_000_000);
}

#[test]
fn siblings_talk_if_a_rule_says_so_and_else_are_reset() {
    let lab = Lab::new();
    let one = lab.machine("one", vec![to_sibling(9000, "two", 80)], Limits::default());
    let two = lab.machine("two", vec![], Limits::default());
    let (mut guest_one, mut guest_two) = (one.boot(), two.boot());
    guest_two.listen(Kind::Stream, 80);
    guest_two.listen(Kind::Seqpacket, 80);
    let served = thread::spawn(move || {
        let socket = guest_two.accept(Kind::Stream, 80).expect("being called");
        let got = guest_two.receive_to_end(socket).expect("all of it");
        guest_two.send(socket, &got).expect("sending it back");
        guest_two.close(socket).expect("closing");
        let socket = guest_two.accept(Kind::Seqpacket, 80).expect("being called");
        let mut messages = Vec::new();
        while let Some(message) = guest_two.receive_message(socket).expect("a message") {
            messages.push(message);
        }
        assert!(guest_two.open_stream(9000).is_err(), "no rule lets it call");
        assert_eq!(guest_two.violations(), [] as [String; 0]);
        messages
    });
    let socket = guest_one.open_stream(9000).expect("calling");
    let sent = pattern(1_000_000);
    guest_one.send(socket, &sent).expect("sending");
    guest_one.shut_down(socket, crate::packet::flags::SHUTDOWN_SEND);
    assert!(
        guest_one.receive_to_end(socket).expect("the echo") == sent,
        "the bytes are others"
    );
    let socket = guest_one.open(Kind::Seqpacket, 2, 9000).expect("calling");
    let messages = [
        (pattern(100_000), false),
        (b"end".to_vec(), true),
        (pattern(7), false),
    ];
    for (message, record) in &messages {
        guest_one
            .send_message(socket, message, *record)
            .expect("sending");
    }
    guest_one.close(socket).expect("closing");
    assert_eq!(
        served.join().expect("the sibling"),
        messages,
        "with their marks"
    );
    assert_eq!(guest_one.violations(), [] as [String; 0]);
    assert_eq!(two.counters.refused(VsockRefusal::Policy), 1);
}

#[test]
fn a_policy_that_changes_resets_what_it_no_longer_allows() {
    let lab = Lab::new();
    let machine = lab.machine("web", vec![to_host(1), to_host(2)], Limits::default());
    let (first, second) = (machine.service(1), machine.service(2));
    let mut guest = machine.boot();
    let sockets = [1, 2].map(|port| guest.open_stream(port).expect("connecting"));
    let (mut cut, _) = first.accept().expect("a connection");
    let (mut kept, _) = second.accept().expect("a connection");
    let policy = VsockPolicy {
        rules: vec![to_host(2)],
    };
    lab.directory
        .set_policy(&machine.key, policy)
        .expect("it is there");
    lab.worker.send(Command::PolicyChanged(machine.key.clone()));
    assert_eq!(cut.read(&mut [0]).expect("its end"), 0);
    kept.write_all(b"still").expect("writing");
    assert_eq!(
        guest.receive_exact(sockets[1], 5).expect("receiving"),
        b"still"
    );
    assert!(guest.receive_exact(sockets[0], 1).is_err(), "it was reset");
    assert!(guest.open_stream(1).is_err());
    assert_eq!(machine.counters.refused(VsockRefusal::Policy), 2);
    let list = lab.connections();
    assert_eq!(list.len(), 1);
    assert_eq!(
        (list[0].peer_port, list[0].state),
        (2, VsockState::Established)
    );
}

#[test]
fn a_guest_that_refuses_closes_the_client_without_an_answer() {
    let lab = Lab::new();
    let machine = lab.machine("web", vec![], Limits::default());
    let mut unattended = machine.client(9);
    assert_eq!(
        unattended.read(&mut [0]).expect("its end"),
        0,
        "there is no guest"
    );
    let mut guest = machine.boot();
    let mut client = machine.client(9);
    let waiting = thread::spawn(move || client.read(&mut [0]).expect("its end"));
    guest.run_for(Duration::from_millis(200)).expect("running");
    assert_eq!(waiting.join().expect("the client"), 0);
    assert!(lab.connections().is_empty());
}

#[test]
fn a_slow_service_bounds_what_waits_and_gets_all_of_it() {
    let lab = Lab::new();
    let machine = lab.machine("web", vec![to_host(SERVICE)], Limits::default());
    let listener = machine.service(SERVICE);
    let mut guest = machine.boot();
    let socket = guest.open_stream(SERVICE).expect("connecting");
    let (mut service, _) = listener.accept().expect("a connection");
    let sent = pattern(2_000_000);
    let mut taken = 0;
    while taken < sent.len() {
        let now = guest.try_send(socket, &sent[taken..]).expect("sending");
        taken += now;
        if now == 0 && guest.wait(Duration::from_millis(50)).is_err() {
            break;
        }
        let waiting = machine.counters.snapshot().buffered_bytes;
        assert!(
            waiting <= u64::from(Limits::default().connection_bytes),
            "{waiting} bytes wait"
        );
        if now == 0 {
            break;
        }
    }
    assert!(taken < sent.len(), "nobody reads, and all of it went");
    let reader = thread::spawn(move || {
        let mut got = Vec::new();
        service.read_to_end(&mut got).expect("reading");
        got
    });
    guest.send(socket, &sent[taken..]).expect("the rest");
    guest.close(socket).expect("closing");
    assert!(
        reader.join().expect("the reader") == sent,
        "the bytes are others"
    );
    assert_eq!(guest.violations(), [] as [String; 0]);
}

#[test]
fn requests_that_are_reset_at_once_leave_nothing() {
    let lab = Lab::new();
    let machine = lab.machine("web", vec![to_host(SERVICE)], Limits::default());
    let listener = machine.service(SERVICE);
    let mut guest = machine.boot();
    for _ in 0..50 {
        let socket = guest.start_open(Kind::Stream, 2, SERVICE);
        guest.reset(socket);
    }
    guest.run_for(Duration::from_millis(300)).expect("running");
    assert_eq!(lab.connections(), []);
    assert_eq!(machine.counters.snapshot().connections, 0);
    drop(listener);
}

#[test]
fn a_worker_that_polls_answers_with_and_without_kicks() {
    let lab = Lab::polling(Duration::from_millis(2));
    let machine = lab.machine("web", vec![to_host(SERVICE)], Limits::default());
    let listener = machine.service(SERVICE);
    let mut guest = machine.boot();
    let socket = guest.open_stream(SERVICE).expect("connecting");
    let (mut service, _) = listener.accept().expect("a connection");
    let echo = thread::spawn(move || {
        let mut bytes = [0; 64];
        while let Ok(read @ 1..) = service.read(&mut bytes) {
            service.write_all(&bytes[..read]).expect("sending it back");
        }
    });
    for pause in [0, 0, 10, 0, 10, 0] {
        // Longer than it polls: then it sleeps, and wants a kick.
        thread::sleep(Duration::from_millis(pause));
        for _ in 0..20 {
            guest.send(socket, b"ping").expect("sending");
            assert_eq!(guest.receive_exact(socket, 4).expect("the echo"), b"ping");
        }
    }
    guest.close(socket).expect("closing");
    echo.join().expect("the service");
    assert_eq!(guest.violations(), [] as [String; 0]);
}

#[test]
fn a_vmm_that_takes_the_memory_away_is_let_go_and_the_neighbour_stays() {
    let lab = Lab::new();
    let one = lab.machine("one", vec![to_host(SERVICE)], Limits::default());
    let two = lab.machine("two", vec![to_host(SERVICE)], Limits::default());
    let (_first, second) = (one.service(SERVICE), two.service(SERVICE));
    let (mut guest, mut neighbour) = (one.boot(), two.boot());
    let socket = guest.open_stream(SERVICE).expect("connecting");
    for fd in guest.transport().memory().files() {
        // SAFETY: the descriptor is the guest's memory, which lives; only its length is changed, and the
        // guest isn't used any more.
        assert_eq!(unsafe { libc::ftruncate(fd, 0) }, 0);
    }
    let _ = socket;
    guest.transport().kick_queue(1);
    eventually("the VMM to be let go", || !one.counters.snapshot().attached);
    let socket = neighbour.open_stream(SERVICE).expect("connecting");
    let (mut service, _) = second.accept().expect("a connection");
    neighbour.send(socket, b"alive").expect("sending");
    let mut got = [0; 5];
    service.read_exact(&mut got).expect("reading");
    assert_eq!(&got, b"alive");
    std::mem::forget(guest);
}
