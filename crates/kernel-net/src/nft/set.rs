//! Sets and maps: what rules look up, so that their number does not grow with what they match.

use std::{net::IpAddr, time::Duration};

use ipnet::IpNet;

use super::expression::{Family, NFTA_LIST_ELEM, Protocol, Verdict};
use crate::netlink::attribute::Writer;

pub(super) const NFTA_SET_TABLE: u16 = 1;
pub(super) const NFTA_SET_NAME: u16 = 2;
const NFTA_SET_FLAGS: u16 = 3;
const NFTA_SET_KEY_TYPE: u16 = 4;
const NFTA_SET_KEY_LEN: u16 = 5;
const NFTA_SET_DATA_TYPE: u16 = 6;
const NFTA_SET_DATA_LEN: u16 = 7;
const NFTA_SET_DESC: u16 = 9;
const NFTA_SET_ID: u16 = 10;
const NFTA_SET_TIMEOUT: u16 = 11;
const NFTA_SET_DESC_SIZE: u16 = 1;
const NFTA_SET_DESC_CONCAT: u16 = 2;
const NFTA_SET_FIELD_LEN: u16 = 1;
const NFTA_SET_ELEM_LIST_TABLE: u16 = 1;
const NFTA_SET_ELEM_LIST_SET: u16 = 2;
const NFTA_SET_ELEM_LIST_ELEMENTS: u16 = 3;
pub(super) const NFTA_SET_ELEM_KEY: u16 = 1;
const NFTA_SET_ELEM_DATA: u16 = 2;
const NFTA_SET_ELEM_FLAGS: u16 = 3;
pub(super) const NFTA_SET_ELEM_KEY_END: u16 = 10;
pub(super) const NFTA_DATA_VALUE: u16 = 1;
const NFTA_DATA_VERDICT: u16 = 2;
const NFT_SET_INTERVAL: u32 = 0x4;
const NFT_SET_MAP: u32 = 0x8;
const NFT_SET_TIMEOUT: u32 = 0x10;
const NFT_SET_EVAL: u32 = 0x20;
const NFT_SET_CONCAT: u32 = 0x80;
/// Type of the data of a map that leads to verdicts.
const NFT_DATA_VERDICT: u32 = 0xffff_ff00;
const NFT_SET_ELEM_INTERVAL_END: u32 = 1;
/// Bits by which `nft` separates the types of a key's fields.
const TYPE_BITS: u32 = 6;
const NAME_LENGTH: usize = libc::IFNAMSIZ;

/// Type of one field of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// An IP address.
    Address(Family),
    /// A protocol above IP.
    Protocol,
    /// A port.
    Port,
    /// The name of an interface.
    InterfaceName,
}

impl Field {
    /// Number of the type in `nft`, which prints elements by it.
    fn number(self) -> u32 {
        match self {
            Self::Address(Family::Ipv4) => 7,
            Self::Address(Family::Ipv6) => 8,
            Self::Protocol => 12,
            Self::Port => 13,
            Self::InterfaceName => 41,
        }
    }

    fn length(self) -> u32 {
        match self {
            Self::Address(Family::Ipv4) => 4,
            Self::Address(Family::Ipv6) => 16,
            Self::Protocol => 1,
            Self::Port => 2,
            Self::InterfaceName => 16,
        }
    }
}

/// What a set holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetKind {
    /// Keys.
    Exact,
    /// Ranges of keys; with several fields, of each field.
    Ranges,
    /// From a key to an address and a port.
    MapToPort(Family),
    /// From ranges of keys to chains.
    RangesToChains,
    /// Keys that rules enter by themselves; each may have a bound of its own.
    Entered {
        /// Most keys.
        keys_max: u32,
        /// After how long a key goes that nothing has met. Without it keys of connections go with these.
        idle: Option<Duration>,
    },
}

/// A set or map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Set<'a> {
    /// Name.
    pub name: &'a str,
    /// What it holds.
    pub kind: SetKind,
    /// Fields of the key.
    pub key: &'a [Field],
}

