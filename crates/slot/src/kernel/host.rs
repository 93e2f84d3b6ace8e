//! The host's side of pools: forwarding, the table's sets, the shared interface, and routes that
//! refuse clone addresses that nobody has.
//!
//! The shared interface is a bridge without ports, because not every kernel has dummy interfaces. It
//! holds the host's own address of each clone prefix, as a single address; the prefix itself has an
//! `unreachable` route, so that packets for a clone that isn't there never leave by the uplink. The
//! routes of the slots are more specific than that one.

mod missing;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use sandwire_api::slot::Defect;
use sandwire_kernel_net::{
    address::{self, Address},
    interface::{self, Change, Interface, InterfaceIndex, Mac},
    neighbour::Neighbour,
    netlink::Request,
    nft::{self, Batch},
    route::{self, LearnedDefaults, Listed, Route, Target},
};

use super::{
    Worker,
    ebpf::Ebpf,
    host_table,
    hosted::{Hosted, Served},
    inspect::{repaired, reported},
    own_addresses, versions,
};
use crate::{
    error::NetworkError,
    plan::{Plan, names},
};
use missing::{Present, find_missing};

/// Higher than that of any route that somebody sets by hand: a route of the same prefix wins.
const UNREACHABLE_METRIC: u32 = 0x7fff_0000;

/// Behind the shared interface, where nobody is.
const GATEWAY_IPV4: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
const GATEWAY_IPV6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// Nobody is on the shared interface; one that doesn't change keeps listings comparable.
pub(super) const SHARED_MAC: Mac = [0x02, 0x73, 0x77, 0x68, 0x00, 0x01];

/// Refuses what the host has other uses for. Nothing is done.
pub(super) fn check_pool(
    instance: &str,
    worker: &mut Worker,
    plan: &Plan,
) -> Result<(), NetworkError> {
    let interfaces = interface::list(&mut worker.route)?;
    versions::check(instance, worker, plan, &interfaces)?;
    let routes = route::list(&mut worker.route)?;
    check_conflicts(instance, worker, plan, (&interfaces, &routes))?;
    check_forwarding(worker, plan, (&interfaces, &routes))
}

/// Prepares the host. Returns the number of the shared interface. An error leaves what was done.
pub(super) fn add_pool(
    instance: &str,
    worker: &mut Worker,
    pool: &Hosted,
    beside: &Served<'_>,
) -> Result<InterfaceIndex, NetworkError> {
    write_table(instance, worker, pool, beside)?;
    enable_forwarding(worker, &pool.plan)?;
    add_interface_and_routes(instance, worker, pool)
}

/// Brings the host's side of a pool from one policy or data path to another.
pub(super) fn change_pool(
    instance: &str,
    worker: &mut Worker,
    before: &Hosted,
    after: &Hosted,
    beside: &Served<'_>,
) -> Result<InterfaceIndex, NetworkError> {
    let all = beside.with(after);
    match host_table::falls_short(instance, worker, &all)? {
        true => host_table::make_anew(instance, worker, &all)?,
        false => host_table::change_elements(instance, worker, (before, after), beside)?,
    }
    let shared = add_interface_and_routes(instance, worker, after)?;
    // What is no longer needed goes when the new way is there.
    let mut request = Request::new();
    if !after.serves_ebpf() {
        for route in prefix_routes(&before.plan, shared) {
            route.delete(&mut request);
        }
    }
    if !after.serves_nft() {
        for route in unreachable_routes(&before.plan) {
            route.delete(&mut request);
        }
    }
    let failures = worker.route.execute_all(request);
    let failed = failures.into_iter().find(|(_, error)| !error.is_missing());
    failed.map_or(Ok(()), |(_, error)| Err(error))?;
    host_table::cut_back(instance, worker, &all)?;
    Ok(shared)
}

