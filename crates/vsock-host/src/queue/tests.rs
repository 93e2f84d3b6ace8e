//! Chains against a driver's ring that shares no code with ours.

use std::{fs::File, os::fd::FromRawFd};

use sandwire_vsock_guest::{
    memory::Memory as GuestMemory,
    ring::{Descriptor, Ring as Driver},
};

use super::*;
use crate::memory::Placing;

const SIZE: u16 = 16;

struct Both {
    theirs: GuestMemory,
    driver: Driver,
    memory: Memory,
    ring: Ring,
}

fn both(event_idx: bool) -> Both {
    let mut theirs = GuestMemory::new(&[(0x1_0000, 1 << 20)]).expect("memory");
    let driver = Driver::new(&mut theirs, SIZE, event_idx);
    let mut memory = Memory::default();
    for (region, fd) in theirs.table().iter().zip(theirs.files()) {
        // SAFETY: the descriptor is open, as the guest's memory holds it; the copy is ours.
        let file = unsafe { File::from_raw_fd(libc::dup(fd)) };
        let placing = Placing {
            guest: region.guest_phys_addr,
            user: region.userspace_addr,
            size: region.memory_size,
            offset: region.mmap_offset,
        };
        memory.add(placing, &file).expect("mapping it");
    }
    let user = theirs.table()[0].userspace_addr - theirs.table()[0].guest_phys_addr;
    let [descriptors, available, used] =
        driver.addresses().map(|address| address.wrapping_add(user));
    let mut ring = Ring {
        addresses: Some(Addresses {
            descriptors,
            available,
            used,
        }),
        ..Ring::default()
    };
    assert!(ring.set_size(SIZE));
    assert!(ring.start(&memory, event_idx), "the ring is in memory");
    ring.enabled = true;
    Both {
        theirs,
        driver,
        memory,
        ring,
    }
}

#[test]
fn chains_come_out_whole_and_go_back() {
    let Both {
        mut theirs,
        mut driver,
        memory,
        mut ring,
    } = both(false);
    let buffer = theirs.allocate(8192, 16);
    theirs.write(buffer, b"hello");
    let mut pieces = Vec::new();
    assert_eq!(
        ring.take(&memory, Direction::FromGuest, &mut pieces),
        Taken::Empty
    );
    let head = driver
        .add(&theirs, &[(buffer, 44, false), (buffer + 44, 100, false)])
        .expect("room");
    driver.publish(&theirs, head);
    assert!(ring.has_more(&memory));
    assert_eq!(
        ring.take(&memory, Direction::FromGuest, &mut pieces),
        Taken::Chain(head)
    );
    assert_eq!(
        pieces.iter().map(|piece| piece.iov_len).collect::<Vec<_>>(),
        [44, 100]
    );
    assert!(!ring.give_back(&memory, SIZE, 7), "there is no such chain");
    assert!(ring.give_back(&memory, head, 7));
    assert_eq!(driver.pop(&theirs), None, "it isn't published");
    ring.publish(&memory);
    let used = driver.pop(&theirs).expect("it came back");
    assert_eq!((used.head, used.length), (head.into(), 7));
}

#[test]
fn broken_chains_are_told_from_whole_ones_and_append_nothing() {
    let next = 1;
    let write = 2;
    let chains: [&[Descriptor]; 5] = [
        // A loop.
        &[
            descriptor(0x1_0000, 64, next, 1),
            descriptor(0x1_0000, 64, next, 0),
        ],
        // A next one beyond the table.
        &[descriptor(0x1_0000, 64, next, SIZE)],
        // Outside the guest's memory.
        &[descriptor(0x10_0000_0000, 64, 0, 0)],
        // The wrong direction.
        &[descriptor(0x1_0000, 64, write, 0)],
        // An indirect table whose length is no multiple of a descriptor's.
        &[descriptor(0x1_0000, 17, 4, 0)],
    ];
    for chain in chains {
        let Both {
            theirs,
            mut driver,
            memory,
            mut ring,
        } = both(false);
        for (index, part) in (0..).zip(chain) {
            driver.set_descriptor(&theirs, index, *part);
        }
        driver.publish(&theirs, 0);
        let mut pieces = Vec::new();
        let taken = ring.take(&memory, Direction::FromGuest, &mut pieces);
        assert_eq!(taken, Taken::Broken(0), "{chain:?}");
        assert!(pieces.is_empty());
    }
}

