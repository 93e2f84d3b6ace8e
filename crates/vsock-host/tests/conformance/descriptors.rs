//! Chains of descriptors that loop, lead out of memory, have the wrong direction or no end.
//!
//! The device may refuse to go on with such a guest; what it may not do is hang, panic or harm a neighbour,
//! and a guest that is booted anew must work.

use std::{
    io::{ErrorKind, Read, Write},
    time::Duration,
};

use sandwire_api::vsock::{VsockDestination, VsockRefusal};
use sandwire_vsock_guest::{
    Guest, Header, Kind, Operation, Settings,
    packet::HOST_CID,
    ring::{Descriptor, INDIRECT, NEXT, WRITE},
    socket::State,
    transport::{RECEIVE, TRANSMIT},
};
use sandwire_vsock_host::limits::Limits;

use crate::host::{Host, PORT, Vm, clean, connected, eventually, policy, read_line, rule, works};

fn request() -> [u8; 44] {
    Header {
        src_cid: 3,
        dst_cid: HOST_CID,
        src_port: 77,
        dst_port: PORT,
        kind: Kind::Stream as u16,
        op: Operation::Request as u16,
        buf_alloc: 1 << 18,
        ..Header::default()
    }
    .encode()
}

fn descriptor(address: u64, length: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor {
        address,
        length,
        flags,
        next,
    }
}

/// Two guests: one says it, the other must not notice; afterwards the first one boots again.
fn survives(queue: usize, what: &str, lie: impl Fn(&mut Guest) -> Vec<Descriptor>) {
    let mut host = Host::new(1);
    let vm = host.vm();
    let other = host.vm();
    let mut other_guest = other.boot();
    let mut guest = vm.boot_with(&Settings {
        indirect: false,
        receive_buffers: if queue == RECEIVE { 0 } else { 100 },
        ..Settings::default()
    });
    let descriptors = lie(&mut guest);
    guest.transport().publish_raw(queue, &descriptors, 0);
    if queue == RECEIVE {
        // Something that wants to get in.
        let mut client = vm.dial(5);
        works(&other, &mut other_guest);
        drop(std::io::Write::write(&mut client, b"x"));
    }
    eventually(&format!("{what}: to be counted"), || {
        vm.refused(VsockRefusal::BadDescriptors) + vm.refused(VsockRefusal::Malformed) > 0
    });
    works(&other, &mut other_guest);
    assert!(other.traffic().refusals.is_empty(), "{what}");
    drop(guest);
    let mut again = vm.boot();
    works(&vm, &mut again);
}

/// A chain that is bad, but whose head is good: it comes back, and the queue goes on.
fn comes_back(what: &str, lie: impl Fn(&mut Guest, u64) -> Vec<Descriptor>) {
    survives(TRANSMIT, what, |guest| {
        let address = guest.transport().memory().allocate(4096, 64);
        guest.transport().memory().write(address, &request());
        lie(guest, address)
    });
}

#[test]
fn a_descriptor_that_follows_itself() {
    comes_back("a loop of one", |_, address| {
        vec![descriptor(address, 10, NEXT, 0)]
    });
}

#[test]
fn descriptors_that_follow_each_other() {
    comes_back("a loop of two", |_, address| {
        vec![
            descriptor(address, 10, NEXT, 1),
            descriptor(address, 10, NEXT, 0),
        ]
    });
}

#[test]
fn a_loop_of_empty_descriptors() {
    comes_back("a loop of nothing", |_, address| {
        vec![
            descriptor(address, 0, NEXT, 1),
            descriptor(address, 0, NEXT, 0),
        ]
    });
}

#[test]
fn a_next_descriptor_beyond_the_table() {
    for next in [256, 257, 0x7fff, 0xffff] {
        comes_back("next beyond the table", |_, address| {
            vec![descriptor(address, 10, NEXT, next)]
        });
    }
}

#[test]
fn addresses_outside_of_the_guests_memory() {
    for (address, length) in [
        (1 << 40, 44),
        (u64::MAX, 44),
        (u64::MAX - 43, 44),
        (u64::MAX - 42, 44),
        (1 << 63, u32::MAX),
    ] {
        comes_back("outside of memory", |_, _| {
            vec![descriptor(address, length, 0, 0)]
        });
    }
}

#[test]
fn a_buffer_that_begins_inside_and_ends_outside() {
    comes_back("over the end of memory", |guest, _| {
        let end = guest.transport().memory().end();
        guest.transport().memory().write(end - 44, &request());
        vec![descriptor(end - 44, 45, 0, 0)]
    });
}

