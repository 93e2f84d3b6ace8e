//! SEQPACKET: messages keep their bounds.

use std::{
    io::{ErrorKind, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixListener,
    },
    path::Path,
};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, connect, recv, send, socket,
};
use sandwire_api::vsock::{VsockDestination, VsockRefusal};
use sandwire_vsock_guest::{
    Content, Guest, GuestError, Kind, Operation, Settings, Socket, packet::HOST_CID, socket::State,
};
use sandwire_vsock_host::limits::Limits;

use crate::host::{
    Host, PATIENCE, PORT, Vm, clean, eventually, name, policy, rule, seqpacket_listener, to_host,
    works,
};

fn connected(vm: &Vm, guest: &mut Guest) -> (Socket, OwnedFd) {
    let path = vm.port_socket(PORT);
    drop(std::fs::remove_file(&path));
    let listener = seqpacket_listener(&path);
    let socket = guest
        .open(Kind::Seqpacket, HOST_CID, PORT)
        .expect("connecting");
    (socket, accept(&listener))
}

fn accept(listener: &OwnedFd) -> OwnedFd {
    let mut accepted = None;
    eventually("a connection to the service", || {
        accepted = rustix::net::accept(listener).ok();
        accepted.is_some()
    });
    let accepted = accepted.expect("it was accepted");
    patient(&accepted);
    accepted
}

fn patient(socket: impl AsFd) {
    for timeout in [
        rustix::net::sockopt::Timeout::Recv,
        rustix::net::sockopt::Timeout::Send,
    ] {
        rustix::net::sockopt::set_socket_timeout(&socket, timeout, Some(PATIENCE))
            .expect("a time-out");
    }
}

/// The next message; empty at the end.
fn next(socket: &OwnedFd) -> Vec<u8> {
    let mut bytes = vec![0; 300 * 1024];
    let (count, length) = recv(socket, &mut bytes[..], RecvFlags::TRUNC).expect("a message");
    assert!(length <= bytes.len() || count == bytes.len());
    bytes.truncate(count);
    bytes
}

fn say(socket: &OwnedFd, message: &[u8]) {
    let count = send(socket, message, SendFlags::NOSIGNAL).expect("sending a message");
    assert_eq!(count, message.len());
}

fn dial(path: &Path, line: &[u8]) -> OwnedFd {
    let client = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    connect(&client, &SocketAddrUnix::new(path).expect("a path")).expect("connecting");
    patient(&client);
    say(&client, line);
    client
}

#[test]
fn messages_keep_their_bounds_both_ways() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, peer) = connected(&vm, &mut guest);
    for (seed, length) in [1, 2, 43, 44, 4096, 4097, 65_535, 65_536, 65_537, 150_000]
        .into_iter()
        .enumerate()
    {
        let message = Content::new(seed as u64).take(length);
        guest
            .send_message(socket, &message, seed % 2 == 0)
            .expect("sending");
        guest.send_message(socket, b"next", false).expect("sending");
        assert_eq!(next(&peer), message, "{length} bytes from the guest");
        assert_eq!(next(&peer), b"next");
        say(&peer, &message);
        say(&peer, b"next");
        let (got, _) = guest
            .receive_message(socket)
            .expect("receiving")
            .expect("a message");
        assert_eq!(got, message, "{length} bytes to the guest");
        let (got, _) = guest
            .receive_message(socket)
            .expect("receiving")
            .expect("a message");
        assert_eq!(got, b"next");
    }
    guest.close(socket).expect("closing");
    vm.wait_for_connections(0);
    clean(&guest);
}

#[test]
fn the_host_reaches_a_guests_messages_by_a_socket_of_their_own() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    guest.listen(Kind::Seqpacket, 5000);
    let client = dial(&vm.seqpacket_socket(), b"CONNECT 5000\n");
    let socket = guest.accept(Kind::Seqpacket, 5000).expect("accepting");
    let port = guest.socket(socket).address.peer_port;
    assert_eq!(next(&client), format!("OK {port}\n").into_bytes());
    for length in [1, 70_000, 5] {
        let message = Content::new(length as u64).take(length);
        say(&client, &message);
        let (got, _) = guest
            .receive_message(socket)
            .expect("receiving")
            .expect("a message");
        assert_eq!(got, message);
        guest
            .send_message(socket, &message, false)
            .expect("sending");
        assert_eq!(next(&client), message);
    }
    drop(client);
    assert!(guest.receive_message(socket).expect("the end").is_none());
    guest.close(socket).expect("closing");
    vm.wait_for_connections(0);
    clean(&guest);
}

