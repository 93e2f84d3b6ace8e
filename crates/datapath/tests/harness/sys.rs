//! The few calls of bpf(2) that the harness makes hundreds of thousands of times.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use libc::c_long;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const MAP_LOOKUP_ELEM: c_long = 1;
const MAP_UPDATE_ELEM: c_long = 2;
const MAP_DELETE_ELEM: c_long = 3;
const MAP_GET_NEXT_KEY: c_long = 4;
const PROG_TEST_RUN: c_long = 10;
const MAP_LOOKUP_BATCH: c_long = 24;
const MAP_UPDATE_BATCH: c_long = 26;

/// Calls bpf(2) with a structure of attributes.
fn bpf<T>(command: c_long, attributes: &mut T) -> io::Result<i64> {
    // SAFETY: every caller passes attributes of the layout that the command has in linux/bpf.h, with
    // addresses of buffers that outlive the call and are as long as the map or the attributes say.
    unsafe { sandwire_kernel_net::bpf::call(command, attributes) }
}

/// Keeps the thread on one processor, where test runs are then made: what that has paid ahead is known.
pub(crate) fn stay_on_a_processor() -> io::Result<u32> {
    let usable = sched_getaffinity(None)?;
    let first = (0..CpuSet::MAX_CPU).find(|cpu| usable.is_set(*cpu));
    let first = first.ok_or(io::ErrorKind::NotFound)?;
    let mut only = CpuSet::new();
    only.set(first);
    sched_setaffinity(None, &only)?;
    Ok(first as u32)
}

#[repr(C)]
#[derive(Default)]
struct Element {
    map: u32,
    reserved: u32,
    key: u64,
    value: u64,
    flags: u64,
}

impl Element {
    fn new(map: BorrowedFd<'_>, key: &[u8], value: u64) -> Self {
        Self {
            map: map.as_raw_fd().cast_unsigned(),
            key: key.as_ptr().addr() as u64,
            value,
            ..Self::default()
        }
    }
}

/// The value of a key; `value` must be as long as the map's values are.
pub(crate) fn look_up(map: BorrowedFd<'_>, key: &[u8], value: &mut [u8]) -> io::Result<()> {
    let address = value.as_mut_ptr().addr() as u64;
    bpf(MAP_LOOKUP_ELEM, &mut Element::new(map, key, address)).map(drop)
}

pub(crate) fn update(map: BorrowedFd<'_>, key: &[u8], value: &[u8]) -> io::Result<()> {
    let address = value.as_ptr().addr() as u64;
    bpf(MAP_UPDATE_ELEM, &mut Element::new(map, key, address)).map(drop)
}

/// Removes a key, if it is there.
pub(crate) fn delete(map: BorrowedFd<'_>, key: &[u8]) -> io::Result<()> {
    match bpf(MAP_DELETE_ELEM, &mut Element::new(map, key, 0)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result.map(drop),
    }
}

/// All keys of a hash that nobody changes meanwhile.
pub(crate) fn keys(map: BorrowedFd<'_>, size: usize) -> io::Result<Vec<Vec<u8>>> {
    let mut found: Vec<Vec<u8>> = Vec::new();
    loop {
        let mut next = vec![0; size];
        let address = next.as_mut_ptr().addr() as u64;
        let mut element = Element::new(map, found.last().map_or(&[], Vec::as_slice), address);
        if found.is_empty() {
            element.key = 0;
        }
        match bpf(MAP_GET_NEXT_KEY, &mut element) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
            result => result?,
        };
        found.push(next);
    }
}

