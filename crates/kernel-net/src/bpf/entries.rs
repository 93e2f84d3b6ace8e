//! All entries of a map, many at a time.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use super::call;

const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_MAP_LOOKUP_BATCH: libc::c_long = 24;
/// Bytes that are read at once, within the bounds of how many entries.
const BYTES: usize = 256 << 10;
/// At least so many that a bucket of a hash has fewer.
const AT_ONCE_MIN: usize = 256;
const AT_ONCE_MAX: usize = 4096;

/// The part of `union bpf_attr` for many entries at once.
#[repr(C)]
#[derive(Default)]
struct Batch {
    from: u64,
    to: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

/// Types of maps whose entries are read so, of which none has a value for each processor: `BPF_MAP_TYPE_HASH`, `_LRU_HASH`
/// and `_LPM_TRIE`.
const PLAIN_TYPES: [u32; 3] = [1, 9, 11];

/// The part of `union bpf_attr` for asking about an object.
#[repr(C)]
#[derive(Default)]
struct InfoQuery {
    descriptor: u32,
    length: u32,
    info: u64,
}

/// The start of `struct bpf_map_info`.
#[repr(C)]
#[derive(Default)]
struct MapInfo {
    kind: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
}

/// Reads all entries of a hash or a trie as bytes. What changes meanwhile may be missed or seen twice.
///
/// # Errors
/// The map's keys and values aren't of these sizes, it is of another type, or the kernel refuses.
pub fn entries_as_bytes<const K: usize, const V: usize>(
    map: BorrowedFd<'_>,
) -> io::Result<Vec<([u8; K], [u8; V])>> {
    let mut info = MapInfo::default();
    let mut query = InfoQuery {
        descriptor: map.as_raw_fd().cast_unsigned(),
        length: u32::try_from(size_of::<MapInfo>()).expect("small"),
        info: std::ptr::from_mut(&mut info).addr() as u64,
    };
    // SAFETY: the kernel writes at most `length` bytes, and the layout is its own.
    unsafe { call(BPF_OBJ_GET_INFO_BY_FD, &mut query) }?;
    let has_sizes = info.key_size as usize == K && info.value_size as usize == V;
    if !has_sizes || !PLAIN_TYPES.contains(&info.kind) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the sizes are the map's, and any bytes are a value of bytes.
    unsafe { entries(map, ([0; K], [0; V])) }
}

/// Reads all entries of a hash or a trie. What changes meanwhile may be missed or seen twice. `blank` is any key with
/// any value.
///
/// # Errors
/// The kernel refuses; storage of cgroups and the like can't be read so.
///
/// # Safety
/// `K` and `V` have the sizes of the map's keys and values, and any bytes are a value of them.
pub unsafe fn entries<K: Copy, V: Copy>(
    map: BorrowedFd<'_>,
    blank: (K, V),
) -> io::Result<Vec<(K, V)>> {
    let at_once = (BYTES / (size_of::<K>() + size_of::<V>())).clamp(AT_ONCE_MIN, AT_ONCE_MAX);
    let mut found = Vec::new();
    let mut keys = vec![blank.0; at_once];
    let mut values = vec![blank.1; at_once];
    // Where the kernel goes on: a bucket's number or a key, whichever is larger.
    let mut position = vec![0_u8; size_of::<K>().max(8)];
    let mut is_first = true;
    loop {
        let at = position.as_mut_ptr().addr() as u64;
        let mut batch = Batch {
            from: if is_first { 0 } else { at },
            to: at,
            keys: keys.as_mut_ptr().addr() as u64,
            values: values.as_mut_ptr().addr() as u64,
            count: u32::try_from(at_once).expect("small"),
            map: map.as_raw_fd().cast_unsigned(),
            ..Batch::default()
        };
        // SAFETY: keys and values have room for `at_once` entries of the map's sizes, the position for a key.
        let has_ended = match unsafe { call(BPF_MAP_LOOKUP_BATCH, &mut batch) } {
            Ok(_) => false,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
            Err(error) => return Err(error),
        };
        let count = (batch.count as usize).min(at_once);
        let read = keys[..count].iter().copied();
        found.extend(read.zip(values[..count].iter().copied()));
        if has_ended {
            return Ok(found);
        }
        is_first = false;
    }
}
