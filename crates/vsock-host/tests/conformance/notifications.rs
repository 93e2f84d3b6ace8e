//! Kicks and calls, with EVENT_IDX and without: a side that says at which chain it wants to be told is told there, and
//! not before; one that can't say so is told of each.

use std::io::Write;

use sandwire_vsock_guest::{
    Guest, Operation, Settings, Socket,
    front_end::EVENT_IDX,
    transport::{RECEIVE, TRANSMIT},
};

use crate::host::{Host, Vm, clean, connected, eventually, read_exact, works};

/// The driver is called for every fourth chain.
const AFTER: u16 = 3;

/// A guest that has the feature or hasn't.
fn booted(vm: &Vm, has_event_idx: bool) -> Guest {
    let usual = Settings::default();
    let features = match has_event_idx {
        true => usual.features,
        false => usual.features & !EVENT_IDX,
    };
    vm.boot_with(&Settings { features, ..usual })
}

#[test]
fn a_driver_is_called_at_the_chain_that_it_named_or_for_each() {
    let mut host = Host::new(1);
    let vm = host.vm();
    for has_event_idx in [true, false] {
        let mut guest = booted(&vm, has_event_idx);
        let (socket, mut peer) = connected(&vm, &mut guest);
        guest.poll();
        let transport = guest.transport();
        let (ring, memory) = transport.ring(RECEIVE);
        let taken = ring.used_index(memory);
        assert!(!ring.arm(memory, AFTER), "there is something still");
        let _before = transport.take_calls(RECEIVE);
        let mut calls = 0;
        for number in 1..=2 * AFTER {
            peer.write_all(b"x").expect("writing");
            eventually("the packet is in the guest's memory", || {
                let (ring, memory) = transport.ring(RECEIVE);
                ring.used_index(memory) == taken.wrapping_add(number)
            });
            let expected = match has_event_idx {
                true => u64::from(number > AFTER),
                false => number.into(),
            };
            eventually("the driver is called", || {
                calls += transport.take_calls(RECEIVE);
                calls >= expected
            });
            assert_eq!(calls, expected, "EVENT_IDX: {has_event_idx}, {number}");
        }
        let got = guest.receive_exact(socket, (2 * AFTER).into());
        assert_eq!(got.expect("receiving"), b"xxxxxx");
        clean(&guest);
    }
}

#[test]
fn a_device_that_sleeps_wants_one_kick_or_each() {
    let mut host = Host::new(1);
    let vm = host.vm();
    for has_event_idx in [true, false] {
        let mut guest = booted(&vm, has_event_idx);
        let (socket, mut peer) = connected(&vm, &mut guest);
        wait_until_asleep(&mut guest, has_event_idx);
        let wanted = [(); 3].map(|()| is_kick_wanted(&mut guest, socket));
        assert_eq!(wanted, [true, !has_event_idx, !has_event_idx]);
        // Nobody has looked yet; now all three are taken, and what follows.
        let transport = guest.transport();
        assert_eq!(transport.in_flight(), 3);
        transport.kick_queue(TRANSMIT);
        eventually("the device takes them", || transport.in_flight() == 0);
        guest.send(socket, b"and on").expect("sending");
        assert_eq!(read_exact(&mut peer, 6), b"and on");
        works(&vm, &mut guest);
        clean(&guest);
    }
}

/// Publishes a packet; whether the device wants to be kicked for it. It isn't.
fn is_kick_wanted(guest: &mut Guest, socket: Socket) -> bool {
    let header = guest.header(socket, Operation::CreditUpdate);
    let transport = guest.transport();
    assert!(transport.send(&header, &[]), "there is no slot");
    let (ring, memory) = transport.ring(TRANSMIT);
    ring.kick_needed(memory)
}

/// The device has taken everything, and has asked to be kicked for what comes next.
fn wait_until_asleep(guest: &mut Guest, has_event_idx: bool) {
    guest.kick();
    eventually("the device sleeps", || {
        guest.poll();
        let transport = guest.transport();
        if transport.in_flight() != 0 {
            return false;
        }
        let (ring, memory) = transport.ring(TRANSMIT);
        let [_, _, used] = ring.addresses();
        match has_event_idx {
            true => memory.load(used + 4 + 8 * u64::from(ring.size())) == ring.next_available(),
            false => memory.load(used) & 1 == 0,
        }
    });
}