#[test]
fn a_message_over_the_ceiling_is_reset_and_counted() {
    let mut host = Host::new(1);
    let limits = Limits {
        message_bytes: 10_000,
        ..Limits::default()
    };
    let vm = host.vm_with(limits, to_host(&[PORT]));
    let mut guest = vm.boot();
    let (socket, peer) = connected(&vm, &mut guest);
    guest
        .send_message(socket, &[1; 10_000], false)
        .expect("sending the longest");
    assert_eq!(next(&peer).len(), 10_000);
    guest
        .send_message(socket, &[1; 10_001], false)
        .expect("sending one more");
    guest
        .wait_until("RST", |guest| guest.socket(socket).state == State::Reset)
        .expect("RST");
    assert_eq!(vm.refused(VsockRefusal::MessageTooLong), 1);
    vm.wait_for_connections(0);
    works(&vm, &mut guest);
    clean(&guest);
}

/// By the ceiling of a message, or by what the connection may have waiting, where that is less.
#[test]
fn a_message_without_an_end_is_bounded() {
    for (message_bytes, connection_bytes) in [(100_000, 1 << 20), (256 * 1024, 64 * 1024)] {
        let mut host = Host::new(1);
        let limits = Limits {
            message_bytes,
            connection_bytes,
            ..Limits::default()
        };
        let vm = host.vm_with(limits, to_host(&[PORT]));
        let mut guest = vm.boot();
        let (socket, _peer) = connected(&vm, &mut guest);
        // Packets of a message whose last one never comes.
        eventually("RST", || {
            let more = guest.try_send(socket, &[1; 60_000]);
            assert!(vm.traffic().buffered_bytes <= 128 * 1024);
            guest.poll();
            more.is_err() && guest.socket(socket).state == State::Reset
        });
        assert_eq!(vm.refused(VsockRefusal::MessageTooLong), 1);
        vm.wait_for_connections(0);
        assert_eq!(vm.traffic().buffered_bytes, 0);
        works(&vm, &mut guest);
        clean(&guest);
    }
}

#[test]
fn a_message_to_a_stream_service_is_refused() {
    let mut host = Host::new(1);
    let address = "127.0.0.1:9".parse().expect("an address");
    let vm = host.vm_with(
        Limits::default(),
        policy([rule(PORT, VsockDestination::Tcp { address })]),
    );
    let mut guest = vm.boot();
    let refused = guest.open(Kind::Seqpacket, HOST_CID, PORT);
    assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
    assert_eq!(vm.refused(VsockRefusal::SeqpacketUnsupported), 1);
    clean(&guest);
}

#[test]
fn messages_to_a_sibling_whose_vmm_has_only_streams_are_refused_and_streams_arrive() {
    const ALIAS: u32 = 2000;
    const CID: u32 = 77;
    let mut host = Host::new(1);
    let vmm = UnixListener::bind(host.hybrid("fire", CID)).expect("listening as a VMM");
    vmm.set_nonblocking(true).expect("not to block");
    let sibling = VsockDestination::Sandbox {
        lease: name("fire"),
        owner_uid: None,
        port: 7,
    };
    let rules = [rule(ALIAS, sibling), rule(PORT, VsockDestination::Host)];
    let vm = host.vm_with(Limits::default(), policy(rules));
    let mut guest = vm.boot();
    guest.keep_log();
    for (count, (cid, port)) in (1..).zip([(HOST_CID, ALIAS), (CID.into(), 7)]) {
        let refused = guest.open(Kind::Seqpacket, cid, port);
        assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
        let (answer, _) = guest.take_log().pop().expect("an answer");
        let heard = (answer.op, answer.kind, answer.src_cid, answer.src_port);
        let reset = (Operation::Reset as u16, Kind::Seqpacket as u16, cid, port);
        assert_eq!(heard, reset);
        assert_eq!(vm.refused(VsockRefusal::SeqpacketUnsupported), count);
        let called = vmm.accept().map_err(|error| error.kind());
        assert_eq!(called.err(), Some(ErrorKind::WouldBlock), "it was called");

        // The same port by a stream.
        let socket = guest.start_open(Kind::Stream, cid, port);
        guest.kick();
        let mut called = crate::host::accept(&vmm);
        assert_eq!(crate::host::read_line(&mut called), "CONNECT 7\n");
        called.write_all(b"OK 1024\nhello").expect("answering");
        guest
            .wait_until("the answer", |guest| {
                guest.socket(socket).state == State::Established
            })
            .expect("connecting");
        assert_eq!(guest.receive_exact(socket, 5).expect("it"), b"hello");
        guest.close(socket).expect("closing");
        guest.take_log();
    }
    vm.wait_for_connections(0);
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn a_stream_and_messages_may_share_their_ports() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    guest.listen(Kind::Stream, 5000);
    guest.listen(Kind::Seqpacket, 5000);
    let mut stream_client = vm.dial(5000);
    let client = dial(&vm.seqpacket_socket(), b"CONNECT 5000\n");
    let messages = guest.accept(Kind::Seqpacket, 5000).expect("accepting");
    let stream = guest.accept(Kind::Stream, 5000).expect("accepting");
    crate::host::read_line(&mut stream_client);
    next(&client);
    guest.send(stream, b"bytes").expect("sending");
    guest
        .send_message(messages, b"message", false)
        .expect("sending");
    assert_eq!(next(&client), b"message");
    assert_eq!(crate::host::read_exact(&mut stream_client, 5), b"bytes");
    clean(&guest);
}

