//! Why an app for AF_XDP does not start.

use std::io;

use thiserror::Error;

/// An [`Xdp`](super::Xdp) that can't be. Nothing has changed then, or it has been changed back.
#[derive(Debug, Error)]
pub enum XdpError {
    /// Netlink, or a namespace, refused.
    #[error("AF_XDP on interface {interface}")]
    Kernel {
        /// The interface.
        interface: String,
        /// What the kernel says.
        source: sandwire_kernel_net::Error,
    },
    /// A system call failed.
    #[error("AF_XDP on interface {interface}: {operation}: {source}{}", hint(.source))]
    System {
        /// The interface.
        interface: String,
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The interface is down, so that its queues can't be known.
    #[error(
        "AF_XDP on interface {interface}: it is down; raise it first (ip link set {interface} up)"
    )]
    Down {
        /// The interface.
        interface: String,
    },
    /// Its frames have no Ethernet header.
    #[error("AF_XDP on interface {interface}: it carries no Ethernet frames")]
    NotEthernet {
        /// The interface.
        interface: String,
    },
    /// The interface may send frames that no buffer holds.
    #[error(
        "AF_XDP on interface {interface}: its MTU is {mtu}, and buffers of {buffer_bytes} bytes hold frames for an MTU \
         of {mtu_max} at most; lower the MTU, or choose larger buffers (2048 or 4096)"
    )]
    Mtu {
        /// The interface.
        interface: String,
        /// Its MTU.
        mtu: u32,
        /// Bytes of a buffer.
        buffer_bytes: u32,
        /// The largest MTU that these are good for.
        mtu_max: u32,
    },
    /// The interface may send frames that the engine's packets can't hold.
    #[error(
        "AF_XDP on interface {interface}: its MTU is {mtu}, and packets of {frame_bytes_max} bytes hold frames for an \
         MTU of {mtu_max} at most; lower the MTU, or raise `PoolLimits::frame_bytes_max`"
    )]
    Packets {
        /// The interface.
        interface: String,
        /// Its MTU.
        mtu: u32,
        /// Bytes of the longest packet.
        frame_bytes_max: u16,
        /// The largest MTU that these are good for.
        mtu_max: u32,
    },
    /// Sizes that the kernel doesn't take.
    #[error("AF_XDP on interface {interface}: {what} of {asked}; it must be {allowed}")]
    Size {
        /// The interface.
        interface: String,
        /// Size of what.
        what: &'static str,
        /// What was asked for.
        asked: u32,
        /// What is possible.
        allowed: &'static str,
    },
    /// There is no such queue.
    #[error(
        "AF_XDP on interface {interface}: it has {queues} receive queues, and no queue {queue}; count from 0"
    )]
    NoQueue {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
        /// How many there are.
        queues: u32,
    },
    /// Packets of some queues would pass by.
    #[error(
        "AF_XDP on interface {interface}: it has {queues} receive queues, and apps for {served}; packets of the others \
         would pass by. Make an app for each from the same description (`.queue(n)`), reduce the queues \
         (ethtool -L {interface}), or accept it (`.leave_other_queues()`)"
    )]
    Queues {
        /// The interface.
        interface: String,
        /// How many there are.
        queues: u32,
        /// For how many of them there are descriptions of apps.
        served: u32,
    },
    /// Nobody knows what whoever sends on this interface leaves to it.
    #[error(
        "AF_XDP on interface {interface}: {reason}. AF_XDP can't tell a partial checksum or a super-packet from a \
         whole packet. Use the app for AF_PACKET, or, if you know that complete packets of wire size are sent here, \
         say so (`.trust_sender()`)"
    )]
    Sender {
        /// The interface.
        interface: String,
        /// What is known of the sender.
        reason: String,
    },
    /// Another program is attached.
    #[error(
        "AF_XDP on interface {interface}: an XDP program is attached to it; detach it first (ip link set {interface} \
         xdp off), or stop who put it there"
    )]
    Occupied {
        /// The interface.
        interface: String,
    },
    /// The interface has an app for this queue.
    #[error(
        "AF_XDP on interface {interface}: queue {queue} has a socket; stop whoever has it first"
    )]
    QueueTaken {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
    },
}

/// What to do about an error number, where that is known.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => "; it needs CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF",
        Some(libc::ENOBUFS | libc::ENOMEM) => {
            "; raise the limit of locked memory (ulimit -l), or make the rings smaller"
        }
        Some(libc::EAFNOSUPPORT) => "; this kernel has no AF_XDP (CONFIG_XDP_SOCKETS)",
        Some(libc::ERANGE) => {
            "; with an XDP program the MTU of a veth's other end must be below 3.5 kB"
        }
        Some(libc::ENOSPC) => {
            "; a veth needs as many receive queues as its other end has send queues"
        }
        _ => "",
    }
}
