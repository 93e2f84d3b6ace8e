//! A container's interface that is a child of one of the host's: macvlan or ipvlan.
//!
//! There is nothing of it in the host's namespace but an entry in the data path. The programs sit on the child itself,
//! before it is raised. It is made in the container's namespace, with its alias by one send to the kernel, and found
//! again by that alias: not by the path of the namespace, which somebody may take away, but by the number that the
//! host's namespace has for it, which is journaled before anything is made
//! ([decision 28](../../../../../docs/decisions/0028-a-child-is-judged-on-itself.md)).

use std::{
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    sync::OnceLock,
};

use ipnet::IpNet;
use sandwire_api::{
    attach::{Attach, AttachedDevice, DeviceChoice, ParentSpec},
    slot::MacAddress,
};
use sandwire_datapath::NicIndex;
use sandwire_kernel_net::{
    Error as KernelError, address,
    interface::{
        self, Change, ChildDevice, ChildInterface, Interface, InterfaceIndex, NamespaceNumber,
    },
    netlink::{Request, Socket},
    netns::Home,
    probe::child,
    route::{self, Route, Target},
    tc,
};

use super::{Container, NO_INTERFACE, create_whole, open};
use crate::{
    attach::ParentRecord,
    error::NetworkError,
    kernel::{
        Worker,
        build::{Build, BuildStep, Unhindered},
        ebpf::Ebpf,
        filters::{Attachment, Found},
    },
    network::WantedChild,
    plan::SlotPlan,
};

/// What the kernel says of a parent that carries ports or children of another sort.
const BUSY: i32 = rustix::io::Errno::BUSY.raw_os_error();
/// What it says of a kind of interface that it doesn't have.
const UNKNOWN: i32 = rustix::io::Errno::OPNOTSUPP.raw_os_error();
/// The metric of routes that come behind others, to which the interface's number is added: more than what the kernel
/// gives to routes without one, in either family.
const METRIC_BEHIND: u32 = 1024;

/// Looks at an interface of the host that is to have children with an MTU.
pub(in crate::kernel) fn check_parent(
    home: &Home,
    worker: &mut Worker,
    wanted: &WantedChild<'_>,
) -> Result<Interface, NetworkError> {
    check_kernel(home, wanted.device)?;
    find_usable(worker, wanted.parent, wanted.mtu)
}

/// Refuses what this kernel doesn't make. Tried once.
fn check_kernel(home: &Home, choice: DeviceChoice) -> Result<(), NetworkError> {
    static TRIED: [OnceLock<Result<(), String>>; 2] = [OnceLock::new(), OnceLock::new()];
    let (device, tried) = match choice {
        DeviceChoice::Ipvlan => (ChildDevice::Ipvlan, &TRIED[0]),
        _ => (ChildDevice::Macvlan, &TRIED[1]),
    };
    let found = tried.get_or_init(|| {
        let tried = child::check(home, device);
        tried.map_err(|error| error.into_cause().to_string())
    });
    found.clone().map_err(|reason| NetworkError::Conflict {
        object: format!("device = {}", choice.name()),
        with: format!("this kernel, which makes no {}: {reason}", device.kind()),
        advice: "use veth".to_owned(),
    })
}

fn find_usable(
    worker: &mut Worker,
    parent: &ParentSpec,
    mtu: u32,
) -> Result<Interface, NetworkError> {
    let name = parent.interface.as_str();
    let found = interface::find(&mut worker.route, name)?
        .ok_or_else(|| KernelError::missing_interface(name))?;
    let is_ours = found
        .alias
        .as_ref()
        .is_some_and(|alias| alias.starts_with("sandwire:"));
    let (with, advice) = if is_ours {
        ("one that sandwire has made", "name one of the host's own")
    } else if !found.is_ethernet {
        ("one that carries no Ethernet", "name one that does")
    } else if found.master.is_some() {
        (
            "a port of another interface",
            "name the bridge or bond that it belongs to",
        )
    } else if !found.is_up {
        ("one that is down", "raise it")
    } else if found.mtu < mtu {
        let object = format!("MTU {mtu} of a container's interface");
        let with = format!("{}, that of its parent {name}", found.mtu);
        let advice = "set a smaller one, by tap.mtu of the pool".to_owned();
        return Err(NetworkError::Conflict {
            object,
            with,
            advice,
        });
    } else {
        return Ok(found);
    };
    Err(NetworkError::Conflict {
        object: format!("parent {name}"),
        with: with.to_owned(),
        advice: advice.to_owned(),
    })
}

