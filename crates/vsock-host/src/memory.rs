//! A guest's memory, as its VMM hands it over: shared mappings of file descriptors.
//!
//! It belongs to the guest, which may change any byte at any time; so no Rust reference to it is ever made,
//! only raw pointers that go to the kernel (`readv`, `sendmsg`) or that are copied from once. Every range
//! that a guest names is looked up here, and what isn't wholly inside is refused.

use std::{fs::File, io, os::fd::AsRawFd, ptr};

use crate::{disposal::Disposal, memory_fault::Watched};

use rustix::fs::fstatfs;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, mmap::MmapRegionBuilder};

/// Most memory of one guest: what its VMM says is mapped, and address space isn't endless.
const LARGEST_GUEST: u64 = 8 << 40;

/// Most regions; QEMU uses up to 509, one per DIMM.
pub const MOST_REGIONS: usize = 512;

/// Regions that each guest gets while those with more have used up what they share: a VMM without pluggable
/// memory has up to five.
const FEW_REGIONS: usize = 8;

/// Where a region is for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placing {
    /// Address in the guest.
    pub guest: u64,
    /// Address in the VMM, by which it names the rings.
    pub user: u64,
    /// Bytes.
    pub size: u64,
    /// Where in the file it begins.
    pub offset: u64,
}

/// Why a region can't be used.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// Beyond the limits above, empty, or wrapping round.
    #[error("map guest memory at {guest:#x}: {size} bytes there are impossible or too many")]
    Impossible {
        /// Guest address.
        guest: u64,
        /// Bytes.
        size: u64,
    },
    /// The file is shorter than the region; touching it would kill us.
    #[error("map guest memory at {guest:#x}: the file ends before the region does")]
    FileTooShort {
        /// Guest address.
        guest: u64,
    },
    /// It is in huge pages, and takes only part of the last one: no mapping can end there.
    #[error(
        "map guest memory at {guest:#x}: {size} bytes are not a whole number of the file's pages of {page} bytes; \
         share whole pages"
    )]
    PartOfPage {
        /// Guest address.
        guest: u64,
        /// Bytes.
        size: u64,
        /// Bytes of a huge page.
        page: u64,
    },
    /// Two regions share addresses.
    #[error("map guest memory at {guest:#x}: it overlaps another region")]
    Overlap {
        /// Guest address.
        guest: u64,
    },
    /// There is no such region.
    #[error("remove guest memory at {guest:#x}: there is no such region")]
    Unknown {
        /// Guest address.
        guest: u64,
    },
    /// The kernel refused.
    #[error("map guest memory at {guest:#x}: {source}")]
    Map {
        /// Guest address.
        guest: u64,
        /// What it said.
        source: io::Error,
    },
}

/// All of a guest's memory.
#[derive(Debug, Default)]
pub struct Memory {
    // Before the mappings that it points into.
    map: GuestMemoryMmap,
    regions: Vec<Region>,
    disposal: Disposal,
}

#[derive(Debug)]
struct Region {
    placing: Placing,
    mapping: Mapping,
}

#[derive(Debug)]
struct Mapping {
    pointer: *mut u8,
    size: usize,
    watched: Option<Watched>,
    disposal: Disposal,
}

impl Memory {
    /// None yet; what is no longer needed is unmapped there.
    #[must_use]
    pub fn new(disposal: Disposal) -> Self {
        Self {
            disposal,
            ..Self::default()
        }
    }

    /// Has no regions any more.
    pub fn clear(&mut self) {
        *self = Self::new(self.disposal.clone());
    }

    /// Replaces all regions. If it fails, the former ones stay.
    ///
    /// # Errors
    /// See [`MemoryError`].
    pub fn replace(&mut self, regions: Vec<(Placing, File)>) -> Result<(), MemoryError> {
        let mut new = Self::new(self.disposal.clone());
        for (placing, file) in regions {
            new.add(placing, &file)?;
        }
        *self = new;
        Ok(())
    }