pub(super) fn remove_pool(
    instance: &str,
    worker: &mut Worker,
    pool: &Hosted,
    beside: &Served<'_>,
) -> Result<(), NetworkError> {
    let mut errors = host_table::remove_elements(instance, worker, pool, beside.need_shared());
    errors.extend(remove_interface_and_routes(instance, worker, &pool.plan));
    let table = host_table::name(instance);
    match host_table::has_no_pool(instance, worker) {
        Ok(true) => {
            let mut batch = Batch::new(&table);
            batch.delete_table();
            errors.extend(batch.commit(&mut worker.netfilter).err().map(Into::into));
            let mut request = Request::new();
            interface::delete(&mut request, &names::shared_interface(instance));
            let failed = worker.route.execute(request).err();
            errors.extend(failed.filter(|error| !error.is_missing()).map(Into::into));
        }
        Ok(false) => errors.extend(host_table::cut_back(instance, worker, beside).err()),
        Err(NetworkError::Kernel { .. }) if is_table_missing(worker, &table) => {}
        Err(error) => errors.push(error),
    }
    match errors.len() {
        0 => Ok(()),
        1 => Err(errors.remove(0)),
        _ => Err(NetworkError::Several(errors)),
    }
}

fn is_table_missing(worker: &mut Worker, table: &str) -> bool {
    nft::tables(&mut worker.netfilter).is_ok_and(|tables| !tables.iter().any(|name| name == table))
}

/// Prefixes that the pool takes on the host.
fn prefixes_of(plan: &Plan) -> Vec<IpNet> {
    [plan.clone_prefixes.clone(), plan.transit_prefixes()].concat()
}

/// The host's own addresses in the pool's clone prefixes.
fn host_addresses(plan: &Plan) -> impl Iterator<Item = IpAddr> {
    let ipv4 = plan.host_ipv4.map(IpAddr::V4);
    ipv4.into_iter().chain(plan.host_ipv6.map(IpAddr::V6))
}

fn unreachable_routes(plan: &Plan) -> impl Iterator<Item = Route> + '_ {
    plan.clone_prefixes.iter().map(|prefix| Route {
        metric: Some(UNREACHABLE_METRIC),
        ..Route::new(*prefix, Target::Unreachable)
    })
}

/// What leads packets of the host's own stack to eBPF slots: by the shared interface, where a program
/// takes them. One neighbour that isn't there stands for all of them, so that the kernel has one
/// neighbour entry instead of one per sandbox.
fn prefix_routes(plan: &Plan, shared: InterfaceIndex) -> impl Iterator<Item = Route> + '_ {
    plan.clone_prefixes.iter().map(move |prefix| {
        let source = match prefix {
            IpNet::V4(_) => plan.host_ipv4.map(IpAddr::V4),
            IpNet::V6(_) => plan.host_ipv6.map(IpAddr::V6),
        };
        let target = Target::Gateway {
            interface: shared,
            gateway: gateway_for(prefix),
            source,
        };
        Route {
            mtu: Some(plan.spec.tap.mtu),
            ..Route::new(*prefix, target)
        }
    })
}

fn gateway_for(prefix: &IpNet) -> IpAddr {
    match prefix {
        IpNet::V4(_) => GATEWAY_IPV4.into(),
        IpNet::V6(_) => GATEWAY_IPV6.into(),
    }
}

