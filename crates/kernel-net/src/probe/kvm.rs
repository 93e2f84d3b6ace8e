//! Whether KVM runs code, as opposed to `/dev/kvm` being there.

use std::{
    fs::OpenOptions,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr::NonNull,
};

use crate::Error;

/// How far KVM goes on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kvm {
    /// A virtual processor ran code of ours and said so.
    Runs,
    /// A virtual processor was made, but its code ended otherwise, with this exit reason of KVM.
    Stops(u32),
}

const KVM_GET_API_VERSION: libc::Ioctl = 0xae00;
const KVM_CREATE_VM: libc::Ioctl = 0xae01;
const KVM_GET_VCPU_MMAP_SIZE: libc::Ioctl = 0xae04;
const KVM_CREATE_VCPU: libc::Ioctl = 0xae41;
const KVM_RUN: libc::Ioctl = 0xae80;
const KVM_SET_USER_MEMORY_REGION: libc::Ioctl = 0x4020_ae46;
const KVM_SET_REGS: libc::Ioctl = 0x4090_ae82;
const KVM_GET_SREGS: libc::Ioctl = 0x8138_ae83;
const KVM_SET_SREGS: libc::Ioctl = 0x4138_ae84;
const API_VERSION: i32 = 12;
const KVM_EXIT_IO: u32 = 2;
const KVM_EXIT_HLT: u32 = 5;

/// Where the code lies in the guest's memory.
const CODE_ADDRESS: u64 = 0x1000;
const MEMORY_LENGTH: usize = 0x1000;
const PORT: u8 = 0x10;
const MAGIC: u8 = 42;
/// In real mode: `mov al, MAGIC; out PORT, al; hlt`.
const CODE: [u8; 5] = [0xb0, MAGIC, 0xe6, PORT, 0xf4];

#[repr(C)]
struct MemoryRegion {
    slot: u32,
    flags: u32,
    guest_address: u64,
    length: u64,
    host_address: u64,
}

/// `struct kvm_regs`: sixteen general registers, the instruction pointer and the flags.
#[repr(C)]
struct Registers([u64; 18]);

/// `struct kvm_sregs`, of which we touch the code segment only: base at 0, selector at 12.
#[repr(C, align(8))]
struct SpecialRegisters([u8; 0x138]);

/// The start of `struct kvm_run`, with the union's member for port I/O.
#[repr(C)]
struct Run {
    requests: [u8; 8],
    exit_reason: u32,
    state: [u8; 20],
    direction: u8,
    size: u8,
    port: u16,
    count: u32,
    data_offset: u64,
}

/// Memory that belongs to a mapping of ours.
struct Mapping {
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
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `start` and `length` are those of a mapping that only this value knows.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// Runs a few instructions in a virtual machine of one page.
///
/// # Errors
/// There is no `/dev/kvm`, it may not be opened, or a step of making the machine fails.
#[cfg(target_arch = "x86_64")]
pub fn run() -> Result<Kvm, Error> {
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
    let memory = Mapping::new(MEMORY_LENGTH, None).map_err(failed("map memory for"))?;
    // SAFETY: the mapping is longer than the code and nobody else refers to it.
    unsafe { std::ptr::copy_nonoverlapping(CODE.as_ptr(), memory.start.as_ptr(), CODE.len()) };
    let machine = descriptor(&kvm, KVM_CREATE_VM).map_err(failed("create a machine with"))?;
    let region = MemoryRegion {
        slot: 0,
        flags: 0,
        guest_address: CODE_ADDRESS,
        length: MEMORY_LENGTH as u64,
        host_address: memory.start.as_ptr().addr() as u64,
    };
    // SAFETY: the structure is the kernel's, and the memory outlives the machine.
    unsafe {
        with(
            &machine,
            KVM_SET_USER_MEMORY_REGION,
            (&raw const region).cast_mut(),
        )
    }
    .map_err(failed("give memory to a machine of"))?;
    let processor =
        descriptor(&machine, KVM_CREATE_VCPU).map_err(failed("create a processor with"))?;
    let length = number(&kvm, KVM_GET_VCPU_MMAP_SIZE, 0)
        .map_err(failed("ask the size of a processor of"))?;
    let length = usize::try_from(length).unwrap_or(0).max(size_of::<Run>());
    let shared = Mapping::new(length, Some(&processor)).map_err(failed("map a processor of"))?;
    prepare(&processor).map_err(failed("set registers of a processor of"))?;
    execute(&processor, &shared).map_err(failed("run a processor of"))
}

/// Other architectures have other registers; nobody has written theirs down here.
///
/// # Errors
/// Always.
#[cfg(not(target_arch = "x86_64"))]
pub fn run() -> Result<Kvm, Error> {
    let source = io::Error::from(io::ErrorKind::Unsupported);
    Err(Error::system(
        "probe on this architecture",
        "/dev/kvm",
        source,
    ))
}

/// Points the processor, in real mode, at the code.
fn prepare(processor: &OwnedFd) -> io::Result<()> {
    let mut special = SpecialRegisters([0; 0x138]);
    // SAFETY: the structure has the size that the request's number states.
    unsafe { with(processor, KVM_GET_SREGS, &raw mut special) }?;
    special.0[..8].fill(0);
    special.0[12..14].fill(0);
    // SAFETY: as above; the kernel only reads it.
    unsafe { with(processor, KVM_SET_SREGS, &raw mut special) }?;
    let mut registers = Registers([0; 18]);
    registers.0[16] = CODE_ADDRESS;
    // Bit 1 of the flags is always set.
    registers.0[17] = 2;
    // SAFETY: as above.
    unsafe { with(processor, KVM_SET_REGS, &raw mut registers) }?;
    Ok(())
}

fn execute(processor: &OwnedFd, shared: &Mapping) -> io::Result<Kvm> {
    let mut has_spoken = false;
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
        match run.exit_reason {
            KVM_EXIT_IO => {
                let data = usize::try_from(run.data_offset).unwrap_or(usize::MAX);
                if run.port != u16::from(PORT) || data >= shared.length {
                    return Ok(Kvm::Stops(KVM_EXIT_IO));
                }
                // SAFETY: the offset was checked to be inside the mapping.
                has_spoken = unsafe { shared.start.add(data).read() } == MAGIC;
            }
            KVM_EXIT_HLT if has_spoken => return Ok(Kvm::Runs),
            other => return Ok(Kvm::Stops(other)),
        }
    }
    Ok(Kvm::Stops(KVM_EXIT_IO))
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
unsafe fn with<T>(file: &impl AsRawFd, request: libc::Ioctl, structure: *mut T) -> io::Result<()> {
    // SAFETY: by the caller's promise the kernel reads and writes inside the structure only.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), request, structure) };
    if answer < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
