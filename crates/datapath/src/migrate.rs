//! Counters of maps that were replaced: read by the names of fields, since offsets may differ.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use crate::{
    Datapath, Error,
    abi::{Counters, Plain},
    btf::{Btf, Place},
    open::map_path,
    sys,
};

/// By these a NIC is the same in old and new maps.
const IDENTITY: [&str; 5] = ["pool", "slot", "position", "clone4", "clone6.word"];

/// An array as it was made by an older program.
struct OldArray {
    descriptor: OwnedFd,
    entries: u32,
    value_size: usize,
    leaves: BTreeMap<String, Place>,
}

impl OldArray {
    fn open(path: &Path, struct_name: &str) -> io::Result<Self> {
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

    fn read(&self, index: u32) -> io::Result<Vec<u8>> {
        sys::lookup_bytes(self.descriptor.as_fd(), index, self.value_size)
    }

    /// The fields that say which NIC it is.
    fn identity(&self, value: &[u8]) -> io::Result<Vec<u8>> {
        let field = |name: &&str| bytes_at(value, *self.leaves.get(*name)?);
        let fields: Option<Vec<&[u8]>> = IDENTITY.iter().map(field).collect();
        Ok(fields.ok_or(io::ErrorKind::InvalidData)?.concat())
    }
}

impl Datapath {
    /// Adds what old counters say to those of the same NICs.
    pub(crate) fn carry_counters(&self, old: &Path) -> Result<(), Error> {
        let failed = |source| Error::system("read", old.display().to_string(), source);
        let nics = OldArray::open(&old.join("nics"), "nic").map_err(failed)?;
        let counters = OldArray::open(&old.join("counters"), "counters").map_err(failed)?;
        let new = |name, struct_name| {
            OldArray::open(&map_path(&self.folder, name), struct_name).map_err(failed)
        };
        let (new_nics, new_counters) = (new("nics", "nic")?, new("counters", "counters")?);
        let mut known = HashMap::new();
        for (index, nic) in self.used() {
            known.insert(new_nics.identity(nic.bytes()).map_err(failed)?, index);
        }
        for index in 1..nics.entries.min(counters.entries) {
            let nic = nics.read(index).map_err(failed)?;
            let Some(same) = known.get(&nics.identity(&nic).map_err(failed)?) else {
                continue;
            };
            let value = counters.read(index).map_err(failed)?;
            let value = translated(&value, &counters.leaves, &new_counters.leaves);
            let value = Counters::read(&value).ok_or(io::ErrorKind::InvalidData.into());
            self.counters.add(same.0, &value.map_err(failed)?);
        }
        Ok(())
    }
}

fn bytes_at(value: &[u8], place: Place) -> Option<&[u8]> {
    value.get(place.offset..place.offset.checked_add(place.size)?)
}

/// The fields that both layouts have, where the second has them. Of arrays, as much as both have.
fn translated(
    value: &[u8],
    from: &BTreeMap<String, Place>,
    to: &BTreeMap<String, Place>,
) -> Vec<u8> {
    let mut translated = vec![0; size_of::<Counters>()];
    for (name, new) in to {
        let Some(bytes) = from.get(name).and_then(|old| bytes_at(value, *old)) else {
            continue;
        };
        let size = bytes.len().min(new.size);
        if let Some(place) = translated.get_mut(new.offset..new.offset + size) {
            place.copy_from_slice(&bytes[..size]);
        }
    }
    translated
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_name_where_the_other_layout_has_them() {
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
        let old: Vec<u8> = (1..=32).collect();
        let new = translated(&old, &from, &to);
        assert_eq!(new[..16], old[16..32]);
        assert_eq!(new[16..24], [0; 8]);
        assert_eq!(new[24..32], old[..8]);
        assert!(new[32..].iter().all(|byte| *byte == 0));
    }
}
