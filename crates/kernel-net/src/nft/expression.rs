//! The machine language of nf_tables: expressions on registers.
//!
//! A rule is a list of these; each loads, compares or acts, and a comparison that fails ends the rule.
//! Values start in register 1; keys of several fields fill 32-bit registers from there on. The numbers
//! are those of `linux/netfilter/nf_tables.h`.

use crate::{netlink::attribute::Writer, number::octet};

pub(super) const NFTA_EXPR_NAME: u16 = 1;
pub(super) const NFTA_EXPR_DATA: u16 = 2;
pub(super) const NFTA_LIST_ELEM: u16 = 1;
pub(super) const NFTA_DATA_VALUE: u16 = 1;
const NFTA_DATA_VERDICT: u16 = 2;
pub(super) const NFTA_CMP_DATA: u16 = 3;
pub(super) const NFTA_SOCKET_KEY: u16 = 1;
pub(super) const NFTA_SOCKET_LEVEL: u16 = 3;
const NFT_REG_VERDICT: u32 = 0;
/// A key that is there lives on.
const NFT_DYNSET_OP_UPDATE: u32 = 1;
/// The first 32-bit register; it and its three followers share their bytes with register 1.
pub(super) const REGISTER: u32 = 8;
pub(super) const NFT_META_MARK: u32 = 3;
pub(super) const NFT_META_IIFNAME: u32 = 6;
pub(super) const NFT_META_OIFNAME: u32 = 7;
pub(super) const NFT_META_SKUID: u32 = 10;
pub(super) const NFT_META_NFPROTO: u32 = 15;
pub(super) const NFT_META_L4PROTO: u32 = 16;
const NFT_SOCKET_MARK: u32 = 1;
pub(super) const NFT_SOCKET_CGROUPV2: u32 = 3;
pub(super) const NFT_CT_STATE: u32 = 0;
pub(super) const NFT_CT_STATUS: u32 = 2;
pub(super) const NFT_PAYLOAD_NETWORK_HEADER: u32 = 1;
pub(super) const NFT_PAYLOAD_TRANSPORT_HEADER: u32 = 2;

/// ICMP type of an echo request.
pub const ICMP_ECHO_REQUEST: u8 = 8;
/// ICMPv6 type of an echo request.
pub const ICMPV6_ECHO_REQUEST: u8 = 128;
/// Bit of a connection's status: its destination was rewritten.
pub const CT_STATUS_DNAT: u32 = 1 << 5;
/// Bit of a connection's status: its first packet has passed all rules, and it is in the kernel's table.
pub const CT_STATUS_CONFIRMED: u32 = 1 << 3;

/// An IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
}

impl Family {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Ipv4, Self::Ipv6];

    pub(super) fn number(self) -> u8 {
        match self {
            Self::Ipv4 => octet(libc::NFPROTO_IPV4),
            Self::Ipv6 => octet(libc::NFPROTO_IPV6),
        }
    }
}

/// A protocol above IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// ICMP of IPv4.
    Icmp,
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP of IPv6.
    Icmpv6,
}

impl Protocol {
    /// Its number in the IP header.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Icmp => octet(libc::IPPROTO_ICMP),
            Self::Tcp => octet(libc::IPPROTO_TCP),
            Self::Udp => octet(libc::IPPROTO_UDP),
            Self::Icmpv6 => octet(libc::IPPROTO_ICMPV6),
        }
    }
}

/// How connection tracking sees a packet; values can be combined with `|`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CtState(pub u32);

impl CtState {
    /// It fits no connection.
    pub const INVALID: Self = Self(1);
    /// It belongs to a connection that was answered.
    pub const ESTABLISHED: Self = Self(2);
    /// It starts a connection that another one announced, or is an error about one.
    pub const RELATED: Self = Self(4);
    /// It starts a connection.
    pub const NEW: Self = Self(8);
}

impl std::ops::BitOr for CtState {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Which of a packet's two addresses or interfaces is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Where it comes from.
    Source,
    /// Where it goes.
    Destination,
}

/// How a rule or a jump ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Accept,
    Drop,
    Return,
    Jump(String),
}

/// What is asked of the routing table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FibResult {
    /// Interface by which the packet's source is reached, if that is the one it came in by.
    ReversePath,
    /// Kind of the destination address.
    DestinationType,
}

