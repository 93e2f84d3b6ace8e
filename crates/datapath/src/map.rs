//! Maps as typed values: hashes and tries by system call, arrays by shared memory.

use std::{
    io,
    marker::PhantomData,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use sandwire_kernel_net::bpf::BPF_NOEXIST;

use crate::{Error, abi::Plain, sys};

/// A hash or a trie.
#[derive(Debug)]
pub(crate) struct Table<K, V> {
    name: &'static str,
    descriptor: OwnedFd,
    entries_max: u32,
    /// A test's way to have the kernel refuse.
    #[cfg(test)]
    pub(crate) refuses_removals: std::sync::atomic::AtomicBool,
    types: PhantomData<fn(K) -> V>,
}

impl<K: Plain, V: Plain> Table<K, V> {
    /// Takes a map whose keys and values have the sizes of `K` and `V`.
    pub(crate) fn new(name: &'static str, descriptor: OwnedFd) -> Result<Self, Error> {
        let info = checked_info(name, descriptor.as_fd(), size_of::<K>(), size_of::<V>())?;
        Ok(Self {
            name,
            descriptor,
            entries_max: info.max_entries,
            #[cfg(test)]
            refuses_removals: false.into(),
            types: PhantomData,
        })
    }

    /// Why there is no room for so many entries; `None`: there is.
    pub(crate) fn refuse(&self, entries: usize) -> Option<Error> {
        (entries > self.entries_max as usize).then(|| self.full())
    }

    pub(crate) fn get(&self, key: &K) -> Result<Option<V>, Error> {
        sys::lookup(self.descriptor.as_fd(), key).map_err(|source| self.failed("look up", source))
    }

    pub(crate) fn set(&self, key: &K, value: &V) -> Result<(), Error> {
        sys::update(self.descriptor.as_fd(), key, value, 0)
            .map_err(|source| self.failed("write", source))
    }

    /// Writes an entry if there is none of its key. Whether it did.
    pub(crate) fn add(&self, key: &K, value: &V) -> Result<bool, Error> {
        match sys::update(self.descriptor.as_fd(), key, value, BPF_NOEXIST) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
            Err(source) => Err(self.failed("write", source)),
        }
    }

    pub(crate) fn remove(&self, key: &K) -> Result<bool, Error> {
        sys::delete(self.descriptor.as_fd(), key).map_err(|source| self.failed("remove", source))
    }

    pub(crate) fn entries(&self) -> Result<Vec<(K, V)>, Error> {
        sys::entries(self.descriptor.as_fd()).map_err(|source| self.failed("read", source))
    }

    /// Writes entries of new keys, all or none: what was written before a failure is removed again.
    pub(crate) fn add_all(&self, keys: &[K], values: &[V]) -> Result<(), Error> {
        let (done, result) = sys::update_batch(self.descriptor.as_fd(), keys, values);
        result.map_err(|source| {
            // Of these each is there, so that nothing ends the removal early.
            let _ = self.remove_all(&keys[..done]);
            self.failed("write", source)
        })
    }

    /// Removes entries; those that aren't there are passed over.
    pub(crate) fn remove_all(&self, mut keys: &[K]) -> Result<(), Error> {
        #[cfg(test)]
        if self.refuses_removals.load(Ordering::Relaxed) && !keys.is_empty() {
            return Err(self.failed("remove", io::Error::from_raw_os_error(libc::ENOMEM)));
        }
        while !keys.is_empty() {
            let (done, result) = sys::delete_batch(self.descriptor.as_fd(), keys);
            let skipped = match result {
                Ok(()) => 0,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => 1,
                Err(source) => return Err(self.failed("remove", source)),
            };
            keys = keys.get(done + skipped..).unwrap_or_default();
        }
        Ok(())
    }

    fn failed(&self, operation: &'static str, source: io::Error) -> Error {
        match source.raw_os_error() {
            Some(libc::E2BIG | libc::ENOSPC) => self.full(),
            _ => Error::system(
                operation,
                format!("an entry of the map {}", self.name),
                source,
            ),
        }
    }

    fn full(&self) -> Error {
        Error::Full {
            map: self.name,
            entries: self.entries_max,
        }
    }
}

/// An array that is mapped into our memory, as words. The programs write to it at the same time, so every access
/// is atomic: by 32-bit words where the fields are such, by 64-bit words in arrays of counters.
#[derive(Debug)]
pub(crate) struct Words<W> {
    memory: NonNull<W>,
    entries: u32,
    per_entry: usize,
}

// SAFETY: the memory is shared with the kernel anyway, and only accessed by atomic operations.
unsafe impl<W: Sync> Send for Words<W> {}
// SAFETY: as above.
unsafe impl<W: Sync> Sync for Words<W> {}

