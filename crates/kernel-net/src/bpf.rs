//! `bpf(2)`: the call itself, for who has commands of their own, and what everybody does with small programs.
//!
//! A program here is a few instructions that are written as such; those of a data path come compiled, and are not
//! loaded here. What is attached by a link stays so until the link's last descriptor is closed, unless it is pinned.
//!
//! Errors are the kernel's own: callers know what they were about to do.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

mod entries;

use crate::interface::InterfaceIndex;
pub use entries::{entries, entries_as_bytes};

/// What a program is run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramType {
    /// Packets at a hook of tc.
    Classifier,
    /// Frames as the driver, or the stack in its place, has them.
    Xdp,
}

/// Attach type of native and generic XDP.
pub const BPF_XDP: u32 = 37;
/// Attach type of TCX on the way in.
pub const BPF_TCX_INGRESS: u32 = 46;
/// Attach type of TCX on the way out.
pub const BPF_TCX_EGRESS: u32 = 47;
/// Flag of an XDP link: behind the driver, with any driver.
pub const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
/// Flag of an XDP link: in the driver, not behind it.
pub const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
/// Flag of an update: only if there is no entry of that key.
pub const BPF_NOEXIST: u64 = 1;

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_LINK_UPDATE: libc::c_long = 29;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_PROG_TYPE_XDP: u32 = 6;

/// The part of `union bpf_attr` for loading a program, up to the last field that we set.
#[repr(C)]
#[derive(Default)]
struct Load {
    program_type: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buffer: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; NAME_BYTES],
    interface: u32,
    attach_type: u32,
}

/// The part of `union bpf_attr` for making a link.
#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    program: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
    more: [u64; 2],
}

/// The part of `union bpf_attr` for what is pinned.
#[repr(C)]
#[derive(Default)]
struct Object {
    path: u64,
    descriptor: u32,
    flags: u32,
}

/// The part of `union bpf_attr` for exchanging a link's program.
#[repr(C)]
#[derive(Default)]
struct LinkUpdate {
    link: u32,
    program: u32,
    flags: u32,
    old: u32,
}

/// Bytes of a name, with the zero that ends it.
const NAME_BYTES: usize = 16;

/// `bpf(2)`; what it returns.
///
/// # Errors
/// The kernel refuses.
///
/// # Safety
/// `T` is the start of `union bpf_attr` as the command reads it, and addresses in it are valid for what the command
/// does with them.
pub unsafe fn call<T>(command: libc::c_long, attributes: &mut T) -> io::Result<i64> {
    // SAFETY: by the caller's promise the kernel reads and writes only what it may.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attributes),
            size_of::<T>(),
        )
    };
    if answer < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(answer)
    }
}

