//! Interfaces that eBPF slots' packets may leave by without the host's own stack.

use std::collections::BTreeSet;

use sandwire_datapath::{Order, Uplink};
use sandwire_kernel_net::{
    interface::{self, Interface, InterfaceIndex},
    qdisc, route, xdp,
};

use super::Worker;
use crate::{error::NetworkError, plan::names};

/// Why packets by interfaces that lead out take a slower way.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    /// Through the host's own stack.
    ebpf: Vec<String>,
    /// By the tc programs.
    pub(super) xdp: Vec<String>,
}

impl Refusals {
    /// What is to be said of a slot whose packets may go there.
    pub(super) fn note(&self) -> Option<String> {
        (!self.ebpf.is_empty()).then(|| self.ebpf.join("; "))
    }
}

/// The uplinks as they are now: the interfaces of these names; without names, those that a default
/// route leads out by. One that isn't there is left out until it is, one whose packets have no Ethernet
/// header for good: the programs read and write one.
pub(super) fn find(
    worker: &mut Worker,
    instance: &str,
    wanted: Option<&[String]>,
    wants_xdp: bool,
    order: Order,
) -> Result<(Vec<Uplink>, Refusals), NetworkError> {
    let mut refusals = Refusals::default();
    let mut uplinks = Vec::new();
    for found in interfaces(worker, instance, wanted)? {
        if found.mac.is_none() {
            refusals.ebpf.push(without_ethernet(&found.name));
            continue;
        }
        let mut uplink = Uplink {
            index: found.index,
            fq: qdisc::honours_departures(&mut worker.route, &found)?,
            name: found.name,
            xdp: false,
        };
        if wants_xdp {
            let reason = why_without_xdp(&uplink, order)?;
            uplink.xdp = reason.is_none();
            refusals.xdp.extend(reason);
        }
        uplinks.push(uplink);
    }
    Ok((uplinks, refusals))
}

/// Interfaces that lead out.
fn interfaces(
    worker: &mut Worker,
    instance: &str,
    wanted: Option<&[String]>,
) -> Result<Vec<Interface>, NetworkError> {
    let mut interfaces = Vec::new();
    match wanted {
        Some(wanted) => {
            for name in wanted {
                interfaces.extend(interface::find(&mut worker.route, name)?);
            }
        }
        None => {
            let defaults: BTreeSet<_> = route::list(&mut worker.route)?
                .into_iter()
                .filter(|route| route.destination.prefix_len() == 0)
                .filter_map(|route| route.interface)
                .collect();
            for index in defaults {
                interfaces.extend(interface::find_by_index(&mut worker.route, index)?);
            }
        }
    }
    let shared = names::shared_interface(instance);
    let ours = |name: &str| name == shared || names::parse_host_interface(name).is_some();
    // Of a default route that refuses, the kernel says that it leads to the loopback.
    interfaces.retain(|found| !ours(&found.name) && found.index != InterfaceIndex::LOOPBACK);
    Ok(interfaces)
}

fn without_ethernet(name: &str) -> String {
    format!(
        "uplink {name}: its packets have no Ethernet headers, so they go through the host's own stack"
    )
}

fn why_without_xdp(uplink: &Uplink, order: Order) -> Result<Option<String>, NetworkError> {
    let name = &uplink.name;
    let reason = match xdp::features(uplink.index)? {
        _ if order == Order::Last => {
            "other programs are to see packets first (uplink_order = \"last\"), and XDP comes before them all"
        }
        None => "the kernel can't tell what its driver can do (that takes Linux 6.3)",
        Some(features) if !features.runs_programs => "its driver has no XDP",
        Some(features) if !features.redirects => "its driver's XDP can't send frames elsewhere",
        // Whether it takes frames from elsewhere many drivers know only once they have a program.
        Some(_) => return Ok(None),
    };
    Ok(Some(format!("uplink {name}: {reason}")))
}
