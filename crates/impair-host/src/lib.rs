//! Bad networks for interfaces of a host.
//!
//! [`service`] is a process of its own that outlives the daemon: it diverts the packets of interfaces, in whatever
//! network namespace, through engines of its threads, and is spoken to over a socket ([`control`]).

#![forbid(unsafe_code)]

pub mod control;
mod diversion;
mod error;
mod fitness;
pub mod forward;
mod host;
pub mod lab;
pub mod launch;
mod namespace;
pub mod privileges;
pub mod record;
pub mod service;
mod state;
pub mod ways;
mod worker;

use std::path::Path;

use sandwire_kernel_net::{
    interface::{self, InterfaceIndex},
    netlink::Socket,
};

pub use error::Error;
use namespace::Namespace;

/// Names of the interfaces in the network namespace of that file, without the loopback and our own.
///
/// # Errors
/// There is no such namespace, or it can't be entered.
pub fn interfaces_of(netns: &Path) -> Result<Vec<String>, Error> {
    Namespace::open(Some(netns))?.inside(|| {
        let found = interface::list(&mut Socket::route()?)?.into_iter();
        let others = found.filter(|found| {
            found.index != InterfaceIndex::LOOPBACK
                && found.alias.as_deref() != Some(diversion::ALIAS)
        });
        Ok(others.map(|found| found.name).collect())
    })
}