fn check_conflicts(
    instance: &str,
    worker: &mut Worker,
    plan: &Plan,
    (interfaces, routes): (&[Interface], &[Listed]),
) -> Result<(), NetworkError> {
    let alias = format!("sandwire:{instance}");
    let of_pool = format!("{alias}:{}:", plan.spec.name);
    let is_ours = |interface: &Interface| {
        let its = interface.alias.as_deref().unwrap_or_default();
        its == alias || its.starts_with(&of_pool)
    };
    let name_of = |index| {
        let found = interfaces.iter().find(|interface| interface.index == index);
        found.map_or_else(
            || format!("interface {index}"),
            |interface| interface.name.clone(),
        )
    };
    let ours = |index| {
        interfaces
            .iter()
            .any(|found| found.index == index && is_ours(found))
    };
    let conflict = |prefix: &IpNet, with: String| NetworkError::Conflict {
        object: format!("prefix {prefix} of pool {}", plan.spec.name),
        with,
        advice: "choose another prefix for the pool, or remove what is there".to_owned(),
    };
    let prefixes = prefixes_of(plan);
    let overlapping = |other: &IpNet| prefixes.iter().find(|prefix| overlap(prefix, other));
    for route in routes {
        let is_default = route.destination.prefix_len() == 0;
        let own = route.unreachable && plan.clone_prefixes.contains(&route.destination)
            || route.interface.is_some_and(ours);
        if let Some(prefix) = overlapping(&route.destination)
            && !is_default
            && !own
        {
            let by = route
                .interface
                .map(|index| format!(" dev {}", name_of(index)));
            let with = format!("route {}{}", route.destination, by.unwrap_or_default());
            return Err(conflict(prefix, with));
        }
    }
    for address in address::list(&mut worker.route)? {
        if let Some(prefix) = overlapping(&address.address.trunc())
            && !ours(address.interface)
        {
            let with = format!(
                "address {} of {}",
                address.address,
                name_of(address.interface)
            );
            return Err(conflict(prefix, with));
        }
    }
    Ok(())
}

fn overlap(one: &IpNet, other: &IpNet) -> bool {
    one.contains(&other.network()) || other.contains(&one.network())
}

/// Forwarding of IPv6 makes the kernel forget default routes that it has learned from router advertisements,
/// unless `accept_ra` is 2. That would cut the host off, so it is the operator's decision. Where `accept_ra` is 0, a
/// program such as systemd-networkd or NetworkManager hears them instead, and its routes stay; what the kernel itself
/// learned before that setting doesn't.
fn check_forwarding(
    worker: &mut Worker,
    plan: &Plan,
    (interfaces, routes): (&[Interface], &[Listed]),
) -> Result<(), NetworkError> {
    if !versions::needs_ipv6(plan) || worker.procfs.read(IPV6_FORWARDING)? == "1" {
        return Ok(());
    }
    let learned =
        |route: &Listed| route.by_router_advertisement && route.destination.prefix_len() == 0;
    for route in routes.iter().filter(|route| learned(route)) {
        let named = interfaces
            .iter()
            .find(|found| Some(found.index) == route.interface);
        let Some(interface) = named else { continue };
        let setting = format!("net/ipv6/conf/{}/accept_ra", interface.name);
        let stays = match worker.procfs.read(&setting)?.as_str() {
            "0" => !LearnedDefaults::read()?.are_all_of(interface, routes),
            accept => accept == "2",
        };
        if stays {
            continue;
        }
        return Err(NetworkError::Conflict {
            object: format!("IPv6 forwarding for pool {}", plan.spec.name),
            with: format!(
                "the default route that {} learns from its router",
                interface.name
            ),
            advice: format!(
                "forwarding would make the kernel drop that route: \
                 set net.ipv6.conf.{}.accept_ra=2 first, or give the pool no IPv6",
                interface.name
            ),
        });
    }
    Ok(())
}

const IPV4_FORWARDING: &str = "net/ipv4/ip_forward";
const IPV6_FORWARDING: &str = "net/ipv6/conf/all/forwarding";

fn enable_forwarding(worker: &mut Worker, plan: &Plan) -> Result<(), NetworkError> {
    for setting in forwarding_settings(plan) {
        if worker.procfs.read(setting)? != "1" {
            worker.procfs.write(setting, "1")?;
        }
    }
    Ok(())
}

