//! Addresses of interfaces. They need [`crate::interface::REQUIRED_CAPABILITIES`].

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    Error,
    interface::InterfaceIndex,
    netlink::{CHANGE, REPLACE, Request, Socket, attribute},
    number::octet,
};

const IFA_F_NODAD: u32 = 0x02;
const IFA_F_PERMANENT: u32 = 0x80;
/// `struct ifa_cacheinfo` of an address that is preferred for no time, and valid for ever.
const DEPRECATED: [u8; 16] = [0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0];

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// Interface that has it.
    pub interface: InterfaceIndex,
    /// The address with the length of its on-link prefix.
    pub address: IpNet,
    /// The other end, on a point-to-point interface.
    pub peer: Option<IpAddr>,
}

impl Address {
    /// An address without a peer.
    #[must_use]
    pub fn new(interface: InterfaceIndex, address: IpNet) -> Self {
        Self {
            interface,
            address,
            peer: None,
        }
    }

    /// Gives the interface the address, at once: without duplicate-address detection.
    pub fn add(&self, request: &mut Request) {
        self.write(request, (libc::RTM_NEWADDR, REPLACE), "add", None);
    }

    /// As [`Address::add`], for sockets that ask for the address: where the kernel chooses a source, it takes another one of
    /// IPv6 if there is any.
    pub fn add_deprecated(&self, request: &mut Request) {
        let kind = (libc::RTM_NEWADDR, REPLACE);
        self.write(request, kind, "add", Some(&DEPRECATED));
    }

    /// Takes the address away.
    pub fn delete(&self, request: &mut Request) {
        self.write(request, (libc::RTM_DELADDR, CHANGE), "delete", None);
    }

    fn write(
        &self,
        request: &mut Request,
        kind: (u16, u16),
        operation: &'static str,
        lifetimes: Option<&[u8]>,
    ) {
        let object = format!("address {} of interface {}", self.address, self.interface);
        request.message(kind, operation, object, |message| {
            let family = family_of(self.address.addr());
            let mut header = [family, self.address.prefix_len(), 0, 0, 0, 0, 0, 0];
            header[4..].copy_from_slice(&self.interface.0.to_ne_bytes());
            message.raw(&header);
            message.put_address(libc::IFA_LOCAL, self.address.addr());
            let other = self.peer.unwrap_or(self.address.addr());
            message.put_address(libc::IFA_ADDRESS, other);
            message.put_u32(libc::IFA_FLAGS, IFA_F_NODAD | IFA_F_PERMANENT);
            if let Some(lifetimes) = lifetimes {
                message.put(libc::IFA_CACHEINFO, lifetimes);
            }
        });
    }
}

/// All addresses in the socket's namespace.
///
/// # Errors
/// The kernel refuses.
pub fn list(socket: &mut Socket) -> Result<Vec<Address>, Error> {
    socket.query(
        libc::RTM_GETADDR,
        true,
        ("list", "addresses"),
        |message| message.raw(&[0; 8]),
        |reply| {
            let prefix_len = *reply.payload.get(1)?;
            let interface = reply.payload.get(4..8).and_then(attribute::u32_of)?;
            let attributes = reply.attributes(8);
            let remote = attributes
                .find(libc::IFA_ADDRESS)
                .and_then(attribute::address_of);
            let local = attributes
                .find(libc::IFA_LOCAL)
                .and_then(attribute::address_of);
            let address = local.or(remote)?;
            Some(Address {
                interface: InterfaceIndex(interface),
                address: IpNet::new(address, prefix_len).ok()?,
                peer: remote.filter(|remote| *remote != address),
            })
        },
    )
}

pub(crate) fn family_of(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => octet(libc::AF_INET),
        IpAddr::V6(_) => octet(libc::AF_INET6),
    }
}
