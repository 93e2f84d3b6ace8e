//! Routes: of the main table, and what others have. They need [`crate::interface::REQUIRED_CAPABILITIES`].

mod learned;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use self::learned::interfaces_of_learned_defaults;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::{
    Error,
    address::family_of,
    interface::InterfaceIndex,
    netlink::{
        CHANGE, CREATE, REPLACE, Reply, Request, Socket,
        attribute::{self, Attributes},
    },
    number::octet,
};

const RTNH_F_ONLINK: u32 = 4;
/// In a header's flags: not a route, but what the kernel has noted of one destination, such as the MTU of a path.
const RTM_F_CLONED: u32 = 0x200;
const RTAX_MTU: u16 = 2;
/// Who has made routes for the kernel's own addresses and multicast, and says to have made ours of no interface: systemd-networkd, when it
/// starts, deletes all others that it doesn't know.
pub(crate) const RTPROT_KERNEL: u8 = 2;
/// Default routes learned from router advertisements.
const RTPROT_RA: u8 = 9;

/// What happens to packets for a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// They leave by an interface; the destination itself is the neighbour.
    Interface(InterfaceIndex),
    /// They go to a gateway, which is a neighbour whatever the interface's addresses say.
    Gateway {
        /// Interface that the gateway is reached by.
        interface: InterfaceIndex,
        /// Its address.
        gateway: IpAddr,
        /// Address that packets of this host get as source.
        source: Option<IpAddr>,
    },
    /// They are refused with an ICMP error.
    Unreachable,
}

/// A route of the main table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Destination.
    pub destination: IpNet,
    /// What happens to the packets.
    pub target: Target,
    /// Of two routes to the same destination, that of the lower metric counts.
    pub metric: Option<u32>,
    /// Largest packets that go this way, if less than the interface takes.
    pub mtu: Option<u32>,
}

impl Route {
    /// A route to a destination.
    #[must_use]
    pub fn new(destination: IpNet, target: Target) -> Self {
        Self {
            destination,
            target,
            metric: None,
            mtu: None,
        }
    }

    /// The default route of a family.
    #[must_use]
    pub fn default_via(interface: InterfaceIndex, gateway: IpAddr, source: Option<IpAddr>) -> Self {
        let destination = match gateway {
            IpAddr::V4(_) => Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0).into(),
            IpAddr::V6(_) => Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        let target = Target::Gateway {
            interface,
            gateway,
            source,
        };
        Self::new(destination, target)
    }

    /// Adds or replaces the route.
    pub fn add(&self, request: &mut Request) {
        self.write(request, (libc::RTM_NEWROUTE, REPLACE), "add", self.maker());
    }

    /// Adds the route, which must not be there yet.
    pub fn create(&self, request: &mut Request) {
        self.write(request, (libc::RTM_NEWROUTE, CREATE), "add", self.maker());
    }

    /// Deletes the route.
    pub fn delete(&self, request: &mut Request) {
        let maker = match self.target {
            // Former versions didn't say so.
            Target::Unreachable => libc::RTPROT_UNSPEC,
            Target::Interface(_) | Target::Gateway { .. } => self.maker(),
        };
        self.write(request, (libc::RTM_DELROUTE, CHANGE), "delete", maker);
    }

    fn maker(&self) -> u8 {
        match self.target {
            Target::Unreachable => RTPROT_KERNEL,
            Target::Interface(_) | Target::Gateway { .. } => libc::RTPROT_STATIC,
        }
    }

