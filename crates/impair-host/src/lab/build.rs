//! Makes a lab: namespaces without a name first, links and addresses between them, and last the names.
//!
//! As long as a namespace has no name it lives by our descriptor, so a crash before that leaves nothing. Whatever
//! fails, everything made so far is taken away.

use std::{
    fmt,
    os::fd::{AsFd, OwnedFd},
};

use sandwire_api::{impairment::Impairment, name::Name};
use sandwire_kernel_net::{
    Error as KernelError,
    address::Address,
    interface::{self, Change, InterfaceIndex, InterfacePair, PairDevice},
    netlink::{Request, Socket},
    netns::{self, Home},
    procfs::PrivateProcfs,
    route::{self, Route as KernelRoute},
};

use super::{Host, Lab, LabError, Link, alias, link_alias, remove};
use crate::control::{Client, ClientError, Owner, Target};

/// The bridge of a switch.
pub(super) const BRIDGE: &str = "bridge";
/// Interfaces that we number ourselves have numbers from here on; the kernel gives low ones.
const FIRST_INDEX: u32 = 0x1000;

/// One step of making a lab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A host's namespace, without a name.
    Host(Name),
    /// A veth pair between two hosts, with its addresses.
    Link(Name, Name),
    /// The routes of a host.
    Routes(Name),
    /// The name of a host's namespace.
    Publish(Name),
    /// What happens to packets on a link.
    Impair(Name, Name),
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(host) => write!(formatter, "make host {host}"),
            Self::Link(first, second) => write!(formatter, "link {first} and {second}"),
            Self::Routes(host) => write!(formatter, "set the routes of {host}"),
            Self::Publish(host) => write!(formatter, "give the namespace of {host} its name"),
            Self::Impair(first, second) => {
                write!(formatter, "impair the link of {first} and {second}")
            }
        }
    }
}

/// Makes a lab. `service` impairs its links, if any are to be; `before` is asked before each step, and may stop it.
///
/// # Errors
/// The lab or one of its names is there already, or a step failed; nothing of it is left then, unless the error says so.
pub fn up(
    lab: &Lab,
    service: Option<&mut Client>,
    mut before: impl FnMut(&Step) -> Result<(), String>,
) -> Result<(), LabError> {
    if lab.is_impaired() && service.is_none() {
        let lab = lab.name.clone();
        return Err(LabError::NoService { lab });
    }
    let home = Home::here()?;
    refuse_taken(lab, &home)?;
    let mut building = Building {
        lab,
        home,
        service,
        sites: Vec::with_capacity(lab.hosts.len()),
        published: Vec::new(),
        impaired: Vec::new(),
    };
    let made = building.make(&mut before);
    made.map_err(|(step, reason)| LabError::Step {
        lab: lab.name.clone(),
        step: Box::new(step),
        reason,
        left: building.undo(),
    })
}

fn refuse_taken(lab: &Lab, home: &Home) -> Result<(), LabError> {
    for found in remove::find(home)? {
        if found.lab.as_ref() != Some(&lab.name) {
            continue;
        }
        if found.is_ours {
            let lab = lab.name.clone();
            return Err(LabError::IsUp { lab });
        }
        let is_wanted = |host: &Host| lab.namespace(host) == found.namespace;
        if lab.hosts.iter().any(is_wanted) {
            return Err(LabError::Taken {
                lab: lab.name.clone(),
                namespace: found.namespace,
            });
        }
    }
    Ok(())
}

/// A namespace, and a socket that speaks with the kernel about it.
struct Site {
    namespace: OwnedFd,
    socket: Socket,
    bridge: Option<InterfaceIndex>,
}

struct Building<'a> {
    lab: &'a Lab,
    home: Home,
    service: Option<&'a mut Client>,
    /// As the lab's hosts.
    sites: Vec<Site>,
    /// Names given so far.
    published: Vec<String>,
    /// What the service impairs so far.
    impaired: Vec<Target>,
}

type Failed = (Step, String);

