//! Rules that choose a routing table, and the one route that such a table of ours has. They need
//! [`crate::interface::REQUIRED_CAPABILITIES`].
//!
//! Rules are found again by their table, so whoever makes rules takes tables that nobody else uses.

use std::time::Duration;

use ipnet::IpNet;

use crate::{
    Error,
    interface::InterfaceIndex,
    netlink::{CREATE, REPLACE, Request, Socket, attribute},
    number::octet,
    route::RTPROT_KERNEL,
};

const FRA_DST: u16 = 1;
const FRA_SRC: u16 = 2;
const FRA_IIFNAME: u16 = 3;
const FRA_GOTO: u16 = 4;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
const FRA_FWMASK: u16 = 16;
const FRA_PROTOCOL: u16 = 21;
const FRA_IP_PROTO: u16 = 22;
const FRA_DPORT_RANGE: u16 = 24;
const FR_ACT_TO_TBL: u8 = 1;
const FR_ACT_GOTO: u8 = 2;
const FR_ACT_NOP: u8 = 3;
/// Where packets come from, for routing rules, that the host sends itself.
const LOOPBACK: &str = "lo";
const RTN_LOCAL: u8 = 2;
const RTN_PROHIBIT: u8 = 8;

/// The relay's table by which nothing leaves: rules that lead to it say what may leave only with its mark.
pub const TABLE_PROHIBITED: u32 = 53_571;
/// Of those rules, the ones that say exactly what leaves only inside TLS. Further ones prohibit more, so that nothing
/// leaves that nobody has looked at.
pub const PRIORITY_PROHIBITED: u32 = 5301;

/// An IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Version {
    /// Both.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    fn number(self) -> u8 {
        match self {
            Self::V4 => octet(libc::AF_INET),
            Self::V6 => octet(libc::AF_INET6),
        }
    }
}

/// What becomes of packets that meet a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// They are routed by its table, if that knows their destination.
    LookUp,
    /// The first rule of this priority, which is greater, is next. While there is none, the next one is.
    GoTo(u32),
    /// The next rule is next.
    Nothing,
}

/// A rule: what becomes of packets that meet all of it. Without another action they are routed by a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutingRule {
    /// Which version it is for.
    pub version: Version,
    /// Lower ones come first; the main table's is 32766.
    pub priority: u32,
    /// Table to look in; for another action, whose rule it is.
    pub table: u32,
    /// What becomes of packets that meet it.
    pub action: Action,
    /// Whether it is about those packets alone that the host sends itself.
    pub is_own: bool,
    /// Source.
    pub from: Option<IpNet>,
    /// Destination.
    pub to: Option<IpNet>,
    /// Number of the protocol above IP.
    pub protocol: Option<u8>,
    /// First and last port of the destination; the kernel takes 1 to 65534.
    pub ports: Option<(u16, u16)>,
    /// Bits of the mark, and which of them count.
    pub mark: Option<(u32, u32)>,
}

impl RoutingRule {
    /// A rule that meets every packet.
    #[must_use]
    pub fn new(version: Version, priority: u32, table: u32) -> Self {
        Self {
            version,
            priority,
            table,
            action: Action::LookUp,
            is_own: false,
            from: None,
            to: None,
            protocol: None,
            ports: None,
            mark: None,
        }
    }

    /// Adds the rule. One that is there already is refused.
    pub fn add(&self, request: &mut Request) {
        let kind = (libc::RTM_NEWRULE, CREATE);
        // As of routes: systemd-networkd deletes all others that it doesn't know.
        self.write(request, kind, "add", Some(RTPROT_KERNEL));
    }

    /// Deletes the rule, which must be there, whoever made it.
    pub fn delete(&self, request: &mut Request) {
        self.write(request, (libc::RTM_DELRULE, 0), "delete", None);
    }