/// One instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Expression {
    Meta {
        key: u32,
        register: u32,
    },
    Payload {
        base: u32,
        offset: u32,
        length: u32,
        register: u32,
    },
    Ct {
        key: u32,
    },
    Mask {
        mask: Vec<u8>,
    },
    Compare {
        equal: bool,
        value: Vec<u8>,
    },
    Lookup {
        set: String,
        inverted: bool,
    },
    LookupMap {
        map: String,
    },
    /// Goes where a map leads to.
    LookupVerdict {
        map: String,
    },
    /// Enters the key into a set unless it is there, and asks the bound that the key has there, if any.
    Enter {
        set: String,
        bound: Option<Box<Expression>>,
    },
    /// Keeps the bits of a mask, then flips others.
    MaskAndFlip {
        mask: u32,
        flip: u32,
    },
    SetMark,
    /// Gives packets to a socket of this host; address and port are in the registers.
    Tproxy {
        family: Family,
        port_register: u32,
    },
    /// Mark of the socket that the packet is for, which has to be there.
    SocketMark,
    /// Number of the cgroup at this depth that the packet's socket belongs to.
    SocketCgroup {
        depth: u32,
    },
    Fib(FibResult),
    Immediate {
        value: Vec<u8>,
        register: u32,
    },
    Nat {
        source: bool,
        family: Family,
        port_register: Option<u32>,
    },
    Masquerade,
    Notrack,
    ConnectionsOver(u32),
    ConnectionsWithin(u32),
    AtMost {
        packets: u64,
        seconds: u64,
        at_once: u32,
    },
    Counter,
    Verdict(Verdict),
}

impl Expression {
    pub(super) fn write(&self, list: &mut Writer<'_>) {
        list.nest(NFTA_LIST_ELEM, |element| self.write_inside(element));
    }

