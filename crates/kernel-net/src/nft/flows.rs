//! What the relay's steering takes of what comes in, as it stands in its table: for who must know without being told.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{
    Field, GENERIC_HEADER, NFPROTO_INET, SUBSYSTEM,
    expression::Family,
    generic_header, inspect,
    set::{
        NFTA_DATA_VALUE, NFTA_SET_ELEM_KEY, NFTA_SET_ELEM_KEY_END, NFTA_SET_NAME, NFTA_SET_TABLE,
    },
};
use crate::{
    Error,
    netlink::{
        Socket,
        attribute::{self, Attributes},
    },
};

/// Name of the relay's table.
pub const RELAY_TABLE: &str = "sandwire-relay";
/// How the names of the sets begin that say what it takes of what comes in. Digits follow.
pub const RELAY_FLOWS: &str = "from";

const NFT_MSG_GETSET: u16 = 10;
/// Of keys: two addresses, a protocol and a port.
const LENGTH_V4: usize = 2 * 4 + 8;
const LENGTH_V6: usize = 2 * 16 + 8;

/// Packets by their ends: an element of a set of the relay's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flows {
    /// Sources.
    pub from: IpNet,
    /// Destinations.
    pub to: IpNet,
    /// Number of the protocol above IP.
    pub protocol: u8,
    /// First and last port of the destination.
    pub ports: (u16, u16),
}

impl Flows {
    /// Fields of the key of a set of them.
    #[must_use]
    pub fn key(family: Family) -> [Field; 4] {
        let address = Field::Address(family);
        [address, address, Field::Protocol, Field::Port]
    }

    /// Both ends of an element as [`super::Key`] writes them: each field at a multiple of four bytes.
    fn read(first: &[u8], last: &[u8]) -> Option<Self> {
        let length = match first.len() {
            LENGTH_V4 => 4,
            LENGTH_V6 => 16,
            _ => return None,
        };
        let prefix = |at: usize| {
            let end = |key: &[u8]| attribute::address_of(key.get(at..at + length)?);
            spanned(end(first)?, end(last)?)
        };
        let port = |key: &[u8]| {
            let octets = key.get(2 * length + 4..)?.first_chunk()?;
            Some(u16::from_be_bytes(*octets))
        };
        Some(Self {
            from: prefix(0)?,
            to: prefix(length)?,
            protocol: *first.get(2 * length)?,
            ports: (port(first)?, port(last)?),
        })
    }
}

/// The prefix from its first to its last address.
fn spanned(first: IpAddr, last: IpAddr) -> Option<IpNet> {
    let differing = match (first, last) {
        (IpAddr::V4(first), IpAddr::V4(last)) => (first.to_bits() ^ last.to_bits()).leading_zeros(),
        (IpAddr::V6(first), IpAddr::V6(last)) => (first.to_bits() ^ last.to_bits()).leading_zeros(),
        _ => return None,
    };
    let prefix = IpNet::new(first, u8::try_from(differing).ok()?).ok()?;
    (prefix.network() == first && prefix.broadcast() == last).then_some(prefix)
}

/// What the relay takes of what comes in by other interfaces than the loopback, redirect by redirect. Where it has no table,
/// nothing.
///
/// # Errors
/// The kernel refuses.
pub fn relayed(socket: &mut Socket) -> Result<Vec<Vec<Flows>>, Error> {
    let listed =
        names(socket).and_then(|names| names.iter().map(|name| elements(socket, name)).collect());
    match listed {
        // The table may also go while it is read.
        Err(error) if error.errno() == Some(libc::ENOENT) => Ok(Vec::new()),
        listed => listed,
    }
}

fn names(socket: &mut Socket) -> Result<Vec<String>, Error> {
    let object = format!("sets of nft table {RELAY_TABLE}");
    socket.query(
        SUBSYSTEM << 8 | NFT_MSG_GETSET,
        true,
        ("list", &object),
        |message| {
            message.raw(&generic_header(NFPROTO_INET));
            message.put_text(NFTA_SET_TABLE, RELAY_TABLE);
        },
        |reply| {
            let name = reply.attributes(GENERIC_HEADER).find(NFTA_SET_NAME)?;
            let name = attribute::text_of(name);
            let rest = name.strip_prefix(RELAY_FLOWS)?;
            rest.starts_with(|first: char| first.is_ascii_digit())
                .then_some(name)
        },
    )
}

fn elements(socket: &mut Socket, set: &str) -> Result<Vec<Flows>, Error> {
    let parts = inspect::elements(socket, RELAY_TABLE, set, |part| {
        let flows = part.filter_map(|(_, element)| element_of(element));
        Some(flows.collect::<Vec<_>>())
    })?;
    Ok(parts.concat())
}

fn element_of(element: &[u8]) -> Option<Flows> {
    let element = Attributes::new(element);
    let first = element.nested(NFTA_SET_ELEM_KEY).find(NFTA_DATA_VALUE)?;
    // Where both are the same, the kernel may say it once.
    let last = element
        .nested(NFTA_SET_ELEM_KEY_END)
        .find(NFTA_DATA_VALUE)
        .unwrap_or(first);
    Flows::read(first, last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_element_reads_back_as_it_was_written() {
        for (from, to) in [
            ("10.64.0.0/16", "198.51.100.7/32"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("fd64::/64", "::/0"),
        ] {
            let [from, to]: [IpNet; 2] = [from, to].map(|prefix| prefix.parse().unwrap());
            let key = super::super::Key::default().prefix(from).prefix(to);
            let key = key.protocol(super::super::Protocol::Udp).ports(0, 0xffff);
            let (first, last) = key.ends();
            let expected = Flows {
                from,
                to,
                protocol: 17,
                ports: (0, 0xffff),
            };
            assert_eq!(Flows::read(first, last), Some(expected));
            assert_eq!(Flows::read(&first[1..], &last[1..]), None);
            assert_eq!(Flows::read(first, &last[1..]), None);
        }
    }

    #[test]
    fn what_is_no_prefix_is_nothing() {
        let span = |first: &str, last: &str| {
            spanned(first.parse().unwrap(), last.parse().unwrap()).map(|found| found.to_string())
        };
        assert_eq!(
            span("10.0.0.0", "10.0.0.255").as_deref(),
            Some("10.0.0.0/24")
        );
        assert_eq!(span("10.0.0.1", "10.0.0.2"), None);
        assert_eq!(span("10.0.0.0", "10.0.1.0"), None);
    }
}
