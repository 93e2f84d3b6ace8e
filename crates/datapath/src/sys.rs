//! `bpf(2)`: the commands that aya keeps to itself, on descriptors of ours.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};

use sandwire_kernel_net::bpf::{self, call, call_for_descriptor};
pub(crate) use sandwire_kernel_net::bpf::{open_pin, pin, update_link};

use crate::abi::Plain;

const BPF_MAP_LOOKUP_ELEM: libc::c_long = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_MAP_DELETE_ELEM: libc::c_long = 3;
const BPF_PROG_TEST_RUN: libc::c_long = 10;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_PROG_GET_FD_BY_ID: libc::c_long = 13;
const BPF_MAP_GET_FD_BY_ID: libc::c_long = 14;
const BPF_BTF_GET_FD_BY_ID: libc::c_long = 19;
const BPF_MAP_UPDATE_BATCH: libc::c_long = 26;
const BPF_MAP_DELETE_BATCH: libc::c_long = 27;
const BPF_LINK_DETACH: libc::c_long = 34;

/// Before all others, unless an anchor is named.
pub(crate) const BPF_F_BEFORE: u32 = 1 << 3;
/// Behind all others, unless an anchor is named.
pub(crate) const BPF_F_AFTER: u32 = 1 << 4;

macro_rules! attributes {
    ($($name:ident { $($field:ident: $type:ty,)+ })+) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy, Default)]
            struct $name { $($field: $type,)+ }
        )+
    };
}

// The parts of `union bpf_attr` by command, up to the last field that we set.
attributes! {
    Element { map: u32, padding: u32, key: u64, value: u64, flags: u64, }
    Batch {
        from: u64, to: u64, keys: u64, values: u64,
        count: u32, map: u32, element_flags: u64, flags: u64,
    }
    TestRun {
        program: u32, result: u32, size_in: u32, size_out: u32, data_in: u64, data_out: u64,
        repeat: u32, duration: u32, context_size_in: u32, context_size_out: u32,
        context_in: u64, context_out: u64, flags: u32, cpu: u32,
    }
    InfoQuery { descriptor: u32, length: u32, info: u64, }
    ById { id: u32, next: u32, flags: u32, }
    LinkDetach { link: u32, }
}

/// The start of `struct bpf_map_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MapInfo {
    pub(crate) kind: u32,
    pub(crate) id: u32,
    pub(crate) key_size: u32,
    pub(crate) value_size: u32,
    pub(crate) max_entries: u32,
    pub(crate) flags: u32,
    name: [u8; 16],
    ifindex: u32,
    btf_vmlinux: u32,
    netns_device: u64,
    netns_inode: u64,
    pub(crate) btf: u32,
    btf_key: u32,
    btf_value: u32,
    padding: u32,
}

impl MapInfo {
    /// Whether it was made of a section of an object (`.rodata`), which a name of C's has no point for.
    pub(crate) fn is_section(&self) -> bool {
        self.name.contains(&b'.')
    }
}

/// The start of `struct bpf_prog_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProgramInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    jited_size: u32,
    translated_size: u32,
    jited: u64,
    translated: u64,
    load_time: u64,
    creator: u32,
    map_count: u32,
    maps: u64,
    name: [u8; NAME_LENGTH],
}

/// `BPF_OBJ_NAME_LEN`: bytes that the kernel keeps of a name, the last of them zero.
const NAME_LENGTH: usize = 16;

/// The start of `struct bpf_link_info`; of TCX and XDP links the interface stands first in the rest.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LinkInfo {
    kind: u32,
    id: u32,
    pub(crate) program: u32,
    padding: u32,
    pub(crate) ifindex: u32,
    attach_type: u32,
}

/// `struct bpf_btf_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct BtfInfo {
    address: u64,
    size: u32,
    id: u32,
    name: u64,
    name_length: u32,
    is_kernel: u32,
}

fn number(descriptor: BorrowedFd<'_>) -> u32 {
    descriptor.as_raw_fd().cast_unsigned()
}

