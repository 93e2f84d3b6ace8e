//! Bad networks for interfaces of a host.
//!
//! The service is a process of its own that outlives the daemon: it diverts the packets of interfaces, in whatever
//! network namespace, through engines of its threads, and is spoken to over a socket ([`control`]).

#![forbid(unsafe_code)]

pub mod control;
pub mod forward;
pub mod lab;
pub mod ways;
