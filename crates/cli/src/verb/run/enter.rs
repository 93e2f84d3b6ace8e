//! Starts a command inside a slot's network namespace.
//!
//! A thread of ours enters the namespace, makes a mount namespace of its own whose `/sys` shows the
//! slot's interfaces (as `ip netns exec` does), starts the command and ends. A new process has the
//! namespaces of the thread that made it. Its signals are unblocked, ours stay blocked.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    process::Command,
};

use nix::sched::CloneFlags;
use rustix::{
    fs::{CWD, StatVfsMountFlags},
    io::Errno,
    mount::{MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags},
    process::Pid,
    thread::{LinkNameSpaceType, move_into_link_name_space},
};

use crate::output::note;

/// Why a command was not started in a namespace.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EnterError {
    /// The namespace can't be entered.
    #[error("cannot {operation}: {source}")]
    Namespace {
        operation: &'static str,
        source: io::Error,
    },
    /// The program can't be started.
    #[error("{0}")]
    Start(io::Error),
}

/// Starts `command` in the namespace at the path `netns`.
pub(super) fn spawn(netns: &str, mut command: Command) -> Result<Pid, EnterError> {
    let start = move || {
        enter(netns)?;
        sandwire_kernel_net::process::unblock_signals(&mut command);
        let child = command.spawn().map_err(EnterError::Start)?;
        Pid::from_raw(child.id().cast_signed()).ok_or(EnterError::Namespace {
            operation: "read the number of the new process",
            source: io::ErrorKind::InvalidData.into(),
        })
    };
    std::thread::scope(|scope| scope.spawn(start).join()).unwrap_or_else(|_| {
        Err(EnterError::Namespace {
            operation: "start a process",
            source: io::Error::other("the thread that enters the namespace panicked"),
        })
    })
}

/// Moves the calling thread into the network namespace, and into a mount namespace of its own.
pub(crate) fn enter(netns: &str) -> Result<(), EnterError> {
    let failed = |operation| move |source: io::Error| EnterError::Namespace { operation, source };
    let file = File::open(netns).map_err(failed("open the network namespace"))?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(io::Error::from)
        .map_err(failed("enter the network namespace"))?;
    nix::sched::unshare(CloneFlags::CLONE_NEWNS)
        .map_err(io::Error::from)
        .map_err(failed("make a mount namespace"))?;
    // Later mounts of the host still arrive, ours don't leave.
    let downstream = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", downstream)
        .map_err(io::Error::from)
        .map_err(failed("keep mounts from leaving the mount namespace"))?;
    if let Err(error) = show_interfaces_in_sys() {
        note(&format!(
            "cannot mount /sys for the slot: {error}; /sys/class/net shows the host's interfaces"
        ));
    }
    Ok(())
}

/// Mounts a `/sys` of this network namespace over the old one, and moves what is mounted below (cgroups, bpf, …)
/// on to it.
fn show_interfaces_in_sys() -> io::Result<()> {
    let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo")?;
    let clone = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    let mut below: Vec<(String, OwnedFd)> = Vec::new();
    for path in topmost_mounts_below_sys(&mounts) {
        let tree = rustix::mount::open_tree(CWD, &path, clone)?;
        below.push((path, tree));
    }
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    if rustix::fs::statvfs("/sys")?
        .f_flag
        .contains(StatVfsMountFlags::RDONLY)
    {
        flags |= MountFlags::RDONLY;
    }
    rustix::mount::mount("sysfs", "/sys", "sysfs", flags, None)?;
    for (path, tree) in below {
        let to_empty_path = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        match rustix::mount::move_mount(&tree, "", CWD, &path, to_empty_path) {
            // A folder that only the old /sys had.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Mount points below `/sys` that aren't below another, in the text of a `mountinfo` file.
fn topmost_mounts_below_sys(mountinfo: &str) -> Vec<String> {
    let mut paths: Vec<&str> = mountinfo
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|path| path.starts_with("/sys/"))
        .collect();
    paths.sort_unstable();
    paths.dedup();
    let mut topmost: Vec<String> = Vec::new();
    for path in paths {
        let is_covered = topmost.iter().any(|above| {
            path.strip_prefix(above.as_str())
                .is_some_and(|rest| rest.starts_with('/'))
        });
        if !is_covered {
            topmost.push(path.to_owned());
        }
    }
    topmost
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_topmost_mounts_below_sys_are_moved() {
        let mountinfo = "\
            22 1 0:20 / /sys rw - sysfs sysfs rw\n\
            23 22 0:21 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
            24 23 0:22 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
            25 22 0:23 / /sys/fs/bpf rw - bpf bpf rw\n\
            26 22 0:24 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
            27 1 0:25 / /system rw - tmpfs tmpfs rw\n";
        assert_eq!(
            topmost_mounts_below_sys(mountinfo),
            ["/sys/fs/bpf", "/sys/fs/cgroup"]
        );
    }
}