/// Reads an entry.
pub(crate) fn lookup<K: Plain, V: Plain>(map: BorrowedFd<'_>, key: &K) -> io::Result<Option<V>> {
    let mut value = V::zeroed();
    let mut attributes = Element {
        map: number(map),
        key: std::ptr::from_ref(key).addr() as u64,
        value: std::ptr::from_mut(&mut value).addr() as u64,
        ..Element::default()
    };
    // SAFETY: key and value are of the sizes that the map has, as checked when it was opened.
    match unsafe { call(BPF_MAP_LOOKUP_ELEM, &mut attributes) } {
        Ok(_) => Ok(Some(value)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads an entry of an array whose type isn't known.
pub(crate) fn lookup_bytes(map: BorrowedFd<'_>, key: u32, size: usize) -> io::Result<Vec<u8>> {
    // The kernel writes whole words of eight bytes.
    let mut value = vec![0_u8; size.next_multiple_of(8)];
    let mut attributes = Element {
        map: number(map),
        key: (&raw const key).addr() as u64,
        value: value.as_mut_ptr().addr() as u64,
        ..Element::default()
    };
    // SAFETY: keys of arrays have four bytes, and the value has room for what the kernel writes.
    unsafe { call(BPF_MAP_LOOKUP_ELEM, &mut attributes) }?;
    value.truncate(size);
    Ok(value)
}

/// Writes an entry.
pub(crate) fn update<K: Plain, V: Plain>(
    map: BorrowedFd<'_>,
    key: &K,
    value: &V,
    flags: u64,
) -> io::Result<()> {
    let mut attributes = Element {
        map: number(map),
        key: std::ptr::from_ref(key).addr() as u64,
        value: std::ptr::from_ref(value).addr() as u64,
        flags,
        ..Element::default()
    };
    // SAFETY: key and value are of the sizes that the map has, as checked when it was opened.
    unsafe { call(BPF_MAP_UPDATE_ELEM, &mut attributes) }.map(drop)
}

/// Removes an entry. Whether there was one.
pub(crate) fn delete<K: Plain>(map: BorrowedFd<'_>, key: &K) -> io::Result<bool> {
    let mut attributes = Element {
        map: number(map),
        key: std::ptr::from_ref(key).addr() as u64,
        ..Element::default()
    };
    // SAFETY: the key is of the size that the map has, as checked when it was opened.
    match unsafe { call(BPF_MAP_DELETE_ELEM, &mut attributes) } {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// What a batch did before it ended, and why it ended early if it did.
pub(crate) type Partial = (usize, io::Result<()>);

/// Writes entries, all of them or the first few. The kernel has no batches that only add.
pub(crate) fn update_batch<K: Plain, V: Plain>(
    map: BorrowedFd<'_>,
    keys: &[K],
    values: &[V],
) -> Partial {
    assert_eq!(keys.len(), values.len());
    let attributes = Batch {
        keys: keys.as_ptr().addr() as u64,
        values: values.as_ptr().addr() as u64,
        ..Batch::default()
    };
    // SAFETY: both slices hold as many entries of the map's sizes as `batch` is told.
    unsafe { batch(BPF_MAP_UPDATE_BATCH, map, keys.len(), attributes) }
}

/// Removes entries, all of them or the first few.
pub(crate) fn delete_batch<K: Plain>(map: BorrowedFd<'_>, keys: &[K]) -> Partial {
    let attributes = Batch {
        keys: keys.as_ptr().addr() as u64,
        ..Batch::default()
    };
    // SAFETY: the slice holds as many keys of the map's size as `batch` is told.
    unsafe { batch(BPF_MAP_DELETE_BATCH, map, keys.len(), attributes) }
}

/// # Safety
/// As of [`call`], for `count` entries.
unsafe fn batch(
    command: libc::c_long,
    map: BorrowedFd<'_>,
    count: usize,
    mut attributes: Batch,
) -> Partial {
    if count == 0 {
        return (0, Ok(()));
    }
    attributes.map = number(map);
    attributes.count = u32::try_from(count).expect("maps have fewer than 2^32 entries");
    // SAFETY: the caller's promise.
    let result = unsafe { call(command, &mut attributes) };
    // The count is written unless the kernel refused before it began.
    let done = match &result {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => 0,
        _ => (attributes.count as usize).min(count),
    };
    (done, result.map(drop))
}

/// Reads all entries of a map. What changes meanwhile may be missed or seen twice.
pub(crate) fn entries<K: Plain, V: Plain>(map: BorrowedFd<'_>) -> io::Result<Vec<(K, V)>> {
    // SAFETY: key and value are plain and of the sizes that the map has, as checked when it was opened.
    unsafe { bpf::entries(map, (K::zeroed(), V::zeroed())) }
}

/// # Safety
/// `T` is the start of the info structure of the object, or longer, any bytes are a value of it, and addresses in it
/// are valid for what the kernel writes there.
unsafe fn info<T: Default>(object: BorrowedFd<'_>, info: &mut T) -> io::Result<()> {
    let mut attributes = InfoQuery {
        descriptor: number(object),
        length: u32::try_from(size_of::<T>()).expect("small"),
        info: std::ptr::from_mut(info).addr() as u64,
    };
    // SAFETY: the kernel writes at most `length` bytes.
    unsafe { call(BPF_OBJ_GET_INFO_BY_FD, &mut attributes) }.map(drop)
}

/// What the kernel says of a map.
pub(crate) fn map_info(map: BorrowedFd<'_>) -> io::Result<MapInfo> {
    let mut found = MapInfo::default();
    // SAFETY: the layout is the kernel's.
    unsafe { info(map, &mut found) }?;
    Ok(found)
}

/// The number of a program.
pub(crate) fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    let mut found = ProgramInfo::default();
    // SAFETY: the layout is the kernel's.
    unsafe { info(program, &mut found) }?;
    Ok(found.id)
}

/// A loaded program by its number; needs `CAP_SYS_ADMIN`.
pub(crate) fn program_of(id: u32) -> io::Result<OwnedFd> {
    by_id(BPF_PROG_GET_FD_BY_ID, id)
}

/// A map by its number; needs `CAP_SYS_ADMIN`.
pub(crate) fn map_of(id: u32) -> io::Result<OwnedFd> {
    by_id(BPF_MAP_GET_FD_BY_ID, id)
}

/// The numbers of the maps that a program uses.
pub(crate) fn program_maps(program: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    /// The verifier's own limit.
    const MAPS_MAX: u32 = 64;
    let mut maps = vec![0_u32; MAPS_MAX as usize];
    let mut found = ProgramInfo {
        map_count: MAPS_MAX,
        maps: maps.as_mut_ptr().addr() as u64,
        ..ProgramInfo::default()
    };
    // SAFETY: the layout is the kernel's, and the buffer has room for as many numbers as it is told.
    unsafe { info(program, &mut found) }?;
    maps.truncate(found.map_count as usize);
    Ok(maps)
}

/// Whether a program has a name, as far as the kernel keeps it.
pub(crate) fn is_program_named(program: BorrowedFd<'_>, name: &str) -> io::Result<bool> {
    let mut found = ProgramInfo::default();
    // SAFETY: the layout is the kernel's, and no buffer is offered.
    unsafe { info(program, &mut found) }?;
    let kept = &name.as_bytes()[..name.len().min(NAME_LENGTH - 1)];
    Ok(found.name.starts_with(kept) && found.name[kept.len()] == 0)
}

fn by_id(command: libc::c_long, id: u32) -> io::Result<OwnedFd> {
    let mut attributes = ById {
        id,
        ..ById::default()
    };
    // SAFETY: the structure holds no addresses, and both commands give a descriptor.
    unsafe { call_for_descriptor(command, &mut attributes) }
}

/// What the kernel says of a link.
pub(crate) fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    let mut found = LinkInfo::default();
    // SAFETY: the layout is the kernel's.
    unsafe { info(link, &mut found) }?;
    Ok(found)
}

/// The types that a map was made with.
pub(crate) fn btf(id: u32) -> io::Result<Vec<u8>> {
    let descriptor = by_id(BPF_BTF_GET_FD_BY_ID, id)?;
    let descriptor = std::os::fd::AsFd::as_fd(&descriptor);
    let mut found = BtfInfo::default();
    // SAFETY: the layout is the kernel's, and no buffer is offered yet.
    unsafe { info(descriptor, &mut found) }?;
    let mut bytes = vec![0_u8; found.size as usize];
    let mut found = BtfInfo {
        address: bytes.as_mut_ptr().addr() as u64,
        size: found.size,
        ..BtfInfo::default()
    };
    // SAFETY: the buffer has the size that is told.
    unsafe { info(descriptor, &mut found) }?;
    Ok(bytes)
}

/// Takes a link's program off its interface at once. One whose interface is gone has none.
pub(crate) fn detach_link(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attributes = LinkDetach { link: number(link) };
    // SAFETY: the structure holds no addresses.
    unsafe { call(BPF_LINK_DETACH, &mut attributes) }.map(drop)
}

/// Runs a tc program on a packet of zeros and returns what it returned.
pub(crate) fn run_classifier(program: BorrowedFd<'_>) -> io::Result<i32> {
    let packet = [0_u8; 64];
    let mut attributes = TestRun {
        program: number(program),
        size_in: 64,
        data_in: packet.as_ptr().addr() as u64,
        ..TestRun::default()
    };
    // SAFETY: the packet lives until the call returns, and nothing is written back.
    unsafe { call(BPF_PROG_TEST_RUN, &mut attributes) }?;
    Ok(attributes.result.cast_signed())
}
