//! Permanent neighbour entries: no ARP, no neighbour discovery, never collected by the kernel.
//! They need [`crate::interface::REQUIRED_CAPABILITIES`].

use std::net::IpAddr;

use crate::{
    address::family_of,
    interface::{InterfaceIndex, Mac},
    netlink::{REPLACE, Request},
};

/// The Ethernet address behind an IP address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Interface that it is reached by.
    pub interface: InterfaceIndex,
    /// The neighbour's IP address.
    pub address: IpAddr,
    /// The neighbour's Ethernet address.
    pub mac: Mac,
}

impl Neighbour {
    /// Adds or replaces the entry.
    pub fn add(&self, request: &mut Request) {
        let object = format!("neighbour {} on interface {}", self.address, self.interface);
        request.message((libc::RTM_NEWNEIGH, REPLACE), "add", object, |message| {
            let mut header = [0; 12];
            header[0] = family_of(self.address);
            header[4..8].copy_from_slice(&self.interface.0.to_ne_bytes());
            header[8..10].copy_from_slice(&libc::NUD_PERMANENT.to_ne_bytes());
            message.raw(&header);
            message.put_address(libc::NDA_DST, self.address);
            message.put(libc::NDA_LLADDR, &self.mac);
        });
    }
}
