//! Interfaces of sandboxes that a program for the host's own network has taken, by what it writes down of each interface.

use std::{fs, path::Path};

/// Where the kernel shows interfaces of this network namespace.
pub(super) const INTERFACES: &str = "/sys/class/net";
/// How the aliases of our interfaces begin.
const ALIAS: &str = "sandwire";

/// A program that keeps a file for each interface, named by its number.
pub(super) struct Manager {
    /// Where the files are.
    pub(super) folder: &'static str,
    /// Whether it has taken the interface of which it writes this.
    is_taken: fn(&str) -> bool,
}

/// The format is its own; `networkctl` reads it. It configures an interface, did so, or tried to.
pub(super) const NETWORKD: Manager = Manager {
    folder: "/run/systemd/netif/links",
    is_taken: |text| {
        let mut lines = text.lines();
        let state = lines.find_map(|line| line.strip_prefix("ADMIN_STATE="));
        state.is_some_and(|state| ["configuring", "configured", "failed"].contains(&state))
    },
};

/// Those that it has found with addresses are taken, too: as `connected (externally)`.
pub(super) const NETWORK_MANAGER: Manager = Manager {
    folder: "/run/NetworkManager/devices",
    is_taken: |text| text.lines().any(|line| line == "managed=true"),
};

impl Manager {
    /// Names of our interfaces that it has taken, sorted. If it isn't there, there are none.
    pub(super) fn taken(&self, interfaces: &Path, files: &Path) -> Vec<String> {
        if !files.is_dir() {
            return Vec::new();
        }
        let entries = fs::read_dir(interfaces).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .filter(|entry| {
                self.is_ours_and_taken(&entry.path(), files)
                    .unwrap_or(false)
            })
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    fn is_ours_and_taken(&self, interface: &Path, files: &Path) -> Option<bool> {
        let read = |path: &Path| fs::read_to_string(path).ok();
        if !read(&interface.join("ifalias"))?.starts_with(ALIAS) {
            return Some(false);
        }
        let index = read(&interface.join("ifindex"))?;
        let text = read(&files.join(index.trim()))?;
        Some((self.is_taken)(&text))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

    use super::*;

    #[test]
    fn ours_are_told_by_their_alias_and_taken_ones_by_their_state() {
        let folder = tempfile::tempdir().unwrap();
        let (interfaces, links) = (folder.path().join("net"), folder.path().join("links"));
        let all = [
            ("swabcdef-0", "sandwire:default:web:0\n", "configured"),
            ("swabcdef-1", "sandwire:default:web:1\n", "unmanaged"),
            ("swabcdef-2", "sandwire:default:web:2\n", "pending"),
            ("swabcdef", "sandwire:default\n", "configuring"),
            ("eth0", "\n", "configured"),
            ("swp1", "to the rack\n", "configured"),
        ];
        let numbered = || (1..).zip(all);
        for (index, (name, alias, _)) in numbered() {
            let interface = interfaces.join(name);
            fs::create_dir_all(&interface).unwrap();
            fs::write(interface.join("ifalias"), alias).unwrap();
            fs::write(interface.join("ifindex"), format!("{index}\n")).unwrap();
        }
        assert!(
            NETWORKD.taken(&interfaces, &links).is_empty(),
            "there is no networkd"
        );
        fs::create_dir(&links).unwrap();
        for (index, (_, _, state)) in numbered() {
            let text = format!("# private\nADMIN_STATE={state}\nOPER_STATE=routable\n");
            fs::write(links.join(index.to_string()), text).unwrap();
        }
        assert_eq!(
            NETWORKD.taken(&interfaces, &links),
            ["swabcdef", "swabcdef-0"]
        );
        // One that networkd hasn't got to yet.
        fs::remove_file(links.join("1")).unwrap();
        assert_eq!(NETWORKD.taken(&interfaces, &links), ["swabcdef"]);
    }

    #[test]
    fn what_network_manager_found_with_addresses_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let (interfaces, files) = (folder.path().join("net"), folder.path().join("devices"));
        for (index, name, text) in [
            ("1", "swabcdef", "[device]\nmanaged=true\nnm-owned=false\n"),
            ("2", "swabcdef-0", "[device]\nnm-owned=false\n"),
        ] {
            let interface = interfaces.join(name);
            fs::create_dir_all(&interface).unwrap();
            fs::create_dir_all(&files).unwrap();
            fs::write(interface.join("ifalias"), "sandwire:default\n").unwrap();
            fs::write(interface.join("ifindex"), format!("{index}\n")).unwrap();
            fs::write(files.join(index), text).unwrap();
        }
        assert_eq!(NETWORK_MANAGER.taken(&interfaces, &files), ["swabcdef"]);
    }
}
