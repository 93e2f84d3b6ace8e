//! Rules, written as one would write them for `nft`.

use std::{
    borrow::Cow,
    net::{IpAddr, SocketAddr},
};

use super::expression::{
    CtState, Direction, Expression, Family, FibResult, NFT_CT_STATE, NFT_CT_STATUS,
    NFT_META_IIFNAME, NFT_META_L4PROTO, NFT_META_MARK, NFT_META_NFPROTO, NFT_META_OIFNAME,
    NFT_META_SKUID, NFT_PAYLOAD_NETWORK_HEADER, NFT_PAYLOAD_TRANSPORT_HEADER, Protocol, REGISTER,
    Verdict,
};
use crate::netlink::attribute::Writer;

const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
pub(super) const NFTA_RULE_USERDATA: u16 = 7;
/// Kind of user data that `nft` shows as a rule's comment.
pub(super) const NFTNL_UDATA_RULE_COMMENT: u8 = 0;
const NAME_LENGTH: usize = libc::IFNAMSIZ;
const RTN_LOCAL: u32 = 2;
/// Behind it an ICMP error has what it is about, in both versions of IP.
const ICMP_HEADER_BYTES: u32 = 8;
/// Where TCP's flags stand (RFC 9293 section 3.1).
const TCP_FLAGS_OFFSET: u32 = 13;

/// One part of the key that a rule looks up in a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyPart {
    /// An address of the packet.
    Address(Family, Direction),
    /// The protocol above IP.
    Protocol,
    /// The source port.
    SourcePort,
    /// The destination port.
    DestinationPort,
    /// The protocol above IP of the packet that an ICMP error quotes.
    QuotedProtocol(Family),
    /// The source port of that packet.
    QuotedSourcePort(Family),
}

/// How much there may be of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Connections that are open, this packet's included.
    Connections(u32),
    /// Packets in a minute, and at once.
    PacketsPerMinute(u64, u32),
}

/// A rule: conditions, then what happens to packets that meet them all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    expressions: Vec<Expression>,
    comment: Option<Cow<'static, str>>,
    family: Option<Family>,
}

impl Rule {
    /// A rule that meets every packet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Explains the rule to whoever lists it.
    #[must_use]
    pub fn comment(mut self, comment: impl Into<Cow<'static, str>>) -> Self {
        self.comment = Some(comment.into());
        self
    }

    /// Packets of one IP version.
    #[must_use]
    pub fn family(mut self, family: Family) -> Self {
        if self.family != Some(family) {
            self.family = Some(family);
            self.meta(NFT_META_NFPROTO);
            self.equals(vec![family.number()]);
        }
        self
    }

    /// Packets that came in, or go out, by this interface.
    #[must_use]
    pub fn interface(mut self, direction: Direction, name: &str) -> Self {
        let mut value = name.as_bytes().to_vec();
        value.resize(NAME_LENGTH, 0);
        self.interface_name(direction);
        self.equals(value);
        self
    }

    /// Packets that came in, or go out, by an interface whose name is in this set.
    #[must_use]
    pub fn interface_in(mut self, direction: Direction, set: &str) -> Self {
        self.interface_name(direction);
        self.lookup(set, false);
        self
    }

    /// Packets that came in, or go out, by an interface whose name is not in this set.
    #[must_use]
    pub fn interface_not_in(mut self, direction: Direction, set: &str) -> Self {
        self.interface_name(direction);
        self.lookup(set, true);
        self
    }

    /// Packets from, or to, this address.
    #[must_use]
    pub fn address(self, direction: Direction, address: IpAddr) -> Self {
        let (family, value) = bytes_of(address);
        let mut rule = self.family(family);
        rule.load_address(family, direction, REGISTER);
        rule.equals(value);
        rule
    }

    /// Packets neither from, nor to, an address of this prefix.
    #[must_use]
    pub fn address_outside(self, direction: Direction, prefix: ipnet::IpNet) -> Self {
        let (family, value) = bytes_of(prefix.network());
        let (_, mask) = bytes_of(prefix.netmask());
        let mut rule = self.family(family);
        rule.load_address(family, direction, REGISTER);
        rule.expressions.push(Expression::Mask { mask });
        rule.expressions.push(Expression::Compare {
            equal: false,
            value,
        });
        rule
    }

    /// Packets whose key is in this set.
    #[must_use]
    pub fn key_in(self, parts: &[KeyPart], set: &str) -> Self {
        let mut rule = self.load_key(parts);
        rule.lookup(set, false);
        rule
    }

    /// Packets whose key is not in this set.
    #[must_use]
    pub fn key_not_in(self, parts: &[KeyPart], set: &str) -> Self {
        let mut rule = self.load_key(parts);
        rule.lookup(set, true);
        rule
    }

