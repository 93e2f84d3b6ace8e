//! Credit: neither side sends what the other can't take, nobody stalls for ever, and lies hurt the liar.

use std::{io::Write, time::Duration};

use sandwire_api::vsock::VsockRefusal;
use sandwire_vsock_guest::{Content, Guest, Operation, Settings, socket::State};
use sandwire_vsock_host::{limits::Limits, worker::WorkerSettings};

use crate::host::{
    Host, PORT, Vm, clean, connected, eventually, read_exact, to_host, use_until, works,
};

/// A guest whose sockets take so much.
fn boot(vm: &Vm, buffer_bytes: u32) -> Guest {
    vm.boot_with(&Settings {
        buffer_bytes,
        ..Settings::default()
    })
}

#[test]
fn a_request_for_credit_is_answered() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    guest.send(socket, &[1; 1000]).expect("sending");
    read_exact(&mut peer, 1000);
    guest.keep_log();
    eventually("an answer that counts what the peer has taken", || {
        let request = guest.header(socket, Operation::CreditRequest);
        guest.put(request);
        guest.run_for(Duration::from_millis(10)).expect("running");
        guest.take_log().iter().any(|(answer, _)| {
            answer.op == Operation::CreditUpdate as u16 && answer.fwd_cnt == 1000
        })
    });
    clean(&guest);
}

#[test]
fn a_small_buffer_is_never_overrun() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let content = Content::new(3);
    for buffer_bytes in [1, 100, 4096, 70_000] {
        let mut guest = boot(&vm, buffer_bytes);
        let (socket, mut peer) = connected(&vm, &mut guest);
        let length = if buffer_bytes == 1 { 300 } else { 200_000 };
        let writer = std::thread::spawn(move || {
            peer.write_all(&content.take(length)).expect("writing");
            peer
        });
        guest.run_for(Duration::from_millis(100)).expect("running");
        assert!(guest.socket(socket).received <= buffer_bytes.into());
        let got = guest.receive_exact(socket, length).expect("receiving");
        assert_eq!(content.wrong(0, &got), None, "buffer of {buffer_bytes}");
        drop(writer.join().expect("the writer"));
        clean(&guest);
    }
}

#[test]
fn a_packet_of_no_bytes_tells_of_credit_like_any_other() {
    const BUFFER: u32 = 4096;
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = boot(&vm, BUFFER);
    let (socket, mut peer) = connected(&vm, &mut guest);
    peer.write_all(&[7; 2 * BUFFER as usize]).expect("writing");
    guest
        .wait_until("a full buffer", |guest| {
            guest.socket(socket).received == u64::from(BUFFER)
        })
        .expect("receiving");
    // As if its user had read all of it.
    guest.socket_mut(socket).fwd_cnt = BUFFER;
    let nothing = guest.header(socket, Operation::ReadWrite);
    guest.put(nothing);
    guest
        .wait_until("the rest", |guest| {
            guest.socket(socket).received == u64::from(2 * BUFFER)
        })
        .expect("there is room for it");
    clean(&guest);
}

#[test]
fn a_buffer_that_shrinks_below_what_is_on_its_way_stops_the_peer() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    peer.write_all(&[7; 100_000]).expect("writing");
    guest
        .wait_until("the first part", |guest| {
            guest.socket(socket).received == 100_000
        })
        .expect("receiving");
    guest.socket_mut(socket).buf_alloc = 10;
    guest.keep_log();
    let header = guest.header(socket, Operation::CreditRequest);
    guest.put(header);
    guest
        .wait_until("what the host says once it knows", |guest| {
            let update = Operation::CreditUpdate as u16;
            guest
                .take_log()
                .iter()
                .any(|(answer, _)| answer.op == update)
        })
        .expect("an answer");
    peer.write_all(&[8; 1000]).expect("writing");
    guest.run_for(Duration::from_millis(100)).expect("running");
    assert_eq!(guest.socket(socket).received, 100_000);
    assert_eq!(
        guest.receive_exact(socket, 100_000).expect("it"),
        [7; 100_000]
    );
    let header = guest.header(socket, Operation::CreditUpdate);
    guest.put(header);
    assert_eq!(guest.receive_exact(socket, 1000).expect("it"), [8; 1000]);
    clean(&guest);
}

#[test]
fn a_guest_that_does_not_read_stops_its_peer_and_goes_on_later() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    let content = Content::new(4);
    let length = 5_000_000;
    let writer = std::thread::spawn(move || {
        peer.write_all(&content.take(length)).expect("writing");
    });
    guest
        .wait_until("a full buffer", |guest| {
            guest.socket(socket).received == 256 * 1024
        })
        .expect("receiving");
    guest.run_for(Duration::from_millis(300)).expect("running");
    assert_eq!(guest.socket(socket).received, 256 * 1024);
    assert!(!writer.is_finished());
    let got = guest.receive_to_end(socket).expect("receiving");
    assert_eq!((got.len(), content.wrong(0, &got)), (length, None));
    writer.join().expect("the writer");
    clean(&guest);
}