    /// Adds a region.
    ///
    /// # Errors
    /// See [`MemoryError`]. Nothing has changed then.
    pub fn add(&mut self, placing: Placing, file: &File) -> Result<(), MemoryError> {
        let Placing {
            guest, user, size, ..
        } = placing;
        let sum: u64 = self.regions.iter().map(|region| region.placing.size).sum();
        let possible = size != 0
            && guest.checked_add(size).is_some()
            && user.checked_add(size).is_some()
            && sum
                .checked_add(size)
                .is_some_and(|sum| sum <= LARGEST_GUEST)
            && self.regions.len() < MOST_REGIONS;
        if !possible {
            return Err(MemoryError::Impossible { guest, size });
        }
        let overlaps = |other: &Region| {
            let other = other.placing;
            guest < other.guest + other.size && other.guest < guest + size
        };
        if self.regions.iter().any(overlaps) {
            return Err(MemoryError::Overlap { guest });
        }
        let few = self.regions.len() < FEW_REGIONS;
        let mapping = Mapping::new(placing, file, few, &self.disposal)?;
        self.regions.push(Region { placing, mapping });
        self.regions.sort_by_key(|region| region.placing.guest);
        self.rebuild();
        Ok(())
    }

    /// Removes the region that is exactly there.
    ///
    /// # Errors
    /// [`MemoryError::Unknown`].
    pub fn remove(&mut self, guest: u64, size: u64) -> Result<(), MemoryError> {
        let found = self
            .regions
            .iter()
            .position(|region| region.placing.guest == guest && region.placing.size == size);
        let removed = self
            .regions
            .remove(found.ok_or(MemoryError::Unknown { guest })?);
        self.rebuild();
        drop(removed);
        Ok(())
    }

    /// Brings `map` up to date with `regions`.
    fn rebuild(&mut self) {
        let regions = self.regions.iter().map(|region| {
            let builder = MmapRegionBuilder::new(region.mapping.size);
            // SAFETY: the mapping is that long, and outlives `map`: it is unmapped only after a rebuild
            // without it, or when both are dropped, `map` first.
            let builder = unsafe { builder.with_raw_mmap_pointer(region.mapping.pointer) };
            let mmap = builder
                .build()
                .expect("a mapping of the kernel begins at a page");
            GuestRegionMmap::new(mmap, GuestAddress(region.placing.guest))
                .expect("the end was checked when the region was added")
        });
        self.map = match self.regions.len() {
            0 => GuestMemoryMmap::default(),
            _ => GuestMemoryMmap::from_regions(regions.collect())
                .expect("regions are sorted and don't overlap"),
        };
    }

    /// What the crate `virtio-queue` works on.
    #[must_use]
    pub fn map(&self) -> &GuestMemoryMmap {
        &self.map
    }

    /// Whether the VMM has taken some of it away, by making a file shorter.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        let gone = |region: &Region| {
            region
                .mapping
                .watched
                .as_ref()
                .is_some_and(Watched::is_gone)
        };
        self.regions.iter().any(gone)
    }

    /// The guest's address of what the VMM has at `user`.
    #[must_use]
    pub fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|Region { placing, .. }| {
            let offset = user.checked_sub(placing.user)?;
            (offset < placing.size).then_some(GuestAddress(placing.guest + offset))
        })
    }

    /// Appends where `length` bytes at a guest address are, in as many pieces as there are regions. Whether
    /// all of them are in the guest's memory; if not, nothing is appended.
    #[must_use]
    pub fn locate(&self, address: u64, length: u32, pieces: &mut Vec<libc::iovec>) -> bool {
        let before = pieces.len();
        let (mut address, mut left) = (address, u64::from(length));
        while left != 0 {
            let Some((pointer, there)) = self.find(address) else {
                pieces.truncate(before);
                return false;
            };
            let now = there.min(left);
            pieces.push(libc::iovec {
                iov_base: pointer.cast(),
                iov_len: usize::try_from(now).expect("the length of a mapping is a usize"),
            });
            left -= now;
            // Can't wrap: the region ends at a valid address.
            address += now;
        }
        true
    }

    /// Where a guest address is, and how many bytes its region has from there on.
    fn find(&self, address: u64) -> Option<(*mut u8, u64)> {
        let index = self
            .regions
            .partition_point(|region| region.placing.guest <= address);
        let Region { placing, mapping } = &self.regions[index.checked_sub(1)?];
        let offset = address - placing.guest;
        let inside = offset < placing.size;
        let offset = usize::try_from(offset).ok()?;
        inside.then(|| {
            (
                mapping.pointer.wrapping_add(offset),
                placing.size - (address - placing.guest),
            )
        })
    }
}

