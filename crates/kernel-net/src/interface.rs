//! Network interfaces: pairs, bridges, and settings of any of them.
//!
//! Everything that one interface needs goes into one [`Change`], because each change of an interface
//! that is up costs the kernel a walk over its tables (see `docs/decisions/0003-nf-tables-encoder.md`
//! for why we write the messages ourselves).

mod child;
mod elsewhere;
mod families;
mod group;

pub use child::{ChildDevice, ChildInterface};
pub use elsewhere::{
    NamespaceNumber, delete_children, delete_elsewhere, delete_taps_beyond,
    delete_with_taps_beyond, find_children, list_in,
};
pub use group::{
    DELETED_AT_ONCE, FIRST_GROUP, delete_each, delete_together, free_group, leave_group,
};

use std::{
    fmt,
    os::fd::{AsRawFd, BorrowedFd},
    time::Duration,
};

use crate::{
    Error,
    capability::Required,
    netlink::{
        CHANGE, CREATE, Reply, Request, Socket,
        attribute::{self, Attributes, Writer},
    },
};

/// Capabilities for interfaces, addresses, routes and neighbours.
pub const REQUIRED_CAPABILITIES: Required = Required {
    operations: "interface",
    capabilities: &["CAP_NET_ADMIN"],
    reason: "create and configure interfaces, addresses, routes and neighbours",
};

const VETH_INFO_PEER: u16 = 1;
const IFLA_NETKIT_PEER_INFO: u16 = 1;
const IFLA_NETKIT_POLICY: u16 = 3;
const IFLA_NETKIT_PEER_POLICY: u16 = 4;
const IFLA_NETKIT_MODE: u16 = 5;
/// What becomes of packets that no program of the pair itself judges: they go on to the other end.
const NETKIT_PASS: u32 = 0;
/// The ends carry Ethernet frames.
const NETKIT_L2: u32 = 0;
const IF_OPER_DORMANT: u8 = 5;
const RTEXT_FILTER_SKIP_STATS: u32 = 1 << 3;
const IFLA_TUN_OWNER: u16 = 1;
const IFLA_TUN_GROUP: u16 = 2;
const IFLA_TUN_TYPE: u16 = 3;
const IFLA_TUN_VNET_HDR: u16 = 5;
const IFLA_TUN_PERSIST: u16 = 6;
const IFLA_TUN_MULTI_QUEUE: u16 = 7;
const IFLA_TUN_NUM_QUEUES: u16 = 8;
const IFLA_TUN_NUM_DISABLED_QUEUES: u16 = 9;
const TUN_TYPE_TAP: u8 = 2;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// Number of an interface in its namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InterfaceIndex(pub u32);

impl InterfaceIndex {
    /// The loopback interface of every namespace.
    pub const LOOPBACK: Self = Self(1);
}

impl fmt::Display for InterfaceIndex {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "#{}", self.0)
    }
}

/// What makes a pair of interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairDevice {
    /// veth, which every kernel has.
    Veth,
    /// netkit in its Ethernet mode (Linux 6.7, with addresses of our choice 6.12). The end in the socket's
    /// namespace is the primary one, by which alone its settings change.
    Netkit,
}

impl PairDevice {
    /// As the kernel names it.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::Veth => "veth",
            Self::Netkit => "netkit",
        }
    }
}

/// A pair of Ethernet interfaces, one in the socket's namespace and one in another.
#[derive(Clone, Copy, Debug)]
pub struct InterfacePair<'a> {
    /// What it is made of.
    pub device: PairDevice,
    /// Name of the end in the socket's namespace.
    pub name: &'a str,
    /// Number that this end gets; the kernel chooses one if it is 0.
    pub index: InterfaceIndex,
    /// Name of the other end.
    pub peer_name: &'a str,
    /// Namespace of the other end, where it is made; moving it there would cost milliseconds.
    pub peer_namespace: BorrowedFd<'a>,
    /// Ethernet address of the end in the socket's namespace.
    pub mac: Mac,
    /// Ethernet address of the other end.
    pub peer_mac: Mac,
    /// MTU of both ends.
    pub mtu: u32,
    /// The end that starts as dormant, if any: IPv6 then takes no notice of it when it is raised,
    /// only when its carrier is reported soon after. Otherwise each of the two events walks the whole
    /// IPv6 routing table of that namespace (`rt6_sync_up`).
    pub dormant: Option<End>,
}