#[test]
fn a_header_inside_and_a_payload_outside() {
    comes_back("payload outside", |guest, address| {
        let end = guest.transport().memory().end();
        let mut header = Header {
            len: 100,
            op: Operation::ReadWrite as u16,
            ..Header::default()
        };
        header.src_cid = 3;
        header.dst_cid = HOST_CID;
        header.kind = Kind::Stream as u16;
        guest.transport().memory().write(address, &header.encode());
        vec![descriptor(address, 44, NEXT, 1), descriptor(end, 100, 0, 0)]
    });
}

#[test]
fn a_packet_from_the_guest_that_the_device_shall_write() {
    comes_back("wrong direction", |_, address| {
        vec![descriptor(address, 44, WRITE, 0)]
    });
}

#[test]
fn a_packet_whose_second_half_the_device_shall_write() {
    comes_back("wrong direction of the second", |_, address| {
        vec![
            descriptor(address, 20, NEXT, 1),
            descriptor(address, 24, WRITE, 0),
        ]
    });
}

#[test]
fn an_empty_packet() {
    comes_back("nothing", |_, address| vec![descriptor(address, 0, 0, 0)]);
}

#[test]
fn a_descriptor_of_four_gigabytes() {
    comes_back("u32::MAX bytes", |_, address| {
        vec![descriptor(address, u32::MAX, 0, 0)]
    });
}

#[test]
fn a_chain_whose_lengths_add_up_to_more_than_64_bits_of_nothing() {
    comes_back("many large ones", |_, address| {
        (0..200u16)
            .map(|index| descriptor(address, u32::MAX, NEXT, index + 1))
            .collect()
    });
}

#[test]
fn indirect_tables_that_are_none() {
    for (offset, length) in [(0, 0), (0, 15), (0, 17), (1, 16), (0, u32::MAX)] {
        comes_back("a table of odd length", |_, address| {
            vec![descriptor(address + offset, length, INDIRECT, 0)]
        });
    }
    comes_back("a table outside of memory", |_, _| {
        vec![descriptor(1 << 50, 16, INDIRECT, 0)]
    });
    comes_back("a table over the end of memory", |guest, _| {
        let end = guest.transport().memory().end();
        vec![descriptor(end - 16, 32, INDIRECT, 0)]
    });
}

#[test]
fn a_table_within_a_table() {
    comes_back("nested tables", |guest, address| {
        let inner = descriptor(address, 16, INDIRECT, 0);
        guest.transport().memory().write(address, &inner.encode());
        vec![descriptor(address, 16, INDIRECT, 0)]
    });
}

#[test]
fn a_table_that_loops() {
    comes_back("a table that loops", |guest, address| {
        let inner = descriptor(address, 1, NEXT, 0);
        guest.transport().memory().write(address, &inner.encode());
        vec![descriptor(address, 16, INDIRECT, 0)]
    });
}

#[test]
fn buffers_for_the_guest_that_are_none() {
    for (what, flags, address, length) in [
        ("not to be written", 0, None, 4096),
        ("too short for a header", WRITE, None, 43),
        ("empty", WRITE, None, 0),
        ("outside", WRITE, Some(1 << 50), 4096),
        (
            "over the end of the address space",
            WRITE,
            Some(u64::MAX - 100),
            4096,
        ),
    ] {
        survives(RECEIVE, what, |guest| {
            let own = guest.transport().memory().allocate(4096, 64);
            vec![descriptor(address.unwrap_or(own), length, flags, 0)]
        });
    }
}

#[test]
fn a_buffer_for_the_guest_that_loops() {
    survives(RECEIVE, "loop", |guest| {
        let address = guest.transport().memory().allocate(4096, 64);
        vec![
            descriptor(address, 4, WRITE | NEXT, 1),
            descriptor(address, 4, WRITE | NEXT, 0),
        ]
    });
}

fn lies_about_its_ring(lie: impl Fn(&mut Guest)) {
    let mut host = Host::new(1);
    let vm = host.vm();
    let other = host.vm();
    let mut other_guest = other.boot();
    let mut guest = vm.boot();
    lie(&mut guest);
    for _ in 0..3 {
        guest.transport().kick_queue(TRANSMIT);
        guest.transport().kick_queue(RECEIVE);
        drop(vm_dial(&vm));
        works(&other, &mut other_guest);
    }
    drop(guest);
    works(&vm, &mut vm.boot());
}

fn vm_dial(vm: &Vm) -> std::os::unix::net::UnixStream {
    let client = vm.dial(5);
    std::thread::sleep(Duration::from_millis(10));
    client
}

