//! Makes sure that whoever sends on an interface sends complete packets of wire size.
//!
//! A kernel's stack leaves checksums, segmentation and VLAN tags to the interface that it sends on. On a veth nobody
//! does that work: the receiving stack is told, beside the packet, what isn't done yet. AF_XDP sees the bytes alone.
//! So the other end of a veth is told, as by `ethtool -K`, that it can do nothing of the kind, and the stack does it
//! itself; segmentation in software (`tx-generic-segmentation`) may stay on, since it ends before the interface.
//! When the interface is no longer used, what was turned off is turned on again.

use std::fs::File;

use sandwire_kernel_net::Error;
use sandwire_kernel_net::interface::InterfaceIndex;
use sandwire_kernel_net::netlink::Socket;

use super::features::Features;
use super::interface::{self, Interface, Peer, Sender};
use super::namespace::{self, Entered};

/// Why nobody can be sure of a sender.
#[derive(Debug)]
pub(super) enum Doubt {
    /// In words.
    Reason(String),
    /// The kernel refused something.
    Kernel(Error),
}

impl From<Error> for Doubt {
    fn from(error: Error) -> Self {
        Self::Kernel(error)
    }
}

/// The namespace of our own end, wherever the thread is by now.
#[derive(Debug)]
pub(super) struct Here {
    pub(super) route: Socket,
    file: File,
}

impl Here {
    /// That of the calling thread.
    pub(super) fn new() -> Result<Self, Error> {
        Ok(Self {
            route: Socket::route()?,
            file: namespace::own()?,
        })
    }

    /// Where the features of a veth's other end are asked for and changed.
    fn features_of(&mut self, peer: Peer) -> Result<Features, Doubt> {
        let found;
        let file = match peer.namespace {
            None => &self.file,
            Some(id) => {
                let Some(file) = namespace::find(&mut self.route, id)? else {
                    return Err(Doubt::Reason(
                        "its other end is in a network namespace that no process and no mount leads to from here"
                            .to_owned(),
                    ));
                };
                found = file;
                &found
            }
        };
        match namespace::inside(file, || Features::of(peer.index)) {
            Entered::Done(features) => Ok(features?),
            Entered::Refused(cause) => Err(Doubt::Reason(format!(
                "its other end is in a network namespace that may not be entered ({cause})"
            ))),
        }
    }
}

/// Offloads of a veth's other end that are off until this is dropped.
#[derive(Debug)]
pub(super) struct Silenced {
    here: Here,
    index: InterfaceIndex,
    names: Vec<String>,
}

impl Silenced {
    /// What was turned off.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// The peer may have moved to another namespace, or be gone together with its interface.
    fn restore(&mut self) -> Result<(), Doubt> {
        let interface = interface::find_by_index(&mut self.here.route, self.index)?;
        if let Sender::Peer(peer) = interface.sender {
            self.here.features_of(peer)?.set(&self.names, true)?;
        }
        Ok(())
    }
}

impl Drop for Silenced {
    fn drop(&mut self) {
        // A peer that is gone has nothing to restore, and of one that can't be reached any more nobody is left to
        // tell: it stays correct, and slower.
        let _ = self.restore();
    }
}

/// Makes sure of whoever sends on the interface, for a program in the driver or (`is_generic`) after it. What was
/// turned off for that is on again when the answer is dropped.
pub(super) fn silence(
    mut here: Here,
    interface: &Interface,
    is_generic: bool,
) -> Result<Option<Silenced>, Doubt> {
    let peer = match &interface.sender {
        Sender::Peer(peer) => *peer,
        Sender::Wire => return Ok(None),
        // Such a driver tells its host to send complete packets while it has a program.
        Sender::Hypervisor if !is_generic => return Ok(None),
        Sender::Process { has_vnet_header } if !has_vnet_header => return Ok(None),
        other => return Err(Doubt::Reason(reason(other))),
    };
    let mut features = here.features_of(peer)?;
    let names = offloads(features.active()?);
    if !names.is_empty() {
        features.set(&names, false)?;
    }
    // From here on, whatever fails is undone by dropping this.
    let silenced = Silenced {
        here,
        index: interface.index,
        names,
    };
    let left = offloads(features.active()?);
    if left.is_empty() {
        return Ok(Some(silenced));
    }
    let left = left.join(", ");
    Err(Doubt::Reason(format!(
        "its other end has offloads that can't be turned off ({left})"
    )))
}

/// Doubts the user's word where the kernel says otherwise: after the driver (`is_generic`) a super-packet is not even
/// cut, so a veth's other end that is known to send such is not trusted.
pub(super) fn trust(mut here: Here, interface: &Interface, is_generic: bool) -> Result<(), Doubt> {
    let Sender::Peer(peer) = interface.sender else {
        return Ok(());
    };
    if !is_generic {
        return Ok(());
    }
    let active = match here.features_of(peer) {
        Ok(mut features) => offloads(features.active()?),
        // Where nobody can look, the user's word is all there is.
        Err(Doubt::Reason(_)) => return Ok(()),
        Err(refused) => return Err(refused),
    };
    if active.iter().any(|name| name.ends_with("-segmentation")) {
        return Err(Doubt::Reason(
            "outside the driver (generic XDP), its other end may not send super-packets, and its features say that it \
             does; turn them off there (ethtool -K), or have the app do so"
                .to_owned(),
        ));
    }
    Ok(())
}

fn reason(sender: &Sender) -> String {
    match sender {
        Sender::Process { .. } => {
            "it is a TAP with virtio-net headers, by which a process may send super-packets and partial checksums"
                .to_owned()
        }
        Sender::Hypervisor => {
            "outside the driver (generic XDP), the host of this virtual machine may send super-packets and partial \
             checksums"
                .to_owned()
        }
        Sender::Kernel { kind } => {
            format!("on an interface of kind {kind} it isn't known who sends, and with which offloads")
        }
        Sender::Wire | Sender::Peer(_) => "its sender isn't known".to_owned(),
    }
}

/// Those features by which a stack leaves work on a packet to the interface.
fn offloads(active: Vec<String>) -> Vec<String> {
    let mut names = active;
    names.retain(|name| is_offload(name));
    names
}

fn is_offload(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("tx-") else {
        return false;
    };
    if rest == "generic-segmentation" {
        return false;
    }
    let is_segmentation = rest.ends_with("-segmentation") || rest.starts_with("gso-");
    let is_tag = rest.starts_with("vlan-") && rest.ends_with("-hw-insert");
    rest.starts_with("checksum-") || is_segmentation || is_tag
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_stack_leaves_to_an_interface_is_known_by_name() {
        let offloads = [
            "tx-checksum-ip-generic",
            "tx-checksum-ipv4",
            "tx-checksum-sctp",
            "tx-tcp-segmentation",
            "tx-tcp6-segmentation",
            "tx-udp-segmentation",
            "tx-gso-list",
            "tx-gso-partial",
            "tx-vlan-hw-insert",
            "tx-vlan-stag-hw-insert",
        ];
        let others = [
            "tx-generic-segmentation",
            "tx-scatter-gather",
            "tx-lockless",
            "tx-nocache-copy",
            "rx-gro",
            "rx-checksum",
            "highdma",
        ];
        for name in offloads {
            assert!(is_offload(name), "{name}");
        }
        for name in others {
            assert!(!is_offload(name), "{name}");
        }
    }
}
