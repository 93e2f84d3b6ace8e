//! Which labs there are, and how they are taken away.
//!
//! Only what bears our alias is touched: a namespace whose loopback interface says that it is of a lab, and in it
//! interfaces that say the same. The rest is reported.

use std::{collections::BTreeMap, fs, os::unix::fs::MetadataExt, path::PathBuf};

use ipnet::IpNet;
use sandwire_api::name::Name;
use sandwire_kernel_net::{
    Error as KernelError, address,
    interface::{self, Interface},
    netlink::{Request, Socket},
    netns::{self, Home},
};
use serde::Serialize;

use super::{LabError, PREFIX, alias, link_alias};
use crate::{control::Client, diversion::ALIAS};

/// A lab that is up, or what is left of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Found {
    /// Its name.
    pub name: Name,
    /// Its hosts and switches, by name.
    pub hosts: Vec<FoundHost>,
}

/// A host of a lab that is up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FoundHost {
    /// Its name in the lab.
    pub name: Name,
    /// Name of its network namespace.
    pub namespace: String,
    /// Addresses by interface, without those that the kernel made itself.
    pub addresses: BTreeMap<String, Vec<IpNet>>,
    /// Processes inside.
    pub processes: Vec<u32>,
}

impl Found {
    /// Lines for `/etc/hosts` by which `from` finds all hosts; addresses that it reaches without a route come first.
    #[must_use]
    pub fn hosts_text(&self, from: &Name) -> String {
        let addresses = |host: &FoundHost| -> Vec<IpNet> {
            host.addresses.values().flatten().copied().collect()
        };
        let own = self.hosts.iter().find(|host| host.name == *from);
        let own = own.map(addresses).unwrap_or_default();
        let mut text = String::new();
        for host in &self.hosts {
            let mut of_host = addresses(host);
            of_host.sort_by_key(|address| !own.iter().any(|own| own.contains(&address.addr())));
            for address in of_host {
                text.push_str(&format!("{} {}\n", address.addr(), host.name));
            }
        }
        text
    }
}

/// What [`down`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// Namespaces whose names are gone.
    pub namespaces: Vec<String>,
    /// Links that are gone.
    pub links: usize,
    /// Impairments that have ended, with the packets under way.
    pub impairments: usize,
    /// Processes that run on inside, without interfaces; the namespaces go with them.
    pub processes: Vec<u32>,
    /// What could not be taken away.
    pub failures: Vec<String>,
}

/// A namespace whose name has the prefix.
pub(super) struct Namespace {
    pub(super) namespace: String,
    /// The lab by its name; `None` if it can't be one of ours.
    pub(super) lab: Option<Name>,
    host: Option<Name>,
    /// Whether it says so itself.
    pub(super) is_ours: bool,
}

/// All labs, by name.
///
/// # Errors
/// The kernel doesn't say what there is.
pub fn list() -> Result<Vec<Found>, LabError> {
    let home = Home::here()?;
    let mut labs: BTreeMap<Name, Vec<FoundHost>> = BTreeMap::new();
    for found in find(&home)? {
        if !found.is_ours {
            continue;
        }
        let (Some(lab), Some(name)) = (found.lab, found.host) else {
            continue;
        };
        let addresses = addresses(&home, &found.namespace)?;
        labs.entry(lab).or_default().push(FoundHost {
            name,
            addresses,
            processes: processes(&found.namespace),
            namespace: found.namespace,
        });
    }
    let named = labs.into_iter();
    Ok(named.map(|(name, hosts)| Found { name, hosts }).collect())
}

/// Takes a lab away, as much as there is of it, and goes on where something fails. `service` is who impairs its links, if
/// it is there.
///
/// # Errors
/// There is nothing of it, or the kernel doesn't say what there is.
pub fn down(lab: &Name, service: Option<&mut Client>) -> Result<Removed, LabError> {
    let home = Home::here()?;
    let mut removed = Removed::default();
    let all = find(&home)?.into_iter();
    let ours = all.filter(|found| found.lab.as_ref() == Some(lab) && found.is_ours);
    let ours: Vec<Namespace> = ours.collect();
    if ours.is_empty() {
        return Err(LabError::Missing { lab: lab.clone() });
    }
    if let Some(service) = service {
        clear(&ours, service, &mut removed);
    }
    for found in &ours {
        removed.processes.extend(processes(&found.namespace));
        match inside(&home, &found.namespace, |socket| {
            Ok(delete_links(socket, &link_alias(lab)))
        }) {
            Ok(links) => {
                removed.links += links.deleted;
                removed.failures.extend(links.failures);
            }
            Err(error) => removed.failures.push(error.to_string()),
        }
        match netns::remove(&found.namespace) {
            Ok(()) => removed.namespaces.push(found.namespace.clone()),
            Err(error) => removed.failures.push(error.to_string()),
        }
    }
    Ok(removed)
}