impl Building<'_> {
    fn make(&mut self, before: &mut dyn FnMut(&Step) -> Result<(), String>) -> Result<(), Failed> {
        let mut procfs = None;
        for host in &self.lab.hosts {
            step(before, Step::Host(host.name.clone()), || {
                let procfs = match &mut procfs {
                    Some(procfs) => procfs,
                    none => none.insert(PrivateProcfs::new()?),
                };
                let site = make_site(&self.home, self.lab, host, procfs)?;
                self.sites.push(site);
                Ok::<(), KernelError>(())
            })?;
        }
        for (number, link) in self.lab.links.iter().enumerate() {
            let [first, second] = self.names(link);
            step(before, Step::Link(first, second), || {
                self.link(number, link)
            })?;
        }
        let hosts = self.lab.hosts.iter().enumerate();
        for (number, host) in hosts.filter(|(_, host)| !host.routes.is_empty()) {
            step(before, Step::Routes(host.name.clone()), || {
                self.routes(number, host)
            })?;
        }
        for (number, host) in self.lab.hosts.iter().enumerate() {
            step(before, Step::Publish(host.name.clone()), || {
                self.publish(number, host)
            })?;
        }
        let links = self.lab.links.iter().enumerate();
        for (number, link) in links.filter(|(_, link)| !link.impairment.is_nothing()) {
            let [first, second] = self.names(link);
            step(before, Step::Impair(first, second), || {
                self.impair(number, link)
            })?;
        }
        Ok(())
    }

    fn names(&self, link: &Link) -> [Name; 2] {
        [0, 1].map(|end| self.lab.hosts[link.ends[end].host].name.clone())
    }

    fn impair(&mut self, number: usize, link: &Link) -> Result<(), ClientError> {
        let Some(service) = self.service.as_mut() else {
            return Ok(());
        };
        let target = self.lab.target(link);
        let owner = Owner::User {
            uid: rustix::process::geteuid().as_raw(),
        };
        let impairment = with_own_seed(number, &link.impairment);
        service.set(&target, &owner, &impairment)?;
        self.impaired.push(target);
        Ok(())
    }

    fn link(&mut self, number: usize, link: &Link) -> Result<(), KernelError> {
        let [first, second] = &link.ends;
        let index = InterfaceIndex(FIRST_INDEX + u32::try_from(number).expect("links are few"));
        let mut request = Request::new();
        InterfacePair {
            device: PairDevice::Veth,
            name: &first.interface,
            index,
            peer_name: &second.interface,
            peer_namespace: self.sites[second.host].namespace.as_fd(),
            mac: first.mac,
            peer_mac: first.mac,
            mtu: link.mtu,
            dormant: None,
        }
        .create(&mut request);
        self.sites[first.host].socket.execute(request)?;
        for end in &link.ends {
            let site = &mut self.sites[end.host];
            let found = interface::find(&mut site.socket, &end.interface)?;
            let index = found
                .ok_or_else(|| KernelError::missing_interface(&end.interface))?
                .index;
            let mut request = Request::new();
            let alias = link_alias(&self.lab.name);
            Change {
                name: &end.interface,
                index: Some(index),
                alias: Some(&alias),
                mac: Some(end.mac),
                master: site.bridge,
                up: Some(true),
                ..Change::default()
            }
            .apply(&mut request);
            for address in &end.addresses {
                Address::new(index, *address).add(&mut request);
            }
            site.socket.execute(request)?;
        }
        Ok(())
    }

    fn routes(&mut self, number: usize, host: &Host) -> Result<(), KernelError> {
        let socket = &mut self.sites[number].socket;
        let mut request = Request::new();
        for route in &host.routes {
            let name = &self.lab.links[route.link].ends[route.end].interface;
            let found = interface::find(socket, name)?;
            let interface = found
                .ok_or_else(|| KernelError::missing_interface(name))?
                .index;
            let target = route::Target::Gateway {
                interface,
                gateway: route.via,
                source: None,
            };
            KernelRoute::new(route.to, target).add(&mut request);
        }
        socket.execute(request)
    }

    fn publish(&mut self, number: usize, host: &Host) -> Result<(), KernelError> {
        if self.published.is_empty() {
            netns::prepare_folder()?;
        }
        let name = self.lab.namespace(host);
        let inside = self.home.enter_open(self.sites[number].namespace.as_fd())?;
        inside.publish(&name)?;
        self.published.push(name);
        Ok(())
    }

    /// Takes away what was made; what can't be is said.
    fn undo(&mut self) -> Vec<String> {
        let mut left = Vec::new();
        if let Some(service) = self.service.as_mut() {
            for target in &self.impaired {
                left.extend(
                    service
                        .clear(target, true)
                        .err()
                        .map(|error| error.to_string()),
                );
            }
        }
        // A namespace stays for as long as somebody is inside: its interfaces must not.
        for site in &mut self.sites {
            let removed = remove::delete_links(&mut site.socket, &link_alias(&self.lab.name));
            left.extend(removed.failures);
        }
        for name in &self.published {
            left.extend(netns::remove(name).err().map(|error| error.to_string()));
        }
        left
    }
}

