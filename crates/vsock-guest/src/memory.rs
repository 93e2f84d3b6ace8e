//! A guest's RAM: memfds that are mapped here and, through vhost-user, by the back end.
//!
//! Addresses are guest-physical. The addresses that the front end tells in place of its own virtual ones are
//! made up ([`USER_OFFSET`]), so that a back end that confuses the two is found out.
//! What lies outside is a mistake of the test itself and panics.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{Arc, atomic::Ordering},
};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::VhostUserMemoryRegionInfo;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

/// What is added to a guest-physical address to get the "virtual address of the front end".
pub const USER_OFFSET: u64 = 0x5500_0000_0000;

const PAGE: usize = 4096;

/// The guest's memory.
#[derive(Debug)]
pub struct Memory {
    regions: Vec<Region>,
}

#[derive(Debug)]
struct Region {
    mapping: MmapRegion,
    file: Arc<File>,
    base: u64,
    /// Where the next allocation starts, relative to the base.
    free: u64,
}

impl Memory {
    /// Regions by guest-physical base and size, both in whole pages.
    ///
    /// # Errors
    /// memfd or mmap failed.
    pub fn new(layout: &[(u64, usize)]) -> io::Result<Self> {
        let regions = layout
            .iter()
            .map(|(base, size)| Region::new(*base, *size))
            .collect::<io::Result<_>>()?;
        Ok(Self { regions })
    }

    /// A copy in memfds of its own, as a restored clone has. Pages of zeros stay unallocated.
    ///
    /// # Errors
    /// memfd or mmap failed.
    pub fn duplicate(&self) -> io::Result<Self> {
        let mut page = [0; PAGE];
        let mut regions = Vec::new();
        for region in &self.regions {
            let mut copy = Region::new(region.base, region.mapping.size())?;
            copy.free = region.free;
            for offset in (0..region.mapping.size()).step_by(PAGE) {
                let address = region.base + offset as u64;
                self.read(address, &mut page);
                if page.iter().any(|byte| *byte != 0) {
                    copy.write(offset, &page);
                }
            }
            regions.push(copy);
        }
        Ok(Self { regions })
    }

    /// Takes room that nobody else uses. It is never given back.
    ///
    /// # Panics
    /// No region has that much left.
    pub fn allocate(&mut self, size: usize, align: u64) -> u64 {
        for region in &mut self.regions {
            let start = (region.base + region.free).next_multiple_of(align) - region.base;
            let end = start + size as u64;
            if end <= region.mapping.size() as u64 {
                region.free = end;
                return region.base + start;
            }
        }
        panic!("the guest's memory has no {size} bytes left: give it more in the settings");
    }

    /// First address behind the last region: nothing is there.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.regions
            .iter()
            .map(|region| region.base + region.mapping.size() as u64)
            .max()
            .unwrap_or(0)
    }

    /// Base and size of each region.
    pub fn layout(&self) -> impl Iterator<Item = (u64, usize)> {
        self.regions
            .iter()
            .map(|region| (region.base, region.mapping.size()))
    }

    /// What the back end is told about each region.
    #[must_use]
    pub fn table(&self) -> Vec<VhostUserMemoryRegionInfo> {
        self.regions
            .iter()
            .map(|region| VhostUserMemoryRegionInfo {
                guest_phys_addr: region.base,
                memory_size: region.mapping.size() as u64,
                userspace_addr: region.base + USER_OFFSET,
                mmap_offset: 0,
                mmap_handle: region.file.as_raw_fd(),
            })
            .collect()
    }

    /// The memfds, in the order of [`table`](Self::table).
    #[must_use]
    pub fn files(&self) -> Vec<RawFd> {
        self.regions
            .iter()
            .map(|region| region.file.as_raw_fd())
            .collect()
    }

    /// Copies out.
    ///
    /// # Panics
    /// Outside of the guest's memory.
    pub fn read(&self, address: u64, bytes: &mut [u8]) {
        let (region, offset) = self.find(address);
        region
            .mapping
            .as_volatile_slice()
            .read_slice(bytes, offset)
            .expect("the driver reads its own memory");
    }

    /// Copies in.
    ///
    /// # Panics
    /// Outside of the guest's memory.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        let (region, offset) = self.find(address);
        region.write(offset, bytes);
    }

    /// Reads 16 bits that the device may write; what it wrote before is seen after.
    ///
    /// # Panics
    /// Outside of the guest's memory, or misaligned.
    #[must_use]
    pub fn load(&self, address: u64) -> u16 {
        let (region, offset) = self.find(address);
        let value: u16 = region
            .mapping
            .as_volatile_slice()
            .load(offset, Ordering::Acquire)
            .expect("the driver's rings are aligned and in its memory");
        u16::from_le(value)
    }

    /// Writes 16 bits that the device reads; what was written before is seen first.
    ///
    /// # Panics
    /// Outside of the guest's memory, or misaligned.
    pub fn store(&self, address: u64, value: u16) {
        let (region, offset) = self.find(address);
        region
            .mapping
            .as_volatile_slice()
            .store(value.to_le(), offset, Ordering::Release)
            .expect("the driver's rings are aligned and in its memory");
    }

    fn find(&self, address: u64) -> (&Region, usize) {
        self.regions
            .iter()
            .find_map(|region| {
                let offset = usize::try_from(address.checked_sub(region.base)?).ok()?;
                (offset < region.mapping.size()).then_some((region, offset))
            })
            .expect("the driver uses its own memory")
    }
}

impl Region {
    fn new(base: u64, size: usize) -> io::Result<Self> {
        let file = Arc::new(File::from(memfd_create("guest", MemfdFlags::CLOEXEC)?));
        ftruncate(&*file, size as u64)?;
        let mapping = MmapRegion::from_file(FileOffset::from_arc(file.clone(), 0), size)
            .map_err(io::Error::other)?;
        Ok(Self {
            mapping,
            file,
            base,
            free: 0,
        })
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        self.mapping
            .as_volatile_slice()
            .write_slice(bytes, offset)
            .expect("the driver writes its own memory");
    }
}