/// Ends what the service does in these namespaces.
fn clear(namespaces: &[Namespace], service: &mut Client, removed: &mut Removed) {
    let targets = match service.list() {
        Ok(all) => all.into_iter().map(|status| status.target),
        Err(error) => {
            removed.failures.push(error.to_string());
            return;
        }
    };
    let paths: Vec<PathBuf> = namespaces
        .iter()
        .map(|found| netns::path_of(&found.namespace))
        .collect();
    for target in targets {
        if !target
            .netns
            .as_ref()
            .is_some_and(|path| paths.contains(path))
        {
            continue;
        }
        match service.clear(&target, true) {
            Ok(_) => removed.impairments += 1,
            Err(error) => removed.failures.push(error.to_string()),
        }
    }
}

/// Namespaces whose names have the prefix. A name without a namespace, which a crash may leave, isn't one.
pub(super) fn find(home: &Home) -> Result<Vec<Namespace>, KernelError> {
    let mut found = Vec::new();
    for listed in netns::list(PREFIX)? {
        if !listed.is_mounted {
            continue;
        }
        let rest = &listed.name[PREFIX.len()..];
        let names = rest.split_once('.');
        let lab: Option<Name> = names.and_then(|(lab, _)| lab.parse().ok());
        let host: Option<Name> = names.and_then(|(_, host)| host.parse().ok());
        let is_ours = match (&lab, &host) {
            (Some(lab), Some(host)) => {
                let expected = alias(lab, host);
                let lo = inside(home, &listed.name, |socket| interface::find(socket, "lo"))?;
                lo.is_some_and(|lo| lo.alias.as_deref() == Some(&*expected))
            }
            _ => false,
        };
        found.push(Namespace {
            namespace: listed.name,
            lab,
            host,
            is_ours,
        });
    }
    found.sort_by(|one, two| one.namespace.cmp(&two.namespace));
    Ok(found)
}

fn inside<T>(
    home: &Home,
    namespace: &str,
    work: impl FnOnce(&mut Socket) -> Result<T, KernelError>,
) -> Result<T, KernelError> {
    let _inside = home.enter(namespace)?;
    work(&mut Socket::route()?)
}

fn addresses(home: &Home, namespace: &str) -> Result<BTreeMap<String, Vec<IpNet>>, KernelError> {
    inside(home, namespace, |socket| {
        let interfaces = interface::list(socket)?;
        let addresses = address::list(socket)?;
        let mut found: BTreeMap<String, Vec<IpNet>> = BTreeMap::new();
        // The engine's TAPs are none of the lab's interfaces.
        let is_of_lab = |interface: &&Interface| {
            interface.name != "lo" && interface.alias.as_deref() != Some(ALIAS)
        };
        for interface in interfaces.iter().filter(is_of_lab) {
            let of_this = addresses
                .iter()
                .filter(|it| it.interface == interface.index);
            let given = of_this
                .map(|it| it.address)
                .filter(|address| !is_link_local(*address));
            found.insert(interface.name.clone(), given.collect());
        }
        Ok(found)
    })
}

fn is_link_local(address: IpNet) -> bool {
    matches!(address, IpNet::V6(address) if address.addr().is_unicast_link_local())
}

/// How many interfaces went, and which did not.
#[derive(Default)]
pub(super) struct Deleted {
    pub(super) deleted: usize,
    pub(super) failures: Vec<String>,
}

/// Deletes all interfaces of the socket's namespace that bear the alias; their other ends go with them.
pub(super) fn delete_links(socket: &mut Socket, alias: &str) -> Deleted {
    let mut deleted = Deleted::default();
    let found = match interface::list(socket) {
        Ok(found) => found,
        Err(error) => {
            deleted.failures.push(error.to_string());
            return deleted;
        }
    };
    for interface in found.iter().filter(|it| it.alias.as_deref() == Some(alias)) {
        let mut request = Request::new();
        interface::delete(&mut request, &interface.name);
        match socket.execute(request) {
            Ok(()) => deleted.deleted += 1,
            Err(error) if error.is_missing() => {}
            Err(error) => deleted.failures.push(error.to_string()),
        }
    }
    deleted
}

/// Processes in a namespace. One that ends while we look may be missing.
fn processes(namespace: &str) -> Vec<u32> {
    let identity = |path: &std::path::Path| {
        let metadata = fs::metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    let Some(wanted) = identity(&netns::path_of(namespace)) else {
        return Vec::new();
    };
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut found: Vec<u32> = numbers
        .filter(|number: &u32| {
            let path = format!("/proc/{number}/ns/net");
            identity(path.as_ref()) == Some(wanted)
        })
        .collect();
    found.sort_unstable();
    found
}
