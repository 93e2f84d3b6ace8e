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

use std::{
    fs,
    path::{Path, PathBuf},
};

use sandwire_kernel_net::{
    interface::{self, InterfaceIndex},
    netlink::Socket,
    netns,
};

pub use error::Error;
use namespace::{FIRST, Namespace};

/// How a target in the caller's own network namespace is named to a service, of whose namespace that is the inode: by a file
/// that stays when the caller has ended, or by none in the service's own.
///
/// # Errors
/// It isn't the service's, and has no such file.
pub fn own_namespace(of_service: Option<u64>) -> Result<Option<PathBuf>, Error> {
    let own = Namespace::open(None)?.inode;
    let is_own = |file: &PathBuf| {
        let found = Namespace::open(Some(file));
        found.is_ok_and(|namespace| namespace.inode == own)
    };
    // By its name also another service finds it, that runs elsewhere.
    let listed = fs::read_dir(netns::FOLDER).into_iter().flatten().flatten();
    let named = listed.map(|entry| entry.path()).find(is_own);
    if named.is_some() || of_service.is_none_or(|of_service| of_service == own) {
        return Ok(named);
    }
    let first = PathBuf::from(FIRST);
    if is_own(&first) {
        return Ok(Some(first));
    }
    Err(Error::Nameless)
}

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
