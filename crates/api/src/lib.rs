//! What the daemon, the command line and other programs say to each other.
//!
//! Plain data with serde and OpenAPI descriptions, one file per resource, and a small client for the
//! daemon's Unix socket. Nothing here does I/O except [`client`]; nothing here knows how a slot is
//! built. A field that is absent in a request means the default that its documentation states.

pub mod attach;
pub mod client;
pub mod drop_reason;
pub mod error;
pub mod health;
pub mod identity;
pub mod impairment;
pub mod lease;
pub mod name;
pub mod policy;
pub mod pool;
pub mod prefix;
pub mod published_port;
pub mod slot;
pub mod trace;
pub mod traffic;
pub mod vsock;

/// Prefix of every versioned path of the HTTP API.
pub const API_PREFIX: &str = "/v1";
/// Where the daemon listens unless the configuration says otherwise.
pub const DEFAULT_SOCKET: &str = "/run/sandwire/sandwire.sock";
/// What `Upgrade` says in a request for open TAPs, `GET /v1/leases/{name}/taps`.
pub const TAPS_PROTOCOL: &str = "sandwire-fd";
