//! Bad networks for interfaces of a host.

#![forbid(unsafe_code)]

pub mod lab;
pub mod ways;
