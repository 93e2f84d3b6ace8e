//! What a transport answers, without a VMM.

use std::{io::IoSlice, mem::MaybeUninit};

use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, memfd_create},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};

use super::*;

/// Where the VMM says that it has what the guest has at 0.
const USER: u64 = 0x5500_0000_0000;
const REGION_BYTES: u64 = 0x1_0000;

/// Memory of a guest from an address on, and its file.
fn region(guest: u64) -> (VhostUserSingleMemoryRegion, File) {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
    let file = File::from(file);
    file.set_len(REGION_BYTES).expect("growing it");
    let region = VhostUserSingleMemoryRegion::new(guest, REGION_BYTES, guest + USER, 0);
    (region, file)
}

fn kick() -> File {
    eventfd(0, EventfdFlags::CLOEXEC)
        .expect("an eventfd")
        .into()
}

fn set_address(transport: &mut Transport, ring: u32, guest: u64) {
    let start = guest + USER;
    let (used, available) = (start + 0x2000, start + 0x1000);
    let flags = VhostUserVringAddrFlags::empty();
    transport
        .set_vring_addr(ring, flags, start, used, available, 0)
        .expect("addresses");
}

/// A transport whose first ring runs in memory at 0.
fn running() -> (Transport, VhostUserSingleMemoryRegion, File) {
    let mut transport = Transport::new(3);
    let (memory, file) = region(0);
    transport.set_features(VERSION_1).expect("features");
    let copy = file.try_clone().expect("a descriptor");
    transport
        .add_mem_region(&memory, copy, None)
        .expect("memory");
    transport.set_vring_num(0, 128).expect("a size");
    set_address(&mut transport, 0, 0);
    transport.set_vring_kick(0, Some(kick())).expect("a kick");
    assert!(transport.rings[0].is_serving());
    transport.take_changes();
    (transport, memory, file)
}

#[test]
fn any_part_of_the_configuration_can_be_read() {
    let mut transport = Transport::new(0x0102_0304);
    let flags = VhostUserConfigFlags::empty();
    let mut read = |offset, size| {
        transport
            .get_config(offset, size, flags)
            .expect("it never fails")
    };
    assert_eq!(read(0, 8), [4, 3, 2, 1, 0, 0, 0, 0]);
    assert_eq!(read(2, 2), [2, 1]);
    assert_eq!(read(6, 6), [0; 6]);
    assert_eq!(read(4000, 96), [0; 96]);
}

#[test]
fn features_that_were_not_offered_are_refused() {
    let mut transport = Transport::new(3);
    let offered = transport.get_features().expect("features");
    assert!(transport.set_features(offered).is_ok());
    assert!(transport.has_seqpacket());
    assert!(transport.set_features(offered | 1 << 40).is_err());
    assert!(transport.set_features(0).is_ok());
    assert!(!transport.has_seqpacket());
}

#[test]
fn rings_that_do_not_exist_or_have_no_place_are_refused() {
    let mut transport = Transport::new(3);
    assert!(transport.set_vring_num(3, 128).is_err());
    assert!(transport.set_vring_num(0, 100).is_err());
    assert!(transport.set_vring_num(0, 1 << 16).is_err());
    assert!(transport.set_vring_num(0, 128).is_ok());
    assert!(transport.set_vring_base(0, 1 << 16).is_err());
    assert!(transport.set_vring_base(0, 65535).is_ok());
    assert!(
        transport.set_vring_kick(0, Some(kick())).is_err(),
        "it has no addresses"
    );
    assert!(transport.set_vring_kick(1, None).is_err());
    assert!(!transport.is_serving());
    let base = transport
        .get_vring_base(0)
        .expect("a stopped ring has a position too");
    assert_eq!({ base.num }, 65535);
}

#[test]
fn rings_are_told_by_eventfds_only() {
    let (mut transport, ..) = running();
    assert!(transport.set_vring_kick(0, Some(region(0).1)).is_err());
    assert!(transport.set_vring_call(0, Some(region(0).1)).is_err());
    assert!(transport.set_vring_err(0, Some(region(0).1)).is_err());
    assert!(transport.set_vring_kick(0, Some(kick())).is_ok());
    assert!(transport.set_vring_call(0, Some(kick())).is_ok());
    assert!(transport.set_vring_call(0, None).is_ok());
    assert!(transport.set_vring_err(0, Some(kick())).is_ok());
}

#[test]
fn a_ring_whose_memory_was_taken_away_goes_on_when_it_is_back() {
    let (mut transport, memory, file) = running();
    for _ in 0..2 {
        transport.remove_mem_region(&memory).expect("removing it");
        assert!(!transport.rings[0].is_serving());
        assert!(transport.take_changes().is_empty());
        // Somewhere else there is some.
        let (other, its_file) = region(4 * REGION_BYTES);
        transport
            .add_mem_region(&other, its_file, None)
            .expect("other memory");
        assert!(!transport.rings[0].is_serving());
        let copy = file.try_clone().expect("a descriptor");
        transport
            .add_mem_region(&memory, copy, None)
            .expect("memory");
        assert!(transport.rings[0].is_serving());
        let changes = transport.take_changes();
        assert!(matches!(changes[..], [Change::Look(0)]), "{changes:?}");
        transport.remove_mem_region(&other).expect("removing it");
        assert!(transport.rings[0].is_serving() && transport.take_changes().is_empty());
    }
}

#[test]
fn a_ring_whose_memory_was_taken_away_goes_on_elsewhere_if_the_vmm_says_where() {
    let (mut transport, memory, _file) = running();
    transport.remove_mem_region(&memory).expect("removing it");
    let (other, its_file) = region(4 * REGION_BYTES);
    transport
        .add_mem_region(&other, its_file, None)
        .expect("other memory");
    set_address(&mut transport, 0, 4 * REGION_BYTES);
    assert!(transport.rings[0].is_serving());
    let changes = transport.take_changes();
    assert!(matches!(changes[..], [Change::Look(0)]), "{changes:?}");
}

#[test]
fn a_ring_that_was_stopped_while_its_memory_was_away_stays_so() {
    let (mut transport, memory, file) = running();
    transport.remove_mem_region(&memory).expect("removing it");
    transport.get_vring_base(0).expect("its position");
    transport.take_changes();
    transport
        .add_mem_region(&memory, file, None)
        .expect("memory");
    assert!(!transport.rings[0].is_running());
    assert!(transport.take_changes().is_empty());
}

/// A connection that is full of messages with so many eventfds each, and whose other side has gone.
fn left_with(messages: usize, eventfds: usize) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let event = kick();
    let fds = vec![event.as_fd(); eventfds];
    for _ in 0..messages {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut along = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || along.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = [IoSlice::new(&[0; 20])];
        sendmsg(&theirs, &bytes, &mut along, SendFlags::empty()).expect("saying it");
    }
    ours
}

#[test]
fn what_is_left_in_a_connection_that_ends_is_given_away_if_it_is_much() {
    // As a VMM that ends while its guest starts, and one that turned up while another was there.
    for (messages, eventfds) in [(9, 1), (1, 0), (200, 0), (0, 0)] {
        let (disposal, _waiting) = Disposal::stuck();
        hang_up(left_with(messages, eventfds), &disposal);
        assert!(!disposal.is_held_up(), "{messages} messages");
    }
    for (messages, eventfds) in [(40, 1), (2, 32)] {
        let (disposal, waiting) = Disposal::stuck();
        hang_up(left_with(messages, eventfds), &disposal);
        assert!(disposal.is_held_up(), "{messages} messages");
        drop(waiting);
        assert!(!disposal.is_held_up(), "{messages} messages");
    }
}
