//! Streams: every operation and state of a connection, both ways.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpListener},
    os::fd::OwnedFd,
    time::Duration,
};

use rustix::net::{SendFlags, send};
use sandwire_api::vsock::{VsockDestination, VsockRefusal, VsockState};
use sandwire_vsock_guest::{
    Content, GuestError, Kind, Operation, ReceiveLayout, Settings, TransmitLayout,
    front_end::{EVENT_IDX, FEATURE_SEQPACKET, FEATURE_STREAM, INDIRECT_DESC},
    packet::{HOST_CID, SHUTDOWN_RECEIVE, SHUTDOWN_SEND},
    socket::State,
    transport::TRANSMIT,
};

use sandwire_vsock_host::limits::Limits;

use crate::host::{
    Host, PORT, accept, clean, connected, eventually, patient, policy, read_exact, read_line, rule,
    to_host, works,
};

#[test]
fn a_guest_reaches_a_service_of_the_host() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    assert_eq!(guest.cid(), 3);
    let listener = vm.service(PORT);
    guest.keep_log();
    let socket = guest.open_stream(PORT).expect("connecting");
    let mut peer = accept(&listener);
    let (response, _) = guest.take_log().remove(0);
    assert_eq!(response.op, Operation::Response as u16);
    assert_eq!((response.src_cid, response.dst_cid), (HOST_CID, 3));
    assert_eq!(response.src_port, PORT);
    assert!(response.buf_alloc >= 4096, "{response:?}");
    assert_eq!(response.fwd_cnt, 0);

    guest.send(socket, b"from the guest").expect("sending");
    assert_eq!(read_exact(&mut peer, 14), b"from the guest");
    peer.write_all(b"from the host").expect("writing");
    assert_eq!(
        guest.receive_exact(socket, 13).expect("receiving"),
        b"from the host"
    );
    let listed = host.list();
    assert_eq!(listed.len(), 1);
    assert!(listed[0].from_guest);
    assert_eq!(listed[0].state, VsockState::Established);
    assert_eq!((listed[0].peer_cid, listed[0].peer_port), (2, PORT));
    assert_eq!((listed[0].egress_bytes, listed[0].ingress_bytes), (14, 13));

    guest.close(socket).expect("closing");
    assert_eq!(guest.socket(socket).state, State::Closed);
    assert_eq!(peer.read(&mut [0; 8]).expect("the end"), 0);
    vm.wait_for_connections(0);
    let traffic = vm.traffic();
    assert_eq!(traffic.opened_by_guest, 1);
    assert_eq!((traffic.egress_bytes, traffic.ingress_bytes), (14, 13));
    assert!(traffic.attached);
    assert!(traffic.refusals.is_empty(), "{:?}", traffic.refusals);
    clean(&guest);
}

#[test]
fn what_the_guest_has_no_room_for_is_listed() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    assert_eq!(host.list()[0].queued_ingress_bytes, Some(0));
    peer.set_nonblocking(true).expect("not to block");
    // The guest does nothing meanwhile.
    let mut sent = 0;
    eventually("something waits for it", || {
        while let Ok(bytes) = peer.write(&[7; 4096]) {
            sent += bytes;
        }
        host.list()[0].queued_ingress_bytes > Some(0)
    });
    assert_eq!(host.list()[0].queued_bytes, 0, "it has sent nothing");
    let received = guest.receive_exact(socket, sent).expect("receiving");
    assert_eq!(received.len(), sent);
    assert_eq!(host.list()[0].queued_ingress_bytes, Some(0));
}

