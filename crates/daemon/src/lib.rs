//! The daemon: configuration, HTTP API, metrics; the only place where the parts meet.
//!
//! [`run`] is the whole of `sandwire daemon`. A request goes from the socket ([`server`]) through
//! the handlers ([`http`], one file per resource) to the slot service, which decides and acts.
//! Nothing here knows how a slot is built, and nothing on the packet path waits for this process:
//! stopping it leaves slots, leases and their traffic as they are.

mod access;
pub mod config;
mod declared;
mod heard;
mod http;
mod identities;
mod identity_watch;
mod impair;
pub mod instance;
#[cfg(test)]
mod model;
mod places;
mod receivers;
mod run;
mod server;
pub mod socket;
mod vsock;

pub use run::{DaemonError, run};
