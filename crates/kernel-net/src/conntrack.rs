//! Connections that the kernel tracks: forget those of certain addresses, forget flows of UDP, count.

use std::{
    cell::Cell,
    collections::{BTreeSet, HashSet},
    hash::BuildHasher,
    net::{IpAddr, Ipv4Addr, SocketAddr},
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
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
/// `CTA_FILTER_F_CTA_IP_SRC`.
const BY_SOURCE: u32 = 1;
/// `CTA_FILTER_F_CTA_PROTO_NUM` and `CTA_FILTER_F_CTA_PROTO_DST_PORT`.
const BY_PROTOCOL_AND_DESTINATION_PORT: u32 = 1 << 3 | 1 << 5;
/// Of so many ports the flows are asked for by port. Each time the kernel looks at all there are, but what it tells of them costs more.
const PORTS_BY_ONE: usize = 4;
/// Of so many IPv4 addresses the connections are asked for by address, in both directions, if the namespace tracks very many. With
/// 200,000 a look costs 0.06 s, and what the kernel tells of all 0.5 s. Asked for an IPv6 address it tells of those of all others (seen
/// with Linux 6.18).
const ADDRESSES_BY_ONE: usize = 2;
const VERY_MANY: u32 = 30_000;
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

/// Forgets every connection that one of these addresses has begun, or answers, whatever it is translated to, and
/// says how many there were.
///
/// # Errors
/// The kernel refuses. A connection that ended by itself meanwhile is fine.
pub fn forget<S: BuildHasher>(
    socket: &mut Socket,
    addresses: &HashSet<IpAddr, S>,
) -> Result<usize, Error> {
    // A listing looks at each of a quarter of a million buckets, full or not: 12 ms a family.
    let entries = count(socket)?;
    if entries == 0 {
        return Ok(0);
    }
    let mut forgotten = 0;
    for family in [octet(libc::AF_INET), octet(libc::AF_INET6)] {
        let is_of_family = |address: &IpAddr| crate::address::family_of(*address) == family;
        let own: HashSet<IpAddr> = addresses.iter().copied().filter(is_of_family).collect();
        let are_few = own.len() <= ADDRESSES_BY_ONE && entries >= VERY_MANY;
        if are_few && family == octet(libc::AF_INET) {
            forgotten += forget_by_one(socket, &own)?;
        } else if !own.is_empty() {
            forgotten += forget_all_of(socket, family, &own)?;
        }
    }
    Ok(forgotten)
}

fn forget_by_one(socket: &mut Socket, addresses: &HashSet<IpAddr>) -> Result<usize, Error> {
    let family = octet(libc::AF_INET);
    let mut forgotten = 0;
    for address in addresses.iter().filter_map(ipv4_of) {
        for direction in [CTA_TUPLE_ORIG, CTA_TUPLE_REPLY] {
            let are_others = Cell::new(false);
            let chosen = |attributes: Attributes<'_>| {
                let is_other = source_of(attributes, direction) != Some(address.into());
                are_others.set(are_others.get() || is_other);
                Connection::of_addresses(attributes, addresses)
            };
            let asked = Asked::From(direction, address);
            forgotten += forget_chosen(socket, family, asked, chosen)?;
            // Before Linux 5.8 it tells of all there are.
            if are_others.get() {
                return Ok(forgotten + forget_all_of(socket, family, addresses)?);
            }
        }
    }
    Ok(forgotten)
}

fn forget_all_of(
    socket: &mut Socket,
    family: u8,
    addresses: &HashSet<IpAddr>,
) -> Result<usize, Error> {
    let chosen = |attributes: Attributes<'_>| Connection::of_addresses(attributes, addresses);
    forget_chosen(socket, family, Asked::All, chosen)
}