    fn write(&self, request: &mut Request, kind: (u16, u16), operation: &'static str, maker: u8) {
        let object = format!("route {}", self.destination);
        request.message(kind, operation, object, |message| {
            let (route_type, scope) = match (self.target, self.destination) {
                (Target::Unreachable, _) => (libc::RTN_UNREACHABLE, libc::RT_SCOPE_UNIVERSE),
                (Target::Interface(_), IpNet::V4(_)) => (libc::RTN_UNICAST, libc::RT_SCOPE_LINK),
                _ => (libc::RTN_UNICAST, libc::RT_SCOPE_UNIVERSE),
            };
            let mut header = [
                family_of(self.destination.addr()),
                self.destination.prefix_len(),
                0,
                0,
                libc::RT_TABLE_MAIN,
                maker,
                scope,
                route_type,
                0,
                0,
                0,
                0,
            ];
            if matches!(
                self.target,
                Target::Gateway {
                    gateway: IpAddr::V4(_),
                    ..
                }
            ) {
                header[8..].copy_from_slice(&RTNH_F_ONLINK.to_ne_bytes());
            }
            message.raw(&header);
            message.put_address(libc::RTA_DST, self.destination.addr());
            match self.target {
                Target::Unreachable => {}
                Target::Interface(interface) => message.put_u32(libc::RTA_OIF, interface.0),
                Target::Gateway {
                    interface,
                    gateway,
                    source,
                } => {
                    message.put_u32(libc::RTA_OIF, interface.0);
                    message.put_address(libc::RTA_GATEWAY, gateway);
                    if let Some(source) = source {
                        message.put_address(libc::RTA_PREFSRC, source);
                    }
                }
            }
            if let Some(metric) = self.metric {
                message.put_u32(libc::RTA_PRIORITY, metric);
            }
            if let Some(mtu) = self.mtu {
                message.nest(libc::RTA_METRICS, |metrics| metrics.put_u32(RTAX_MTU, mtu));
            }
        });
    }
}

/// Deletes the IPv6 multicast route that the kernel gives every interface that comes up. With
/// thousands of interfaces these form one list, which each of them lengthens for all look-ups and
/// events; an interface that needs no multicast is better off without.
pub fn delete_multicast(request: &mut Request, interface: InterfaceIndex) {
    let object = format!("multicast route of interface {interface}");
    request.message((libc::RTM_DELROUTE, CHANGE), "delete", object, |message| {
        const MULTICAST_PREFIX_LEN: u8 = 8;
        let family = octet(libc::AF_INET6);
        let table = libc::RT_TABLE_LOCAL;
        let mut header = [0; 12];
        header[..5].copy_from_slice(&[family, MULTICAST_PREFIX_LEN, 0, 0, table]);
        message.raw(&header);
        let multicast = Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0);
        message.put_address(libc::RTA_DST, multicast.into());
        message.put_u32(libc::RTA_OIF, interface.0);
    });
}

/// A route as the kernel lists it, by one of its next hops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Destination; a prefix of length 0 is the default route.
    pub destination: IpNet,
    /// Interface, if it leads out by one.
    pub interface: Option<InterfaceIndex>,
    /// Gateway, if it has one.
    pub gateway: Option<IpAddr>,
    /// Of two routes to the same destination, that of the lower metric counts.
    pub metric: Option<u32>,
    /// Whether it refuses packets.
    pub unreachable: bool,
    /// Whether it comes from a router advertisement.
    pub by_router_advertisement: bool,
}

/// The routes of the main table in the socket's namespace, both families. One with several next hops is there once for each.
///
/// # Errors
/// The kernel refuses.
pub fn list(socket: &mut Socket) -> Result<Vec<Listed>, Error> {
    list_table(socket, u32::from(libc::RT_TABLE_MAIN))
}

/// As [`list`], of a table by its number. One that has no routes is one that there isn't.
///
/// # Errors
/// The kernel refuses.
pub fn list_table(socket: &mut Socket, table: u32) -> Result<Vec<Listed>, Error> {
    let mut routes = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let found = socket.query(
            libc::RTM_GETROUTE,
            true,
            ("list", "routes"),
            |message| {
                let mut header = [0; 12];
                header[0] = octet(family);
                message.raw(&header);
            },
            |reply| read(reply, family, table),
        )?;
        routes.extend(found.into_iter().flatten());
    }
    Ok(routes)
}

