//! Container slots: a pair of interfaces, made where it is wanted.
//!
//! Moving an interface from namespace to namespace makes the kernel wait for all its readers, 22 ms each time; making
//! a pair with one end there takes half a millisecond
//! ([decision 22](../../../../docs/decisions/0022-a-containers-interface-is-made-in-place.md)). So a slot that is ready
//! has its entry in the data path and nothing else, and [`attach`] makes the rest.
//!
//! The pair and the host end's alias are made by one send to the kernel, which nothing can cut in two: whatever
//! happens then, the host end is found again by its alias, and takes the other end with it, wherever that is. The
//! program is on the host end before the container's end is raised, so no packet passes unjudged.

use std::{
    mem,
    net::Ipv6Addr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    thread,
    time::Duration,
};

use ipnet::{IpNet, Ipv6Net};
use sandwire_api::attach::AttachedDevice;
use sandwire_kernel_net::{
    Error as KernelError,
    address::Address,
    interface::{self, Change, End, InterfaceIndex, InterfacePair, Mac, PairDevice},
    neighbour::Neighbour,
    netlink::{Request, Socket},
    netns::{self, Home},
    procfs::PrivateProcfs,
    route::{Route, Target},
};

mod child;
mod inspect;
mod tap;

pub(super) use child::{
    check_parent, exchange_programs as exchange_child_programs, find_parent, name_of,
    problem as child_problem, restore as restore_child,
};
pub(super) use inspect::inspect;
pub(super) use tap::{problem as tap_problem, restore as restore_tap};

use super::{
    Worker,
    build::{Build, BuildStep},
    ebpf::Ebpf,
    filters::Attachment,
    host_slot,
};
use crate::{
    attach::AttachRecord,
    error::NetworkError,
    plan::{NicPlan, SlotPlan},
};

/// The number of a host end that isn't there yet.
const NO_INTERFACE: InterfaceIndex = InterfaceIndex(0);
/// How often a host end's queue is looked for, and the pause between.
const QUEUE_LOOKS: u32 = 200;
const QUEUE_PAUSE: Duration = Duration::from_millis(1);

/// Readies a slot: its place in the data path, which says that nobody leases it.
pub(super) fn build(
    build: &Build<'_>,
    worker: &mut Worker,
    ebpf: &Ebpf,
    shared: InterfaceIndex,
) -> Result<(), NetworkError> {
    let slot = build.slot;
    build.step(BuildStep::Entry, || {
        // What a lease left that was never given to anybody.
        delete_host_end(worker, slot)?;
        ebpf.reserve(slot)?;
        ebpf.deactivate(slot)?;
        ebpf.write(slot, &[NO_INTERFACE], shared)
    })
}

/// Whether the entry of a slot that nobody leases says so.
pub(super) fn is_ready(ebpf: &Ebpf, shared: InterfaceIndex, slot: &SlotPlan) -> bool {
    ebpf.is_written(slot, &[NO_INTERFACE], shared)
}

/// Looks at the namespace that an interface is to go to. Returns the number that the kernel never gives again, if it
/// tells.
pub(super) fn find_namespace(home: &Home, path: &Path) -> Result<Option<u64>, NetworkError> {
    let file = open(home, path)?;
    let inside = home.enter_open(file.as_fd())?;
    let cookie = netns::cookie().ok();
    drop(inside);
    Ok(cookie)
}

fn open(home: &Home, path: &Path) -> Result<OwnedFd, NetworkError> {
    let file = netns::open_file(path)?;
    if netns::are_same(file.as_fd(), home.as_fd())? {
        return Err(NetworkError::Conflict {
            object: format!("network namespace {}", path.display()),
            with: "the host's own".to_owned(),
            advice: "give that of the container".to_owned(),
        });
    }
    Ok(file)
}

