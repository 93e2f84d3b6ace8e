//! A frame in a few words, as far as its captured bytes tell.

use std::net::{Ipv4Addr, Ipv6Addr};

use sandwire_api::slot::MacAddress;

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
/// Extension headers of IPv6 that have the same form: hop-by-hop, routing, destination.
const PLAIN_EXTENSIONS: [u8; 3] = [0, 43, 60];
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const EXTENSIONS_MAX: usize = 8;
/// TCP flags from the lowest bit, as tcpdump writes them.
const TCP_FLAGS: [char; 8] = ['F', 'S', 'R', 'P', '.', 'U', 'E', 'W'];

/// A frame in a few words. Never fails: what can't be read is called cut short.
pub(super) fn summary(frame: &[u8]) -> String {
    let bytes = Bytes(frame);
    let text = match bytes.u16(12) {
        Some(0x0800) => ipv4(bytes.from(14)),
        Some(0x86dd) => ipv6(bytes.from(14)),
        Some(0x0806) => arp(bytes.from(14)),
        Some(0x8100 | 0x88a8) => Some("VLAN-tagged frame".to_owned()),
        Some(kind) => Some(format!("frame of type {kind:#06x}")),
        None => None,
    };
    text.unwrap_or_else(|| "frame that is cut short".to_owned())
}

/// Bytes that may end anywhere.
#[derive(Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn from(self, offset: usize) -> Self {
        Self(self.0.get(offset..).unwrap_or_default())
    }

    fn array<const N: usize>(self, offset: usize) -> Option<[u8; N]> {
        self.0.get(offset..)?.first_chunk().copied()
    }

    fn u8(self, offset: usize) -> Option<u8> {
        self.0.get(offset).copied()
    }

    fn u16(self, offset: usize) -> Option<u16> {
        self.array(offset).map(u16::from_be_bytes)
    }
}

fn arp(packet: Bytes<'_>) -> Option<String> {
    let sender = Ipv4Addr::from(packet.array::<4>(14)?);
    let target = Ipv4Addr::from(packet.array::<4>(24)?);
    Some(match packet.u16(6)? {
        1 => format!("ARP who has {target}, tell {sender}"),
        2 => format!("ARP {sender} is at {}", MacAddress(packet.array(8)?)),
        operation => format!("ARP operation {operation}"),
    })
}

fn ipv4(packet: Bytes<'_>) -> Option<String> {
    let source = Ipv4Addr::from(packet.array::<4>(12)?).to_string();
    let destination = Ipv4Addr::from(packet.array::<4>(16)?).to_string();
    let header = usize::from(packet.u8(0)? & 15) * 4;
    let fragment = packet.u16(6)?;
    let offset = (fragment & 0x1fff) * 8;
    let flow = Flow {
        source,
        destination,
        is_ipv6: false,
        protocol: packet.u8(9)?,
        length: usize::from(packet.u16(2)?).saturating_sub(header),
    };
    let more = fragment & 0x2000 != 0;
    Some(flow.text(packet.from(header), offset, more || offset > 0))
}

fn ipv6(packet: Bytes<'_>) -> Option<String> {
    let source = Ipv6Addr::from(packet.array::<16>(8)?);
    let destination = Ipv6Addr::from(packet.array::<16>(24)?);
    let mut length = usize::from(packet.u16(4)?);
    let mut protocol = packet.u8(6)?;
    let mut rest = packet.from(40);
    let mut fragment = None;
    for _ in 0..EXTENSIONS_MAX {
        let size = if PLAIN_EXTENSIONS.contains(&protocol) {
            rest.u8(1).map(|units| usize::from(units) * 8 + 8)
        } else if protocol == AUTHENTICATION {
            rest.u8(1).map(|units| usize::from(units) * 4 + 8)
        } else if protocol == FRAGMENT {
            fragment = rest.u16(2);
            Some(8)
        } else {
            break;
        };
        let (Some(size), Some(next)) = (size, rest.u8(0)) else {
            break;
        };
        length = length.saturating_sub(size);
        rest = rest.from(size);
        protocol = next;
    }
    let flow = Flow {
        source: source.to_string(),
        destination: destination.to_string(),
        is_ipv6: true,
        protocol,
        length,
    };
    let offset = fragment.map_or(0, |field| field & 0xfff8);
    Some(flow.text(rest, offset, fragment.is_some()))
}

