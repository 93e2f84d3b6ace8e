//! TUN and TAP interfaces as files, and a tunnel made of two TUNs: what GRE or `WireGuard` would be, on kernels
//! that have neither. Its packets have no Ethernet headers.

use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
    os::fd::AsRawFd,
    path::Path,
    thread,
};

use anyhow::{Context, Result};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open},
};
use smoltcp::phy::{Medium, TunTapInterface};

use crate::namespace;

/// Opens an interface in the calling thread's namespace, and creates one that isn't there.
pub(crate) fn open(name: &str, medium: Medium) -> Result<File> {
    let opened =
        TunTapInterface::new(name, medium).with_context(|| format!("open the interface {name}"))?;
    // smoltcp's own device panics when the interface goes away, so it only opens; we use a duplicate.
    let process = pidfd_open(getpid(), PidfdFlags::empty()).context("open own process")?;
    let descriptor = pidfd_getfd(process, opened.as_raw_fd(), PidfdGetfdFlags::empty())
        .context("duplicate an interface's descriptor")?;
    Ok(File::from(descriptor))
}

/// Makes an interface of this name in each of two namespaces, and carries the packets of each to the other
/// until it is deleted.
///
/// # Errors
/// If one can't be made.
pub fn tunnel(namespaces: [&Path; 2], name: &str) -> Result<()> {
    let open = |path| namespace::inside(path, || open(name, Medium::Ip));
    let (one, other) = (open(namespaces[0])?, open(namespaces[1])?);
    for (from, to) in [(one.try_clone()?, other.try_clone()?), (other, one)] {
        thread::spawn(move || carry(&from, &to));
    }
    Ok(())
}

fn carry(mut from: &File, mut to: &File) {
    let mut packet = vec![0; 64 * 1024];
    loop {
        match poll(&mut [PollFd::new(from, PollFlags::IN)], None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        match from.read(&mut packet) {
            // One that is down or full loses it, as a network would.
            Ok(length) => drop(to.write(&packet[..length])),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}