/// Makes a leased slot's interface in the namespace that its lease names. On error nothing is left of it.
pub(super) fn attach(
    build: &Build<'_>,
    home: &Home,
    worker: &mut Worker,
    ebpf: &Ebpf,
    shared: InterfaceIndex,
) -> Result<(), NetworkError> {
    let slot = build.slot;
    let (Some(record), Some(nic)) = (&slot.attach, slot.nics.first()) else {
        return Err(NetworkError::Conflict {
            object: format!("slot {}", slot.netns_name),
            with: "its lease, which names no namespace".to_owned(),
            advice: "acquire it with one".to_owned(),
        });
    };
    let target = Container { home, record, nic };
    let file = open(home, &record.request.netns)?;
    // Holds the namespace until all is done: whoever deletes it meanwhile waits for us without knowing.
    let inside = home.enter_open(file.as_fd())?;
    target.check_identity()?;
    let mut route = Socket::route()?;
    build.step(BuildStep::Veth, || match &record.parent {
        Some(parent) => child::create(&target, parent, worker, &mut route, slot, file.as_fd()),
        None => target.create_pair(worker, slot, file.as_fd()),
    })?;
    let made = match &record.parent {
        Some(_) => child::make(&target, build, worker, &mut route, ebpf, shared),
        None => target.make(build, worker, &mut route, ebpf, shared),
    };
    drop(inside);
    let made = made
        .and_then(|()| match record.parent {
            Some(_) => Ok(()),
            None => await_queue(worker, &slot.host_interface),
        })
        .and_then(|()| target.check_present(file.as_fd()));
    if let Err(error) = made {
        return Err(match delete(worker, slot) {
            Ok(()) => error,
            Err(left) => NetworkError::Several(vec![error, left]),
        });
    }
    Ok(())
}

/// Waits until the host end sends. An interface has its queue from the kernel a moment after its carrier, which has come with
/// the other end, and what is sent before is dropped. Since Linux 6.8 the kernel sees to that when it is asked for the
/// interface (`rtnl_getlink`); before, only to ask again helps.
fn await_queue(worker: &mut Worker, host_end: &str) -> Result<(), NetworkError> {
    for _ in 0..QUEUE_LOOKS {
        let found = interface::find(&mut worker.route, host_end)?;
        if found.is_none_or(|found| found.queue.as_deref() != Some("noop")) {
            break;
        }
        thread::sleep(QUEUE_PAUSE);
    }
    // Without it nothing is wrong yet: the kernel is busy, and the interface has it later.
    Ok(())
}

/// Somebody's namespace, with what is wanted in it.
struct Container<'a> {
    home: &'a Home,
    record: &'a AttachRecord,
    nic: &'a NicPlan,
}

