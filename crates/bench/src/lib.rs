//! Benchmarks and their reports.
//!
//! A suite measures in namespaces of its own that play a host, and yields a [`record::Record`]: one
//! JSON document with the host's facts, the settings, every sample, and the ratios that the project
//! promises. A report is made from such documents alone. The daemon under test is the same
//! executable, started as a process and spoken to over its API, as a user would; what it is compared
//! with are the commands that people run without it.

pub mod command;
pub mod host;
pub mod record;
pub mod statistics;

mod daemon_process;

mod clones;
mod cni;
mod cpu;
mod engine;
mod extent;
mod forward;
mod guest;
mod impair;
mod packet;
mod private_host;
mod progress;
mod recipe;
mod relay;
mod report;
mod rig;
mod rr;
mod slots;
mod stream;
mod tcp;
mod vsock;
mod way;
mod world;
