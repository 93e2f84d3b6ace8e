//! Kernel objects of an instance, told by their names and aliases.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use sandwire_api::name::Name;
use sandwire_datapath::filtered_uplinks;
use sandwire_kernel_net::{
    Error, address,
    interface::{self, Interface},
    netlink::Socket,
    netns, nft, process,
    route::{self, Route, Target},
};
use serde::Serialize;

use crate::verb::run::tap_of_fdinfo;

const TUN_DEVICE: &str = "/dev/net/tun";

/// A kernel object of ours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Leftover {
    pub(super) kind: Kind,
    pub(super) name: String,
    /// Processes that run in it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) used_by: Vec<User>,
}

/// What it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    Namespace,
    Route,
    Interface,
    Child,
    Table,
    Filter,
    Programs,
}

/// A process inside a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct User {
    pub(super) pid: u32,
    pub(super) command: String,
}

impl Kind {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Namespace => "network namespace",
            Self::Route => "unreachable route",
            Self::Interface => "interface",
            Self::Child => "child of an interface in another namespace",
            Self::Table => "nft table inet",
            Self::Filter => "BPF filter of uplink",
            Self::Programs => "eBPF programs and maps in",
        }
    }
}

impl Leftover {
    fn new(kind: Kind, name: String) -> Self {
        Self {
            kind,
            name,
            used_by: Vec::new(),
        }
    }
}

/// Everything of an instance that this network namespace, `/run/netns` and the bpffs have.
pub(super) fn find(instance: &Name, programs: &Path) -> Result<Vec<Leftover>, Error> {
    let mut users = processes_by_namespace();
    let mut found = Vec::new();
    // The dot ends the instance's name: "a" must not find "ab".
    for file in netns::list(&format!("sandwire.{instance}."))? {
        let path = netns::path_of(&file.name);
        let mut object = Leftover::new(Kind::Namespace, file.name);
        if file.is_mounted
            && let Ok(metadata) = fs::metadata(path)
        {
            object.used_by = users.remove(&metadata.ino()).unwrap_or_default();
        }
        found.push(object);
    }
    let mut taps = processes_by_tap();
    found.extend(interfaces(instance)?.into_iter().map(|found| Leftover {
        used_by: taps.remove(&found.name).unwrap_or_default(),
        ..Leftover::new(Kind::Interface, found.name)
    }));
    let mut route = Socket::route()?;
    let mut children: Vec<String> =
        interface::find_children(&mut route, |alias| is_of(instance, alias))?
            .into_iter()
            .filter_map(|(_, child)| child.alias)
            .collect();
    children.dedup();
    found.extend(
        children
            .into_iter()
            .map(|alias| Leftover::new(Kind::Child, alias)),
    );
    let routes = routes(instance)?;
    found.extend(
        routes
            .iter()
            .map(|prefix| Leftover::new(Kind::Route, prefix.to_string())),
    );
    let table = format!("sandwire-{instance}");
    if nft::tables(&mut Socket::netfilter()?)?.contains(&table) {
        found.push(Leftover::new(Kind::Table, table));
    }
    let filtered = filtered_uplinks(programs)?.into_iter();
    found.extend(filtered.map(|(name, _)| Leftover::new(Kind::Filter, name)));
    if programs.exists() {
        let name = programs.display().to_string();
        found.push(Leftover::new(Kind::Programs, name));
    }
    Ok(found)
}

/// The host's interfaces that bear the instance's name in their alias.
pub(super) fn interfaces(instance: &Name) -> Result<Vec<Interface>, Error> {
    let all = interface::list(&mut Socket::route()?)?;
    Ok(of_instance(all, instance).collect())
}

/// Those interfaces that bear the instance's name in their alias.
pub(super) fn of_instance(all: Vec<Interface>, instance: &Name) -> impl Iterator<Item = Interface> {
    all.into_iter().filter(|found| {
        let alias = found.alias.as_deref();
        alias.is_some_and(|alias| is_of(instance, alias))
    })
}