/// Looks at the same for a container in the namespace of a file, and at what network it is on.
pub(in crate::kernel) fn find_parent(
    home: &Home,
    worker: &mut Worker,
    wanted: &WantedChild<'_>,
    netns: &Path,
) -> Result<ParentRecord, NetworkError> {
    let found = check_parent(home, worker, wanted)?;
    let parent = wanted.parent;
    let mac = found.mac.map(MacAddress);
    let file = open(home, netns)?;
    let namespace = NamespaceNumber::of(&mut worker.route, file.as_fd())?;
    Ok(ParentRecord {
        interface: parent.interface.clone(),
        mac: mac.filter(|_| wanted.device == DeviceChoice::Ipvlan),
        gateways: gateways(worker, parent, &found)?,
        subnets: subnets(worker, parent, &found)?,
        namespace: namespace.0,
    })
}

/// One gateway of each family: that of the pool, or of the host's own default route by the parent.
fn gateways(
    worker: &mut Worker,
    parent: &ParentSpec,
    found: &Interface,
) -> Result<Vec<IpAddr>, NetworkError> {
    let mut defaults: Vec<_> = route::list(&mut worker.route)?
        .into_iter()
        .filter(|route| route.destination.prefix_len() == 0)
        .filter(|route| route.interface == Some(found.index))
        .collect();
    defaults.sort_by_key(|route| route.metric);
    let mut chosen = parent.gateways.clone();
    for gateway in defaults.into_iter().filter_map(|route| route.gateway) {
        let is_of_family = |other: &IpAddr| other.is_ipv4() == gateway.is_ipv4();
        if !chosen.iter().any(is_of_family) {
            chosen.push(gateway);
        }
    }
    Ok(chosen)
}

/// The pool's subnets, or those of the parent's own addresses, each once.
fn subnets(
    worker: &mut Worker,
    parent: &ParentSpec,
    found: &Interface,
) -> Result<Vec<IpNet>, NetworkError> {
    let mut subnets = match parent.subnets.is_empty() {
        true => own_subnets(worker, found)?,
        false => parent.subnets.clone(),
    };
    subnets.sort_unstable();
    subnets.dedup();
    Ok(subnets)
}

/// The subnet of each of an interface's addresses; several may be in one.
fn own_subnets(worker: &mut Worker, found: &Interface) -> Result<Vec<IpNet>, NetworkError> {
    let is_link_local = |address: IpAddr| match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let own = address::list(&mut worker.route)?.into_iter();
    let on_link = own
        .filter(|own| own.interface == found.index && own.peer.is_none())
        .map(|own| own.address)
        .filter(|own| own.prefix_len() < own.max_prefix_len() && !is_link_local(own.addr()));
    Ok(on_link.map(|own| own.trunc()).collect())
}

/// Makes the child, down and without programs. The thread is in its namespace.
pub(super) fn create(
    target: &Container<'_>,
    parent: &ParentRecord,
    worker: &mut Worker,
    route: &mut Socket,
    slot: &SlotPlan,
    namespace: BorrowedFd<'_>,
) -> Result<(), NetworkError> {
    let Some(spec) = &slot.parent else {
        return Err(crate::network::not_attachable(slot));
    };
    let found = find_usable(worker, spec, slot.mtu)?;
    if NamespaceNumber::of(&mut worker.route, namespace)?.0 != parent.namespace {
        return Err(target.is_another());
    }
    // Whatever has the name would be given our alias, by the message that follows the refused one.
    if interface::find(route, target.name())?.is_some() {
        return Err(target.name_is_taken());
    }
    let home = NamespaceNumber::of(route, target.home.as_fd())?;
    let mut request = Request::new();
    let child = ChildInterface {
        device: device(target.record.device),
        name: target.name(),
        parent: found.index,
        parent_namespace: Some(home),
        mac: target.nic.guest_mac.0,
        mtu: slot.mtu,
    };
    child.create(&mut request);
    let settings = Change {
        name: target.name(),
        alias: Some(&slot.host_alias),
        no_generated_addresses: true,
        ..Change::default()
    };
    settings.apply(&mut request);
    let refused = |with: &str, advice: &str| NetworkError::Conflict {
        object: format!("{} on {}", child.device.kind(), parent.interface),
        with: with.to_owned(),
        advice: advice.to_owned(),
    };
    match create_whole(route, request, target.name()) {
        Err(error) if error.is_existing() => Err(target.name_is_taken()),
        Err(error) if error.errno() == Some(BUSY) => Err(refused(
            "other children or ports that the parent has, or one of the same Ethernet address",
            "name another parent, or another MAC",
        )),
        Err(error) if error.errno() == Some(UNKNOWN) => {
            Err(refused("this kernel, which has none", "use device = veth"))
        }
        other => Ok(other?),
    }
}

