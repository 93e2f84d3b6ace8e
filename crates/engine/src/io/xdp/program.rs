//! The BPF program that hands an interface's frames to sockets, and how it gets there.
//!
//! A frame goes to the socket of the queue that it came by, and where a queue has none, on to the stack. The program
//! is five instructions, so it is written here as such, and loading it needs no library.

#![allow(unsafe_code, reason = "bpf(2) takes addresses")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use sandwire_kernel_net::bpf::{
    self, BPF_NOEXIST, BPF_XDP, ProgramType, XDP_FLAGS_DRV_MODE, XDP_FLAGS_SKB_MODE, instruction,
};
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
        let program = bpf::load(
            ProgramType::Xdp,
            "sandwire_xsk",
            &instructions(sockets.as_raw_fd()),
        )
        .map_err(|error| ("load the XDP program", error))?;
        let mode = match mode {
            XdpMode::Native => XDP_FLAGS_DRV_MODE,
            XdpMode::Generic => XDP_FLAGS_SKB_MODE,
        };
        let attachment = bpf::create_link(program.as_fd(), interface, BPF_XDP, mode)
            .map_err(|error| ("attach the XDP program", error))?;
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
        unsafe { bpf::call(BPF_MAP_UPDATE_ELEM, &mut update) }.map(drop)
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
    unsafe { bpf::call_for_descriptor(BPF_MAP_CREATE, &mut create) }
}

/// `return bpf_redirect_map(&sockets, context->rx_queue_index, XDP_PASS);`, where the flags are the verdict on a frame
/// that has no socket.
fn instructions(sockets: i32) -> [[u8; 8]; 6] {
    /// Offset of `rx_queue_index` in `struct xdp_md`.
    const QUEUE: i16 = 16;
    const XDP_PASS: i32 = 2;
    const BPF_FUNC_REDIRECT_MAP: i32 = 51;
    const BPF_PSEUDO_MAP_FD: u8 = 1;
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

const BPF_MAP_CREATE: libc::c_long = 0;
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_MAP_TYPE_XSKMAP: u32 = 17;