/// Like [`call`], for commands that give a descriptor.
///
/// # Errors
/// As of [`call`].
///
/// # Safety
/// As of [`call`]; and the command does give a descriptor.
pub unsafe fn call_for_descriptor<T>(
    command: libc::c_long,
    attributes: &mut T,
) -> io::Result<OwnedFd> {
    // SAFETY: the caller's promise.
    let answer = unsafe { call(command, attributes) }?;
    let descriptor = i32::try_from(answer).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// One instruction (`struct bpf_insn`): its code, two registers, an offset and an immediate value.
#[must_use]
pub fn instruction(code: u8, to: u8, from: u8, offset: i16, immediate: i32) -> [u8; 8] {
    // The registers are bit fields, which go the way that the machine's bytes go.
    let registers = if cfg!(target_endian = "little") {
        from << 4 | to
    } else {
        to << 4 | from
    };
    let ([o0, o1], [i0, i1, i2, i3]) = (offset.to_ne_bytes(), immediate.to_ne_bytes());
    [code, registers, o0, o1, i0, i1, i2, i3]
}

/// Loads a program. Tools show the first 15 bytes of its name: letters, digits, `_` and `.`.
///
/// # Errors
/// The kernel has no BPF, refuses it to this process, or finds the program unsafe.
pub fn load(
    program_type: ProgramType,
    name: &str,
    instructions: &[[u8; 8]],
) -> io::Result<OwnedFd> {
    let (program_type, attach_type) = match program_type {
        ProgramType::Classifier => (BPF_PROG_TYPE_SCHED_CLS, 0),
        ProgramType::Xdp => (BPF_PROG_TYPE_XDP, BPF_XDP),
    };
    let mut load = Load {
        program_type,
        instruction_count: u32::try_from(instructions.len()).map_err(io::Error::other)?,
        instructions: instructions.as_ptr().addr() as u64,
        license: c"Dual MIT/GPL".as_ptr().addr() as u64,
        attach_type,
        ..Load::default()
    };
    let shown = name.len().min(NAME_BYTES - 1);
    load.name[..shown].copy_from_slice(&name.as_bytes()[..shown]);
    // SAFETY: instructions and licence live until the call returns, and the layout is the kernel's.
    unsafe { call_for_descriptor(BPF_PROG_LOAD, &mut load) }
}

/// Attaches a program to an interface for as long as the link lives.
///
/// # Errors
/// The kernel has no such hook on this interface, or it is taken.
pub fn create_link(
    program: BorrowedFd<'_>,
    interface: InterfaceIndex,
    attach_type: u32,
    flags: u32,
) -> io::Result<OwnedFd> {
    attach(program, interface.0, attach_type, flags)
}

/// Attaches a program to a cgroup, beside those of others, or to a network namespace, for as long as the link lives.
///
/// # Errors
/// The kernel has no such hook, or refuses.
pub fn create_link_on(
    program: BorrowedFd<'_>,
    target: BorrowedFd<'_>,
    attach_type: u32,
) -> io::Result<OwnedFd> {
    attach(program, target.as_raw_fd().cast_unsigned(), attach_type, 0)
}

fn attach(
    program: BorrowedFd<'_>,
    target: u32,
    attach_type: u32,
    flags: u32,
) -> io::Result<OwnedFd> {
    let mut create = LinkCreate {
        program: program.as_raw_fd().cast_unsigned(),
        target,
        attach_type,
        flags,
        ..LinkCreate::default()
    };
    // SAFETY: the structure holds no addresses, and the layout is the kernel's.
    unsafe { call_for_descriptor(BPF_LINK_CREATE, &mut create) }
}

/// Pins a program, map or link where nothing is yet.
///
/// # Errors
/// There is something, the kernel refuses, or the path has a zero in it.
pub fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut pinned = Object {
        path: path.as_ptr().addr() as u64,
        descriptor: object.as_raw_fd().cast_unsigned(),
        ..Object::default()
    };
    // SAFETY: the path ends with a zero and outlives the call.
    unsafe { call(BPF_OBJ_PIN, &mut pinned) }.map(drop)
}

/// Opens the program, map or link that is pinned there. `None` if nothing is.
///
/// # Errors
/// The kernel refuses, or the path has a zero in it.
pub fn open_pin(path: &Path) -> io::Result<Option<OwnedFd>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut object = Object {
        path: path.as_ptr().addr() as u64,
        ..Object::default()
    };
    // SAFETY: the path ends with a zero and outlives the call.
    match unsafe { call_for_descriptor(BPF_OBJ_GET, &mut object) } {
        Ok(descriptor) => Ok(Some(descriptor)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Puts another program in a link's place: every packet and call sees the one or the other.
///
/// # Errors
/// The program is of another kind than the link's, or what it was attached to is gone (`ENOLINK`).
pub fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut update = LinkUpdate {
        link: link.as_raw_fd().cast_unsigned(),
        program: program.as_raw_fd().cast_unsigned(),
        ..LinkUpdate::default()
    };
    // SAFETY: the structure holds no addresses, and the layout is the kernel's.
    unsafe { call(BPF_LINK_UPDATE, &mut update) }.map(drop)
}
