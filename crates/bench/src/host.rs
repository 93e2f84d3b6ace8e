//! Facts about the machine, without which a figure means nothing.

use std::{fs, process::Command};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The machine that a benchmark ran on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Release of the running kernel.
    pub kernel: String,
    /// Name of the distribution.
    pub operating_system: String,
    /// Model of the first processor.
    pub cpu: String,
    /// Processors that are online.
    pub cores: u64,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Runnable processes over the last minute before the run; well above zero means a busy machine.
    pub load_average: f64,
    /// Version of `ip`, which the recipe uses.
    pub iproute2: String,
    /// Version of `iptables`, which the recipe uses.
    pub iptables: String,
    /// Version of the program under test.
    pub sandwire: String,
    /// When the run began, in seconds since 1970-01-01 UTC.
    pub started_at: u64,
}

/// Memory figures of the whole machine, in KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// What could be used without swapping.
    pub(crate) available: u64,
    /// What the kernel's own objects take.
    pub(crate) slab: u64,
    /// What the kernel's counters of each processor take.
    pub(crate) percpu: u64,
}

impl HostFacts {
    /// Reads the facts of this machine.
    pub(crate) fn read() -> Result<Self> {
        let cpus = read("/proc/cpuinfo")?;
        let load = read("/proc/loadavg")?;
        let memory = read("/proc/meminfo")?;
        let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Ok(Self {
            kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            operating_system: value(
                &fs::read_to_string("/etc/os-release").unwrap_or_default(),
                "PRETTY_NAME",
                '=',
            )
            .trim_matches('"')
            .to_owned(),
            cpu: value(&cpus, "model name", ':').to_owned(),
            cores: cpus
                .lines()
                .filter(|line| line.starts_with("processor"))
                .count() as u64,
            memory_mib: kibibytes(&memory, "MemTotal") / 1024,
            load_average: load
                .split(' ')
                .next()
                .and_then(|first| first.parse().ok())
                .unwrap_or(0.0),
            iproute2: version_of("ip", "-V"),
            iptables: version_of("iptables", "-V"),
            sandwire: env!("CARGO_PKG_VERSION").to_owned(),
            started_at: since_epoch.map_or(0, |since| since.as_secs()),
        })
    }
}

impl Memory {
    /// Reads the machine's memory figures.
    pub(crate) fn read() -> Result<Self> {
        let text = read("/proc/meminfo")?;
        Ok(Self {
            available: kibibytes(&text, "MemAvailable"),
            slab: kibibytes(&text, "Slab"),
            percpu: kibibytes(&text, "Percpu"),
        })
    }
}

/// Memory that a process alone keeps resident, in KiB.
pub(crate) fn resident_kibibytes(pid: u32) -> Result<u64> {
    Ok(kibibytes(&read(&format!("/proc/{pid}/status"))?, "VmRSS"))
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {path}"))
}

/// What follows a key in a file of lines such as `key : value`.
fn value<'a>(text: &'a str, key: &str, separator: char) -> &'a str {
    text.lines()
        .filter_map(|line| line.split_once(separator))
        .find(|(name, _)| name.trim() == key)
        .map_or("", |(_, value)| value.trim())
}

fn kibibytes(text: &str, key: &str) -> u64 {
    value(text, key, ':')
        .trim_end_matches(" kB")
        .parse()
        .unwrap_or(0)
}

fn version_of(program: &str, flag: &str) -> String {
    match Command::new(program).arg(flag).output() {
        Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        Err(_) => "missing".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_found_by_its_key() {
        let text = "MemTotal:       24684000 kB\nMemAvailable:   23900000 kB\nSlab: 12 kB\n";
        assert_eq!(kibibytes(text, "MemAvailable"), 23_900_000);
        assert_eq!(kibibytes(text, "Slab"), 12);
        assert_eq!(kibibytes(text, "None"), 0);
        assert_eq!(
            value("PRETTY_NAME=\"Debian\"\n", "PRETTY_NAME", '='),
            "\"Debian\""
        );
    }

    #[test]
    fn this_machine_has_facts() {
        let facts = HostFacts::read().unwrap();
        assert!(!facts.kernel.is_empty());
        assert!(facts.cores > 0);
        assert!(facts.memory_mib > 0);
        assert!(Memory::read().unwrap().available > 0);
        assert!(resident_kibibytes(std::process::id()).unwrap() > 0);
    }
}