#[test]
fn a_message_as_long_as_the_window_comes_through_behind_a_short_one() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    for short in [1, 1000, 100_000] {
        let (socket, peer) = connected(&vm, &mut guest);
        let window = guest.socket(socket).buf_alloc as usize;
        let reader = std::thread::spawn(move || [next(&peer).len(), next(&peer).len()]);
        for length in [short, window] {
            guest
                .send_message(socket, &vec![7; length], false)
                .unwrap_or_else(|error| panic!("{length} after {short}: {error}"));
        }
        let lengths = reader.join().expect("the reader");
        assert_eq!(lengths, [short, window]);
    }
    clean(&guest);
}

#[test]
fn a_message_that_the_guest_has_no_room_for_is_refused() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot_with(&Settings {
        buffer_bytes: 64 * 1024,
        ..Settings::default()
    });
    let (socket, peer) = connected(&vm, &mut guest);
    say(&peer, &[1; 64 * 1024]);
    let whole = guest.receive_message(socket).expect("receiving");
    assert_eq!(whole.map(|(message, _)| message.len()), Some(64 * 1024));
    say(&peer, &[2; 64 * 1024 + 1]);
    guest
        .wait_until("the end", |guest| {
            guest.socket(socket).state == State::Reset
        })
        .expect("it would wait for ever");
    assert_eq!(vm.refused(VsockRefusal::MessageTooLong), 1);
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn what_a_service_says_before_it_closes_with_a_message_unread_arrives() {
    const ANSWER_BYTES: usize = 40 * 1024;
    let mut host = Host::new(1);
    let vm = host.vm();
    // Room for one answer: the other one waits in the socket.
    let mut guest = vm.boot_with(&Settings {
        buffer_bytes: 64 * 1024,
        ..Settings::default()
    });
    let (socket, peer) = connected(&vm, &mut guest);
    for message in [b"first", b"other"] {
        guest.send_message(socket, message, false).expect("sending");
    }
    assert_eq!(next(&peer), b"first");
    recv(&peer, &mut [0; 1], RecvFlags::PEEK).expect("the other one");
    for answer in [1, 2] {
        say(&peer, &[answer; ANSWER_BYTES]);
    }
    drop(peer);
    for answer in [1, 2] {
        let got = guest.receive_message(socket).expect("an answer");
        assert_eq!(got, Some((vec![answer; ANSWER_BYTES], false)));
    }
    let end = guest.receive_message(socket);
    assert!(matches!(end, Err(GuestError::Reset)), "{end:?}");
    vm.wait_for_connections(0);
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn many_small_messages_stay_apart() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, peer) = connected(&vm, &mut guest);
    let reader = std::thread::spawn(move || {
        for number in 0..2000u32 {
            assert_eq!(next(&peer), number.to_le_bytes());
        }
        for number in 0..2000u32 {
            say(&peer, &number.to_le_bytes());
        }
        peer
    });
    for number in 0..2000u32 {
        let sent = guest.send_message(socket, &number.to_le_bytes(), false);
        assert!(sent.is_ok(), "{number}: {sent:?}, {:?}", vm.traffic());
    }
    for number in 0..2000u32 {
        let (got, _) = guest
            .receive_message(socket)
            .expect("receiving")
            .expect("a message");
        assert_eq!(got, number.to_le_bytes());
    }
    drop(reader.join().expect("the peer"));
    clean(&guest);
}

#[test]
fn thousands_of_small_messages_wait_for_a_slow_reader() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, peer) = connected(&vm, &mut guest);
    // More than the descriptor takes before anybody reads.
    for number in 0..5000u32 {
        let sent = guest.send_message(socket, &number.to_le_bytes(), false);
        assert!(sent.is_ok(), "{number}: {sent:?}, {:?}", vm.traffic());
    }
    guest
        .run_for(std::time::Duration::from_millis(50))
        .expect("running");
    for number in 0..5000u32 {
        assert_eq!(next(&peer), number.to_le_bytes());
    }
    eventually("nothing to be buffered", || {
        vm.traffic().buffered_bytes == 0
    });
    clean(&guest);
}
