//! Guests that go on elsewhere: restored clones, stopped and resumed ones, a back end that comes anew.

use std::{
    io::{Read, Write},
    time::Duration,
};

use sandwire_vsock_guest::{
    Content, Guest, GuestError, Kind, Settings, packet::HOST_CID, socket::State, transport::EVENT,
};
use sandwire_vsock_host::limits::Limits;

use crate::host::{Host, PORT, clean, connected, eventually, read_exact, to_host, works};

fn without_event_queue() -> Settings {
    Settings {
        event_queue: false,
        ..Settings::default()
    }
}

#[test]
fn a_clone_is_told_that_its_connections_are_gone_before_anything_else() {
    let mut host = Host::new(2);
    let vm = host.vm();
    let clones = [host.vm(), host.vm()];
    let mut guest = vm.boot();
    works(&vm, &mut guest);
    let (socket, mut peer) = connected(&vm, &mut guest);
    guest.send(socket, b"before").expect("sending");
    assert_eq!(read_exact(&mut peer, 6), b"before");
    guest.listen(Kind::Stream, 5000);
    let snapshot = guest.snapshot().expect("a snapshot");

    for clone_vm in &clones {
        let mut clone = Guest::restore(&snapshot, &clone_vm.vhost_socket()).expect("restoring");
        // Somebody calls at once.
        let _caller = clone_vm.dial(5000);
        clone.keep_log();
        clone
            .wait_until("the event", |clone| clone.transport_resets() == 1)
            .expect("the event");
        assert_eq!(clone.socket(socket).state, State::Reset);
        assert!(clone.send(socket, b"after").is_err());
        clone
            .accept(Kind::Stream, 5000)
            .expect("who called at once is let in");
        works(clone_vm, &mut clone);
        clean(&clone);
    }

    // The one that was copied goes on as if nothing had been.
    guest.resume(&snapshot).expect("resuming");
    guest.send(socket, b"still here").expect("sending");
    assert_eq!(read_exact(&mut peer, 10), b"still here");
    peer.write_all(b"me too").expect("writing");
    assert_eq!(guest.receive_exact(socket, 6).expect("it"), b"me too");
    assert_eq!(guest.transport_resets(), 0);
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn a_clone_of_a_clone_works() {
    let mut host = Host::new(1);
    let vms = [host.vm(), host.vm(), host.vm(), host.vm()];
    let mut guest = vms[0].boot();
    for (generation, vm) in (1u64..).zip(&vms[1..]) {
        works(
            &vms[usize::try_from(generation).expect("small") - 1],
            &mut guest,
        );
        let snapshot = guest.snapshot().expect("a snapshot");
        drop(guest);
        guest = Guest::restore(&snapshot, &vm.vhost_socket()).expect("restoring");
        guest
            .wait_until("the event", |guest| guest.transport_resets() == generation)
            .expect("the event");
        works(vm, &mut guest);
        let (socket, mut peer) = connected(vm, &mut guest);
        let content = Content::new(generation);
        let reader = std::thread::spawn(move || read_exact(&mut peer, 2_000_000));
        guest
            .send(socket, &content.take(2_000_000))
            .expect("sending");
        assert_eq!(content.wrong(0, &reader.join().expect("the reader")), None);
        clean(&guest);
    }
}

#[test]
fn a_clone_without_event_queue_learns_by_rst() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let clone_vm = host.vm();
    let mut guest = vm.boot_with(&without_event_queue());
    let (socket, _peer) = connected(&vm, &mut guest);
    let snapshot = guest.snapshot().expect("a snapshot");
    let mut clone = Guest::restore(&snapshot, &clone_vm.vhost_socket()).expect("restoring");
    clone.send(socket, b"into the void").expect("sending");
    clone
        .wait_until("RST", |clone| clone.socket(socket).state == State::Reset)
        .expect("RST");
    works(&clone_vm, &mut clone);
    clean(&clone);
}

#[test]
fn a_clone_that_can_be_told_only_later_loses_what_it_opened_meanwhile_on_both_sides() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let clone_vm = host.vm();
    let mut guest = vm.boot();
    works(&vm, &mut guest);
    let (old, _peer) = connected(&vm, &mut guest);
    // No buffer for an event.
    let (ring, memory) = guest.transport().ring(EVENT);
    let posted = ring.next_available();
    ring.set_available_index(memory, 0);
    let snapshot = guest.snapshot().expect("a snapshot");
    let mut clone = Guest::restore(&snapshot, &clone_vm.vhost_socket()).expect("restoring");
    let (new, mut peer) = connected(&clone_vm, &mut clone);
    clone.send(new, b"hello").expect("sending");
    assert_eq!(read_exact(&mut peer, 5), b"hello");
    assert_eq!(clone.transport_resets(), 0);

    let (ring, memory) = clone.transport().ring(EVENT);
    ring.set_available_index(memory, posted);
    clone.transport().kick_queue(EVENT);
    clone
        .wait_until("the event", |clone| clone.transport_resets() == 1)
        .expect("the event");
    assert_eq!(clone.socket(old).state, State::Reset);
    assert_eq!(clone.socket(new).state, State::Reset);
    assert!(
        matches!(peer.read(&mut [0]), Ok(0) | Err(_)),
        "the host waits for a guest that has forgotten it"
    );
    clone_vm.wait_for_connections(0);
    works(&clone_vm, &mut clone);
    assert_eq!(clone.transport_resets(), 1);
    clean(&clone);
}

