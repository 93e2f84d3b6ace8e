//! TAPs handed out as open descriptors.

use std::{
    fs::File,
    io::{IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::net::UnixStream},
};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use sandwire_testlab::{lab, sandwire::Daemon};
use serde_json::json;

use crate::{
    GATEWAY_MAC,
    ebpf::{POOLS, SECOND, World, pool, wait_until},
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_open_tap_is_handed_to_a_process_that_opens_none() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        for (number, kind) in POOLS.into_iter().enumerate() {
            let mut spec = pool(kind, kind, number, 1, &json!({"uplink": "route"}));
            spec["tap"] = json!({"vnet_header": false});
            world.daemon.create_pool(&spec).unwrap();
            let lease = world.daemon.acquire(kind, kind).unwrap();
            let descriptors = receive_taps(&world.daemon, &lease.name);
            assert_eq!(descriptors.len(), 1);
            let mut tap = File::from(descriptors.into_iter().next().unwrap());
            // As whoever has it: the gateway answers an ARP request that we write.
            wait_until("the gateway answers", 5 * SECOND, || {
                tap.write_all(&arp_request()).unwrap();
                let mut frame = [0; 1600];
                let read = tap.read(&mut frame);
                read.is_ok_and(|length| is_arp_reply(&frame[..length]))
            });
            let released = world.daemon.json(&format!("release {kind}")).unwrap();
            assert_eq!(released["released"][0]["outcome"], "held", "{released}");
            drop(tap);
            wait_until(
                "the slot ends with the last descriptor",
                20 * SECOND,
                || {
                    world
                        .daemon
                        .json("list")
                        .unwrap()
                        .as_array()
                        .unwrap()
                        .is_empty()
                },
            );
        }
    });
}

/// The TAPs of a lease, as open descriptors: what `GET /v1/leases/NAME/taps` sends.
fn receive_taps(daemon: &Daemon, lease: &str) -> Vec<OwnedFd> {
    let mut stream = UnixStream::connect(daemon.socket()).unwrap();
    stream.set_read_timeout(Some(10 * SECOND)).unwrap();
    write!(
        stream,
        "GET /v1/leases/{lease}/taps HTTP/1.1\r\nHost: localhost\r\n\
         Connection: upgrade\r\nUpgrade: sandwire-fd\r\n\r\n"
    )
    .unwrap();
    let mut text = Vec::new();
    let mut descriptors = Vec::new();
    while descriptors.is_empty() {
        let mut bytes = [0; 4096];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut room);
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&stream, &mut slices, &mut control, flags).unwrap();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        text.extend_from_slice(&bytes[..received.bytes]);
        let shown = String::from_utf8_lossy(&text);
        assert!(
            shown.starts_with("HTTP/1.1 101") || text.len() < 12,
            "{shown}"
        );
        assert!(
            received.bytes > 0,
            "the daemon closed the connection: {shown}"
        );
    }
    descriptors
}

const GUEST_MAC: [u8; 6] = [0x06, 0x00, 0xc0, 0xa8, 0xf1, 0x02];

/// Who has 192.168.241.1? Tell 192.168.241.2.
fn arp_request() -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(GUEST_MAC);
    frame.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(GUEST_MAC);
    frame.extend([192, 168, 241, 2, 0, 0, 0, 0, 0, 0, 192, 168, 241, 1]);
    frame
}

fn is_arp_reply(frame: &[u8]) -> bool {
    frame.len() >= 42
        && frame[..6] == GUEST_MAC
        && frame[12..14] == [0x08, 0x06]
        && frame[20..22] == [0, 2]
        && frame[22..28] == GATEWAY_MAC
}
