//! Which processes use a slot: those in its namespace, in its container's, and those that have its TAP open.
//!
//! A VMM needn't be in the slot's namespace: a descriptor of the TAP is enough, which it may have been given. That somebody
//! has one the TAP itself tells; who, descriptors tell by the TAP's name alone, which many slots may share.

use std::{
    collections::{HashMap, HashSet},
    fmt, fs,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

use sandwire_kernel_net::{
    Error,
    interface::{self, Interface, NamespaceNumber},
    netlink::Socket,
    netns, process,
};
use serde::Serialize;

use crate::verb::run::tap_of_fdinfo;

/// End of the path of what TAPs are opened by. A jailed process has one of its own.
const TUN_DEVICE: &str = "net/tun";

/// A process that uses a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct User {
    /// None of one that is known by what it has open alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pid: Option<u32>,
    pub(super) command: String,
}

impl User {
    fn of_tap() -> Self {
        Self {
            pid: None,
            command: "a process that has its TAP open".to_owned(),
        }
    }
}

impl fmt::Display for User {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.command)?;
        self.pid
            .map_or(Ok(()), |pid| write!(formatter, " (pid {pid})"))
    }
}

/// All processes that can be seen.
pub(super) struct Users {
    /// By the inode of the network namespace that they are in, with a folder in `/proc` that leads there.
    by_namespace: HashMap<u64, (PathBuf, Vec<User>)>,
    /// By the name of a TAP that they have open, in whatever namespace.
    by_tap: HashMap<String, Vec<User>>,
    /// Namespaces of slots, which are told of already.
    told: HashSet<NamespaceNumber>,
}

impl Users {
    pub(super) fn see() -> Self {
        let mut by_namespace: HashMap<u64, (PathBuf, Vec<User>)> = HashMap::new();
        let mut by_tap: HashMap<String, Vec<User>> = HashMap::new();
        for (user, folder) in processes() {
            for tap in taps_open(&folder) {
                by_tap.entry(tap).or_default().push(user.clone());
            }
            let path = folder.join("ns/net");
            if let Ok(namespace) = fs::metadata(&path) {
                let entry = by_namespace.entry(namespace.ino());
                entry.or_insert_with(|| (path, Vec::new())).1.push(user);
            }
        }
        Self {
            by_namespace,
            by_tap,
            told: HashSet::new(),
        }
    }

    /// Those of a slot's own namespace, which [`Self::by_number`] then doesn't say again.
    pub(super) fn take_those_of(
        &mut self,
        route: &mut Socket,
        path: &Path,
    ) -> Result<Vec<User>, Error> {
        // Gone meanwhile, or no namespace: then nobody can be in it.
        let Ok(file) = netns::open_file(path) else {
            return Ok(Vec::new());
        };
        let number = NamespaceNumber::of(route, file.as_fd())?;
        self.told.insert(number);
        let inside = fs::metadata(path)
            .ok()
            .and_then(|namespace| self.by_namespace.remove(&namespace.ino()));
        let mut users = inside.map_or_else(Vec::new, |(_, users)| users);
        if users.is_empty() {
            let all = interface::list_in(route, number)?;
            users = of_taps(&self.by_tap, all.iter());
        }
        Ok(users)
    }

    /// The others, by the number of their namespace.
    pub(super) fn by_number(self, route: &mut Socket) -> UsersByNumber {
        let mut inside = HashMap::new();
        for (path, users) in self.by_namespace.into_values() {
            // Gone meanwhile, or without a number: then nothing of ours leads there.
            if let Ok(file) = netns::open_file(&path)
                && let Ok(Some(number)) = NamespaceNumber::look_up(route, file.as_fd())
            {
                inside.insert(number, users);
            }
        }
        UsersByNumber {
            inside,
            by_tap: self.by_tap,
            told: self.told,
        }
    }
}

/// Processes outside of the slots' own namespaces.
pub(super) struct UsersByNumber {
    inside: HashMap<NamespaceNumber, Vec<User>>,
    by_tap: HashMap<String, Vec<User>>,
    told: HashSet<NamespaceNumber>,
}

impl UsersByNumber {
    pub(super) fn in_namespace(&self, number: NamespaceNumber) -> Vec<User> {
        self.inside.get(&number).cloned().unwrap_or_default()
    }

    /// Those of an interface of the host: of a TAP, or of what is at a pair's other end.
    pub(super) fn of_interface(
        &self,
        route: &mut Socket,
        found: &Interface,
    ) -> Result<Vec<User>, Error> {
        let beyond = found.peer_namespace;
        let Some(beyond) = beyond.filter(|number| !self.told.contains(number)) else {
            return Ok(of_taps(&self.by_tap, [found]));
        };
        let users = self.in_namespace(beyond);
        if !users.is_empty() {
            return Ok(users);
        }
        let all = interface::list_in(route, beyond)?;
        let ours = all.iter().filter(|other| other.alias == found.alias);
        Ok(of_taps(&self.by_tap, ours))
    }
}

/// Who has one of these interfaces open: by name if only one process comes into question.
fn of_taps<'a>(
    by_tap: &HashMap<String, Vec<User>>,
    interfaces: impl IntoIterator<Item = &'a Interface>,
) -> Vec<User> {
    let mut users = Vec::new();
    for tap in interfaces.into_iter().filter(|found| found.is_open()) {
        let user = match by_tap.get(&tap.name).map(Vec::as_slice) {
            Some([only]) => only.clone(),
            _ => User::of_tap(),
        };
        if !users.contains(&user) {
            users.push(user);
        }
    }
    users
}

/// The names of the TAPs that a process has open, each once.
fn taps_open(folder: &Path) -> HashSet<String> {
    let descriptors = fs::read_dir(folder.join("fd")).into_iter().flatten();
    let about = descriptors.filter_map(|descriptor| {
        let descriptor = descriptor.ok()?;
        let target = fs::read_link(descriptor.path()).ok()?;
        let file = folder.join("fdinfo").join(descriptor.file_name());
        target
            .ends_with(TUN_DEVICE)
            .then(|| fs::read_to_string(file))
    });
    about
        .filter_map(|about| tap_of_fdinfo(&about.ok()?))
        .collect()
}

/// All processes, with their folders in `/proc`.
fn processes() -> impl Iterator<Item = (User, PathBuf)> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(Result::ok).filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let user = User {
            pid: Some(pid),
            command: process::name(&entry.path()),
        };
        Some((user, entry.path()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_found_in_its_namespace() {
        let own = fs::metadata("/proc/self/ns/net").unwrap().ino();
        let (_, users) = &Users::see().by_namespace[&own];
        assert!(
            users
                .iter()
                .any(|user| user.pid == Some(std::process::id()))
        );
    }
}
