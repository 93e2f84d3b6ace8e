//! Giving up what the relay doesn't need once its sockets are open.

use std::io;

use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{
        CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set,
        set_capabilities, set_no_new_privs,
    },
};

/// What the host's side keeps, and why. The peer's side keeps nothing.
const KEPT: &[(CapabilitySet, &str)] = &[
    (
        CapabilitySet::NET_ADMIN,
        "sockets with others' addresses; rules for a cgroup that was made anew",
    ),
    (
        CapabilitySet::NET_BIND_SERVICE,
        "answers from ports below 1024",
    ),
];

/// Descriptors that are wanted: three for each connection.
const DESCRIPTORS: u64 = 262_144;

/// Raises the limit of open descriptors, as far as is allowed.
pub(crate) fn raise_descriptor_limit() {
    let now = getrlimit(Resource::Nofile);
    let highest = now.maximum.unwrap_or(DESCRIPTORS);
    for wanted in [DESCRIPTORS.max(highest), highest] {
        let limit = Rlimit {
            current: Some(wanted),
            maximum: Some(wanted),
        };
        // Only root may raise the hard limit; others get as far as that.
        if setrlimit(Resource::Nofile, limit).is_ok() {
            return;
        }
    }
}

/// Gives up all other capabilities, and the way to any by executing something. To be called before threads are
/// started, since it is the calling thread's.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn reduce(is_host: bool) -> io::Result<()> {
    let wanted = if is_host { KEPT } else { &[] };
    let kept = wanted
        .iter()
        .fold(CapabilitySet::empty(), |all, (one, _)| all | *one);
    let now = capabilities(None)?;
    for capability in CapabilitySet::all().iter() {
        if !kept.contains(capability) {
            // One that this kernel doesn't have is not there, and without CAP_SETPCAP nothing can be taken away.
            let _ = remove_capability_from_bounding_set(capability);
        }
    }
    set_capabilities(
        None,
        CapabilitySets {
            effective: now.permitted & kept,
            permitted: now.permitted & kept,
            inheritable: CapabilitySet::empty(),
        },
    )?;
    Ok(set_no_new_privs(true)?)
}
