//! Much: a gigabyte both ways, a thousand connections.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use sandwire_vsock_guest::{Content, Guest, Kind, Socket};

use crate::host::{Host, PORT, accept, clean, connected, echo, eventually};

const GIGABYTE: u64 = 1 << 30;
const BLOCK: usize = 64 * 1024;

fn check(content: Content, length: u64, mut next: impl FnMut(&mut [u8]) -> usize) {
    let mut bytes = vec![0; BLOCK];
    let mut position = 0;
    while position < length {
        let count = next(&mut bytes);
        assert_ne!(count, 0, "the end after {position} bytes");
        assert_eq!(content.wrong(position, &bytes[..count]), None);
        position += count as u64;
    }
    assert_eq!(position, length);
}

fn write_all(content: Content, mut stream: UnixStream) {
    let mut bytes = vec![0; BLOCK];
    for position in (0..GIGABYTE).step_by(BLOCK) {
        content.fill(position, &mut bytes);
        stream.write_all(&bytes).expect("writing");
    }
}

#[test]
fn a_gigabyte_to_the_host_arrives_as_it_was() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    let content = Content::new(100);
    let reader = std::thread::spawn(move || {
        check(content, GIGABYTE, |bytes| {
            peer.read(bytes).expect("reading")
        });
        assert_eq!(peer.read(&mut [0]).expect("the end"), 0);
    });
    let mut bytes = vec![0; BLOCK];
    for position in (0..GIGABYTE).step_by(BLOCK) {
        content.fill(position, &mut bytes);
        guest.send(socket, &bytes).expect("sending");
    }
    guest.close(socket).expect("closing");
    reader.join().expect("the reader");
    assert_eq!(vm.traffic().egress_bytes, GIGABYTE);
    clean(&guest);
}

#[test]
fn a_gigabyte_to_the_guest_arrives_as_it_was() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, peer) = connected(&vm, &mut guest);
    let content = Content::new(101);
    let writer = std::thread::spawn(move || write_all(content, peer));
    check(content, GIGABYTE, |bytes| {
        guest.receive(socket, bytes).expect("receiving")
    });
    assert_eq!(guest.receive(socket, &mut [0]).expect("the end"), 0);
    writer.join().expect("the writer");
    assert_eq!(vm.traffic().ingress_bytes, GIGABYTE);
    clean(&guest);
}

fn exchange(guest: &mut Guest, socket: Socket, number: u64) {
    let message = Content::new(number).take(100);
    guest.send(socket, &message).expect("sending");
    let back = guest.receive_exact(socket, 100).expect("receiving");
    assert_eq!(back, message, "connection {number}");
}

#[test]
fn a_thousand_connections_at_once_keep_their_bytes_apart() {
    let mut host = Host::new(2);
    let vm = host.vm();
    let mut guest = vm.boot();
    let listener = vm.service(PORT);
    let mut peers = Vec::new();
    let mut sockets = Vec::new();
    for number in 0..1000u64 {
        let socket = guest.open_stream(PORT).expect("connecting");
        let mut peer = accept(&listener);
        guest.send(socket, &number.to_le_bytes()).expect("sending");
        let mut got = [0; 8];
        peer.read_exact(&mut got).expect("reading");
        assert_eq!(u64::from_le_bytes(got), number);
        sockets.push(socket);
        peers.push(peer);
    }
    assert_eq!(vm.traffic().connections, 1000);
    assert_eq!(host.list().len(), 1000);
    for (number, peer) in (0u64..).zip(&mut peers) {
        peer.write_all(&Content::new(number).take(3000))
            .expect("writing");
    }
    for (number, socket) in (0u64..).zip(&sockets) {
        let got = guest.receive_exact(*socket, 3000).expect("receiving");
        assert_eq!(Content::new(number).wrong(0, &got), None);
    }
    drop(peers);
    for socket in &sockets {
        guest.close(*socket).expect("closing");
    }
    eventually("all to end", || {
        guest.poll();
        vm.traffic().connections == 0
    });
    clean(&guest);
}

#[test]
fn ten_thousand_connections_one_after_the_other_leave_nothing() {
    let mut host = Host::new(1);
    let limits = sandwire_vsock_host::limits::Limits {
        connects_per_second: 1_000_000,
        ..Default::default()
    };
    let vm = host.vm_with(limits, crate::host::to_host(&[PORT]));
    let mut guest = vm.boot();
    let listener = vm.service(PORT);
    let server = std::thread::spawn(move || {
        for stream in listener.incoming().take(10_000) {
            drop(echo(stream.expect("accepting")));
        }
    });
    for number in 0..10_000 {
        let socket = guest.open_stream(PORT).expect("connecting");
        exchange(&mut guest, socket, number);
        guest.close(socket).expect("closing");
    }
    server.join().expect("the service");
    vm.wait_for_connections(0);
    assert_eq!(host.budget.promised(), 0);
    clean(&guest);
}

#[test]
fn two_hundred_clients_of_the_host_at_once() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    guest.listen(Kind::Stream, 5000);
    let clients: Vec<_> = (0..200u64)
        .map(|number| {
            let mut client = vm.dial(5000);
            std::thread::spawn(move || {
                crate::host::read_line(&mut client);
                let message = Content::new(number).take(5000);
                client.write_all(&message).expect("writing");
                let mut back = vec![0; 5000];
                client.read_exact(&mut back).expect("reading");
                assert_eq!(back, message);
            })
        })
        .collect();
    for _ in 0..200 {
        let socket = guest.accept(Kind::Stream, 5000).expect("accepting");
        let message = guest.receive_exact(socket, 5000).expect("receiving");
        guest.send(socket, &message).expect("sending");
    }
    for client in clients {
        client.join().expect("a client");
    }
    clean(&guest);
}
