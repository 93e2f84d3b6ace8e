//! The Unix-socket convention of VMMs that own their guest's device, both sides of it.
//!
//! Host to guest: connect to the VMM's socket, write `CONNECT PORT\n`, read `OK HOSTPORT\n`. Guest to host:
//! the VMM connects to `PATH_PORT`. Firecracker, Cloud Hypervisor and libkrun do so, and our own face for
//! vhost-user guests does the same for the clients of the host.

pub mod callee;
pub mod handshake;
pub mod line;
pub mod packets;
pub mod pipe;
pub mod relay;
pub mod router;
