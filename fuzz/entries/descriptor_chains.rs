//! Whatever stands in a guest's memory: what is taken out of a ring lies in that memory, and it ends.

use std::{fs::File, os::fd::OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};
use sandwire_vsock_host::{
    memory::{Memory, Placing},
    queue::{Addresses, Direction, LONGEST_CHAIN, Ring, Taken},
};

/// Where the VMM has the guest's memory.
const USER: u64 = 0x10_0000;
const BYTES: u32 = 0x4000;
const RING: u16 = 16;
/// Near the start of memory, and the descriptors behind it, so that short cases have chains. At 0 it would
/// count as not set.
pub(crate) const AVAILABLE: u16 = 2;
pub(crate) const DESCRIPTORS: u16 = 0x30;

/// One case: the guest's memory from its start, and which way the ring leads.
pub(crate) fn run(bytes: &[u8]) {
    chains(bytes);
}

/// The same; gives the number of chains that made sense.
pub(crate) fn chains(bytes: &[u8]) -> usize {
    let Some((first, content)) = bytes.split_first() else {
        return 0;
    };
    let file: OwnedFd = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, BYTES.into()).expect("its size");
    let length = content.len().min(BYTES as usize);
    rustix::io::pwrite(&file, &content[..length], 0).expect("its content");
    let mut memory = Memory::default();
    let placing = Placing {
        guest: 0,
        user: USER,
        size: BYTES.into(),
        offset: 0,
    };
    memory.add(placing, &File::from(file)).expect("mapping it");

    let mut ring = Ring::default();
    assert!(ring.set_size(RING));
    ring.addresses = Some(Addresses {
        descriptors: USER + u64::from(DESCRIPTORS),
        available: USER + u64::from(AVAILABLE),
        used: USER + 0x200,
    });
    ring.enabled = true;
    if !ring.start(&memory, first & 1 != 0) {
        return 0;
    }
    let direction = if first & 2 == 0 {
        Direction::FromGuest
    } else {
        Direction::ToGuest
    };
    let (mut pieces, mut count) = (Vec::new(), 0);
    // A ring that offers more than it has is lost at once; one that doesn't ends here.
    for _ in 0..=RING {
        pieces.clear();
        match ring.take(&memory, direction, &mut pieces) {
            Taken::Chain(head) => {
                check(&memory, &pieces);
                count += 1;
                ring.give_back(&memory, head, 0);
            }
            Taken::Broken(head) => {
                assert!(pieces.is_empty());
                ring.give_back(&memory, head, 0);
            }
            Taken::Empty | Taken::Lost => break,
        }
    }
    ring.signal(&memory);
    let _ = ring.sleep(&memory);
    count
}

fn check(memory: &Memory, pieces: &[libc::iovec]) {
    assert!(pieces.len() <= LONGEST_CHAIN + 1);
    let mut whole = Vec::new();
    assert!(memory.locate(0, BYTES, &mut whole));
    let start = whole[0].iov_base as usize;
    for piece in pieces {
        let offset = (piece.iov_base as usize).wrapping_sub(start);
        assert!(
            offset + piece.iov_len <= BYTES as usize,
            "outside of memory"
        );
    }
}
