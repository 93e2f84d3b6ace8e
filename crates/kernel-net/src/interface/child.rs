//! Children of an interface: macvlan and ipvlan, which share its wire and may be in other namespaces.

use super::{CREATE, Interface, InterfaceIndex, Mac, NamespaceNumber, Request, Writer, header};

const IFLA_MACVLAN_MODE: u16 = 1;
const IFLA_IPVLAN_MODE: u16 = 1;
const IPVLAN_MODE_L2: u16 = 0;
const MACVLAN_MODE_BRIDGE: u32 = 4;

/// What a child is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildDevice {
    /// macvlan in its mode `bridge`: an Ethernet address of its own, and frames to other children of that mode stay in
    /// the kernel.
    Macvlan,
    /// ipvlan in its mode `l2`: its parent's Ethernet address, and told from other children by its addresses.
    Ipvlan,
}

impl ChildDevice {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Macvlan, Self::Ipvlan];

    /// Whether an interface is one of them.
    #[must_use]
    pub fn is_of(found: &Interface) -> bool {
        let kinds = Self::ALL.map(Self::kind);
        found
            .kind
            .as_deref()
            .is_some_and(|kind| kinds.contains(&kind))
    }

    /// As the kernel names it.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::Macvlan => "macvlan",
            Self::Ipvlan => "ipvlan",
        }
    }

    fn write_data(self, data: &mut Writer<'_>) {
        match self {
            Self::Macvlan => data.put_u32(IFLA_MACVLAN_MODE, MACVLAN_MODE_BRIDGE),
            Self::Ipvlan => data.put_u16(IFLA_IPVLAN_MODE, IPVLAN_MODE_L2),
        }
    }
}

/// An interface in the socket's namespace that is a child of one in another.
#[derive(Clone, Copy, Debug)]
pub struct ChildInterface<'a> {
    /// What it is.
    pub device: ChildDevice,
    /// Its name.
    pub name: &'a str,
    /// Number of its parent.
    pub parent: InterfaceIndex,
    /// The parent's namespace, as that of the socket knows it, if it is another one.
    pub parent_namespace: Option<NamespaceNumber>,
    /// Its Ethernet address, if it has one of its own.
    pub mac: Mac,
    /// Its MTU, at most the parent's.
    pub mtu: u32,
}

impl ChildInterface<'_> {
    /// Creates it. It is down.
    pub fn create(&self, request: &mut Request) {
        let kind = self.device.kind();
        let object = format!("{kind} interface {}", self.name);
        request.message((libc::RTM_NEWLINK, CREATE), "create", object, |message| {
            message.raw(&header(0, None));
            message.put_text(libc::IFLA_IFNAME, self.name);
            if self.device == ChildDevice::Macvlan {
                message.put(libc::IFLA_ADDRESS, &self.mac);
            }
            message.put_u32(libc::IFLA_MTU, self.mtu);
            message.put_u32(libc::IFLA_LINK, self.parent.0);
            if let Some(namespace) = self.parent_namespace {
                message.put_u32(libc::IFLA_LINK_NETNSID, namespace.0);
            }
            message.nest(libc::IFLA_LINKINFO, |info| {
                info.put_text(libc::IFLA_INFO_KIND, kind);
                info.nest(libc::IFLA_INFO_DATA, |data| self.device.write_data(data));
            });
        });
    }
}