fn device(device: AttachedDevice) -> ChildDevice {
    match device {
        AttachedDevice::Ipvlan => ChildDevice::Ipvlan,
        AttachedDevice::Veth | AttachedDevice::Netkit | AttachedDevice::Macvlan => {
            ChildDevice::Macvlan
        }
    }
}

/// The programs of a child that was just made, and then what is inside. The thread is in its namespace.
pub(super) fn make(
    target: &Container<'_>,
    build: &Build<'_>,
    worker: &mut Worker,
    route: &mut Socket,
    ebpf: &Ebpf,
    shared: InterfaceIndex,
) -> Result<(), NetworkError> {
    let found = interface::find(route, target.name())?;
    let own = found.ok_or_else(|| KernelError::missing_interface(target.name()))?;
    let first = build.step(BuildStep::Entry, || {
        let first = ebpf.reserve(build.slot)?;
        // The lease may have asked for another MAC or MTU than the slot was made ready with.
        ebpf.write(build.slot, &[NO_INTERFACE], shared)?;
        Ok(first)
    })?;
    build.step(BuildStep::Filters, || {
        let mut request = Request::new();
        tc::add_clsact(&mut request, own.index);
        for attachment in Attachment::child(own.index, first) {
            attachment.add_filter(&mut request, &ebpf.datapath);
        }
        Ok(route.execute(request)?)
    })?;
    build.step(BuildStep::Settings, || target.set(&mut worker.procfs))?;
    build.step(BuildStep::Addresses, || target.configure(route, own.index))
}

/// Routes of a network without which its gateways and subnets can't be reached. None for who wants no routes.
pub(super) fn routes_on_link(
    target: &Container<'_>,
    parent: &ParentRecord,
    own: InterfaceIndex,
) -> Vec<Route> {
    let routes = &target.record.request.routes;
    if routes.as_ref().is_some_and(Vec::is_empty) {
        return Vec::new();
    }
    let addresses = target.record.addresses(target.nic);
    let has_family = |prefix: &IpNet| {
        let mut addresses = addresses.iter();
        addresses.any(|one| one.address.addr().is_ipv4() == prefix.addr().is_ipv4())
    };
    let is_connected = |subnet: &IpNet| {
        let mut addresses = addresses.iter();
        addresses.any(|one| one.address.trunc() == *subnet)
    };
    let mut on_link: Vec<IpNet> = parent.subnets.clone();
    on_link.retain(|subnet| has_family(subnet) && !is_connected(subnet));
    let of_gateways = addresses.iter().filter_map(|one| one.gateway);
    for gateway in of_gateways {
        let is_link_local = match gateway {
            IpAddr::V4(_) => false,
            IpAddr::V6(gateway) => gateway.is_unicast_link_local(),
        };
        if !is_link_local
            && !parent
                .subnets
                .iter()
                .any(|subnet| subnet.contains(&gateway))
        {
            on_link.push(IpNet::from(gateway));
        }
    }
    // Leases of before may remember a subnet once for each address in it.
    on_link.sort_unstable();
    on_link.dedup();
    let to = |destination| Route::new(destination, Target::Interface(own));
    on_link.into_iter().map(to).collect()
}

/// Adds such routes. Nobody has asked for them by name, so one to the same destination that is there is no conflict: it
/// stays first, and ours comes behind it. An IPv6 gateway must be on the link of the very interface that leads to it.
pub(super) fn add_on_link(
    route: &mut Socket,
    on_link: &[Route],
    own: InterfaceIndex,
) -> Result<(), KernelError> {
    let mut request = Request::new();
    on_link.iter().for_each(|one| one.create(&mut request));
    let mut behind = Request::new();
    for (place, error) in route.execute_all(request) {
        if !error.is_existing() {
            return Err(error);
        }
        let second = Route {
            metric: Some(METRIC_BEHIND.saturating_add(own.0)),
            ..on_link[place]
        };
        second.create(&mut behind);
    }
    let failures = route.execute_all(behind);
    let failed = failures.into_iter().find(|(_, error)| !error.is_existing());
    failed.map_or(Ok(()), |(_, error)| Err(error))
}