#[repr(C)]
#[derive(Default)]
struct Batch {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

impl Batch {
    fn new(map: BorrowedFd<'_>, keys: &mut [u32], values: u64, out: &mut u32) -> Self {
        Self {
            out_batch: std::ptr::from_mut(out).addr() as u64,
            keys: keys.as_mut_ptr().addr() as u64,
            values,
            count: keys.len() as u32,
            map: map.as_raw_fd().cast_unsigned(),
            ..Self::default()
        }
    }
}

/// `count` values of an array from `first` on, each `size` bytes long.
pub(crate) fn values(
    map: BorrowedFd<'_>,
    first: u32,
    count: usize,
    size: usize,
) -> io::Result<Vec<Vec<u8>>> {
    let (mut keys, mut values, mut out) = (vec![0; count], vec![0; count * size], 0);
    let address = values.as_mut_ptr().addr() as u64;
    let mut batch = Batch::new(map, &mut keys, address, &mut out);
    // Where the kernel was told to go on behind.
    let before = first.wrapping_sub(1);
    if first > 0 {
        batch.in_batch = std::ptr::from_ref(&before).addr() as u64;
    }
    bpf(MAP_LOOKUP_BATCH, &mut batch)?;
    Ok(values.chunks(size).map(<[u8]>::to_vec).collect())
}

/// Writes the first values of an array.
pub(crate) fn update_first(map: BorrowedFd<'_>, values: &[Vec<u8>]) -> io::Result<()> {
    let mut keys: Vec<u32> = (0..values.len() as u32).collect();
    let (values, mut out) = (values.concat(), 0);
    let address = values.as_ptr().addr() as u64;
    bpf(
        MAP_UPDATE_BATCH,
        &mut Batch::new(map, &mut keys, address, &mut out),
    )
    .map(drop)
}

/// `struct __sk_buff`, as much of it as a test may set or reads back.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Context {
    unused_before_mark: [u32; 2],
    pub(crate) mark: u32,
    unused_before_ingress_ifindex: [u32; 6],
    pub(crate) ingress_ifindex: u32,
    pub(crate) ifindex: u32,
    unused_before_tstamp: [u32; 27],
    pub(crate) tstamp: u64,
    pub(crate) wire_len: u32,
    pub(crate) gso_segs: u32,
    unused_sk: u64,
    pub(crate) gso_size: u32,
    unused_tstamp_type: u32,
    unused_hwtstamp: u64,
}

const _: () = assert!(size_of::<Context>() == 192);

#[repr(C)]
#[derive(Default)]
struct TestRun {
    program: u32,
    returned: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    reserved: u32,
}

/// What a program made of a frame.
#[derive(Clone, Debug)]
pub(crate) struct Ran {
    pub(crate) returned: i32,
    pub(crate) frame: Vec<u8>,
    pub(crate) context: Context,
}

/// Runs a program of tc on a frame.
pub(crate) fn test_run(
    program: BorrowedFd<'_>,
    frame: &[u8],
    context: &Context,
) -> io::Result<Ran> {
    run(program, frame, Some(context))
}

/// Runs a program of XDP on a frame, as from the loopback interface.
pub(crate) fn test_run_xdp(program: BorrowedFd<'_>, frame: &[u8]) -> io::Result<Ran> {
    run(program, frame, None)
}

fn run(program: BorrowedFd<'_>, frame: &[u8], context: Option<&Context>) -> io::Result<Ran> {
    let mut out = vec![0; frame.len() + 256];
    let mut after = Context::default();
    let size = context.map_or(0, |_| size_of::<Context>() as u32);
    let address = |there: u64| if context.is_some() { there } else { 0 };
    let mut attributes = TestRun {
        program: program.as_raw_fd().cast_unsigned(),
        data_size_in: frame.len() as u32,
        data_size_out: out.len() as u32,
        data_in: frame.as_ptr().addr() as u64,
        data_out: out.as_mut_ptr().addr() as u64,
        repeat: 1,
        ctx_size_in: size,
        ctx_size_out: size,
        ctx_in: context.map_or(0, |context| std::ptr::from_ref(context).addr() as u64),
        ctx_out: address(std::ptr::from_mut(&mut after).addr() as u64),
        ..TestRun::default()
    };
    bpf(PROG_TEST_RUN, &mut attributes)?;
    out.truncate(attributes.data_size_out as usize);
    Ok(Ran {
        returned: attributes.returned.cast_signed(),
        frame: out,
        context: after,
    })
}

/// `CLOCK_MONOTONIC` in nanoseconds.
pub(crate) fn now() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a place for one timespec.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    assert_eq!(result, 0, "every kernel has this clock");
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}