#[test]
fn a_guest_that_does_not_read_is_asked_for_credit_once_and_not_without_end() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    let content = Content::new(6);
    let length = 1_000_000;
    let writer = std::thread::spawn(move || {
        peer.write_all(&content.take(length)).expect("writing");
    });
    guest
        .wait_until("a full buffer", |guest| {
            guest.socket(socket).received == 256 * 1024
        })
        .expect("receiving");
    let before = vm.traffic();
    guest.run_for(Duration::from_millis(300)).expect("running");
    let after = vm.traffic();
    let asked = after.ingress_packets - before.ingress_packets;
    let answered = after.egress_packets - before.egress_packets;
    assert!(
        asked < 10 && answered < 10,
        "{asked} and {answered} packets"
    );
    let got = guest.receive_to_end(socket).expect("receiving");
    assert_eq!((got.len(), content.wrong(0, &got)), (length, None));
    writer.join().expect("the writer");
    clean(&guest);
}

#[test]
fn a_peer_that_does_not_read_stops_the_guest_and_goes_on_later() {
    let mut host = Host::new(1);
    let limits = Limits {
        connection_bytes: 128 * 1024,
        ..Limits::default()
    };
    let vm = host.vm_with(limits, to_host(&[PORT]));
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    let content = Content::new(5);
    let all = content.take(5_000_000);
    let mut sent = 0;
    for _ in 0..20 {
        sent += guest.try_send(socket, &all[sent..]).expect("sending");
        guest.run_for(Duration::from_millis(10)).expect("running");
    }
    assert!(sent < all.len(), "all was taken though nobody reads");
    assert!(vm.traffic().buffered_bytes <= 128 * 1024);
    assert!(guest.socket(socket).peer_buf_alloc <= 128 * 1024);
    let reader = std::thread::spawn(move || read_exact(&mut peer, 5_000_000));
    guest.send(socket, &all[sent..]).expect("sending");
    assert_eq!(content.wrong(0, &reader.join().expect("the peer")), None);
    eventually("nothing to be buffered", || {
        vm.traffic().buffered_bytes == 0
    });
    clean(&guest);
}

#[test]
fn more_than_the_credit_resets_that_connection_alone() {
    let mut host = Host::new(1);
    let limits = Limits {
        connection_bytes: 64 * 1024,
        ..Limits::default()
    };
    let vm = host.vm_with(limits, to_host(&[PORT, PORT + 1]));
    let mut guest = vm.boot();
    let (other, mut other_peer) = connected(&vm, &mut guest);
    let listener = vm.service(PORT + 1);
    let socket = guest.open_stream(PORT + 1).expect("connecting");
    let _peer = crate::host::accept(&listener);
    // As if the peer had a gigabyte of room.
    for _ in 0..200 {
        if guest.socket(socket).state != State::Established {
            break;
        }
        guest.socket_mut(socket).peer_buf_alloc = 1 << 30;
        drop(guest.try_send(socket, &[9; 64 * 1024]));
        guest.run_for(Duration::from_millis(2)).expect("running");
    }
    assert_eq!(guest.socket(socket).state, State::Reset);
    assert_eq!(vm.refused(VsockRefusal::Credit), 1);
    assert!(vm.traffic().buffered_bytes <= 64 * 1024);
    guest.send(other, b"unharmed").expect("sending");
    assert_eq!(read_exact(&mut other_peer, 8), b"unharmed");
    works(&vm, &mut guest);
}

#[test]
fn a_guest_that_claims_to_have_taken_what_it_was_never_sent_hurts_only_itself() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    for fwd_cnt in [1, 1 << 20, u32::MAX, 1 << 31] {
        let mut header = guest.header(socket, Operation::CreditUpdate);
        header.fwd_cnt = fwd_cnt;
        guest.put(header);
        guest.run_for(Duration::from_millis(20)).expect("running");
        drop(peer.write(&[1; 100]));
    }
    guest.run_for(Duration::from_millis(100)).expect("running");
    assert!(guest.socket(socket).received <= 256 * 1024);
    works(&vm, &mut guest);
}