impl<W> Words<W> {
    /// Maps an array that was made for it, whatever its values are.
    pub(crate) fn new(name: &'static str, descriptor: BorrowedFd<'_>) -> Result<Self, Error> {
        let failed = |source| Error::system("map into memory", format!("the map {name}"), source);
        let info = sys::map_info(descriptor).map_err(failed)?;
        // The kernel rounds sizes up to eight.
        let per_entry = (info.value_size as usize).next_multiple_of(8) / size_of::<W>();
        let length = info.max_entries as usize * per_entry * size_of::<W>();
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                descriptor.as_raw_fd(),
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(failed(io::Error::last_os_error()));
        }
        Ok(Self {
            memory: NonNull::new(memory.cast()).expect("the kernel maps nothing at zero"),
            entries: info.max_entries,
            per_entry,
        })
    }

    /// How many entries there are.
    pub(crate) fn entries(&self) -> u32 {
        self.entries
    }

    /// The words of an entry.
    pub(crate) fn of(&self, index: u32) -> &[W] {
        assert!(index < self.entries, "entry {index} of {}", self.entries);
        let count = self.per_entry;
        // SAFETY: the entry lies inside the mapping, which lives as long as `self`; W is one of the
        // atomic integers, of which any bytes are a value.
        unsafe {
            std::slice::from_raw_parts(self.memory.as_ptr().add(index as usize * count), count)
        }
    }
}

impl<W> Drop for Words<W> {
    fn drop(&mut self) {
        let length = self.entries as usize * self.per_entry * size_of::<W>();
        // SAFETY: this is the mapping that `new` made, and nobody borrows from it any more.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), length) };
    }
}

/// An array of values of one type.
#[derive(Debug)]
pub(crate) struct Array<T, W> {
    words: Words<W>,
    types: PhantomData<fn() -> T>,
}

impl<T: Plain, W> Array<T, W> {
    /// Maps an array whose values have the size of `T`.
    pub(crate) fn new(name: &'static str, descriptor: BorrowedFd<'_>) -> Result<Self, Error> {
        const {
            assert!(
                size_of::<T>().is_multiple_of(8),
                "the kernel rounds sizes up to eight"
            );
        }
        checked_info(name, descriptor, size_of::<u32>(), size_of::<T>())?;
        Ok(Self {
            words: Words::new(name, descriptor)?,
            types: PhantomData,
        })
    }

    /// How many entries there are.
    pub(crate) fn entries(&self) -> u32 {
        self.words.entries()
    }

    /// The words of an entry.
    pub(crate) fn words(&self, index: u32) -> &[W] {
        self.words.of(index)
    }
}

impl<T: Plain> Array<T, AtomicU32> {
    /// The aligned 32-bit field at `offset` in an entry.
    pub(crate) fn field(&self, index: u32, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4));
        &self.words(index)[offset / 4]
    }

    /// Reads an entry. Fields that change meanwhile are each old or new.
    pub(crate) fn read(&self, index: u32) -> T {
        let words = self.words(index).iter();
        let bytes: Vec<u8> = words
            .flat_map(|word| word.load(Ordering::Acquire).to_ne_bytes())
            .collect();
        T::read(&bytes).expect("as many bytes as a value has")
    }

    /// Writes an entry, its first field last: whoever sees that sees the others.
    pub(crate) fn write(&self, index: u32, value: &T) {
        let bytes = value.bytes().chunks_exact(4);
        let values = bytes.map(|word| u32::from_ne_bytes(word.try_into().expect("chunks of four")));
        let mut pairs = self.words(index).iter().zip(values);
        let (first, last_written) = pairs.next().expect("values are not empty");
        for (word, value) in pairs {
            word.store(value, Ordering::Relaxed);
        }
        first.store(last_written, Ordering::Release);
    }
}

impl<T: Plain> Array<T, AtomicU64> {
    /// The aligned 64-bit field at `offset` in an entry.
    pub(crate) fn word(&self, index: u32, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        &self.words(index)[offset / 8]
    }

    /// Reads an entry. Words that change meanwhile are each old or new.
    pub(crate) fn read(&self, index: u32) -> T {
        let words = self.words(index).iter();
        let bytes: Vec<u8> = words
            .flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes())
            .collect();
        T::read(&bytes).expect("as many bytes as a value has")
    }

    /// Zeroes an entry.
    pub(crate) fn clear(&self, index: u32) {
        for word in self.words(index) {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// Adds to each word of an entry.
    #[cfg(test)]
    pub(crate) fn add(&self, index: u32, value: &T) {
        for (word, bytes) in self.words(index).iter().zip(value.bytes().chunks_exact(8)) {
            let addend = u64::from_ne_bytes(bytes.try_into().expect("chunks of eight"));
            word.fetch_add(addend, Ordering::Relaxed);
        }
    }
}

fn checked_info(
    name: &'static str,
    descriptor: BorrowedFd<'_>,
    key_size: usize,
    value_size: usize,
) -> Result<sys::MapInfo, Error> {
    let failed = |source| Error::system("open", format!("the map {name}"), source);
    let info = sys::map_info(descriptor).map_err(failed)?;
    if info.key_size as usize != key_size || info.value_size as usize != value_size {
        let text = format!(
            "keys of {} and values of {} bytes instead of {key_size} and {value_size}",
            info.key_size, info.value_size
        );
        return Err(failed(io::Error::other(text)));
    }
    Ok(info)
}
