//! A virtual machine of one page and one processor, of any architecture.

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr::NonNull,
};

use super::{
    Kvm,
    architecture::{self, CODE, CODE_ADDRESS},
};
use crate::Error;

const KVM_GET_API_VERSION: libc::Ioctl = 0xae00;
const KVM_CREATE_VM: libc::Ioctl = 0xae01;
const KVM_GET_VCPU_MMAP_SIZE: libc::Ioctl = 0xae04;
const KVM_CREATE_VCPU: libc::Ioctl = 0xae41;
const KVM_RUN: libc::Ioctl = 0xae80;
const KVM_SET_USER_MEMORY_REGION: libc::Ioctl = 0x4020_ae46;
const API_VERSION: i32 = 12;

/// What the code says.
pub(super) const MAGIC: u8 = 42;

#[repr(C)]
struct MemoryRegion {
    slot: u32,
    flags: u32,
    guest_address: u64,
    length: u64,
    host_address: u64,
}

/// The start of `struct kvm_run`, up to the union of what there is to be said of an exit.
#[repr(C)]
pub(super) struct Run {
    requests: [u8; 8],
    pub(super) exit_reason: u32,
    state: [u8; 20],
    pub(super) exit: [u8; 24],
}

/// Memory that belongs to a mapping of ours.
pub(super) struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

impl Mapping {
    fn new(length: usize, file: Option<&OwnedFd>) -> io::Result<Self> {
        let (flags, descriptor) = match file {
            Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                descriptor,
                0,
            )
        };
        match NonNull::new(start.cast::<u8>()) {
            Some(start) if start.as_ptr() != libc::MAP_FAILED.cast() => Ok(Self { start, length }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The byte at an offset, if the mapping has it.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn byte(&self, offset: u64) -> Option<u8> {
        let offset = usize::try_from(offset)
            .ok()
            .filter(|at| *at < self.length)?;
        // SAFETY: the offset was checked to be inside the mapping.
        Some(unsafe { self.start.add(offset).read() })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `start` and `length` are those of a mapping that only this value knows.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// See [`super::run`].
pub(super) fn run() -> Result<Kvm, Error> {
    let failed = |operation: &'static str| {
        move |source: io::Error| Error::system(operation, "/dev/kvm", source)
    };
    let kvm = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map_err(failed("open"))?;
    if number(&kvm, KVM_GET_API_VERSION, 0).map_err(failed("ask the version of"))? != API_VERSION {
        let source = io::Error::from(io::ErrorKind::Unsupported);
        return Err(failed("understand the version of")(source));
    }
    // Dropped last: the machine refers to it.
    let memory = code().map_err(failed("map memory for"))?;
    let machine = descriptor(&kvm, KVM_CREATE_VM).map_err(failed("create a machine with"))?;
    lend(&machine, &memory).map_err(failed("give memory to a machine of"))?;
    let processor =
        descriptor(&machine, KVM_CREATE_VCPU).map_err(failed("create a processor with"))?;
    let shared = shared(&kvm, &processor).map_err(failed("map a processor of"))?;
    architecture::prepare(&machine, &processor)
        .map_err(failed("set registers of a processor of"))?;
    execute(&processor, &shared).map_err(failed("run a processor of"))
}

/// A page with the code at its start.
fn code() -> io::Result<Mapping> {
    let memory = Mapping::new(rustix::param::page_size(), None)?;
    // SAFETY: the mapping is longer than the code and nobody else refers to it.
    unsafe { std::ptr::copy_nonoverlapping(CODE.as_ptr(), memory.start.as_ptr(), CODE.len()) };
    Ok(memory)
}

fn lend(machine: &OwnedFd, memory: &Mapping) -> io::Result<()> {
    let mut region = MemoryRegion {
        slot: 0,
        flags: 0,
        guest_address: CODE_ADDRESS,
        length: memory.length as u64,
        host_address: memory.start.as_ptr().addr() as u64,
    };
    // SAFETY: the structure is the kernel's, and the caller drops the memory after the machine.
    unsafe { with(machine, KVM_SET_USER_MEMORY_REGION, &raw mut region) }
}

/// What the kernel tells of a processor's exits.
fn shared(kvm: &File, processor: &OwnedFd) -> io::Result<Mapping> {
    let length = number(kvm, KVM_GET_VCPU_MMAP_SIZE, 0)?;
    let length = usize::try_from(length).unwrap_or(0).max(size_of::<Run>());
    Mapping::new(length, Some(processor))
}

fn execute(processor: &OwnedFd, shared: &Mapping) -> io::Result<Kvm> {
    let mut has_spoken = false;
    let mut reason = 0;
    // Two exits are due; an interrupted one may come between.
    for _ in 0..8 {
        match number(processor, KVM_RUN, 0) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        // SAFETY: the mapping is at least as long as `Run`, page-aligned, and the kernel writes it only
        // during KVM_RUN, which has returned.
        let run = unsafe { shared.start.cast::<Run>().read() };
        reason = run.exit_reason;
        if let Some(verdict) = architecture::hear(&run, shared, &mut has_spoken) {
            return Ok(verdict);
        }
    }
    Ok(Kvm::Stops(reason))
}

/// A request that takes and gives a number.
fn number(file: &impl AsRawFd, request: libc::Ioctl, argument: libc::c_ulong) -> io::Result<i32> {
    // SAFETY: the requests that come here take a plain number, no address.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), request, argument) };
    if answer < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(answer)
    }
}

/// A request that gives a file descriptor.
fn descriptor(file: &impl AsRawFd, request: libc::Ioctl) -> io::Result<OwnedFd> {
    let descriptor = number(file, request, 0)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// A request that takes the address of a structure.
///
/// # Safety
/// `T` has the layout that the request's number stands for.
pub(super) unsafe fn with<T>(
    file: &impl AsRawFd,
    request: libc::Ioctl,
    structure: *mut T,
) -> io::Result<()> {
    // SAFETY: by the caller's promise the kernel reads and writes inside the structure only.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), request, structure) };
    if answer < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
