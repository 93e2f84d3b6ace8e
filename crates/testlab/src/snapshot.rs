//! What the network of a namespace consists of, to compare before and after.
//!
//! The facts come from `ip`, `nft` and `/proc`, never from the product's own code. Figures that change
//! by themselves (counters, timers, link-local routes that come with an interface's carrier) are left
//! out.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{command, namespace::NETNS_FOLDER};

/// Interfaces, routes, rules, nftables, named namespaces, mounts and pinned BPF objects at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    facts: BTreeMap<&'static str, BTreeSet<String>>,
    ruleset: String,
}

impl Snapshot {
    /// Takes the facts of the calling thread's namespaces.
    ///
    /// # Errors
    /// If `ip` or `nft` fails.
    pub fn take() -> Result<Self> {
        let mut facts = BTreeMap::new();
        facts.insert("interface", interfaces()?);
        facts.insert("address", addresses()?);
        facts.insert("route", routes()?);
        facts.insert("rule", lines_of("ip rule")?);
        facts.insert("named namespace", named_namespaces()?);
        facts.insert("mount", mounts()?);
        facts.insert("pinned BPF object", pinned_objects()?);
        // Stateless text: two equal lists print byte for byte the same, without handles and counters.
        let ruleset = command::run("nft --stateless list ruleset")?;
        Ok(Self { facts, ruleset })
    }

    /// The same once the kernel is done with addresses: it gives one of IPv6 its route some time after it was added. One that has
    /// none after a few seconds has none.
    ///
    /// # Errors
    /// As of [`Snapshot::take`].
    pub fn take_settled() -> Result<Self> {
        let deadline = Instant::now() + Duration::from_secs(5);
        while !have_routes()? && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(20));
        }
        Self::take()
    }

    /// What differs in a later snapshot, one line each; empty if nothing does.
    #[must_use]
    pub fn differences(&self, later: &Self) -> String {
        let mut text = String::new();
        for (kind, before) in &self.facts {
            let after = &later.facts[kind];
            for gone in before.difference(after) {
                let _ = writeln!(text, "gone: {kind} {gone}");
            }
            for new in after.difference(before) {
                let _ = writeln!(text, "left behind: {kind} {new}");
            }
        }
        if self.ruleset != later.ruleset {
            let _ = writeln!(
                text,
                "nftables before:\n{}\nnftables after:\n{}",
                self.ruleset, later.ruleset
            );
        }
        text
    }

    /// Waits until everything is as in this snapshot: the kernel takes namespaces down in the
    /// background.
    ///
    /// # Errors
    /// If it is not so within the given time; the error lists the differences.
    pub fn wait_unchanged(&self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        loop {
            let differences = self.differences(&Self::take()?);
            if differences.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                bail!("not as it was before:\n{differences}");
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Whether all addresses of IPv6 that are in use have their routes.
fn have_routes() -> Result<bool> {
    let parse = |text: String| serde_json::from_str::<Vec<Value>>(&text).context("read JSON");
    let routes = parse(command::run("ip -6 -json route show table local")?)?;
    let interfaces = parse(command::run("ip -6 -json address show up")?)?;
    let is_routed = |address: &Value| routes.iter().any(|route| route["dst"] == address["local"]);
    let mut addresses = interfaces
        .iter()
        .filter_map(|interface| interface["addr_info"].as_array())
        .flatten();
    // A tentative one waits for a carrier.
    Ok(addresses.all(|address| address["tentative"] == true || is_routed(address)))
}

fn interfaces() -> Result<BTreeSet<String>> {
    let text = command::run("ip -details -json link")?;
    let list: Vec<Value> = serde_json::from_str(&text).context("read 'ip -json link'")?;
    let describe = |interface: &Value| {
        let field = |name: &str| interface[name].to_string();
        format!(
            "{} alias {} kind {} address {} mtu {} master {}",
            field("ifname"),
            field("ifalias"),
            interface["linkinfo"]["info_kind"],
            field("address"),
            field("mtu"),
            field("master"),
        )
    };
    Ok(list.iter().map(describe).collect())
}

fn addresses() -> Result<BTreeSet<String>> {
    let text = command::run("ip -json address")?;
    let list: Vec<Value> = serde_json::from_str(&text).context("read 'ip -json address'")?;
    let mut addresses = BTreeSet::new();
    for interface in &list {
        for address in interface["addr_info"].as_array().into_iter().flatten() {
            if address["scope"] != "link" {
                addresses.insert(format!(
                    "{} {}/{}",
                    interface["ifname"], address["local"], address["prefixlen"]
                ));
            }
        }
    }
    Ok(addresses)
}

fn routes() -> Result<BTreeSet<String>> {
    let mut routes = BTreeSet::new();
    for family in ["-4", "-6"] {
        let text = command::run(&format!("ip {family} -json route show table all"))?;
        let list: Vec<Value> = serde_json::from_str(&text).context("read 'ip -json route'")?;
        for route in list {
            let destination = route["dst"].as_str().unwrap_or_default();
            // The kernel makes these by itself, the last kind when forwarding is turned on.
            if destination.starts_with("fe80:")
                || destination.starts_with("ff00:")
                || route["type"] == "anycast"
            {
                continue;
            }
            routes.insert(format!(
                "{destination} via {} dev {} table {} type {} metric {}",
                route["gateway"], route["dev"], route["table"], route["type"], route["metric"]
            ));
        }
    }
    Ok(routes)
}

fn lines_of(line: &str) -> Result<BTreeSet<String>> {
    Ok(command::run(line)?.lines().map(str::to_owned).collect())
}

fn named_namespaces() -> Result<BTreeSet<String>> {
    let entries = match fs::read_dir(NETNS_FOLDER) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        Err(error) => return Err(error).with_context(|| format!("list {NETNS_FOLDER}")),
    };
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// Where the file system for BPF objects is mounted.
pub(crate) const BPF_FOLDER: &str = "/sys/fs/bpf";

/// What is under [`BPF_FOLDER`], relative to it; folders count too.
fn pinned_objects() -> Result<BTreeSet<String>> {
    let root = Path::new(BPF_FOLDER);
    let mut found = BTreeSet::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            // Gone meanwhile, or a kernel without BPF.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => {
                return Err(error).with_context(|| format!("list {}", folder.display()));
            }
        };
        for entry in entries {
            let entry = entry.with_context(|| format!("list {}", folder.display()))?;
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(path.clone());
            }
            let name = path.strip_prefix(root).unwrap_or(&path);
            found.insert(name.display().to_string());
        }
    }
    Ok(found)
}

fn mounts() -> Result<BTreeSet<String>> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("read the list of mounts")?;
    // Fields: number, parent, device, root, target, … The first two are new in each mount namespace.
    let describe = |line: &str| {
        let fields: Vec<&str> = line.split(' ').collect();
        fields.get(3..5).map(|fields| fields.join(" at "))
    };
    Ok(text.lines().filter_map(describe).collect())
}