fn ipv4_of(address: &IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    }
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
    let asked: Vec<Asked> = match ports.len() {
        0..=PORTS_BY_ONE => ports.iter().copied().map(Asked::DatagramsTo).collect(),
        _ => vec![Asked::All],
    };
    let chosen = |attributes: Attributes<'_>| {
        let flow = Datagrams::of(attributes)?;
        is_chosen(&flow).then(|| Connection::of(attributes))?
    };
    let mut forgotten = 0;
    for family in [octet(libc::AF_INET), octet(libc::AF_INET6)] {
        for asked in &asked {
            forgotten += forget_chosen(socket, family, *asked, chosen)?;
        }
    }
    Ok(forgotten)
}

/// What the kernel is asked to tell of. Before Linux 5.8 it tells of all there are nevertheless.
#[derive(Clone, Copy, Debug)]
enum Asked {
    All,
    /// Flows of UDP to a port.
    DatagramsTo(u16),
    /// What comes from an address, in the direction of that attribute.
    From(u16, Ipv4Addr),
}

impl Asked {
    fn write(self, message: &mut Writer<'_>) {
        let (direction, flags) = match self {
            Self::All => return,
            Self::DatagramsTo(port) => {
                message.nest(CTA_TUPLE_ORIG, |tuple| {
                    tuple.nest(CTA_TUPLE_PROTO, |protocol| {
                        protocol.put_u8(CTA_PROTO_NUM, octet(libc::IPPROTO_UDP));
                        protocol.put(CTA_PROTO_DST_PORT, &port.to_be_bytes());
                    });
                });
                (CTA_TUPLE_ORIG, BY_PROTOCOL_AND_DESTINATION_PORT)
            }
            Self::From(direction, address) => {
                message.nest(direction, |tuple| {
                    tuple.nest(CTA_TUPLE_IP, |ip| ip.put(CTA_IP_SRC[0], &address.octets()));
                });
                (direction, BY_SOURCE)
            }
        };
        let kind = match direction {
            CTA_TUPLE_REPLY => CTA_FILTER_REPLY_FLAGS,
            _ => CTA_FILTER_ORIG_FLAGS,
        };
        message.nest(CTA_FILTER, |filter| filter.put_u32(kind, flags));
    }
}

fn forget_chosen(
    socket: &mut Socket,
    family: u8,
    asked: Asked,
    choose: impl Fn(Attributes<'_>) -> Option<Connection>,
) -> Result<usize, Error> {
    let found = socket.query(
        SUBSYSTEM << 8 | IPCTNL_MSG_CT_GET,
        true,
        ("list", "tracked connections"),
        |message| {
            message.raw(&generic_header(family));
            asked.write(message);
        },
        |reply| choose(reply.attributes(GENERIC_HEADER)),
    )?;
    for connections in found.chunks(BATCH) {
        delete(socket, family, connections)?;
    }
    Ok(found.len())
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
    // A listing costs the same whether there are any.
    if count(socket)? == 0 {
        return Ok(());
    }
    for family in [octet(libc::AF_INET), octet(libc::AF_INET6)] {
        let is_of_family = |address: &IpAddr| crate::address::family_of(*address) == family;
        if !addresses.iter().any(is_of_family) {
            continue;
        }
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

    /// One that one of these addresses has begun, or answers.
    fn of_addresses(attributes: Attributes<'_>, addresses: &HashSet<IpAddr>) -> Option<Self> {
        let is_from = |direction| {
            let source = source_of(attributes, direction);
            source.is_some_and(|source| addresses.contains(&source))
        };
        (is_from(CTA_TUPLE_ORIG) || is_from(CTA_TUPLE_REPLY)).then(|| Self::of(attributes))?
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

/// Where the packets of a direction come from.
fn source_of(attributes: Attributes<'_>, direction: u16) -> Option<IpAddr> {
    let ip = attributes.nested(direction).nested(CTA_TUPLE_IP);
    let mut found = CTA_IP_SRC.into_iter().filter_map(|kind| ip.find(kind));
    found.next().and_then(attribute::address_of)
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