    fn write_inside(&self, element: &mut Writer<'_>) {
        element.put_text(NFTA_EXPR_NAME, self.name());
        element.nest(NFTA_EXPR_DATA, |data| self.write_data(data));
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Meta { .. } => "meta",
            Self::Payload { .. } => "payload",
            Self::Ct { .. } => "ct",
            Self::Mask { .. } | Self::MaskAndFlip { .. } => "bitwise",
            Self::SetMark => "meta",
            Self::Tproxy { .. } => "tproxy",
            Self::SocketMark | Self::SocketCgroup { .. } => "socket",
            Self::Compare { .. } => "cmp",
            Self::Lookup { .. } | Self::LookupMap { .. } | Self::LookupVerdict { .. } => "lookup",
            Self::Enter { .. } => "dynset",
            Self::Fib(_) => "fib",
            Self::Immediate { .. } | Self::Verdict(_) => "immediate",
            Self::Nat { .. } => "nat",
            Self::Masquerade => "masq",
            Self::Notrack => "notrack",
            Self::ConnectionsOver(_) | Self::ConnectionsWithin(_) => "connlimit",
            Self::AtMost { .. } => "limit",
            Self::Counter => "counter",
        }
    }

    fn write_data(&self, data: &mut Writer<'_>) {
        match self {
            Self::Meta { key, register } => put_numbers(data, &[(2, *key), (1, *register)]),
            Self::Payload {
                base,
                offset,
                length,
                register,
            } => put_numbers(
                data,
                &[(1, *register), (2, *base), (3, *offset), (4, *length)],
            ),
            Self::Ct { key } => put_numbers(data, &[(1, REGISTER), (2, *key)]),
            Self::Mask { mask } => {
                let length = u32::try_from(mask.len()).expect("registers have 16 bytes");
                put_numbers(data, &[(1, REGISTER), (2, REGISTER), (3, length)]);
                data.nest(4, |value| value.put(NFTA_DATA_VALUE, mask));
                data.nest(5, |value| value.put(NFTA_DATA_VALUE, &vec![0; mask.len()]));
            }
            Self::Compare { equal, value } => {
                put_numbers(data, &[(1, REGISTER), (2, u32::from(!equal))]);
                data.nest(NFTA_CMP_DATA, |nested| nested.put(NFTA_DATA_VALUE, value));
            }
            Self::Lookup { .. }
            | Self::LookupMap { .. }
            | Self::LookupVerdict { .. }
            | Self::Enter { .. } => self.write_key_use(data),
            Self::Fib(FibResult::ReversePath) => {
                // Source address, restricted to the incoming interface; the answer is an index.
                put_numbers(data, &[(1, REGISTER), (2, 1), (3, 1 | 8)]);
            }
            Self::Fib(FibResult::DestinationType) => {
                put_numbers(data, &[(1, REGISTER), (2, 3), (3, 2)]);
            }
            Self::Immediate { value, register } => {
                put_numbers(data, &[(1, *register)]);
                data.nest(2, |nested| nested.put(NFTA_DATA_VALUE, value));
            }
            Self::Nat {
                source,
                family,
                port_register,
            } => {
                let kind = u32::from(!source);
                put_numbers(data, &[(1, kind), (2, u32::from(family.number()))]);
                put_numbers(data, &[(3, REGISTER)]);
                if let Some(register) = port_register {
                    put_numbers(data, &[(5, *register)]);
                }
            }
            Self::Masquerade | Self::Notrack | Self::Counter => {}
            Self::MaskAndFlip { .. }
            | Self::SetMark
            | Self::Tproxy { .. }
            | Self::SocketMark
            | Self::SocketCgroup { .. } => self.write_steering(data),
            Self::ConnectionsOver(_) | Self::ConnectionsWithin(_) | Self::AtMost { .. } => {
                self.write_limit(data);
            }
            Self::Verdict(verdict) => {
                put_numbers(data, &[(1, NFT_REG_VERDICT)]);
                data.nest(2, |nested| {
                    nested.nest(NFTA_DATA_VERDICT, |inner| verdict.write(inner));
                });
            }
        }
    }

    /// What asks a set or map for the key in the registers.
    fn write_key_use(&self, data: &mut Writer<'_>) {
        match self {
            Self::Lookup { set, inverted } => {
                data.put_text(1, set);
                put_numbers(data, &[(2, REGISTER), (5, u32::from(*inverted))]);
            }
            Self::LookupMap { map } => {
                data.put_text(1, map);
                put_numbers(data, &[(2, REGISTER), (3, REGISTER)]);
            }
            Self::LookupVerdict { map } => {
                data.put_text(1, map);
                put_numbers(data, &[(2, REGISTER), (3, NFT_REG_VERDICT)]);
            }
            Self::Enter { set, bound } => {
                data.put_text(1, set);
                put_numbers(data, &[(3, NFT_DYNSET_OP_UPDATE), (4, REGISTER)]);
                if let Some(bound) = bound {
                    data.nest(7, |nested| bound.write_inside(nested));
                }
            }
            _ => {}
        }
    }

    fn write_limit(&self, data: &mut Writer<'_>) {
        match self {
            Self::ConnectionsOver(count) => put_numbers(data, &[(1, *count), (2, 1)]),
            Self::ConnectionsWithin(count) => put_numbers(data, &[(1, *count)]),
            Self::AtMost {
                packets,
                seconds,
                at_once,
            } => {
                data.put_u64_be(1, *packets);
                data.put_u64_be(2, *seconds);
                // Of packets, not of bytes.
                put_numbers(data, &[(3, *at_once), (4, 0)]);
            }
            _ => {}
        }
    }

    /// What steers packets to sockets of this host.
    fn write_steering(&self, data: &mut Writer<'_>) {
        match self {
            Self::MaskAndFlip { mask, flip } => {
                put_numbers(data, &[(1, REGISTER), (2, REGISTER), (3, 4)]);
                data.nest(4, |value| value.put(NFTA_DATA_VALUE, &mask.to_ne_bytes()));
                data.nest(5, |value| value.put(NFTA_DATA_VALUE, &flip.to_ne_bytes()));
            }
            Self::SetMark => put_numbers(data, &[(2, NFT_META_MARK), (3, REGISTER)]),
            Self::Tproxy {
                family,
                port_register,
            } => put_numbers(
                data,
                &[
                    (1, u32::from(family.number())),
                    (2, REGISTER),
                    (3, *port_register),
                ],
            ),
            Self::SocketMark => put_numbers(data, &[(1, NFT_SOCKET_MARK), (2, REGISTER)]),
            Self::SocketCgroup { depth } => {
                put_numbers(
                    data,
                    &[
                        (NFTA_SOCKET_KEY, NFT_SOCKET_CGROUPV2),
                        (2, REGISTER),
                        (NFTA_SOCKET_LEVEL, *depth),
                    ],
                );
            }
            _ => {}
        }
    }
}

impl Verdict {
    pub(super) fn write(&self, attributes: &mut Writer<'_>) {
        let code = match self {
            Self::Accept => libc::NF_ACCEPT,
            Self::Drop => libc::NF_DROP,
            Self::Return => libc::NFT_RETURN,
            Self::Jump(_) => libc::NFT_JUMP,
        };
        attributes.put_u32_be(1, code.cast_unsigned());
        if let Self::Jump(chain) = self {
            attributes.put_text(2, chain);
        }
    }
}

fn put_numbers(data: &mut Writer<'_>, numbers: &[(u16, u32)]) {
    for (kind, number) in numbers {
        data.put_u32_be(*kind, *number);
    }
}