impl Container<'_> {
    fn object(&self) -> String {
        format!("network namespace {}", self.record.request.netns.display())
    }

    fn name(&self) -> &str {
        self.record.request.interface.as_str()
    }

    /// Whether the thread is in the namespace that the lease was made for: a process's number comes again.
    fn check_identity(&self) -> Result<(), NetworkError> {
        match (self.record.netns_cookie, netns::cookie().ok()) {
            (Some(wanted), Some(found)) if wanted != found => Err(self.is_another()),
            _ => Ok(()),
        }
    }

    fn is_another(&self) -> NetworkError {
        NetworkError::Conflict {
            object: self.object(),
            with: "another one that is there now".to_owned(),
            advice: "that of the lease is gone: release it".to_owned(),
        }
    }

    fn device(&self) -> PairDevice {
        match self.record.device {
            AttachedDevice::Netkit => PairDevice::Netkit,
            AttachedDevice::Veth | AttachedDevice::Macvlan | AttachedDevice::Ipvlan => {
                PairDevice::Veth
            }
        }
    }

    fn name_is_taken(&self) -> NetworkError {
        NetworkError::Conflict {
            object: format!("interface {} in {}", self.name(), self.object()),
            with: "one of that name".to_owned(),
            advice: "delete it, or give another name".to_owned(),
        }
    }

    /// Both ends and the alias of the host end, by one send. Both ends are down.
    fn create_pair(
        &self,
        worker: &mut Worker,
        slot: &SlotPlan,
        namespace: BorrowedFd<'_>,
    ) -> Result<(), NetworkError> {
        let mut request = Request::new();
        let pair = InterfacePair {
            device: self.device(),
            name: &slot.host_interface,
            index: NO_INTERFACE,
            peer_name: self.name(),
            peer_namespace: namespace,
            // Packets to the gateway are then for the host end itself, and stay so on their way to another's.
            mac: self.nic.gateway_mac.0,
            peer_mac: self.nic.guest_mac.0,
            mtu: slot.mtu,
            dormant: Some(End::Here),
        };
        pair.create(&mut request);
        let settings = Change {
            name: &slot.host_interface,
            alias: Some(&slot.host_alias),
            ipv4_forwarding: Some(true),
            no_generated_addresses: true,
            ..Change::default()
        };
        settings.apply(&mut request);
        match create_whole(&mut worker.route, request, &slot.host_interface) {
            Err(error) if error.is_existing() => {
                // One end or the other; ours was looked for when the slot was made ready.
                let own = interface::find(&mut worker.route, &slot.host_interface)?;
                Err(match own {
                    None => self.name_is_taken(),
                    Some(_) => error.into(),
                })
            }
            other => Ok(other?),
        }
    }

    /// The host end with its program, and then the container's end. The thread is in the namespace.
    fn make(
        &self,
        build: &Build<'_>,
        worker: &mut Worker,
        route: &mut Socket,
        ebpf: &Ebpf,
        shared: InterfaceIndex,
    ) -> Result<(), NetworkError> {
        let slot = build.slot;
        let (index, own, first) = build.step(BuildStep::Entry, || {
            let name = &slot.host_interface;
            let found = interface::find(&mut worker.route, name)?;
            let found = found.ok_or_else(|| KernelError::missing_interface(name))?;
            // Numbers are of namespaces: this one is that of the thread.
            let own = found
                .peer
                .ok_or_else(|| KernelError::missing_interface(self.name()))?;
            let first = ebpf.reserve(slot)?;
            ebpf.write(slot, &[found.index], shared)?;
            Ok((found.index, own, first))
        })?;
        build.step(BuildStep::HostEnd, || {
            let mut request = Request::new();
            Attachment::host_end(index, first).add(&mut request, &ebpf.datapath);
            let raised = Change {
                name: &slot.host_interface,
                index: Some(index),
                up: Some(true),
                ..Change::default()
            };
            raised.apply(&mut request);
            Ok(worker.route.execute(request)?)
        })?;
        build.step(BuildStep::Settings, || self.set(&mut worker.procfs))?;
        build.step(BuildStep::Addresses, || self.configure(route, own))?;
        match tap::Beside::of(slot) {
            Some(beside) => beside.make(build, route, ebpf, own),
            None => Ok(()),
        }
    }

    /// Settings that only files have. Nobody announces routers here, and addresses are for certain.
    fn set(&self, procfs: &mut PrivateProcfs) -> Result<(), NetworkError> {
        if self.nic.ipv6.is_none() {
            return Ok(());
        }
        let folder = format!("net/ipv6/conf/{}", self.name());
        let disabled = format!("{folder}/disable_ipv6");
        // Runtimes turn IPv6 off for namespaces that have none yet.
        if procfs.read(&disabled)? != "0" {
            procfs.write(&disabled, "0")?;
        }
        Ok(procfs.write(&format!("{folder}/accept_ra"), "0")?)
    }

    /// Addresses and routes, the routes on the link before those whose gateways they lead to.
    fn configure(&self, route: &mut Socket, index: InterfaceIndex) -> Result<(), NetworkError> {
        let mut request = Request::new();
        self.raise(&mut request, index);
        let on_link = match &self.record.parent {
            Some(parent) => child::routes_on_link(self, parent, index),
            None => Vec::new(),
        };
        if !on_link.is_empty() {
            let raised = route.execute(mem::take(&mut request));
            raised
                .and_then(|()| child::add_on_link(route, &on_link, index))
                .map_err(|error| self.cannot_configure(error))?;
        }
        self.add_routes(&mut request, index);
        let done = route.execute(request);
        done.map_err(|error| self.cannot_configure(error))
    }

    /// Gives the interface its addresses and raises it; a pair also knows its gateways from then on.
    fn raise(&self, request: &mut Request, index: InterfaceIndex) {
        let settings = Change {
            name: self.name(),
            index: Some(index),
            ..Change::default()
        };
        let quiet = Change {
            no_generated_addresses: true,
            ..settings
        };
        quiet.apply(request);
        let addresses = self.record.addresses(self.nic);
        for own in &addresses {
            Address::new(index, own.address).add(request);
        }
        if self.record.device == AttachedDevice::Macvlan && self.nic.ipv6.is_some() {
            // Its neighbours are asked, and answered, by this one.
            let link_local = IpNet::V6(link_local(self.nic.guest_mac.0));
            Address::new(index, link_local).add(request);
        }
        let raised = Change {
            up: Some(true),
            ..settings
        };
        raised.apply(request);
        if self.record.parent.is_some() {
            return;
        }
        for address in addresses.iter().filter_map(|own| own.gateway) {
            let gateway = Neighbour {
                interface: index,
                address,
                mac: self.nic.gateway_mac.0,
            };
            gateway.add(request);
        }
    }

    /// Routes that were asked for, or one to everything in each family.
    fn add_routes(&self, request: &mut Request, index: InterfaceIndex) {
        let addresses = self.record.addresses(self.nic);
        for wanted in self.record.routes(self.nic) {
            let source = addresses
                .iter()
                .find(|own| own.gateway == Some(wanted.gateway));
            let target = Target::Gateway {
                interface: index,
                gateway: wanted.gateway,
                source: source.map(|own| own.address.addr()),
            };
            // Never in somebody else's place.
            Route::new(wanted.destination, target).create(request);
        }
    }

    /// What is there belongs to whoever made it, and stays.
    fn cannot_configure(&self, error: KernelError) -> NetworkError {
        let (_, object) = error.subject();
        match object.starts_with("route ") && error.is_existing() {
            true => NetworkError::Conflict {
                object: format!("{object} in {}", self.object()),
                with: "one that is there".to_owned(),
                advice: "only one interface can have it: leave it out of this one's `routes`, which may be none"
                    .to_owned(),
            },
            false => error.into(),
        }
    }

    /// Whether the namespace is still where it was found: we alone may be what holds it.
    fn check_present(&self, namespace: BorrowedFd<'_>) -> Result<(), NetworkError> {
        let now = open(self.home, &self.record.request.netns);
        match now {
            Ok(now) if netns::are_same(now.as_fd(), namespace)? => Ok(()),
            _ => Err(NetworkError::reason(
                "attach an interface to",
                self.object(),
                "it vanished meanwhile",
            )),
        }
    }
}