/// Metric of the routes that refuse packets for clones that aren't there; nobody else uses it.
const UNREACHABLE_METRIC: u32 = 0x7fff_0000;

/// The clone prefixes whose packets are refused. Routes bear no name: they are told by their metric,
/// and by the host's own address in the prefix, which the instance's shared interface has.
fn routes(instance: &Name) -> Result<Vec<IpNet>, Error> {
    let mut socket = Socket::route()?;
    let alias = format!("sandwire:{instance}");
    let all = interface::list(&mut socket)?;
    let shared = all
        .iter()
        .find(|found| found.alias.as_deref() == Some(&alias));
    let Some(shared) = shared.map(|found| found.index) else {
        return Ok(Vec::new());
    };
    let addresses = address::list(&mut socket)?;
    let own = |prefix: &IpNet| {
        addresses
            .iter()
            .any(|found| found.interface == shared && prefix.contains(&found.address.addr()))
    };
    Ok(route::list(&mut socket)?
        .into_iter()
        .filter(|route| route.unreachable && route.metric == Some(UNREACHABLE_METRIC))
        .map(|route| route.destination)
        .filter(own)
        .collect())
}

/// A route of ours, from its prefix.
pub(super) fn route_to(prefix: IpNet) -> Route {
    Route {
        metric: Some(UNREACHABLE_METRIC),
        ..Route::new(prefix, Target::Unreachable)
    }
}

/// Whether an interface's alias is one of the instance's.
fn is_of(instance: &Name, alias: &str) -> bool {
    alias
        .strip_prefix("sandwire:")
        .and_then(|rest| rest.strip_prefix(instance.as_str()))
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
}

/// Processes by the number of the network namespace that they are in, as far as they can be seen.
fn processes_by_namespace() -> HashMap<u64, Vec<User>> {
    let mut processes: HashMap<u64, Vec<User>> = HashMap::new();
    for (user, folder) in processes_seen() {
        if let Ok(namespace) = fs::metadata(folder.join("ns/net")) {
            processes.entry(namespace.ino()).or_default().push(user);
        }
    }
    processes
}

/// Processes by the TAP that they have open, as far as they can be seen.
fn processes_by_tap() -> HashMap<String, Vec<User>> {
    let mut processes: HashMap<String, Vec<User>> = HashMap::new();
    for (user, folder) in processes_seen() {
        let descriptors = fs::read_dir(folder.join("fd")).into_iter().flatten();
        for descriptor in descriptors.filter_map(Result::ok) {
            let target = fs::read_link(descriptor.path()).unwrap_or_default();
            if target != Path::new(TUN_DEVICE) {
                continue;
            }
            let about = folder.join("fdinfo").join(descriptor.file_name());
            let about = fs::read_to_string(about).unwrap_or_default();
            if let Some(tap) = tap_of_fdinfo(&about) {
                processes.entry(tap).or_default().push(user.clone());
            }
        }
    }
    processes
}

/// All processes, with their folders in `/proc`.
fn processes_seen() -> impl Iterator<Item = (User, PathBuf)> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(Result::ok).filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let command = process::name(&entry.path());
        Some((User { pid, command }, entry.path()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alias_of_another_instance_is_not_ours() {
        let instance: Name = "web".parse().unwrap();
        for alias in ["sandwire:web", "sandwire:web:pool:17"] {
            assert!(is_of(&instance, alias), "{alias}");
        }
        for alias in [
            "sandwire:web2",
            "sandwire:web2:pool:17",
            "sandwire:we",
            "web",
            "",
            "docker:web",
        ] {
            assert!(!is_of(&instance, alias), "{alias}");
        }
    }

    #[test]
    fn this_process_is_found_in_its_namespace() {
        let own = fs::metadata("/proc/self/ns/net").unwrap().ino();
        let processes = processes_by_namespace();
        assert!(
            processes[&own]
                .iter()
                .any(|user| user.pid == std::process::id())
        );
    }
}
