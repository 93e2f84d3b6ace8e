//! Packets that are too large for another sandbox's interface: the kernel's own stack cuts them.

use std::net::SocketAddr;

use sandwire_testlab::{
    fake_guest::{FakeGuest, frame},
    host::{BEYOND_IPV4, ECHO_PORT},
    lab,
};
use serde_json::json;

use crate::{
    GATEWAY_MAC,
    ebpf::{SECOND, World, pool, wait_until},
};

const PAYLOAD: usize = 4000;
const ETHERNET: usize = 14;
const IPV4: usize = 20;
const UDP: usize = 8;
/// Don't fragment, in the word at this place of a frame, and where the header's checksum is.
const DONT_FRAGMENT: u16 = 0x4000;
const FLAGS_AT: usize = 20;
const CHECKSUM_AT: usize = 24;

/// With a pool that masquerades, the host filters what its stack forwards between sandboxes.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_large_datagram_reaches_a_sandbox_of_a_smaller_mtu_in_fragments() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        let policy = json!({"uplink": "masquerade", "group": "together", "clone_to_clone": true});
        for (number, (name, mtu)) in [("large", 9000), ("small", 1500)].into_iter().enumerate() {
            let mut spec = pool(name, "host", number, 1, &policy);
            spec["tap"] = json!({"mtu": mtu});
            world.daemon.create_pool(&spec).unwrap();
        }
        let (_, sender) = world.guest("large", "large");
        let (lease, receiver) = world.guest("small", "small");
        // Each has to know its gateway first: smoltcp loses an answer while it asks for that.
        for guest in [&sender, &receiver] {
            guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
        }
        sender.ping(lease.ipv4, 5 * SECOND).unwrap();
        drop(receiver.received_frames().unwrap());
        let target = SocketAddr::new(lease.ipv4, ECHO_PORT);
        sender.send_frame(&large_datagram(&sender, target)).unwrap();
        let mut came = 0;
        wait_until("all of it has come", 5 * SECOND, || {
            let frames = receiver.received_frames().unwrap();
            let fragments = frames.iter().filter(|frame| frame[23] == 17);
            came += fragments.map(|frame| payload_of(frame)).sum::<usize>();
            came == UDP + PAYLOAD
        });
    });
}

/// Bytes behind the IPv4 header of a frame.
fn payload_of(frame: &[u8]) -> usize {
    let length = u16::from_be_bytes([frame[ETHERNET + 2], frame[ETHERNET + 3]]);
    assert!(frame.len() <= ETHERNET + 1500, "{}", frame.len());
    usize::from(length) - IPV4
}

/// A datagram that may be cut.
fn large_datagram(guest: &FakeGuest, target: SocketAddr) -> Vec<u8> {
    let own = guest.network();
    let source = SocketAddr::new(own.ipv4.0.into(), ECHO_PORT);
    let mut frame = frame::udp(own.mac, GATEWAY_MAC, source, target, &[0; PAYLOAD]);
    let word = |frame: &[u8], at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let flags = word(&frame, FLAGS_AT);
    if flags & DONT_FRAGMENT != 0 {
        let checksum = u32::from(word(&frame, CHECKSUM_AT)) + u32::from(DONT_FRAGMENT);
        let checksum = u16::try_from((checksum & 0xffff) + (checksum >> 16)).unwrap();
        let flags = flags & !DONT_FRAGMENT;
        frame[FLAGS_AT..FLAGS_AT + 2].copy_from_slice(&flags.to_be_bytes());
        frame[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&checksum.to_be_bytes());
    }
    frame
}