fn forwarding_settings(plan: &Plan) -> impl Iterator<Item = &'static str> + use<> {
    let has = |is_ipv4| {
        plan.clone_prefixes
            .iter()
            .any(|prefix| matches!(prefix, IpNet::V4(_)) == is_ipv4)
    };
    let ipv4 = has(true).then_some(IPV4_FORWARDING);
    ipv4.into_iter()
        .chain(has(false).then_some(IPV6_FORWARDING))
}

fn write_table(
    instance: &str,
    worker: &mut Worker,
    pool: &Hosted,
    beside: &Served<'_>,
) -> Result<(), NetworkError> {
    let all = beside.with(pool);
    if host_table::falls_short(instance, worker, &all)? {
        return host_table::make_anew(instance, worker, &all);
    }
    host_table::add_elements(instance, worker, pool, &all)
}

fn add_interface_and_routes(
    instance: &str,
    worker: &mut Worker,
    pool: &Hosted,
) -> Result<InterfaceIndex, NetworkError> {
    let plan = &pool.plan;
    let shared = find_or_create_shared(instance, worker)?;
    let mut request = Request::new();
    for address in host_addresses(plan) {
        Address::new(shared.index, address.into()).add(&mut request);
    }
    if pool.serves_ebpf() {
        prepare_shared(worker, &mut request, &shared, plan)?;
        for route in prefix_routes(plan, shared.index) {
            route.add(&mut request);
        }
    }
    if pool.serves_nft() {
        for route in unreachable_routes(plan) {
            route.add(&mut request);
        }
    }
    worker.route.execute(request)?;
    Ok(shared.index)
}

/// Makes the shared interface one that packets to and from eBPF slots can cross.
fn prepare_shared(
    worker: &mut Worker,
    request: &mut Request,
    shared: &Interface,
    plan: &Plan,
) -> Result<(), NetworkError> {
    for prefix in &plan.clone_prefixes {
        Neighbour {
            interface: shared.index,
            address: gateway_for(prefix),
            mac: SHARED_MAC,
        }
        .add(request);
    }
    for (setting, value) in shared_settings(&shared.name) {
        if worker.procfs.read(&setting)? != value {
            worker.procfs.write(&setting, value)?;
        }
    }
    Ok(())
}

