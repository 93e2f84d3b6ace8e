//! Frames for tests, and what a receiver would check about them.

use std::net::{IpAddr, SocketAddr};

use sandwire_engine::classify::{self, ICMP, ICMPV6, TCP, UDP};

use crate::checksum;

pub(crate) const SYN: u8 = 0x02;
pub(crate) const ACK: u8 = 0x10;

pub(crate) fn socket(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

pub(crate) fn udp(source: &str, destination: &str, data: &[u8]) -> Vec<u8> {
    let (source, destination) = (socket(source), socket(destination));
    let length = u16::try_from(8 + data.len()).unwrap().to_be_bytes();
    let mut segment = ports(source, destination);
    segment.extend([length[0], length[1], 0, 0]);
    segment.extend(data);
    packet(source.ip(), destination.ip(), UDP, segment, 6)
}

pub(crate) fn tcp(source: &str, destination: &str, flags: u8) -> Vec<u8> {
    let (source, destination) = (socket(source), socket(destination));
    let mut segment = ports(source, destination);
    segment.extend([0, 0, 0, 1, 0, 0, 0, 2, 0x50, flags, 1, 0, 0, 0, 0, 0]);
    segment.extend(b"some data");
    packet(source.ip(), destination.ip(), TCP, segment, 16)
}

/// The same frame with a VLAN tag.
pub(crate) fn tagged(mut frame: Vec<u8>) -> Vec<u8> {
    frame.splice(12..12, [0x81, 0, 0, 7]);
    frame
}

/// Sets or clears "don't fragment".
pub(crate) fn with_df(mut frame: Vec<u8>, is_set: bool) -> Vec<u8> {
    frame[20] = if is_set { 0x40 } else { 0 };
    frame[24..26].fill(0);
    let sum = checksum::finish(checksum::sum(0, &frame[14..34]));
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// Fails unless the checksums of IPv4's header and of TCP, UDP or ICMP are right.
pub(crate) fn assert_checksums(frame: &[u8]) {
    let ip = classify::parse(frame).ip.unwrap();
    let data = &frame[ip.payload_offset..ip.end];
    if ip.source.is_ipv4() {
        let header = &frame[ip.offset..ip.payload_offset];
        assert_eq!(checksum::finish(checksum::sum(0, header)), 0);
    }
    let sum = if ip.protocol == ICMP {
        0
    } else {
        pseudo(ip.source, ip.destination, ip.protocol, data.len())
    };
    assert_eq!(checksum::finish(checksum::sum(sum, data)), 0);
}

/// An ICMP "port unreachable" about a frame, from its receiver.
pub(crate) fn unreachable(frame: &[u8]) -> Vec<u8> {
    let ip = classify::parse(frame).ip.unwrap();
    let (protocol, kind) = if ip.source.is_ipv4() {
        (ICMP, [3, 3])
    } else {
        (ICMPV6, [1, 4])
    };
    let mut message = [&kind[..], &[0; 6], &frame[ip.offset..ip.end]].concat();
    if protocol == ICMP {
        let sum = checksum::finish(checksum::sum(0, &message));
        message[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    packet(ip.destination, ip.source, protocol, message, 2)
}

fn ports(source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let ports = [
        source.port().to_be_bytes(),
        destination.port().to_be_bytes(),
    ];
    ports.concat()
}

fn pseudo(source: IpAddr, destination: IpAddr, protocol: u8, length: usize) -> u32 {
    let length = u32::try_from(length).unwrap();
    let sum = checksum::sum(u32::from(protocol), &octets(source));
    let sum = checksum::sum(sum, &octets(destination));
    checksum::sum(sum, &length.to_be_bytes())
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn packet(
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    mut segment: Vec<u8>,
    checksum_at: usize,
) -> Vec<u8> {
    if protocol != ICMP {
        let sum = pseudo(source, destination, protocol, segment.len());
        let sum = checksum::finish(checksum::sum(sum, &segment));
        segment[checksum_at..checksum_at + 2].copy_from_slice(&sum.to_be_bytes());
    }
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    if source.is_ipv4() {
        let total = u16::try_from(20 + segment.len()).unwrap().to_be_bytes();
        frame.extend([8, 0, 0x45, 0, total[0], total[1], 0x12, 0x34, 0x40, 0]);
        frame.extend([64, protocol, 0, 0]);
    } else {
        let length = u16::try_from(segment.len()).unwrap().to_be_bytes();
        frame.extend([
            0x86, 0xdd, 0x60, 0, 0, 0, length[0], length[1], protocol, 64,
        ]);
    }
    frame.extend(octets(source));
    frame.extend(octets(destination));
    if source.is_ipv4() {
        frame = with_df(frame, true);
    }
    frame.extend(segment);
    frame
}
