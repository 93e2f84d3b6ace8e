//! Addresses and ports in frames, and the checksums over them.

use std::net::IpAddr;

use sandwire_engine::classify::{self, ICMP, ICMPV6, IpHeaders, TCP, UDP};

use super::{Translation, table::Endpoint};
use crate::checksum;

/// Which end of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Source,
    Destination,
}

/// A frame of TCP or UDP with its whole header.
pub(super) struct Frame<'a> {
    bytes: &'a mut [u8],
    ip: IpHeaders,
    ports: (u16, u16),
}

/// An ICMP error that quotes a packet of TCP or UDP.
pub(super) struct IcmpError<'a> {
    bytes: &'a mut [u8],
    ip: IpHeaders,
    /// Of the quoted packet; places count from the frame's start.
    quoted: IpHeaders,
    ports: (u16, u16),
    /// Which end of the quoted packet is the sandbox's: of an error that comes to it the source.
    end: End,
}

const FLAGS: usize = 13;
const SYN_AND_ACK: u8 = 0x12;
const SYN: u8 = 0x02;
const ICMP_BYTES: usize = 8;

impl<'a> Frame<'a> {
    pub(super) fn of(bytes: &'a mut [u8]) -> Option<Self> {
        let ip = classify::parse(bytes).ip?;
        let header_bytes = match ip.protocol {
            TCP => 20,
            UDP => 8,
            _ => return None,
        };
        let ports = ip.ports?;
        (ip.end >= ip.payload_offset + header_bytes).then_some(Self { bytes, ip, ports })
    }

    pub(super) fn endpoint(&self, end: End) -> Endpoint {
        endpoint(&self.ip, self.ports, end)
    }

    pub(super) fn is_tcp(&self) -> bool {
        self.ip.protocol == TCP
    }

    /// Whether it is the first packet of a TCP connection.
    pub(super) fn begins_connection(&self) -> bool {
        self.is_tcp() && self.bytes[self.ip.payload_offset + FLAGS] & SYN_AND_ACK == SYN
    }

    /// Makes this end another one.
    pub(super) fn set(&mut self, end: End, new: Endpoint) -> Translation {
        let old = self.endpoint(end);
        if old == new {
            return Translation::Untouched;
        }
        let checksum_at = self.ip.payload_offset + if self.is_tcp() { 16 } else { 6 };
        let mut checksum = read(self.bytes, checksum_at);
        let (old, new) = (old.words(), new.words());
        let is_left_out = self.ip.protocol == UDP && checksum == 0;
        checksum = checksum::updated(checksum, &old, &new);
        if self.ip.protocol == UDP && checksum == 0 {
            // RFC 768: zero says that there is none.
            checksum = 0xffff;
        }
        if !is_left_out {
            write(self.bytes, checksum_at, &checksum.to_be_bytes());
        }
        set_endpoint(self.bytes, &self.ip, end, &new);
        Translation::Rewritten
    }
}

impl<'a> IcmpError<'a> {
    /// Reads an error about a packet of which the sandbox is this end.
    pub(super) fn of(bytes: &'a mut [u8], end: End) -> Option<Self> {
        let ip = classify::parse(bytes).ip?;
        let (kind, _) = ip.icmp?;
        let ether_type = match ip.protocol {
            ICMP if matches!(kind, 3 | 4 | 11 | 12) => [0x08, 0x00],
            ICMPV6 if matches!(kind, 1..=4) => [0x86, 0xdd],
            _ => return None,
        };
        let start = ip.payload_offset + ICMP_BYTES;
        let quote = bytes.get(start..ip.end)?;
        // Read as if it were in a frame of its own.
        let alone = [&[0; 12], &ether_type[..], quote].concat();
        let mut quoted = classify::parse(&alone).ip?;
        let shift = start - quoted.offset;
        quoted.offset += shift;
        quoted.payload_offset += shift;
        quoted.end += shift;
        let ports = quoted.ports?;
        matches!(quoted.protocol, TCP | UDP).then_some(Self {
            bytes,
            ip,
            quoted,
            ports,
            end,
        })
    }

    /// The sandbox's end of the quoted packet.
    pub(super) fn quoted_endpoint(&self) -> Endpoint {
        endpoint(&self.quoted, self.ports, self.end)
    }

    /// Makes this the sandbox's end of the quoted packet and, where it was that of the error too, of the error.
    pub(super) fn set(&mut self, new: Endpoint) -> Translation {
        let old = self.quoted_endpoint();
        if old == new {
            return Translation::Untouched;
        }
        set_endpoint(self.bytes, &self.quoted, self.end, &new.words());
        let outer_end = match self.end {
            End::Source => End::Destination,
            End::Destination => End::Source,
        };
        if endpoint(&self.ip, (0, 0), outer_end).address == old.address {
            set_address(self.bytes, &self.ip, outer_end, &new.words());
        }
        // What was quoted may be cut anywhere, so the sum is made anew.
        let at = self.ip.payload_offset + 2;
        write(self.bytes, at, &[0, 0]);
        let message = &self.bytes[self.ip.payload_offset..self.ip.end];
        let pseudo = match self.ip.source {
            IpAddr::V4(_) => 0,
            IpAddr::V6(_) => {
                let length = u32::try_from(message.len()).unwrap_or(0).to_be_bytes();
                let addresses = &self.bytes[self.ip.offset + 8..self.ip.offset + 40];
                checksum::sum(checksum::sum(u32::from(ICMPV6), addresses), &length)
            }
        };
        let checksum = checksum::finish(checksum::sum(pseudo, message));
        write(self.bytes, at, &checksum.to_be_bytes());
        Translation::Rewritten
    }
}

impl Endpoint {
    /// Address and port, as the checksum of TCP and UDP counts them.
    fn words(&self) -> Vec<u8> {
        let mut words = match self.address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        words.extend(self.port.to_be_bytes());
        words
    }
}

fn endpoint(ip: &IpHeaders, ports: (u16, u16), end: End) -> Endpoint {
    let (address, port) = match end {
        End::Source => (ip.source, ports.0),
        End::Destination => (ip.destination, ports.1),
    };
    Endpoint {
        protocol: ip.protocol,
        address,
        port,
    }
}

fn set_endpoint(bytes: &mut [u8], ip: &IpHeaders, end: End, words: &[u8]) {
    set_address(bytes, ip, end, words);
    let port = &words[words.len() - 2..];
    let at = ip.payload_offset + if end == End::Source { 0 } else { 2 };
    write(bytes, at, port);
}

/// Also brings the checksum of IPv4's header up to date.
fn set_address(bytes: &mut [u8], ip: &IpHeaders, end: End, words: &[u8]) {
    let address = &words[..words.len() - 2];
    let first = if ip.source.is_ipv4() { 12 } else { 8 };
    let at = ip.offset + first + if end == End::Source { 0 } else { address.len() };
    if ip.source.is_ipv4() {
        let checksum = read(bytes, ip.offset + 10);
        let checksum = checksum::updated(checksum, &bytes[at..at + address.len()], address);
        write(bytes, ip.offset + 10, &checksum.to_be_bytes());
    }
    write(bytes, at, address);
}

fn read(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn write(bytes: &mut [u8], at: usize, new: &[u8]) {
    bytes[at..at + new.len()].copy_from_slice(new);
}
