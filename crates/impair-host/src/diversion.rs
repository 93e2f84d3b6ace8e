//! A diversion as the service makes it: two TAPs in the target's namespace, and the programs of
//! [`sandwire_datapath::divert`].
//!
//! The order keeps packets: TAPs, the engine that reads them, and only then the programs on the interface.

use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandwire_api::impairment::OnDeath;
use sandwire_datapath::divert::{self, Diversion};
use sandwire_kernel_net::{
    interface::{self, Change, Interface, InterfaceIndex},
    netlink::{Request, Socket},
    tap,
    tc::{self, Hook},
};

use crate::{
    control::{Side, Target},
    error::Error,
    fitness::{Demands, find_fit},
    namespace::Namespace,
};

/// Packets that a TAP holds until the engine reads them.
const TAP_PACKETS: u32 = 4096;
/// By which our TAPs are known.
pub(crate) const ALIAS: &str = "sandwire impair";
const HOOKS: [Hook; 2] = [Hook::Ingress, Hook::Egress];

/// A target's TAP for one hook.
#[derive(Debug)]
pub(crate) struct DivertedTap {
    pub(crate) descriptor: OwnedFd,
    pub(crate) name: String,
    pub(crate) index: InterfaceIndex,
}

/// A diversion that is loaded, with its TAPs, but not attached.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) diversion: Arc<Diversion>,
    pub(crate) interface: Interface,
    /// By ingress and egress of the interface.
    pub(crate) taps: [DivertedTap; 2],
}

/// How a diversion is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Making<'a> {
    pub(crate) target: &'a Target,
    pub(crate) demands: Demands,
    /// Whether programs are attached by links.
    pub(crate) uses_links: bool,
    /// Where the folders of diversions are.
    pub(crate) folder: &'a Path,
}

impl Making<'_> {
    /// Makes everything but the attachment. What fails leaves nothing.
    pub(crate) fn prepare(&self, namespace: &Namespace) -> Result<Prepared, Error> {
        let inode = namespace.inode;
        namespace.inside(|| {
            let interface = find_fit(self.target, self.demands)?;
            let taps = HOOKS.map(|hook| self.make_tap(&interface, hook));
            let [ingress, egress] = taps;
            let taps = [ingress?, egress?];
            let folder = folder_of(self.folder, inode, interface.index);
            let was_there = folder.exists();
            let diversion =
                Diversion::open(&folder, interface.index, self.uses_links).and_then(|diversion| {
                    for (hook, tap) in HOOKS.into_iter().zip(&taps) {
                        diversion.prepare_tap(hook, tap.index)?;
                    }
                    Ok(diversion)
                });
            let raised = diversion
                .map_err(Error::from)
                .and_then(|diversion| raise(&taps, interface.mtu).map(|()| diversion));
            let diversion = raised.inspect_err(|_| {
                if !was_there {
                    // The first error counts; an empty folder does no harm.
                    let _ = divert::remove(&folder);
                }
            })?;
            Ok(Prepared {
                diversion: Arc::new(diversion),
                interface,
                taps,
            })
        })
    }

    fn make_tap(&self, interface: &Interface, hook: Hook) -> Result<DivertedTap, Error> {
        let name = tap_name(interface.index, hook);
        let options = tap::Options {
            vnet_header: false,
            multi_queue: false,
            owner: None,
            group: None,
        };
        let opened = tap::create_transient(&name, None, options).map_err(|error| {
            if error.is_existing() {
                return Error::Diverted {
                    target: self.target.clone(),
                    tap: name.clone(),
                };
            }
            error.into()
        })?;
        let mut socket = Socket::route()?;
        let found = interface::find(&mut socket, &name)?
            .ok_or_else(|| sandwire_kernel_net::Error::missing_interface(&name))?;
        Ok(DivertedTap {
            descriptor: opened.into(),
            name,
            index: found.index,
        })
    }
}

/// MTU, room and raised, in one request; no queue but the TAP's own, which takes whatever it is given.
fn raise(taps: &[DivertedTap; 2], mtu: u32) -> Result<(), Error> {
    let mut request = Request::new();
    for tap in taps {
        tc::add_noqueue(&mut request, tap.index);
        let change = Change {
            name: &tap.name,
            index: Some(tap.index),
            alias: Some(ALIAS),
            mtu: Some(mtu),
            queue_length: Some(TAP_PACKETS),
            no_generated_addresses: true,
            no_arp: Some(true),
            up: Some(true),
            ..Change::default()
        };
        change.apply(&mut request);
    }
    Ok(Socket::route()?.execute(request)?)
}

/// The name of a TAP, of at most 15 bytes. Interfaces of one namespace have different numbers, so it is free unless
/// somebody diverts the same interface.
fn tap_name(interface: InterfaceIndex, hook: Hook) -> String {
    let letter = match hook {
        Hook::Ingress => 'i',
        Hook::Egress => 'e',
    };
    format!("swd{}{letter}", interface.0)
}

/// Where a diversion's pins are.
pub(crate) fn folder_of(folder: &Path, inode: u64, interface: InterfaceIndex) -> PathBuf {
    folder.join(format!("{inode}-{}", interface.0))
}

/// Where the packets of a hook go: through this TAP.
pub(crate) fn through(tap: InterfaceIndex, on_death: OnDeath) -> divert::Way {
    divert::Way::Tap {
        tap,
        passes_when_gone: on_death == OnDeath::Open,
    }
}

/// By which hook of the interface packets leave the sandbox, and come to it.
pub(crate) fn hooks_of(side: Side) -> (Hook, Hook) {
    match side {
        Side::Sandbox => (Hook::Egress, Hook::Ingress),
        Side::Host => (Hook::Ingress, Hook::Egress),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_fits_whatever_the_number() {
        let name = tap_name(InterfaceIndex(u32::MAX), Hook::Egress);
        assert!(name.len() <= 15, "{name}");
        assert_ne!(name, tap_name(InterfaceIndex(u32::MAX), Hook::Ingress));
    }
}