#[test]
fn the_host_reaches_a_guest_and_learns_its_own_port() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    guest.listen(Kind::Stream, 5000);
    let mut client = vm.dial(5000);
    let socket = guest.accept(Kind::Stream, 5000).expect("accepting");
    let answer = read_line(&mut client);
    let peer = guest.socket(socket).address;
    assert_eq!(peer.peer_cid, HOST_CID);
    assert_eq!(answer, format!("OK {}\n", peer.peer_port));
    client.write_all(b"question").expect("writing");
    assert_eq!(
        guest.receive_exact(socket, 8).expect("receiving"),
        b"question"
    );
    guest.send(socket, b"answer").expect("sending");
    assert_eq!(read_exact(&mut client, 6), b"answer");
    drop(client);
    assert_eq!(guest.receive_to_end(socket).expect("the end"), b"");
    guest.close(socket).expect("closing");
    vm.wait_for_connections(0);
    assert_eq!(vm.traffic().opened_by_peers, 1);
    clean(&guest);
}

#[test]
fn what_no_rule_allows_is_answered_with_rst_at_once() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let refused = guest.open_stream(PORT + 1);
    assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
    assert_eq!(vm.refused(VsockRefusal::Policy), 1);
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn a_service_that_is_not_there_is_answered_with_rst() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let refused = guest.open_stream(PORT);
    assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
    assert_eq!(vm.refused(VsockRefusal::Unreachable), 1);
    vm.wait_for_connections(0);
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn a_client_of_the_host_is_hung_up_on_where_no_guest_listens() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let mut client = vm.dial(77);
    guest
        .run_for(Duration::from_millis(200))
        .expect("answering with RST");
    assert_eq!(client.read(&mut [0; 16]).expect("the end"), 0);
    vm.wait_for_connections(0);
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn a_guest_that_has_sent_all_can_still_receive() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    guest.send(socket, b"all of it").expect("sending");
    guest.shut_down(socket, SHUTDOWN_SEND);
    let mut got = Vec::new();
    peer.read_to_end(&mut got).expect("reading to the end");
    assert_eq!(got, b"all of it");
    eventually("the list to say so", || {
        host.list()[0].state == VsockState::GuestClosed
    });
    for round in 0..3 {
        peer.write_all(&[round; 1000]).expect("writing");
        let answer = guest.receive_exact(socket, 1000).expect("receiving");
        assert_eq!(answer, [round; 1000]);
    }
    drop(peer);
    assert_eq!(guest.receive_to_end(socket).expect("the end"), b"");
    guest.close(socket).expect("closing");
    vm.wait_for_connections(0);
    clean(&guest);
}

#[test]
fn a_peer_that_has_sent_all_can_still_receive() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    peer.write_all(b"all of it").expect("writing");
    peer.shutdown(Shutdown::Write).expect("half-closing");
    assert_eq!(guest.receive_to_end(socket).expect("the end"), b"all of it");
    assert_eq!(guest.socket(socket).peer_shutdown, SHUTDOWN_SEND);
    assert_eq!(guest.socket(socket).state, State::Established);
    for round in 0..3 {
        guest.send(socket, &[round; 1000]).expect("sending");
        assert_eq!(read_exact(&mut peer, 1000), [round; 1000]);
    }
    guest.close(socket).expect("closing");
    assert_eq!(peer.read(&mut [0; 8]).expect("the end"), 0);
    vm.wait_for_connections(0);
    clean(&guest);
}

#[test]
fn both_halves_closed_one_after_the_other_end_the_connection() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    guest.shut_down(socket, SHUTDOWN_SEND);
    assert_eq!(peer.read(&mut [0; 8]).expect("the end"), 0);
    guest.shut_down(socket, SHUTDOWN_RECEIVE);
    guest
        .wait_until("the answer", |guest| {
            guest.socket(socket).state != State::Established
        })
        .expect("RST as the answer");
    assert_eq!(guest.socket(socket).state, State::Closed);
    vm.wait_for_connections(0);
    drop(peer);
    clean(&guest);
}

#[test]
fn a_peer_cannot_write_to_a_guest_that_receives_no_more() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    guest.shut_down(socket, SHUTDOWN_RECEIVE);
    eventually("an error", || {
        peer.write(b"x")
            .is_err_and(|error| error.kind() == ErrorKind::BrokenPipe)
    });
    guest.send(socket, b"still here").expect("sending");
    assert_eq!(read_exact(&mut peer, 10), b"still here");
    guest.close(socket).expect("closing");
    vm.wait_for_connections(0);
    clean(&guest);
}