/// Settings of the shared interface. It gets the host's defaults when it is made, which may be others: a router that
/// forwards by chosen interfaces alone has `net.ipv4.conf.default.forwarding = 0`.
fn shared_settings(shared: &str) -> [(String, &'static str); 2] {
    let of = |setting| format!("net/ipv4/conf/{shared}/{setting}");
    [
        // What comes from sandboxes and is for elsewhere comes up by it.
        (of("forwarding"), "1"),
        // A packet that comes up to the stack and goes down again is none that the guest could send more directly.
        (of("send_redirects"), "0"),
    ]
}

fn find_or_create_shared(instance: &str, worker: &mut Worker) -> Result<Interface, NetworkError> {
    let name = names::shared_interface(instance);
    let alias = format!("sandwire:{instance}");
    if own_addresses::may_be_made(instance, worker)? {
        own_addresses::end(instance, worker)?;
    }
    let existing = interface::find(&mut worker.route, &name)?;
    if let Some(interface) = existing
        && interface.alias.as_deref() == Some(&alias)
        && interface.mac == Some(SHARED_MAC)
        && interface.is_up
    {
        return Ok(interface);
    }
    let mut request = Request::new();
    // The host's udevd leaves it the MAC that it comes with.
    interface::create_bridge(&mut request, &name, Some(SHARED_MAC));
    if let Err(error) = worker.route.execute(request)
        && !error.is_existing()
    {
        return Err(error.into());
    }
    let change = Change {
        name: &name,
        alias: Some(&alias),
        mac: Some(SHARED_MAC),
        no_generated_addresses: true,
        no_arp: Some(true),
        up: Some(true),
        ..Change::default()
    };
    let mut request = Request::new();
    change.apply(&mut request);
    worker.route.execute(request)?;
    let found = interface::find(&mut worker.route, &name)?;
    found.ok_or_else(|| sandwire_kernel_net::Error::missing_interface(&name).into())
}

fn remove_interface_and_routes(
    instance: &str,
    worker: &mut Worker,
    plan: &Plan,
) -> Vec<NetworkError> {
    let mut request = Request::new();
    for route in unreachable_routes(plan) {
        route.delete(&mut request);
    }
    let name = names::shared_interface(instance);
    match interface::find(&mut worker.route, &name) {
        Ok(Some(shared)) => {
            for route in prefix_routes(plan, shared.index) {
                route.delete(&mut request);
            }
            for address in host_addresses(plan) {
                Address::new(shared.index, address.into()).delete(&mut request);
            }
        }
        Ok(None) => {}
        Err(error) => return vec![error.into()],
    }
    let failures = worker.route.execute_all(request);
    failures
        .into_iter()
        .filter(|(_, error)| !error.is_missing())
        .map(|(_, error)| error.into())
        .collect()
}

/// Looks at everything on the host, and puts right what is wrong. Returns the number of the shared
/// interface with the defects.
pub(super) fn inspect(
    instance: &str,
    worker: &mut Worker,
    served: &Served<'_>,
) -> Result<Vec<Defect>, NetworkError> {
    let pools = &served.pools;
    let mut defects = Vec::new();
    if served.all().next().is_none() {
        return Ok(defects);
    }
    let mut judge = |object: String, problem: &str, done: Result<(), NetworkError>| {
        defects.push(match done {
            Ok(()) => repaired(object, problem),
            Err(error) => reported(object, format!("{problem}; {error}")),
        });
    };
    if !host_table::is_sound(instance, worker, served)? {
        let done = host_table::make_anew(instance, worker, served);
        judge(
            format!("nft table {}", host_table::name(instance)),
            "its rules are missing or changed",
            done,
        );
    }
    host_table::cut_back(instance, worker, served)?;
    if own_addresses::may_be_made(instance, worker)? {
        let done = own_addresses::end(instance, worker);
        let object = "interfaces of the host's that are sandboxes'".to_owned();
        judge(object, own_addresses::PROBLEM, done);
    }
    let mut known = None;
    for pool in pools {
        for setting in forwarding_settings(&pool.plan) {
            if worker.procfs.read(setting)? != "1" {
                let done = worker.procfs.write(setting, "1").map_err(Into::into);
                judge(format!("setting {setting}"), "forwarding is off", done);
            }
        }
        let present = match known.take() {
            Some(present) => present,
            None => Present::look(instance, worker)?,
        };
        match find_missing(instance, worker, &present, pool)? {
            // What is there by then is another look's to say.
            Some(missing) => {
                let done = add_interface_and_routes(instance, worker, pool).map(drop);
                judge(missing, "it is missing or changed", done);
            }
            None => known = Some(present),
        }
    }
    Ok(defects)
}

/// Looks at what the eBPF data path needs of the host, and puts right what is wrong. Returns the number
/// of the shared interface.
pub(super) fn inspect_ebpf(
    instance: &str,
    worker: &mut Worker,
    ebpf: &Ebpf,
    wanted: Option<&[String]>,
    wants_xdp: bool,
    defects: &mut Vec<Defect>,
) -> Result<InterfaceIndex, NetworkError> {
    // What has come and gone first: programs aren't missed where nothing is.
    let shared = find_or_create_shared(instance, worker)?;
    let uplinks = ebpf.find_uplinks(worker, instance, wanted, wants_xdp)?;
    ebpf.attach(shared.index, &uplinks)?;
    for found in ebpf.datapath.inspect() {
        let object = format!("eBPF program on {}", found.interface);
        defects.push(match found.failure {
            None => repaired(object, found.text),
            Some(failure) => reported(object, format!("{}; {failure}", found.text)),
        });
    }
    ebpf.retry_xdp()?;
    ebpf.end_learning();
    Ok(shared.index)
}
