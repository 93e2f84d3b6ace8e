//! One sandbox's network, from number to reclaim.
//!
//! [`plan`] turns a slot's number into every name and address; [`network`] is what is asked of the
//! kernel; [`pool`] and [`lease`] say which slot is in whose hands; [`journal`] remembers it;
//! [`channel`] is what is known of the service for vsock;
//! [`reclaim`] decides after a crash; [`service`] joins them. Of these only `journal` and `service`
//! do I/O, and only the implementation of [`network::Network`] talks to the kernel.

pub mod attach;
pub mod channel;
pub mod clock;
pub mod error;
pub mod journal;
pub mod kernel;
pub mod lease;
#[cfg(test)]
mod model;
pub mod network;
pub mod plan;
pub mod pool;
pub mod published;
pub mod reclaim;
pub mod service;
