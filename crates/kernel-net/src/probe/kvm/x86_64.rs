//! A processor of x86 in real mode: what it runs, how it begins, and what it says.

use std::{io, os::fd::OwnedFd};

use super::{
    Kvm,
    machine::{MAGIC, Mapping, Run, with},
};

const KVM_SET_REGS: libc::Ioctl = 0x4090_ae82;
const KVM_GET_SREGS: libc::Ioctl = 0x8138_ae83;
const KVM_SET_SREGS: libc::Ioctl = 0x4138_ae84;
const KVM_EXIT_IO: u32 = 2;
const KVM_EXIT_HLT: u32 = 5;

/// Where the code lies in the guest's memory.
pub(super) const CODE_ADDRESS: u64 = 0x1000;
const PORT: u8 = 0x10;
/// `mov al, MAGIC; out PORT, al; hlt`.
pub(super) const CODE: [u8; 5] = [0xb0, MAGIC, 0xe6, PORT, 0xf4];

/// `struct kvm_regs`: sixteen general registers, the instruction pointer and the flags.
#[repr(C)]
struct Registers([u64; 18]);

/// `struct kvm_sregs`, of which we touch the code segment only: base at 0, selector at 12.
#[repr(C, align(8))]
struct SpecialRegisters([u8; 0x138]);

/// Points the processor, in real mode, at the code.
pub(super) fn prepare(_: &OwnedFd, processor: &OwnedFd) -> io::Result<()> {
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
    unsafe { with(processor, KVM_SET_REGS, &raw mut registers) }
}

/// What an exit means, if that is all: the code speaks by a port, and then halts.
pub(super) fn hear(run: &Run, shared: &Mapping, has_spoken: &mut bool) -> Option<Kvm> {
    match run.exit_reason {
        KVM_EXIT_IO => {
            // The union's member for port I/O: direction, size, port, count, and where the data is.
            let [_, _, low, high, _, _, _, _, offset @ ..] = run.exit;
            let offset = u64::from_ne_bytes(*offset.first_chunk()?);
            let port = u16::from_ne_bytes([low, high]);
            match shared.byte(offset) {
                Some(data) if port == u16::from(PORT) => *has_spoken = data == MAGIC,
                _ => return Some(Kvm::Stops(KVM_EXIT_IO)),
            }
            None
        }
        KVM_EXIT_HLT if *has_spoken => Some(Kvm::Runs),
        other => Some(Kvm::Stops(other)),
    }
}
