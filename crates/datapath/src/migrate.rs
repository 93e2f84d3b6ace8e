//! From maps of another layout or size to those in use.
//!
//! Maps that can't be used are moved aside (`old-N`) before new ones are made. These are marked as unused until the
//! first program goes by them: whoever is killed or gives up before that leaves all as it was, since the next process
//! throws them away and begins anew. When nothing goes by the old ones any more, their counters, and what is in their
//! ledgers, move to the counters of the new maps, and renaming the folder (`done-N`) says that nothing in it is needed.
//! Whoever is killed before that leaves two kinds of old maps to the next process, which begins anew with both; whoever
//! is killed later leaves pins to be removed. A figure is always in one map alone: it is taken before it is added.
//! Fields are found by their names, since offsets may differ.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    net::Ipv6Addr,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    Datapath, Error,
    abi::{Address, Counters, Nic, NicState, Plain},
    btf::{Btf, Place},
    ledgers::Ledgers,
    map::Words,
    pins::{DONE, UNUSED, current, map_path, move_aside, old_folders, remove_done},
    sys,
};

/// By these a NIC is the same in old and new maps.
const IDENTITY: [&str; 5] = ["pool", "slot", "position", "clone4", "clone6.word"];

const WORD: usize = size_of::<u64>();

/// An array as it was made by an older program.
pub(crate) struct OldArray {
    descriptor: OwnedFd,
    pub(crate) entries: u32,
    value_size: usize,
    leaves: BTreeMap<String, Place>,
}

impl OldArray {
    pub(crate) fn open(path: &Path, struct_name: &str) -> io::Result<Self> {
        let descriptor = sys::open_pin(path)?.ok_or(io::ErrorKind::NotFound)?;
        let info = sys::map_info(descriptor.as_fd())?;
        let types = sys::btf(info.btf)?;
        let leaves = Btf::parse(&types).and_then(|types| types.leaves(struct_name));
        Ok(Self {
            descriptor,
            entries: info.max_entries,
            value_size: info.value_size as usize,
            leaves: leaves.ok_or(io::ErrorKind::InvalidData)?,
        })
    }

    pub(crate) fn read(&self, index: u32) -> io::Result<Vec<u8>> {
        sys::lookup_bytes(self.descriptor.as_fd(), index, self.value_size)
    }

    fn field<'a>(&self, value: &'a [u8], name: &str) -> Option<&'a [u8]> {
        let place = self.leaves.get(name)?;
        value.get(place.offset..place.offset.checked_add(place.size)?)
    }

    /// A field of four bytes.
    pub(crate) fn number(&self, value: &[u8], name: &str) -> io::Result<u32> {
        self.bytes(value, name).map(u32::from_ne_bytes)
    }

    /// A field of one byte.
    pub(crate) fn byte(&self, value: &[u8], name: &str) -> io::Result<u8> {
        self.bytes(value, name).map(u8::from_ne_bytes)
    }

    /// A field of sixteen bytes.
    pub(crate) fn address(&self, value: &[u8], name: &str) -> io::Result<Address> {
        self.bytes(value, name)
            .map(|octets: [u8; 16]| Ipv6Addr::from(octets).into())
    }

    fn bytes<const N: usize>(&self, value: &[u8], name: &str) -> io::Result<[u8; N]> {
        let field = self.field(value, name);
        let bytes = field.and_then(|field| field.try_into().ok());
        bytes.ok_or(io::ErrorKind::InvalidData.into())
    }

    /// The fields that say which NIC it is.
    fn identity(&self, value: &[u8]) -> io::Result<Vec<u8>> {
        let fields = IDENTITY.iter().map(|name| self.field(value, name));
        let fields: Option<Vec<&[u8]>> = fields.collect();
        Ok(fields.ok_or(io::ErrorKind::InvalidData)?.concat())
    }
}

/// Ledgers as they were made by an older program.
struct OldLedgers {
    ledgers: Ledgers,
    /// Which word of a line is which of the counters'.
    moves: Vec<(usize, usize)>,
    /// The word that says of which lease they are.
    lease: usize,
}

impl OldLedgers {
    /// `None`: of a version that had none.
    fn open(
        old: &Path,
        nics: &OldArray,
        counters: &BTreeMap<String, Place>,
    ) -> Result<Option<Self>, Error> {
        let failed = |source| Error::system("read", old.display().to_string(), source);
        let array = match OldArray::open(&old.join("ledgers"), "ledger") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(failed)?,
        };
        let lease = array.leaves.get("lease");
        let lease = lease.ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))?;
        Ok(Some(Self {
            ledgers: Ledgers::new(array.descriptor.as_fd(), nics.entries)?,
            moves: moves(&array.leaves, counters),
            lease: lease.offset / WORD,
        }))
    }

    /// Moves what was let through of a lease. What is there of an earlier one, since the last was begun by a daemon of
    /// before ledgers, stays.
    fn take(&self, nic: u32, lease: u32, to: &[AtomicU64], moved: &mut [u64]) {
        if self.ledgers.daemons(nic)[self.lease].load(Ordering::Relaxed) != u64::from(lease) {
            return;
        }
        for (old, new) in &self.moves {
            let taken = self.ledgers.take(nic, *old);
            to[*new].fetch_add(taken, Ordering::Relaxed);
            moved[*new] += taken;
        }
    }
}