    fn write(
        &self,
        request: &mut Request,
        kind: (u16, u16),
        operation: &'static str,
        maker: Option<u8>,
    ) {
        let object = format!("routing rule {} for table {}", self.priority, self.table);
        let (action, target) = match self.action {
            Action::LookUp => (FR_ACT_TO_TBL, None),
            Action::GoTo(priority) => (FR_ACT_GOTO, Some(priority)),
            Action::Nothing => (FR_ACT_NOP, None),
        };
        request.message(kind, operation, object, |message| {
            let length = |prefix: Option<IpNet>| prefix.map_or(0, |prefix| prefix.prefix_len());
            message.raw(&[
                self.version.number(),
                length(self.to),
                length(self.from),
                0,
                0,
                0,
                0,
                action,
                0,
                0,
                0,
                0,
            ]);
            if let Some(prefix) = self.to {
                message.put_address(FRA_DST, prefix.network());
            }
            if let Some(prefix) = self.from {
                message.put_address(FRA_SRC, prefix.network());
            }
            message.put_u32(FRA_PRIORITY, self.priority);
            message.put_u32(FRA_TABLE, self.table);
            if let Some(priority) = target {
                message.put_u32(FRA_GOTO, priority);
            }
            if self.is_own {
                message.put_text(FRA_IIFNAME, LOOPBACK);
            }
            if let Some((bits, mask)) = self.mark {
                message.put_u32(FRA_FWMARK, bits);
                message.put_u32(FRA_FWMASK, mask);
            }
            if let Some(protocol) = self.protocol {
                message.put_u8(FRA_IP_PROTO, protocol);
            }
            if let Some((first, last)) = self.ports {
                let ends = [first.to_ne_bytes(), last.to_ne_bytes()];
                message.put(FRA_DPORT_RANGE, ends.as_flattened());
            }
            if let Some(maker) = maker {
                message.put_u8(FRA_PROTOCOL, maker);
            }
        });
    }
}

/// The rules of both versions that lead to a table. A kernel without IPv6 has none of that.
///
/// # Errors
/// The kernel refuses.
pub fn list(socket: &mut Socket, table: u32) -> Result<Vec<RoutingRule>, Error> {
    list_chosen(socket, |found| found == table)
}

/// All rules of both versions that look up, go on or do nothing.
///
/// # Errors
/// The kernel refuses.
pub fn list_all(socket: &mut Socket) -> Result<Vec<RoutingRule>, Error> {
    list_chosen(socket, |_| true)
}

/// Those whose table is chosen.
fn list_chosen(
    socket: &mut Socket,
    is_chosen: impl Fn(u32) -> bool,
) -> Result<Vec<RoutingRule>, Error> {
    let mut rules = list_version(socket, Version::V4, &is_chosen)?;
    match list_version(socket, Version::V6, &is_chosen) {
        Err(error) if error.errno() == Some(libc::EAFNOSUPPORT) => {}
        listed => rules.extend(listed?),
    }
    Ok(rules)
}

fn list_version(
    socket: &mut Socket,
    version: Version,
    is_chosen: impl Fn(u32) -> bool,
) -> Result<Vec<RoutingRule>, Error> {
    socket.query(
        libc::RTM_GETRULE,
        true,
        ("list", "routing rules"),
        |message| message.raw(&[version.number(), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        |reply| {
            let [_, to_length, from_length, _, _, _, _, action] =
                *reply.payload.first_chunk::<8>()?;
            let attributes = reply.attributes(12);
            let number = |kind| attributes.find(kind).and_then(attribute::u32_of);
            let prefix = |kind, length| {
                let address = attributes.find(kind).and_then(attribute::address_of)?;
                IpNet::new(address, length).ok()
            };
            let action = match action {
                FR_ACT_TO_TBL => Action::LookUp,
                FR_ACT_GOTO => Action::GoTo(number(FRA_GOTO)?),
                FR_ACT_NOP => Action::Nothing,
                _ => return None,
            };
            let interface = attributes.find(FRA_IIFNAME);
            let table = number(FRA_TABLE)?;
            is_chosen(table).then(|| RoutingRule {
                version,
                priority: number(FRA_PRIORITY).unwrap_or(0),
                table,
                action,
                is_own: interface.and_then(|name| name.strip_suffix(b"\0"))
                    == Some(LOOPBACK.as_bytes()),
                from: prefix(FRA_SRC, from_length),
                to: prefix(FRA_DST, to_length),
                protocol: attributes
                    .find(FRA_IP_PROTO)
                    .and_then(|value| value.first().copied()),
                ports: attributes.find(FRA_DPORT_RANGE).and_then(|value| {
                    let [a, b, c, d] = *value.first_chunk::<4>()?;
                    Some((u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])))
                }),
                mark: number(FRA_FWMASK).map(|mask| (number(FRA_FWMARK).unwrap_or(0), mask)),
            })
        },
    )
}