#[test]
fn what_a_peer_wrote_before_it_closed_arrives() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let content = Content::new(1);
    for length in [1, 4096, 100_000, 1_000_000] {
        let (socket, mut peer) = connected(&vm, &mut guest);
        let writer = std::thread::spawn(move || {
            peer.write_all(&content.take(length)).expect("writing");
        });
        let got = guest.receive_to_end(socket).expect("receiving");
        assert_eq!((got.len(), content.wrong(0, &got)), (length, None));
        writer.join().expect("the writer");
        guest.close(socket).expect("closing");
        vm.wait_for_connections(0);
    }
    clean(&guest);
}

#[test]
fn what_a_guest_sent_before_it_closed_arrives() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let content = Content::new(2);
    for length in [1, 4096, 100_000, 1_000_000] {
        let (socket, mut peer) = connected(&vm, &mut guest);
        let reader = std::thread::spawn(move || {
            // Late, so that something is left in the service when the guest closes.
            std::thread::sleep(Duration::from_millis(50));
            let mut got = Vec::new();
            peer.read_to_end(&mut got).expect("reading");
            got
        });
        guest.send(socket, &content.take(length)).expect("sending");
        guest.close(socket).expect("closing");
        let got = reader.join().expect("the reader");
        assert_eq!((got.len(), content.wrong(0, &got)), (length, None));
        vm.wait_for_connections(0);
    }
    clean(&guest);
}

#[test]
fn rst_from_a_guest_ends_the_peers_connection() {
    // A Unix socket has no word for it; TCP has, see `aborts`.
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    guest.reset(socket);
    match peer.read(&mut [0; 8]) {
        Ok(count) => assert_eq!(count, 0),
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
    vm.wait_for_connections(0);
    clean(&guest);
}

#[test]
fn rst_while_connecting_leaves_nothing() {
    let mut host = Host::new(1);
    // Another port for the check: what is on its way to the first may arrive there late, and be closed.
    let vm = host.vm_with(Limits::default(), to_host(&[PORT, PORT + 1]));
    let mut guest = vm.boot();
    let _listener = vm.service(PORT + 1);
    for _ in 0..50 {
        let socket = guest.start_open(Kind::Stream, HOST_CID, PORT + 1);
        guest.reset(socket);
    }
    eventually("the device to take them all", || {
        // What found its queue full waits for the guest, not for the device.
        guest.poll();
        guest.transport().in_flight() == 0
    });
    vm.wait_for_connections(0);
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn packets_for_a_connection_that_is_not_there_are_answered_with_rst() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    guest.keep_log();
    let (socket, _peer) = connected(&vm, &mut guest);
    guest.take_log();
    for (number, operation) in (0u64..).zip([
        Operation::Response,
        Operation::ReadWrite,
        Operation::Shutdown,
        Operation::CreditUpdate,
        Operation::CreditRequest,
    ]) {
        let mut header = guest.header(socket, operation);
        header.src_port = 9;
        header.dst_port = 10;
        guest.put(header);
        let mut answers = Vec::new();
        guest
            .wait_until("RST", |guest| {
                answers.extend(guest.take_log());
                !answers.is_empty()
            })
            .expect("an answer");
        let (answer, _) = answers[0];
        assert_eq!(answer.op, Operation::Reset as u16, "to {operation:?}");
        assert_eq!((answer.src_cid, answer.dst_cid), (HOST_CID, 3));
        assert_eq!((answer.src_port, answer.dst_port), (10, 9));
        assert_eq!(answer.kind, Kind::Stream as u16);
        assert_eq!(vm.refused(VsockRefusal::NoConnection), number + 1);
    }
    // RST is never answered with RST.
    let mut header = guest.header(socket, Operation::Reset);
    header.src_port = 9;
    guest.put(header);
    guest.run_for(Duration::from_millis(100)).expect("running");
    assert!(guest.take_log().is_empty());
    guest
        .send(socket, b"the one that is there")
        .expect("sending");
    clean(&guest);
}

#[test]
fn a_second_request_for_the_same_connection_is_no_second_connection() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, _peer) = connected(&vm, &mut guest);
    let header = guest.header(socket, Operation::Request);
    guest.put(header);
    guest.run_for(Duration::from_millis(200)).expect("running");
    assert!(vm.traffic().connections <= 1);
    works(&vm, &mut guest);
}

