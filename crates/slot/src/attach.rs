//! A container slot's interface in a namespace that somebody else made: what is checked of a request, what the
//! journal remembers, and what the API shows. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sandwire_api::{
    attach::{Attach, Attached, AttachedAddress, AttachedDevice, AttachedRoute},
    slot::MacAddress,
};
use serde::{Deserialize, Serialize};

use crate::{
    error::ServiceError,
    plan::{NicPlan, Plan, SlotPlan},
};

/// Most routes of one interface; more than anybody writes by hand, and few enough for one message each.
const ROUTES_MAX: usize = 256;
/// IPv6 needs 1280; a veth takes 65535, of which the data path counts 14 as Ethernet header.
const MTU: std::ops::RangeInclusive<u32> = 1280..=65_521;

/// What is remembered of a lease's interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachRecord {
    /// What was asked for.
    pub request: Attach,
    /// The kernel's number of the namespace, which is never used again, where the kernel tells it (Linux 5.14).
    /// A path may lead to another namespace some day: a process's number comes again.
    pub netns_cookie: Option<u64>,
    /// What is made; what was there before there was a choice is a veth pair.
    #[serde(default)]
    pub device: AttachedDevice,
    /// Why, where the pool left it open.
    #[serde(default)]
    pub device_reason: Option<String>,
    /// Whether the interface was made: before, nobody has been told of the lease.
    pub is_done: bool,
}

impl AttachRecord {
    /// The interface as it is made.
    #[must_use]
    pub fn attached(&self, slot: &SlotPlan) -> Option<Attached> {
        let nic = slot.nics.first()?;
        Some(Attached {
            netns: self.request.netns.clone(),
            interface: self.request.interface.clone(),
            mac: nic.guest_mac,
            mtu: slot.mtu,
            host_interface: slot.host_interface.clone(),
            device: self.device,
            device_reason: self.device_reason.clone(),
            addresses: addresses(nic).collect(),
            routes: self.routes(nic),
            gateway_mac: nic.gateway_mac,
            tap: self.request.tap.clone(),
        })
    }

    /// Its routes: those that were asked for, or one to everything in each family.
    #[must_use]
    pub fn routes(&self, nic: &NicPlan) -> Vec<AttachedRoute> {
        let gateway_to = |destination: IpNet| {
            let mut of_family = addresses(nic).filter(|own| same_family(own.gateway, destination));
            of_family.next().map(|own| own.gateway)
        };
        let destinations = match &self.request.routes {
            Some(asked) => asked.clone(),
            None => addresses(nic).map(|own| everything(own.gateway)).collect(),
        };
        destinations
            .into_iter()
            .filter_map(|destination| {
                let gateway = gateway_to(destination)?;
                Some(AttachedRoute {
                    destination: destination.trunc(),
                    gateway,
                })
            })
            .collect()
    }
}

/// The addresses of a container's interface, with their gateways.
pub fn addresses(nic: &NicPlan) -> impl Iterator<Item = AttachedAddress> + use<> {
    let ipv4 = nic.ipv4.map(|ipv4| AttachedAddress {
        address: IpNet::V4(ipv4.guest),
        gateway: ipv4.gateway.into(),
    });
    let ipv6 = nic.ipv6.map(|ipv6| AttachedAddress {
        address: IpNet::V6(ipv6.guest),
        gateway: ipv6.gateway.into(),
    });
    ipv4.into_iter().chain(ipv6)
}

/// Refuses what can't be before anything is done.
///
/// # Errors
/// Names the field, and why.
pub fn check(attach: &Attach, plan: &Plan, nic: &NicPlan) -> Result<(), ServiceError> {
    let refuse = |field, value: String, reason: &str| {
        Err(ServiceError::Invalid {
            field,
            value,
            reason: reason.to_owned(),
        })
    };
    let path = attach.netns.display().to_string();
    if !attach.netns.is_absolute() {
        let reason = "it must be an absolute path, as /run/netns/NAME or /proc/PID/ns/net";
        return refuse("attach.netns", path, reason);
    }
    if let Some(mtu) = attach.mtu
        && !MTU.contains(&mtu)
    {
        return refuse("attach.mtu", mtu.to_string(), "it must be 1280 to 65521");
    }
    if let Some(mac) = attach.mac {
        let MacAddress([first, ..]) = mac;
        if first & 1 != 0 || mac == MacAddress([0; 6]) {
            return refuse("attach.mac", mac.to_string(), "it is not a unicast address");
        }
        if mac == nic.gateway_mac {
            return refuse("attach.mac", mac.to_string(), "it is the gateway's");
        }
    }
    if let Some(tap) = &attach.tap
        && tap.name == attach.interface
    {
        let reason = "it is the name of the interface that it is to be beside";
        return refuse("attach.tap.name", tap.name.to_string(), reason);
    }
    let routes = attach.routes.as_deref().unwrap_or_default();
    if routes.len() > ROUTES_MAX {
        return refuse(
            "attach.routes",
            routes.len().to_string(),
            "at most 256 are taken",
        );
    }
    for (place, route) in routes.iter().enumerate() {
        if !addresses(nic).any(|own| same_family(own.gateway, *route)) {
            let reason = format!("pool '{}' has no addresses of that family", plan.spec.name);
            return refuse("attach.routes", route.to_string(), &reason);
        }
        if routes[..place]
            .iter()
            .any(|before| before.trunc() == route.trunc())
        {
            return refuse("attach.routes", route.to_string(), "it is there twice");
        }
    }
    Ok(())
}

/// Why an interface that is there isn't what is asked for.
#[must_use]
pub fn difference(asked: Option<&Attach>, held: Option<&AttachRecord>) -> Option<String> {
    match (asked, held) {
        (None, _) => None,
        (Some(_), None) => Some(
            "you have one by that name whose interface is attached nowhere: release it first".to_owned(),
        ),
        (Some(asked), Some(held)) => (*asked != held.request).then(|| {
            format!(
                "you have one by that name, attached to {} as {} or with other settings: release it first",
                held.request.netns.display(),
                held.request.interface
            )
        }),
    }
}

fn same_family(gateway: IpAddr, destination: IpNet) -> bool {
    gateway.is_ipv4() == destination.addr().is_ipv4()
}

fn everything(gateway: IpAddr) -> IpNet {
    match gateway {
        IpAddr::V4(_) => IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0)),
        IpAddr::V6(_) => IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0)),
    }
}
