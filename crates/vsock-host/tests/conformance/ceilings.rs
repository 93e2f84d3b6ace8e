//! What waits on behalf of a guest adds up to no more than its limits, messages and readers that are slow included.

use std::{os::fd::OwnedFd, time::Duration};

use rustix::{
    io::Errno,
    net::{SendFlags, accept, send, sockopt},
};
use sandwire_api::vsock::VsockRefusal;
use sandwire_vsock_guest::{
    Guest, Kind, Operation, Settings, Socket,
    packet::{END_OF_MESSAGE, HOST_CID},
    socket::State,
};
use sandwire_vsock_host::limits::Limits;

use crate::host::{Host, PATIENCE, PORT, Vm, clean, eventually, seqpacket_listener, to_host};

/// Connections in each of these tests.
const MANY: usize = 40;

fn limits() -> Limits {
    Limits {
        connections: 64,
        connection_bytes: 64 * 1024,
        guest_bytes: 1024 * 1024,
        ..Limits::default()
    }
}

/// Connections of messages from the guest to the host, with both ends.
fn connected(vm: &Vm, guest: &mut Guest, count: usize) -> Vec<(Socket, OwnedFd)> {
    let listener = seqpacket_listener(&vm.port_socket(PORT));
    (0..count)
        .map(|_| {
            let socket = guest
                .open(Kind::Seqpacket, HOST_CID, PORT)
                .expect("connecting");
            let mut peer = None;
            eventually("a connection to the service", || {
                peer = accept(&listener).ok();
                peer.is_some()
            });
            (socket, peer.expect("it was accepted"))
        })
        .collect()
}

/// Sends a message if credit and slots allow. Whether they did.
fn try_message(guest: &mut Guest, socket: Socket, message: &[u8]) -> bool {
    let length = u32::try_from(message.len()).expect("it is short");
    if guest.socket(socket).credit() < length || !guest.transport().has_slot() {
        return false;
    }
    let mut header = guest.header(socket, Operation::ReadWrite);
    (header.len, header.flags) = (length, END_OF_MESSAGE);
    let sent = guest.transport().send(&header, message);
    if sent {
        let connection = guest.socket_mut(socket);
        connection.tx_cnt = connection.tx_cnt.wrapping_add(length);
    }
    sent
}

#[test]
fn messages_that_nobody_reads_on_the_host_are_bounded_for_all_connections_together() {
    let mut host = Host::new(1);
    let vm = host.vm_with(limits(), to_host(&[PORT]));
    let mut guest = vm.boot();
    let sockets = connected(&vm, &mut guest, MANY);
    let message = [7; 2000];
    let (mut taken, mut idle) = (0, 0);
    while idle < 20 {
        let mut sent = 0;
        for (socket, _) in &sockets {
            sent += usize::from(try_message(&mut guest, *socket, &message));
        }
        taken += sent * message.len();
        idle = if sent == 0 { idle + 1 } else { 0 };
        guest.poll();
        if sent == 0 {
            guest.run_for(Duration::from_millis(5)).expect("running");
        }
    }
    // What a socket's buffer takes is counted by the kernel with its own overhead, so twice what is asked for.
    let most = 3 * usize::try_from(limits().guest_bytes).expect("1 MiB");
    assert!(taken <= most, "{taken} bytes were taken for nobody");
    clean(&guest);
}

#[test]
fn messages_that_a_guest_does_not_read_wait_with_who_sent_them() {
    let mut host = Host::new(1);
    let vm = host.vm_with(limits(), to_host(&[PORT]));
    let mut guest = vm.boot();
    let sockets = connected(&vm, &mut guest, MANY);
    let message = vec![7; 200_000];
    // The second fits what the guest has left in part only.
    for round in 0..2 {
        for (_, peer) in &sockets {
            sockopt::set_socket_send_buffer_size(peer, 1 << 20).expect("a buffer");
            let deadline = std::time::Instant::now() + PATIENCE;
            while let Err(error) = send(peer, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                assert_eq!(error, Errno::AGAIN, "round {round}");
                assert!(std::time::Instant::now() < deadline, "it isn't taken");
                guest.run_for(Duration::from_millis(1)).expect("running");
            }
            guest.run_for(Duration::from_millis(1)).expect("running");
        }
    }
    guest.run_for(Duration::from_millis(200)).expect("running");
    let buffered = vm.traffic().buffered_bytes;
    assert!(buffered <= limits().guest_bytes, "{buffered} bytes wait");
    // Nothing is lost by it.
    for (socket, _) in &sockets {
        for _ in 0..2 {
            let got = guest.receive_message(*socket).expect("receiving");
            assert_eq!(got.map(|(message, _)| message.len()), Some(message.len()));
        }
    }
    clean(&guest);
}

#[test]
fn a_message_that_the_hosts_socket_cannot_take_is_refused_and_counted() {
    // As large as any socket's buffer may be, and so more than fits.
    let most = std::fs::read_to_string("/proc/sys/net/core/wmem_max").expect("reading /proc");
    let length = 2 * most.trim().parse::<u32>().expect("a number");
    let limits = Limits {
        message_bytes: length,
        connection_bytes: 2 * length,
        guest_bytes: u64::from(length) * 4,
        ..Limits::default()
    };
    let mut host = Host::new(1);
    let vm = host.vm_with(limits, to_host(&[PORT]));
    let mut guest = vm.boot_with(&Settings {
        buffer_bytes: 2 * length,
        ..Settings::default()
    });
    let (socket, _peer) = connected(&vm, &mut guest, 1).pop().expect("one");
    guest
        .send_message(socket, &vec![1; length as usize], false)
        .expect("it is within the limits");
    guest
        .wait_until("RST", |guest| guest.socket(socket).state == State::Reset)
        .expect("it would be lost without a word");
    assert_eq!(vm.refused(VsockRefusal::MessageTooLong), 1);
    clean(&guest);
}

#[test]
fn a_message_that_waits_for_room_is_refused_if_the_guest_takes_less_by_then() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, peer) = connected(&vm, &mut guest, 1).pop().expect("one");
    sockopt::set_socket_send_buffer_size(&peer, 1 << 20).expect("a buffer");
    for _ in 0..2 {
        send(&peer, &[7; 200_000], SendFlags::NOSIGNAL).expect("sending");
    }
    guest
        .wait_until("the first", |guest| {
            guest.socket(socket).received == 200_000
        })
        .expect("receiving");
    guest.socket_mut(socket).buf_alloc = 100_000;
    let got = guest.receive_message(socket).expect("receiving");
    assert_eq!(got.map(|(message, _)| message.len()), Some(200_000));
    guest
        .wait_until("RST", |guest| guest.socket(socket).state == State::Reset)
        .expect("it would wait for ever");
    assert_eq!(vm.refused(VsockRefusal::MessageTooLong), 1);
    clean(&guest);
}
