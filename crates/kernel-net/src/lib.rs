//! Kernel network objects as Rust values: namespaces, interfaces, TAPs, addresses, routes, neighbours,
//! filters, nftables and connection tracking.
//!
//! Everything goes over netlink and ioctl from this process; nothing is forked. Interfaces, addresses,
//! routes and neighbours are written into a [`netlink::Request`], so that one system call carries
//! many of them; nftables and connection tracking have batches of their own. Nothing here knows what a
//! slot is or has an opinion on names, and nothing is retried: each failure names the operation, the
//! object and the kernel's reason.

pub mod address;
pub mod bpf;
pub mod capability;
pub mod conntrack;
pub mod datagrams;
pub mod error;
pub mod folders;
pub mod interface;
pub mod ipv6;
pub mod listener;
pub mod neighbour;
pub mod netlink;
pub mod netns;
pub mod nft;
mod number;
pub mod privileges;
pub mod probe;
pub mod process;
pub mod procfs;
pub mod qdisc;
pub mod route;
pub mod routing_rule;
pub mod tap;
pub mod tc;
pub mod tcp;
pub mod thread;
pub mod transparent;
pub mod xdp;

pub use error::Error;
