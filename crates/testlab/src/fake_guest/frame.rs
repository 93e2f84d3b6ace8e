//! Frames that no honest guest sends: forged sources, floods of connection attempts.

use std::net::{IpAddr, SocketAddr};

use smoltcp::{
    phy::ChecksumCapabilities,
    wire::{
        EthernetAddress, EthernetFrame, EthernetProtocol, EthernetRepr, IpProtocol, IpRepr,
        TcpControl, TcpPacket, TcpRepr, TcpSeqNumber, UdpPacket, UdpRepr,
    },
};

/// A UDP packet in an Ethernet frame.
///
/// # Panics
/// If source and target are of different families.
#[must_use]
pub fn udp(
    source_mac: [u8; 6],
    target_mac: [u8; 6],
    source: SocketAddr,
    target: SocketAddr,
    payload: &[u8],
) -> Vec<u8> {
    let udp = UdpRepr {
        src_port: source.port(),
        dst_port: target.port(),
    };
    let length = udp.header_len() + payload.len();
    let (mut frame, ip) = ip_frame(
        source_mac,
        target_mac,
        (source.ip(), target.ip()),
        IpProtocol::Udp,
        length,
    );
    let start = frame.len() - length;
    udp.emit(
        &mut UdpPacket::new_unchecked(&mut frame[start..]),
        &ip.src_addr(),
        &ip.dst_addr(),
        payload.len(),
        |bytes| bytes.copy_from_slice(payload),
        &ChecksumCapabilities::default(),
    );
    frame
}

/// The first packet of a TCP connection in an Ethernet frame.
///
/// # Panics
/// If source and target are of different families.
#[must_use]
pub fn tcp_syn(
    source_mac: [u8; 6],
    target_mac: [u8; 6],
    source: SocketAddr,
    target: SocketAddr,
) -> Vec<u8> {
    let tcp = TcpRepr {
        src_port: source.port(),
        dst_port: target.port(),
        control: TcpControl::Syn,
        seq_number: TcpSeqNumber(1),
        ack_number: None,
        window_len: 64_000,
        window_scale: None,
        max_seg_size: Some(1400),
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let length = tcp.buffer_len();
    let (mut frame, ip) = ip_frame(
        source_mac,
        target_mac,
        (source.ip(), target.ip()),
        IpProtocol::Tcp,
        length,
    );
    let start = frame.len() - length;
    tcp.emit(
        &mut TcpPacket::new_unchecked(&mut frame[start..]),
        &ip.src_addr(),
        &ip.dst_addr(),
        &ChecksumCapabilities::default(),
    );
    frame
}

fn ip_frame(
    source_mac: [u8; 6],
    target_mac: [u8; 6],
    (source, target): (IpAddr, IpAddr),
    protocol: IpProtocol,
    payload_length: usize,
) -> (Vec<u8>, IpRepr) {
    let ip = IpRepr::new(source.into(), target.into(), protocol, payload_length, 64);
    let ethernet = EthernetRepr {
        src_addr: EthernetAddress(source_mac),
        dst_addr: EthernetAddress(target_mac),
        ethertype: match source {
            IpAddr::V4(_) => EthernetProtocol::Ipv4,
            IpAddr::V6(_) => EthernetProtocol::Ipv6,
        },
    };
    let head = ethernet.buffer_len();
    let mut frame = vec![0; head + ip.buffer_len()];
    ethernet.emit(&mut EthernetFrame::new_unchecked(&mut frame));
    ip.emit(&mut frame[head..], &ChecksumCapabilities::default());
    (frame, ip)
}