/// Tells that rules of one namespace have changed.
#[derive(Debug)]
pub struct Watcher(Socket);

impl Watcher {
    /// Watches the namespace that the thread is in.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new() -> Result<Self, Error> {
        const RTNLGRP_IPV4_RULE: u32 = 8;
        const RTNLGRP_IPV6_RULE: u32 = 19;
        let mut socket = Socket::route()?;
        for group in [RTNLGRP_IPV4_RULE, RTNLGRP_IPV6_RULE] {
            socket
                .join(group)
                .map_err(|source| Error::system("watch", "routing rules", source))?;
        }
        Ok(Self(socket))
    }

    /// Whether any have changed, or may have, waiting at most this long.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn changed(&mut self, at_most: Duration) -> Result<bool, Error> {
        match self.0.listen(at_most, |_| Some(())) {
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(true),
            changed => changed
                .map(|changed| !changed.is_empty())
                .map_err(|source| Error::system("watch", "routing rules", source)),
        }
    }
}

/// What a table's only route does with every packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The host takes it as its own, coming in by this interface, which is the loopback.
    Local(InterfaceIndex),
    /// It is refused, with an ICMP error.
    Prohibited,
}

/// Adds or replaces the default route of a table.
pub fn set_default(request: &mut Request, version: Version, table: u32, fate: Fate) {
    let object = format!("default route of table {table}");
    request.message((libc::RTM_NEWROUTE, REPLACE), "add", object, |message| {
        let (route_type, scope) = match fate {
            Fate::Local(_) => (RTN_LOCAL, libc::RT_SCOPE_HOST),
            Fate::Prohibited => (RTN_PROHIBIT, libc::RT_SCOPE_UNIVERSE),
        };
        let header = [
            version.number(),
            0,
            0,
            0,
            libc::RT_TABLE_UNSPEC,
            RTPROT_KERNEL,
            scope,
            route_type,
            0,
            0,
            0,
            0,
        ];
        message.raw(&header);
        message.put_u32(libc::RTA_TABLE, table);
        if let Fate::Local(loopback) = fate {
            message.put_u32(libc::RTA_OIF, loopback.0);
        }
    });
}

/// Whether a table has a route. The kernel looks at that table alone, however many routes others have.
///
/// # Errors
/// The kernel refuses.
pub fn has_route(version: Version, table: u32) -> Result<bool, Error> {
    let object = format!("routes of table {table}");
    let mut socket = Socket::route()?;
    socket
        .filter_dumps()
        .map_err(|source| Error::system("list", &object, source))?;
    let found = socket.query(
        libc::RTM_GETROUTE,
        true,
        ("list", &object),
        |message| {
            message.raw(&[version.number(), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            message.put_u32(libc::RTA_TABLE, table);
        },
        |_| Some(()),
    );
    match found {
        // Nobody has ever had such a table.
        Err(error) if error.errno() == Some(libc::ENOENT) => Ok(false),
        found => Ok(!found?.is_empty()),
    }
}

/// Deletes the default route of a table, which must be there.
pub fn delete_default(request: &mut Request, version: Version, table: u32) {
    let object = format!("default route of table {table}");
    request.message((libc::RTM_DELROUTE, 0), "delete", object, |message| {
        let mut header = [0; 12];
        header[0] = version.number();
        header[6] = libc::RT_SCOPE_NOWHERE;
        message.raw(&header);
        message.put_u32(libc::RTA_TABLE, table);
    });
}
