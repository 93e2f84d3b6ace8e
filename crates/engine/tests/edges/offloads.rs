//! Switches of an interface, and a socket option that asks for an offload.

use std::net::UdpSocket;

use anyhow::{Context, Result};
use nix::sys::socket::{setsockopt, sockopt::UdpGsoSegment};
use sandwire_testlab::namespace::Namespace;

/// Turns checksum and segmentation offloads of an interface on or off.
pub(crate) fn set(namespace: &Namespace, interface: &str, on: bool) -> Result<()> {
    let state = if on { "on" } else { "off" };
    let switches = ["tx", "tso", "gso", "gro"].map(|name| format!("{name} {state}"));
    namespace.run(&format!("ethtool -K {interface} {}", switches.join(" ")))?;
    Ok(())
}

/// Has the kernel cut what is sent on this socket into datagrams of that size.
pub(crate) fn segment_datagrams(socket: &UdpSocket, bytes: u16) -> Result<()> {
    setsockopt(socket, UdpGsoSegment, &bytes.into()).context("set UDP_SEGMENT")
}