    /// Packets of this protocol.
    #[must_use]
    pub fn protocol(mut self, protocol: Protocol) -> Self {
        self.meta(NFT_META_L4PROTO);
        self.equals(vec![protocol.number()]);
        self
    }

    /// ICMP or ICMPv6 packets of this type.
    #[must_use]
    pub fn icmp(self, protocol: Protocol, icmp_type: u8) -> Self {
        let mut rule = self.protocol(protocol);
        rule.payload(NFT_PAYLOAD_TRANSPORT_HEADER, 0, 1, REGISTER);
        rule.equals(vec![icmp_type]);
        rule
    }

    /// TCP packets that have any of these flags.
    #[must_use]
    pub fn with_tcp_flags(self, flags: u8) -> Self {
        self.tcp_flags(flags, false)
    }

    /// TCP packets that have none of these flags.
    #[must_use]
    pub fn without_tcp_flags(self, flags: u8) -> Self {
        self.tcp_flags(flags, true)
    }

    fn tcp_flags(self, flags: u8, equal: bool) -> Self {
        let mut rule = self.protocol(Protocol::Tcp);
        rule.payload(NFT_PAYLOAD_TRANSPORT_HEADER, TCP_FLAGS_OFFSET, 1, REGISTER);
        rule.expressions
            .push(Expression::Mask { mask: vec![flags] });
        let value = vec![0];
        rule.expressions.push(Expression::Compare { equal, value });
        rule
    }

    /// Packets in one of these states.
    #[must_use]
    pub fn state(mut self, state: CtState) -> Self {
        self.ct_bits(NFT_CT_STATE, state.0);
        self
    }

    /// Packets of connections whose status has one of these bits.
    #[must_use]
    pub fn status(mut self, bits: u32) -> Self {
        self.ct_bits(NFT_CT_STATUS, bits);
        self
    }

    /// Packets to an address of this host.
    #[must_use]
    pub fn to_this_host(mut self) -> Self {
        self.expressions
            .push(Expression::Fib(FibResult::DestinationType));
        self.equals(RTN_LOCAL.to_ne_bytes().to_vec());
        self
    }

    /// Packets whose source is not reached by the interface that they came in by.
    #[must_use]
    pub fn from_elsewhere(mut self) -> Self {
        self.expressions
            .push(Expression::Fib(FibResult::ReversePath));
        self.equals(0_u32.to_ne_bytes().to_vec());
        self
    }

    /// Packets whose mark has these bits under this mask.
    #[must_use]
    pub fn mark_is(self, bits: u32, mask: u32) -> Self {
        self.mark(bits, mask, true)
    }

    /// Packets whose mark has other bits under this mask.
    #[must_use]
    pub fn mark_is_not(self, bits: u32, mask: u32) -> Self {
        self.mark(bits, mask, false)
    }

    fn mark(mut self, bits: u32, mask: u32, equal: bool) -> Self {
        self.meta(NFT_META_MARK);
        let mask = mask.to_ne_bytes().to_vec();
        self.expressions.push(Expression::Mask { mask });
        let value = bits.to_ne_bytes().to_vec();
        self.expressions.push(Expression::Compare { equal, value });
        self
    }

    /// Packets that a process of this host sends, by a socket that it hasn't closed.
    #[must_use]
    pub fn of_a_process(mut self) -> Self {
        // Without one, the rule ends here.
        self.meta(NFT_META_SKUID);
        self
    }

    /// Packets that a socket of this host sends which belongs to a cgroup, or to one below it: by the
    /// cgroup's number, and how deep it is below the root.
    #[must_use]
    pub fn socket_cgroup(mut self, id: u64, depth: u32) -> Self {
        self.expressions.push(Expression::SocketCgroup { depth });
        self.equals(id.to_ne_bytes().to_vec());
        self
    }

    /// Packets for which there is a socket of this host that hasn't ended.
    #[must_use]
    pub fn for_a_socket(mut self) -> Self {
        // Without one, the rule ends here.
        self.expressions.push(Expression::SocketMark);
        self
    }

    /// Gives packets these bits under this mask as their mark; its other bits stay.
    #[must_use]
    pub fn set_mark(mut self, bits: u32, mask: u32) -> Self {
        self.meta(NFT_META_MARK);
        self.expressions.push(Expression::MaskAndFlip {
            mask: !mask,
            flip: bits & mask,
        });
        self.expressions.push(Expression::SetMark);
        self
    }

