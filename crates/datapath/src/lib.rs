//! The eBPF data path: its programs, the maps that they share with the daemon, loading and attaching.
//!
//! [`Datapath::open`] loads the programs and finds or makes the maps under a folder of a bpffs, so that
//! packets go on while the daemon is not there. A sandbox interface (NIC) is an entry of the array
//! `nics`; the filter on its host end names the entry by class id, and handing a slot out is writing
//! that entry.

pub mod abi;
mod btf;
pub mod divert;
mod error;
pub mod features;
mod former;
mod ledgers;
mod map;
mod migrate;
mod nic;
mod open;
mod pins;
mod policies;
pub mod policy;
mod processors;
mod routes;
mod skb;
mod sys;
mod trace;
mod uplink;
mod used_maps;

pub use error::Error;
pub use nic::{NicIndex, PolicyIndex};
pub use open::{Datapath, GROUP_PAIRS_MAX, Opened, Order, Program, Settings, folder_for};
pub use trace::TraceReader;
pub use uplink::{Defect, FILTER_HANDLE, FILTER_PRIORITY, Uplink, filtered_uplinks};

/// The number of a group in maps: a hash of its name that stays the same. Two names of one number
/// must not be used together.
#[must_use]
pub fn group_number(name: &str) -> u32 {
    // FNV-1a: https://datatracker.ietf.org/doc/draft-eastlake-fnv/
    name.bytes().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

/// The number by which entries name their pool: as [`group_number`].
#[must_use]
pub fn pool_number(name: &str) -> u32 {
    group_number(name)
}

#[cfg(test)]
mod tests;
