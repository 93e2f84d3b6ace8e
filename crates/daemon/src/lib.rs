//! The daemon: configuration, HTTP API, metrics; the only place where the parts meet.

pub mod config;
