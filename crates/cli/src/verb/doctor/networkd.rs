//! Interfaces of sandboxes that systemd-networkd has taken, by what it writes down of each interface.

use std::{fs, path::Path};

/// Where the kernel shows interfaces of this network namespace.
pub(super) const INTERFACES: &str = "/sys/class/net";
/// Where networkd keeps a file for each interface, named by its number (`ADMIN_STATE=`; a format of its own, which `networkctl` reads).
pub(super) const LINKS: &str = "/run/systemd/netif/links";
/// States in which it configures an interface, did so, or tried to.
const TAKEN: [&str; 3] = ["configuring", "configured", "failed"];
/// How the aliases of our interfaces begin.
const ALIAS: &str = "sandwire";

/// Names of our interfaces that networkd has taken, sorted. Without networkd there are none.
pub(super) fn taken(interfaces: &Path, links: &Path) -> Vec<String> {
    if !links.is_dir() {
        return Vec::new();
    }
    let entries = fs::read_dir(interfaces).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| is_ours_and_taken(&entry.path(), links).unwrap_or(false))
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn is_ours_and_taken(interface: &Path, links: &Path) -> Option<bool> {
    let read = |path: &Path| fs::read_to_string(path).ok();
    if !read(&interface.join("ifalias"))?.starts_with(ALIAS) {
        return Some(false);
    }
    let index = read(&interface.join("ifindex"))?;
    let text = read(&links.join(index.trim()))?;
    let state = text
        .lines()
        .find_map(|line| line.strip_prefix("ADMIN_STATE="))?;
    Some(TAKEN.contains(&state))
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
            taken(&interfaces, &links).is_empty(),
            "there is no networkd"
        );
        fs::create_dir(&links).unwrap();
        for (index, (_, _, state)) in numbered() {
            let text = format!("# private\nADMIN_STATE={state}\nOPER_STATE=routable\n");
            fs::write(links.join(index.to_string()), text).unwrap();
        }
        assert_eq!(taken(&interfaces, &links), ["swabcdef", "swabcdef-0"]);
        // One that networkd hasn't got to yet.
        fs::remove_file(links.join("1")).unwrap();
        assert_eq!(taken(&interfaces, &links), ["swabcdef"]);
    }
}
