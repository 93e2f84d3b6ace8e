//! What the relay keeps once its sockets are open.

use rustix::process::{Resource, getrlimit};
use sandwire_kernel_net::privileges::{CapabilitySet, Kept};

/// What the host's side keeps, and why. The peer's side keeps nothing.
pub(crate) const KEPT: &[Kept] = &[
    (
        CapabilitySet::NET_ADMIN,
        "sockets with others' addresses; rules for a cgroup that was made anew",
    ),
    (
        CapabilitySet::NET_BIND_SERVICE,
        "answers from ports below 1024",
    ),
];

/// Descriptors that are wanted: three or four for each connection.
pub(crate) const DESCRIPTORS: u64 = 262_144;

/// Of the descriptors that there are, those for a peer's side beside a host's side that may take so many.
pub(crate) fn beside(descriptors: usize, of_host: usize) -> usize {
    descriptors
        .saturating_sub(of_host)
        .max(least_beside(descriptors))
}

/// Those that a peer's side has in any case.
pub(crate) fn least_beside(descriptors: usize) -> usize {
    descriptors / 4
}

/// Descriptors that there may be.
pub(crate) fn descriptors() -> usize {
    let most = getrlimit(Resource::Nofile).current;
    most.and_then(|most| usize::try_from(most).ok())
        .unwrap_or(usize::MAX)
}