/// Makes an interface and whatever else the request says of it, whose first message makes it. One that is refused any of
/// that is taken away again: it may lack the alias by which it would be found.
fn create_whole(socket: &mut Socket, request: Request, name: &str) -> Result<(), KernelError> {
    let failures = socket.execute_all(request);
    let is_made = failures.iter().all(|(place, _)| *place > 0);
    let Some((_, refusal)) = failures.into_iter().next() else {
        return Ok(());
    };
    if is_made {
        let mut request = Request::new();
        interface::delete(&mut request, name);
        if let Err(error) = socket.execute(request) {
            tracing::error!(interface = name, %error, "an interface that was made by half stays");
        }
    }
    Err(refusal)
}

/// Takes away the interface of a lease, whatever it is.
fn delete(worker: &mut Worker, slot: &SlotPlan) -> Result<(), NetworkError> {
    match slot.is_child() {
        true => child::delete(worker, slot),
        false => delete_host_end(worker, slot),
    }
}

/// Takes away what a lease has in its namespace.
pub(super) fn release(
    home: &Home,
    worker: &mut Worker,
    slot: &SlotPlan,
) -> Result<(), NetworkError> {
    if slot.is_child() {
        return child::delete(worker, slot);
    }
    let alone = tap::delete_alone(home, worker, slot);
    let deleted = delete_host_end(worker, slot);
    match (alone, deleted) {
        (Err(first), Err(second)) => Err(NetworkError::Several(vec![first, second])),
        (alone, deleted) => alone.and(deleted),
    }
}

