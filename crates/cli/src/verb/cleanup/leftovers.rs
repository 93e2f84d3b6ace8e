//! Kernel objects of an instance, told by their names and aliases.

use std::path::Path;

use ipnet::IpNet;
use sandwire_api::name::Name;
use sandwire_datapath::filtered_uplinks;
use sandwire_kernel_net::{
    Error, address,
    interface::{self, Interface},
    netlink::Socket,
    netns, nft,
    route::{self, Route, Target},
};
use serde::Serialize;

use super::users::{User, Users, UsersByNumber};

/// A kernel object of ours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Leftover {
    pub(super) kind: Kind,
    pub(super) name: String,
    /// Processes that run in it, in the namespace of its other end, or that have its TAP open.
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
    Journal,
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
            Self::Journal => "journal in",
        }
    }
}

impl Leftover {
    pub(super) fn new(kind: Kind, name: String) -> Self {
        Self {
            kind,
            name,
            used_by: Vec::new(),
        }
    }
}

/// Everything of an instance that this network namespace, `/run/netns` and the bpffs have.
pub(super) fn find(instance: &Name, programs: &Path) -> Result<Vec<Leftover>, Error> {
    let mut route = Socket::route()?;
    let mut users = Users::see();
    let mut found = namespaces(instance, &mut users, &mut route)?;
    // What is known of the slots' own namespaces is said of these.
    let users = users.by_number(&mut route);
    for object in interfaces(instance)? {
        let used_by = users.of_interface(&mut route, &object)?;
        found.push(Leftover {
            used_by,
            ..Leftover::new(Kind::Interface, object.name)
        });
    }
    found.extend(children(instance, &users, &mut route)?);
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

/// The slots' namespaces.
fn namespaces(
    instance: &Name,
    users: &mut Users,
    route: &mut Socket,
) -> Result<Vec<Leftover>, Error> {
    let mut found = Vec::new();
    // The dot ends the instance's name: "a" must not find "ab".
    for file in netns::list(&format!("sandwire.{instance}."))? {
        let mut object = Leftover::new(Kind::Namespace, file.name);
        if file.is_mounted {
            object.used_by = users.take_those_of(route, &netns::path_of(&object.name))?;
        }
        found.push(object);
    }
    Ok(found)
}

/// Children in containers' namespaces, each slot's once.
fn children(
    instance: &Name,
    users: &UsersByNumber,
    route: &mut Socket,
) -> Result<Vec<Leftover>, Error> {
    let mut found: Vec<Leftover> = Vec::new();
    for (namespace, child) in interface::find_children(route, |alias| is_of(instance, alias))? {
        let Some(alias) = child.alias else { continue };
        let used_by = users.in_namespace(namespace);
        match found.last_mut() {
            Some(last) if last.name == alias => last.used_by.extend(used_by),
            _ => found.push(Leftover {
                used_by,
                ..Leftover::new(Kind::Child, alias)
            }),
        }
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
}
