//! Which published ports can stand beside each other, and where each leads. Pure.

use std::net::IpAddr;

use sandwire_api::{
    identity::LOOPBACK6,
    published_port::{PublishPort, PublishedPort},
};

use crate::{error::ServiceError, network::Listener, plan::SlotPlan};

/// A published port with the clone addresses that it leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publication {
    /// Whose it is, and what was asked for.
    pub published: PublishedPort,
    /// One per family.
    pub clone_addresses: Vec<IpAddr>,
}

impl Publication {
    /// Works out where a port leads.
    ///
    /// # Errors
    /// The request names a port, address or interface that can't be.
    pub fn new(published: PublishedPort, slot: &SlotPlan) -> Result<Self, ServiceError> {
        let clone_addresses = clone_addresses(&published.port, slot)?;
        Ok(Self {
            published,
            clone_addresses,
        })
    }

    /// Whether a packet to the host could mean either.
    #[must_use]
    pub fn meets(&self, other: &Self) -> bool {
        let (ours, theirs) = (&self.published.port, &other.published.port);
        if ours.protocol != theirs.protocol || ours.host_port != theirs.host_port {
            return false;
        }
        let share_family = self.clone_addresses.iter().any(|ours| {
            let mut theirs = other.clone_addresses.iter();
            theirs.any(|theirs| ours.is_ipv4() == theirs.is_ipv4())
        });
        let share_address = match (ours.host_address, theirs.host_address) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => true,
        };
        share_family && share_address
    }

    /// Whether callers from elsewhere would get to the sandbox instead of this socket of the host. None do by the
    /// loopback, and multicast isn't translated.
    #[must_use]
    pub fn hides(&self, listener: &Listener) -> bool {
        let bound = listener.address;
        if is_loopback(bound) || bound.is_multicast() {
            return false;
        }
        let host = self.published.port.host_address;
        let is_of_address = bound.is_unspecified() || host.is_none_or(|host| host == bound);
        let takes = |clone: &IpAddr| match clone {
            IpAddr::V4(_) => listener.takes_ipv4,
            IpAddr::V6(_) => bound.is_ipv6(),
        };
        is_of_address && self.clone_addresses.iter().any(takes)
    }
}

/// `tcp port 8080 of 10.0.0.1`, for messages.
#[must_use]
pub fn describe(port: &PublishPort) -> String {
    let host = match port.host_address {
        Some(address) => format!(" of {address}"),
        None => String::new(),
    };
    format!("{} port {}{host}", port.protocol, port.host_port)
}

fn clone_addresses(port: &PublishPort, slot: &SlotPlan) -> Result<Vec<IpAddr>, ServiceError> {
    for (field, value) in [
        ("host_port", port.host_port),
        ("clone_port", port.clone_port),
    ] {
        if value == 0 {
            return Err(invalid(field, "0".to_owned(), "ports are 1 to 65535"));
        }
    }
    let Some(nic) = slot.nics.get(usize::from(port.nic)) else {
        let reason = "the sandbox has fewer interfaces; the first is 0";
        return Err(invalid("nic", port.nic.to_string(), reason));
    };
    let ipv4 = nic.ipv4.map(|ipv4| IpAddr::V4(ipv4.clone_address));
    let ipv6 = nic.ipv6.map(|ipv6| IpAddr::V6(ipv6.clone_address));
    let all = ipv4.into_iter().chain(ipv6);
    let Some(host) = port.host_address else {
        return Ok(all.collect());
    };
    if host.is_unspecified() || host.is_multicast() {
        let reason = "name one of the host's own addresses, or none for all of them";
        return Err(invalid("host_address", host.to_string(), reason));
    }
    if is_loopback(host.to_canonical()) {
        let reason = "no published port can be reached by the loopback: name another address of the host, or none \
                      for all of them, and call that or the clone address";
        return Err(invalid("host_address", host.to_string(), reason));
    }
    if host.to_canonical() != host {
        let reason = format!("write it as IPv4: {}", host.to_canonical());
        return Err(invalid("host_address", host.to_string(), &reason));
    }
    let same_family: Vec<_> = all
        .filter(|clone| clone.is_ipv4() == host.is_ipv4())
        .collect();
    if same_family.is_empty() {
        let reason = "the sandbox has no address of that family";
        return Err(invalid("host_address", host.to_string(), reason));
    }
    Ok(same_family)
}

/// Whether an address is of the host's loopback, or of an identity's.
fn is_loopback(address: IpAddr) -> bool {
    address.is_loopback() || matches!(address, IpAddr::V6(address) if LOOPBACK6.contains(&address))
}

fn invalid(field: &'static str, value: String, reason: &str) -> ServiceError {
    ServiceError::Invalid {
        field,
        value,
        reason: reason.to_owned(),
    }
}
