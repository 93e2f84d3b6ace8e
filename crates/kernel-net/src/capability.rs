//! Linux capabilities that the operations of this crate need, for service units and for tests that
//! run with exactly these.

/// Capabilities of one group of operations, as `capabilities(7)` spells them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Required {
    /// Module whose operations need them.
    pub operations: &'static str,
    /// The capabilities.
    pub capabilities: &'static [&'static str],
    /// Why each is needed.
    pub reason: &'static str,
}

/// What each group of operations needs.
pub const REQUIRED_CAPABILITIES: &[Required] = &[
    crate::netns::REQUIRED_CAPABILITIES,
    crate::procfs::REQUIRED_CAPABILITIES,
    crate::interface::REQUIRED_CAPABILITIES,
    crate::tap::REQUIRED_CAPABILITIES,
    crate::nft::REQUIRED_CAPABILITIES,
    crate::conntrack::REQUIRED_CAPABILITIES,
];
