//! Attachments on uplinks and on the shared interface.

use sandwire_kernel_net::interface::InterfaceIndex;

use crate::{Datapath, Error};

/// An interface that packets may leave by without the host's own stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uplink {
    /// Its number.
    pub index: InterfaceIndex,
    /// Its name, for errors and pins.
    pub name: String,
    /// Whether its queue honours departure times (`fq`).
    pub fq: bool,
    /// Whether XDP is used on it.
    pub xdp: bool,
}

/// Something of ours that was not as it should be, and has been repaired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Defect {
    /// Name of the interface.
    pub interface: String,
    /// What was wrong.
    pub text: String,
    /// Why it could not be repaired, if so.
    pub failure: Option<String>,
}

impl Datapath {
    /// Puts `from_host` on the egress of the shared interface; replaces an older program in place.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn attach_shared(&self, index: InterfaceIndex) -> Result<(), Error> {
        todo!("{index}")
    }

    /// Makes exactly these interfaces the uplinks. One that is gone is forgotten.
    ///
    /// # Errors
    /// The kernel refuses one; the others are done.
    pub fn set_uplinks(&self, uplinks: &[Uplink]) -> Result<(), Error> {
        todo!("{uplinks:?}")
    }

    /// Looks whether the programs are still on the shared interface and the uplinks, and puts them back.
    #[must_use]
    pub fn inspect(&self) -> Vec<Defect> {
        todo!()
    }
}