/// One end of a [`InterfacePair`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// That in the socket's namespace.
    Here,
    /// The other one.
    Peer,
}

impl InterfacePair<'_> {
    /// Creates the pair. Both ends are down.
    pub fn create(&self, request: &mut Request) {
        let kind = self.device.kind();
        let object = format!("{kind} pair {} and {}", self.name, self.peer_name);
        request.message((libc::RTM_NEWLINK, CREATE), "create", object, |message| {
            message.raw(&header(self.index.0, None));
            self.write_end(message, End::Here);
            message.nest(libc::IFLA_LINKINFO, |info| {
                info.put_text(libc::IFLA_INFO_KIND, kind);
                info.nest(libc::IFLA_INFO_DATA, |data| self.write_data(data));
            });
        });
    }

    fn write_data(&self, data: &mut Writer<'_>) {
        let peer = match self.device {
            PairDevice::Veth => VETH_INFO_PEER,
            PairDevice::Netkit => {
                data.put_u32(IFLA_NETKIT_MODE, NETKIT_L2);
                data.put_u32(IFLA_NETKIT_POLICY, NETKIT_PASS);
                data.put_u32(IFLA_NETKIT_PEER_POLICY, NETKIT_PASS);
                IFLA_NETKIT_PEER_INFO
            }
        };
        data.nest(peer, |peer| {
            peer.raw(&header(0, None));
            self.write_end(peer, End::Peer);
            let namespace = self.peer_namespace.as_raw_fd().cast_unsigned();
            peer.put_u32(libc::IFLA_NET_NS_FD, namespace);
        });
    }

    fn write_end(&self, message: &mut Writer<'_>, end: End) {
        let (name, mac) = match end {
            End::Here => (self.name, self.mac),
            End::Peer => (self.peer_name, self.peer_mac),
        };
        message.put_text(libc::IFLA_IFNAME, name);
        message.put(libc::IFLA_ADDRESS, &mac);
        message.put_u32(libc::IFLA_MTU, self.mtu);
        if self.dormant == Some(end) {
            message.put_u8(libc::IFLA_OPERSTATE, IF_OPER_DORMANT);
        }
    }
}

/// Creates a bridge without ports, which stays down until a [`Change`] raises it; without a MAC it gets a random one.
pub fn create_bridge(request: &mut Request, name: &str, mac: Option<Mac>) {
    let object = format!("bridge {name}");
    request.message((libc::RTM_NEWLINK, CREATE), "create", object, |message| {
        message.raw(&header(0, None));
        message.put_text(libc::IFLA_IFNAME, name);
        if let Some(mac) = mac {
            message.put(libc::IFLA_ADDRESS, &mac);
        }
        message.nest(libc::IFLA_LINKINFO, |info| {
            info.put_text(libc::IFLA_INFO_KIND, "bridge")
        });
    });
}

/// Deletes an interface by name.
pub fn delete(request: &mut Request, name: &str) {
    let object = format!("interface {name}");
    request.message((libc::RTM_DELLINK, CHANGE), "delete", object, |message| {
        message.raw(&header(0, None));
        message.put_text(libc::IFLA_IFNAME, name);
    });
}

/// Adds the deletion of an interface by its number; `name` is for errors.
pub fn delete_by_index(request: &mut Request, name: &str, index: InterfaceIndex) {
    let object = format!("interface {name}");
    request.message((libc::RTM_DELLINK, CHANGE), "delete", object, |message| {
        message.raw(&header(index.0, None));
    });
}

/// Settings of an interface to be changed together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Change<'a> {
    /// Name in errors.
    pub name: &'a str,
    /// The interface by number; by `name` if absent.
    pub index: Option<InterfaceIndex>,
    /// New name.
    pub rename: Option<&'a str>,
    /// Free text that tells whose it is.
    pub alias: Option<&'a str>,
    /// Ethernet address.
    pub mac: Option<Mac>,
    /// MTU in bytes.
    pub mtu: Option<u32>,
    /// Whether IPv4 packets that arrive here may be forwarded; avoids the sysctl of the same effect.
    pub ipv4_forwarding: Option<bool>,
    /// Has ARP hear only those senders that routes lead to by this interface.
    pub arp_filter: bool,
    /// Keeps the kernel from making IPv6 addresses of its own.
    pub no_generated_addresses: bool,
    /// Whether neighbours are known without being asked for.
    pub no_arp: Option<bool>,
    /// Number of the group that it is in, by which many can be deleted at once.
    pub group: Option<u32>,
    /// Bridge that it becomes a port of.
    pub master: Option<InterfaceIndex>,
    /// Packets that it may hold before they are sent; of a TAP, until they are read.
    pub queue_length: Option<u32>,
    /// Raises or lowers the interface.
    pub up: Option<bool>,
}

