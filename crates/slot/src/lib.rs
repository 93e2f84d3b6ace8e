//! One sandbox's network, from number to reclaim.

pub mod clock;
pub mod error;
pub mod kernel;
pub mod network;
pub mod plan;
