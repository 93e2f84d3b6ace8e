//! Connections that the kernel tracks: forget those of certain addresses, forget all, count.

use std::{collections::HashSet, hash::BuildHasher, net::IpAddr};

use crate::{
    Error,
    capability::Required,
    netlink::{
        CHANGE, Request, Socket,
        attribute::{self, Attributes},
    },
    nft::{GENERIC_HEADER, generic_header},
    number::{narrow, octet},
};

/// Capabilities for connection tracking.
pub const REQUIRED_CAPABILITIES: Required = Required {
    operations: "conntrack",
    capabilities: &["CAP_NET_ADMIN"],
    reason: "list and delete tracked connections",
};

const SUBSYSTEM: u16 = narrow(libc::NFNL_SUBSYS_CTNETLINK);
const IPCTNL_MSG_CT_GET: u16 = 1;
const IPCTNL_MSG_CT_DELETE: u16 = 2;
const IPCTNL_MSG_CT_GET_STATS: u16 = 5;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_TUPLE_IP: u16 = 1;
const CTA_STATS_GLOBAL_ENTRIES: u16 = 1;
/// Deletions that go into one request: as many answers fit a default socket buffer.
const BATCH: usize = 128;

/// Number of connections that the socket's namespace tracks.
///
/// # Errors
/// The kernel refuses.
pub fn count(socket: &mut Socket) -> Result<u32, Error> {
    let label = ("count", "tracked connections");
    let kind = SUBSYSTEM << 8 | IPCTNL_MSG_CT_GET_STATS;
    let counts = socket.query(
        kind,
        false,
        label,
        |message| message.raw(&generic_header(0)),
        |reply| {
            let attributes = reply.attributes(GENERIC_HEADER);
            attributes
                .find(CTA_STATS_GLOBAL_ENTRIES)
                .and_then(attribute::u32_be_of)
        },
    )?;
    counts.into_iter().next().ok_or_else(|| Error::Malformed {
        operation: label.0,
        object: label.1.to_owned(),
    })
}

/// Forgets every connection that has one of these addresses in its original or reply direction, and
/// says how many there were.
///
/// # Errors
/// The kernel refuses. A connection that ended by itself meanwhile is fine.
pub fn forget<S: BuildHasher>(
    socket: &mut Socket,
    addresses: &HashSet<IpAddr, S>,
) -> Result<usize, Error> {
    let mut forgotten = 0;
    for family in [octet(libc::AF_INET), octet(libc::AF_INET6)] {
        if !addresses
            .iter()
            .any(|address| crate::address::family_of(*address) == family)
        {
            continue;
        }
        let found = socket.query(
            SUBSYSTEM << 8 | IPCTNL_MSG_CT_GET,
            true,
            ("list", "tracked connections"),
            |message| message.raw(&generic_header(family)),
            |reply| Connection::matching(reply.attributes(GENERIC_HEADER), addresses),
        )?;
        forgotten += found.len();
        for connections in found.chunks(BATCH) {
            delete(socket, family, connections)?;
        }
    }
    Ok(forgotten)
}

/// What the kernel needs to find a connection again.
struct Connection {
    original: Vec<u8>,
    zone: Option<Vec<u8>>,
    id: Option<Vec<u8>>,
}

impl Connection {
    fn matching<S: BuildHasher>(
        attributes: Attributes<'_>,
        addresses: &HashSet<IpAddr, S>,
    ) -> Option<Self> {
        let has_address = |direction| {
            attributes
                .nested(direction)
                .nested(CTA_TUPLE_IP)
                .filter_map(|(_, value)| attribute::address_of(value))
                .any(|address| addresses.contains(&address))
        };
        if !has_address(CTA_TUPLE_ORIG) && !has_address(CTA_TUPLE_REPLY) {
            return None;
        }
        Some(Self {
            original: attributes.find(CTA_TUPLE_ORIG)?.to_vec(),
            zone: attributes.find(CTA_ZONE).map(<[u8]>::to_vec),
            id: attributes.find(CTA_ID).map(<[u8]>::to_vec),
        })
    }
}

fn delete(socket: &mut Socket, family: u8, connections: &[Connection]) -> Result<(), Error> {
    let mut request = Request::new();
    for connection in connections {
        let kind = (SUBSYSTEM << 8 | IPCTNL_MSG_CT_DELETE, CHANGE);
        request.message(kind, "forget", "tracked connection", |message| {
            message.raw(&generic_header(family));
            message.nest(CTA_TUPLE_ORIG, |tuple| tuple.raw(&connection.original));
            for (kind, value) in [(CTA_ZONE, &connection.zone), (CTA_ID, &connection.id)] {
                if let Some(value) = value {
                    message.put(kind, value);
                }
            }
        });
    }
    socket
        .execute_all(request)
        .into_iter()
        .find(|(_, error)| !error.is_missing())
        .map_or(Ok(()), |(_, error)| Err(error))
}
