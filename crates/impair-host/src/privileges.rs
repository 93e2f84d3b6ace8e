//! Giving up what the service doesn't need.
//!
//! It enters other namespaces, makes interfaces there and loads programs for as long as it lives, so it stays root with
//! these capabilities and no others.

use std::io;

use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{
        CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set,
        set_capabilities, set_no_new_privs,
    },
};

/// What is kept, and why.
pub const KEPT: &[(CapabilitySet, &str)] = &[
    (CapabilitySet::NET_ADMIN, "TAPs, filters, links"),
    (
        CapabilitySet::SYS_ADMIN,
        "enter network namespaces, mount a bpffs where there is none",
    ),
    (CapabilitySet::BPF, "load programs, make maps"),
    (
        CapabilitySet::PERFMON,
        "the verifier's rules for those who may see the kernel",
    ),
    (
        CapabilitySet::SYS_PTRACE,
        "open the network namespace of other users' processes",
    ),
    (
        CapabilitySet::DAC_OVERRIDE,
        "its folder may be somebody else's, pins are root's alone",
    ),
];

/// Descriptors that the service wants to be able to have: about ten for each target.
const DESCRIPTORS: u64 = 65_536;

/// Raises the limit of open descriptors, as far as is allowed.
pub fn raise_descriptor_limit() {
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

/// Gives up all other capabilities, and the way to any by executing something. To be called before threads are started,
/// since it is the calling thread's.
///
/// # Errors
/// The kernel refuses.
pub fn reduce() -> io::Result<()> {
    let kept = KEPT
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
