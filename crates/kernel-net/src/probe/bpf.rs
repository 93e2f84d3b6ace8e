//! Whether BPF programs load, and attach where sandwire would attach them.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use crate::{Error, interface::InterfaceIndex};

/// Where a program attaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// tc ingress by a TCX link (Linux 6.6 and later).
    Tcx,
    /// The driver's own receive path.
    NativeXdp,
}

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
const BPF_TCX_INGRESS: u32 = 46;
const XDP_FLAGS_DRV_MODE: u32 = 4;
const XDP_PASS: u8 = 2;

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
    name: [u8; 16],
    interface: u32,
    expected_attach_type: u32,
}

/// The part of `union bpf_attr` for making a link.
#[repr(C)]
struct LinkCreate {
    program: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
    more: [u64; 2],
}

/// A loaded program that lets every packet pass.
#[derive(Debug)]
pub struct Program {
    descriptor: OwnedFd,
    hook: Hook,
}

impl Program {
    /// Loads the program for a hook.
    ///
    /// # Errors
    /// The kernel has no BPF, or refuses it to this process.
    pub fn load(hook: Hook) -> Result<Self, Error> {
        let (program_type, attach_type, verdict) = match hook {
            Hook::Tcx => (BPF_PROG_TYPE_SCHED_CLS, 0, 0),
            Hook::NativeXdp => (BPF_PROG_TYPE_XDP, BPF_XDP, XDP_PASS),
        };
        // r0 = verdict; exit
        let instructions: [[u8; 8]; 2] = [
            [0xb7, 0, 0, 0, verdict, 0, 0, 0],
            [0x95, 0, 0, 0, 0, 0, 0, 0],
        ];
        let mut load = Load {
            program_type,
            instruction_count: 2,
            instructions: instructions.as_ptr().addr() as u64,
            license: c"GPL".as_ptr().addr() as u64,
            expected_attach_type: attach_type,
            ..Load::default()
        };
        // SAFETY: instructions and licence live until the call returns, and the layout is the kernel's.
        let descriptor = unsafe { call(BPF_PROG_LOAD, &mut load) }
            .map_err(|source| Error::system("load", "BPF program", source))?;
        Ok(Self { descriptor, hook })
    }

    /// The loaded program, for attaching by other means.
    #[must_use]
    pub fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    /// Attaches it to an interface until the answer is dropped.
    ///
    /// # Errors
    /// The kernel has no such hook on this interface.
    pub fn attach(&self, interface: InterfaceIndex) -> Result<OwnedFd, Error> {
        let (attach_type, flags) = match self.hook {
            Hook::Tcx => (BPF_TCX_INGRESS, 0),
            Hook::NativeXdp => (BPF_XDP, XDP_FLAGS_DRV_MODE),
        };
        let mut link = LinkCreate {
            program: self.descriptor.as_raw_fd().cast_unsigned(),
            target: interface.0,
            attach_type,
            flags,
            more: [0; 2],
        };
        // SAFETY: the structure holds no addresses, and the layout is the kernel's.
        unsafe { call(BPF_LINK_CREATE, &mut link) }.map_err(|source| {
            Error::system(
                "attach BPF program to",
                format!("interface {interface}"),
                source,
            )
        })
    }
}

/// `bpf(2)`, for commands that give a file descriptor.
///
/// # Safety
/// `T` is the start of `union bpf_attr` as the command reads it, and addresses in it are valid.
unsafe fn call<T>(command: libc::c_long, attributes: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: by the caller's promise the kernel reads and writes inside the structure only.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attributes),
            size_of::<T>(),
        )
    };
    match i32::try_from(answer) {
        // SAFETY: the kernel has just made this descriptor for us.
        Ok(descriptor) if descriptor >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        _ => Err(io::Error::last_os_error()),
    }
}
