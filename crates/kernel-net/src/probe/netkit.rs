//! Whether the kernel makes netkit pairs as they are needed: for Ethernet, with addresses of our choice.
//!
//! Linux has netkit since 6.7 if it was built in; before 6.12 it refuses the addresses.

use std::os::fd::AsFd;

use crate::{
    Error,
    interface::{InterfaceIndex, InterfacePair, PairDevice},
    netlink::{Request, Socket},
    netns::Home,
};

/// Makes a pair in a namespace of its own, which goes with it. Takes some milliseconds.
///
/// # Errors
/// The kernel can't; the thread is back home.
pub fn check(home: &Home) -> Result<(), Error> {
    let _inside = home.unshare()?;
    make_pair(&mut Socket::route()?, &Home::here()?)
}

/// Makes a pair whose ends are both in the socket's namespace, and leaves it there.
///
/// # Errors
/// The kernel can't.
pub fn make_pair(socket: &mut Socket, namespace: &Home) -> Result<(), Error> {
    let pair = InterfacePair {
        device: PairDevice::Netkit,
        name: "probenk0",
        index: InterfaceIndex(0),
        peer_name: "probenk1",
        peer_namespace: namespace.as_fd(),
        mac: [0x02, 0, 0, 0, 0, 1],
        peer_mac: [0x02, 0, 0, 0, 0, 2],
        mtu: 1500,
        dormant: None,
    };
    let mut request = Request::new();
    pair.create(&mut request);
    socket.execute(request)
}