#[test]
fn an_available_index_far_beyond_the_queue() {
    for queue in [TRANSMIT, RECEIVE] {
        for jump in [257, 1000, 0x7fff, 0xffff] {
            lies_about_its_ring(|guest| {
                let (ring, memory) = guest.transport().ring(queue);
                let index = ring.next_available().wrapping_add(jump);
                ring.set_available_index(memory, index);
            });
        }
    }
}

#[test]
fn nobody_waits_for_a_guest_whose_ring_is_lost() {
    for queue in [TRANSMIT, RECEIVE] {
        let mut host = Host::new(1);
        let vm = host.vm();
        let sibling = VsockDestination::Sandbox {
            lease: vm.key.lease.clone(),
            owner_uid: None,
            port: 7,
        };
        let rules = [rule(7, sibling), rule(PORT, VsockDestination::Host)];
        let other = host.vm_with(Limits::default(), policy(rules));
        let (mut guest, mut other_guest) = (vm.boot(), other.boot());
        guest.listen(Kind::Stream, 7);
        let (_, mut service) = connected(&vm, &mut guest);
        let mut client = vm.dial(7);
        guest.accept(Kind::Stream, 7).expect("accepting");
        read_line(&mut client);
        let called = other_guest.start_open(Kind::Stream, HOST_CID, 7);
        guest.accept(Kind::Stream, 7).expect("accepting");
        other_guest
            .wait_until("an answer", |guest| {
                guest.socket(called).state == State::Established
            })
            .expect("an answer");

        let (ring, memory) = guest.transport().ring(queue);
        let index = ring.next_available();
        ring.set_available_index(memory, index.wrapping_add(5000));
        guest.transport().kick_queue(queue);
        // Something that wants to get in, if the device hasn't noticed by itself.
        drop(client.write(b"x"));
        for stream in [&mut service, &mut client] {
            let end = stream.read(&mut [0]).map_err(|error| error.kind());
            assert!(
                matches!(end, Ok(0) | Err(ErrorKind::ConnectionReset)),
                "{end:?}"
            );
        }
        other_guest
            .wait_until("the end", |guest| guest.socket(called).at_end())
            .expect("the sibling's end");
        vm.wait_for_connections(0);
        assert_eq!(vm.refused(VsockRefusal::Unreachable), 0);
        assert_eq!(vm.dial(7).read(&mut [0]).expect("the end"), 0);
        let called = other_guest.start_open(Kind::Stream, HOST_CID, 7);
        other_guest
            .wait_until("the end", |guest| guest.socket(called).at_end())
            .expect("the sibling's end");
        eventually("both to be counted", || {
            vm.refused(VsockRefusal::Unreachable) == 2
        });

        // Its VMM starts the ring again, and the guest hears that its connections are gone.
        let (ring, memory) = guest.transport().ring(queue);
        ring.set_available_index(memory, index);
        let stopped = guest.snapshot().expect("stopping");
        guest.resume(&stopped).expect("starting");
        guest
            .wait_until("the event", |guest| guest.transport_resets() == 1)
            .expect("the event");
        works(&vm, &mut guest);
        works(&other, &mut other_guest);
        clean(&guest);
        clean(&other_guest);
    }
}

#[test]
fn an_available_index_that_goes_back() {
    for queue in [TRANSMIT, RECEIVE] {
        lies_about_its_ring(|guest| {
            let (ring, memory) = guest.transport().ring(queue);
            ring.set_available_index(memory, 0);
            ring.set_available_index(memory, u16::MAX);
        });
    }
}

#[test]
fn a_head_beyond_the_table() {
    for queue in [TRANSMIT, RECEIVE] {
        for head in [256, 257, 0xffff] {
            lies_about_its_ring(|guest| {
                let (ring, memory) = guest.transport().ring(queue);
                ring.publish(memory, head);
            });
        }
    }
}

#[test]
fn rings_overwritten_with_noise() {
    for seed in 0..10 {
        lies_about_its_ring(|guest| {
            let noise = sandwire_vsock_guest::Content::new(seed).take(512);
            for queue in [TRANSMIT, RECEIVE] {
                let (ring, memory) = guest.transport().ring(queue);
                for address in ring.addresses() {
                    memory.write(address, &noise);
                }
            }
        });
    }
}

#[test]
fn kicks_without_reason() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let other = host.vm();
    let mut other_guest = other.boot();
    let mut guest = vm.boot();
    for _ in 0..10_000 {
        guest.transport().kick_queue(TRANSMIT);
        guest.transport().kick_queue(RECEIVE);
    }
    works(&other, &mut other_guest);
    works(&vm, &mut guest);
}
