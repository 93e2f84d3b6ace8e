//! What the kernel knows of an interface: sizes, queues, and who is at the other end.

use sandwire_kernel_net::Error;
use sandwire_kernel_net::interface::InterfaceIndex;
use sandwire_kernel_net::netlink::Socket;
use sandwire_kernel_net::netlink::attribute::{Attributes, text_of, u32_of};

/// An interface, as it was when it was looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Interface {
    pub(super) index: InterfaceIndex,
    pub(super) mtu: u32,
    pub(super) is_up: bool,
    pub(super) is_ethernet: bool,
    pub(super) sender: Sender,
    /// Receive queues that there may be.
    queues_max: u32,
}

/// Who sends the packets that come in here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Sender {
    /// Whoever is on the wire of a physical interface.
    Wire,
    /// The host of a virtual machine.
    Hypervisor,
    /// The other end of a veth.
    Peer(Peer),
    /// A process that has the TAP open, and whether it puts virtio-net headers before frames.
    Process { has_vnet_header: bool },
    /// Some part of this kernel.
    Kernel { kind: String },
}

/// The other end of a veth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) index: InterfaceIndex,
    /// The number by which our namespace knows the peer's, if that is another.
    pub(super) namespace: Option<i32>,
}

/// Looks an interface up by name in the socket's namespace.
pub(super) fn find(route: &mut Socket, name: &str) -> Result<Interface, Error> {
    look_up(route, name, 0, Some(name))
}

/// Looks an interface up by number in the socket's namespace.
pub(super) fn find_by_index(route: &mut Socket, index: InterfaceIndex) -> Result<Interface, Error> {
    look_up(route, &index.to_string(), index.0, None)
}

fn look_up(
    route: &mut Socket,
    label: &str,
    index: u32,
    name: Option<&str>,
) -> Result<Interface, Error> {
    let object = format!("interface {label}");
    let mut header = [0; HEADER];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    let found = route.query(
        libc::RTM_GETLINK,
        false,
        ("find", &object),
        |message| {
            message.raw(&header);
            if let Some(name) = name {
                message.put_text(IFLA_IFNAME, name);
            }
        },
        |reply| parse(reply.payload),
    )?;
    let mut found = found.into_iter();
    found.next().ok_or_else(|| Error::missing_interface(label))
}

/// How many receive queues are in use. Only the kernels from 6.8 on tell for every interface that is up; otherwise it
/// is as many as there may be.
pub(super) fn queues(interface: &Interface) -> Result<u32, Error> {
    let mut socket = Socket::generic()?;
    let Some(family) = family(&mut socket, "netdev")? else {
        return Ok(interface.queues_max);
    };
    let object = format!("queues of interface {}", interface.index);
    let kinds = socket.query(
        family,
        true,
        ("list", &object),
        |message| {
            message.raw(&[NETDEV_CMD_QUEUE_GET, 1, 0, 0]);
            message.put_u32(NETDEV_A_QUEUE_IFINDEX, interface.index.0);
        },
        |reply| {
            let kind = reply.attributes(GENERIC_HEADER).find(NETDEV_A_QUEUE_TYPE)?;
            u32_of(kind)
        },
    );
    // Older kernels have the family without the command.
    let receiving = kinds.map_or(0, |kinds| kinds.iter().filter(|kind| **kind == 0).count());
    Ok(match u32::try_from(receiving) {
        Ok(0) | Err(_) => interface.queues_max,
        Ok(count) => count,
    })
}

/// The number of a family of generic netlink, if the kernel has it.
pub(super) fn family(socket: &mut Socket, name: &str) -> Result<Option<u16>, Error> {
    let found = socket.query(
        GENL_ID_CTRL,
        false,
        ("look up netlink family", name),
        |message| {
            message.raw(&[CTRL_CMD_GETFAMILY, 1, 0, 0]);
            message.put_text(CTRL_ATTR_FAMILY_NAME, name);
        },
        |reply| {
            let id = reply.attributes(GENERIC_HEADER).find(CTRL_ATTR_FAMILY_ID)?;
            id.try_into().ok().map(u16::from_ne_bytes)
        },
    );
    match found {
        Err(error) if error.is_missing() => Ok(None),
        other => Ok(other?.into_iter().next()),
    }
}

fn parse(payload: &[u8]) -> Option<Interface> {
    let index = u32_of(payload.get(4..8)?)?;
    let flags = u32_of(payload.get(8..12)?)?;
    let attributes = Attributes::new(payload.get(HEADER..)?);
    let number = |kind| attributes.find(kind).and_then(u32_of);
    Some(Interface {
        index: InterfaceIndex(index),
        mtu: number(IFLA_MTU)?,
        is_ethernet: payload.get(2..4)? == ARPHRD_ETHER.to_ne_bytes(),
        is_up: flags & libc::IFF_UP.cast_unsigned() != 0,
        sender: sender(attributes),
        queues_max: number(IFLA_NUM_RX_QUEUES).unwrap_or(1),
    })
}

fn sender(attributes: Attributes<'_>) -> Sender {
    let information = attributes.nested(IFLA_LINKINFO);
    let Some(kind) = information.find(IFLA_INFO_KIND).map(text_of) else {
        let bus = attributes.find(IFLA_PARENT_DEV_BUS_NAME).map(text_of);
        return match bus.as_deref() {
            Some("virtio" | "vmbus" | "xen") => Sender::Hypervisor,
            Some(_) => Sender::Wire,
            None => Sender::Kernel {
                kind: "software".to_owned(),
            },
        };
    };
    let peer = attributes.find(IFLA_LINK).and_then(u32_of);
    match (kind.as_str(), peer) {
        ("veth", Some(peer)) => {
            let namespace = attributes.find(IFLA_LINK_NETNSID).and_then(u32_of);
            Sender::Peer(Peer {
                index: InterfaceIndex(peer),
                namespace: namespace.map(u32::cast_signed),
            })
        }
        ("tun", _) => {
            let data = information.nested(IFLA_INFO_DATA);
            // What doesn't say that it has none may have one.
            let has_vnet_header = data.find(IFLA_TUN_VNET_HDR) != Some(&[0]);
            Sender::Process { has_vnet_header }
        }
        _ => Sender::Kernel { kind },
    }
}

/// `struct ifinfomsg`.
const HEADER: usize = 16;
pub(super) const GENERIC_HEADER: usize = 4;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_NUM_RX_QUEUES: u16 = 32;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_PARENT_DEV_BUS_NAME: u16 = 57;
const IFLA_TUN_VNET_HDR: u16 = 5;
const ARPHRD_ETHER: u16 = 1;
const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const NETDEV_CMD_QUEUE_GET: u8 = 10;
const NETDEV_A_QUEUE_IFINDEX: u16 = 2;
const NETDEV_A_QUEUE_TYPE: u16 = 3;
