//! Headers that no decent guest sends. Each is counted, answered with RST where it has an address, its
//! descriptors come back, and nobody else notices.

use std::time::Duration;

use sandwire_api::vsock::VsockRefusal;
use sandwire_vsock_guest::{
    Guest, GuestError, Header, Kind, Operation, Settings, Transport, packet::HOST_CID,
};

use crate::host::{Host, PORT, Vm, clean, connected, eventually, read_exact, works};

const FROM: u32 = 0x5000_0000;

fn header(operation: u16) -> Header {
    Header {
        src_cid: 3,
        dst_cid: HOST_CID,
        src_port: FROM,
        dst_port: PORT,
        kind: Kind::Stream as u16,
        op: operation,
        buf_alloc: 1 << 18,
        ..Header::default()
    }
}

/// Sends one packet as it is, and waits until the device has given its descriptors back.
#[track_caller]
fn send(transport: &mut Transport, header: Header, payload: &[u8]) {
    assert!(transport.send(&header, payload), "no slot free");
    transport.kick();
    eventually("the descriptors to come back", || {
        transport.in_flight() == 0
    });
}

/// What came to the guest within a short time.
fn answers(guest: &mut Guest) -> Vec<Header> {
    guest.run_for(Duration::from_millis(30)).expect("running");
    guest
        .take_log()
        .into_iter()
        .map(|(header, _)| header)
        .collect()
}

#[track_caller]
fn expect_count(vm: &Vm, reason: VsockRefusal, count: u64) {
    eventually(&format!("{count} refused as {reason:?}"), || {
        vm.refused(reason) == count
    });
}

#[test]
fn operations_and_types_that_do_not_exist_are_refused() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    guest.keep_log();
    let mut count = 0;
    for operation in [0, 8, 9, 255, 256, 0xffff] {
        count += 1;
        send(guest.transport(), header(operation), &[]);
        expect_count(&vm, VsockRefusal::Malformed, count);
        let answers = answers(&mut guest);
        assert!(
            answers
                .iter()
                .all(|answer| answer.op == Operation::Reset as u16),
            "{answers:?}"
        );
    }
    for kind in [0, 3, 4, 0x100, 0xffff] {
        for operation in 1..=7 {
            count += 1;
            let header = Header {
                kind,
                ..header(operation)
            };
            send(guest.transport(), header, &[]);
            expect_count(&vm, VsockRefusal::Malformed, count);
        }
        // Linux drops a packet of unknown type, or takes RST with that type: either is fine, more is not.
        drop(answers(&mut guest));
    }
    assert_eq!(vm.traffic().connections, 1);
    guest.send(socket, b"unharmed").expect("sending");
    assert_eq!(read_exact(&mut peer, 8), b"unharmed");
}

#[test]
fn lengths_that_lie_are_refused() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let other = host.vm();
    let mut other_guest = other.boot();
    let mut count = 0;
    for (length, payload) in [
        (1, 0),
        (100, 99),
        (65_536, 10),
        (65_537, 65_536),
        (u32::MAX, 10),
        (u32::MAX - 43, 44),
        (1 << 31, 0),
    ] {
        let mut guest = vm.boot();
        let (socket, _peer) = connected(&vm, &mut guest);
        let mut lie = guest.header(socket, Operation::ReadWrite);
        lie.len = length;
        send(guest.transport(), lie, &vec![1; payload]);
        count += 1;
        eventually(&format!("a length of {length} to be refused"), || {
            vm.refused(VsockRefusal::Malformed)
                + vm.refused(VsockRefusal::Credit)
                + vm.refused(VsockRefusal::BadDescriptors)
                >= count
        });
        works(&vm, &mut guest);
        works(&other, &mut other_guest);
        clean(&guest);
    }
}

#[test]
fn a_packet_shorter_than_a_header_is_refused() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    for (number, length) in (1u64..).zip([1u32, 20, 43]) {
        let transport = guest.transport();
        let address = transport.memory().allocate(64, 64);
        let (ring, memory) = transport.ring(sandwire_vsock_guest::transport::TRANSMIT);
        memory.write(address, &header(1).encode());
        let head = ring
            .add(memory, &[(address, length, false)])
            .expect("a descriptor");
        ring.publish(memory, head);
        transport.kick();
        eventually("the descriptor to come back", || {
            guest.transport().in_flight() == 0
        });
        eventually("it to be counted", || {
            vm.refused(VsockRefusal::Malformed) + vm.refused(VsockRefusal::BadDescriptors) == number
        });
    }
    works(&vm, &mut guest);
}