#[test]
fn half_of_the_memory_promised_makes_new_connections_smaller_and_none_impossible() {
    let mut host = Host::new(1);
    let limits = Limits {
        connection_bytes: 256 * 1024,
        guest_bytes: 512 * 1024,
        ..Limits::default()
    };
    let vm = host.vm_with(limits, to_host(&[PORT]));
    let mut guest = vm.boot();
    let _listener = vm.service(PORT);
    let mut promised = Vec::new();
    let refused = loop {
        match guest.open_stream(PORT) {
            Ok(socket) => promised.push(guest.socket(socket).peer_buf_alloc),
            Err(error) => break error,
        }
        assert!(promised.len() < 1000, "endless promises: {promised:?}");
    };
    assert!(matches!(refused, sandwire_vsock_guest::GuestError::Reset));
    assert_eq!(vm.refused(VsockRefusal::Memory), 1);
    assert_eq!(promised[0], 64 * 1024);
    assert!(promised.iter().all(|bytes| *bytes >= 4096), "{promised:?}");
    let sum: u64 = promised.iter().map(|bytes| u64::from(*bytes)).sum();
    assert!(sum <= 512 * 1024, "{sum} of 512 KiB promised");
    assert!(promised.len() >= 16, "only {} connections", promised.len());
    clean(&guest);
}

/// Headers that came, in which the promise never becomes less: a guest may be sending what it was told it may.
#[track_caller]
fn assert_grows(guest: &mut Guest, from: u32, to: u32) {
    let log = guest.take_log();
    let promises: Vec<u32> = log.iter().map(|(header, _)| header.buf_alloc).collect();
    assert!(promises.is_sorted(), "{promises:?}");
    assert_eq!(promises.first(), Some(&from), "{promises:?}");
    assert_eq!(promises.last(), Some(&to), "{promises:?}");
}

#[test]
fn a_stream_is_promised_more_when_it_uses_what_it_has() {
    const FIRST: u32 = 64 * 1024;
    const MOST: u32 = 1024 * 1024;
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = boot(&vm, MOST);
    let (socket, mut peer) = connected(&vm, &mut guest);
    guest.keep_log();
    // A shell, say, or a service that answers.
    for _ in 0..200 {
        guest.send(socket, &[1; 1000]).expect("sending");
        read_exact(&mut peer, 1000);
        guest.run_for(Duration::from_millis(1)).expect("running");
    }
    assert_eq!(host.budget.promised(), u64::from(FIRST));
    use_until(MOST, &mut guest, socket, &mut peer);
    for _ in 0..20 {
        guest.send(socket, &[1; 1000]).expect("sending");
        read_exact(&mut peer, 1000);
    }
    let reader = std::thread::spawn(move || read_exact(&mut peer, 8_000_000));
    let content = Content::new(6);
    guest
        .send(socket, &content.take(8_000_000))
        .expect("sending");
    assert_eq!(content.wrong(0, &reader.join().expect("the peer")), None);
    assert_grows(&mut guest, FIRST, MOST);
    assert_eq!(host.budget.promised(), u64::from(MOST));
    guest.close(socket).expect("closing");
    eventually("nothing to be promised", || host.budget.promised() == 0);
    clean(&guest);
}

#[test]
fn no_promise_grows_beyond_half_of_what_the_guest_may_have() {
    let mut host = Host::new(1);
    let limits = Limits {
        guest_bytes: 1024 * 1024,
        ..Limits::default()
    };
    let vm = host.vm_with(limits, to_host(&[PORT]));
    let mut guest = boot(&vm, 1024 * 1024);
    let (socket, mut peer) = connected(&vm, &mut guest);
    use_until(512 * 1024, &mut guest, socket, &mut peer);
    let reader = std::thread::spawn(move || read_exact(&mut peer, 8_000_000));
    guest.send(socket, &vec![7; 8_000_000]).expect("sending");
    drop(reader.join().expect("the peer"));
    assert_eq!(guest.socket(socket).peer_buf_alloc, 512 * 1024);
    works(&vm, &mut guest);
    clean(&guest);
}

/// Two or three idle streams for each sandbox of a fleet: who comes last is served as well as who came first.
#[test]
fn idle_streams_of_many_guests_leave_room_for_others() {
    const GUESTS: usize = 12;
    const EACH: usize = 3;
    // A 64th of the usual, which 29 streams would fill if each held 1 MiB.
    let mut host = Host::with_settings(1, &WorkerSettings::default(), 32 << 20);
    let mut idle = Vec::new();
    for _ in 0..GUESTS {
        let vm = host.vm();
        let mut guest = vm.boot();
        let peers: Vec<_> = (0..EACH).map(|_| connected(&vm, &mut guest)).collect();
        for (socket, _) in &peers {
            assert_eq!(guest.socket(*socket).peer_buf_alloc, 64 * 1024);
        }
        idle.push((vm, guest, peers));
    }
    assert_eq!(host.budget.promised(), (GUESTS * EACH * 64 * 1024) as u64);
    let vm = host.vm();
    let mut guest = boot(&vm, 1024 * 1024);
    let (socket, mut peer) = connected(&vm, &mut guest);
    use_until(1024 * 1024, &mut guest, socket, &mut peer);
    clean(&guest);
}
