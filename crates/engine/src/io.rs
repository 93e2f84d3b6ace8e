//! What connects an engine with the system: a runner that waits for descriptors, and apps at the edge of a graph, which
//! talk to network interfaces. The only module with system calls.
//!
//! Whatever an edge app hands on has complete checksums and fits a wire: a kernel delivers frames whose checksum is
//! still to be computed, and super-packets still to be cut, to whoever reads an interface beside the device.
//!
//! An app goes on whatever becomes of its interface. What can't be sent is counted by cause; what the kernel had no
//! room for waits where it is.

pub mod checksum;
pub mod inbound;
pub mod interface;
pub mod offload;
pub mod outbound;
mod packet_socket;
pub mod pcap;
mod raw;
mod ring;
pub mod tap;
pub mod wait;
pub mod xdp;

pub use pcap::{PcapReader, PcapReaderApp, PcapWriter, PcapWriterApp};
pub use raw::{Raw, RawApp};
pub use ring::{Ring, RingApp};
pub use tap::{Tap, TapApp};
pub use wait::{Stop, Waiter, Waker};
pub use xdp::{Xdp, XdpApp};
