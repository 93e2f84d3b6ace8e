//! What can go wrong between a pool and the kernel.

use std::error::Error;

/// A kernel operation on a named object that failed.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The kernel refused or failed.
    #[error("cannot {operation} {object}: {source}")]
    Kernel {
        /// What was tried: `create`, `mount`, `write nft table of`.
        operation: &'static str,
        /// Kind and name of the object: `interface sw3f2a01-17`.
        object: String,
        /// The kernel's reason, with its extended-ack text where it gave one.
        source: Box<dyn Error + Send + Sync>,
    },
    /// What was asked contradicts what the host has. Nothing changed.
    #[error("{object} conflicts with {with}: {advice}")]
    Conflict {
        /// What was asked for: `clone prefix 10.64.0.0/16`.
        object: String,
        /// What is there: `route 10.0.0.0/8 dev eth0`.
        with: String,
        /// What to do.
        advice: String,
    },
    /// Several operations of a clean-up failed; each is named.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<NetworkError>),
}