#[test]
fn every_layout_of_descriptors_carries_the_same_bytes() {
    let mut host = Host::new(1);
    let vm = host.vm_with(Limits::default(), to_host(&[PORT]));
    let streams = FEATURE_STREAM | FEATURE_SEQPACKET;
    let layouts = [
        (TransmitLayout::Whole, ReceiveLayout::Whole),
        (TransmitLayout::Split, ReceiveLayout::Split),
        // A guest since 6.17, with 64 KiB in three descriptors.
        (TransmitLayout::Pieces(32 * 1024), ReceiveLayout::Whole),
        // A header in several descriptors, which the specification allows.
        (TransmitLayout::Pieces(20), ReceiveLayout::Pieces(1000)),
        (TransmitLayout::Pieces(4096), ReceiveLayout::Pieces(20)),
    ];
    for (transmit_layout, receive_layout) in layouts {
        for features in [
            streams,
            streams | EVENT_IDX,
            streams | INDIRECT_DESC | EVENT_IDX,
        ] {
            let settings = Settings {
                transmit_layout,
                receive_layout,
                features,
                indirect: features & INDIRECT_DESC != 0,
                ..Settings::default()
            };
            let mut guest = vm.boot_with(&settings);
            let (socket, mut peer) = connected(&vm, &mut guest);
            let content = Content::new(features);
            let echo = std::thread::spawn(move || {
                let got = read_exact(&mut peer, 500_000);
                peer.write_all(&got).expect("writing");
                got
            });
            let sent = guest.send(socket, &content.take(500_000));
            assert!(sent.is_ok(), "{sent:?} with {settings:?}");
            let back = guest.receive_exact(socket, 500_000).expect("receiving");
            assert_eq!(content.wrong(0, &back), None, "{settings:?}");
            echo.join().expect("the peer");
            clean(&guest);
        }
    }
}

#[test]
fn a_queue_of_four_and_one_of_1024_work() {
    let mut host = Host::new(1);
    let vm = host.vm();
    for queue_size in [4, 1024] {
        let mut guest = vm.boot_with(&Settings {
            queue_size,
            transmit_slots: queue_size.min(64),
            receive_buffers: queue_size,
            memory: vec![(0, 16 << 20)],
            ..Settings::default()
        });
        works(&vm, &mut guest);
        let (socket, mut peer) = connected(&vm, &mut guest);
        let content = Content::new(queue_size.into());
        let reader = std::thread::spawn(move || read_exact(&mut peer, 300_000));
        guest.send(socket, &content.take(300_000)).expect("sending");
        assert_eq!(content.wrong(0, &reader.join().expect("the peer")), None);
        clean(&guest);
    }
}

#[test]
fn a_guest_whose_vmm_keeps_the_event_queue_works() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot_with(&Settings {
        event_queue: false,
        ..Settings::default()
    });
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn memory_may_be_told_region_by_region() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot_with(&Settings {
        memory_slots: true,
        memory: vec![(0, 1 << 20), (1 << 30, 1 << 20), (1 << 40, 8 << 20)],
        ..Settings::default()
    });
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn buffers_that_come_late_are_filled() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot_with(&Settings {
        receive_buffers: 1,
        ..Settings::default()
    });
    let (socket, mut peer) = connected(&vm, &mut guest);
    let content = Content::new(5);
    peer.write_all(&content.take(50_000)).expect("writing");
    std::thread::sleep(Duration::from_millis(50));
    guest.transport().post(50);
    let got = guest.receive_exact(socket, 50_000).expect("receiving");
    assert_eq!(content.wrong(0, &got), None);
    clean(&guest);
}