    /// Gives TCP or UDP packets to the socket of their connection, or else to the one that listens at
    /// this address, whatever their destination is. Where there is neither, the rule ends here without
    /// a verdict. To be used at [`super::Hook::Prerouting`].
    #[must_use]
    pub fn give_to_socket(self, listener: SocketAddr) -> Self {
        let (family, value) = bytes_of(listener.ip());
        let mut rule = self.family(family);
        let port_register = REGISTER + if family == Family::Ipv4 { 1 } else { 4 };
        rule.expressions.push(Expression::Immediate {
            value,
            register: REGISTER,
        });
        rule.expressions.push(Expression::Immediate {
            value: listener.port().to_be_bytes().to_vec(),
            register: port_register,
        });
        rule.expressions.push(Expression::Tproxy {
            family,
            port_register,
        });
        rule
    }

    /// Packets that start a connection beyond this number.
    #[must_use]
    pub fn connections_over(mut self, count: u32) -> Self {
        self.expressions.push(Expression::ConnectionsOver(count));
        self
    }

    /// Packets as long as there are no more than so many in a second, and so many at once.
    #[must_use]
    pub fn at_most(mut self, per_second: u64, at_once: u32) -> Self {
        self.expressions.push(Expression::AtMost {
            packets: per_second,
            seconds: 1,
            at_once,
        });
        self
    }

    /// Packets whose source is within a bound of its own, which a set keeps ([`super::SetKind::Entered`]). Nor do
    /// those of a source go on that the set has no room for.
    #[must_use]
    pub fn each_source_within(self, family: Family, set: &str, bound: Bound) -> Self {
        let rule = self.load_key(&[KeyPart::Address(family, Direction::Source)]);
        let bound = match bound {
            Bound::Connections(count) => Expression::ConnectionsWithin(count),
            Bound::PacketsPerMinute(packets, at_once) => Expression::AtMost {
                packets,
                seconds: 60,
                at_once,
            },
        };
        rule.enter(set, Some(Box::new(bound)))
    }

    /// Enters packets' keys into a set ([`super::SetKind::Entered`]), or keeps those longer that are there. Packets
    /// that it has no room for don't go on.
    #[must_use]
    pub fn enter_key(self, parts: &[KeyPart], set: &str) -> Self {
        self.load_key(parts).enter(set, None)
    }

    fn enter(mut self, set: &str, bound: Option<Box<Expression>>) -> Self {
        let set = set.to_owned();
        self.expressions.push(Expression::Enter { set, bound });
        self
    }

    /// Goes through the chain that a map has for the packet's key, and on here if that comes to no verdict.
    #[must_use]
    pub fn jump_by_map(self, parts: &[KeyPart], map: &str) -> Self {
        let mut rule = self.load_key(parts);
        let map = map.to_owned();
        rule.expressions.push(Expression::LookupVerdict { map });
        rule
    }

    /// Counts packets and bytes.
    #[must_use]
    pub fn counter(mut self) -> Self {
        self.expressions.push(Expression::Counter);
        self
    }

    /// Lets packets pass this chain.
    #[must_use]
    pub fn accept(self) -> Self {
        self.verdict(Verdict::Accept)
    }

    /// Drops packets.
    #[must_use]
    pub fn drop(self) -> Self {
        self.verdict(Verdict::Drop)
    }

    /// Goes on behind the rule that jumped here.
    #[must_use]
    pub fn back(self) -> Self {
        self.verdict(Verdict::Return)
    }

    /// Goes through another chain, and on here if that comes to no verdict.
    #[must_use]
    pub fn jump(self, chain: &str) -> Self {
        self.verdict(Verdict::Jump(chain.to_owned()))
    }

    /// Keeps connection tracking from seeing packets.
    #[must_use]
    pub fn notrack(mut self) -> Self {
        self.expressions.push(Expression::Notrack);
        self
    }

    /// Gives connections this source or destination address.
    #[must_use]
    pub fn nat_to(self, direction: Direction, address: IpAddr) -> Self {
        let (family, value) = bytes_of(address);
        let mut rule = self.family(family);
        rule.expressions.push(Expression::Immediate {
            value,
            register: REGISTER,
        });
        rule.expressions.push(Expression::Nat {
            source: direction == Direction::Source,
            family,
            port_register: None,
        });
        rule
    }

    /// Gives connections the destination address and port that a map has for their key.
    #[must_use]
    pub fn destination_from_map(self, family: Family, parts: &[KeyPart], map: &str) -> Self {
        let mut rule = self.family(family).load_key(parts);
        rule.expressions.push(Expression::LookupMap {
            map: map.to_owned(),
        });
        let address_registers = if family == Family::Ipv4 { 1 } else { 4 };
        rule.expressions.push(Expression::Nat {
            source: false,
            family,
            port_register: Some(REGISTER + address_registers),
        });
        rule
    }

    /// Gives connections the address of the interface that they leave by.
    #[must_use]
    pub fn masquerade(mut self) -> Self {
        self.expressions.push(Expression::Masquerade);
        self
    }

