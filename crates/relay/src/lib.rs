//! Redirection over TLS: chosen traffic of chosen sandboxes leaves the host only inside TLS 1.3 with mutual
//! authentication, to a relay elsewhere that delivers it.
//!
//! One program in two roles. On the host, the kernel is told to give chosen packets to two sockets of ours
//! ([`steering`]); [`egress`] takes connections and datagrams from them and carries them to a peer
//! ([`transport`]). There [`deliver`] checks where they may go and passes them on by ordinary sockets. Applications
//! see the address that they called: answers are sent from it.
//!
//! What is steered is dropped where no relay takes it: rules of the kernel stay when this program ends.

pub mod children;
pub mod config;
mod connection;
pub mod credentials;
mod deliver;
mod egress;
mod fair;
pub mod keys;
mod liveness;
pub mod metrics;
mod openings;
pub mod packets;
mod privileges;
mod pump;
mod report;
mod room;
mod seldom;
mod senders;
pub mod service;
pub mod steering;
mod transport;
mod unread;
pub mod wire;