impl Change<'_> {
    /// Makes the change.
    pub fn apply(&self, request: &mut Request) {
        let object = format!("interface {}", self.name);
        request.message((libc::RTM_SETLINK, CHANGE), "change", object, |message| {
            message.raw(&self.header());
            if let Some(group) = self.group {
                message.put_u32(libc::IFLA_GROUP, group);
            }
            if let Some(master) = self.master {
                message.put_u32(libc::IFLA_MASTER, master.0);
            }
            if let Some(length) = self.queue_length {
                message.put_u32(libc::IFLA_TXQLEN, length);
            }
            if let Some(name) = self.rename {
                message.put_text(libc::IFLA_IFNAME, name);
            } else if self.index.is_none() {
                message.put_text(libc::IFLA_IFNAME, self.name);
            }
            if let Some(alias) = self.alias {
                message.put(libc::IFLA_IFALIAS, alias.as_bytes());
            }
            if let Some(mac) = self.mac {
                message.put(libc::IFLA_ADDRESS, &mac);
            }
            if let Some(mtu) = self.mtu {
                message.put_u32(libc::IFLA_MTU, mtu);
            }
            if self.has_families() {
                message.nest(libc::IFLA_AF_SPEC, |families| self.write_families(families));
            }
        });
    }

    fn header(&self) -> [u8; 16] {
        let mut header = header(self.index.map_or(0, |index| index.0), self.up);
        if let Some(no_arp) = self.no_arp {
            let flag = libc::IFF_NOARP.cast_unsigned().to_ne_bytes();
            let (flags, mask) = header[8..16].split_at_mut(4);
            for (place, bits) in (0..4).zip(flag) {
                mask[place] |= bits;
                flags[place] |= if no_arp { bits } else { 0 };
            }
        }
        header
    }
}

/// An interface as the kernel describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Number in its namespace.
    pub index: InterfaceIndex,
    /// Name.
    pub name: String,
    /// Free text that tells whose it is.
    pub alias: Option<String>,
    /// Driver: `veth`, `netkit`, `macvlan`, `tun`, `bridge`.
    pub kind: Option<String>,
    /// Ethernet address.
    pub mac: Option<Mac>,
    /// Whether it is an Ethernet interface, and not the loopback, a tunnel or the like.
    pub is_ethernet: bool,
    /// What queues packets to be sent: `fq`, `mq`, `noqueue`.
    pub queue: Option<String>,
    /// MTU in bytes.
    pub mtu: u32,
    /// Number of the group that it is in; 0 unless somebody chose another.
    pub group: u32,
    /// The bridge or bond that it is a port of.
    pub master: Option<InterfaceIndex>,
    /// The interface that it is built on, as a VLAN is, where that is in the same namespace.
    pub lower: Option<InterfaceIndex>,
    /// Number of a pair's other end in whatever namespace that is.
    pub peer: Option<InterfaceIndex>,
    /// The namespace of the other end, or of the interface that it is built on, where that is another one.
    pub peer_namespace: Option<NamespaceNumber>,
    /// Whether it was raised.
    pub is_up: bool,
    /// Whether the kernel may give it IPv6 addresses of its own (`addrgenmode` other than `none`).
    pub makes_addresses: bool,
    /// Whether the other end is there: for a TAP, a process that has it open.
    pub has_carrier: bool,
    /// Traffic, as the interface sees it.
    pub traffic: Traffic,
    /// What a TUN or TAP says of itself.
    pub tun: Option<Tun>,
}

impl Interface {
    /// Whether it is a TUN or TAP that a process has open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        // Whoever has a queue open may have switched it or the carrier off.
        self.tun
            .is_some_and(|tun| tun.queues > 0 || self.has_carrier)
    }
}