/// Takes a slot's interface away, with its other end and what is beside that; none is fine.
pub(super) fn delete_host_end(worker: &mut Worker, slot: &SlotPlan) -> Result<(), NetworkError> {
    let found = interface::find(&mut worker.route, &slot.host_interface)?;
    let Some(found) = found else { return Ok(()) };
    if found.alias.as_deref() != Some(&*slot.host_alias) {
        return Err(NetworkError::Conflict {
            object: format!("interface {}", slot.host_interface),
            with: "one of that name which is not ours".to_owned(),
            advice: "delete it".to_owned(),
        });
    }
    // First: without the pair nothing leads to it any more. A lease that is known to have none costs no look at what a
    // container may have made in its namespace.
    let may_have_tap = slot
        .attach
        .as_ref()
        .is_none_or(|attach| attach.request.tap.is_some());
    let beside = match may_have_tap {
        true => interface::delete_taps_beyond(&mut worker.route, &found),
        false => Ok(()),
    };
    let mut request = Request::new();
    interface::delete(&mut request, &slot.host_interface);
    match worker.route.execute(request) {
        // Its namespace was faster.
        Err(error) if error.is_missing() => Ok(beside?),
        Err(error) => Err(error.into()),
        Ok(()) => Ok(beside?),
    }
}

/// Takes away what is left of many slots, and says of each what became of it. Mostly that is nothing: a release deletes the
/// interface, or its namespace has taken it along.
pub(super) fn tear_down(
    worker: &mut Worker,
    ebpf: Option<&Ebpf>,
    slots: &[&SlotPlan],
) -> Vec<Result<(), NetworkError>> {
    let mut results: Vec<Result<(), NetworkError>> = Vec::with_capacity(slots.len());
    let (mut present, mut places) = (Vec::new(), Vec::new());
    for (place, slot) in slots.iter().enumerate() {
        results.push(
            match interface::find(&mut worker.route, &slot.host_interface) {
                Ok(None) => {
                    if let Some(ebpf) = ebpf {
                        ebpf.free(slot);
                    }
                    Ok(())
                }
                Ok(Some(found)) => {
                    present.push(*slot);
                    places.push(place);
                    // What is left of it harms nobody; the pair goes all the same.
                    interface::delete_taps_beyond(&mut worker.route, &found).map_err(Into::into)
                }
                Err(error) => Err(error.into()),
            },
        );
    }
    let deleted = host_slot::tear_down(worker, ebpf, &present);
    for (place, result) in places.into_iter().zip(deleted) {
        let beside = std::mem::replace(&mut results[place], Ok(()));
        results[place] = result.and(beside);
    }
    results
}

/// The link-local address that an Ethernet address gives (RFC 4291, appendix A), which the programs know as its own.
fn link_local([a, b, c, d, e, f]: Mac) -> Ipv6Net {
    let halves = [[a ^ 2, b], [c, 0xff], [0xfe, d], [e, f]].map(u16::from_be_bytes);
    let [first, second, third, fourth] = halves;
    let address = Ipv6Addr::new(0xfe80, 0, 0, 0, first, second, third, fourth);
    Ipv6Net::new_assert(address, 64)
}

#[cfg(test)]
mod tests {
    use sandwire_testlab::lab;

    use super::*;

    /// An interface, and an MTU that none can have.
    fn too_long(name: &str) -> Request {
        let mut request = Request::new();
        interface::create_bridge(&mut request, name, None);
        let settings = Change {
            name,
            mtu: Some(4_000_000),
            ..Change::default()
        };
        settings.apply(&mut request);
        request
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn an_interface_whose_settings_are_refused_is_gone_and_one_that_was_there_stays() {
        lab::run(|lab| {
            let mut socket = Socket::route().unwrap();
            let refusal = create_whole(&mut socket, too_long("one"), "one").unwrap_err();
            assert_eq!(refusal.subject(), ("change", "interface one"));
            assert!(!lab.run("ip -o link").contains("one:"));
            lab.run("ip link add two type bridge");
            let refusal = create_whole(&mut socket, too_long("two"), "two").unwrap_err();
            assert!(refusal.is_existing(), "{refusal}");
            assert!(lab.run("ip -o link").contains("two:"));
        });
    }
}