/// What a packet of IP says of itself.
struct Flow {
    source: String,
    destination: String,
    is_ipv6: bool,
    protocol: u8,
    /// Bytes behind the headers of IP.
    length: usize,
}

impl Flow {
    fn text(&self, segment: Bytes<'_>, offset: u16, is_fragment: bool) -> String {
        let bare = || format!("{} > {}", self.source, self.destination);
        let mut text = if offset > 0 {
            format!("{} {}", bare(), self.protocol_text())
        } else {
            self.whole(segment)
                .unwrap_or_else(|| format!("{} {}, cut short", bare(), self.protocol_text()))
        };
        if is_fragment {
            text.push_str(&format!(", fragment at {offset}"));
        }
        text
    }

    fn whole(&self, segment: Bytes<'_>) -> Option<String> {
        match self.protocol {
            TCP => {
                let header = usize::from(segment.u8(12)? >> 4) * 4;
                let length = self.length.saturating_sub(header);
                let flags = tcp_flags(segment.u8(13)?);
                Some(format!(
                    "{} tcp [{flags}] {length} bytes",
                    self.ports(segment)?
                ))
            }
            UDP => {
                let length = self.length.saturating_sub(8);
                Some(format!("{} udp {length} bytes", self.ports(segment)?))
            }
            ICMP | ICMPV6 => Some(format!(
                "{} > {} {} {}",
                self.source,
                self.destination,
                self.protocol_text(),
                icmp(self.protocol, segment)?
            )),
            _ => Some(format!(
                "{} > {} {} {} bytes",
                self.source,
                self.destination,
                self.protocol_text(),
                self.length
            )),
        }
    }

    fn ports(&self, segment: Bytes<'_>) -> Option<String> {
        let (from, to) = (segment.u16(0)?, segment.u16(2)?);
        Some(if self.is_ipv6 {
            format!("[{}]:{from} > [{}]:{to}", self.source, self.destination)
        } else {
            format!("{}:{from} > {}:{to}", self.source, self.destination)
        })
    }

    fn protocol_text(&self) -> String {
        match self.protocol {
            TCP => "tcp".to_owned(),
            UDP => "udp".to_owned(),
            ICMP => "icmp".to_owned(),
            ICMPV6 => "icmpv6".to_owned(),
            number => format!("protocol {number}"),
        }
    }
}

fn tcp_flags(bits: u8) -> String {
    (0..8)
        .filter(|bit| bits & (1 << bit) != 0)
        .map(|bit| TCP_FLAGS[bit])
        .collect()
}