/// Takes one step, if `before` lets it.
fn step<E: fmt::Display>(
    before: &mut dyn FnMut(&Step) -> Result<(), String>,
    step: Step,
    take: impl FnOnce() -> Result<(), E>,
) -> Result<(), Failed> {
    let taken = before(&step).and_then(|()| take().map_err(|error| error.to_string()));
    taken.map_err(|reason| (step, reason))
}

fn make_site(
    home: &Home,
    lab: &Lab,
    host: &Host,
    procfs: &mut PrivateProcfs,
) -> Result<Site, KernelError> {
    let inside = home.unshare()?;
    let namespace = inside.open()?;
    let mut socket = Socket::route()?;
    for family in ["all", "default"] {
        // No wait for an address that nobody else can have.
        set_if_there(procfs, &format!("net/ipv6/conf/{family}/accept_dad"), "0")?;
    }
    if host.forward {
        procfs.write("net/ipv4/ip_forward", "1")?;
        set_if_there(procfs, "net/ipv6/conf/all/forwarding", "1")?;
    }
    let mut request = Request::new();
    Change {
        name: "lo",
        index: Some(InterfaceIndex::LOOPBACK),
        alias: Some(&alias(&lab.name, &host.name)),
        up: Some(true),
        ..Change::default()
    }
    .apply(&mut request);
    if host.switch {
        interface::create_bridge(&mut request, BRIDGE, None);
        Change {
            name: BRIDGE,
            up: Some(true),
            ..Change::default()
        }
        .apply(&mut request);
    }
    socket.execute(request)?;
    let bridge = if host.switch {
        let found = interface::find(&mut socket, BRIDGE)?;
        let bridge = found.ok_or_else(|| KernelError::missing_interface(BRIDGE))?;
        Some(bridge.index)
    } else {
        None
    };
    Ok(Site {
        namespace,
        socket,
        bridge,
    })
}

/// The impairment of the link of that number; without a seed it has that. With the same seed, links that say the same would lose the same
/// packets: on a path of several, a loss would often be followed by one on the next.
fn with_own_seed(number: usize, impairment: &Impairment) -> Impairment {
    let mut own = impairment.clone();
    if own.seed == 0 {
        own.seed = number as u64;
    }
    own
}

/// A kernel without IPv6 doesn't have its settings.
fn set_if_there(procfs: &mut PrivateProcfs, setting: &str, value: &str) -> Result<(), KernelError> {
    match procfs.write(setting, value) {
        Err(error) if error.is_missing() => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

    use super::*;

    #[test]
    fn links_without_a_seed_have_one_each() {
        let seeds = |text: &str| {
            let impairment = text.parse().unwrap();
            [0, 1, 2].map(|number| with_own_seed(number, &impairment).seed)
        };
        assert_eq!(seeds("loss 1%"), [0, 1, 2]);
        assert_eq!(seeds("seed 7; loss 1%"), [7; 3]);
    }
}
