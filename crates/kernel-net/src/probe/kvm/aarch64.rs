//! A processor of ARM, as it begins after a reset: what it runs and what it says.

use std::{io, os::fd::OwnedFd};

use super::{
    Kvm,
    machine::{MAGIC, Mapping, Run, with},
};

const KVM_SET_ONE_REG: libc::Ioctl = 0x4010_aeac;
const KVM_ARM_VCPU_INIT: libc::Ioctl = 0x4020_aeae;
const KVM_ARM_PREFERRED_TARGET: libc::Ioctl = 0x8020_aeaf;
const KVM_EXIT_MMIO: u32 = 6;
/// `KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE | KVM_REG_ARM_CORE_REG(regs.pc)`.
const PROGRAM_COUNTER: u64 = 0x6030_0000_0010_0040;

/// Where the code lies in the guest's memory: a page of any size may begin there.
pub(super) const CODE_ADDRESS: u64 = 0x10_0000;
/// Where there is no memory, so that a store there is told to us.
const DEVICE: u64 = 0x1000_0000;
/// `movz x0, #0x1000, lsl #16; movz w1, #MAGIC; strb w1, [x0]; b .`: the last one is never come to.
pub(super) const CODE: [u8; 16] = [
    0x00, 0x00, 0xa2, 0xd2, //
    0x41, 0x05, 0x80, 0x52, //
    0x01, 0x00, 0x00, 0x39, //
    0x00, 0x00, 0x00, 0x14,
];
const _: () = assert!(MAGIC == 42, "the second instruction has it");

/// `struct kvm_vcpu_init`.
#[repr(C)]
struct Target {
    target: u32,
    features: [u32; 7],
}

/// `struct kvm_one_reg`.
#[repr(C)]
struct Register {
    id: u64,
    address: u64,
}

/// Has the processor be of the machine's own kind, and points it at the code.
pub(super) fn prepare(machine: &OwnedFd, processor: &OwnedFd) -> io::Result<()> {
    let mut target = Target {
        target: 0,
        features: [0; 7],
    };
    // SAFETY: the structure has the size that the request's number states.
    unsafe { with(machine, KVM_ARM_PREFERRED_TARGET, &raw mut target) }?;
    // SAFETY: as above; the kernel only reads it.
    unsafe { with(processor, KVM_ARM_VCPU_INIT, &raw mut target) }?;
    let counter = CODE_ADDRESS;
    let mut register = Register {
        id: PROGRAM_COUNTER,
        address: (&raw const counter).addr() as u64,
    };
    // SAFETY: as above; the address is that of a register's eight bytes, which live for the call.
    unsafe { with(processor, KVM_SET_ONE_REG, &raw mut register) }
}

/// What an exit means: the code speaks once, by a store to where no memory is.
pub(super) fn hear(run: &Run, _: &Mapping, _: &mut bool) -> Option<Kvm> {
    // The union's member for such stores: address, eight bytes, their number, whether it was a store.
    let address = u64::from_ne_bytes(*run.exit.first_chunk()?);
    let (data, is_write) = (run.exit[8], run.exit[20]);
    let store = (address, data, is_write);
    Some(match run.exit_reason {
        KVM_EXIT_MMIO if store == (DEVICE, MAGIC, 1) => Kvm::Runs,
        other => Kvm::Stops(other),
    })
}
