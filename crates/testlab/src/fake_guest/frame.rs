//! Frames that no honest guest sends: forged sources, floods of connection attempts, a router's word.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use smoltcp::{
    phy::ChecksumCapabilities,
    wire::{
        ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, EthernetProtocol,
        EthernetRepr, Icmpv6Packet, Icmpv6Repr, IpProtocol, IpRepr, NdiscPrefixInfoFlags,
        NdiscPrefixInformation, NdiscRepr, NdiscRouterFlags, TcpControl, TcpPacket, TcpRepr,
        TcpSeqNumber, UdpPacket, UdpRepr,
    },
};

const HOPS: u8 = 64;
/// Neighbour discovery never passes a router (RFC 4861, section 6.1.2).
const NDP_HOPS: u8 = 255;

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
        (IpProtocol::Udp, HOPS),
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
        (IpProtocol::Tcp, HOPS),
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

/// A question by ARP to all nodes, who has an address.
#[must_use]
pub fn arp_request(source_mac: [u8; 6], source: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let request = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Request,
        source_hardware_addr: EthernetAddress(source_mac),
        source_protocol_addr: source,
        target_hardware_addr: EthernetAddress([0; 6]),
        target_protocol_addr: target,
    };
    arp(source_mac, EthernetAddress::BROADCAST, request)
}

/// An answer by ARP, that the sender has an address. Of whom it is for, both addresses.
#[must_use]
pub fn arp_reply(source_mac: [u8; 6], source: Ipv4Addr, target: ([u8; 6], Ipv4Addr)) -> Vec<u8> {
    let target_mac = EthernetAddress(target.0);
    let reply = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Reply,
        source_hardware_addr: EthernetAddress(source_mac),
        source_protocol_addr: source,
        target_hardware_addr: target_mac,
        target_protocol_addr: target.1,
    };
    arp(source_mac, target_mac, reply)
}

fn arp(source_mac: [u8; 6], target_mac: EthernetAddress, message: ArpRepr) -> Vec<u8> {
    let ethernet = EthernetRepr {
        src_addr: EthernetAddress(source_mac),
        dst_addr: target_mac,
        ethertype: EthernetProtocol::Arp,
    };
    let head = ethernet.buffer_len();
    let mut frame = vec![0; head + message.buffer_len()];
    ethernet.emit(&mut EthernetFrame::new_unchecked(&mut frame));
    message.emit(&mut ArpPacket::new_unchecked(&mut frame[head..]));
    frame
}

/// The same by neighbour discovery.
#[must_use]
pub fn neighbour_solicitation(source_mac: [u8; 6], source: Ipv6Addr, asked: Ipv6Addr) -> Vec<u8> {
    let [.., a, b, c] = asked.octets();
    let target = Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c]);
    let solicitation = NdiscRepr::NeighborSolicit {
        target_addr: asked,
        lladdr: Some(EthernetAddress(source_mac).into()),
    };
    ndisc(
        source_mac,
        [0x33, 0x33, 0xff, a, b, c],
        (source, target),
        solicitation,
    )
}

/// A router advertisement to all nodes, with a default route and a prefix of 64 bits to make addresses of.
#[must_use]
pub fn router_advertisement(source_mac: [u8; 6], source: Ipv6Addr, prefix: Ipv6Addr) -> Vec<u8> {
    let an_hour = smoltcp::time::Duration::from_secs(3600);
    let advertisement = NdiscRepr::RouterAdvert {
        hop_limit: HOPS,
        flags: NdiscRouterFlags::empty(),
        router_lifetime: an_hour,
        reachable_time: smoltcp::time::Duration::ZERO,
        retrans_time: smoltcp::time::Duration::ZERO,
        lladdr: Some(EthernetAddress(source_mac).into()),
        mtu: None,
        prefix_info: Some(NdiscPrefixInformation {
            prefix_len: 64,
            flags: NdiscPrefixInfoFlags::ON_LINK | NdiscPrefixInfoFlags::ADDRCONF,
            valid_lifetime: an_hour,
            preferred_lifetime: an_hour,
            prefix,
        }),
    };
    let target = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    ndisc(
        source_mac,
        [0x33, 0x33, 0, 0, 0, 1],
        (source, target),
        advertisement,
    )
}

/// A message of neighbour discovery in an Ethernet frame.
fn ndisc(
    source_mac: [u8; 6],
    target_mac: [u8; 6],
    (source, target): (Ipv6Addr, Ipv6Addr),
    message: NdiscRepr<'_>,
) -> Vec<u8> {
    let message = Icmpv6Repr::Ndisc(message);
    let length = message.buffer_len();
    let (mut frame, _) = ip_frame(
        source_mac,
        target_mac,
        (source.into(), target.into()),
        (IpProtocol::Icmpv6, NDP_HOPS),
        length,
    );
    let start = frame.len() - length;
    message.emit(
        &source,
        &target,
        &mut Icmpv6Packet::new_unchecked(&mut frame[start..]),
        &ChecksumCapabilities::default(),
    );
    frame
}

fn ip_frame(
    source_mac: [u8; 6],
    target_mac: [u8; 6],
    (source, target): (IpAddr, IpAddr),
    (protocol, hops): (IpProtocol, u8),
    payload_length: usize,
) -> (Vec<u8>, IpRepr) {
    let ip = IpRepr::new(source.into(), target.into(), protocol, payload_length, hops);
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
