//! One service for the vsock channels of all sandboxes of a host.
//!
//! It has two faces: a vhost-user back end that is the device of guests whose VMM has none, and a router
//! beside VMMs that own their device and give the host a Unix socket. Behind both is one [`directory`]: who
//! may reach what, by policy, denied unless a rule allows it.

pub mod address;
pub mod bell;
pub mod budget;
mod callers;
pub mod capture;
pub mod connection;
pub mod control;
pub mod credit;
pub mod descriptors;
pub mod device;
pub mod dial;
pub mod directory;
pub mod disposal;
pub mod front_end;
pub mod hybrid;
pub mod lifeline;
pub mod limits;
pub mod listener;
pub mod memory;
pub mod memory_fault;
pub mod packet;
pub mod peer;
pub mod place;
pub mod policy;
pub mod privileges;
pub mod queue;
pub mod readiness;
pub mod seccomp;
pub mod service;
pub mod slab;
mod socket_file;
pub mod state;
pub mod statistics;
pub mod tcp;
pub mod timers;
pub mod worker;
