//! Identities without a namespace: the sockets of a cgroup get addresses of their own in the host's network
//! namespace, by eBPF programs on the cgroup.
//!
//! [`Identities::add`] puts addresses on an interface, programs on a cgroup, and one entry into a map that makes them
//! work; [`Identities::remove`] takes that back. No process must run, but for UDP sockets that are to receive at several
//! addresses ([`Identities::enter_receivers`]): programs, links and maps are pinned in one folder of a bpffs, and the map
//! `records` is what is remembered. A record is written before the first step and deleted after the last one, so whoever
//! comes next can finish what a crash cut off ([`Identities::repair`]).
//!
//! What applications see, socket by socket: `docs/identity.md`. Nothing here knows of leases or slots.

pub mod abi;
mod cgroup;
mod connections;
mod error;
mod identities;
mod interface;
mod loading;
mod looker;
mod maps;
mod numbers;
mod own_cgroup;
mod plan;
mod policies;
mod programs;
mod receivers;
mod record;
mod removal;
mod renew;
mod snapshot;
mod standing;
mod takeover;

pub use cgroup::Cgroup;
pub use error::Error;
pub use identities::Identities;
pub use own_cgroup::OwnCgroup;
pub use receivers::Bound;
pub use record::{NewIdentity, instance_number};
pub use removal::Repaired;
pub use sandwire_api::identity::{
    Allowed, Counters, Identity, IdentityPolicy, Refusal, State, Traffic,
};
pub use standing::Standing;

/// Where the pins are unless somebody wants them elsewhere.
pub const FOLDER: &str = "/sys/fs/bpf/sandwire-identity";

/// Whether the kernel takes the programs: loads them, and lets go of them.
///
/// # Errors
/// It lacks something, or refuses; the error says what.
pub fn probe() -> Result<(), Error> {
    loading::Programs::probe()
}

/// Whether the kernel takes the program that has UDP sockets receive at several addresses.
///
/// # Errors
/// As of [`probe`]; or the kernel doesn't tell its types (`CONFIG_DEBUG_INFO_BTF`).
pub fn probe_receivers() -> Result<(), Error> {
    receivers::LOOKER.probe()
}

/// Whether the kernel takes the program that identities with TCP only need besides.
///
/// # Errors
/// As of [`probe`]; or the kernel doesn't tell its types (`CONFIG_DEBUG_INFO_BTF`).
pub fn probe_tcp_only() -> Result<(), Error> {
    connections::LOOKER.probe()
}

/// Most addresses of one identity, without its loopback.
pub const ADDRESSES_MAX: usize = abi::RECORD_ADDRESSES_MAX;

/// Most sockets of one identity that listen at the same time, UDP sockets that receive at several addresses among them.
pub const LISTENERS_MAX: usize = abi::LISTENERS_OF_ONE_MAX;
