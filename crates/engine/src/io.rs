//! Apps at the edge of a graph, which talk to network interfaces, and what they share.
//!
//! Whatever an edge app hands on has complete checksums and fits a wire: a kernel delivers frames whose checksum is
//! still to be computed, and super-packets still to be cut, to whoever reads an interface beside the device.

pub mod checksum;
pub mod inbound;
pub mod offload;
