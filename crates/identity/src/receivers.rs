//! UDP sockets that receive at addresses which they aren't bound to.
//!
//! A server on the wildcard is bound to its identity's first address. What comes to the others is given to it by the program on
//! `sk_lookup`, out of a map of sockets. The kernel lets no program put a socket there that is told of a bind; only one that looks
//! through sockets may. It is run by whoever is told of new sockets, which is a daemon.

use std::{
    os::fd::{AsFd, BorrowedFd},
    path::Path,
};

use aya::maps::{Map, MapData, RingBuf};

use crate::{
    Error, Identities,
    abi::Record,
    looker::Looker,
    maps::{BOUND, failed, open_map},
    record::Facts,
};

/// Looks through all UDP sockets, and puts those among the receivers that aren't yet.
pub(crate) const LOOKER: Looker = Looker {
    name: "on_udp",
    object: aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/receivers.o")),
    list: "udp",
    maps: &["receivers", "receiving", "tallies"],
};

/// Tells of UDP sockets that are to receive at several addresses: readable once there are some. One process may have it.
pub struct Bound(RingBuf<MapData>);

impl Bound {
    /// `None` if there never was an identity.
    pub(crate) fn open(folder: &Path) -> Result<Option<Self>, Error> {
        if !folder.join(BOUND).exists() {
            return Ok(None);
        }
        let ring = Map::RingBuf(open_map(folder, BOUND)?);
        let ring = RingBuf::try_from(ring).map_err(failed("open", BOUND))?;
        Ok(Some(Self(ring)))
    }

    /// Takes what was told; returns whether there was anything.
    pub fn take(&mut self) -> bool {
        let mut is_told = false;
        while self.0.next().is_some() {
            is_told = true;
        }
        is_told
    }
}

impl AsFd for Bound {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether any of these identities may have such sockets.
pub(crate) fn may_be(records: &[(u64, Record)]) -> bool {
    let mut known = records.iter().filter_map(|(_, record)| Facts::read(record));
    known.any(|facts| facts.has_receivers())
}

impl Identities {
    /// What tells of UDP sockets that are to receive at several addresses; `None` if there never was an identity.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn bound(&self) -> Result<Option<Bound>, Error> {
        Bound::open(&self.maps_folder())
    }

    /// Makes ready what has UDP sockets receive at all addresses of their identities, which takes a quarter of a second once.
    /// Returns whether any of them may have such sockets. Waits for no other command.
    ///
    /// # Errors
    /// The kernel doesn't tell its types (`CONFIG_DEBUG_INFO_BTF`), or refuses.
    pub fn prepare_receivers(&self) -> Result<bool, Error> {
        let folder = self.maps_folder();
        if LOOKER.is_pinned(&folder) {
            return Ok(true);
        }
        let Some(open) = self.open()? else {
            return Ok(false);
        };
        let are_some = may_be(&open.maps.records()?);
        if are_some {
            LOOKER.prepare(&folder)?;
        }
        Ok(are_some)
    }

    /// Has UDP sockets receive at all addresses of their identities: those of the calling thread's network namespace that were
    /// bound since the last time. Waits for no other command.
    ///
    /// # Errors
    /// As of [`Identities::prepare_receivers`].
    pub fn enter_receivers(&self) -> Result<(), Error> {
        if self.prepare_receivers()? {
            LOOKER.run_if_pinned(&self.maps_folder())?;
        }
        Ok(())
    }
}