/// The child of a lease, wherever its namespace is.
pub(super) fn find(
    worker: &mut Worker,
    slot: &SlotPlan,
) -> Result<Option<(NamespaceNumber, Interface)>, NetworkError> {
    let record = slot.attach.as_ref();
    let Some(parent) = record.and_then(|record| record.parent.as_ref()) else {
        return Ok(None);
    };
    let namespace = NamespaceNumber(parent.namespace);
    let listed = interface::list_in(&mut worker.route, namespace)?;
    let mut ours = listed
        .into_iter()
        .filter(|found| found.alias.as_deref() == Some(&*slot.host_alias));
    Ok(ours.next().map(|found| (namespace, found)))
}

/// Deletes the child of a lease; none is fine.
pub(super) fn delete(worker: &mut Worker, slot: &SlotPlan) -> Result<(), NetworkError> {
    let Some((namespace, found)) = find(worker, slot)? else {
        return Ok(());
    };
    Ok(interface::delete_elsewhere(
        &mut worker.route,
        namespace,
        found.index,
    )?)
}

/// What the interface of a lease is called in messages.
pub(in crate::kernel) fn name_of(slot: &SlotPlan) -> String {
    slot.attach.as_ref().map_or_else(String::new, |attach| {
        let Attach {
            interface, netns, ..
        } = &attach.request;
        format!(
            "interface {interface} in network namespace {}",
            netns.display()
        )
    })
}

/// What is wrong with the child of a lease, if anything that can be put right.
pub(in crate::kernel) fn problem(
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
    slot: &SlotPlan,
) -> Result<Option<&'static str>, NetworkError> {
    let Some((_, found)) = find(worker, slot)? else {
        return Ok(Some("it is gone"));
    };
    let Some(first) = ebpf.find(slot) else {
        return Ok(None);
    };
    let mut route = socket_inside(home, slot)?;
    for attachment in Attachment::child(found.index, first) {
        match attachment.look(&mut route, ebpf)? {
            Found::Itself => {}
            Found::OtherMaps => return Ok(Some("a program on it goes by maps of before")),
            Found::Nothing | Found::Foreign => {
                return Ok(Some("a program on it is gone or replaced"));
            }
        }
    }
    Ok(None)
}

/// Puts right what [`problem`] found, and the entry.
pub(in crate::kernel) fn restore(
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
    shared: InterfaceIndex,
    slot: &SlotPlan,
) -> Result<(), NetworkError> {
    let first = ebpf.reserve(slot)?;
    if !ebpf.is_written(slot, &[NO_INTERFACE], shared) {
        ebpf.write(slot, &[NO_INTERFACE], shared)?;
    }
    let Some((_, found)) = find(worker, slot)? else {
        let build = Build {
            steps: &Unhindered,
            slot,
            ebpf: Some((ebpf, shared)),
        };
        return super::attach(&build, home, worker, ebpf, shared);
    };
    restore_programs(home, ebpf, slot, &found, first)
}

/// Puts the loaded programs in the place of older ones, if there is a child to have them.
pub(in crate::kernel) fn exchange_programs(
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
    slot: &SlotPlan,
) -> Result<(), NetworkError> {
    match find(worker, slot)? {
        Some((_, found)) => restore_programs(home, ebpf, slot, &found, ebpf.reserve(slot)?),
        None => Ok(()),
    }
}

fn restore_programs(
    home: &Home,
    ebpf: &Ebpf,
    slot: &SlotPlan,
    found: &Interface,
    first: NicIndex,
) -> Result<(), NetworkError> {
    let mut route = socket_inside(home, slot)?;
    for attachment in Attachment::child(found.index, first) {
        attachment.restore(&mut route, &ebpf.datapath)?;
    }
    Ok(())
}

/// A socket in the namespace of a lease.
fn socket_inside(home: &Home, slot: &SlotPlan) -> Result<Socket, NetworkError> {
    let (Some(record), Some(nic)) = (&slot.attach, slot.nics.first()) else {
        return Err(crate::network::not_attachable(slot));
    };
    let file = open(home, &record.request.netns)?;
    let inside = home.enter_open(file.as_fd())?;
    let target = Container { home, record, nic };
    target.check_identity()?;
    let route = Socket::route()?;
    drop(inside);
    Ok(route)
}