impl Set<'_> {
    pub(super) fn write(&self, message: &mut Writer<'_>, table: &str, id: u32) {
        message.put_text(NFTA_SET_TABLE, table);
        message.put_text(NFTA_SET_NAME, self.name);
        let is_concatenation = self.key.len() > 1;
        let mut flags = match self.kind {
            SetKind::Exact => 0,
            SetKind::Ranges => NFT_SET_INTERVAL,
            SetKind::MapToPort(_) => NFT_SET_MAP,
            SetKind::RangesToChains => NFT_SET_INTERVAL | NFT_SET_MAP,
            SetKind::Entered { idle: None, .. } => NFT_SET_EVAL,
            SetKind::Entered { idle: Some(_), .. } => NFT_SET_EVAL | NFT_SET_TIMEOUT,
        };
        if is_concatenation {
            flags |= NFT_SET_CONCAT;
        }
        message.put_u32_be(NFTA_SET_FLAGS, flags);
        let (key_type, key_length) = describe(self.key);
        message.put_u32_be(NFTA_SET_KEY_TYPE, key_type);
        message.put_u32_be(NFTA_SET_KEY_LEN, key_length);
        message.put_u32_be(NFTA_SET_ID, id);
        if let SetKind::MapToPort(family) = self.kind {
            let (data_type, data_length) = describe(&[Field::Address(family), Field::Port]);
            message.put_u32_be(NFTA_SET_DATA_TYPE, data_type);
            message.put_u32_be(NFTA_SET_DATA_LEN, data_length);
        }
        if self.kind == SetKind::RangesToChains {
            message.put_u32_be(NFTA_SET_DATA_TYPE, NFT_DATA_VERDICT);
        }
        let mut most = None;
        if let SetKind::Entered { keys_max, idle } = self.kind {
            if let Some(idle) = idle {
                let milliseconds = u64::try_from(idle.as_millis()).unwrap_or(u64::MAX);
                message.put_u64_be(NFTA_SET_TIMEOUT, milliseconds);
            }
            most = Some(keys_max);
        }
        if is_concatenation || most.is_some() {
            message.nest(NFTA_SET_DESC, |description| {
                if let Some(most) = most {
                    description.put_u32_be(NFTA_SET_DESC_SIZE, most);
                }
                if is_concatenation {
                    self.write_fields(description);
                }
            });
        }
    }

    fn write_fields(&self, description: &mut Writer<'_>) {
        description.nest(NFTA_SET_DESC_CONCAT, |list| {
            for field in self.key {
                list.nest(NFTA_LIST_ELEM, |entry| {
                    entry.put_u32_be(NFTA_SET_FIELD_LEN, field.length());
                });
            }
        });
    }
}

/// Type number and length of a key; each field of several starts at a multiple of four bytes.
fn describe(fields: &[Field]) -> (u32, u32) {
    if let [field] = fields {
        return (field.number(), field.length());
    }
    fields.iter().fold((0, 0), |(kind, length), field| {
        let kind = kind << TYPE_BITS | field.number();
        (kind, length + field.length().next_multiple_of(4))
    })
}

/// An element of a set or map. The constructors say which sets it fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    key: Vec<u8>,
    key_end: Option<Vec<u8>>,
    is_end: bool,
    data: Option<Data>,
}

/// What a key of a map leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Data {
    Value(Vec<u8>),
    Chain(String),
}

impl Element {
    /// One key, its fields one after the other as [`Key`] writes them.
    #[must_use]
    pub fn exact(key: Key) -> Self {
        Self {
            key: key.first,
            key_end: None,
            is_end: false,
            data: None,
        }
    }

    /// A range in each of several fields.
    #[must_use]
    pub fn ranges(key: Key) -> Self {
        Self {
            key: key.first,
            key_end: Some(key.last),
            is_end: false,
            data: None,
        }
    }

    /// A range of a set with a single field: the kernel wants its start and the key behind its end.
    #[must_use]
    pub fn prefix(prefix: IpNet) -> Vec<Self> {
        Self::single(Key::default().prefix(prefix))
    }

    /// All interface names that start with this text.
    #[must_use]
    pub fn interface_names(start: &str) -> Vec<Self> {
        let pad = |fill: u8| {
            let mut name = start.as_bytes().to_vec();
            name.resize(NAME_LENGTH, fill);
            name
        };
        Self::single(Key {
            first: pad(0),
            last: pad(0xff),
        })
    }

    /// One interface name.
    #[must_use]
    pub fn interface_name(name: &str) -> Vec<Self> {
        let mut padded = name.as_bytes().to_vec();
        padded.resize(NAME_LENGTH, 0);
        Self::single(Key {
            first: padded.clone(),
            last: padded,
        })
    }

    fn single(key: Key) -> Vec<Self> {
        let start = Self::exact(Key {
            first: key.first,
            last: Vec::new(),
        });
        let mut behind = key.last;
        let mut carry = true;
        for byte in behind.iter_mut().rev() {
            if carry {
                (*byte, carry) = byte.overflowing_add(1);
            }
        }
        if carry {
            // The range reaches the last possible key and has no end.
            return vec![start];
        }
        let end = Self {
            key: behind,
            key_end: None,
            is_end: true,
            data: None,
        };
        vec![start, end]
    }

    /// Gives the element of a map its value: an address and a port.
    #[must_use]
    pub fn leads_to(mut self, address: IpAddr, port: u16) -> Self {
        let data = Key::default().address(address).port(port);
        self.data = Some(Data::Value(data.first));
        self
    }

    /// A prefix in a map that leads to chains.
    #[must_use]
    pub fn prefix_to_chain(prefix: IpNet, chain: &str) -> Vec<Self> {
        let mut elements = Self::prefix(prefix);
        // The end of a range leads nowhere.
        elements[0].data = Some(Data::Chain(chain.to_owned()));
        elements
    }

