//! Whether a container's interface is still as it was made.

use std::{net::IpAddr, os::fd::AsFd};

use sandwire_api::slot::Defect;
use sandwire_kernel_net::{
    address,
    interface::{self, Interface},
    netlink::Socket,
    netns::Home,
    route,
};

use super::{
    super::{Worker, inspect::reported},
    Container, open,
};
use crate::{error::NetworkError, plan::SlotPlan};

/// Compares the container's end with how it was made.
pub(in crate::kernel) fn inspect(home: &Home, worker: &mut Worker, slot: &SlotPlan) -> Vec<Defect> {
    let (Some(record), Some(nic)) = (&slot.attach, slot.nics.first()) else {
        return Vec::new();
    };
    let target = Container { home, record, nic };
    match target.look(worker, slot) {
        Ok(problems) => problems
            .into_iter()
            .map(|problem| reported(target.interface(), problem))
            .collect(),
        Err(error) => vec![reported(target.interface(), error.to_string())],
    }
}

impl Container<'_> {
    fn interface(&self) -> String {
        format!("interface {} in {}", self.name(), self.object())
    }

    fn look(&self, worker: &mut Worker, slot: &SlotPlan) -> Result<Vec<String>, NetworkError> {
        let host_end = interface::find(&mut worker.route, &slot.host_interface)?;
        let file = open(self.home, &self.record.request.netns)?;
        let inside = self.home.enter_open(file.as_fd())?;
        self.check_identity()?;
        let mut route = Socket::route()?;
        drop(inside);
        let found = interface::find(&mut route, self.name())?;
        let Some(found) = found else {
            return Ok(vec!["it is gone".to_owned()]);
        };
        let host_end = host_end.map(|host_end| host_end.index);
        if slot.is_child() {
            if found.alias.as_deref() != Some(&*slot.host_alias) {
                return Ok(vec!["it is not the one that was made".to_owned()]);
            }
        } else if host_end.is_none() || found.peer != host_end {
            return Ok(vec![format!(
                "it is not the other end of {}",
                slot.host_interface
            )]);
        }
        let mut problems = self.settings_problems(&found, slot);
        let held = address::list(&mut route)?;
        let has = |wanted: IpAddr| {
            let mut held = held.iter().filter(|held| held.interface == found.index);
            held.any(|held| held.address.addr() == wanted)
        };
        let wanted = self.record.addresses(self.nic);
        let wanted = wanted.iter().filter(|own| !has(own.address.addr()));
        problems.extend(wanted.map(|own| format!("it lacks address {}", own.address)));
        let routes = route::list(&mut route)?;
        for wanted in self.record.routes(self.nic) {
            let is_there = routes.iter().any(|route| {
                route.destination == wanted.destination
                    && route.interface == Some(found.index)
                    && route.gateway == Some(wanted.gateway)
            });
            if !is_there {
                problems.push(format!("the route to {} is gone", wanted.destination));
            }
        }
        Ok(problems)
    }

    fn settings_problems(&self, found: &Interface, slot: &SlotPlan) -> Vec<String> {
        let mut problems = Vec::new();
        let kind = self.record.device.name();
        if found.kind.as_deref() != Some(kind) {
            problems.push(format!("it is no {kind} interface"));
        }
        if !found.is_up {
            problems.push("it is down".to_owned());
        }
        if found.mac != Some(self.nic.guest_mac.0) {
            problems.push(format!("its MAC is not {}", self.nic.guest_mac));
        }
        if found.mtu != slot.mtu {
            problems.push(format!("its MTU is {}, not {}", found.mtu, slot.mtu));
        }
        problems
    }
}
