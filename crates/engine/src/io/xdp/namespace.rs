//! The network namespace that another one knows by a number.
//!
//! A number leads to no file. So all files that lead to network namespaces are tried: mounts, as `ip netns` and
//! container runtimes make them, and those of processes.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use sandwire_kernel_net::Error;
use sandwire_kernel_net::netlink::Socket;
use sandwire_kernel_net::netlink::attribute::u32_of;

/// What became of work in a namespace.
pub(super) enum Entered<T> {
    /// This came of it.
    Done(T),
    /// The namespace may not be entered.
    Refused(io::Error),
}

/// The namespace of the calling thread.
pub(super) fn own() -> Result<File, Error> {
    const PATH: &str = "/proc/thread-self/ns/net";
    File::open(PATH).map_err(|source| Error::System {
        operation: "open",
        object: PATH.to_owned(),
        source,
    })
}

/// The namespace that the socket's knows by this number, if anything here leads to it.
pub(super) fn find(route: &mut Socket, id: i32) -> Result<Option<File>, Error> {
    let mut seen = BTreeSet::new();
    for path in mounts().into_iter().chain(of_processes()) {
        // What is gone by now, or not for us to open, is not it.
        let Ok(file) = File::open(&path) else {
            continue;
        };
        let is_new = file.metadata().is_ok_and(|facts| seen.insert(facts.ino()));
        if is_new && id_of(route, &file)? == Some(id) {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// Does something in another namespace, on a thread of its own, which never needs to come back.
pub(super) fn inside<T: Send>(namespace: &File, work: impl FnOnce() -> T + Send) -> Entered<T> {
    let entered = thread::scope(|scope| {
        let worker = scope.spawn(|| {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok::<T, rustix::io::Errno>(work())
        });
        worker
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    match entered {
        Ok(done) => Entered::Done(done),
        Err(errno) => Entered::Refused(io::Error::from(errno)),
    }
}

/// By which number the socket's namespace knows this one, if by any.
fn id_of(route: &mut Socket, namespace: &File) -> Result<Option<i32>, Error> {
    let descriptor = namespace.as_raw_fd().cast_unsigned();
    let found = route.query(
        libc::RTM_GETNSID,
        false,
        ("look up number of", "a network namespace"),
        |message| {
            message.raw(&[0; 4]);
            message.put_u32(NETNSA_FD, descriptor);
        },
        |reply| {
            let id = reply.attributes(4).find(NETNSA_NSID).and_then(u32_of)?;
            Some(id.cast_signed()).filter(|id| *id >= 0)
        },
    )?;
    Ok(found.into_iter().next())
}

/// Namespaces that are mounted somewhere.
fn mounts() -> Vec<PathBuf> {
    let list = fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
    list.lines().filter_map(mount_of).collect()
}

/// The place of a mount, from a line of `mountinfo`, if it is that of a network namespace.
fn mount_of(line: &str) -> Option<PathBuf> {
    let mut words = line.split(' ').skip(3);
    let (root, place) = (words.next()?, words.next()?);
    // Spaces in it are written so, by proc_pid_mountinfo(5).
    let place = place.replace("\\040", " ");
    root.starts_with("net:[").then(|| PathBuf::from(place))
}

/// Namespaces that processes are in, and the threads of our own.
fn of_processes() -> impl Iterator<Item = PathBuf> {
    let folders = ["/proc/self/task", "/proc"];
    let entries = folders
        .into_iter()
        .filter_map(|path| fs::read_dir(path).ok());
    let entries = entries.flatten().filter_map(Result::ok);
    let numbered = entries.filter(|entry| {
        let name = entry.file_name();
        name.as_encoded_bytes().iter().all(u8::is_ascii_digit)
    });
    numbered.map(|entry| entry.path().join(Path::new("ns/net")))
}

const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_of_network_namespaces_are_found() {
        let namespace = "50 27 0:4 net:[4026532455] /run/netns/a\\040b rw shared:9 - nsfs nsfs rw";
        assert_eq!(mount_of(namespace), Some(PathBuf::from("/run/netns/a b")));
        let other = "51 27 0:4 mnt:[4026532456] /run/mnt rw shared:9 - nsfs nsfs rw";
        assert_eq!(mount_of(other), None);
        assert_eq!(mount_of("51 27"), None);
    }
}