/// Counters of an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Packets that it received.
    pub received_packets: u64,
    /// Packets that it sent.
    pub sent_packets: u64,
    /// Bytes that it received.
    pub received_bytes: u64,
    /// Bytes that it sent.
    pub sent_bytes: u64,
    /// Packets that it dropped on the way in.
    pub received_dropped: u64,
    /// Packets that it dropped on the way out.
    pub sent_dropped: u64,
}

/// What a TUN or TAP says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tun {
    /// Whether it carries Ethernet frames.
    pub is_tap: bool,
    /// Whether it stays when nobody has it open.
    pub is_persistent: bool,
    /// Whether it may have several queues.
    pub is_multi_queue: bool,
    /// Whether frames carry virtio-net headers.
    pub has_vnet_header: bool,
    /// User that may open it.
    pub owner: Option<u32>,
    /// Group that may open it.
    pub group: Option<u32>,
    /// Open queues. Only multi-queue devices tell.
    pub queues: u32,
}

/// All interfaces in the socket's namespace, without their traffic.
///
/// # Errors
/// The kernel refuses.
pub fn list(socket: &mut Socket) -> Result<Vec<Interface>, Error> {
    list_by(socket, "interfaces", |message| {
        message.raw(&header(0, None));
        message.put_u32(libc::IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS);
    })
}

/// All interfaces in the socket's namespace, with their traffic.
///
/// # Errors
/// The kernel refuses.
pub fn list_with_traffic(socket: &mut Socket) -> Result<Vec<Interface>, Error> {
    list_by(socket, "interfaces", |message| {
        message.raw(&header(0, None))
    })
}

/// One interface by name; `None` if there is none.
///
/// # Errors
/// The kernel refuses.
pub fn find(socket: &mut Socket, name: &str) -> Result<Option<Interface>, Error> {
    look_up(socket, name, |message| {
        message.raw(&header(0, None));
        message.put_text(libc::IFLA_IFNAME, name);
        message.put_u32(libc::IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS);
    })
}

/// One interface by name, with its traffic; `None` if there is none.
///
/// # Errors
/// The kernel refuses.
pub fn find_with_traffic(socket: &mut Socket, name: &str) -> Result<Option<Interface>, Error> {
    look_up(socket, name, |message| {
        message.raw(&header(0, None));
        message.put_text(libc::IFLA_IFNAME, name);
    })
}

/// One interface by number; `None` if there is none.
///
/// # Errors
/// The kernel refuses.
pub fn find_by_index(
    socket: &mut Socket,
    index: InterfaceIndex,
) -> Result<Option<Interface>, Error> {
    look_up(socket, &index.to_string(), |message| {
        message.raw(&header(index.0, None));
        message.put_u32(libc::IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS);
    })
}

/// Tells of interfaces of one namespace that changed.
#[derive(Debug)]
pub struct Watcher(Socket);

impl Watcher {
    /// Watches the namespace that the thread is in.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new() -> Result<Self, Error> {
        const RTNLGRP_LINK: u32 = 1;
        let mut socket = Socket::route()?;
        socket
            .join(RTNLGRP_LINK)
            .map_err(|source| Error::system("watch", "interfaces", source))?;
        socket.grow_buffers();
        Ok(Self(socket))
    }

    /// Interfaces that changed, as they are after it, waiting at most this long for one. `None` if changes
    /// were missed: all interfaces are to be looked at.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn changed(&mut self, at_most: Duration) -> Result<Option<Vec<Interface>>, Error> {
        let changed = self.0.listen(at_most, |reply| {
            (reply.kind == libc::RTM_NEWLINK)
                .then(|| parse(reply.payload))
                .flatten()
        });
        match changed {
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(None),
            other => other
                .map(Some)
                .map_err(|source| Error::system("watch", "interfaces", source)),
        }
    }
}

