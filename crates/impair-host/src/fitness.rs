//! May this interface be impaired? All that can be said before anything is changed.

use std::collections::BTreeSet;

use sandwire_datapath::features;
use sandwire_kernel_net::{
    interface::{self, Interface, InterfaceIndex},
    netlink::Socket,
    route, tc, xdp,
};

use crate::{control::Target, error::Error};

/// Ethernet header and a VLAN tag.
const FRAME_HEADERS: u32 = 18;

/// What the caller insists on, and what the engine can take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demands {
    /// Also the interface that the machine's default route leads through.
    pub(crate) force: bool,
    /// Whether the calling thread is in the machine's own namespace.
    pub(crate) is_machines: bool,
    /// Whether programs are attached by filters, since the kernel has no TCX.
    pub(crate) by_filters: bool,
    /// Whether the daemon asks for one of its leases, whose XDP program lets packets pass while it is impaired.
    pub(crate) is_of_lease: bool,
    /// Longest frame of the engine.
    pub(crate) frame_bytes_max: u16,
}

/// Finds the target's interface in the calling thread's namespace, if it is fit to be impaired.
pub(crate) fn find_fit(target: &Target, demands: Demands) -> Result<Interface, Error> {
    let mut socket = Socket::route()?;
    let missing = || Error::NoInterface {
        target: target.clone(),
    };
    let interface = interface::find(&mut socket, &target.interface)?.ok_or_else(missing)?;
    let unfit = |reason: &str| Error::Unfit {
        target: target.clone(),
        reason: reason.to_owned(),
    };
    if interface.index == InterfaceIndex::LOOPBACK {
        return Err(unfit(
            "the loopback interface carries what a host says to itself, and has no network behind it",
        ));
    }
    if interface.mac.is_none() {
        return Err(unfit(
            "its packets have no Ethernet headers, and only Ethernet interfaces can be impaired",
        ));
    }
    if interface.mtu + FRAME_HEADERS > u32::from(demands.frame_bytes_max) {
        return Err(Error::Mtu {
            target: target.clone(),
            mtu: interface.mtu,
            frame_bytes_max: demands.frame_bytes_max,
        });
    }
    if let Some(program) = xdp::find(&mut socket, interface.index)?
        && !(demands.is_of_lease && features::is_own_xdp(program))
    {
        return Err(unfit(
            "an XDP program takes its packets before anything else sees them; where a pool with the data path xdp has it, \
             impair the lease by its name; else detach it",
        ));
    }
    // Filters for its egress would be taken for such of its ingress.
    if demands.by_filters
        && tc::filter_qdisc(&mut socket, interface.index)?.as_deref() == Some("ingress")
    {
        return Err(unfit(
            "this kernel has no TCX, and the interface's `ingress` qdisc has no filters for what it sends. A slot with one \
             was built by an earlier version: release the lease and acquire another; elsewhere have its owner put \
             `clsact` in its place, or take Linux 6.6",
        ));
    }
    if demands.is_machines && !demands.force {
        refuse_default_route(&mut socket, target, &interface)?;
    }
    Ok(interface)
}

/// The machine's default route must not lead through it: directly, as a port of a bridge or bond, or below a VLAN.
fn refuse_default_route(
    socket: &mut Socket,
    target: &Target,
    interface: &Interface,
) -> Result<(), Error> {
    let interfaces = interface::list(socket)?;
    let routes = route::list(socket)?;
    let uplinks = routes
        .iter()
        .filter(|route| route.destination.prefix_len() == 0 && !route.unreachable)
        .filter_map(|route| route.interface);
    let Some(uplink) = uplinks
        .into_iter()
        .find(|uplink| carriers(&interfaces, *uplink).contains(&interface.index))
    else {
        return Ok(());
    };
    let name = interfaces.iter().find(|other| other.index == uplink);
    let through = name
        .filter(|_| uplink != interface.index)
        .map(|uplink| format!(" (by {})", uplink.name));
    Err(Error::DefaultRoute {
        target: target.clone(),
        through: through.unwrap_or_default(),
    })
}

/// All interfaces that packets of this one pass, itself too.
fn carriers(interfaces: &[Interface], uplink: InterfaceIndex) -> BTreeSet<InterfaceIndex> {
    let mut found = BTreeSet::new();
    let mut rest = vec![uplink];
    while let Some(next) = rest.pop() {
        if !found.insert(next) {
            continue;
        }
        for interface in interfaces {
            if interface.master == Some(next) {
                rest.push(interface.index);
            }
            if interface.index == next {
                rest.extend(interface.lower);
            }
        }
    }
    found
}