fn icmp(protocol: u8, segment: Bytes<'_>) -> Option<String> {
    let (kind, code) = (segment.u8(0)?, segment.u8(1)?);
    let echo = |word: &str| {
        Some(format!(
            "{word} id {} seq {}",
            segment.u16(4)?,
            segment.u16(6)?
        ))
    };
    let target = || Some(Ipv6Addr::from(segment.array::<16>(8)?));
    match (protocol, kind) {
        (ICMP, 8) | (ICMPV6, 128) => echo("echo request"),
        (ICMP, 0) | (ICMPV6, 129) => echo("echo reply"),
        (ICMP, 3) if code == 4 => Some(format!("too big, MTU {}", segment.u16(6)?)),
        (ICMPV6, 2) => Some(format!(
            "too big, MTU {}",
            u32::from_be_bytes(segment.array(4)?)
        )),
        (ICMP, 3) | (ICMPV6, 1) => Some(format!("unreachable, code {code}")),
        (ICMP, 11) | (ICMPV6, 3) => Some("time exceeded".to_owned()),
        (ICMPV6, 133) => Some("router solicitation".to_owned()),
        (ICMPV6, 134) => Some("router advertisement".to_owned()),
        (ICMPV6, 135) => Some(format!("neighbour solicitation for {}", target()?)),
        (ICMPV6, 136) => Some(format!("neighbour advertisement of {}", target()?)),
        _ => Some(format!("type {kind} code {code}")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(ethertype: u16, packet: &[u8]) -> Vec<u8> {
        let mut frame = vec![2; 12];
        frame.extend(ethertype.to_be_bytes());
        frame.extend(packet);
        frame
    }

    fn ipv4_frame(protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
        let length = u16::try_from(20 + payload.len()).unwrap();
        let mut packet = vec![0x45, 0];
        packet.extend(length.to_be_bytes());
        packet.extend([0, 1]);
        packet.extend(fragment.to_be_bytes());
        packet.extend([64, protocol, 0, 0, 192, 168, 241, 2, 1, 1, 1, 1]);
        packet.extend(payload);
        frame(0x0800, &packet)
    }

    fn ipv6_frame(next: u8, payload: &[u8]) -> Vec<u8> {
        let length = u16::try_from(payload.len()).unwrap();
        let mut packet = vec![0x60, 0, 0, 0];
        packet.extend(length.to_be_bytes());
        packet.extend([next, 64]);
        packet.extend("fd00:5eed::2".parse::<Ipv6Addr>().unwrap().octets());
        packet.extend("2001:db8::1".parse::<Ipv6Addr>().unwrap().octets());
        packet.extend(payload);
        frame(0x86dd, &packet)
    }

    #[test]
    fn packets_are_told_by_addresses_ports_and_flags() {
        let mut tcp = vec![
            0x10, 0xd8, 0x01, 0xbb, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x12, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(
            summary(&ipv4_frame(TCP, 0, &tcp)),
            "192.168.241.2:4312 > 1.1.1.1:443 tcp [S.] 0 bytes"
        );
        tcp.extend([0; 10]);
        assert_eq!(
            summary(&ipv6_frame(TCP, &tcp)),
            "[fd00:5eed::2]:4312 > [2001:db8::1]:443 tcp [S.] 10 bytes"
        );
        let udp = [0, 68, 0, 67, 0, 10, 0, 0, 1, 2];
        assert_eq!(
            summary(&ipv4_frame(UDP, 0, &udp)),
            "192.168.241.2:68 > 1.1.1.1:67 udp 2 bytes"
        );
        let echo = [8, 0, 0, 0, 0, 7, 0, 3];
        assert_eq!(
            summary(&ipv4_frame(ICMP, 0, &echo)),
            "192.168.241.2 > 1.1.1.1 icmp echo request id 7 seq 3"
        );
        assert_eq!(
            summary(&ipv4_frame(47, 0, &[0; 4])),
            "192.168.241.2 > 1.1.1.1 protocol 47 4 bytes"
        );
    }

    #[test]
    fn fragments_extension_headers_and_neighbours_are_told() {
        assert_eq!(
            summary(&ipv4_frame(UDP, 185, &[0; 8])),
            "192.168.241.2 > 1.1.1.1 udp, fragment at 1480"
        );
        let first = [0, 68, 0, 67, 5, 220, 0, 0];
        assert!(summary(&ipv4_frame(UDP, 0x2000, &first)).ends_with("udp 0 bytes, fragment at 0"));
        let options_then_fragment = [
            &[44, 0, 0, 0, 0, 0, 0, 0, 17, 0, 0, 9, 0, 0, 0, 1][..],
            &[0; 8],
        ]
        .concat();
        assert_eq!(
            summary(&ipv6_frame(0, &options_then_fragment)),
            "fd00:5eed::2 > 2001:db8::1 udp, fragment at 8"
        );
        let mut solicitation = vec![135, 0, 0, 0, 0, 0, 0, 0];
        solicitation.extend("fd00:5eed::1".parse::<Ipv6Addr>().unwrap().octets());
        assert!(
            summary(&ipv6_frame(ICMPV6, &solicitation))
                .ends_with("neighbour solicitation for fd00:5eed::1")
        );
        let mut arp = vec![
            0, 1, 8, 0, 6, 4, 0, 1, 6, 0, 0xc0, 0xa8, 0xf1, 2, 192, 168, 241, 2,
        ];
        arp.extend([0, 0, 0, 0, 0, 0, 192, 168, 241, 1]);
        assert_eq!(
            summary(&frame(0x0806, &arp)),
            "ARP who has 192.168.241.1, tell 192.168.241.2"
        );
    }

    #[test]
    fn what_is_cut_short_is_told_so() {
        let whole = ipv4_frame(TCP, 0, &[0; 20]);
        for length in 0..whole.len() - 6 {
            let text = summary(&whole[..length]);
            assert!(text.ends_with("cut short"), "{length}: {text}");
        }
        assert_eq!(summary(&frame(0x88cc, &[])), "frame of type 0x88cc");
    }

    proptest! {
        #[test]
        fn no_frame_makes_it_panic(
            ethertype in prop::sample::select(vec![0x0800u16, 0x86dd, 0x0806, 0x8100, 0]),
            packet in prop::collection::vec(any::<u8>(), 0..192),
        ) {
            prop_assert!(!summary(&frame(ethertype, &packet)).is_empty());
        }
    }
}