impl Mapping {
    fn new(
        placing: Placing,
        file: &File,
        few: bool,
        disposal: &Disposal,
    ) -> Result<Self, MemoryError> {
        let Placing {
            guest,
            size,
            offset,
            ..
        } = placing;
        let failed = |source| MemoryError::Map { guest, source };
        let end = offset
            .checked_add(size)
            .ok_or(MemoryError::Impossible { guest, size })?;
        let length = file.metadata().map_err(failed)?.len();
        if length < end {
            return Err(MemoryError::FileTooShort { guest });
        }
        // The kernel maps all of a huge page, but neither unmaps part of one nor puts other memory in its place.
        match huge_page(file).map_err(failed)? {
            Some(page) if !size.is_multiple_of(page) => {
                return Err(MemoryError::PartOfPage { guest, size, page });
            }
            _ => {}
        }
        let impossible = |_| MemoryError::Impossible { guest, size };
        let offset = libc::off_t::try_from(offset).map_err(impossible)?;
        let size = usize::try_from(size).map_err(impossible)?;
        // SAFETY: a new mapping at an address that the kernel chooses; nothing of ours is there.
        let pointer = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                offset,
            )
        };
        if pointer == libc::MAP_FAILED {
            return Err(failed(io::Error::last_os_error()));
        }
        let mut mapping = Self {
            pointer: pointer.cast(),
            size,
            watched: None,
            disposal: disposal.clone(),
        };
        // SAFETY: the mapping is ours, nothing but guest memory, and unwatched before it is unmapped.
        let watched = unsafe { Watched::new(mapping.pointer, size, few) };
        mapping.watched = Some(watched.map_err(failed)?);
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.watched = None;
        // SAFETY: it is ours, made in `new`, and whatever pointed into it has been rebuilt or dropped.
        unsafe { self.disposal.unmap(self.pointer, self.size) };
    }
}

/// Bytes of the file's pages, if it is in hugetlbfs. (tmpfs may have large pages as well, which can be parted.)
fn huge_page(file: &File) -> io::Result<Option<u64>> {
    let found = fstatfs(file)?;
    let page = u64::try_from(found.f_bsize).ok().filter(|page| *page != 0);
    Ok(page.filter(|_| found.f_type == libc::HUGETLBFS_MAGIC))
}

#[cfg(test)]
mod tests {
    use std::os::fd::FromRawFd;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn file(bytes: u64) -> File {
        // SAFETY: a new descriptor, or -1, which is checked.
        let file = unsafe {
            let fd = libc::memfd_create(c"guest".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0);
            File::from_raw_fd(fd)
        };
        file.set_len(bytes).expect("growing it");
        file
    }

    fn placing(guest: u64, user: u64, size: u64) -> Placing {
        Placing {
            guest,
            user,
            size,
            offset: 0,
        }
    }

