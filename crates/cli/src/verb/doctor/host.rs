//! What can be read about this host: rights, limits, settings, devices.

use std::fs;

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

/// Where the file system of a type is mounted, from the text of `/proc/mounts`. One that a later mount hides isn't reached.
pub(super) fn mount_point<'a>(mounts: &'a str, kind: &str) -> Option<&'a str> {
    let mounts: Vec<(&str, &str)> = mounts
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ').skip(1);
            Some((fields.next()?, fields.next()?))
        })
        .collect();
    let hides = |path: &str, later: &str| {
        let rest = path.strip_prefix(later);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let mut found = mounts.iter().enumerate();
    found.find_map(|(at, (path, found))| {
        let mut later = mounts[at + 1..].iter();
        let is_seen = *found == kind && !later.any(|(later, _)| hides(path, later));
        is_seen.then_some(*path)
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

/// Most open files of this process.
pub(super) fn open_files_max() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_file_system_that_another_hides_is_not_found() {
        let mounts = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\ntmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\ncgroup2 /cg cgroup2 rw 0 0\n\
                      tmpfs /c tmpfs rw 0 0\n";
        let unified = Some("/sys/fs/cgroup/unified");
        assert_eq!(mount_point(mounts, "cgroup2"), unified);
        let hidden = format!("{mounts}sysfs /sys sysfs rw 0 0\n");
        assert_eq!(mount_point(&hidden, "cgroup2"), Some("/cg"));
    }

    #[test]
    fn virtualisation_is_a_flag_of_its_own() {
        assert!(has_hardware_virtualisation("flags\t\t: fpu svm de\n"));
        assert!(!has_hardware_virtualisation(
            "flags\t\t: fpu svm_lock\nvmx flags\t: x\n"
        ));
    }
}
