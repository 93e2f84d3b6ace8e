//! Giving up what a service doesn't need once it has what it needs.

use std::io;

use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{
        CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
        set_no_new_privs,
    },
};

pub use rustix::thread::CapabilitySet;

/// A capability that a service keeps, and why.
pub type Kept = (CapabilitySet, &'static str);

/// Raises the limit of open descriptors to a number, as far as is allowed.
pub fn raise_descriptor_limit(descriptors: u64) {
    let now = getrlimit(Resource::Nofile);
    let highest = now.maximum.unwrap_or(descriptors);
    for wanted in [descriptors.max(highest), highest] {
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

/// Gives up all other capabilities, and the way to any by executing something. To be called before threads are started,
/// since it is the calling thread's.
///
/// # Errors
/// The kernel refuses.
pub fn keep_only(capabilities_kept: &[Kept]) -> io::Result<()> {
    let kept = capabilities_kept
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