#[test]
fn payload_where_none_belongs_is_not_delivered() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    for operation in [Operation::CreditUpdate, Operation::CreditRequest] {
        let mut odd = guest.header(socket, operation);
        odd.len = 5;
        send(guest.transport(), odd, b"extra");
    }
    guest.run_for(Duration::from_millis(50)).expect("running");
    if guest.socket(socket).state == sandwire_vsock_guest::socket::State::Established {
        guest.send(socket, b"payload").expect("sending");
        assert_eq!(read_exact(&mut peer, 7), b"payload");
    }
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn a_forged_source_is_refused_and_harms_nobody() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let other = host.vm();
    let mut guest = vm.boot();
    let mut other_guest = other.boot();
    let (other_socket, mut other_peer) = connected(&other, &mut other_guest);
    let (socket, mut peer) = connected(&vm, &mut guest);
    let mut count = 0;
    for src_cid in [0, 1, 2, 4, 5, u64::from(u32::MAX), u64::MAX, 3 | 1 << 32] {
        for operation in 1..=7 {
            count += 1;
            // The ports of a connection that exists, in this guest and in the other one.
            let address = guest.socket(socket).address;
            let forged = Header {
                src_cid,
                src_port: address.local_port,
                dst_port: address.peer_port,
                ..header(operation)
            };
            send(guest.transport(), forged, &[]);
            expect_count(&vm, VsockRefusal::ForgedSource, count);
        }
    }
    guest.send(socket, b"unharmed").expect("sending");
    assert_eq!(read_exact(&mut peer, 8), b"unharmed");
    other_guest
        .send(other_socket, b"unharmed")
        .expect("sending");
    assert_eq!(read_exact(&mut other_peer, 8), b"unharmed");
    assert!(other.traffic().refusals.is_empty());
    clean(&other_guest);
}

#[test]
fn nobody_is_reached_by_cid_0_1_the_own_one_or_one_that_nobody_has() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let _listener = vm.service(PORT);
    guest.keep_log();
    let mut count = 0;
    for cid in [0, 1, 3, 4, 99, u64::from(u32::MAX)] {
        for kind in [Kind::Stream, Kind::Seqpacket] {
            count += 1;
            let refused = guest.open(kind, cid, PORT);
            assert!(
                matches!(refused, Err(GuestError::Reset)),
                "CID {cid}: {refused:?}"
            );
            expect_count(&vm, VsockRefusal::Cid, count);
        }
    }
    // The upper half of a CID is reserved: 2 with something above it isn't the host.
    for cid in [2 | 1 << 32, 3 | 1 << 63, u64::MAX] {
        count += 1;
        let odd = Header {
            dst_cid: cid,
            ..header(Operation::Request as u16)
        };
        send(guest.transport(), odd, &[]);
        eventually("it to be refused", || {
            vm.refused(VsockRefusal::Cid) + vm.refused(VsockRefusal::Malformed) >= count
        });
    }
    works_after_a_listener(&vm, &mut guest);
}

fn works_after_a_listener(vm: &Vm, guest: &mut Guest) {
    assert_eq!(vm.traffic().connections, 0);
    works(vm, guest);
}

#[test]
fn flags_that_do_not_exist_change_nothing() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let (socket, mut peer) = connected(&vm, &mut guest);
    let mut odd = guest.header(socket, Operation::Shutdown);
    odd.flags = 0;
    send(guest.transport(), odd, &[]);
    odd.flags = 0xffff_fffc;
    send(guest.transport(), odd, &[]);
    let mut odd = guest.header(socket, Operation::CreditUpdate);
    odd.flags = u32::MAX;
    send(guest.transport(), odd, &[]);
    guest.run_for(Duration::from_millis(50)).expect("running");
    guest.send(socket, b"still open").expect("sending");
    assert_eq!(read_exact(&mut peer, 10), b"still open");
    clean(&guest);
}

#[test]
fn ports_at_the_ends_of_the_range_are_ports_like_others() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot_with(&Settings::default());
    for dst_port in [0, u32::MAX] {
        let refused = guest.open(Kind::Stream, HOST_CID, dst_port);
        assert!(matches!(refused, Err(GuestError::Reset)), "{refused:?}");
    }
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn ten_thousand_refusals_that_nobody_reads_are_not_kept() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let other = host.vm();
    let mut guest = vm.boot();
    let mut other_guest = other.boot();
    let mut stalls = 0;
    for number in 0..10_000u32 {
        let packet = Header {
            src_port: number,
            ..header(Operation::ReadWrite as u16)
        };
        while !guest.transport().send(&packet, &[]) {
            // The receive queue is full of answers. The device may wait for it, but for this guest alone.
            guest.transport().kick();
            stalls += 1;
            works(&other, &mut other_guest);
            guest.poll();
        }
        guest.transport().kick();
    }
    assert_eq!(vm.traffic().connections, 0, "after {stalls} stalls");
    guest.poll();
    works(&vm, &mut guest);
    clean(&guest);
}
