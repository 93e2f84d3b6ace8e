//! The fuzz targets of `fuzz/`, for a short while and always with the same bytes: no fuzzer needed.

#[path = "../../../fuzz/entries/control_request.rs"]
mod control_request;
#[path = "../../../fuzz/entries/descriptor_chains.rs"]
mod descriptor_chains;
#[path = "../../../fuzz/drive.rs"]
mod drive;
#[path = "../../../fuzz/entries/guest_packets.rs"]
mod guest_packets;
#[path = "../../../fuzz/entries/handshake.rs"]
mod handshake;
#[path = "../../../fuzz/entries/packet_header.rs"]
mod packet_header;
#[path = "../../../fuzz/entries/vhost_user_messages.rs"]
mod vhost_user_messages;

use drive::drive;
use sandwire_vsock_guest::Content;

const CASES: u64 = 3000;

#[test]
fn packet_headers() {
    drive(
        "packet_header",
        packet_header::run,
        &[Content::new(1).take(44), vec![0; 44], vec![0xff; 50]],
        CASES,
    );
}

/// A guest's memory with one chain of these descriptors: address, length, flags, next.
fn chain(descriptors: &[(u64, u32, u16, u16)]) -> Vec<u8> {
    let mut bytes = vec![0; 1 + 0x400];
    for (index, (address, length, flags, next)) in descriptors.iter().enumerate() {
        let at = 1 + usize::from(descriptor_chains::DESCRIPTORS) + index * 16;
        bytes[at..at + 8].copy_from_slice(&address.to_le_bytes());
        bytes[at + 8..at + 12].copy_from_slice(&length.to_le_bytes());
        bytes[at + 12..at + 14].copy_from_slice(&flags.to_le_bytes());
        bytes[at + 14..at + 16].copy_from_slice(&next.to_le_bytes());
    }
    // The available ring: one chain, from the first descriptor.
    bytes[1 + usize::from(descriptor_chains::AVAILABLE) + 2] = 1;
    bytes
}

#[test]
fn descriptor_chains() {
    let good = chain(&[(0x1000, 44, 1, 1), (0x2000, 100, 0, 0)]);
    assert_eq!(descriptor_chains::chains(&good), 1, "the seeds are chains");
    drive(
        "descriptor_chains",
        descriptor_chains::run,
        &[
            chain(&[(0x1000, 44, 0, 0)]),
            chain(&[(0x1000, 44, 1, 1), (0x2000, 100, 1, 2), (0x3000, 10, 0, 0)]),
            chain(&[(0x1000, 44, 1, 1), (0x2000, 100, 1, 0)]),
            chain(&[(0x300, 32, 4, 0)]),
            chain(&[(0x3fff, 2, 0, 0)]),
        ],
        CASES,
    );
}

#[test]
fn guest_packets() {
    // REQUEST, 1000 bytes; a client calls, RESPONSE. The neighbour's connection and its four bytes come on top.
    let seed = [
        &[0x01, 0, 0, 0, 0, 0][..],
        &[0x05, 0, 0, 0xe8, 0x03, 0],
        &[0xa0],
        &[0x02, 8, 0, 0, 0, 0],
    ]
    .concat();
    let traffic = guest_packets::traffic(&seed);
    assert_eq!(traffic.egress_bytes, 1004, "the seeds are packets");
    assert_eq!((traffic.opened_by_guest, traffic.opened_by_peers), (2, 1));
    assert!(traffic.refusals.is_empty(), "{traffic:?}");
    let any = [&[0x60][..], &Content::new(3).take(46)].concat().repeat(9);
    drive(
        "guest_packets",
        guest_packets::run,
        &[seed, any, Content::new(4).take(1000)],
        CASES / 5,
    );
}

#[test]
fn handshakes() {
    let seed = |said: &[u8]| [&[0, 9][..], said].concat();
    drive(
        "handshake",
        handshake::run,
        &[
            seed(b"CONNECT 5000\n"),
            seed(b"CONNECT 4294967295\nCONNECT 1\n"),
            seed(b"CONNECT  0x10\r\n"),
            [&[1, 255][..], b"CONNECT 7\n"].concat(),
        ],
        CASES,
    );
}

#[test]
fn vhost_user_messages() {
    let session: Vec<u8> = {
        let region = sandwire_vsock_guest::wire::Region::new(0, 1 << 20).expect("memory");
        let messages = sandwire_vsock_guest::wire::session(&region, 256).expect("messages");
        messages
            .into_iter()
            .flat_map(|message| message.bytes)
            .collect()
    };
    drive(
        "vhost_user_messages",
        vhost_user_messages::run,
        &[
            [&[0][..], &session].concat(),
            [&[1][..], &Content::new(2).take(300)].concat(),
            [&[0][..], &session[..40]].concat(),
        ],
        CASES,
    );
}

#[test]
fn control_requests() {
    let vm = r#"{"request":"add_vm","vm":{"key":{"tenant":1,"lease":"a"},"folder":"/x","policy":{"rules":[
        {"port":"1-9","to":{"kind":"host"},"identity":true},
        {"port":"10","to":{"kind":"unix","path":"/y"}},
        {"port":"11","to":{"kind":"tcp","address":"[::1]:80"}},
        {"port":"12","to":{"kind":"sandbox","lease":"b","port":7}}]}}}"#;
    let policy = r#"{"request":"set_policy","key":{"tenant":1,"lease":"a"},"policy":{"rules":[
        {"port":"1-4294967294","to":{"kind":"sandbox","lease":"b","port":4294967295}}]}}"#;
    let seeds = [vm, policy, r#"{"request":"hello"}"#];
    assert!(
        seeds.iter().all(
            |seed| serde_json::from_str::<sandwire_vsock_host::control::Request>(seed).is_ok()
        ),
        "the seeds are understood"
    );
    drive(
        "control_request",
        control_request::run,
        &seeds.map(|seed| seed.as_bytes().to_vec()),
        CASES,
    );
}
