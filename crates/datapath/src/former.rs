//! What new maps take over of those before them, so that what was remembered of calls still holds: the table of answers
//! itself.
//!
//! An entry there names the NIC by its index, and the lease by the number that the NIC had then. So leased NICs keep
//! both. Then old and new programs go by one table while the ones take the places of the others, one after the other:
//! whichever sees a call, either lets its answer through, and who is killed meanwhile leaves it so.
//!
//! What others have said of leased NICs by flags is told, for who writes them anew.

use std::{
    collections::BTreeMap,
    fs, io,
    mem::offset_of,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicU32, Ordering},
};

use crate::{
    Datapath, Error,
    abi::{Nic, NicState},
    map::Array,
    migrate::OldArray,
    nic::NicIndex,
    pins::{has_form, map_path, old_folders, old_folders_alike},
    sys,
};

const ANSWERS: [&str; 2] = ["answers", "answers_crowd"];

/// Which slot: the number of its pool, and its own.
pub(crate) type SlotKey = (u32, u32);

/// Leased NICs of old maps.
#[derive(Debug, Default)]
pub(crate) struct Former {
    /// First NIC of each slot, and how many it has.
    pub(crate) slots: BTreeMap<SlotKey, (NicIndex, u8)>,
    /// By index: no lease there had a higher number.
    leases: Vec<u32>,
}

impl Former {
    /// Has new maps, which are still to be made, share the answers of `last`, by which packets go, of the same version. `None`
    /// where these are to be of another size, there are to be fewer NICs, or it can't be done: then nothing is remembered.
    pub(crate) fn take_over(folder: &Path, last: &Path, sizes: &[(&str, u32)]) -> Option<Self> {
        let take_over = || {
            let former = Self::read(folder, last)?;
            let nics = sizes.iter().find(|(name, _)| *name == "nics");
            // Of entries that are given up nobody would count leases on, should there be as many again.
            if nics.is_some_and(|(_, entries)| (*entries as usize) < former.leases.len()) {
                return Ok(None);
            }
            Ok(share(folder, last, sizes)?.then_some(former))
        };
        take_over().unwrap_or_else(|error: io::Error| {
            tracing::warn!(maps = %last.display(), %error, "what was remembered of calls is lost");
            for name in ANSWERS {
                // Best effort. Without the numbers of leases, who leases next might answer for who leased last.
                let _ = fs::remove_file(map_path(folder, name));
            }
            None
        })
    }

    /// A migration that was cut off leaves several kinds of old maps, of which the last ones may know less.
    fn read(folder: &Path, last: &Path) -> io::Result<Self> {
        let mut former = Self::default();
        former.add(last)?;
        let all = old_folders(folder).map_err(io::Error::other)?;
        for other in all.iter().filter(|other| *other != last) {
            former.add(other)?;
        }
        Ok(former)
    }

    fn add(&mut self, maps: &Path) -> io::Result<()> {
        let nics = OldArray::open(&maps.join("nics"), "nic")?;
        let entries = nics.entries as usize;
        self.leases.resize(self.leases.len().max(entries), 0);
        for index in 1..nics.entries {
            let nic = nics.read(index)?;
            let number = |name| nics.number(&nic, name);
            let byte = |name| nics.byte(&nic, name);
            let lease = &mut self.leases[index as usize];
            *lease = number("lease")?.max(*lease);
            if number("state")? == NicState::Active.number() && byte("position")? == 0 {
                let slot = (number("pool")?, number("slot")?);
                let place = (NicIndex(index), byte("count")?);
                self.slots.entry(slot).or_insert(place);
            }
        }
        Ok(())
    }

    /// Has new NICs count leases on.
    pub(crate) fn carry_leases(&self, nics: &Array<Nic, AtomicU32>) {
        for (index, lease) in (0..nics.entries()).zip(&self.leases) {
            let field = nics.field(index, offset_of!(Nic, lease));
            field.store(*lease, Ordering::Relaxed);
        }
    }
}

impl Datapath {
    /// Leased NICs of maps of before, of this version: pool, slot, position, clone addresses and flags.
    ///
    /// # Errors
    /// These maps can't be read.
    pub fn former_nics(&self) -> Result<Vec<Nic>, Error> {
        let mut found = BTreeMap::new();
        // The last ones first: of what they know, others know what was before.
        for maps in old_folders_alike(&self.folder)?.iter().rev() {
            add_leased(&mut found, maps)
                .map_err(|source| Error::system("read", maps.display().to_string(), source))?;
        }
        Ok(found.into_values().collect())
    }
}

fn add_leased(found: &mut BTreeMap<(u32, u32, u8), Nic>, maps: &Path) -> io::Result<()> {
    let nics = OldArray::open(&maps.join("nics"), "nic")?;
    for index in 1..nics.entries {
        let old = nics.read(index)?;
        let number = |name| nics.number(&old, name);
        if number("state")? != NicState::Active.number() {
            continue;
        }
        let nic = Nic {
            state: NicState::Active.number(),
            flags: number("flags")?,
            pool: number("pool")?,
            slot: number("slot")?,
            position: nics.byte(&old, "position")?,
            clone4: number("clone4")?,
            has_ipv6: nics.byte(&old, "has_ipv6")?,
            clone6: nics.address(&old, "clone6.word")?,
            ..Nic::default()
        };
        found
            .entry((nic.pool, nic.slot, nic.position))
            .or_insert(nic);
    }
    Ok(())
}

/// Gives the tables of answers names among the new maps. Returns whether they are what is wanted there.
fn share(folder: &Path, last: &Path, sizes: &[(&str, u32)]) -> io::Result<bool> {
    let mut found: Vec<(&str, OwnedFd)> = Vec::new();
    for name in ANSWERS {
        match sys::open_pin(&last.join(name))? {
            Some(map) if has_form(name, map.as_fd(), sizes)? => found.push((name, map)),
            _ => return Ok(false),
        }
    }
    for (name, map) in &found {
        sys::pin(map.as_fd(), &map_path(folder, name))?;
    }
    Ok(true)
}