#[test]
fn who_calls_before_a_guest_has_started_is_let_in_when_it_has() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    guest.listen(Kind::Stream, 5000);
    // Nothing has gone through its rings, so they start from the beginning, as with a driver that is new.
    let snapshot = guest.snapshot().expect("a snapshot");
    let _caller = vm.dial(5000);
    vm.wait_for_connections(1);
    guest.resume(&snapshot).expect("starting");
    guest.accept(Kind::Stream, 5000).expect("the caller");
    clean(&guest);
}

#[test]
fn what_comes_while_a_guest_is_stopped_comes_after_it() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    let content = Content::new(9);
    let snapshot = guest.snapshot().expect("a snapshot");
    let writer = std::thread::spawn(move || {
        peer.write_all(&content.take(1_000_000)).expect("writing");
        peer
    });
    std::thread::sleep(Duration::from_millis(100));
    guest.poll();
    assert_eq!(guest.socket(socket).received, 0);
    guest.resume(&snapshot).expect("resuming");
    let got = guest.receive_exact(socket, 1_000_000).expect("receiving");
    assert_eq!(content.wrong(0, &got), None);
    drop(writer.join().expect("the writer"));
    clean(&guest);
}

#[test]
fn stopping_in_the_middle_of_a_transfer_loses_nothing() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    let (out, into) = (Content::new(1), Content::new(2));
    let length = 3_000_000;
    let peer_thread = std::thread::spawn(move || {
        let mut writer = peer.try_clone().expect("a second handle");
        let writing = std::thread::spawn(move || {
            writer.write_all(&into.take(length)).expect("writing");
        });
        let got = read_exact(&mut peer, length);
        writing.join().expect("the writer");
        got
    });
    let all = out.take(length);
    let (mut sent, mut got, mut bytes) = (0, Vec::new(), vec![0; 100_000]);
    while sent < length || got.len() < length {
        if sent < length {
            sent += guest.try_send(socket, &all[sent..]).expect("sending");
        }
        guest.kick();
        let snapshot = guest.snapshot().expect("stopping");
        guest.resume(&snapshot).expect("going on");
        guest.run_for(Duration::from_millis(1)).expect("running");
        let count = guest.try_receive(socket, &mut bytes).expect("receiving");
        got.extend_from_slice(&bytes[..count]);
    }
    assert_eq!(into.wrong(0, &got), None);
    assert_eq!(out.wrong(0, &peer_thread.join().expect("the peer")), None);
    clean(&guest);
}

#[test]
fn a_back_end_that_comes_anew_finds_the_guest_running() {
    let mut host = Host::new(1);
    for settings in [Settings::default(), without_event_queue()] {
        let vm = host.vm();
        let mut guest = vm.boot_with(&settings);
        works(&vm, &mut guest);
        let (socket, _peer) = connected(&vm, &mut guest);
        host.remove(&vm);
        let gone = guest.run_for(Duration::from_secs(5));
        assert!(matches!(gone, Err(GuestError::BackEndGone)), "{gone:?}");
        // The guest doesn't know. What it says meanwhile waits in the ring.
        let early = guest.start_open(Kind::Stream, HOST_CID, PORT + 5);
        host.add_again(&vm, Limits::default(), to_host(&[PORT]));
        guest.reconnect(&vm.vhost_socket()).expect("reconnecting");
        if settings.event_queue {
            guest
                .wait_until("the event", |guest| guest.transport_resets() == 1)
                .expect("the event");
        } else {
            guest.send(socket, b"into the void").expect("sending");
            guest
                .wait_until("the answer", |guest| {
                    guest.socket(early).state == State::Reset
                })
                .expect("RST, as no rule allows it");
        }
        guest
            .wait_until("RST", |guest| guest.socket(socket).state == State::Reset)
            .expect("RST");
        works(&vm, &mut guest);
        clean(&guest);
    }
}

#[test]
fn a_vmm_that_is_killed_again_and_again_finds_a_back_end_each_time() {
    let mut host = Host::new(1);
    let vm = host.vm();
    for round in 0..30u32 {
        let mut guest = vm.boot();
        let (socket, mut peer) = connected(&vm, &mut guest);
        guest
            .send(socket, &vec![1; 200_000])
            .expect("sending what is never read");
        drop(peer.write_all(&[2; 1000]));
        // It goes with all of that on its way.
        drop(guest);
        drop(peer);
        if round % 10 == 0 {
            vm.wait_for_connections(0);
        }
    }
    vm.wait_for_connections(0);
    eventually("nothing to be promised", || host.budget.promised() == 0);
    works(&vm, &mut vm.boot());
}