/// A route of this table, by each of its next hops.
fn read(reply: Reply<'_>, family: i32, table: u32) -> Option<Vec<Listed>> {
    let [its, prefix_len, _, _, low, protocol, _, route_type] = *reply.payload.first_chunk()?;
    let flags = reply.payload.get(8..12).and_then(attribute::u32_of)?;
    let attributes = reply.attributes(12);
    // The header has room for numbers up to 255 alone.
    let number = attributes.find(libc::RTA_TABLE);
    let number = number.and_then(attribute::u32_of);
    // Asked for a family that it doesn't know, the kernel lists those that it does.
    if its != octet(family)
        || number.unwrap_or(u32::from(low)) != table
        || flags & RTM_F_CLONED != 0
    {
        return None;
    }
    let unspecified = if family == libc::AF_INET {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED)
    } else {
        IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    };
    let destination = attributes
        .find(libc::RTA_DST)
        .and_then(attribute::address_of);
    let interface = attributes.find(libc::RTA_OIF).and_then(attribute::u32_of);
    let only = Listed {
        destination: IpNet::new(destination.unwrap_or(unspecified), prefix_len).ok()?,
        interface: interface.map(InterfaceIndex),
        gateway: gateway_of(attributes),
        metric: attributes
            .find(libc::RTA_PRIORITY)
            .and_then(attribute::u32_of),
        unreachable: route_type == libc::RTN_UNREACHABLE,
        by_router_advertisement: protocol == RTPROT_RA,
    };
    let Some(hops) = attributes.find(libc::RTA_MULTIPATH) else {
        return Some(vec![only]);
    };
    let of_hop = |(interface, gateway)| Listed {
        interface: Some(interface),
        gateway,
        ..only
    };
    Some(next_hops(hops).into_iter().map(of_hop).collect())
}

/// The interface and the gateway of each `struct rtnexthop`, which has its attributes behind it.
fn next_hops(mut rest: &[u8]) -> Vec<(InterfaceIndex, Option<IpAddr>)> {
    const HEADER: usize = 8;
    let mut hops = Vec::new();
    while let Some(header) = rest.first_chunk::<HEADER>() {
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let (Some(interface), Some(attributes)) =
            (attribute::u32_of(&header[4..]), rest.get(HEADER..length))
        else {
            break;
        };
        let gateway = gateway_of(Attributes::new(attributes));
        hops.push((InterfaceIndex(interface), gateway));
        let padded = length.next_multiple_of(4);
        rest = rest.get(padded..).unwrap_or_default();
    }
    hops
}

fn gateway_of(attributes: Attributes<'_>) -> Option<IpAddr> {
    attributes
        .find(libc::RTA_GATEWAY)
        .and_then(attribute::address_of)
}

/// The interface by which the socket's namespace would send packets to an address; `None` if it
/// has no route, or one that refuses.
///
/// # Errors
/// The kernel refuses.
pub fn lookup(socket: &mut Socket, address: IpAddr) -> Result<Option<InterfaceIndex>, Error> {
    let object = format!("route to {address}");
    let destination = IpNet::from(address);
    let found = socket.query(
        libc::RTM_GETROUTE,
        false,
        ("look up", &object),
        |message| {
            let mut header = [0; 12];
            header[0] = family_of(address);
            header[1] = destination.prefix_len();
            message.raw(&header);
            message.put_address(libc::RTA_DST, address);
        },
        |reply| {
            let interface = reply.attributes(12).find(libc::RTA_OIF);
            let reachable = reply.payload.get(7) == Some(&libc::RTN_UNICAST);
            interface.and_then(attribute::u32_of).filter(|_| reachable)
        },
    );
    match found {
        Err(error) if matches!(error.errno(), Some(libc::EHOSTUNREACH | libc::ENETUNREACH)) => {
            Ok(None)
        }
        other => Ok(other?.into_iter().next().map(InterfaceIndex)),
    }
}
