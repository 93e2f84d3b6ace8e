//! What can be read about this host: rights, limits, settings, devices.

use std::{collections::BTreeSet, fs};

use rustix::process::{Resource, getrlimit};

/// A setting below `/proc/sys`, without its closing newline.
pub(super) fn setting(name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/sys/{name}")).ok()?;
    Some(text.trim().to_owned())
}

/// Release of the kernel.
pub(super) fn kernel() -> String {
    rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned()
}

/// Whether a device can be opened for reading and writing; why not, if not.
pub(super) fn open_device(path: &str) -> Result<(), String> {
    let opened = fs::OpenOptions::new().read(true).write(true).open(path);
    opened.map(drop).map_err(|error| format!("{path}: {error}"))
}

/// Interfaces that default routes go by, from the texts of `/proc/net/route` and `/proc/net/ipv6_route`.
pub(super) fn uplinks(ipv4: &str, ipv6: &str) -> Vec<String> {
    const ANYWHERE: &str = "00000000";
    let mut found = BTreeSet::new();
    for line in ipv4.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if let [interface, ANYWHERE, _, _, _, _, _, ANYWHERE, ..] = fields.as_slice() {
            found.insert((*interface).to_owned());
        }
    }
    for line in ipv6.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if fields.len() == 10
            && fields[0].bytes().all(|digit| digit == b'0')
            && fields[1] == "00"
            && fields[9] != "lo"
        {
            found.insert(fields[9].to_owned());
        }
    }
    found.into_iter().collect()
}

/// The uplinks of this network namespace.
pub(super) fn own_uplinks() -> Vec<String> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    uplinks(&read("/proc/net/route"), &read("/proc/net/ipv6_route"))
}

/// Where the file system of a type is mounted, from the text of `/proc/mounts`.
pub(super) fn mount_point<'a>(mounts: &'a str, kind: &str) -> Option<&'a str> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, found) = (fields.next()?, fields.next()?);
        (found == kind).then_some(path)
    })
}

/// The processor's own virtualisation, from the text of `/proc/cpuinfo`.
pub(super) fn has_hardware_virtualisation(cpuinfo: &str) -> bool {
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("flags"))
        .any(|line| {
            line.split_whitespace()
                .any(|flag| flag == "vmx" || flag == "svm")
        })
}

/// Interfaces whose strict reverse path filter would drop packets, if these come by another way than answers
/// leave. `read` gives a setting.
pub(super) fn strict_reverse_path(
    uplinks: &[String],
    read: impl Fn(&str) -> Option<String>,
) -> Vec<String> {
    let value = |interface: &str| {
        let text = read(&format!("net/ipv4/conf/{interface}/rp_filter"))?;
        text.parse::<u8>().ok()
    };
    // The kernel takes the larger of the two; 1 is strict, 2 is loose.
    let of_all = value("all").unwrap_or(0);
    uplinks
        .iter()
        .filter(|uplink| value(uplink).unwrap_or(0).max(of_all) == 1)
        .cloned()
        .collect()
}

/// Most open files of this process.
pub(super) fn open_files_max() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTE: &str = "\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
";
    const ROUTE_IPV6: &str = "\
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth1
00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo
fe800000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth2
";

    #[test]
    fn uplinks_are_the_interfaces_of_default_routes() {
        assert_eq!(uplinks(ROUTE, ROUTE_IPV6), ["eth0", "eth1"]);
        assert!(uplinks("", "").is_empty());
    }

    #[test]
    fn a_file_system_is_found_by_its_type() {
        let mounts =
            "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(
            mount_point(mounts, "cgroup2"),
            Some("/sys/fs/cgroup/unified")
        );
        assert_eq!(mount_point(mounts, "bpf"), None);
    }

    #[test]
    fn virtualisation_is_a_flag_of_its_own() {
        assert!(has_hardware_virtualisation("flags\t\t: fpu svm de\n"));
        assert!(!has_hardware_virtualisation(
            "flags\t\t: fpu svm_lock\nvmx flags\t: x\n"
        ));
    }

    #[test]
    fn the_larger_reverse_path_setting_counts() {
        let uplinks = ["eth0".to_owned(), "eth1".to_owned(), "eth2".to_owned()];
        let strict = |of_all: &str| {
            strict_reverse_path(&uplinks, |name| {
                let value = match name.split('/').nth(3)? {
                    "all" => of_all,
                    "eth0" => "0",
                    "eth1" => "1",
                    _ => "2",
                };
                Some(value.to_owned())
            })
        };
        assert_eq!(strict("0"), ["eth1"]);
        assert_eq!(strict("1"), ["eth0", "eth1"]);
        assert!(strict("2").is_empty());
    }
}