#[test]
fn descriptors_of_no_bytes_count_too() {
    for (length, whole) in [(LONGEST_CHAIN, true), (LONGEST_CHAIN + 1, false)] {
        let Both {
            mut theirs,
            mut driver,
            memory,
            mut ring,
        } = both(false);
        let table = theirs.allocate(16 * length, 16);
        let parts = vec![(0x1_0000, 0, false); length];
        let head = driver.add_indirect(&theirs, table, &parts).expect("room");
        driver.publish(&theirs, head);
        let taken = ring.take(&memory, Direction::FromGuest, &mut Vec::new());
        assert_eq!(taken == Taken::Chain(head), whole, "{length}: {taken:?}");
    }
}

fn descriptor(address: u64, length: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor {
        address,
        length,
        flags,
        next,
    }
}

#[test]
fn a_ring_that_makes_no_sense_is_lost() {
    let Both {
        theirs,
        mut driver,
        memory,
        mut ring,
    } = both(false);
    driver.publish(&theirs, SIZE);
    assert_eq!(
        ring.take(&memory, Direction::FromGuest, &mut Vec::new()),
        Taken::Lost
    );
    let Both {
        theirs,
        mut driver,
        memory,
        mut ring,
    } = both(false);
    driver.set_available_index(&theirs, SIZE + 1);
    assert_eq!(
        ring.take(&memory, Direction::FromGuest, &mut Vec::new()),
        Taken::Lost
    );
}

#[test]
fn a_ring_outside_memory_does_not_start() {
    let Both {
        memory, mut ring, ..
    } = both(false);
    let addresses = ring.addresses.expect("set");
    for wrong in [
        Addresses {
            descriptors: addresses.descriptors + 1,
            ..addresses
        },
        Addresses {
            used: 3,
            ..addresses
        },
        Addresses {
            available: u64::MAX,
            ..addresses
        },
    ] {
        ring.addresses = Some(wrong);
        assert!(!ring.start(&memory, false), "{wrong:x?}");
        assert!(!ring.is_serving());
    }
}

#[test]
fn what_came_while_going_to_sleep_is_seen_and_later_a_kick_is_wanted() {
    for event_idx in [false, true] {
        let Both {
            mut theirs,
            mut driver,
            memory,
            mut ring,
        } = both(event_idx);
        let buffer = theirs.allocate(64, 16);
        let offer = |driver: &mut Driver| {
            let head = driver.add(&theirs, &[(buffer, 64, false)]).expect("room");
            driver.publish(&theirs, head);
        };
        ring.wake(&memory);
        assert!(!ring.sleep(&memory), "there is nothing");
        offer(&mut driver);
        assert!(driver.kick_needed(&theirs), "we sleep");
        ring.wake(&memory);
        assert!(matches!(
            ring.take(&memory, Direction::FromGuest, &mut Vec::new()),
            Taken::Chain(_)
        ));
        let head = driver.add(&theirs, &[(buffer, 64, false)]).expect("room");
        driver.publish(&theirs, head);
        assert!(!driver.kick_needed(&theirs), "we are awake");
        assert!(ring.sleep(&memory), "it came without a kick");
    }
}

#[test]
fn a_position_can_be_gone_back_to() {
    let Both {
        mut theirs,
        mut driver,
        memory,
        mut ring,
    } = both(false);
    let buffer = theirs.allocate(64, 16);
    for _ in 0..3 {
        let head = driver.add(&theirs, &[(buffer, 64, true)]).expect("room");
        driver.publish(&theirs, head);
    }
    let mut pieces = Vec::new();
    let mut take = |ring: &mut Ring| ring.take(&memory, Direction::ToGuest, &mut pieces);
    let first = [take(&mut ring), take(&mut ring), take(&mut ring)];
    assert_eq!((ring.base(), take(&mut ring)), (3, Taken::Empty));
    ring.rewind(2);
    assert_eq!(ring.base(), 1);
    assert_eq!([take(&mut ring), take(&mut ring)], first[1..]);
}
