//! What the service keeps when it has started.
//!
//! It enters other namespaces, makes interfaces there and loads programs for as long as it lives, so it stays root with
//! these capabilities and no others.

use sandwire_kernel_net::privileges::{CapabilitySet, Kept};

/// What is kept, and why.
pub const KEPT: &[Kept] = &[
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

/// Descriptors that the service wants to be able to have: about eleven for each target.
pub(crate) const DESCRIPTORS: u64 = 65_536;