    /// Number of instructions that the rule came to, as [`super::rules`] counts them.
    #[must_use]
    pub fn instructions(&self) -> usize {
        self.expressions.len()
    }

    pub(super) fn write(&self, message: &mut Writer<'_>, table: &str, chain: &str) {
        message.put_text(NFTA_RULE_TABLE, table);
        message.put_text(NFTA_RULE_CHAIN, chain);
        message.nest(NFTA_RULE_EXPRESSIONS, |list| {
            for expression in &self.expressions {
                expression.write(list);
            }
        });
        if let Some(comment) = &self.comment {
            let length = u8::try_from(comment.len() + 1).expect("comments are short");
            let mut data = vec![NFTNL_UDATA_RULE_COMMENT, length];
            data.extend_from_slice(comment.as_bytes());
            data.push(0);
            message.put(NFTA_RULE_USERDATA, &data);
        }
    }

    fn load_key(self, parts: &[KeyPart]) -> Self {
        let mut rule = self;
        let mut register = REGISTER;
        for part in parts {
            if let KeyPart::Address(family, _)
            | KeyPart::QuotedProtocol(family)
            | KeyPart::QuotedSourcePort(family) = part
            {
                rule = rule.family(*family);
            }
        }
        for part in parts {
            register += match *part {
                KeyPart::Address(family, direction) => {
                    rule.load_address(family, direction, register)
                }
                KeyPart::Protocol => {
                    let key = NFT_META_L4PROTO;
                    rule.expressions.push(Expression::Meta { key, register });
                    1
                }
                KeyPart::SourcePort => {
                    rule.payload(NFT_PAYLOAD_TRANSPORT_HEADER, 0, 2, register);
                    1
                }
                KeyPart::DestinationPort => {
                    rule.payload(NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2, register);
                    1
                }
                KeyPart::QuotedProtocol(family) => {
                    let place = if family == Family::Ipv4 { 9 } else { 6 };
                    rule.quoted(place, 1, register);
                    1
                }
                KeyPart::QuotedSourcePort(family) => {
                    let header = if family == Family::Ipv4 { 20 } else { 40 };
                    rule.quoted(header, 2, register);
                    1
                }
            };
        }
        rule
    }

    /// Loads an address and says how many 32-bit registers it takes.
    fn load_address(&mut self, family: Family, direction: Direction, register: u32) -> u32 {
        let (offset, length) = match (family, direction) {
            (Family::Ipv4, Direction::Source) => (12, 4),
            (Family::Ipv4, Direction::Destination) => (16, 4),
            (Family::Ipv6, Direction::Source) => (8, 16),
            (Family::Ipv6, Direction::Destination) => (24, 16),
        };
        self.payload(NFT_PAYLOAD_NETWORK_HEADER, offset, length, register);
        length / 4
    }

    fn payload(&mut self, base: u32, offset: u32, length: u32, register: u32) {
        self.expressions.push(Expression::Payload {
            base,
            offset,
            length,
            register,
        });
    }

    /// What stands so far in the packet that an ICMP error quotes.
    fn quoted(&mut self, offset: u32, length: u32, register: u32) {
        let offset = ICMP_HEADER_BYTES + offset;
        self.payload(NFT_PAYLOAD_TRANSPORT_HEADER, offset, length, register);
    }

    fn interface_name(&mut self, direction: Direction) {
        self.meta(match direction {
            Direction::Source => NFT_META_IIFNAME,
            Direction::Destination => NFT_META_OIFNAME,
        });
    }

    fn meta(&mut self, key: u32) {
        let register = REGISTER;
        self.expressions.push(Expression::Meta { key, register });
    }

    fn ct_bits(&mut self, key: u32, bits: u32) {
        self.expressions.push(Expression::Ct { key });
        let mask = bits.to_ne_bytes().to_vec();
        self.expressions.push(Expression::Mask { mask });
        let value = vec![0; 4];
        self.expressions.push(Expression::Compare {
            equal: false,
            value,
        });
    }

    fn equals(&mut self, value: Vec<u8>) {
        self.expressions
            .push(Expression::Compare { equal: true, value });
    }

    fn lookup(&mut self, set: &str, inverted: bool) {
        self.expressions.push(Expression::Lookup {
            set: set.to_owned(),
            inverted,
        });
    }

    fn verdict(mut self, verdict: Verdict) -> Self {
        self.expressions.push(Expression::Verdict(verdict));
        self
    }
}

fn bytes_of(address: IpAddr) -> (Family, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (Family::Ipv4, address.octets().to_vec()),
        IpAddr::V6(address) => (Family::Ipv6, address.octets().to_vec()),
    }
}
