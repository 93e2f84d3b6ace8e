//! What kernel sockets send each other across an engine, each byte of it compared.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::thread;
use std::time::Duration;

use sandwire_testlab::namespace::Namespace;
use sandwire_testlab::traffic;

use crate::offloads;

/// Datagrams of all sizes, fragmented ones, and ones that the kernel cuts from a longer write.
pub(crate) fn datagrams(from: &Namespace, to: &Namespace, address: IpAddr) {
    datagrams_of(SINGLE_LENGTHS, from, to, address);
}

/// Datagrams none of which is fragmented, so that all belong to one flow.
pub(crate) fn whole_datagrams(from: &Namespace, to: &Namespace, address: IpAddr) {
    datagrams_of(&SINGLE_LENGTHS[..WHOLE], from, to, address);
}

fn datagrams_of(lengths: &[usize], from: &Namespace, to: &Namespace, address: IpAddr) {
    let receiver = to.inside(|| Ok(UdpSocket::bind((address, 0))?)).unwrap();
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    let target = receiver.local_addr().unwrap();
    let unspecified = if address.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    };
    let sender = from.inside(|| Ok(UdpSocket::bind(unspecified)?)).unwrap();
    sender.connect(target).unwrap();
    for lengths in lengths.chunks(8).cycle().take(lengths.len() * 3) {
        let payloads: Vec<Vec<u8>> = lengths.iter().map(|&length| payload(length)).collect();
        for payload in &payloads {
            assert_eq!(sender.send(payload).unwrap(), payload.len());
        }
        expect(&receiver, &payloads);
    }
    for segment in [200, 1000, 1400] {
        offloads::segment_datagrams(&sender, segment).unwrap();
        let whole = payload(usize::from(segment) * 30 + 7);
        assert_eq!(sender.send(&whole).unwrap(), whole.len());
        let payloads: Vec<Vec<u8>> = whole.chunks(segment.into()).map(<[u8]>::to_vec).collect();
        expect(&receiver, &payloads);
    }
}

/// All of them and nothing else, in any order: a sender that the scheduler moves to another processor is overtaken by
/// itself in a veth.
#[track_caller]
fn expect(receiver: &UdpSocket, payloads: &[Vec<u8>]) {
    let mut buffer = vec![0; 65536];
    let mut awaited: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
    while !awaited.is_empty() {
        let received = receiver.recv(&mut buffer);
        let length = received.unwrap_or_else(|error| {
            let lengths: Vec<usize> = awaited.iter().map(|payload| payload.len()).collect();
            panic!("datagrams of {lengths:?} bytes didn't come: {error}")
        });
        let datagram = &buffer[..length];
        let place = awaited.iter().position(|awaited| *awaited == datagram);
        let place = place.unwrap_or_else(|| panic!("a datagram of {length} bytes is another"));
        awaited.swap_remove(place);
    }
}

/// A stream of some megabytes by TCP.
pub(crate) fn stream(from: &Namespace, to: &Namespace, address: IpAddr) {
    let listener = to.inside(|| traffic::Receiver::listen(PORT)).unwrap();
    let target = SocketAddr::new(address, PORT);
    thread::scope(|scope| {
        let received = scope.spawn(|| listener.receive().unwrap());
        let sent = from.inside(|| traffic::send(target, BLOCKS)).unwrap();
        assert_eq!(sent.bytes, BLOCKS * traffic::BLOCK as u64);
        assert_eq!(received.join().unwrap(), sent);
    });
}

fn payload(length: usize) -> Vec<u8> {
    (0..length)
        .map(|place| (place.wrapping_mul(2_654_435_761) >> 13) ^ length)
        .map(|mixed| mixed.to_le_bytes()[0])
        .collect()
}

const PATIENCE: Duration = Duration::from_secs(120);
const PORT: u16 = 5001;
const BLOCKS: u64 = 48;
/// Of the lengths, those that fit a frame.
const WHOLE: usize = 21;
/// 1452 is what one frame of IPv6 holds and 1472 one of IPv4; those from 1453 on are fragmented.
const SINGLE_LENGTHS: &[usize] = &[
    0, 1, 2, 3, 17, 18, 19, 31, 32, 33, 64, 100, 333, 512, 999, 1000, 1023, 1024, 1400, 1451, 1452,
    1453, 1471, 1472, 1473, 2000, 2961, 4000, 8000, 8191, 20_000, 5,
];
