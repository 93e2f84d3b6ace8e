//! What the host should have of its pools and hasn't, by one look for all of them: each of their slots has an address and
//! routes of its own, and who asks for some is told of all.

use std::{collections::HashSet, net::IpAddr};

use ipnet::IpNet;
use sandwire_kernel_net::{
    address::{self, Address},
    interface::{self, InterfaceIndex},
    route::{self, Listed},
};

use super::{SHARED_MAC, host_addresses, shared_settings};
use crate::{
    error::NetworkError,
    kernel::{Worker, hosted::Hosted},
    plan::{Plan, names},
};

/// What the host has of that.
pub(super) struct Present {
    shared: Option<InterfaceIndex>,
    /// Of the shared interface.
    addresses: HashSet<IpAddr>,
    /// Where its routes lead.
    led: HashSet<IpNet>,
    /// What unreachable routes refuse.
    refused: HashSet<IpNet>,
}

impl Present {
    pub(super) fn look(instance: &str, worker: &mut Worker) -> Result<Self, NetworkError> {
        let found = interface::find(&mut worker.route, &names::shared_interface(instance))?;
        let sound = found.filter(|shared| shared.is_up && shared.mac == Some(SHARED_MAC));
        let Some(shared) = sound else {
            return Ok(Self::of(None, &[], &[]));
        };
        let addresses = address::list(&mut worker.route)?;
        let routes = route::list(&mut worker.route)?;
        Ok(Self::of(Some(shared.index), &addresses, &routes))
    }

    fn of(shared: Option<InterfaceIndex>, addresses: &[Address], routes: &[Listed]) -> Self {
        let its = addresses
            .iter()
            .filter(|found| Some(found.interface) == shared);
        let leading = routes
            .iter()
            .filter(|found| found.interface.is_some() && found.interface == shared);
        let refusing = routes.iter().filter(|found| found.unreachable);
        Self {
            shared,
            addresses: its.map(|found| found.address.addr()).collect(),
            led: leading.map(|found| found.destination).collect(),
            refused: refusing.map(|found| found.destination).collect(),
        }
    }

    fn missing_address(&self, plan: &Plan) -> Option<IpAddr> {
        host_addresses(plan).find(|wanted| !self.addresses.contains(wanted))
    }

    /// By the shared interface's name.
    fn missing_route(&self, pool: &Hosted, shared: &str) -> Option<String> {
        pool.plan.clone_prefixes.iter().find_map(|wanted| {
            if pool.serves_nft() && !self.refused.contains(wanted) {
                return Some(format!("unreachable route {wanted}"));
            }
            let leads = !pool.serves_ebpf() || self.led.contains(wanted);
            (!leads).then(|| format!("route {wanted} dev {shared}"))
        })
    }
}

/// The first object of a pool on the host that isn't there.
pub(super) fn find_missing(
    instance: &str,
    worker: &mut Worker,
    present: &Present,
    pool: &Hosted,
) -> Result<Option<String>, NetworkError> {
    let name = names::shared_interface(instance);
    if present.shared.is_none() {
        return Ok(Some(format!("interface {name}")));
    }
    if let Some(wanted) = present.missing_address(&pool.plan) {
        return Ok(Some(format!("address {wanted} of interface {name}")));
    }
    if pool.serves_ebpf() {
        for (setting, value) in shared_settings(&name) {
            if worker.procfs.read(&setting)? != value {
                return Ok(Some(format!("setting {setting}")));
            }
        }
    }
    Ok(present.missing_route(pool, &name))
}

#[cfg(test)]
mod tests {
    use sandwire_api::slot::DataPath;

    use super::*;

    const SHARED: InterfaceIndex = InterfaceIndex(7);

    fn pool(from: Option<DataPath>) -> Hosted {
        let text = r#"{"name": "web", "data_path": "ebpf",
            "addresses": {"plan": "prefix", "ipv4": "10.64.0.0/24", "ipv6": "fd00:c10e::/64"}}"#;
        let spec = serde_json::from_str(text).unwrap();
        let plan = Plan::new(&"test".parse().unwrap(), &spec).unwrap();
        Hosted { plan, from }
    }

    fn route(destination: IpNet, interface: Option<InterfaceIndex>) -> Listed {
        Listed {
            destination,
            interface,
            gateway: None,
            metric: None,
            unreachable: interface.is_none(),
            by_router_advertisement: false,
        }
    }

    #[test]
    fn only_what_the_shared_interface_has_is_there() {
        let pool = pool(None);
        let wanted: Vec<IpAddr> = host_addresses(&pool.plan).collect();
        let [first, second] = wanted[..] else {
            panic!("{wanted:?}");
        };
        let other = InterfaceIndex(8);
        let addresses = [
            Address::new(SHARED, first.into()),
            Address::new(other, second.into()),
        ];
        let led = &pool.plan.clone_prefixes;
        let routes = [route(led[0], Some(SHARED)), route(led[1], Some(other))];
        let present = Present::of(Some(SHARED), &addresses, &routes);
        assert_eq!(present.missing_address(&pool.plan), Some(second));
        let missing = present.missing_route(&pool, "shared");
        assert_eq!(missing, Some(format!("route {} dev shared", led[1])));
    }

    #[test]
    fn a_pool_that_moves_needs_the_routes_of_both_data_paths() {
        let moving = pool(Some(DataPath::Nft));
        let [one, two] = moving.plan.clone_prefixes[..] else {
            panic!("of both families");
        };
        let mut routes = vec![route(one, Some(SHARED)), route(two, Some(SHARED))];
        let missing =
            |routes: &[Listed]| Present::of(Some(SHARED), &[], routes).missing_route(&moving, "s");
        assert_eq!(missing(&routes), Some(format!("unreachable route {one}")));
        routes.extend([route(one, None), route(two, None)]);
        assert_eq!(missing(&routes), None);
        assert_eq!(missing(&routes[1..]), Some(format!("route {one} dev s")));
    }
}
