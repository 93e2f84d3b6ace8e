//! A container slot's interface in a namespace that somebody else made: what is checked of a request, what the
//! journal remembers, and what the API shows. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sandwire_api::{
    attach::{
        Attach, Attached, AttachedAddress, AttachedDevice, AttachedRoute, DeviceChoice,
        InterfaceName,
    },
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
    /// Whose child it is, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ParentRecord>,
    /// Whether an Ethernet address that is made of an IPv6 address is made of all of it; former versions took the end.
    #[serde(default)]
    pub has_mac_of_all: bool,
    /// Whether the interface was made: before, nobody has been told of the lease.
    pub is_done: bool,
}

/// The interface of the host whose child a lease has, with its network as it was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParentRecord {
    /// Its name.
    pub interface: InterfaceName,
    /// Its Ethernet address, if the child has the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
    /// The network's gateways, one per family at most.
    pub gateways: Vec<IpAddr>,
    /// Subnets that are reached without one.
    pub subnets: Vec<IpNet>,
    /// By what number the host's namespace knows the container's for as long as both are there: so the child is found
    /// when no path leads to it any more.
    pub namespace: u32,
}

impl ParentRecord {
    /// An address of the container as it has it on this network.
    fn place(&self, own: AttachedAddress) -> AttachedAddress {
        let address = own.address.addr();
        let around = self
            .subnets
            .iter()
            .filter(|subnet| subnet.contains(&address));
        let length = around.map(IpNet::prefix_len).max();
        let length = length.unwrap_or(own.address.prefix_len());
        let is_of_family = |gateway: &&IpAddr| gateway.is_ipv4() == address.is_ipv4();
        AttachedAddress {
            address: IpNet::new(address, length).expect("a subnet around it is of its family"),
            gateway: self.gateways.iter().find(is_of_family).copied(),
        }
    }
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
            host_interface: match &self.parent {
                Some(parent) => parent.interface.to_string(),
                None => slot.host_interface.clone(),
            },
            device: self.device,
            device_reason: self.device_reason.clone(),
            addresses: self.addresses(nic),
            routes: self.routes(nic),
            gateway_mac: self.parent.is_none().then_some(nic.gateway_mac),
            tap: self.request.tap.clone(),
        })
    }

    /// Its addresses, with their gateways.
    #[must_use]
    pub fn addresses(&self, nic: &NicPlan) -> Vec<AttachedAddress> {
        let own = addresses(nic);
        match &self.parent {
            Some(parent) => own.map(|own| parent.place(own)).collect(),
            None => own.collect(),
        }
    }

    /// Its routes: those that were asked for, or one to everything in each family.
    #[must_use]
    pub fn routes(&self, nic: &NicPlan) -> Vec<AttachedRoute> {
        let own = self.addresses(nic);
        let gateway_to = |destination: IpNet| {
            let of_family = own.iter().find(|own| same_family(own, destination));
            of_family.and_then(|own| own.gateway)
        };
        let destinations = match &self.request.routes {
            Some(asked) => asked.clone(),
            None => own.iter().map(everything).collect(),
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
        gateway: Some(ipv4.gateway.into()),
    });
    let ipv6 = nic.ipv6.map(|ipv6| AttachedAddress {
        address: IpNet::V6(ipv6.guest),
        gateway: Some(ipv6.gateway.into()),
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
    if let Some(mac) = attach.mac
        && plan.spec.device == DeviceChoice::Ipvlan
    {
        let reason = "an ipvlan child has its parent's: use a pool with device = macvlan";
        return refuse("attach.mac", mac.to_string(), reason);
    }
    if let Some(tap) = &attach.tap
        && tap.name == attach.interface
    {
        let reason = "it is the name of the interface that it is to be beside";
        return refuse("attach.tap.name", tap.name.to_string(), reason);
    }
    if let Some(tap) = &attach.tap
        && plan.spec.device.is_child()
    {
        let reason = "a child of another interface can't be joined with a TAP: use a pool with device = veth";
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
        if !addresses(nic).any(|own| same_family(&own, *route)) {
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
pub fn difference(asked: Option<&AttachRecord>, held: Option<&AttachRecord>) -> Option<String> {
    let asked = asked?;
    let Some(held) = held else {
        let reason =
            "you have one by that name whose interface is attached nowhere: release it first";
        return Some(reason.to_owned());
    };
    let netns = held.request.netns.display();
    if asked.request != held.request {
        return Some(format!(
            "you have one by that name, attached to {netns} as {} or with other settings: release it first",
            held.request.interface
        ));
    }
    match (asked.netns_cookie, held.netns_cookie) {
        (Some(now), Some(then)) if now != then => Some(format!(
            "you have one by that name, whose interface is in the network namespace that was at {netns} before the \
             one that is there now: release it first"
        )),
        _ => None,
    }
}

/// Refuses routes that a network has no gateway for.
///
/// # Errors
/// Names the route.
pub fn check_gateways(attach: &Attach, parent: &ParentRecord) -> Result<(), ServiceError> {
    let has_gateway = |route: &&IpNet| {
        let mut gateways = parent.gateways.iter();
        gateways.any(|gateway| gateway.is_ipv4() == route.addr().is_ipv4())
    };
    let mut routes = attach.routes.iter().flatten();
    match routes.find(|route| !has_gateway(route)) {
        None => Ok(()),
        Some(route) => Err(ServiceError::Invalid {
            field: "attach.routes",
            value: route.to_string(),
            reason: format!(
                "no gateway of that family is known by {}: name one in the pool's parent.gateways",
                parent.interface
            ),
        }),
    }
}

fn same_family(own: &AttachedAddress, destination: IpNet) -> bool {
    own.address.addr().is_ipv4() == destination.addr().is_ipv4()
}

fn everything(own: &AttachedAddress) -> IpNet {
    match own.address.addr() {
        IpAddr::V4(_) => IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0)),
        IpAddr::V6(_) => IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::SlotNumber;

    #[test]
    fn an_address_has_the_length_of_the_closest_subnet_and_its_familys_gateway() {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let parent = ParentRecord {
            interface: InterfaceName::default(),
            mac: None,
            gateways: vec!["fe80::1".parse().unwrap()],
            subnets: vec![net("192.0.0.0/8"), net("192.0.2.0/24"), net("10.0.0.0/8")],
            namespace: 3,
        };
        let placed = |address: &str| {
            let address = net(address);
            let placed = parent.place(AttachedAddress {
                address,
                gateway: None,
            });
            (placed.address.to_string(), placed.gateway)
        };
        assert_eq!(placed("192.0.2.7/32"), ("192.0.2.7/24".to_owned(), None));
        assert_eq!(placed("172.16.0.1/32"), ("172.16.0.1/32".to_owned(), None));
        let gateway = parent.gateways.first().copied();
        assert_eq!(
            placed("2001:db8::1/128"),
            ("2001:db8::1/128".to_owned(), gateway)
        );
    }

    #[test]
    fn a_route_needs_a_gateway_of_its_family() {
        let parent = ParentRecord {
            interface: InterfaceName::default(),
            mac: None,
            gateways: vec!["192.0.2.1".parse().unwrap()],
            subnets: Vec::new(),
            namespace: 3,
        };
        let asked = |routes: &str| -> Attach {
            let text = format!(r#"{{"netns": "/run/netns/blue", "routes": {routes}}}"#);
            serde_json::from_str(&text).unwrap()
        };
        for fine in ["null", "[]", r#"["10.0.0.0/8"]"#] {
            assert!(check_gateways(&asked(fine), &parent).is_ok(), "{fine}");
        }
        let refused = check_gateways(&asked(r#"["fd00::/8"]"#), &parent).unwrap_err();
        assert!(
            refused.to_string().contains("no gateway of that family"),
            "{refused}"
        );
    }

    #[test]
    fn a_lease_of_a_former_version_keeps_its_mac() {
        let spec = r#"{"name": "boxes", "size": 1, "kind": "container", "data_path": "ebpf",
            "addresses": {"plan": "prefix", "ipv6": "fd00:1::/64"}}"#;
        let name = "default".parse().unwrap();
        let plan = Plan::new(&name, &serde_json::from_str(spec).unwrap()).unwrap();
        let mac = |more: &str| {
            let text = format!(
                r#"{{"request": {{"netns": "/run/netns/blue"}}, "netns_cookie": null, {more} "is_done": true}}"#
            );
            let record: AttachRecord = serde_json::from_str(&text).unwrap();
            let slot = plan.slot(SlotNumber(0)).attached_by(Some(&record));
            record.attached(&slot).unwrap().mac.to_string()
        };
        assert_eq!(mac(""), "06:73:00:00:00:02");
        assert_eq!(mac(r#""has_mac_of_all": true,"#), "0a:57:2f:ba:f9:66");
    }
}