#[test]
fn a_guest_that_boots_again_starts_afresh() {
    let mut host = Host::new(1);
    let vm = host.vm();
    for _ in 0..5 {
        let mut guest = vm.boot();
        works(&vm, &mut guest);
        let (_socket, mut peer) = connected(&vm, &mut guest);
        clean(&guest);
        drop(guest);
        // Whoever spoke with it learns that it is gone.
        match patient(peer.try_clone().expect("a handle")).read(&mut [0; 8]) {
            Ok(count) => assert_eq!(count, 0),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
        drop(peer.flush());
    }
    vm.wait_for_connections(0);
}

#[test]
fn a_removed_guest_is_gone_for_its_vmm_and_its_peers() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let other = host.vm();
    let mut guest = vm.boot();
    let mut other_guest = other.boot();
    let (_socket, mut peer) = connected(&vm, &mut guest);
    host.remove(&vm);
    assert!(matches!(peer.read(&mut [0; 8]), Ok(0) | Err(_)));
    let outcome = guest.run_for(Duration::from_secs(5));
    assert!(
        matches!(outcome, Err(GuestError::BackEndGone)),
        "{outcome:?}"
    );
    works(&other, &mut other_guest);
}

/// The driver of these tests must not sleep on a slot that came back between its last try and its asking for a call.
#[test]
fn a_driver_that_found_no_slot_hears_of_one_that_came_back_meanwhile() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let listener = vm.service(PORT);
    let socket = guest.open_stream(PORT).expect("connecting");
    let mut peer = accept(&listener);
    let mut sent = 0;
    // Not kicked, the device takes none of them.
    while guest.try_send(socket, b"x").expect("sending") == 1 {
        sent += 1;
    }
    assert!(sent > 1, "{sent}");
    guest.transport().kick_queue(TRANSMIT);
    eventually("the device has taken all", || {
        let (ring, memory) = guest.transport().ring(TRANSMIT);
        ring.used_index(memory) == ring.next_available()
    });
    assert!(guest.transport().arm(), "there are slots now");
    assert!(!guest.transport().arm(), "and that has been said");
    assert_eq!(guest.try_send(socket, b"x").expect("sending"), 1);
    guest.kick();
    read_exact(&mut peer, sent + 1);
    clean(&guest);
}

#[test]
fn what_comes_behind_urgent_data_arrives() {
    let mut host = Host::new(1);
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = tcp.local_addr().expect("its address");
    let rules = [
        rule(PORT, VsockDestination::Host),
        rule(PORT + 1, VsockDestination::Tcp { address }),
    ];
    let vm = host.vm_with(Limits::default(), policy(rules));
    let mut guest = vm.boot_with(&Settings {
        buffer_bytes: 4096,
        ..Settings::default()
    });
    let unix = vm.service(PORT);
    for port in [PORT, PORT + 1] {
        let socket = guest.open_stream(port).expect("connecting");
        let peer: OwnedFd = match port {
            PORT => accept(&unix).into(),
            _ => tcp.accept().expect("a connection").0.into(),
        };
        let say = |bytes: &[u8], flags| send(&peer, bytes, flags).expect("sending");
        // The guest has no room, so that all of it is there when it is read.
        say(&[7; 4096], SendFlags::empty());
        guest
            .wait_until("a full buffer", |guest| {
                guest.socket(socket).received == 4096
            })
            .expect("it");
        say(b"before", SendFlags::empty());
        say(b"!", SendFlags::OOB);
        say(b"after", SendFlags::empty());
        // The worker has heard of it by the time it answers, and hears of nothing later.
        host.list();
        guest.receive_exact(socket, 4096).expect("receiving");
        let got = guest.receive_exact(socket, 11);
        let got = got.unwrap_or_else(|error| panic!("port {port}: {error}"));
        assert_eq!(got, b"beforeafter");
        drop(peer);
        assert_eq!(guest.receive_to_end(socket).expect("the end"), b"");
        guest.close(socket).expect("closing");
    }
    clean(&guest);
}