impl Datapath {
    /// Says that packets go by these maps from now on. To be called before the first of the new programs takes the place
    /// of an old one.
    ///
    /// # Errors
    /// The mark of maps that are unused stays, and the next start takes these for such.
    pub fn take_into_use(&self) -> Result<(), Error> {
        let mark = current(&self.folder).join(UNUSED);
        match fs::remove_dir(&mark) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::system("remove", mark.display().to_string(), error))
            }
            _ => Ok(()),
        }
    }

    /// Moves the counters of old maps to the same NICs (pool, slot, position, clone addresses) of which `is_same`
    /// says that their sandbox is the same too, and removes the old maps. Tells of each NIC what was moved. To be
    /// called once no filter runs an old program.
    ///
    /// # Errors
    /// An old folder can't be removed, which the next start does.
    pub fn finish_migration(
        &self,
        is_same: impl Fn(&Nic) -> bool,
        mut tell: impl FnMut(&Nic, &Counters),
    ) -> Result<(), Error> {
        for old in old_folders(&self.folder)? {
            if let Err(error) = self.take_counters(&old, &is_same, &mut tell) {
                tracing::warn!(folder = %old.display(), %error, "old counters could not be read");
            }
            move_aside(&self.folder, &old, DONE)?;
        }
        self.forget_former();
        remove_done(&self.folder)
    }

    /// Moves what old counters say to those of the same NICs. What is at others stays.
    pub(crate) fn take_counters(
        &self,
        old: &Path,
        is_same: impl Fn(&Nic) -> bool,
        mut tell: impl FnMut(&Nic, &Counters),
    ) -> Result<(), Error> {
        let failed = |source| Error::system("read", old.display().to_string(), source);
        let nics = OldArray::open(&old.join("nics"), "nic").map_err(failed)?;
        let counters = OldArray::open(&old.join("counters"), "counters").map_err(failed)?;
        let words = Words::<AtomicU64>::new("counters", counters.descriptor.as_fd())?;
        let new = |name, struct_name| {
            OldArray::open(&map_path(&self.folder, name), struct_name).map_err(failed)
        };
        let (new_nics, new_counters) = (new("nics", "nic")?, new("counters", "counters")?);
        let moves = moves(&counters.leaves, &new_counters.leaves);
        let ledgers = OldLedgers::open(old, &nics, &new_counters.leaves)?;
        let mut known = HashMap::new();
        for (index, nic) in self.used().into_iter().filter(|(_, nic)| is_same(nic)) {
            let identity = new_nics.identity(nic.bytes()).map_err(failed)?;
            known.insert(identity, (index, nic));
        }
        for index in 1..nics.entries.min(counters.entries) {
            let nic = nics.read(index).map_err(failed)?;
            // Another's counters of before lie at one that isn't active.
            let active = NicState::Active.number().to_ne_bytes();
            if nics.field(&nic, "state") != Some(&active) {
                continue;
            }
            let same = known.get(&nics.identity(&nic).map_err(failed)?);
            let Some((same, new_nic)) = same else {
                continue;
            };
            let lease = nics.number(&nic, "lease").map_err(failed);
            let to = self.counters.words(same.0);
            let mut moved = vec![0; to.len()];
            take(&moves, words.of(index), to, &mut moved);
            if let (Some(ledgers), Ok(lease)) = (&ledgers, &lease) {
                ledgers.take(index, *lease, to, &mut moved);
            }
            let bytes: Vec<u8> = moved.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let moved = Counters::read(&bytes).expect("as many words as a value has");
            tell(new_nic, &moved);
            if ledgers.is_some() {
                lease?;
            }
        }
        Ok(())
    }
}

/// Moves words, each of which is only at one place at any time: if this is cut off, one may be at none. Adds them to
/// `moved`.
fn take(moves: &[(usize, usize)], from: &[AtomicU64], to: &[AtomicU64], moved: &mut [u64]) {
    for (old, place) in moves {
        if let (Some(old), Some(new)) = (from.get(*old), to.get(*place)) {
            let taken = old.swap(0, Ordering::Relaxed);
            new.fetch_add(taken, Ordering::Relaxed);
            moved[*place] += taken;
        }
    }
}

/// Which word of a value is which of another layout's: the fields that both have, and of arrays as much as both have.
fn moves(from: &BTreeMap<String, Place>, to: &BTreeMap<String, Place>) -> Vec<(usize, usize)> {
    let both = to
        .iter()
        .filter_map(|(name, new)| Some((from.get(name)?, new)));
    both.flat_map(|(old, new)| {
        let words = old.size.min(new.size) / WORD;
        (0..words).map(|word| (old.offset / WORD + word, new.offset / WORD + word))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_by_name_where_the_other_layout_has_them() {
        let place = |offset, size| Place { offset, size };
        let from = BTreeMap::from([
            ("egress.bytes".to_owned(), place(0, 8)),
            ("gone".to_owned(), place(8, 8)),
            ("drops".to_owned(), place(16, 16)),
        ]);
        let to = BTreeMap::from([
            ("drops".to_owned(), place(0, 24)),
            ("egress.bytes".to_owned(), place(24, 8)),
            ("new".to_owned(), place(32, 8)),
        ]);
        let old: [AtomicU64; 4] = [1, 2, 3, 4].map(AtomicU64::new);
        let new: [AtomicU64; 5] = [10, 10, 10, 10, 10].map(AtomicU64::new);
        let moves = moves(&from, &to);
        // What is taken once is not there to be taken again.
        let mut moved = [0; 5];
        for _ in 0..2 {
            take(&moves, &old, &new, &mut moved);
            let words = |all: &[AtomicU64]| -> Vec<u64> {
                all.iter()
                    .map(|word| word.load(Ordering::Relaxed))
                    .collect()
            };
            assert_eq!(words(&old), [0, 2, 0, 0]);
            assert_eq!(words(&new), [13, 14, 10, 11, 10]);
            assert_eq!(moved, [3, 4, 0, 1, 0]);
        }
    }
}
