//! Connections that the kernel tracks: forget those of certain addresses, forget flows of UDP, count.

use std::{
    collections::{BTreeSet, HashSet},
    hash::BuildHasher,
    net::{IpAddr, SocketAddr},
};

use crate::{
    Error,
    capability::Required,
    netlink::{
        CHANGE, Request, Socket,
        attribute::{self, Attributes, Writer},
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
const IPCTNL_MSG_CT_NEW: u16 = 0;
const CTA_PROTOINFO: u16 = 4;
const CTA_PROTOINFO_TCP: u16 = 1;
const CTA_PROTOINFO_TCP_STATE: u16 = 1;
/// Of the original and of the reply direction.
const CTA_PROTOINFO_TCP_FLAGS: [u16; 2] = [4, 5];
const TCP_BE_LIBERAL: u8 = 0x08;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_TUPLE_IP: u16 = 1;
/// In IPv4 and in IPv6.
const CTA_IP_SRC: [u16; 2] = [1, 3];
const CTA_IP_DST: [u16; 2] = [2, 4];
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;
const CTA_STATS_GLOBAL_ENTRIES: u16 = 1;
const CTA_FILTER: u16 = 25;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
/// `CTA_FILTER_F_CTA_PROTO_NUM` and `CTA_FILTER_F_CTA_PROTO_DST_PORT`.
const BY_PROTOCOL_AND_DESTINATION_PORT: u32 = 1 << 3 | 1 << 5;
/// Of so many ports the flows are asked for by port. Each time the kernel looks at all there are, but what it tells of them costs more.
const PORTS_BY_ONE: usize = 4;
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
    // A listing looks at each of a quarter of a million buckets, full or not: 12 ms a family.
    if count(socket)? == 0 {
        return Ok(0);
    }
    let mut forgotten = 0;
    for family in [octet(libc::AF_INET), octet(libc::AF_INET6)] {
        if !addresses
            .iter()
            .any(|address| crate::address::family_of(*address) == family)
        {
            continue;
        }
        let matching = |attributes: Attributes<'_>| Connection::matching(attributes, addresses);
        forgotten += forget_chosen(socket, family, None, matching)?;
    }
    Ok(forgotten)
}

/// Whom a flow of UDP called, and who answers it: somebody else, if the call is translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagrams {
    /// Where the caller sent to.
    pub called: SocketAddr,
    /// Where that is led, and answered from.
    pub answering: SocketAddr,
}

/// Forgets the flows of UDP that are chosen, all of them to one of these ports, and says how many there were. The next
/// datagram of each begins a new one, which goes where rules lead it by then. Other flows may be asked about, too.
///
/// # Errors
/// The kernel refuses. A flow that ended by itself meanwhile is fine.
pub fn forget_datagrams(
    socket: &mut Socket,
    ports: &BTreeSet<u16>,
    is_chosen: impl Fn(&Datagrams) -> bool,
) -> Result<usize, Error> {
    if count(socket)? == 0 {
        return Ok(0);
    }
    let asked: Vec<Option<u16>> = match ports.len() {
        0..=PORTS_BY_ONE => ports.iter().copied().map(Some).collect(),
        _ => vec![None],
    };
    let chosen = |attributes: Attributes<'_>| {
        let flow = Datagrams::of(attributes)?;
        is_chosen(&flow).then(|| Connection::of(attributes))?
    };
    let mut forgotten = 0;
    for family in [octet(libc::AF_INET), octet(libc::AF_INET6)] {
        for port in &asked {
            forgotten += forget_chosen(socket, family, *port, chosen)?;
        }
    }
    Ok(forgotten)
}

