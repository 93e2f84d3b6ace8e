//! Frames that are right in every byte, to be sent as they are or damaged afterwards.

use std::net::IpAddr;

use crate::model::{Mac, checksum};

/// An IP packet before it becomes bytes.
#[derive(Clone, Debug)]
pub(crate) struct Ip {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) ttl: u8,
    /// IPv4 options, whole words.
    pub(crate) options: Vec<u8>,
    /// IPv6 extension headers, each with its number; their first byte is filled in.
    pub(crate) extensions: Vec<(u8, Vec<u8>)>,
    pub(crate) identification: u16,
    /// Part of the transport bytes that this packet carries, in units of eight bytes, and whether
    /// more follows.
    pub(crate) fragment: Option<(u16, bool)>,
    pub(crate) transport: Transport,
}

/// What an IP packet carries.
#[derive(Clone, Debug)]
pub(crate) enum Transport {
    Tcp {
        ports: (u16, u16),
        flags: u8,
        data: Vec<u8>,
    },
    Udp {
        ports: (u16, u16),
        data: Vec<u8>,
        summed: bool,
    },
    Echo {
        request: bool,
        identifier: u16,
        data: Vec<u8>,
    },
    /// ICMP or ICMPv6 with any type; `rest` is the second word.
    Icmp {
        kind: u8,
        code: u8,
        rest: [u8; 4],
        data: Vec<u8>,
    },
    /// A protocol that sums over the pseudo-header at an offset, given with a zero there.
    Summed {
        protocol: u8,
        at: usize,
        bytes: Vec<u8>,
    },
    Raw {
        protocol: u8,
        bytes: Vec<u8>,
    },
}

impl Ip {
    pub(crate) fn new(source: IpAddr, destination: IpAddr, transport: Transport) -> Self {
        Self {
            source,
            destination,
            ttl: 64,
            options: Vec::new(),
            extensions: Vec::new(),
            identification: 0x1234,
            fragment: None,
            transport,
        }
    }

    pub(crate) fn is_ipv4(&self) -> bool {
        self.source.is_ipv4()
    }

    /// The IP packet.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let (protocol, mut transport) = self.transport_bytes();
        if let Some((offset, more)) = self.fragment {
            let start = (usize::from(offset) * 8).min(transport.len());
            // A fragment that more follow is a multiple of eight bytes long.
            let rest = transport.len() - start;
            let taken = if more { rest / 8 * 8 } else { rest };
            transport = transport[start..start + taken].to_vec();
        }
        if self.is_ipv4() {
            self.ipv4(protocol, &transport)
        } else {
            self.ipv6(protocol, &transport)
        }
    }

    fn ipv4(&self, protocol: u8, transport: &[u8]) -> Vec<u8> {
        let header = 20 + self.options.len();
        let mut bytes = vec![0x40 | (header / 4) as u8, 0];
        bytes.extend(((header + transport.len()) as u16).to_be_bytes());
        bytes.extend(self.identification.to_be_bytes());
        let (offset, more) = self.fragment.unwrap_or((0, false));
        bytes.extend((offset | if more { 0x2000 } else { 0 }).to_be_bytes());
        bytes.extend([self.ttl, protocol, 0, 0]);
        bytes.extend(octets(self.source));
        bytes.extend(octets(self.destination));
        bytes.extend(&self.options);
        let sum = checksum::of(&bytes);
        bytes[10..12].copy_from_slice(&sum.to_be_bytes());
        bytes.extend(transport);
        bytes
    }

    fn ipv6(&self, protocol: u8, transport: &[u8]) -> Vec<u8> {
        let mut extensions = self.extensions.clone();
        if let Some((offset, more)) = self.fragment {
            let mut header = vec![0, 0];
            header.extend((offset << 3 | u16::from(more)).to_be_bytes());
            header.extend([0xab, 0xcd]);
            header.extend(self.identification.to_be_bytes());
            extensions.push((44, header));
        }
        let mut numbers: Vec<u8> = extensions.iter().map(|(number, _)| *number).collect();
        numbers.push(protocol);
        let mut payload: Vec<u8> = Vec::new();
        for ((_, header), next) in extensions.iter_mut().zip(&numbers[1..]) {
            header[0] = *next;
            payload.extend(&*header);
        }
        payload.extend(transport);
        let mut bytes = vec![0x60, 0, 0, 0];
        bytes.extend((payload.len() as u16).to_be_bytes());
        bytes.extend([numbers[0], self.ttl]);
        bytes.extend(octets(self.source));
        bytes.extend(octets(self.destination));
        bytes.extend(payload);
        bytes
    }

    /// Protocol, and transport header with payload and a right checksum.
    pub(crate) fn transport_bytes(&self) -> (u8, Vec<u8>) {
        let icmp = if self.is_ipv4() { 1 } else { 58 };
        let (protocol, at, mut bytes) = match &self.transport {
            Transport::Tcp { ports, flags, data } => {
                let mut bytes = [ports.0.to_be_bytes(), ports.1.to_be_bytes()].concat();
                bytes.extend([0, 0, 1, 2, 0, 0, 3, 4, 0x50, *flags, 0x20, 0, 0, 0, 0, 0]);
                bytes.extend(data);
                (6, Some(16), bytes)
            }
            Transport::Udp {
                ports,
                data,
                summed,
            } => {
                let mut bytes = [ports.0.to_be_bytes(), ports.1.to_be_bytes()].concat();
                bytes.extend(((data.len() + 8) as u16).to_be_bytes());
                bytes.extend([0, 0]);
                bytes.extend(data);
                (17, summed.then_some(6), bytes)
            }
            Transport::Echo {
                request,
                identifier,
                data,
            } => {
                let kind = match (self.is_ipv4(), request) {
                    (true, true) => 8,
                    (true, false) => 0,
                    (false, true) => 128,
                    (false, false) => 129,
                };
                let mut bytes = vec![kind, 0, 0, 0];
                bytes.extend(identifier.to_be_bytes());
                bytes.extend([0, 1]);
                bytes.extend(data);
                (icmp, Some(2), bytes)
            }
            Transport::Icmp {
                kind,
                code,
                rest,
                data,
            } => {
                let bytes = [&[*kind, *code, 0, 0], &rest[..], data].concat();
                (icmp, Some(2), bytes)
            }
            Transport::Summed {
                protocol,
                at,
                bytes,
            } => (*protocol, Some(*at), bytes.clone()),
            Transport::Raw { protocol, bytes } => (*protocol, None, bytes.clone()),
        };
        if let Some(at) = at {
            let mut covered = Vec::new();
            if protocol != 1 {
                covered =
                    checksum::pseudo_header(self.source, self.destination, protocol, bytes.len());
            }
            covered.extend(&bytes);
            let sum = match checksum::of(&covered) {
                0 if protocol == 17 => 0xffff,
                sum => sum,
            };
            bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        }
        (protocol, bytes)
    }

    /// The packet in an Ethernet frame.
    pub(crate) fn frame(&self, to: Mac, from: Mac) -> Vec<u8> {
        let kind = if self.is_ipv4() { 0x0800 } else { 0x86dd };
        ethernet(to, from, kind, &self.bytes())
    }
}

pub(crate) fn ethernet(to: Mac, from: Mac, kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = [to, from].concat();
    frame.extend(kind.to_be_bytes());
    frame.extend(payload);
    frame
}

pub(crate) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}