    #[test]
    fn only_what_is_wholly_inside_is_found() {
        let mut memory = Memory::default();
        memory
            .add(placing(0x1000, 0xa000, 0x1000), &file(0x1000))
            .expect("mapping");
        memory
            .add(placing(0x2000, 0x1_0000, 0x1000), &file(0x1000))
            .expect("mapping");
        memory
            .add(placing(0x8000, 0x2_0000, 0x1000), &file(0x1000))
            .expect("mapping");
        let mut pieces = Vec::new();
        assert!(
            memory.locate(0x1800, 0x1000, &mut pieces),
            "it spans two regions"
        );
        assert_eq!(
            pieces.iter().map(|piece| piece.iov_len).collect::<Vec<_>>(),
            [0x800, 0x800]
        );
        for (address, length) in [
            (0xfff, 1),
            (0x2800, 0x801),
            (0x3000, 1),
            (u64::MAX, 1),
            (0x8fff, 2),
        ] {
            assert!(
                !memory.locate(address, length, &mut pieces),
                "{address:#x}+{length:#x}"
            );
            assert_eq!(pieces.len(), 2, "nothing was appended");
        }
        assert!(
            memory.locate(0x5000, 0, &mut pieces),
            "nothing is everywhere"
        );
        assert_eq!(memory.guest_address(0xa010), Some(GuestAddress(0x1010)));
        assert_eq!(memory.guest_address(0xb000), None);
        memory.remove(0x2000, 0x1000).expect("removing it");
        assert!(!memory.locate(0x1800, 0x1000, &mut pieces));
        assert!(memory.remove(0x2000, 0x1000).is_err());
    }

    #[test]
    fn memory_that_is_taken_away_reads_as_nothing_and_is_noticed() {
        let mut memory = Memory::default();
        let (whole, short) = (file(0x2000), file(0x2000));
        memory
            .add(placing(0x1000, 0, 0x2000), &whole)
            .expect("mapping");
        memory
            .add(placing(0x8000, 0x8000, 0x2000), &short)
            .expect("mapping");
        let value = |address| {
            use vm_memory::Bytes;
            memory
                .map()
                .read_obj::<u64>(GuestAddress(address))
                .expect("it is mapped")
        };
        assert_eq!((value(0x8000), memory.is_gone()), (0, false));
        short.set_len(0).expect("shortening it");
        assert_eq!(value(0x9000), 0, "a read of what isn't there");
        assert!(memory.is_gone());
        assert_eq!(value(0x1000), 0, "the other region is still there");
    }

    #[test]
    fn huge_pages_are_taken_whole_only_and_may_be_taken_away() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
        let file = File::from(memfd_create("guest", flags).expect("a memfd"));
        let page = huge_page(&file).expect("asking for it").expect("it is");
        file.set_len(page).expect("growing it");
        let mut memory = Memory::default();
        let refused = memory.add(placing(0x1000, 0, 0x1000), &file);
        assert!(
            matches!(refused, Err(MemoryError::PartOfPage { page: told, .. }) if told == page),
            "{refused:?}"
        );
        memory
            .add(placing(0x1000, 0, page), &file)
            .expect("mapping");
        file.set_len(0).expect("shortening it");
        let value: u64 = {
            use vm_memory::Bytes;
            let read = memory.map().read_obj(GuestAddress(0x1000));
            read.expect("it is mapped")
        };
        assert_eq!((value, memory.is_gone()), (0, true));
    }

    #[test]
    fn regions_that_cannot_be_are_refused_and_change_nothing() {
        let mut memory = Memory::default();
        memory
            .add(placing(0x1000, 0, 0x1000), &file(0x1000))
            .expect("mapping");
        let refused = [
            (placing(0x1800, 0, 0x1000), 0x1000),
            (placing(0x4000, 0, 0), 0x1000),
            (placing(u64::MAX - 0xfff, 0, 0x1000), 0x1000),
            (placing(0x4000, u64::MAX, 0x1000), 0x1000),
            (placing(0x4000, 0, 1 << 60), 0x1000),
            (placing(0x4000, 0, 0x2000), 0x1000),
            (
                Placing {
                    offset: 0x1000,
                    ..placing(0x4000, 0, 0x1000)
                },
                0x1000,
            ),
            (
                Placing {
                    offset: u64::MAX,
                    ..placing(0x4000, 0, 0x1000)
                },
                0x1000,
            ),
        ];
        for (placing, length) in refused {
            assert!(memory.add(placing, &file(length)).is_err(), "{placing:?}");
        }
        assert_eq!(memory.regions.len(), 1);
        assert!(memory.locate(0x1000, 0x1000, &mut Vec::new()));
    }
}