/// Of UDP to a port alone, if one is given: before Linux 5.8 the kernel tells of all there are nevertheless.
fn forget_chosen(
    socket: &mut Socket,
    family: u8,
    port: Option<u16>,
    choose: impl Fn(Attributes<'_>) -> Option<Connection>,
) -> Result<usize, Error> {
    let found = socket.query(
        SUBSYSTEM << 8 | IPCTNL_MSG_CT_GET,
        true,
        ("list", "tracked connections"),
        |message| {
            message.raw(&generic_header(family));
            if let Some(port) = port {
                ask_for_port(message, port);
            }
        },
        |reply| choose(reply.attributes(GENERIC_HEADER)),
    )?;
    for connections in found.chunks(BATCH) {
        delete(socket, family, connections)?;
    }
    Ok(found.len())
}

fn ask_for_port(message: &mut Writer<'_>, port: u16) {
    message.nest(CTA_TUPLE_ORIG, |tuple| {
        tuple.nest(CTA_TUPLE_PROTO, |protocol| {
            protocol.put_u8(CTA_PROTO_NUM, octet(libc::IPPROTO_UDP));
            protocol.put(CTA_PROTO_DST_PORT, &port.to_be_bytes());
        });
    });
    message.nest(CTA_FILTER, |filter| {
        filter.put_u32(CTA_FILTER_ORIG_FLAGS, BY_PROTOCOL_AND_DESTINATION_PORT);
    });
}

/// Lets TCP connections with one of these addresses go on although packets of theirs took another way for
/// a while: the kernel no longer compares their sequence numbers with those that it saw.
///
/// # Errors
/// The kernel refuses. A connection that ended by itself meanwhile is fine.
pub fn tolerate_gaps<S: BuildHasher>(
    socket: &mut Socket,
    addresses: &HashSet<IpAddr, S>,
) -> Result<(), Error> {
    for family in [octet(libc::AF_INET), octet(libc::AF_INET6)] {
        let found = socket.query(
            SUBSYSTEM << 8 | IPCTNL_MSG_CT_GET,
            true,
            ("list", "tracked connections"),
            |message| message.raw(&generic_header(family)),
            |reply| {
                let attributes = reply.attributes(GENERIC_HEADER);
                let tcp = attributes.nested(CTA_PROTOINFO).nested(CTA_PROTOINFO_TCP);
                let state = *tcp.find(CTA_PROTOINFO_TCP_STATE)?.first()?;
                Some((state, Connection::matching(attributes, addresses)?))
            },
        )?;
        for connections in found.chunks(BATCH) {
            let mut request = Request::new();
            for (state, connection) in connections {
                let kind = (SUBSYSTEM << 8 | IPCTNL_MSG_CT_NEW, CHANGE);
                request.message(kind, "change", "tracked connection", |message| {
                    message.raw(&generic_header(family));
                    connection.name(message);
                    message.nest(CTA_PROTOINFO, |info| {
                        info.nest(CTA_PROTOINFO_TCP, |tcp| {
                            tcp.put_u8(CTA_PROTOINFO_TCP_STATE, *state);
                            for direction in CTA_PROTOINFO_TCP_FLAGS {
                                tcp.put(direction, &[TCP_BE_LIBERAL, TCP_BE_LIBERAL]);
                            }
                        });
                    });
                });
            }
            finish(socket, request)?;
        }
    }
    Ok(())
}

/// What the kernel needs to find a connection again.
struct Connection {
    original: Vec<u8>,
    zone: Option<Vec<u8>>,
    id: Option<Vec<u8>>,
}

impl Connection {
    fn name(&self, message: &mut Writer<'_>) {
        message.nest(CTA_TUPLE_ORIG, |tuple| tuple.raw(&self.original));
        if let Some(zone) = &self.zone {
            message.put(CTA_ZONE, zone);
        }
    }

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
        Self::of(attributes)
    }

    fn of(attributes: Attributes<'_>) -> Option<Self> {
        Some(Self {
            original: attributes.find(CTA_TUPLE_ORIG)?.to_vec(),
            zone: attributes.find(CTA_ZONE).map(<[u8]>::to_vec),
            id: attributes.find(CTA_ID).map(<[u8]>::to_vec),
        })
    }
}

impl Datagrams {
    /// None of what is no flow of UDP.
    fn of(attributes: Attributes<'_>) -> Option<Self> {
        let (original, reply) = (CTA_TUPLE_ORIG, CTA_TUPLE_REPLY);
        Some(Self {
            called: end_of(attributes.nested(original), CTA_IP_DST, CTA_PROTO_DST_PORT)?,
            answering: end_of(attributes.nested(reply), CTA_IP_SRC, CTA_PROTO_SRC_PORT)?,
        })
    }
}

/// One end of what goes by UDP in one direction.
fn end_of(tuple: Attributes<'_>, addresses: [u16; 2], port: u16) -> Option<SocketAddr> {
    let protocol = tuple.nested(CTA_TUPLE_PROTO);
    if protocol.find(CTA_PROTO_NUM)? != [octet(libc::IPPROTO_UDP)] {
        return None;
    }
    let of_ip = tuple.nested(CTA_TUPLE_IP);
    let mut found = addresses.into_iter().filter_map(|kind| of_ip.find(kind));
    let address = found.next().and_then(attribute::address_of)?;
    let port = protocol.find(port)?.first_chunk()?;
    Some(SocketAddr::new(address, u16::from_be_bytes(*port)))
}

fn delete(socket: &mut Socket, family: u8, connections: &[Connection]) -> Result<(), Error> {
    let mut request = Request::new();
    for connection in connections {
        let kind = (SUBSYSTEM << 8 | IPCTNL_MSG_CT_DELETE, CHANGE);
        request.message(kind, "forget", "tracked connection", |message| {
            message.raw(&generic_header(family));
            connection.name(message);
            if let Some(id) = &connection.id {
                message.put(CTA_ID, id);
            }
        });
    }
    finish(socket, request)
}

fn finish(socket: &mut Socket, request: Request) -> Result<(), Error> {
    socket
        .execute_all(request)
        .into_iter()
        .find(|(_, error)| !error.is_missing())
        .map_or(Ok(()), |(_, error)| Err(error))
}