fn look_up(
    socket: &mut Socket,
    object: &str,
    fill: impl Fn(&mut Writer<'_>),
) -> Result<Option<Interface>, Error> {
    let label = ("look up interface", object);
    match socket.query(libc::RTM_GETLINK, false, label, fill, read) {
        Err(error) if error.errno() == Some(libc::ENODEV) => Ok(None),
        other => Ok(other?.into_iter().next()),
    }
}

fn list_by(
    socket: &mut Socket,
    object: &str,
    fill: impl Fn(&mut Writer<'_>),
) -> Result<Vec<Interface>, Error> {
    let number = |interface: &Interface| interface.index;
    socket.list(libc::RTM_GETLINK, ("list", object), fill, read, number)
}

fn read(reply: Reply<'_>) -> Option<Interface> {
    (reply.kind == libc::RTM_NEWLINK)
        .then(|| parse(reply.payload))
        .flatten()
}

fn parse(payload: &[u8]) -> Option<Interface> {
    let index = payload.get(4..8).and_then(attribute::u32_of)?;
    let flags = payload.get(8..12).and_then(attribute::u32_of)?;
    let attributes = Attributes::new(payload.get(16..)?);
    let info = attributes.nested(libc::IFLA_LINKINFO);
    let kind = info.find(libc::IFLA_INFO_KIND).map(attribute::text_of);
    let is_tun = kind.as_deref() == Some("tun");
    let number_of = |kind| {
        let number = attributes.find(kind).and_then(attribute::u32_of)?;
        Some(InterfaceIndex(number)).filter(|number| number.0 != 0)
    };
    Some(Interface {
        index: InterfaceIndex(index),
        name: attributes.find(libc::IFLA_IFNAME).map(attribute::text_of)?,
        alias: attributes.find(libc::IFLA_IFALIAS).map(attribute::text_of),
        mac: attributes
            .find(libc::IFLA_ADDRESS)
            .and_then(|mac| mac.try_into().ok()),
        is_ethernet: payload.get(2..4) == Some(&libc::ARPHRD_ETHER.to_ne_bytes()),
        queue: attributes.find(libc::IFLA_QDISC).map(attribute::text_of),
        mtu: attributes
            .find(libc::IFLA_MTU)
            .and_then(attribute::u32_of)
            .unwrap_or(0),
        group: attributes
            .find(libc::IFLA_GROUP)
            .and_then(attribute::u32_of)
            .unwrap_or(0),
        master: number_of(libc::IFLA_MASTER),
        lower: number_of(libc::IFLA_LINK)
            .filter(|_| attributes.find(libc::IFLA_LINK_NETNSID).is_none()),
        // Not said where it is the same number as this end's.
        peer: matches!(kind.as_deref(), Some("veth" | "netkit"))
            .then(|| number_of(libc::IFLA_LINK).unwrap_or(InterfaceIndex(index))),
        peer_namespace: NamespaceNumber::of_link(&attributes),
        is_up: flags & libc::IFF_UP.cast_unsigned() != 0,
        makes_addresses: families::makes_addresses(&attributes),
        has_carrier: attributes
            .find(libc::IFLA_CARRIER)
            .is_some_and(|value| value == [1]),
        traffic: attributes
            .find(libc::IFLA_STATS64)
            .map(parse_traffic)
            .unwrap_or_default(),
        tun: is_tun.then(|| parse_tun(info.nested(libc::IFLA_INFO_DATA))),
        kind,
    })
}

fn parse_traffic(value: &[u8]) -> Traffic {
    let counter = |position: usize| {
        let bytes = value
            .get(position * 8..)
            .and_then(|rest| rest.first_chunk());
        bytes.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    };
    Traffic {
        received_packets: counter(0),
        sent_packets: counter(1),
        received_bytes: counter(2),
        sent_bytes: counter(3),
        received_dropped: counter(6),
        sent_dropped: counter(7),
    }
}

fn parse_tun(data: Attributes<'_>) -> Tun {
    let flag = |kind| data.find(kind).is_some_and(|value| value == [1]);
    let number = |kind| data.find(kind).and_then(attribute::u32_of);
    Tun {
        is_tap: data.find(IFLA_TUN_TYPE) == Some(&[TUN_TYPE_TAP]),
        is_persistent: flag(IFLA_TUN_PERSIST),
        is_multi_queue: flag(IFLA_TUN_MULTI_QUEUE),
        has_vnet_header: flag(IFLA_TUN_VNET_HDR),
        owner: number(IFLA_TUN_OWNER),
        group: number(IFLA_TUN_GROUP),
        queues: number(IFLA_TUN_NUM_QUEUES).unwrap_or(0)
            + number(IFLA_TUN_NUM_DISABLED_QUEUES).unwrap_or(0),
    }
}

fn header(index: u32, up: Option<bool>) -> [u8; 16] {
    let flag = libc::IFF_UP.cast_unsigned();
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    if let Some(up) = up {
        header[8..12].copy_from_slice(&(if up { flag } else { 0 }).to_ne_bytes());
        header[12..16].copy_from_slice(&flag.to_ne_bytes());
    }
    header
}
