//! One sandbox's network, from number to reclaim.

pub mod error;
pub mod network;
pub mod plan;