    pub(super) fn write_list(message: &mut Writer<'_>, table: &str, set: &str, elements: &[Self]) {
        message.put_text(NFTA_SET_ELEM_LIST_TABLE, table);
        message.put_text(NFTA_SET_ELEM_LIST_SET, set);
        if elements.is_empty() {
            return;
        }
        message.nest(NFTA_SET_ELEM_LIST_ELEMENTS, |list| {
            for element in elements {
                list.nest(NFTA_LIST_ELEM, |entry| element.write(entry));
            }
        });
    }

    fn write(&self, entry: &mut Writer<'_>) {
        entry.nest(NFTA_SET_ELEM_KEY, |key| key.put(NFTA_DATA_VALUE, &self.key));
        if let Some(end) = &self.key_end {
            entry.nest(NFTA_SET_ELEM_KEY_END, |key| key.put(NFTA_DATA_VALUE, end));
        }
        if self.is_end {
            entry.put_u32_be(NFTA_SET_ELEM_FLAGS, NFT_SET_ELEM_INTERVAL_END);
        }
        match &self.data {
            None => {}
            Some(Data::Value(value)) => {
                entry.nest(NFTA_SET_ELEM_DATA, |data| data.put(NFTA_DATA_VALUE, value));
            }
            Some(Data::Chain(chain)) => entry.nest(NFTA_SET_ELEM_DATA, |data| {
                data.nest(NFTA_DATA_VERDICT, |verdict| {
                    Verdict::Jump(chain.clone()).write(verdict);
                });
            }),
        }
    }
}

/// Fields of a key, each a value or a range, in the order of the set's fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Key {
    first: Vec<u8>,
    last: Vec<u8>,
}

impl Key {
    /// An address.
    #[must_use]
    pub fn address(self, address: IpAddr) -> Self {
        self.prefix(IpNet::from(address))
    }

    /// All addresses of a prefix.
    #[must_use]
    pub fn prefix(mut self, prefix: IpNet) -> Self {
        match prefix {
            IpNet::V4(prefix) => {
                self.field(&prefix.network().octets(), &prefix.broadcast().octets());
            }
            IpNet::V6(prefix) => {
                self.field(&prefix.network().octets(), &prefix.broadcast().octets());
            }
        }
        self
    }

    /// A protocol.
    #[must_use]
    pub fn protocol(mut self, protocol: Protocol) -> Self {
        let number = [protocol.number()];
        self.field(&number, &number);
        self
    }

    /// A port.
    #[must_use]
    pub fn port(self, port: u16) -> Self {
        self.ports(port, port)
    }

    /// A range of ports.
    #[must_use]
    pub fn ports(mut self, first: u16, last: u16) -> Self {
        self.field(&first.to_be_bytes(), &last.to_be_bytes());
        self
    }

    #[cfg(test)]
    pub(super) fn ends(&self) -> (&[u8], &[u8]) {
        (&self.first, &self.last)
    }

    fn field(&mut self, first: &[u8], last: &[u8]) {
        for (key, value) in [(&mut self.first, first), (&mut self.last, last)] {
            key.extend_from_slice(value);
            key.resize(key.len().next_multiple_of(4), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(elements: &[Element]) -> Vec<(Vec<u8>, bool)> {
        elements
            .iter()
            .map(|element| (element.key.clone(), element.is_end))
            .collect()
    }

    #[test]
    fn a_prefix_ends_behind_its_last_address() {
        let elements = Element::prefix("10.64.0.0/16".parse().unwrap());
        let expected = vec![(vec![10, 64, 0, 0], false), (vec![10, 65, 0, 0], true)];
        assert_eq!(keys(&elements), expected);
    }

    #[test]
    fn a_prefix_that_reaches_the_last_address_has_no_end() {
        let elements = Element::prefix("255.0.0.0/8".parse().unwrap());
        assert_eq!(keys(&elements), vec![(vec![255, 0, 0, 0], false)]);
    }

    #[test]
    fn names_end_before_the_next_text_of_the_same_length() {
        let elements = Element::interface_names("swabc-");
        assert_eq!(&elements[0].key[..6], b"swabc-");
        assert_eq!(&elements[1].key[..6], b"swabc.");
        assert!(elements[1].is_end);
        assert!(elements[1].key[6..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn each_field_of_a_key_is_padded() {
        let key = Key::default().prefix("10.0.0.0/8".parse().unwrap());
        let key = key.protocol(Protocol::Tcp).ports(80, 443);
        assert_eq!(key.first, [10, 0, 0, 0, 6, 0, 0, 0, 0, 80, 0, 0]);
        assert_eq!(key.last, [10, 255, 255, 255, 6, 0, 0, 0, 1, 187, 0, 0]);
    }
}
