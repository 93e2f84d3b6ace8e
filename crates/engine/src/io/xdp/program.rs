//! The BPF program that hands an interface's frames to sockets, and how it gets there.
//!
//! A frame goes to the socket of the queue that it came by, and where a queue has none, on to the stack. The program
//! is five instructions, so it is written here as such, and loading it needs no library.

#![allow(unsafe_code, reason = "bpf(2) takes addresses")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use sandwire_kernel_net::interface::InterfaceIndex;

/// Where the kernel runs the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XdpMode {
    /// In the driver, before there is a socket buffer.
    Native,
    /// In the stack, with any driver.
    Generic,
}

/// The program, attached as long as this lives, and at most as long as the process.
#[derive(Debug)]
pub(super) struct Program {
    sockets: OwnedFd,
    /// The BPF link.
    _attachment: OwnedFd,
}

impl Program {
    /// Attaches the program to an interface of the thread's namespace. Frames go to the stack until there are sockets.
    pub(super) fn attach(
        interface: InterfaceIndex,
        queues: u32,
        mode: XdpMode,
    ) -> Result<Self, (&'static str, io::Error)> {
        let sockets = make_map(queues).map_err(|error| ("make a map of sockets", error))?;
        let program = load(&sockets).map_err(|error| ("load the XDP program", error))?;
        let attachment =
            link(&program, interface, mode).map_err(|error| ("attach the XDP program", error))?;
        Ok(Self {
            sockets,
            _attachment: attachment,
        })
    }

    /// From now on frames of the queue go to this socket, until it is closed.
    pub(super) fn serve(&self, queue: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
        let value = socket.as_raw_fd();
        let mut update = MapUpdate {
            map: self.sockets.as_raw_fd().cast_unsigned(),
            padding: 0,
            key: (&raw const queue).addr() as u64,
            value: (&raw const value).addr() as u64,
            flags: BPF_NOEXIST,
        };
        // SAFETY: key and value live until the call returns, and have the sizes that the map was made with.
        unsafe { bpf(BPF_MAP_UPDATE_ELEM, &mut update) }.map(drop)
    }
}

fn make_map(queues: u32) -> io::Result<OwnedFd> {
    let mut create = MapCreate {
        kind: BPF_MAP_TYPE_XSKMAP,
        key_bytes: 4,
        value_bytes: 4,
        entries_max: queues,
        flags: 0,
    };
    // SAFETY: the structure holds no addresses.
    let descriptor = unsafe { bpf(BPF_MAP_CREATE, &mut create) }?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn load(sockets: &OwnedFd) -> io::Result<OwnedFd> {
    let instructions = instructions(sockets.as_raw_fd());
    let mut load = Load {
        kind: BPF_PROG_TYPE_XDP,
        instruction_count: INSTRUCTIONS,
        instructions: instructions.as_ptr().addr() as u64,
        license: c"Dual MIT/GPL".as_ptr().addr() as u64,
        log_level: 0,
        log_bytes: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
        name: *b"sandwire_xsk\0\0\0\0",
        interface: 0,
        attach_type: BPF_XDP,
    };
    // SAFETY: instructions and licence live until the call returns.
    let descriptor = unsafe { bpf(BPF_PROG_LOAD, &mut load) }?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn link(program: &OwnedFd, interface: InterfaceIndex, mode: XdpMode) -> io::Result<OwnedFd> {
    let mut create = LinkCreate {
        program: program.as_raw_fd().cast_unsigned(),
        target: interface.0,
        attach_type: BPF_XDP,
        flags: match mode {
            XdpMode::Native => XDP_FLAGS_DRV_MODE,
            XdpMode::Generic => XDP_FLAGS_SKB_MODE,
        },
        more: [0; 2],
    };
    // SAFETY: the structure holds no addresses.
    let descriptor = unsafe { bpf(BPF_LINK_CREATE, &mut create) }?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

const INSTRUCTIONS: u32 = 6;

/// `return bpf_redirect_map(&sockets, context->rx_queue_index, XDP_PASS);`, where the flags are the verdict on a frame
/// that has no socket.
fn instructions(sockets: i32) -> [Instruction; INSTRUCTIONS as usize] {
    /// Offset of `rx_queue_index` in `struct xdp_md`.
    const QUEUE: i16 = 16;
    const XDP_PASS: i32 = 2;
    const BPF_FUNC_REDIRECT_MAP: i32 = 51;
    const BPF_PSEUDO_MAP_FD: u8 = 1;
    let instruction = |operation, destination: u8, source: u8, offset, immediate| Instruction {
        operation,
        registers: source << 4 | destination,
        offset,
        immediate,
    };
    [
        // r2 = *(u32 *)(r1 + QUEUE)
        instruction(0x61, 2, 1, QUEUE, 0),
        // r1 = map, an instruction of double width
        instruction(0x18, 1, BPF_PSEUDO_MAP_FD, 0, sockets),
        instruction(0, 0, 0, 0, 0),
        // r3 = XDP_PASS
        instruction(0xb7, 3, 0, 0, XDP_PASS),
        instruction(0x85, 0, 0, 0, BPF_FUNC_REDIRECT_MAP),
        // exit, with what the call returned
        instruction(0x95, 0, 0, 0, 0),
    ]
}

/// `bpf(2)`; what it returns.
///
/// # Safety
/// `T` is the start of `union bpf_attr` as the command reads it, and addresses in it are valid.
unsafe fn bpf<T>(command: libc::c_long, attributes: &mut T) -> io::Result<i32> {
    // SAFETY: by the caller's promise the kernel reads and writes only what is ours.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attributes),
            size_of::<T>(),
        )
    };
    match i32::try_from(answer) {
        Ok(answer) if answer >= 0 => Ok(answer),
        _ => Err(io::Error::last_os_error()),
    }
}

/// `struct bpf_insn`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    operation: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// `union bpf_attr` for making a map, up to the last field that we set, as are those that follow.
#[repr(C)]
struct MapCreate {
    kind: u32,
    key_bytes: u32,
    value_bytes: u32,
    entries_max: u32,
    flags: u32,
}

#[repr(C)]
struct MapUpdate {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct Load {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_bytes: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach_type: u32,
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
    more: [u64; 2],
}

const BPF_MAP_CREATE: libc::c_long = 0;
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_MAP_TYPE_XSKMAP: u32 = 17;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
const BPF_NOEXIST: u64 = 1;
const XDP_FLAGS_SKB_MODE: u32 = 2;
const XDP_FLAGS_DRV_MODE: u32 = 4;
